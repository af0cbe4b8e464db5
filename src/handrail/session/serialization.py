"""Sessions as versioned JSON. A session can be loaded only if the types of all its slices are known."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

import msgspec
import pydantic_core
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from handrail.errors import Conflict, EventRefused, SessionError
from handrail.ids import NewId, random_id
from handrail.protocols import RunMode
from handrail.schema.problems import describe_kind, write_path
from handrail.session.fork import SessionFork
from handrail.session.session import Session
from handrail.session.slices import SliceKind, SliceRules, is_kind, kind_named, name_of, remember, rules_of

VERSION = 1

T = TypeVar("T")


class SavedError(Exception):
    """A stand-in for the exception in a loaded fact, with the exception's type and message as text.

    It is never raised.
    """


class _SavedSlice(msgspec.Struct):
    kind: SliceKind
    keyed: bool
    items: list[msgspec.Raw]


class _Saved(msgspec.Struct):
    version: Literal[1]
    id: str
    principal: str
    config: dict[str, Any]
    slices: dict[str, _SavedSlice]
    run_mode: RunMode | None = None


class _Version(msgspec.Struct):
    version: Any = None
    id: Any = None


def save(session: Session) -> bytes:
    """Return the session as JSON, including its slices and logs. A pydantic secret is saved as asterisks.

    Raises `SessionError` if an item or the config can't be saved, or if two types have the same name.
    """
    with session.lock:
        kept: dict[type, Any] = {**session.state, **session.logs()}
    slices: dict[str, _SavedSlice] = {}
    for kind, contents in kept.items():
        name = name_of(kind)
        if name in slices:
            raise SessionError(session.id, f"it contains two types named {name}", "Rename one of them.")
        rules = session.rules_for(kind)
        items = [msgspec.Raw(_encoded(item, session.id)) for item in contents.all()]
        slices[name] = _SavedSlice(rules.kind, rules.key is not None, items)
    try:
        config: Any = msgspec.Raw(_json(dict(session.config)))
    except (ValueError, TypeError) as error:
        raise SessionError(session.id, f"its config can't be saved: {error}", "Use plain data.") from None
    return msgspec.json.encode(
        _Saved(VERSION, session.id, session.principal, config, slices, session.run_mode)
    )


def load(
    data: str | bytes,
    *,
    types: Iterable[type] = (),
    slices: Mapping[type, SliceRules] | None = None,
    new_id: NewId = random_id,
) -> Session:
    """Load a saved session. `types` are the types of its slices. Handrail's own types, and those in `slices`, can be left out.

    Raises `SessionError` if the data is damaged or has a different version, if a type is unknown, or if an item no longer
    matches its type. Also raises it if the kind of a slice, or whether it has a key, has changed since it was saved.
    """
    saved = _read(data)
    own = (kind_named(name) for name in saved.slices if name.startswith("handrail."))
    known = {name_of(kind): kind for kind in (*filter(None, own), *types, *(slices or {}))}
    unknown = sorted(set(saved.slices) - set(known))
    if unknown:
        raise SessionError(
            saved.id,
            f"it contains the unknown types {', '.join(unknown)}",
            "Pass them: load(data, types=[...]). Before you resume a run, import their modules.",
        )
    session = Session(
        id=saved.id,
        principal=saved.principal,
        config=saved.config,
        slices=slices,
        run_mode=saved.run_mode,
        new_id=new_id,
    )
    for name, contents in saved.slices.items():
        kind = known[name]
        _check_kept_alike(session, kind, contents)
        session.load_slice(kind, [_decoded(kind, bytes(item), saved.id) for item in contents.items])
    return session


class _Item(msgspec.Struct, frozen=True):
    type: str
    item: msgspec.Raw


def encode_item(item: object, session: str) -> bytes:
    """Encode one item, with the name of its type, for a journal. Raises `SessionError` if it can't be saved, or not loaded again."""
    kind = type(item)
    name = name_of(kind)
    if not is_kind(kind):
        raise SessionError(
            session,
            f"{name} is from an installed package that does not use Handrail, so a record may not name it",
            f"Declare it before any run that uses it: kept()({kind.__name__}).",
        )
    remember(kind, name)
    return msgspec.json.encode(_Item(name, msgspec.Raw(_encoded(item, session))))


