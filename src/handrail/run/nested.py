"""Nested runs, which are runs inside a call, and gates that are opened by hand. `Run.nested` opens each nested run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from handrail.concurrency.operation import Operation
from handrail.errors import DefinitionError
from handrail.guard.policy import within_scope
from handrail.prompt import Prompt
from handrail.protocols import PromptView, ToolPolicy
from handrail.run.call import Call, check_name, new_call
from handrail.run.current_call import call_around, check_given
from handrail.run.gate import Arguments, Gate
from handrail.run.options import GateArguments, RunOptions, named
from handrail.run.place import Place
from handrail.run.run import Run, open_run, show_tools
from handrail.schema.problems import describe_kind
from handrail.tools import Tool, ToolResult

if TYPE_CHECKING:
    from handrail.run.adapter import Adapter
    from handrail.run.call import Attempt


@asynccontextmanager
async def nested_run(
    attempt: Attempt,
    number: int,
    verb: str,
    given: RunOptions,
    prompt: PromptView | None = None,
    levels: int | None = None,
) -> AsyncGenerator[Run]:
    """Open a run inside a call, record which verb opened it, and close it at the end of the block."""
    run = Run.nested(attempt, number, given, prompt, levels)
    await run.log.note_verb(attempt.place.child(number), verb)
    try:
        yield run
    except BaseException as error:
        await close_nested(run, error)
        raise
    await close_nested(run)


async def close_nested(run: Run, error: BaseException | None = None) -> None:
    """End a nested run, and close the resources that it bound itself. If one of them is forkable, the run around it does so.

    Errors from closing are logged, and added as notes to `error`, the error that ended the run.
    """
    run.cancellation.close()
    around = run.outer
    if around is not None and run.world is not around.run.world:
        await run.world.resources.close_logged(error)


VERB = "open_gate"


def open_gate(
    tools: Iterable[Tool[Any, Any]],
    policies: Iterable[ToolPolicy],
    prompt: Prompt[Any] | None,
    params: object,
    opened: Sequence[str],
    adapter: Adapter | None,
    arguments: GateArguments,
) -> Gate:
    """Open a gate at the root, or inside the call whose handler opens it. See `handrail.open_gate`."""
    _check(prompt, adapter)
    around = call_around()
    own = RunOptions() if adapter is None else adapter.options
    options = own.updated(VERB, GateArguments, arguments)
    if prompt is not None:
        resources = (*options.resources, *prompt.resources)
        options = options.replace(resources=resources, spend=named(options.spend, prompt.name))
    if around is None:
        run = open_run(options, prompt=prompt)
        gate, session = Gate(run), run.session
    else:
        check_given(around, VERB, own, arguments)
        number = around.next_verb(VERB)
        run = Run.nested(around, number, options, prompt)
        gate, session = NestedGate(run, around, number), around.session
    if adapter is not None:
        _lend(run, adapter)
    if prompt is None:
        show_tools(run, tools, policies)
        return gate
    run.model.rendered = rendered = prompt.render(
        params, session=session, opened=opened, deadline=run.deadline
    )
    scoped = [within_scope(each.policy, each.tools) for each in rendered.policies]
    show_tools(run, [*rendered.tools, *tools], [*scoped, *policies])
    run.secretive = run.secretive or rendered.secretive
    return gate


def _check(prompt: object, adapter: object) -> None:
    if prompt is not None and not isinstance(prompt, Prompt):
        raise DefinitionError(
            f"prompt is {describe_kind(prompt)}. Pass a Prompt, not yet rendered, and its params as params=..."
        )
    if adapter is not None and not callable(getattr(adapter, "bound_to", None)):
        raise DefinitionError(
            f"adapter is {describe_kind(adapter)}. Pass an Adapter: Adapter('openai:gpt-5')."
        )


def _lend(run: Run, adapter: Adapter) -> None:
    """Let the calls of a gate use an adapter and its workers.

    An environment's own `prompt_model` takes precedence over the adapter's. Inside a call, the call's workers apply if
    the adapter has none.
    """
    if adapter.workers is not None:
        adapter.workers.open(run)
    run.model.adapter = adapter.bound_to
    environment = run.people.environment
    if environment is None or environment.prompt_model is None:
        run.model.prompt_model = adapter.prompt_model_for


class NestedGate(Gate):
    """The gate of a run inside a call. Once that call's handler has ended, `invoke` raises `ContextExpired`."""

    __slots__ = ("_around", "_verb")

    def __init__(self, run: Run, around: Attempt, number: int) -> None:
        super().__init__(run)
        self._around = around
        self._verb: Place | None = around.place.child(number)
        """The place at which the first call records the verb; None once that has happened."""

    def invoke(
        self, name: str, arguments: Arguments = "{}", *, call_id: str | None = None
    ) -> Operation[ToolResult[Any]]:
        check_name(name)
        self._around.home.check()
        go = self.pass_through
        return Operation(
            lambda: go(new_call(self, name, arguments, call_id)), f"invoke({name!r})", self._around.home
        )

    async def pass_through(self, call: Call, attempt: Attempt | None = None) -> ToolResult[Any]:
        verb, self._verb = self._verb, None
        if verb is not None:
            await self.run.log.note_verb(verb, VERB)
        return await super().pass_through(call, attempt)

    async def close(self) -> None:
        """End the run, and close the resources that it bound itself, as `close_nested` does. Errors are only logged."""
        await close_nested(self.run)
