"""Spans: what each run, request and call becomes, and how they nest."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from handrail import (
    Adapter,
    Agent,
    Allow,
    CapabilityPolicy,
    DirectoryFilesystem,
    Handoff,
    MemoryJournal,
    Parked,
    Prompt,
    ScriptedModel,
    Session,
    Shell,
    ShellTools,
    Skills,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
    first_that_works,
    open_gate,
    runs,
    telemetry,
    tool,
)
from handrail.context import TRACING_SPAN
from handrail.errors import TransientError
from handrail.ids import call_span_of, span_of, trace_of
from handrail.messages import ModelRequest
from handrail.models import ModelUnavailable
from handrail.models.scripted import Reply
from handrail.prompt.compact import Compact
from handrail.run.adapter import Retry
from handrail.telemetry import names
from handrail.testing import Person
from support import PATIENCE
from support.traced import traced


@tool(effect="pure")
async def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}."


def playing(*script: Any, **options: Any) -> Adapter:
    return Adapter(ScriptedModel([*script]), **options)


GREETING = (ToolCall("greet", {"name": "Ada"}), "Greeted.")


async def test_a_run_its_requests_and_its_calls():
    """A run is an agent's span, with its requests to the model and its calls inside. Their ids follow from the run's."""
    with traced() as seen:
        response = await playing(*GREETING).evaluate(
            Prompt("host", "Greet.", tools=[greet]), "Ada.", run_id="r1"
        )
    assert response.text == "Greeted."
    assert seen.tree() == [("invoke_agent host", ["chat script", "execute_tool greet", "chat script"])]
    leg, call = seen.named("invoke_agent host"), seen.named("execute_tool greet")
    assert (leg.kind, call.kind) == (SpanKind.INTERNAL, SpanKind.INTERNAL)
    assert {span.kind for span in seen.all("chat script")} == {SpanKind.CLIENT}
    assert f"{leg.context.trace_id:032x}" == trace_of("r1")
    assert f"{leg.context.span_id:016x}" == span_of("r1", 1)
    assert f"{call.context.span_id:016x}" == call_span_of("r1", call.attributes[names.TOOL_CALL_ID], 1)
    assert leg.attributes[names.AGENT_NAME] == "host"
    assert leg.attributes[names.CONVERSATION_ID] == response.session.id
    assert leg.attributes[names.RUN_OUTCOME] == "done"
    assert call.attributes[names.TOOL_NAME] == "greet"
    assert call.attributes[names.CALL_STATUS] == "ok"


async def test_content_is_off_unless_asked_for():
    """Without content, nothing that was said, given or returned is on a span. With it, everything is, as the conventions have it."""
    prompt = Prompt("host", "Be kind.", tools=[greet])
    with traced() as seen:
        await playing(*GREETING).evaluate(prompt, "Greet Ada.")
    assert not any(each in seen.text() for each in ("Ada", "Be kind", "Greeted"))
    with traced(content=True) as seen:
        await playing(*GREETING).evaluate(prompt, "Greet Ada.")
    call, last = seen.named("execute_tool greet"), seen.all("chat script")[-1]
    assert json.loads(call.attributes[names.TOOL_CALL_ARGUMENTS]) == {"name": "Ada"}
    assert call.attributes[names.TOOL_CALL_RESULT] == "Hello, Ada."
    said = json.loads(last.attributes[names.INPUT_MESSAGES])
    assert [each["role"] for each in said] == ["user", "assistant", "tool"]
    assert [part["type"] for each in said for part in each["parts"]] == [
        "text",
        "tool_call",
        "tool_call_response",
    ]
    [answer] = json.loads(last.attributes[names.OUTPUT_MESSAGES])
    assert answer == {
        "role": "assistant",
        "parts": [{"type": "text", "content": "Greeted."}],
        "finish_reason": "stop",
    }
    assert json.loads(last.attributes[names.SYSTEM_INSTRUCTIONS])[0]["content"].startswith("Be kind.")
    assert [each["name"] for each in json.loads(last.attributes[names.TOOL_DEFINITIONS])] == ["greet"]


async def test_what_a_failed_call_says_is_content():
    """Without content, the result of a call that fails without an exception, invalid arguments and the name of a tool that a model has
    invented in them are not on its span. The exception's type is there in the call's `error.type`.
    """

    @tool
    async def find(name: str) -> ToolResult[None]:
        """Find somebody."""
        return ToolResult.error(f"{name} is not known")

    script = [ToolCall("find", {"name": "Ada"}), ToolCall("find", {"name": "Bob", "Ada": 7}), "done"]
    for content in (False, True):
        with traced(content=content) as seen:
            await playing(*script).evaluate(Prompt("host", "Find.", tools=[find]), "Go.")
        calls = seen.all("execute_tool find")
        assert ["Ada" in (call.status.description or "") for call in calls] == [content, content]
        assert ("Ada" in seen.text()) is content
        assert [call.attributes[names.ERROR_TYPE] for call in calls] == ["error", "ToolValidationError"]
        assert [call.events for call in calls] == [(), ()]


async def test_text_that_is_no_unicode_is_sent(caplog: pytest.LogCaptureFixture):
    """Lone surrogates, such as those in the names of files, lose neither the span that has them nor the others of its batch."""

    @tool
    async def fail() -> None:
        """Fail."""
        raise FileNotFoundError("bad\udcff.txt")

    def breaks(request: ModelRequest) -> ToolCall:
        if len(request.messages) > 1:
            raise RuntimeError("no \ud800 model")
        return ToolCall("fail", {})

    with traced(content=True) as seen:
        with pytest.raises(RuntimeError):
            await Adapter(ScriptedModel(breaks)).evaluate(Prompt("host", "Fail.", tools=[fail]), "Go.")
        sent = encode_spans(seen.spans).SerializeToString()
    assert b"bad\\xff.txt" in sent
    assert not caplog.records
    assert len(seen.all("chat script")) == 2


async def test_a_failed_call_has_its_exception():
    """A call that raises is an error with the exception's type, message and traceback, and its rollback inside."""

    @tool
    async def fail() -> None:
        """Fail."""
        raise ValueError("no such table")

    with traced() as seen:
        await open_gate([fail]).invoke("fail")
    assert seen.tree() == [("execute_tool fail", ["handrail.rollback"])]
    call = seen.named("execute_tool fail")
    assert call.status.status_code is StatusCode.ERROR
    assert call.attributes[names.ERROR_TYPE] == "ValueError"
    [event] = call.events
    assert event.attributes[names.EXCEPTION_MESSAGE] == "no such table"
    assert "async def fail" not in event.attributes[names.EXCEPTION_STACKTRACE]
    assert __file__ in event.attributes[names.EXCEPTION_STACKTRACE]


