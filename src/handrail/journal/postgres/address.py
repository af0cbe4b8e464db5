"""The address of a journal in PostgreSQL: the parsed URL, and the form in which it may be shown."""

from __future__ import annotations

import math
import re
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from handrail.errors import JournalError
from handrail.text.secrets import replace_secret

SCHEMES = ("postgresql://", "postgres://")
DEFAULT_SCHEMA = "handrail"
_OWN = ("schema", "lease")
"""The URL parameters that are Handrail's own. They are not passed to the driver."""
_ADVICE = "Write postgresql://USER@HOST/DATABASE, with the password in PGPASSWORD or ~/.pgpass."
_ADDRESS_LIKE = re.compile(r"^[A-Za-z][\w+.-]+:|(^|\s)\w+\s*=|:[^/]*@|://")
"""What a journal's address in a database may look like, although it is not a URL that Handrail knows: another scheme, `key=value`
pairs, or a password before a host."""

_held_password = ""
"""The value of `PGPASSWORD`, if a command has removed the variable from the environment."""
_held_urls: dict[str, str] = {}
"""URLs with passwords, by the URLs without them."""


def hold_password(password: str) -> None:
    """Use this password wherever libpq would read `PGPASSWORD`, which it does whenever it connects.

    For programs that remove the variable from their environment.
    """
    global _held_password
    _held_password = password


def hold_name(name: str) -> str:
    """Return a journal's name, without its passwords if it is a URL. `parse_url` adds them again, in this process.

    Raises `JournalError`, without the name, for a URL that can't be read, and for a name that may be meant as an address with
    a password. Nobody knows where its password stands, so it can't be removed.
    """
    if not is_url(name):
        if _ADDRESS_LIKE.search(name) or name != name.strip() or not name.isprintable():
            raise JournalError("…", "its name is neither a plain path nor a URL that can be read", _ADVICE)
        return name
    address = parse_url(name)
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ModuleNotFoundError:  # the journal can't be opened, and whoever opens it says so
        pass
    else:
        try:
            conninfo_to_dict(address.conninfo)
        except ProgrammingError:
            raise JournalError("postgresql://…", "its URL can't be read", _ADVICE) from None
    shown = address.shown
    _held_urls[shown] = name
    return shown


def with_password(url: str) -> str:
    """Return the URL of a database, with the password that `hold_password` was given if the URL has none."""
    parts = urlsplit(url)
    if not _held_password or parts.password or "password" in dict(parse_qsl(parts.query)):
        return url
    return f"{url}{'&' if parts.query else '?'}{urlencode({'password': _held_password}, quote_via=quote)}"


def is_url(text: object) -> bool:
    """Return whether a text is the URL of a journal in PostgreSQL, and not the path of a file."""
    return isinstance(text, str) and text.startswith(SCHEMES)


class Address(NamedTuple):
    """The location of a journal in PostgreSQL."""

    shown: str
    """The URL without its passwords, for messages and commands."""
    conninfo: str
    """The URL for the driver. It may contain passwords, so it is never shown."""
    schema: str
    secrets: tuple[str, ...]
    """The passwords in the URL: the user's, and the one for the client's key (`sslpassword`)."""
    lease: float | None = None
    """How many seconds a process keeps its runs after it last renewed its lease; None if the URL does not say."""

    def without_secret(self, text: str) -> str:
        """Return a message from the driver or the server, with `***` in place of each password."""
        spellings = {spelling for each in self.secrets for spelling in (each, quote(each, safe=""))}
        for each in sorted(spellings, key=len, reverse=True):  # one may be part of another
            text = replace_secret(text, each, "***")
        return text


def parse_url(url: str) -> Address:
    """Parse a journal's URL. Raises `JournalError` if the URL is invalid. The message does not contain the password."""
    url = _held_urls.get(url, url)
    try:
        url = with_password(url)
        parts = urlsplit(url)
        password = parts.password or ""
        options = parse_qsl(parts.query, keep_blank_values=True)
        _ = parts.port
    except ValueError:
        raise JournalError("postgresql://…", "its URL can't be read", _ADVICE) from None
    before, _, host = parts.netloc.rpartition("@")
    if "@" in f"{before}{parts.path}" or parts.fragment or any("@" in name for name, _ in options):
        # The password probably contains one of `/?#@`. Then the rest of it would be taken for another part of the URL, and shown.
        advice = "In the password, write '/', '?', '#' and '@' as %2F, %3F, %23 and %40."
        raise JournalError("postgresql://…", "its URL can't be read", advice)
    user = before.partition(":")[0]
    netloc = f"{user}@{host}" if user else host
    schema = dict(options).get("schema", DEFAULT_SCHEMA)
    secrets = [unquote(password), *(value for name, value in options if name in ("password", "sslpassword"))]
    public = [(name, value) for name, value in options if name not in ("password", "sslpassword")]
    shown = urlunsplit((parts.scheme, netloc, parts.path, urlencode(public, safe="/:"), ""))
    if netloc == "" and shown.startswith("postgresql:/") and not shown.startswith(SCHEMES):
        shown = shown.replace(":/", ":///", 1)  # `urlunsplit` drops an empty host
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema) or schema.startswith("pg_"):
        raise JournalError(
            shown,
            f"its schema {schema!r} is not a plain name",
            "Use at most 63 lower-case letters, digits and '_', and do not begin with a digit or 'pg_'.",
        )
    lease = _parse_lease(dict(options).get("lease"), shown)
    own = urlencode([each for each in options if each[0] not in _OWN], safe="/:", quote_via=quote)
    conninfo = urlunsplit((parts.scheme, parts.netloc, parts.path, own, ""))
    if not conninfo.startswith(SCHEMES):
        conninfo = conninfo.replace(":", "://", 1)
    return Address(shown, conninfo, schema, tuple(filter(None, secrets)), lease)


def _parse_lease(text: str | None, shown: str) -> float | None:
    """Parse the length of a lease: a number of seconds above 0, such as `2`, `0.5` or `2s`.

    Returns None if `text` is None. Raises `JournalError` for any other text.
    """
    if text is None:
        return None
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not (math.isfinite(seconds) and seconds > 0):
        raise JournalError(
            shown,
            f"its lease {text!r} is not a finite number of seconds above 0",
            "Write one, such as lease=30.",
        )
    return seconds
