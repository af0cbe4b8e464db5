"""Bindings: how the resources that tools request by protocol are created and closed.

A resource with the scope `fresh` is created at every request, and any other on first use. The resources of a scope are
closed in reverse order of creation.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from handrail.concurrency.operation import Home, Operation
from handrail.errors import ContextExpired, ResourceError
from handrail.protocols import Forkable
from handrail.resources.scopes import Closer, Instance, Scoped, circle, close_logged, name_of, waiting
from handrail.text.raised_errors import in_short, log_error
from handrail.text.spelling import checked_arguments

log = logging.getLogger("handrail.resources")

T = TypeVar("T")

Scope = Literal["run", "call", "fresh"]
"""A resource's lifetime: `run` (shared by the whole run), `call` (one per call) or `fresh` (a new one per request)."""


@checked_arguments
@dataclass(
    frozen=True
)  # no slots, because calling a subscripted generic class, `Binding[...](...)`, sets an attribute
class Binding(Generic[T]):
    """A protocol and the function that provides its resource.

    `provide` takes the run's other resources and returns this one. It may be a plain or async function, or a plain or
    async generator function that yields the resource once and closes it after the `yield`. If a function that is not a
    generator returns an object with an `aclose()` or `close()` method, that method is called when the scope ends, unless
    the object comes from another binding.
    """

    protocol: type[T]
    provide: Callable[[Any], Any]
    scope: Scope = "run"

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, type):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise ResourceError(name_of(self.protocol), "it is not a class", "Bind a protocol or a class.")
        if self.scope not in ("run", "call", "fresh"):
            raise ResourceError(
                name_of(self.protocol), f"the scope is {self.scope!r}", "Use 'run', 'call' or 'fresh'."
            )
        if not callable(self.provide):
            raise ResourceError(
                name_of(self.protocol),
                f"its provider is {self.provide!r}, not a function",
                "Pass a function that creates it, or use `given(protocol, object)` for an existing one.",
            )
        if not _takes_one(self.provide):
            raise ResourceError(
                name_of(self.protocol),
                "its provider must take the resources as its only argument",
                "Write `lambda resources: ...`.",
            )

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.provide) or inspect.isasyncgenfunction(self.provide)


def given(protocol: type[T], thing: T) -> Binding[T]:
    """Create a binding for an existing object. The object belongs to the caller and is never closed by a run."""
    return Binding(protocol, _Ready(thing))


class _Ready:
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __call__(self, resources: Any) -> Any:
        return self.thing


