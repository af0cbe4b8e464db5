"""The members that a fork must have, checked when a resource is first forked."""

from __future__ import annotations

from handrail.errors import ResourceError
from handrail.protocols import DurableFork, Fork, Forkable


def _members(*protocols: type) -> tuple[str, ...]:
    return tuple(name for each in protocols for name in vars(each) if not name.startswith("_"))


_OF_ALL = (*_members(Fork), *_members(Forkable))
_OF_DURABLE = tuple(name for name in _members(DurableFork) if name not in _OF_ALL)

_STUBS: tuple[object, ...] = (
    *(Fork.stale, Fork.prepare, Fork.apply, Fork.drop),
    *(DurableFork.stage, DurableFork.apply, DurableFork.revert, DurableFork.applied),
)
"""Methods that the protocols only declare. A fork that inherits one would silently not do its work."""

complete: set[type] = set()
"""The classes whose forks have been found to have every member. They need not be checked again."""


def check_members(resource: object, fork: object) -> None:
    """Raise `ResourceError` if a custom resource's fork lacks a member that its calls need."""
    kind = type(fork)
    is_durable = getattr(fork, "is_durable", False)
    protocol = "DurableFork" if is_durable else "Fork"
    names = (*_OF_ALL, *_OF_DURABLE) if is_durable else _OF_ALL
    missing = [name for name in names if not hasattr(fork, name) or _is_stub(getattr(kind, name, None))]
    if missing:
        raise ResourceError(
            type(resource).__name__,
            f"fork() returned {kind.__name__}, which lacks {', '.join(missing)}",
            f"Derive {kind.__name__} from `handrail.protocols.{protocol}`, which has defaults for some, and define the others, "
            "as the page 'Resources of your own' of the docs shows.",
        )
    complete.add(kind)


def _is_stub(member: object) -> bool:
    return any(member is stub for stub in _STUBS)
