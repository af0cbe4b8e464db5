"""How threads are named in a journal, so that nobody can name another's."""

from __future__ import annotations

import re

from handrail.errors import ThreadNameRefused

ID = re.compile(r"[A-Za-z0-9._:~-]{1,128}")
"""What threads, and the legs of AG-UI clients, may be called."""
ID_IN_WORDS = "1 to 128 letters, digits and . _ : ~ -"
LONGEST_PRINCIPAL = 256


def session_id_of(principal: str, thread_id: str) -> str:
    """The session of a principal's thread; `ThreadNameRefused` for what can't be a name of either.

    An id has no slash, so the last one parts it from the principal, whatever that has in it: two pairs
    never have the same session.
    """
    if not ID.fullmatch(thread_id):
        raise ThreadNameRefused(thread_id[:256], "its id is no id", f"Give {ID_IN_WORDS}")
    if not principal or len(principal) > LONGEST_PRINCIPAL or not principal.isprintable():
        raise ThreadNameRefused(
            thread_id,
            f"{principal[:LONGEST_PRINCIPAL]!r} is no name of a principal",
            f"Let `authenticate` give 1 to {LONGEST_PRINCIPAL} printable characters.",
        )
    return f"{principal}/{thread_id}"


def named_by(session_id: str) -> tuple[str, str] | None:
    """The principal and the thread that a session is of; None where it is no thread's."""
    principal, _, thread_id = session_id.rpartition("/")
    try:
        return (principal, thread_id) if session_id_of(principal, thread_id) == session_id else None
    except ThreadNameRefused:
        return None
