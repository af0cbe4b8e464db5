"""`Evaluation`: the state of one evaluation of a prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
from pydantic import Field

from handrail.concurrency.operation import Home
from handrail.concurrency.user_code import isolated
from handrail.context import ToolContext
from handrail.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    DefinitionError,
    LimitError,
    PromptEvaluationError,
    PromptValidationError,
    SpendCapReached,
    VisibilityExpansionRequired,
)
from handrail.events import PromptExecuted, PromptParked, PromptRendered, SkillUsed, ToolWithheld
from handrail.guard.policy import check_verdicts, within_scope
from handrail.messages import Message, Model, ModelRequest, Offered, Sent, Usage
from handrail.models.prices import tariff_of, window_of
from handrail.prompt import OPENER, Opening, Prompt, RenderedPrompt
from handrail.prompt.compact import AT_THE_WINDOW
from handrail.protocols import Filesystem, Forkable, SessionView
from handrail.resources.bindings import CallResources
from handrail.run.call import Attempt, Call, Passage, announce
from handrail.run.conversation import Conversation, SecretMask
from handrail.run.failures import Refused
from handrail.run.gate import Gate
from handrail.run.large_results import large_results
from handrail.run.place import Place
from handrail.run.policies import check_policies, close_policies, close_resources, reason_to_ask
from handrail.run.response import ANSWER_TOOL, Output
from handrail.run.run import Run
from handrail.run.search import SEARCHER, ToolSearch
from handrail.run.transaction import new_transaction
from handrail.run.views import end_subscriptions
from handrail.run.window import Window
from handrail.tools import ProviderTool, Tool, ToolResult
from handrail.tools.effect import effect_refusal
from handrail.tools.toolbox import NO_TOOLS, check_named_tools, without_late

if TYPE_CHECKING:
    from handrail.journal.records import Order
    from handrail.run.answer import ModelAnswer


async def why_withheld(gate: Gate, tool: ProviderTool, answer: Place) -> str | None:
    """Return why a tool must not be offered to the model; None if it may be offered.

    `answer` is the place of the answer that is about to be requested. The policies of the run and of the runs around it
    decide, unless the effect of the call around the run forbids the tool anyway. The offer is not a call: it has no
    number and no record, and it costs nothing. Raises `DefinitionError` if a policy asks.
    """
    run, outer = gate.run, gate.run.outer
    why_not = None if outer is None else effect_refusal(outer.tool.effect, tool.effect)
    if why_not is not None:
        return why_not
    if not run.policies:
        return None
    call = Call(
        gate,
        tool.name,
        None,
        answer.id(run.run_context.request_id),
        (tool.name,) if outer is None else (*outer.path, tool.name),
        asyncio.get_running_loop(),
        0,
        tool,
        parent=outer,
        depth=0 if outer is None else outer.depth + 1,
        at=answer,
    )
    attempt = Attempt(
        call, run, Passage()
    )  # it stands for the offer in the policies' context, and is never run
    transaction = attempt.transaction = new_transaction(attempt, tool)
    try:
        if (waiting := check_policies(attempt, run.policies)) is not None:
            await isolated(waiting)
        if attempt.passage.decision != "allow":
            raise DefinitionError(
                f"{tool.name} can't be offered: {reason_to_ask(attempt).rstrip('.')}, and nobody can be asked before the "
                f"provider runs it. Allow or deny it, as in CapabilityPolicy({{'provider.{tool.name}': 'allow'}})."
            )
    except Refused as refused:
        return str(refused)
    finally:
        attempt.close()
        transaction.drop()
        await close_resources(attempt)
        close_policies(attempt)
        end_subscriptions(attempt)
    return None


log = logging.getLogger("handrail.run.adapter")

_AROUND = 128
"""Upper bound for the number of bytes that a provider's format adds to a schema."""


