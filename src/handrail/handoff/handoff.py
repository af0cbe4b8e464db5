"""`Handoff`: a tool in three acts. In the second act, a person or a model can decide."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Unpack, cast, get_args, get_origin

from typing_extensions import TypeForm, TypeVar

from handrail.concurrency.operation import Operation
from handrail.context import ToolContext
from handrail.errors import ToolDefinitionError
from handrail.handoff.acts import (
    Act,
    Acts,
    Begun,
    Parked,
    act_tool,
    always_parks,
    check_fit,
    either,
    fill,
    parked_types,
    read_act,
    schema_for,
)
from handrail.protocols import ToolPolicy
from handrail.run.options import GateArguments, RunOptions
from handrail.schema.problems import describe
from handrail.tools import Tool, ToolResult
from handrail.tools.definition import ToolOptions, check_words
from handrail.tools.signature import MISSING, caller_namespace

P = ParamSpec("P")
ParamsT = TypeVar("ParamsT", default=None)
AnswerT = TypeVar("AnswerT", default=Any)
PublicT = TypeVar("PublicT")
ClientT = TypeVar("ClientT")
PrivateT = TypeVar("PrivateT")
BeforeT = TypeVar(
    "BeforeT",
    bound=Parked[Any, Any]
    | ToolResult[Any]
    | Coroutine[Any, Any, Parked[Any, Any] | ToolResult[Any]]
    | Coroutine[Any, Any, Parked[Any, Any]],
)
AfterT = TypeVar("AfterT", bound=ToolResult[Any] | Coroutine[Any, Any, ToolResult[Any]])

ActName = Literal["before", "client", "after"]

_FORMS = {
    "before": "(params, *, context: ToolContext) -> Parked[Private, Public]",
    "client": "(public, *, context: ToolContext) -> Answer",
    "after": "(private, answer, *, context: ToolContext) -> ToolResult[Result]",
}


class Handoff(Tool[ParamsT, Any], Generic[ParamsT, AnswerT]):
    """A tool in three acts: `before`, `client` and `after`.

    `before` prepares the decision, `client` makes it, usually by asking a person or a model, and `after` acts on it.

        pick_card = Handoff("pick_card", "Let the other side pick a card.", params=Deal)

        @pick_card.before
        async def deal(params: Deal, *, context: ToolContext) -> Parked[Deck, Offer]: ...

        @pick_card.client
        async def choose(offer: Offer, *, context: ToolContext) -> Pick: ...

        @pick_card.after
        async def settle(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[Card]: ...

    - The model sees the result of `after`. If `before` returns a `ToolResult`, nobody is asked, and the model sees that result.
    - Private data goes only from `before` to `after`. No event and no error shows it: an exception that your code
      raises in `before` or `after` is reported without its message. To tell a model more, return `ToolResult.error`.
    - Without a `client`, the environment's person or model answers; a person gets a form created from the
      answer's type. `client` and `after` may take `params` too.
    - Without a `before`, the params are the public data. Without an `after`, the answer is the result. So a handoff
      with only a `client` is one function.
    - The acts are inner calls of one call: if one fails, the changes of all acts to files and state are undone.
    - A handoff is a tool. Once its acts are defined, use it wherever a tool is accepted.
    """

    _acts: Acts | None
    _answer: Any
    _defined: dict[ActName, Act]
    _namespace: dict[str, Any]

    def __init__(
        self,
        name: str,
        description: str,
        *,
        params: type[ParamsT] | None = None,
        answer: TypeForm[AnswerT] = MISSING,
        **options: Unpack[ToolOptions],
    ) -> None:
        async def play(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return await self.acts.play(params, context)

        given: dict[str, Any] = {**options}
        super().__init__(name, description, play, params=params, **given)
        fill(self, "reenters", True)
        fill(self, "_answer", answer)
        fill(self, "_namespace", {})
        fill(self, "_defined", {})
        fill(self, "_acts", None)

    # The acts.

    def before(
        self, function: Callable[Concatenate[ParamsT, P], BeforeT], /
    ) -> Callable[Concatenate[ParamsT, P], BeforeT]:
        """Define the first act, which prepares the decision and parks the private and the public data.

        Raises `ToolDefinitionError` if its signature does not fit, or if it is defined twice or after the handoff was used.
        """
        act = self._read("before", function)
        taken = act.takes[0]
        if self.params is None and isinstance(taken, type) and taken is not type(None):
            raise ToolDefinitionError(
                self.name,
                f"its `before` takes {describe(taken)}, but the handoff has no params",
                f"Declare them: Handoff({self.name!r}, ..., params={describe(taken)}).",
            )
        check_fit(self.name, "`params`", self.params, "what its `before` takes", taken)
        private, public, _ = parked_types(self.name, act)
        schema_for(self.name, "private", private, self._namespace)
        schema_for(self.name, "public", public, self._namespace)
        return self._define("before", act, function)

    def client(
        self, function: Callable[Concatenate[PublicT, P], ClientT], /
    ) -> Callable[Concatenate[PublicT, P], ClientT]:
        """Define the second act, which makes the decision, alone or with the help of a person or a model.

        Raises `ToolDefinitionError` if its signature does not fit, or if it is defined twice or after the handoff was used.
        """
        act = self._read("client", function)
        if ToolResult in (act.returns, get_origin(act.returns)):
            raise ToolDefinitionError(
                self.name,
                f"its `client` returns {describe(act.returns)}",
                "Return the answer itself, without a ToolResult around it.",
            )
        return self._define("client", act, function)

    def after(
        self, function: Callable[Concatenate[PrivateT, ClientT, P], AfterT], /
    ) -> Callable[Concatenate[PrivateT, ClientT, P], AfterT]:
        """Define the last act, which receives the answer and returns the result for the model.

        Raises `ToolDefinitionError` if its signature does not fit, or if it is defined twice or after the handoff was used.
        """
        return self._define("after", self._read("after", function), function)

    # Halves, for your own orchestrator.

    def start(
        self,
        params: ParamsT | None = None,
        *,
        policies: Iterable[ToolPolicy] = (),
        **arguments: Unpack[GateArguments],
    ) -> Operation[Parked[Any, Any] | ToolResult[Any]]:
        """Run the first half of the handoff, without an adapter: take a call through the gate and run `before`.

            parked = await pick_card.start(Deal(cards=3))
            result = await pick_card.finish(parked, Pick(index=1))

        Returns the parked data, which you may keep for as long as you like, or a `ToolResult` if the call failed, was
        denied, or ended early. Show only `parked.public`. If you store its parts, store `parked.id` too. What `before`
        did is committed before this returns. In a handler, it is committed to the handler's call.
        """
        from handrail.handoff import halves

        acts, options = self.acts, RunOptions().updated("start", GateArguments, arguments)
        return halves.operation(
            "start", self.name, options, arguments, lambda run: halves.start(run, acts, params, policies)
        )

    def finish(
        self,
        parked: Parked[Any, Any],
        answer: AnswerT,
        params: ParamsT | None = None,
        **arguments: Unpack[GateArguments],
    ) -> Operation[ToolResult[Any]]:
        """Run the second half of the handoff: validate the answer, run `after`, and return its result.

        The private data and the answer may be plain JSON values, as they are read back from a store. Before
        anything has run, this raises `ToolValidationError` if one of them does not fit, and `DefinitionError` if `parked` is not
        a `Parked` with an id, or if `after` needs params that are not given.

        A handoff is finished once. A second `finish` raises `AnswerRefused`, in every process that uses the same journal.
        Without a journal, only the same process knows, and only for the last 10,000 handoffs that it finished. If `after`
        fails or is cancelled, its changes to files and state are undone, and the handoff can be finished again.
        If a process with a journal ends during `after`, the next `finish` raises `OutcomeUnknown`, unless it belongs to a resumed
        run, which decides by the handoff's effect. If a call around `finish` fails later, the handoff stays finished.
        """
        from handrail.handoff import halves

        acts, options = self.acts, RunOptions().updated("finish", GateArguments, arguments)
        return halves.operation(
            "finish",
            self.name,
            options,
            arguments,
            lambda run: halves.finish(run, acts, parked, answer, params),
        )

    @property
    def acts(self) -> Acts:
        """The acts of the handoff.

        Raises `ToolDefinitionError` if they do not fit together, or if the type of the answer is unknown.
        """
        if self._acts is None:
            fill(self, "_acts", self._complete())
        return cast(Acts, self._acts)

    def check_complete(self) -> None:
        """Raise `ToolDefinitionError` if the acts do not fit together, or if the type of the answer is unknown."""
        _ = self.acts

    # Definition.

    def _read(self, name: ActName, function: Callable[..., Any]) -> Act:
        if self._acts is not None:
            raise ToolDefinitionError(
                self.name,
                f"its `{name}` is defined after the handoff was used",
                "Define all its acts first, then put it into a prompt or a gate.",
            )
        if name in self._defined:
            raise ToolDefinitionError(
                self.name, f"its `{name}` is defined twice", "Keep one, or create another handoff."
            )
        self._namespace.update(caller_namespace())
        return read_act(self.name, function, name, _FORMS[name], self.params)

    def _define(self, name: ActName, act: Act, function: Callable[..., Any]) -> Any:
        """Add an act after checking that it matches the others. Returns the function unchanged."""
        self._check_between({**self._defined, name: act})
        self._defined[name] = act
        return function

    def _check_between(self, defined: dict[ActName, Act]) -> None:
        """Raise `ToolDefinitionError` if an act's result does not fit the next act, or `after` returns no `ToolResult`."""
        before, client, after = defined.get("before"), defined.get("client"), defined.get("after")
        if before is not None:
            private, public, _ = parked_types(self.name, before)
            if client is not None:
                check_fit(
                    self.name, "what its `before` shows", public, "what its `client` takes", client.takes[0]
                )
            if after is not None:
                check_fit(
                    self.name,
                    "what its `before` keeps private",
                    private,
                    "the first parameter of its `after`",
                    after.takes[0],
                )
        answers = [("its `answer`", self._answer)]
        if client is not None:
            check_fit(self.name, *answers[0], "what its `client` returns", client.returns)
            answers.append(("what its `client` returns", client.returns))
        if after is not None:
            for whose, annotation in answers:
                check_fit(self.name, whose, annotation, "the answer its `after` takes", after.takes[1])
            self._result_of(after)

    def _result_of(self, after: Act) -> Any:
        if after.returns is MISSING or ToolResult in (after.returns, get_origin(after.returns)):
            inside = get_args(after.returns)
            return inside[0] if inside else Any
        raise ToolDefinitionError(
            self.name,
            f"its `after` returns {describe(after.returns)}",
            "Return a `ToolResult`, and annotate `-> ToolResult[...]`.",
        )

    def _complete(self) -> Acts:
        """Create the acts from the functions that were defined. Raises the errors that `acts` names."""
        before, client, after = (self._defined.get(name) for name in ("before", "client", "after"))
        self._check_alone(before, client, after)
        private, public, early = (
            (None, self.params, None) if before is None else parked_types(self.name, before)
        )
        said = (
            self._answer,
            MISSING if after is None else after.takes[1],
            MISSING if client is None else client.returns,
        )
        answer = next((each for each in said if each not in (MISSING, Any)), Any)
        if Any not in said and answer is Any:
            raise ToolDefinitionError(
                self.name,
                "the type of the answer is not declared",
                f"Declare it: Handoff({self.name!r}, ..., answer=...), or annotate what its `client` returns "
                "or the answer that its `after` takes.",
            )
        late = answer if after is None else self._result_of(after)
        parks = before is None or always_parks(before)
        result = late if parks or early == late else either(late, early)
        acts = Acts(
            self,
            before,
            client,
            after,
            schema_for(self.name, "private", private, self._namespace),
            schema_for(self.name, "public", public, self._namespace),
            schema_for(self.name, "answer", answer, self._namespace),
            act_tool(self, "before", before, Begun[private, public, early]),
            act_tool(self, "client", client, answer),
            act_tool(self, "after", after, late),
        )
        self._take_result(acts, acts.ends if result == late else act_tool(self, "after", None, result))
        return acts

    def _check_alone(self, before: Act | None, client: Act | None, after: Act | None) -> None:
        """Without a `before`, raise `ToolDefinitionError` if `client` does not take the params, or if `after` expects private data."""
        if before is not None:
            return
        if client is not None:
            check_fit(self.name, "`params`", self.params, "what its `client` takes", client.takes[0])
        if after is not None:
            check_fit(
                self.name,
                "what is private without a `before`",
                None,
                "the first parameter of its `after`",
                after.takes[0],
            )

    def _take_result(self, acts: Acts, whole: Tool[Any, Any]) -> None:
        """Set the handoff's result type and requirements from its acts."""
        for field in ("result", "result_class", "_result_schema"):
            fill(self, field, getattr(whole, field))
        fill(self, "needs", acts.asks.needs)
        check_words(self)
