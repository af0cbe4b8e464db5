"""Opening a gate: a run of its own, with everything left out filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.context import RunContext
from handrail.context.verbs import PromptModel
from handrail.deadline import Deadline, is_span
from handrail.dispatch.frame import DEPTH_LIMIT, Frame
from handrail.dispatch.gate import Gate
from handrail.errors import DefinitionError
from handrail.guard.approval import ApprovalMode, Broker
from handrail.ids import NewId, random_id
from handrail.journal import MemoryJournal, new_key
from handrail.journal.runlog import RunLog
from handrail.limits import Budget, BudgetTracker, Lease
from handrail.protocols import (
    ApprovalBroker,
    BoundAdapter,
    Environment,
    Filesystem,
    Forkable,
    PromptView,
    ToolPolicy,
)
from handrail.records import Journal
from handrail.resources.registry import Binding, RunResources, given
from handrail.session import Session, check_serialisable
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.dispatch.call import LiveCall


def open_gate(
    tools: Iterable[Tool[Any, Any]] = (),
    *,
    session: Session | None = None,
    policies: Iterable[ToolPolicy] = (),
    filesystem: Filesystem | None = None,
    resources: Iterable[Binding[Any]] = (),
    environment: Environment | None = None,
    approvals: ApprovalMode | ApprovalBroker | None = None,
    approval_seconds: float | None = None,
    deadline: Deadline | None = None,
    budget: Budget | BudgetTracker | None = None,
    journal: Journal | None = None,
    lease: Lease | None = None,
    depth_limit: int = DEPTH_LIMIT,
    clock: Clock = SYSTEM_CLOCK,
    new_id: NewId = random_id,
) -> Gate:
    """A gate for these tools: `await open_gate([weather]).invoke("weather", {"city": "Oslo"})`.

    Nothing is asked for unless a policy asks; nothing is written to disk; without an environment
    nobody is there.
    """
    check_kinds(tools=(tools, Iterable, "a list of tools: [weather]"))
    frame = open_frame(
        tools,
        session=session,
        policies=policies,
        filesystem=filesystem,
        resources=resources,
        environment=environment,
        approvals=approvals,
        approval_seconds=approval_seconds,
        deadline=deadline,
        budget=budget,
        journal=journal,
        lease=lease,
        depth_limit=depth_limit,
        clock=clock,
        new_id=new_id,
    )
    return Gate(frame)


_A_FILESYSTEM = "a Filesystem: DirectoryFilesystem('folder') or MemoryFilesystem()"


def open_frame(
    tools: Iterable[Tool[Any, Any]],
    *,
    session: Session | None,
    policies: Iterable[ToolPolicy],
    filesystem: Filesystem | None,
    resources: Iterable[Binding[Any]],
    environment: Environment | None,
    approvals: ApprovalMode | ApprovalBroker | None,
    approval_seconds: float | None,
    deadline: Deadline | None,
    budget: Budget | BudgetTracker | None,
    journal: Journal | None,
    lease: Lease | None,
    depth_limit: int,
    clock: Clock,
    new_id: NewId,
    prompt: PromptView | None = None,
    adapter: Callable[[Any], BoundAdapter] | None = None,
    prompt_model: Callable[[Any], PromptModel] | None = None,
    run_id: str | None = None,
    log: RunLog | None = None,
) -> Frame:
    """A run of its own, everything given checked and everything left out filled in."""
    check_kinds(
        policies=(policies, Iterable, "a list of policies: [CapabilityPolicy()]"),
        session=(session, Session, "a Session"),
        filesystem=(filesystem, Filesystem, _A_FILESYSTEM),
        deadline=(deadline, Deadline, "a Deadline, for example Deadline.after(60)"),
        budget=(budget, (Budget, BudgetTracker), "a Budget, for example Budget(tool_calls=100)"),
    )
    if isinstance(environment, type):
        raise DefinitionError(
            f"environment is the class {environment.__name__}. Make one: {environment.__name__}()."
        )
    if environment is not None and not all(hasattr(environment, member) for member in ("run_mode", "ask")):
        raise DefinitionError(
            f"environment is a {type(environment).__name__}, and nobody can be asked through it. "
            "Give an Environment, which has `run_mode` and `ask`; in tests, Person(approve=True)."
        )
    _check_limits(depth_limit, approval_seconds)
    session = session or Session(new_id=new_id)
    steps = journal or MemoryJournal(clock)
    if journal is not None:
        session.check_each(check_serialisable)  # nothing happens where it does already
    bindings = list(resources)
    if filesystem is not None:
        bindings.append(given(Filesystem, filesystem))  # pyright: ignore[reportArgumentType]  # a protocol as a key
    run_id = run_id or new_id()
    return Frame(
        tools=tools,
        policies=check_policies(policies),
        session=session,
        resources=RunResources(bindings),
        filesystem=filesystem if filesystem is not None and isinstance(filesystem, Forkable) else None,
        environment=environment,
        broker=Broker(steps, environment, approvals)
        if approvals is None or isinstance(approvals, str)
        else approvals,
        steps=steps,
        journal=journal,
        clock=clock,
        run_context=RunContext(run_id, run_id, session.id, 1, "local", new_id(), new_id()[:16]),
        key=new_key() if journal is None else journal.key,
        deadline=deadline,
        budget=BudgetTracker(budget) if isinstance(budget, Budget) else budget,
        lease=lease,
        depth_limit=depth_limit,
        approval_seconds=approval_seconds,
        log=log,
        prompt=prompt,
        adapter=adapter or getattr(environment, "adapter", None),
        prompt_model=prompt_model or getattr(environment, "prompt_model", None),
    )


def nested_frame(
    call: LiveCall,
    tools: Iterable[Tool[Any, Any]],
    *,
    policies: Iterable[ToolPolicy],
    number: int,
    deadline: Deadline | None = None,
    budget: Budget | None = None,
    prompt: PromptView | None = None,
) -> Frame:
    """A run inside a call: it shares all the call has, and its own limits can only be tighter.

    `number` says which of the call's verbs it is: its id follows from the call's own, and from that.
    """
    outer = call.frame
    ids = outer.run_context
    place = call.attempt_place.nested_run(number)
    run_id = place.id(ids.request_id)
    if deadline is None or (outer.deadline is not None and outer.deadline.at <= deadline.at):
        deadline = outer.deadline
    frame = Frame(
        tools=tools,
        policies=check_policies(policies),
        session=outer.session,
        resources=outer.resources,
        filesystem=outer.filesystem,
        environment=outer.environment,
        broker=outer.broker,
        steps=outer.steps,
        journal=outer.journal,
        clock=outer.clock,
        run_context=RunContext(
            run_id, ids.request_id, ids.session_id, ids.attempt, ids.worker_id, ids.trace_id, ids.span_id
        ),
        key=outer.key,
        deadline=deadline,
        budget=outer.tracker.share(budget) if budget or outer.budget else None,
        lease=outer.lease,
        cancelled_with=outer.cancellation,
        depth_limit=outer.depth_limit,
        approval_seconds=outer.approval_seconds,
        outer=call,
        log=outer.log,
        place=place,
        prompt=prompt,
        adapter=outer.adapter,
        prompt_model=outer.prompt_model,
    )
    frame.workers, frame.worker = outer.workers, outer.worker
    frame.parking = outer.parking
    if frame.parking is not None:
        frame.parking.add(frame)
    return frame


def _check_limits(depth_limit: int, approval_seconds: float | None) -> None:
    if type(depth_limit) is not int or depth_limit < 0:
        raise DefinitionError(
            f"a depth limit of {depth_limit!r} is not possible. Give a whole number of at least 0."
        )
    if approval_seconds is not None and not is_span(approval_seconds):
        raise DefinitionError(
            f"approval_seconds is {approval_seconds!r}. "
            "Give a positive number of seconds after which nobody may approve any more, or None to wait."
        )


def check_kinds(**given: tuple[object, Any, str]) -> None:
    """What callers who are not typed get wrong first, refused by name."""
    for name, (value, kind, wanted) in given.items():
        if value is not None and (isinstance(value, str | bytes) or not isinstance(value, kind)):
            raise DefinitionError(f"{name} is a {type(value).__name__}. Give {wanted}.")


def check_policies(policies: Iterable[ToolPolicy]) -> tuple[ToolPolicy, ...]:
    """The policies, each whole and under a name of its own."""
    found = tuple(policies)
    for policy in found:
        if not all(hasattr(policy, member) for member in ("name", "check", "on_result")):
            raise DefinitionError(
                f"{policy!r} is not a policy. A policy has a `name`, `check` and `on_result`; see ToolPolicy."
            )
    names = [policy.name for policy in found]
    for name in names:
        if names.count(name) > 1:
            raise DefinitionError(
                f"two policies are called {name!r}, and their state would be mixed. Give one another name."
            )
    return found