class RunResources:
    """The resources of one run. Each call uses them through its `CallResources`."""

    def __init__(self, bindings: Iterable[Binding[Any]] = (), outer: RunResources | None = None) -> None:
        self._bindings: dict[type, Binding[Any]] = {}
        self.outer = outer
        """The resources of the run around this one, for protocols that this run does not bind; None for a run at the root."""
        for binding in bindings:
            if not isinstance(binding, Binding):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
                raise ResourceError(
                    type(binding).__name__,
                    f"{binding!r} is not a binding",
                    "Write `Binding(protocol, provider)`, or `given(protocol, object)` for an existing one.",
                )
            if binding.protocol in self._bindings:
                raise ResourceError(
                    name_of(binding.protocol), "it is bound twice", "Keep one of the bindings."
                )
            self._bindings[binding.protocol] = binding
        self._scope: Scoped | None = None
        self.lock = threading.RLock()
        self._closed = False

    @property
    def scope(self) -> Scoped:
        """The resources that the run's calls share, and what closes them."""
        if self._scope is None:
            with self.lock:  # two threads may create the scope at the same time
                if self._scope is None:
                    self._scope = Scoped()
        return self._scope

    @property
    def scope_so_far(self) -> Scoped | None:
        """The resources that the run's calls share; None if there are none yet."""
        return self._scope

    def nested(self, bindings: Iterable[Binding[Any]]) -> RunResources:
        """Return the resources of a nested run: those it binds itself, and this run's for everything else.

        A resource of this run is created from this run's resources, even if a nested run requests it first.
        """
        return RunResources(bindings, self)

    def holder(self, protocol: type) -> RunResources:
        """Return the resources of the innermost run that binds the protocol, or this run's if none does."""
        run: RunResources | None = self
        while run is not None and protocol not in run._bindings:
            run = run.outer
        return run or self

    def binds(self, protocol: type) -> bool:
        """Return whether this run or one around it has a binding for the protocol."""
        return protocol in self.holder(protocol)._bindings

    def binds_itself(self, protocol: type) -> bool:
        """Return whether this run binds the protocol, or no run around it does."""
        return self.holder(protocol) is self

    def shares(self, protocol: type) -> bool:
        """Return whether the protocol is bound with the scope `run`."""
        found = self.holder(protocol)._bindings.get(protocol)
        return found is not None and found.scope == "run"

    def made(self, protocol: type) -> Any:
        """Return the resource that the run's calls share, or None if it has not been created or is closed."""
        scope = self.holder(protocol)._scope
        kept = None if scope is None else scope.made.get(protocol)
        return None if kept is None else kept.thing

    def binding(self, protocol: type) -> Binding[Any]:
        found = self._bindings.get(protocol) if isinstance(protocol, type) else None  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        if found is None:
            known = ", ".join(sorted(name_of(each) for each in self._every())) or "none"
            raise ResourceError(
                name_of(protocol),
                "nothing is bound to it",
                "Pass `resources=[given(protocol, object)]`. For files, pass `filesystem=...`, or `--files FOLDER` on the command "
                f"line. Bound: {known}.",
            )
        if self._closed:
            raise ResourceError(name_of(protocol), "the run has ended", "Request it while the run is active.")
        return found

    def _every(self) -> set[type]:
        return {*self._bindings, *(() if self.outer is None else self.outer._every())}

    async def close(self) -> None:
        """Close the run's resources, last created first. None of them can be requested afterwards.

        Raises an `ExceptionGroup` with the errors that closing raised, after all resources were closed.
        """
        self._closed = True
        errors = [] if self._scope is None else await self._scope.close()
        if errors:
            raise ExceptionGroup("closing resources", errors)

    async def close_logged(self, ended: BaseException | None = None) -> tuple[Exception, ...]:
        """Close the resources of a run that has ended, without changing its outcome. Returns the errors that closing raised.

        The errors are logged. If `ended` is the error that ended the run, they are also added to it as notes. A nested
        run with a forkable resource leaves the closing to the run around it.
        """
        self._closed = True
        scope = self._scope
        if scope is None:
            return ()
        if self.outer is not None and scope.has_forkable:
            # The call around the run still has to commit forks of the run's resources.
            self.outer.scope.adopt(scope)
        errors = await scope.close()
        for error in errors:
            log_error(log, logging.ERROR, "closing a resource of the run failed", error=error)
            if ended is not None:
                with contextlib.suppress(Exception):  # an exception may reject notes
                    what = "; ".join(getattr(error, "__notes__", ())) or "when a resource was closed"
                    ended.add_note(f"After the run, this was raised {what}: {in_short(error)}")
        return tuple(errors)


class Owner(Protocol):
    """The call that a `CallResources` belongs to."""

    @property
    def home(self) -> Home: ...
    def check(self) -> None:
        """Raise `ContextExpired` if the call has ended."""
        ...

    def view(self, resource: Forkable) -> Any:
        """Return what the call sees of its fork of a resource."""
        ...