async def test_a_nested_run_is_inside_its_call():
    """A run inside a call, and a call inside a call, are inside the spans of those, with ids of their own in one trace."""

    @tool(effect="pure")
    async def wave() -> str:
        """Wave."""
        return "waved"

    @tool
    async def nest(context: ToolContext) -> str:
        """Nest."""
        (await context.call("wave")).unwrap()
        return (await context.adapter.evaluate(Prompt("inner", "Greet.", tools=[greet]), "go")).text

    with traced() as seen:
        outer = Prompt("outer", "Nest.", tools=[nest, wave])
        await playing(ToolCall("nest", {}), *GREETING, "done").evaluate(outer, "go")
    assert seen.inside("invoke_agent outer") == ["chat script", "execute_tool nest", "chat script"]
    assert seen.inside("execute_tool nest")[:2] == ["execute_tool wave", "invoke_agent inner"]
    assert seen.inside("invoke_agent inner") == ["chat script", "execute_tool greet", "chat script"]
    assert len({span.context.trace_id for span in seen.spans}) == 1
    workflows = {
        span.name: span.attributes[names.WORKFLOW_NAME]
        for span in seen.spans
        if names.WORKFLOW_NAME in span.attributes
    }
    assert workflows == {"invoke_agent outer": "outer"}