def read_digests(fork: SessionFork) -> dict[str, str]:
    """Return a digest of each state slice that a fork has read, as it was when the fork was made, by the name of its type.

    Another process can tell by them whether it has the same slices.
    """
    return {name_of(kind): _digest_of(fork, kind) for kind in sorted(fork.read_slices(), key=name_of)}


def count_as_read(fork: SessionFork, digests: Mapping[str, str], changed: Collection[type]) -> None:
    """Count slices that another process has read as read by a fork. `changed` are slices that were changed in the fork since.

    Raises `Conflict` if a slice was changed, or if the fork was made from a different one.
    """
    known = {name_of(kind): kind for kind in (*fork.read_slices(), *fork.state)}
    kinds = {name: known.get(name) or kind_named(name) for name in digests}
    stale = [
        name
        for name, digest in digests.items()
        if (kind := kinds.get(name)) in changed or digest != ("" if kind is None else _digest_of(fork, kind))
    ]
    if stale:
        raise Conflict(sorted(name.rpartition(".")[2] for name in stale))
    fork.count_as_read(kind for kind in kinds.values() if kind is not None)


def _digest_of(fork: SessionFork, kind: type) -> str:
    contents = cast(Sequence[object], fork.before(kind).all())
    items = [encode_item(item, fork.id) for item in contents]
    sizes = b"".join(len(item).to_bytes(8) for item in items)
    return hashlib.sha256(sizes + b"".join(items)).hexdigest() if items else ""


def decode_item(data: bytes, session: str) -> Any:
    """Decode an item that `encode_item` encoded. `kind_named` looks up its type.

    Raises `SessionError` if the type is not found, or if the item does not match it and the type declares no `upgrade`.
    """
    found = msgspec.json.decode(data, type=_Item)
    kind = kind_named(found.type)
    if kind is None:
        raise SessionError(
            session,
            f"it contains the unknown type {found.type}",
            "Import the module that defines it, and declare it with kept() if that is an installed package that does not use "
            "Handrail. If it is defined inside a function, only the process that saved it can load it.",
        )
    return _decoded(kind, bytes(found.item), session)


def check_serialisable(event: object) -> None:
    """Raise `EventRefused` for an event that can't be saved as JSON, or that changes when it is saved and loaded."""
    kind = type(event)
    if not is_kind(kind):
        raise EventRefused(
            event,
            "its type is from an installed package that does not use Handrail, so the record of this run may not name it",
            f"Declare it before any run that uses it: kept()({kind.__name__}).",
        )
    try:
        again = _decoded(kind, _encoded(event, "?"), "?")
    except SessionError as error:
        problem = str(error.__cause__ or error).split("\n", 1)[0]
        raise EventRefused(
            event,
            f"it can't be saved as JSON, and this run has a journal: {problem}",
            "Use plain data for its fields.",
        ) from None
    if again != event:
        raise EventRefused(
            event,
            "it changes when it is saved as JSON, and this run has a journal",
            "Use plain data for its fields, and do not set `eq=False` on its class.",
        )


def load_imported(data: bytes, slices: Mapping[type, SliceRules] | None = None) -> Session:
    """Load a saved session. `kind_named` looks up its types. Raises `SessionError`, as `load` does."""
    found = (kind_named(name) for name in _read(data).slices)
    return load(data, types=[kind for kind in found if kind is not None], slices=slices)


def under_id(data: bytes, id: str) -> bytes:
    """Return a saved session with a different id, otherwise unchanged."""
    return msgspec.json.encode(msgspec.structs.replace(_read(data), id=id))


def said_in(data: bytes, kind: type[T]) -> list[T]:
    """Return the items of one slice in a saved session; an empty list if the session has no such slice.

    Raises `SessionError` if the data is damaged or has a different version, or if an item does not match its type.
    """
    found = _read(data)
    slice_ = found.slices.get(name_of(kind))
    return [] if slice_ is None else [_decoded(kind, bytes(item), found.id) for item in slice_.items]