class CallResources:
    """One call's view of the resources.

    Resources with the scope `run` are shared with other calls. If such a resource is forkable, the call gets its
    own fork of it. What the call requests with the scope `call` or `fresh` belongs to the call alone.
    """

    __slots__ = ("_around", "_call", "_given", "_owner", "_run")

    def __init__(self, run: RunResources, owner: Owner, given: Callable[[object], Any]) -> None:
        """`given` returns the resource for a protocol that needs no binding, and None for any other."""
        self._run = run
        self._around = None if run.outer is None else CallResources(run.outer, owner, given)
        """The call's view of the resources that its run does not bind itself; None if its run is at the root."""
        self._owner = owner
        self._given = given
        self._call: Scoped | None = None
        """The resources created for this call alone. None until one is needed."""

    @property
    def home(self) -> Home:
        return self._owner.home

    def get(self, protocol: type[T], /) -> T:
        """Return the resource bound to `protocol`, creating it if necessary.

        Raises `ResourceError` if the resource can't be provided, for example because nothing is bound to `protocol`, or
        because its provider is async and `open` must create it. Raises `ContextExpired` if the call has ended. An error that
        the provider raises is passed on.
        """
        self._owner.check()
        found: Any = self.get_for(protocol, "fresh", ())
        return found

    def open(self, protocol: type[T], /) -> Operation[T]:
        """Get the resource bound to `protocol`, creating it if necessary. Unlike `get`, this also supports async providers."""
        self._owner.check()
        name = f"resources.open({name_of(protocol)})"
        return Operation(lambda: self.open_for(protocol, "fresh", ()), name, self.home)

    async def close(self) -> list[Exception]:
        errors = [] if self._call is None else await self._call.close()
        return errors if self._around is None else [*errors, *await self._around.close()]

    @property
    def untouched(self) -> bool:
        """Whether the call has no resources to close."""
        if self._around is not None and not self._around.untouched:
            return False
        return self._call is None or self._call.empty

    # `within` is the lifetime of the requester, or `fresh` if the call itself is the requester. `path` is the chain of
    # resources being created.

    def get_for(self, protocol: type, within: Scope, path: tuple[type, ...]) -> Any:
        if self._around is not None and not self._run.binds_itself(protocol):
            return self._around.get_for(protocol, within, ())
        found = self._there(protocol, within)
        if found is not _NOTHING:
            return found
        binding = self._run.binding(protocol)
        if binding.is_async:
            raise _needs_open(binding)
        with self._run.lock:
            found = self._there(protocol, within)
            if found is not _NOTHING:
                return found
            inside = self._inside(binding, within, path)
            made = binding.provide(inside)
            if inspect.iscoroutine(made):
                made.close()
                raise _needs_open(binding)
            if inspect.isasyncgen(made):
                raise _needs_open(binding)
            return self._keep(binding, inside, *_first(binding, made))

    async def open_for(self, protocol: type, within: Scope, path: tuple[type, ...]) -> Any:
        if self._around is not None and not self._run.binds_itself(protocol):
            return await self._around.open_for(protocol, within, ())
        found = self._there(protocol, within)
        if found is not _NOTHING:
            return found
        binding = self._run.binding(protocol)
        inside = self._inside(binding, within, path)
        if binding.scope == "fresh":
            return await self._make(binding, inside)
        scope = self._scope(inside.scope)
        while (opening := scope.opening.get(protocol)) is not None:
            with waiting(scope, protocol, path):
                await asyncio.wait({opening})
            found = self._there(protocol, within)
            if found is not _NOTHING:
                return found
        mine = scope.opening[protocol] = asyncio.get_running_loop().create_future()
        try:
            return await self._make(binding, inside)
        finally:
            del scope.opening[protocol]
            mine.set_result(None)

    async def _make(self, binding: Binding[Any], inside: Inside) -> Any:
        with self._run.lock:
            if binding.scope != "fresh" and binding.protocol in self._scope(inside.scope).made:
                return self._there(binding.protocol, inside.within)
            made = binding.provide(inside)
            if not inspect.iscoroutine(made) and not inspect.isasyncgen(made):
                return self._keep(binding, inside, *_first(binding, made))
        thing, closer = await _first_async(binding, made)
        return self._keep(binding, inside, thing, closer)

    def _there(self, protocol: type, within: Scope) -> Any:
        """Return the resource if it already exists, or `_NOTHING`.

        Raises `ResourceError` if nothing is bound to the protocol, if the run has ended, or if this requester or this thread
        may not use the resource.
        """
        ready = self._given(protocol)
        if ready is not None:
            return ready
        binding = self._run.binding(protocol)
        if binding.scope == "fresh":
            return _NOTHING
        if binding.scope == "call" and within == "run":
            raise ResourceError(
                name_of(protocol),
                "it lives for one call, but a resource with the scope 'run' requests it",
                "Give it the scope 'run', or give the resource that requests it the scope 'call'.",
            )
        scope = self._run.scope_so_far if binding.scope == "run" else self._call
        kept = None if scope is None else scope.made.get(protocol)
        return _NOTHING if kept is None else self._shown(binding, kept, within)

    def _shown(self, binding: Binding[Any], kept: Instance, within: Scope) -> Any:
        if kept.thread is not None:
            kept.check_thread(name_of(binding.protocol))
        if not kept.forkable or binding.scope != "run":
            return kept.thing
        if within == "run":
            raise ResourceError(
                name_of(binding.protocol),
                "each call works on its own fork of it, but a resource with the scope 'run' requests it",
                "Give the resource that requests it the scope 'call'.",
            )
        return self._owner.view(kept.thing)

    def _keep(
        self, binding: Binding[Any], inside: Inside, thing: Any, closer: Callable[[], Any] | None
    ) -> Any:
        scope = self._scope(inside.scope)
        if closer is None and not inside.handed_out(thing) and not isinstance(binding.provide, _Ready):
            own = getattr(thing, "aclose", None) or getattr(thing, "close", None)
            closer = own if callable(own) else None
        if closer is not None:
            closing = Closer(name_of(binding.protocol), closer)
            scope.closes(closing)
            if scope is self._call and self.home.closed and scope.forget(closing):
                self._close_late(closing)
        if binding.scope == "fresh":
            return thing
        kept = scope.made[binding.protocol] = Instance(thing)
        return self._shown(binding, kept, inside.within)

    def _close_late(self, closer: Closer) -> None:
        """Schedule the closing of a resource that a thread created after its call ended, and raise `ContextExpired`."""
        work = close_logged(closer)
        try:
            asyncio.run_coroutine_threadsafe(work, self.home.loop)
        except RuntimeError:  # the event loop is closed, so nothing can await the closing
            work.close()
        raise ContextExpired(self.home.call)

    def _inside(self, binding: Binding[Any], within: Scope, path: tuple[type, ...]) -> Inside:
        protocol = binding.protocol
        if protocol in path:
            raise circle((*path[path.index(protocol) :], protocol))
        lives = within if binding.scope == "fresh" else binding.scope
        return Inside(self, lives, within, (*path, protocol))

    def _scope(self, lives: Scope) -> Scoped:
        """Return the scope that holds and closes resources of this lifetime."""
        if lives == "run":
            return self._run.scope
        with self._run.lock:  # two threads may create the scope at the same time
            if self._call is None:
                self._call = Scoped()
            return self._call


