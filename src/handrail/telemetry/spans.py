"""`Spans`: turns the facts of runs into spans, by OpenTelemetry's conventions for GenAI.

A span begins inside the span that is current where its fact is published, and is current until it ends, so that the spans of an app's
own libraries join. The legs of a run are spans of one trace. They begin inside what the run was started from, wherever they are executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

import pydantic_core
from opentelemetry import trace
from opentelemetry.context import Context, attach, create_key, get_current, get_value, set_value
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
)

from handrail import __version__, events
from handrail.clock import SYSTEM_CLOCK
from handrail.context import TRACING_SPAN, RunContext
from handrail.context.extras import Extras, PerCall
from handrail.ids import TRACEPARENT, call_span_of, span_of, trace_of, tracing
from handrail.messages import ModelRequest, Usage
from handrail.run.failures import Unsuccessful
from handrail.session.bus import subscribe_everywhere
from handrail.telemetry import names
from handrail.telemetry.content import Privacy, definitions_of, input_of, output_of, text_part
from handrail.telemetry.ids import GivenIds
from handrail.tools.result import shown_text

_CALL_SPAN = create_key("handrail-call-span")
FINISH_REASONS = {"done": "stop", "calls": "tool_call", "refused": "content_filter"}
"""The conventions' names for why a model stopped, where Handrail's differ."""
_FAILED = ("error", "timed out", "invalid", "conflict")
"""The statuses of calls that are errors. A call that was denied or cancelled did what it should."""

Attributes = Mapping[str, Any]


class OpenSpan:
    """A span that has begun, and the context that was current before."""

    __slots__ = ("before", "context", "span")

    def __init__(self, span: Span, before: Context, context: Context) -> None:
        self.span, self.before, self.context = span, before, context

    def end(self, attributes: Attributes | None = None, at: int | None = None) -> None:
        if get_current() is self.context:
            attach(self.before)
        self.span.set_attributes(
            {key: value for key, value in (attributes or {}).items() if value not in (None, ())}
        )
        self.span.end(at)  # an app's span processor may raise


class OpenRun:
    """The open spans of an outermost run and the runs inside it, and what must not be shown of it."""

    __slots__ = ("open", "privacy")

    def __init__(self) -> None:
        self.open: dict[tuple[str, ...], OpenSpan] = {}
        self.privacy = Privacy()


class Spans:
    """Observes the runs of this process. With `content`, spans have messages, arguments and results, with their secrets masked."""

    def __init__(self, provider: TracerProvider, *, content: bool = False, hosts: Iterable[str] = ()) -> None:
        self._ids = GivenIds()
        tracer: Any = provider.get_tracer(names.SCOPE, __version__, names.SCHEMA)
        if hasattr(tracer, "id_generator"):  # only the SDK's tracers make their own ids
            tracer.id_generator = self._ids
        self._tracer: trace.Tracer = tracer
        self._content = content
        self._hosts = tuple(hosts)
        self._runs: dict[str, OpenRun] = {}

    def begin(self) -> Callable[[], None]:
        """Observe from now on. Returns a function that stops it, and ends the spans that are open."""
        hears: dict[type[events.Fact], Callable[[Any], None]] = {
            events.PromptRendered: self._leg_began,
            events.PromptParked: self._leg_parked,
            events.PromptExecuted: self._leg_ended,
            events.ModelRequested: self._requested,
            events.AnswerArrived: self._answered,
            events.ModelResponded: self._responded,
            events.ModelFailed: self._request_failed,
            events.ToolStarted: self._call_began,
            events.ToolResumed: self._call_resumed,
            events.CallAccepted: self._accepted,
            events.SecretGiven: self._secret_given,
            events.RemoteRequested: self._remote,
            events.SkillUsed: self._skill,
            events.CommandRun: self._command,
            events.ToolInvoked: self._call_ended,
            events.CallCommitted: self._committed,
            events.ToolRolledBack: self._rolled_back,
            events.BackgroundStarted: self._spawned,
            events.QuestionAsked: self._asked,
            events.QuestionAnswered: self._question_closed,
            events.ApprovalRequested: self._approval_requested,
            events.ApprovalDecided: self._approval_decided,
            events.CompactionStarted: self._compacting,
            events.CompactionEnded: self._compacted,
            events.CallUndone: self._undone,
        }
        stops = [subscribe_everywhere(kind, listener) for kind, listener in hears.items()]
        tracing.ambient, tracing.outbound = traceparent, self._outbound
        tracing.extras = Extras({TRACING_SPAN: PerCall(lambda call_id: get_value(_CALL_SPAN))})

        def stop() -> None:
            for each in stops:
                each()
            tracing.__init__()
            for run in [*self._runs.values()]:
                for span in [*run.open.values()]:
                    span.end()
            self._runs.clear()

        return stop

    # Spans.

    def _begin(
        self,
        run: RunContext,
        key: tuple[str, ...],
        name: str,
        attributes: Attributes,
        span_id: str = "",
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Context | None = None,
        links: list[Link] | None = None,
    ) -> OpenSpan:
        """Begin a span, which is current from now on."""
        before = get_current()
        span = self._start(run, name, attributes, span_id, kind=kind, parent=parent, links=links)
        context = trace.set_span_in_context(span, before)
        if key[0] == "call":
            context = set_value(_CALL_SPAN, span, context)
        attach(context)
        made = OpenSpan(span, before, context)
        self._run(run).open[key] = made
        return made

    def _start(
        self,
        run: RunContext,
        name: str,
        attributes: Attributes,
        span_id: str = "",
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Context | None = None,
        links: list[Link] | None = None,
        at: int | None = None,
    ) -> Span:
        trace_id = int(run.trace_id, 16)
        if parent is None:
            parent = get_current()
            if trace.get_current_span(parent).get_span_context().trace_id != trace_id:
                parent = _started(run.traceparent)
        shown = {key: value for key, value in attributes.items() if value is not None}
        with self._ids.next(trace_id, int(span_id, 16) if span_id else 0):
            return self._tracer.start_span(name, parent, kind, shown, links, at)

    def _end(self, run: RunContext, key: tuple[str, ...], attributes: Attributes | None = None) -> None:
        """End a span, if it is open."""
        known = self._runs.get(run.request_id)
        made = None if known is None else known.open.pop(key, None)
        if made is not None:
            made.end(attributes)
        if known is not None and not known.open:
            self._runs.pop(run.request_id, None)

    def _past(self, run: RunContext, name: str, seconds: float, attributes: Attributes) -> None:
        """Add a span of something that has just ended."""
        now = int(SYSTEM_CLOCK.now().timestamp() * 1e9)
        self._start(run, name, attributes, at=now - int(seconds * 1e9)).end(now)

    def _run(self, run: RunContext) -> OpenRun:
        return self._runs.setdefault(run.request_id, OpenRun())

    def _span(self, run: RunContext, *key: str) -> Span | None:
        known = self._runs.get(run.request_id)
        made = None if known is None else known.open.get(key)
        return None if made is None else made.span

    # Runs.

    def _leg_began(self, fact: events.PromptRendered) -> None:
        run = fact.run_context
        root = run.run_id == run.request_id
        provider, model = names.split_model(fact.model)
        attributes = {
            names.OPERATION_NAME: names.INVOKE_AGENT,
            names.AGENT_NAME: fact.prompt,
            names.CONVERSATION_ID: run.session_id,
            names.PROVIDER_NAME: provider,
            names.REQUEST_MODEL: model,
            names.RUN_ID: run.run_id,
            names.RUN_LEG: run.attempt,
            names.WORKER_ID: run.worker_id,
            names.SYSTEM_INSTRUCTIONS: self._shown(run, lambda: [text_part(fact.text)]),
        }
        outermost: Any = self._span(run, "leg", run.request_id)
        if not root and outermost is not None:  # with other agents inside, it is a workflow too
            name = getattr(outermost, "attributes", {}).get(names.AGENT_NAME, "")
            outermost.set_attribute(names.WORKFLOW_NAME, name)
        links = self._earlier(run, span_of(run.run_id, run.attempt - 1), fact.earlier) if fact.earlier else []
        current = trace.get_current_span().get_span_context()
        if root and current.is_valid and f"{current.span_id:016x}" != run.traceparent[36:52]:
            links.append(Link(current))  # whoever resumes a run is not what it was started from
        self._begin(
            run,
            ("leg", run.run_id),
            f"{names.INVOKE_AGENT} {fact.prompt}",
            attributes,
            run.span_id,
            parent=_started(run.traceparent) if root else None,
            links=links,
        )

    def _earlier(self, run: RunContext, span_id: str, end: str) -> list[Link]:
        """Return a link to a span of the run's earlier leg, which was exported only if its process has lived."""
        known = SpanContext(int(run.trace_id, 16), int(span_id, 16), True, TraceFlags(TraceFlags.SAMPLED))
        return [Link(known, {names.LEG_END: end, names.RUN_LEG: run.attempt - 1})]

    def _leg_parked(self, fact: events.PromptParked) -> None:
        self._close(fact.run_context, {names.RUN_OUTCOME: "parked"})

    def _leg_ended(self, fact: events.PromptExecuted) -> None:
        run, leg = fact.run_context, self._span(fact.run_context, "leg", fact.run_context.run_id)
        outcome, _, problem = fact.stop_reason.partition(": ")
        if leg is not None and outcome == "failed":
            leg.set_status(Status(StatusCode.ERROR, self._run(run).privacy.hide(problem)))
            leg.set_attribute(names.ERROR_TYPE, outcome)
        self._close(run, {names.RUN_OUTCOME: outcome, names.RUN_COST: _cost(fact.cost), **_usage(fact.usage)})

    def _close(self, run: RunContext, attributes: Attributes) -> None:
        """End a run's span, and all that are still open inside the outermost run if it is that one."""
        self._end(run, ("chat", run.run_id), {names.ERROR_TYPE: "cancelled"})
        self._end(run, ("leg", run.run_id), attributes)
        if run.run_id == run.request_id and (left := self._runs.pop(run.request_id, None)) is not None:
            outcome = attributes[names.RUN_OUTCOME]
            for key, made in reversed(left.open.items()):
                made.end({names.CALL_STATUS: outcome} if key[0] == "call" else {names.RUN_OUTCOME: outcome})

    # Requests to models.

    def _requested(self, fact: events.ModelRequested) -> None:
        run, request = fact.run_context, fact.request
        assert request is not None, "requests are published with their request"
        self._end(run, ("chat", run.run_id), {names.ERROR_TYPE: "cancelled"})
        provider, model = names.split_model(fact.model)
        attributes = {
            names.OPERATION_NAME: names.CHAT,
            names.PROVIDER_NAME: provider or names.OTHER,
            names.REQUEST_MODEL: model,
            names.CONVERSATION_ID: run.session_id,
            names.CONVERSATION_COMPACTED: True if fact.compacted else None,
            names.REQUEST_ATTEMPT: fact.attempt,
            **_parameters(request),
            names.SYSTEM_INSTRUCTIONS: self._shown(run, lambda: [text_part(request.system)]),
            names.TOOL_DEFINITIONS: self._shown(run, lambda: definitions_of(request)),
        }
        said = self._shown(run, lambda: input_of(request.messages.since(0)[: fact.messages]))
        if said is not None:
            attributes[names.INPUT_MESSAGES] = said
            leg = self._span(run, "leg", run.run_id)
            if leg is not None and not getattr(leg, "attributes", {}).get(names.INPUT_MESSAGES):
                leg.set_attribute(names.INPUT_MESSAGES, said)
        self._begin(run, ("chat", run.run_id), f"{names.CHAT} {model}", attributes, kind=SpanKind.CLIENT)

    def _answered(self, fact: events.AnswerArrived) -> None:
        run = fact.run_context
        chat, leg = (self._span(run, each, run.run_id) for each in ("chat", "leg"))
        if chat is not None and fact.first_part is not None:
            chat.set_attribute(names.RESPONSE_TIME_TO_FIRST_CHUNK, fact.first_part)
        said = self._shown(run, lambda: output_of(fact.message))
        for span in (chat, leg) if said is not None else ():
            if span is not None:
                span.set_attribute(names.OUTPUT_MESSAGES, said)

    def _responded(self, fact: events.ModelResponded) -> None:
        run = fact.run_context
        attributes = {
            names.RESPONSE_MODEL: names.split_model(fact.model)[1],
            names.RESPONSE_FINISH_REASONS: [FINISH_REASONS.get(fact.stop_reason, fact.stop_reason)],
            names.REQUEST_COST: _cost(fact.cost),
            **_usage(fact.usage),
        }
        self._end(run, ("chat", run.run_id), attributes)

    def _request_failed(self, fact: events.ModelFailed) -> None:
        run = fact.run_context
        if (chat := self._span(run, "chat", run.run_id)) is not None:
            chat.set_status(Status(StatusCode.ERROR, self._run(run).privacy.hide(fact.error)))
        attributes = {names.ERROR_TYPE: names.OTHER, names.REQUEST_NEXT_MODEL: fact.next_model or None}
        self._end(run, ("chat", run.run_id), attributes)

    # Calls.

    def _call_began(
        self, fact: events.ToolStarted | events.ToolResumed, links: list[Link] | None = None
    ) -> None:
        run = fact.run_context
        attributes = {
            names.OPERATION_NAME: names.EXECUTE_TOOL,
            names.TOOL_NAME: fact.tool,
            names.TOOL_CALL_ID: fact.call_id,
            names.TOOL_TYPE: "function",
            names.RUN_ID: run.run_id,
            names.CALL_PATH: "/".join(fact.path) if len(fact.path) > 1 else None,
        }
        span_id = call_span_of(run.run_id, fact.call_id, run.attempt)
        key = ("call", run.run_id, fact.call_id)
        self._begin(run, key, f"{names.EXECUTE_TOOL} {fact.tool}", attributes, span_id, links=links)

    def _call_resumed(self, fact: events.ToolResumed) -> None:
        run = fact.run_context
        leg: Any = self._span(run, "leg", run.request_id)
        links: list[Link] = list(getattr(leg, "links", ()))
        ends = [
            str(link.attributes[names.LEG_END])
            for link in links
            if link.attributes and names.LEG_END in link.attributes
        ]
        earlier = call_span_of(run.run_id, fact.call_id, run.attempt - 1)
        self._call_began(fact, self._earlier(run, earlier, ends[0] if ends else "parked"))

    def _accepted(self, fact: events.CallAccepted) -> None:
        run, tool = fact.run_context, fact.definition
        if tool.secret and fact.params is not None:
            clear, shown = (pydantic_core.from_json(each(fact.params)) for each in (tool.clear, tool.dump))
            self._run(run).privacy.learn(fact.call_id, clear, shown)
        if self._content and (call := self._call(fact)) is not None:
            call.set_attribute(
                names.TOOL_CALL_ARGUMENTS, self._run(run).privacy.hide(tool.mask(fact.arguments))
            )

    def _secret_given(self, fact: events.SecretGiven) -> None:
        self._run(fact.run_context).privacy.learn(fact.call_id, fact.answer, fact.masked)

    def _call(self, fact: Any) -> Span | None:
        return self._span(fact.run_context, "call", fact.run_context.run_id, fact.call_id)

    def _remote(self, fact: events.RemoteRequested) -> None:
        if (call := self._call(fact)) is not None:
            at = urlsplit(fact.address)
            attributes = {
                names.TOOL_TYPE: "extension",
                names.MCP_METHOD_NAME: fact.method,
                names.MCP_PROTOCOL_VERSION: fact.protocol,
                names.NETWORK_TRANSPORT: "tcp" if fact.address else "pipe",
                names.SERVER_ADDRESS: at.hostname,
                names.SERVER_PORT: at.port,
            }
            call.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def _skill(self, fact: events.SkillUsed) -> None:
        attributes = {
            names.SKILL_NAME: fact.skill,
            names.SKILL_DESCRIPTION: fact.description,
            names.SKILL_RESOURCE_NAME: fact.resource,
        }
        self._refine(fact, f"{fact.skill} {fact.resource}".strip(), attributes)

    def _command(self, fact: events.CommandRun) -> None:
        attributes = {names.PROCESS_EXECUTABLE_NAME: fact.program, names.PROCESS_EXIT_CODE: fact.exit_code}
        self._refine(fact, fact.program, attributes)

    def _refine(self, fact: Any, what: str, attributes: Attributes) -> None:
        """Name the span of a call more closely, as the conventions have it for tools that use skills or run commands."""
        call: Any = self._call(fact)
        if call is not None:
            call.set_attributes({key: value for key, value in attributes.items() if value != ""})
            if len(getattr(call, "name", "").split()) == 2:
                call.update_name(f"{call.name} {what}")

    def _call_ended(self, fact: events.ToolInvoked) -> None:
        run, call = fact.run_context, self._call(fact)
        privacy = self._run(run).privacy
        if call is not None and fact.status in _FAILED:
            raised = None if isinstance(fact.error, Unsuccessful) else fact.error
            kind = fact.status.replace(" ", "_") if raised is None else type(raised).__qualname__
            call.set_attribute(names.ERROR_TYPE, kind)
            withheld = fact.call_id in privacy.withheld
            said = privacy.hide(fact.result.message) if self._content and not withheld else ""
            call.set_status(Status(StatusCode.ERROR, said))
            if raised is not None and fact.status == "error":
                call.add_event("exception", privacy.described(raised, withheld))
        attributes = {
            names.CALL_STATUS: fact.status,
            names.CALL_ATTEMPTS: fact.attempts if fact.attempts > 1 else None,
            names.CALL_STALE: fact.stale,
            names.TOOL_CALL_RESULT: privacy.hide(shown_text(fact.result)) if self._content else None,
        }
        self._end(run, ("call", run.run_id, fact.call_id), attributes)

    def _committed(self, fact: events.CallCommitted) -> None:
        about = {names.TOOL_NAME: fact.tool, names.TOOL_CALL_ID: fact.call_id}
        self._past(fact.run_context, names.COMMIT, fact.seconds, about)

    def _rolled_back(self, fact: events.ToolRolledBack) -> None:
        hide = self._run(fact.run_context).privacy.hide
        attributes = {
            names.TOOL_NAME: fact.tool,
            names.TOOL_CALL_ID: fact.call_id,
            names.ROLLBACK_REASON: hide(fact.reason) if self._content else None,
            names.ROLLBACK_COMPENSATED: len(fact.compensated),
            names.ROLLBACK_NOT_UNDONE: len(fact.not_undone),
        }
        self._past(fact.run_context, names.ROLLBACK, fact.seconds, attributes)

    def _undone(self, fact: events.CallUndone) -> None:
        trace_id = trace_of(fact.run_id, fact.traceparent)
        run = RunContext(fact.run_id, fact.run_id, "", 0, "", trace_id, "", fact.traceparent)
        attributes = {
            names.RUN_ID: fact.run_id,
            names.TOOL_NAME: fact.tool,
            names.TOOL_CALL_ID: fact.call_id,
            names.ROLLBACK_NOT_UNDONE: len(fact.stands),
        }
        self._past(run, names.UNDO, fact.seconds, attributes)

    def _spawned(self, fact: events.BackgroundStarted) -> None:
        if (call := self._call(fact)) is not None:
            call.set_attribute(names.BACKGROUND_ID, fact.background_id)

    # People.

    def _asked(self, fact: events.QuestionAsked) -> None:
        about = {names.QUESTION_ID: fact.question_id, names.QUESTION_KIND: fact.kind}
        self._begin(fact.run_context, ("question", fact.question_id), names.QUESTION, about)

    def _question_closed(self, fact: events.QuestionAnswered) -> None:
        about = {names.QUESTION_ID: fact.question_id, names.QUESTION_OUTCOME: fact.outcome}
        self._finish(fact, names.QUESTION, ("question", fact.question_id), about)

    def _approval_requested(self, fact: events.ApprovalRequested) -> None:
        attributes = {
            names.QUESTION_ID: fact.question_id,
            names.TOOL_NAME: fact.tool,
            names.APPROVAL_POLICY: fact.policy or None,
            names.APPROVAL_REASON: self._run(fact.run_context).privacy.hide(fact.reason)
            if self._content
            else None,
        }
        self._begin(fact.run_context, ("approval", fact.question_id), names.APPROVAL, attributes)

    def _approval_decided(self, fact: events.ApprovalDecided) -> None:
        attributes = {
            names.QUESTION_ID: fact.question_id,
            names.TOOL_NAME: fact.tool,
            names.APPROVAL_OUTCOME: fact.approval.outcome,
            names.APPROVAL_DECIDED_BY: fact.how,
        }
        self._finish(fact, names.APPROVAL, ("approval", fact.question_id), attributes)

    def _finish(self, fact: Any, name: str, key: tuple[str, ...], attributes: Attributes) -> None:
        """End the span of something that was asked. If it was asked in an earlier leg, whose span ended with it, add one of the answer."""
        if self._span(fact.run_context, *key) is None:
            self._past(fact.run_context, name, 0.0, attributes)
        self._end(fact.run_context, key, attributes)

    # Conversations.

    def _compacting(self, fact: events.CompactionStarted) -> None:
        run = fact.run_context
        about = {names.CONVERSATION_ID: run.session_id}
        self._begin(run, ("compaction", run.run_id), names.COMPACTION, about)

    def _compacted(self, fact: events.CompactionEnded) -> None:
        run, done = fact.run_context, {names.CONVERSATION_COMPACTED: True} if fact.by else {}
        attributes = {names.COMPACTION_BY: fact.by or None, **done}
        self._end(run, ("chat", run.run_id), {names.ERROR_TYPE: "cancelled"})
        self._end(run, ("compaction", run.run_id), attributes)

    # What leaves.

    def _shown(self, run: RunContext, content: Callable[[], Any]) -> str | None:
        """Return content as JSON with its secrets masked; None if content is off."""
        return self._run(run).privacy.encode(content()) if self._content else None

    def _outbound(self, address: str) -> str:
        host = urlsplit(address).hostname or ""
        return traceparent() if any(fnmatchcase(host, each.lower()) for each in self._hosts) else ""