def _read(data: str | bytes) -> _Saved:
    """Decode a saved session. Raises `SessionError` if it is damaged or has a different version."""
    try:
        version = msgspec.json.decode(data, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SessionError("?", f"it is not a saved session: {error}", "Pass what `save` returned.") from None
    if version.version != VERSION:
        raise SessionError(
            str(version.id),
            f"it was saved in format {version.version!r}, but this version of Handrail reads format {VERSION}",
            "Load it with the version of Handrail that saved it.",
        )
    try:
        return msgspec.json.decode(data, type=_Saved)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SessionError(
            str(version.id), f"the saved data is damaged: {error}", "Pass what `save` returned."
        ) from None


def _check_kept_alike(session: Session, kind: type, contents: _SavedSlice) -> None:
    rules = session.rules_for(kind)
    if (rules.kind, rules.key is not None) != (contents.kind, contents.keyed):
        was, now = _manner(contents.kind, contents.keyed), _manner(rules.kind, rules.key is not None)
        raise SessionError(
            session.id,
            f"{kind.__name__} was saved as {was}, but is {now} here",
            "Pass the rules it was saved with: load(data, slices={...}), or Session(slices={...}) for a run.",
        )


def _manner(kind: str, keyed: bool) -> str:
    return f"a {kind!r} slice {'with' if keyed else 'without'} a key"


def _encoded(item: Any, session: str) -> bytes:
    try:
        if isinstance(item, msgspec.Struct):
            return msgspec.json.encode(item, enc_hook=_fallback)
        return _json(item)
    except (ValueError, TypeError, RecursionError) as error:
        raise SessionError(
            session, f"{describe_kind(item)} can't be saved: {error}", "Use plain data for its fields."
        ) from error


def _json(value: Any) -> bytes:
    return pydantic_core.to_json(value, round_trip=True, inf_nan_mode="strings", fallback=write_path)


def _fallback(value: Any) -> Any:
    """Encode a value that msgspec does not support: an exception as text, anything else as pydantic encodes it."""
    if isinstance(value, SavedError):
        return str(value)
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return msgspec.Raw(_json(value))


def _decoded(kind: type, item: bytes, session: str) -> Any:
    try:
        if issubclass(kind, msgspec.Struct):
            return msgspec.json.decode(item, type=kind, dec_hook=_loose)
        return _adapter(cast(Any, kind)).validate_json(item)
    except (
        ValueError,
        TypeError,
        PydanticUserError,
    ) as error:  # msgspec's errors and pydantic's validation errors are ValueErrors
        upgrade = rules_of(kind).upgrade
        if upgrade is not None:
            return _upgraded(kind, item, session, upgrade)
        problem = str(error).replace("\n", " ")
        if isinstance(error, pydantic_core.ValidationError):
            first = error.errors(include_url=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first["loc"] else problem
        raise SessionError(
            session,
            f"an item of {kind.__name__} does not match its type: {problem}",
            "Check whether the type has changed since it was saved. @kept(upgrade=...) reads items of its former form.",
        ) from error


def _upgraded(kind: type, item: bytes, session: str, upgrade: Callable[[Any], Any]) -> Any:
    """Return the item that a slice's `upgrade` makes of a recorded one. Raises `SessionError` if it makes none."""
    try:
        made = upgrade(pydantic_core.from_json(item))
    except Exception as error:
        problem = f"the upgrade of {kind.__name__} raised {type(error).__name__}: {error}"
        raise SessionError(session, problem, "Correct the function that @kept(upgrade=...) names.") from error
    if type(made) is not kind:
        problem = f"the upgrade of {kind.__name__} returned {describe_kind(made)}"
        raise SessionError(session, problem, f"Return an item of the type {kind.__name__}.")
    return made


@lru_cache(maxsize=128)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _loose(kind: type, value: Any) -> Any:
    return SavedError(value) if issubclass(kind, BaseException) else value