class Evaluation:
    """One evaluation: a prompt on a model, in a run, with a conversation."""

    def __init__(
        self,
        run: Run,
        conversation: Conversation,
        prompt: Prompt[Any],
        rendered: RenderedPrompt[Any],
        *,
        output: Output | None = None,
        on_text: Callable[[str], None] | None = None,
        system: str | None = None,
    ) -> None:
        """`output` is the schema of the answer, unless the prompt has one. `system` replaces the rendered system text."""
        settings = run.model.settings
        assert settings is not None, "`bind_model` has been called"
        if rendered.output_schema is not None:
            output = Output(rendered.output_schema)
        added = [tool for tool in run.options.tools if run.offers(tool)]
        self.settings = settings
        self.model = settings.model
        self.tariff = settings.tariff
        self.asked: ModelAnswer | None = None
        """The newest answer that was asked for, as far as it has arrived; None if none was."""
        self.asked_at = run.monotonic()
        """When the newest request was sent."""
        self.raises: set[str] = set()
        """The questions by which this leg has asked for a raise of a cap."""
        self.heard = 0
        """How often the model was told what people said since its last answer."""
        self.order: Order | None = None
        """What the run was last ordered to do; None once that is done."""
        self.is_last = False
        """Whether the run was ordered to wrap up, so that its model has its last turn."""
        self.answered_by = ""
        """The name of the model that gave the newest answer; "" if there is no answer yet."""
        self.has_shown = False
        """Whether part of the awaited answer has already been published by streaming."""
        self.run = run
        self.gate = Gate(run)
        self._masking = SecretMask(run, conversation)
        self.conversation = conversation
        self.prompt = prompt
        self.rendered = rendered
        self.system = rendered.text if system is None else system
        """The system text. It does not change when sections are opened, nor if the prompt has changed since the run began."""
        self.output = output
        self.on_text = on_text
        native = settings.model.traits.native_output
        self.answers_by_call = output is not None and (not native or output.schema.secret)
        """Whether the answer is given by a call. An answer with secrets always is, because only calls can be masked."""
        self._added_provider_tools = tuple(tool for tool in added if isinstance(tool, ProviderTool))
        self.provider_tools: tuple[ProviderTool, ...] = ()
        """The provider's own tools that the next request offers."""
        self.judges_offers = False
        """Whether the run has ever had a provider's own tool. If so, which of them to offer is decided before each answer."""
        self._withheld: dict[str, str] = {}
        """Why tools of the provider are withheld from the next request, by name."""
        self._extra_tools = [
            *(tool for tool in added if not isinstance(tool, ProviderTool)),
            *([opener(lambda: self.rendered, settings.opens_in_place)] if rendered.closed else []),
            *([output.tool()] if output and self.answers_by_call else []),
        ]
        self.search: ToolSearch | None = None
        """The search for tools that are not listed; None if all are listed."""
        if rendered.searches:
            self.search = ToolSearch(deferring=self.model.traits.loads_deferred)
            self._extra_tools += self.search.tools()
        large = run.large = large_results(run, prompt.result_limit, rendered, conversation)
        if large is not None:
            self._extra_tools.append(large.reader())
        self.window: Window | None = None
        """How much of the model's window is taken; None if nothing says how large it is."""
        self.compact = run.options.compact or prompt.compact
        if self.compact is not AT_THE_WINDOW or settings.window is not None:
            self.measure()
        self.counted: tuple[int, int] = (0, 0)
        """The number of messages counted, and the tokens in a request with them: the provider's count, or an upper bound."""
        self.calls = 0
        self.begun: list[str] = []
        """The texts of answers that the provider paused and that the next answer continues."""
        self.answers = 0
        """The number of answers so far, including the one being awaited."""
        self.replays = False
        """Whether the run is being replayed from its record."""
        self._began_with = rendered
        self._request: ModelRequest | None = None
        own = self._own_tools(rendered)
        self.tools = self._first_offer(own)
        self.new_tools: list[Tool[Any, Any]] = []
        """The tools that were first offered after the last answer, because a section was opened or has changed its tools."""
        if rendered.policies:
            self._check_policies(rendered)
        self._allow(rendered, own)

    def _first_offer(self, own: Sequence[Tool[Any, Any]]) -> Sent[Offered]:
        """Return the tools that the first request offers."""
        offer, extra = self.rendered.offer, self._extra_tools
        if self.search is not None or own is not self.rendered.tools or len(offer.toolbox.open) < len(own):
            return Sent([*map(Offered, self._listed(own)), *map(Offered, extra), *self._found_later(own)])
        if not extra:
            return offer.sent
        sent = offer.sent.copy()
        for tool in extra:
            sent.append(Offered(tool))
        return sent

    def _listed(self, own: Sequence[Tool[Any, Any]]) -> list[Tool[Any, Any]]:
        """Return those of these tools that the model may be offered and does not find by searching."""
        return [tool for tool in own if self.run.offers(tool) and not self.rendered.is_searched(tool)]

    def _found_later(self, own: Sequence[Tool[Any, Any]]) -> list[Offered]:
        """Search the others of these tools from now on, and return them as deferred if the provider loads such tools."""
        if self.search is None:
            return []
        found = [tool for tool in own if self.run.offers(tool) and self.rendered.is_searched(tool)]
        self.search.use(found)
        return (
            [Offered(tool, deferred=True, searched=True) for tool in found] if self.search.deferring else []
        )

    def _check_policies(self, rendered: RenderedPrompt[Any]) -> None:
        every_tool = (*rendered.every_tool, *self._extra_tools, *self._added_provider_tools)
        if self.run.workers is None:  # with workers, a policy may also name a worker
            check_named_tools(
                [scoped.policy for scoped in rendered.policies], [tool.name for tool in every_tool]
            )
        for scoped in rendered.policies:
            check_verdicts([scoped.policy], [tool for tool in every_tool if scoped.decides_on(tool.name)])

    # Events.

    def begin(self) -> None:
        """Announce the run. A replayed run is announced only when it gets past its record."""
        run = self.run
        self.replays = run.log.has_begun(run.place)
        if not self.replays:
            self._tell()

    def leave_record(self) -> None:
        """End the replay, because the record goes no further."""
        if self.replays:
            self.replays = False
            self._tell()

    def _tell(self) -> None:
        run, rendered = self.run, self._began_with
        if run.told.get(PromptRendered, True):
            run.publish(
                PromptRendered(
                    self.prompt.name,
                    rendered.text,
                    rendered.offer.names,
                    run.run_context,
                    self.model.name,
                    run.log.earlier if run.log.has_begun(run.place) else "",
                )
            )

    def park(self) -> None:
        """Announce that the run's leg ends because the run is parked."""
        run = self.run
        if run.told.get(PromptParked, True):
            run.publish(PromptParked(self.prompt.name, run.run_context))

    def end(self, ended: str) -> None:
        """Announce the end of the run. A nested run that ends during replay, and not by cancellation, only stores the event."""
        run, spending = self.run, self.run.costs.models
        fact = PromptExecuted(self.prompt.name, ended, spending.usage, spending.cost, run.run_context)
        if self.replays and run.outer is not None and ended != "cancelled":
            run.session.keep(fact)
        else:
            self.leave_record()
            run.session.record(fact)
        if run.parking is not None and run.outer is not None:
            run.parking.start_grace(run.outer)

    def say(self, message: Message) -> None:
        """Add a message to the conversation. It is not published while the run is being replayed."""
        masking = self.masking
        shown = message if masking is None else masking.message(message)
        self.conversation.add(message, self.run.run_context.run_id, again=self.replays, shown=shown)

    @property
    def masking(self) -> SecretMask | None:
        """The mask for secrets in what the model writes; None if there can't be any secrets."""
        return self._masking if self.run.secretive or self.conversation.masks else None

    # Requests.

    def request(self, max_tokens: int | None = None) -> ModelRequest:
        """Return the next request. It refers to the conversation and the tools, both of which grow.

        If `max_tokens` is given, it replaces the run's own limit on the answer.
        """
        most = max_tokens or self.settings.max_tokens
        request = self._request
        if request is None or request.max_tokens != most:
            output = self.output
            request = self._request = ModelRequest(
                self.system,
                self.conversation.sent,
                self.tools,
                None if output is None or self.answers_by_call else output.schema,
                self.settings.temperature,
                most,
                self.settings.streaming,
                self.answers_by_call,
                self.settings.model_settings,
                self.provider_tools,
                SEARCHER if self.search is not None and self.search.deferring else "",
            )
        return request

    def measure(self) -> Window:
        """Measure what is sent by the window of the run's model."""
        if self.window is None:
            self.window = Window(self.compact)
        self.window.use(self.model)
        return self.window

    def forget_request(self) -> None:
        """Make the next request anew, because what is sent of the conversation has changed."""
        self._request = None
        self.counted = (0, 0)

    def use(self, model: Model) -> None:
        """Switch to this model, one of the candidates of the run's choice, and to its prices."""
        if model is not self.model:
            self.model = model
            self.tariff = tariff_of(model.name, model.traits)
            if self.window is not None or window_of(model.name, model.traits) is not None:
                self.measure()
            self.counted = (0, 0)  # a different model may count the same messages differently

    @property
    def place_of_answer(self) -> Place:
        """The place in the record for the answer that is being awaited, or else for the last one."""
        return self.run.place.answer(self.answers)

    def offered_size(self) -> int:
        """Return an upper bound for the number of bytes that describe the tools and the schema of the answer.

        Tools that are loaded when a search finds them don't count: the model reads them only then.
        """
        schema = None if self.output is None or self.answers_by_call else self.output.schema.json_schema
        loads = self.model.traits.loads_deferred
        sent = [offered.tool for offered in self.tools if not (loads and offered.searched)]
        tools = sum(map(_size_of, sent)) + _AROUND * len(self.provider_tools)
        return tools if schema is None else tools + len(msgspec.json.encode(schema)) + _AROUND

    def uncounted_cost(self) -> Decimal | None:
        """Return the cost of a request whose usage was not reported: 0 for a free model, otherwise None for unknown."""
        one = self.tariff(Usage(1, 1))
        return None if one is None or one else one

    # Tools.

    async def judge_offers(self) -> None:
        """Decide which of the provider's own tools the next request offers. Those that are not allowed are left out.

        Such a tool never passes the gate, because it has run before Handrail sees the answer. So the policies decide on the offer,
        before each answer is requested, as they would on a call without arguments.

        Raises `PromptEvaluationError` if a policy requires approval, because nobody can be asked before the provider
        runs the tool.
        """
        asked_for = (*self.rendered.provider_tools, *self._added_provider_tools)
        try:
            found = {tool: await why_withheld(self.gate, tool, self.place_of_answer) for tool in asked_for}
        except DefinitionError as error:
            raise self.failed(error, "request") from error
        withheld = {tool.name: why for tool, why in found.items() if why is not None}
        for name, why in withheld.items():
            if self._withheld.get(name) != why:
                self.run.session.record(ToolWithheld(name, why, self.run.run_context))
        self._withheld = withheld
        offered = tuple(tool for tool, why in found.items() if why is None)
        if offered != self.provider_tools:
            self.provider_tools = offered
            self._request = None

    def open(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Open sections, so that their tools can be called. Returns the names of these tools."""
        opening, before = self.rendered.open(paths), self.rendered.provider_tools
        self.rendered = opening.rendered
        own = self._own_tools(opening.rendered)
        self._found_later(own)
        hidden = self.search is not None and not self.search.deferring
        shown = [
            tool
            for tool in opening.tools
            if tool in own and self.run.offers(tool) and not (hidden and self.rendered.is_searched(tool))
        ]
        self._request, self.tools = None, self.tools.copy()  # other runs may share the tools
        for tool in shown:
            self.tools.append(Offered(tool, deferred=True, searched=self.rendered.is_searched(tool)))
        self.new_tools += [*shown, *(tool for tool in opening.rendered.provider_tools if tool not in before)]
        known, tokens = self.counted
        if known:  # the count does not include the new tools
            self.counted = (known, tokens + sum(map(_size_of, shown)))
        self._allow(opening.rendered, own)
        return tuple(tool.name for tool in shown)

    def refresh(self) -> None:
        """Offer the current tools of live sections. If they have changed, the provider's cache is lost once."""
        try:
            rendered = self.rendered.refreshed()
        except PromptValidationError as error:
            # The run goes on with the tools it has. A call to a tool that is gone fails, and its result says so.
            log.warning("the changed tools of prompt %r can't be offered: %s", self.prompt.name, error)
            return
        if rendered is self.rendered:
            return
        self.rendered = rendered
        deferred = {offered.tool.name for offered in self.tools if offered.deferred}
        before = {id(offered.tool) for offered in self.tools}
        own = self._own_tools(rendered)
        shown = self._listed(own)
        self.tools = Sent(
            [
                *(Offered(tool, tool.name in deferred) for tool in (*shown, *self._extra_tools)),
                *self._found_later(own),
            ]
        )
        self.new_tools += [tool for tool in shown if id(tool) not in before]
        self._request = None
        self.counted = (0, 0)
        self._allow(rendered, own)

    def _own_tools(self, rendered: RenderedPrompt[Any]) -> Sequence[Tool[Any, Any]]:
        """Return the prompt's tools, without those that give way to a tool that was added to the run."""
        if not rendered.offer.toolbox.has_late:
            return rendered.tools
        return without_late(rendered.tools, self._extra_tools)

    def _allow(self, rendered: RenderedPrompt[Any], own: Sequence[Tool[Any, Any]]) -> None:
        if rendered.provider_tools or self._added_provider_tools:
            self.judges_offers = True
        policies = [within_scope(scoped.policy, scoped.tools) for scoped in rendered.policies]
        self.run.model.rendered = rendered
        self.run.secretive = self.run.secretive or rendered.secretive
        toolbox = rendered.offer.toolbox if own is rendered.tools else NO_TOOLS.plus(own)
        self.run.show(toolbox.plus(self._extra_tools) if self._extra_tools else toolbox, policies)

    # Failures.

    def failed(self, error: Exception, phase: str, more: str = "") -> PromptEvaluationError:
        """Create the error that ends the run and, if a limit shared with outer runs was reached, the outer runs as well."""
        shared = isinstance(error, LimitError) and self._is_shared(error)
        return PromptEvaluationError(
            f"prompt {self.prompt.name!r}: {str(error).rstrip('.')}.{more}",
            phase=phase,
            run_id=None if shared else self.run.run_context.run_id,
        )

    def _is_shared(self, error: LimitError) -> bool:
        outer = self.run.outer
        if outer is None:
            return False
        if isinstance(error, DeadlineExceededError):
            return self.run.deadline is outer.run.deadline
        return isinstance(error, SpendCapReached) or (
            isinstance(error, BudgetExceededError) and error.of_root
        )

    # What feedback providers and completion checkers see of the run.

    @property
    def session_view(self) -> SessionView:
        outer = self.run.outer
        return self.run.session if outer is None else outer.session

    async def files(self) -> Filesystem | None:
        """Return the files as the run's finished calls left them; None if it has no files that its calls share."""
        run, world = self.run, self.run.world
        if world.filesystem is not None:
            return run.outer.filesystem if run.outer is not None else cast("Filesystem", world.filesystem)
        if not world.resources.shares(Filesystem):
            return None
        outer = run.outer
        resources = (
            CallResources(world.resources, _Reader(), run.costs.given) if outer is None else outer.resources
        )
        return await resources.open_for(Filesystem, "fresh", ())

    def answer_tool(self, name: str) -> bool:
        """Return whether a call to this tool is the run's answer."""
        return self.answers_by_call and name == ANSWER_TOOL


@dataclass(frozen=True)
class Sections:
    """Arguments of the tool that opens sections."""

    sections: Annotated[
        list[str], Field(description="The paths of the sections, as their summaries give them.")
    ]


def shown_sections(opening: Opening[Any], paths: list[str]) -> ToolResult[list[str]]:
    """Return the result of opening sections: their text and attachments, and the names of their tools."""
    names = ", ".join(tool.name for tool in opening.tools)
    more = f"\n\nThese tools can be called from now on: {names}." if names else ""
    return ToolResult.ok(
        paths, opening.text + more, exclude_value_from_context=True, attachments=opening.attachments
    )


def opener(rendered: Callable[[], RenderedPrompt[Any]], in_place: bool) -> Tool[Sections, list[str]]:
    """Create the tool with which a model opens sections that are shown as summaries.

    The sections' text and attachments are in its result, so that everything sent before stays byte-identical. The
    sections' tools can be called from the next turn on. If `in_place` is false, the tool raises
    `VisibilityExpansionRequired`.
    """

    async def open_sections(params: Sections, *, context: ToolContext) -> ToolResult[list[str]]:
        opening = rendered().open(params.sections)
        for name, description in opening.skills:
            announce(context, SkillUsed, name, description, "")
        if not in_place:
            raise VisibilityExpansionRequired(params.sections, context.run_context.run_id)
        return shown_sections(opening, params.sections)

    return Tool(
        OPENER,
        "Open sections that are shown as summaries, to see their full text and use their tools.",
        open_sections,
        accepts_overrides=False,
        effect="pure",
    )


class _Reader:
    """Reads the run's resources as they are, outside any call."""

    @property
    def home(self) -> Home:
        return Home(asyncio.get_running_loop(), "a check")

    def check(self) -> None: ...

    def view(self, resource: Forkable) -> Any:
        return resource


def _size_of(tool: Tool[Any, Any]) -> int:
    """Return an upper bound for the number of bytes that describe a tool."""
    return len(msgspec.json.encode([tool.name, tool.description, tool.json_schema])) + _AROUND