class Inside:
    """The resources as a provider sees them while it creates one of them."""

    __slots__ = ("_handed", "_path", "_resources", "scope", "within")

    def __init__(self, resources: CallResources, scope: Scope, within: Scope, path: tuple[type, ...]) -> None:
        self.scope: Scope = scope
        """The lifetime of the resource being created."""
        self.within: Scope = within
        """The lifetime of the resource's requester, or `fresh` if a call requests it."""
        self._resources = resources
        self._path = path
        self._handed: list[Any] = []

    def get(self, protocol: type[T], /) -> T:
        """Return the resource bound to `protocol`, creating it if necessary."""
        self._check()
        return self._hand_out(self._resources.get_for(protocol, self.scope, self._path))

    def open(self, protocol: type[T], /) -> Operation[T]:
        """Get the resource bound to `protocol`, creating it if necessary. Unlike `get`, this also supports async providers."""
        self._check()
        return Operation(lambda: self._opened(protocol), f"resources.open({name_of(protocol)})")

    async def _opened(self, protocol: type) -> Any:
        return self._hand_out(await self._resources.open_for(protocol, self.scope, self._path))

    def handed_out(self, thing: Any) -> bool:
        """Return whether the provider got this object from another binding, which is responsible for closing it."""
        return any(each is thing for each in self._handed)

    def _hand_out(self, thing: Any) -> Any:
        self._handed.append(thing)
        return thing

    def _check(self) -> None:
        if self.scope != "run":
            self._resources.home.check()


_NOTHING = object()


def _first(binding: Binding[Any], made: Any) -> tuple[Any, Callable[[], Any] | None]:
    """Return the object that a provider created, and a function that closes it by resuming the provider's generator.

    The function is None if the provider is not a generator. Raises `ResourceError` if the generator yields nothing.
    """
    if not inspect.isgenerator(made):
        return made, None
    generator = made
    thing = next(generator, _NOTHING)
    if thing is _NOTHING:
        raise _yielded(binding, "nothing")

    def finish() -> None:
        if next(generator, _NOTHING) is not _NOTHING:
            generator.close()
            raise _yielded(binding, "twice")

    return thing, finish


async def _first_async(binding: Binding[Any], made: Any) -> tuple[Any, Callable[[], Any] | None]:
    if not inspect.isasyncgen(made):
        return await made, None
    generator = made
    thing = await anext(generator, _NOTHING)
    if thing is _NOTHING:
        raise _yielded(binding, "nothing")

    async def finish() -> None:
        if await anext(generator, _NOTHING) is not _NOTHING:
            await generator.aclose()
            raise _yielded(binding, "twice")

    return thing, finish


def _needs_open(binding: Binding[Any]) -> ResourceError:
    name = name_of(binding.protocol)
    return ResourceError(
        name,
        "its provider is async",
        f"Write `await context.resources.open({name})`, or `context.resources.open({name}).wait()` in a function that is not async. "
        f"In a provider, make it async and write `await resources.open({name})`.",
    )


def _yielded(binding: Binding[Any], how_often: str) -> ResourceError:
    return ResourceError(
        name_of(binding.protocol),
        f"its provider is a generator and yielded {how_often}",
        "Yield the resource once, and close it after the `yield`.",
    )


def _takes_one(function: Callable[..., Any]) -> bool:
    if isinstance(function, _Ready):
        return True  # its signature is known, and inspecting it is slow
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True  # builtins may have no signature
    return True