async def test_attempts_of_requests():
    """Each request to a model has a span: those that failed are errors, and name the model that is asked next."""
    broken = ScriptedModel([Reply("The", error=ModelUnavailable("broken", "it is down"))], name="one:broken")
    working = ScriptedModel(["Here."], name="azure:working")
    with traced() as seen:
        await Adapter(first_that_works(broken, working), retry=Retry(attempts=1)).evaluate(
            Prompt("p", "Answer."), "?"
        )
    first, second = seen.named("chat broken"), seen.named("chat working")
    assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert first.attributes[names.REQUEST_NEXT_MODEL] == "azure:working"
    assert [each.attributes[names.REQUEST_ATTEMPT] for each in (first, second)] == [1, 2]
    assert [each.attributes[names.PROVIDER_NAME] for each in (first, second)] == ["one", "azure.ai.openai"]


async def test_a_denied_call_is_no_error():
    """A call that a policy denies ends with that status, and is no error of the app."""

    @tool(capabilities=["pay"])
    async def pay() -> str:
        """Pay."""
        return "paid"

    with traced() as seen:
        await open_gate([pay], policies=[CapabilityPolicy({"pay": "deny"})]).invoke("pay")
    call = seen.named("execute_tool pay")
    assert call.attributes[names.CALL_STATUS] == "denied"
    assert call.status.status_code is StatusCode.UNSET


async def test_an_approval_and_a_question_are_inside_their_call():
    """An approval names the policy that asked and how it was decided. A question has its kind and its outcome."""

    @tool(capabilities=["pay"])
    async def pay(context: UserContext) -> str:
        """Pay."""
        return await context.wait_for("account", {})

    with traced() as seen:
        gate = open_gate(
            [pay],
            policies=[CapabilityPolicy({"pay": "ask"})],
            environment=Person(approve=True, answers={"account": "petty cash"}),
        )
        assert (await gate.invoke("pay")).value == "petty cash"
    [(call, inside)] = seen.tree()
    assert (call, inside[:2]) == ("execute_tool pay", ["handrail.approval", "handrail.question"])
    approval, question = seen.named("handrail.approval"), seen.named("handrail.question")
    assert approval.attributes[names.APPROVAL_OUTCOME] == "approved"
    assert approval.attributes[names.APPROVAL_DECIDED_BY] == "asked"
    assert approval.attributes[names.APPROVAL_POLICY] == "capability"
    assert question.attributes[names.QUESTION_KIND] == "account"
    assert question.attributes[names.QUESTION_OUTCOME] == "answered"
    assert "petty cash" not in seen.text()


async def test_a_call_that_times_out_and_one_that_is_retried():
    """A call that exceeds its time is an error of that kind. One that was retried says how often."""
    tries: list[int] = []

    @tool(timeout=0.01)
    async def hang() -> None:
        """Hang."""
        await asyncio.Event().wait()

    @tool(effect="idempotent")
    async def flaky() -> str:
        """Fail once."""
        tries.append(1)
        if len(tries) == 1:
            raise TransientError("busy", retry_after=0)
        return "ok"

    with traced() as seen:
        gate = open_gate([hang, flaky])
        await gate.invoke("hang")
        await gate.invoke("flaky")
    hung, retried = seen.named("execute_tool hang"), seen.named("execute_tool flaky")
    assert (hung.attributes[names.CALL_STATUS], hung.attributes[names.ERROR_TYPE]) == (
        "timed out",
        "TimedOut",
    )
    assert retried.attributes[names.CALL_ATTEMPTS] == 2
    assert retried.status.status_code is StatusCode.UNSET


async def test_a_cancelled_run_leaves_no_span_open():
    """Everything that a cancelled run had begun ends with it, and the context of its task is what it was."""
    reached = asyncio.Event()

    @tool
    async def hang() -> None:
        """Hang."""
        reached.set()
        await asyncio.Event().wait()

    with traced() as seen:
        running = asyncio.ensure_future(
            playing(ToolCall("hang", {})).evaluate(Prompt("p", "Hang.", tools=[hang]), "go")
        )
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert seen.named("execute_tool hang").attributes[names.CALL_STATUS] == "cancelled"
    assert seen.named("invoke_agent p").attributes[names.RUN_OUTCOME] == "cancelled"
    assert not trace.get_current_span().get_span_context().is_valid