def traceparent() -> str:
    """Return the `traceparent` of the current span; "" if there is none."""
    span = trace.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & 1:02x}" if span.is_valid else ""


def _started(given: str) -> Context:
    """Return the context that a run was started from: a remote span, or none."""
    match = TRACEPARENT.fullmatch(given)
    if match is None:
        return Context()
    trace_id, span_id, flags = (int(each, 16) for each in match.groups())
    return trace.set_span_in_context(
        NonRecordingSpan(SpanContext(trace_id, span_id, True, TraceFlags(flags))), Context()
    )


def _cost(cost: Any) -> float | None:
    return None if cost is None else float(cost)


def _usage(usage: Usage) -> dict[str, Any]:
    if not usage.tokens:
        return {}
    return {
        names.USAGE_INPUT_TOKENS: usage.input,
        names.USAGE_OUTPUT_TOKENS: usage.output,
        names.USAGE_CACHE_READ_INPUT_TOKENS: usage.cached or None,
        names.USAGE_CACHE_WRITE_INPUT_TOKENS: usage.cache_writes or None,
    }


def _parameters(request: ModelRequest) -> dict[str, Any]:
    settings = request.settings
    return {
        names.REQUEST_MAX_TOKENS: request.max_tokens,
        names.REQUEST_TEMPERATURE: request.temperature,
        names.REQUEST_SEED: settings.seed,
        names.REQUEST_STOP_SEQUENCES: settings.stop,
        names.REQUEST_REASONING_LEVEL: settings.effort,
        names.REQUEST_STREAM: True if request.stream else None,
        names.OUTPUT_TYPE: "text" if request.output is None else "json",
    }