async def test_a_span_processor_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture):
    """If an app's span processor raises at the end of a span, the run goes on, and the context of its task is what it was."""

    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise RuntimeError("no disk")

    with traced() as seen:
        seen.provider.add_span_processor(Broken())
        adapter = playing(*GREETING)
        assert (await adapter.evaluate(Prompt("host", "Be kind.", tools=[greet]), "Go.")).text == "Greeted."
        assert not trace.get_current_span().get_span_context().is_valid
    assert len(seen.spans) == 4
    assert "no disk" in caplog.text


async def test_a_handoff_is_a_call_with_its_acts_inside():
    """The acts of a handoff are calls inside its call, and so is the question that it asks."""
    made = Handoff("choose", "Choose a seat.", answer=str)

    @made.before
    async def offer(params: None, *, context: ToolContext) -> Parked[int, str]:
        return Parked(1, "a seat")

    @made.client
    async def ask(public: str, *, context: UserContext) -> str:
        return await context.wait_for("seat", public)

    @made.after
    async def take(private: int, answer: str, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(f"took {answer}")

    with traced() as seen:
        gate = open_gate([made], environment=Person(answers={"seat": "3A"}))
        assert (await gate.invoke("choose")).value == "took 3A"
    [(call, acts)] = seen.tree()
    assert call == "execute_tool choose"
    assert [each if isinstance(each, str) else each[0] for each in acts][:3] == [
        "execute_tool choose.before",
        "execute_tool choose.client",
        "execute_tool choose.after",
    ]


async def test_a_compaction_is_a_span_with_its_request():
    """A compaction is a span with the request for the summary inside. The next request says that the conversation was compacted."""
    session = Session()
    model = ScriptedModel(
        lambda request: "A summary." if "summary" in request.messages[-1].text.lower() else "Yes."
    )
    adapter = Adapter(model)
    prompt = Prompt("p", "Answer.", compact=Compact(by="summary", keep=0.01))
    for _ in range(6):
        await adapter.evaluate(prompt, "What about this? " * 200, session=session)
    session.compact()
    with traced() as seen:
        await adapter.evaluate(prompt, "And now?", session=session)
    [(_, inside)] = seen.tree()
    assert inside == [("handrail.compaction", ["chat script"]), "chat script"]
    assert seen.named("handrail.compaction").attributes[names.COMPACTION_BY] == "summary"
    asked = [names.CONVERSATION_COMPACTED in span.attributes for span in seen.all("chat script")]
    assert asked == [False, True]


async def test_a_commit_and_an_undo(tmp_path: Path):
    """A commit is a span of its call. Undoing the call later is a span of the same trace."""

    @tool(effect="staged")
    async def write(context: ToolContext) -> str:
        """Write."""
        context.filesystem.write("a.txt", "a")
        return "written"

    journal, files = MemoryJournal(), DirectoryFilesystem(tmp_path)
    with traced() as seen:
        adapter = playing(ToolCall("write", {}, id="c1"), "done", journal=journal, filesystem=files)
        await adapter.evaluate(Prompt("p", "Write.", tools=[write]), "go", run_id="r1")
        await runs.undo(journal, "r1", "c1", files)
    assert ("execute_tool write", ["handrail.commit"]) in seen.tree()[0][1]
    undone = seen.named("handrail.undo")
    assert f"{undone.context.trace_id:032x}" == trace_of("r1")
    assert undone.attributes[names.TOOL_CALL_ID] == "c1"


async def test_a_skill_and_a_command_refine_the_span_of_their_call(tmp_path: Path):
    """Opening a skill, reading its file and running a command are calls whose spans name them, as the conventions have it."""
    skill = tmp_path / "skills" / "review"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: review\ndescription: Reviews texts.\n---\n\nRead it twice.\n")
    (skill / "rules.md").write_text("No rules.")
    prompt = Prompt("p", ["Work.", Skills(tmp_path / "skills"), ShellTools(Shell([Allow("true")]))])
    adapter = playing(
        ToolCall("open_sections", {"sections": ["skills.review"]}),
        ToolCall("read_skill_file", {"skill": "review", "path": "rules.md"}),
        ToolCall("run_command", {"command": ["true"]}),
        "done",
    )
    files = tmp_path / "files"
    files.mkdir()
    with traced() as seen:
        await adapter.evaluate(prompt, "go", filesystem=DirectoryFilesystem(files), approvals="approve_all")
    opened = seen.named("execute_tool open_sections review")
    assert opened.attributes[names.SKILL_NAME] == "review"
    assert opened.attributes[names.SKILL_DESCRIPTION] == "Reviews texts."
    read = seen.named("execute_tool read_skill_file review rules.md")
    assert read.attributes[names.SKILL_RESOURCE_NAME] == "rules.md"
    ran = seen.named("execute_tool run_command true")
    assert (ran.attributes[names.PROCESS_EXECUTABLE_NAME], ran.attributes[names.PROCESS_EXIT_CODE]) == (
        "true",
        0,
    )


async def test_a_background_run_is_in_the_trace_of_the_call_that_begins_it():
    """A background run in this process is inside the span of the call that has begun it."""
    helper = Agent(ScriptedModel(["helped"]), "Help.", name="helper")

    @tool(effect="idempotent")
    async def start(context: ToolContext) -> str:
        """Begin a background run."""
        return context.spawn(helper, "Help me.").id

    with traced() as seen:
        async with asyncio.timeout(PATIENCE):
            await Agent(ScriptedModel([ToolCall("start", {}), "done", "heard"]), "Start.", tools=[start]).run(
                "go"
            )
            while not seen.all("invoke_agent helper"):
                await asyncio.sleep(0)
    helped, call = seen.named("invoke_agent helper"), seen.named("execute_tool start")
    assert helped.parent.span_id == call.context.span_id
    assert helped.context.trace_id == call.context.trace_id
    assert call.attributes[names.BACKGROUND_ID] == helped.attributes[names.RUN_ID]


# --- an app's own spans -----------------------------------------------------------------------------------


async def test_an_apps_own_spans_join():
    """A run begins inside the app's current span, and a span that a tool opens is inside its call's."""

    @tool
    async def work(context: ToolContext) -> str:
        """Work."""
        with tracer.start_as_current_span("step"):
            (await context.call("greet", name="Ada")).unwrap()
        assert context.extras[TRACING_SPAN].get_span_context().span_id == int(
            call_span_of(context.run_context.run_id, context.call_id, 1), 16
        )
        return "worked"

    with traced() as seen:
        tracer = seen.provider.get_tracer("app")
        with tracer.start_as_current_span("request") as request:
            prompt = Prompt("p", "Work.", tools=[work, greet])
            await playing(ToolCall("work", {}), "done").evaluate(prompt, "go")
            assert trace.get_current_span() is request
    assert seen.inside("request") == ["invoke_agent p"]
    assert seen.inside("execute_tool work")[0] == "step"
    assert seen.inside("step")[0] == "execute_tool greet"


async def test_an_unsampled_trace_stays_unsampled():
    """If the app's span is not sampled, no span of the run is exported, as the flags of its trace say."""
    with traced() as seen:
        given = f"00-{'1f' * 16}-{'2e' * 8}-00"
        await playing("done").evaluate(Prompt("p", "Do."), "go", traceparent=given)
    assert seen.spans == ()


async def test_telemetry_is_replaced_by_starting_again_and_ends_with_stop():
    """Only what was started last observes, and nothing does once it is stopped. Then an app's span starts no trace of a run."""
    with traced() as first:
        with traced() as second:
            await playing("done").evaluate(Prompt("p", "Do."), "go")
            assert (len(first.spans), len(second.spans)) == (0, 2)
        tracer = second.provider.get_tracer("app")
        with tracer.start_as_current_span("request"):
            response = await playing("done").evaluate(Prompt("p", "Do."), "go", run_id="r1")
        assert response.text == "done"
        assert [span.name for span in second.spans] == ["chat script", "invoke_agent p", "request"]
    assert not telemetry.setup._active or not telemetry.setup._active._stops  # type: ignore[attr-defined]
