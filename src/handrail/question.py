"""Questions to people, and their answers. Approvals, `wait_for`, `once` and handoffs use them.

A question is plain data, so that it can be shown anywhere, kept for days, and answered in a process
other than the one that asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Annotated, Any, Literal, cast, get_type_hints

import msgspec

from handrail.concurrency.deadline import is_span
from handrail.content import Attachment
from handrail.context.facts import RunContext
from handrail.errors import DefinitionError
from handrail.text.rendering import Row, rows_of

MARKDOWN = "Markdown"
Markdown = Annotated[str, MARKDOWN]
"""The type of a field whose text the page draws as Markdown when a question shows it. The text itself is one click away."""

QuestionKind = Literal["approval", "input", "handoff", "pause"]
AnswerOutcome = Literal["answered", "declined", "cancelled", "timed out"]


class DecisionKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys under which an answer is remembered for later calls of the session.

    They are part of the question, so that the answer takes effect as soon as any process accepts it, even if
    the run is never resumed.
    """

    tool: str
    words: str
    """A description of this request, for lists of remembered decisions."""
    exact: str
    """The key for approving exactly this request, including its diff. "" if such an approval can't be remembered."""
    any_diff: str
    """The key for denying this request, whatever its diff."""
    scopes: dict[str, str]
    """Maps the text of each offered scope to its key, narrowest first."""
    run_context: RunContext


class Quorum(msgspec.Struct, frozen=True):
    """How many people must approve, and the role they must have. The run's own principal does not count."""

    role: str | None = None
    """The role that they must have; None for anybody who may approve for others."""
    approvals: int = 1
    then: str | None = None
    """Another role, whose people may approve too once the question has waited for `after` seconds. None for no other role."""
    after: float = 0.0
    expires: float | None = None
    """Seconds after which the question expires, which denies the call; None if this quorum sets no time."""

    def __str__(self) -> str:
        people = "1 person" if self.approvals == 1 else f"{self.approvals} people"
        who = f"{people} with the role {self.role!r}" if self.role else f"{people} who may approve for others"
        return f"{who}, or after {self.after:g} seconds {self.then!r}" if self.then else who

    def roles(self, waited: float = math.inf) -> tuple[str | None, ...]:
        """Return the roles of which one is required once the question has waited for this many seconds; None stands for any."""
        return (self.role, self.then) if self.then is not None and waited >= self.after else (self.role,)

    def counts(self, vote: Vote) -> bool:
        """Return whether this quorum required no role, or one that the voter had, when they voted."""
        return any(role is None or role in vote.roles for role in self.roles(vote.waited))


def ask(
    role: str | None = None,
    approvals: int = 1,
    *,
    then: str | None = None,
    after: float | None = None,
    expires: float | None = None,
) -> Quorum:
    """Return a quorum: this many people with this role, other than the person whose run it is, must approve.

    Without a role, or with the role `approver`, anybody who may approve for others counts. Once the question has waited for
    `after` seconds, people with the role `then` count too. After `expires` seconds, the call is denied. Use the quorum as a verdict
    in a `CapabilityPolicy`: `{"money": ask(role="finance", approvals=2)}`. Raises `DefinitionError` for an invalid role or number.
    """
    if type(approvals) is not int or approvals < 1:
        raise DefinitionError(f"ask(): approvals is {approvals!r}. Pass a whole number of at least 1.")
    if role is not None and (not isinstance(role, str) or not role):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        raise DefinitionError(
            f"ask(): role is {role!r}. Pass the name of a role, such as 'finance', or leave it out."
        )
    if (then is None) != (after is None) or (then is not None and (not isinstance(then, str) or not then)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        raise DefinitionError(
            f"ask(): then is {then!r} and after is {after!r}. Pass another role and the seconds after which it may approve too, "
            "such as then='manager', after=3600, or neither."
        )
    if then is not None and (role in (None, "approver") or then in ("approver", role)):
        raise DefinitionError(
            f"ask(): with role={role!r}, then={then!r} adds nobody. Pass a role that fewer people have, and then another one."
        )
    for name, value in (("after", after), ("expires", expires)):
        if value is not None and not is_span(value):
            raise DefinitionError(f"ask(): {name} is {value!r}. Pass a number of seconds above 0.")
    return Quorum(None if role == "approver" else role, approvals, then, after or 0.0, expires)


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """One person's vote on a question that a quorum decides."""

    question_id: str
    digest: str
    by: str
    since: float = 0.0
    """When the voter's account was added, as a timestamp. An account that is added later under the same name is another one."""
    roles: tuple[str, ...]
    """The roles that the person had when they voted."""
    approved: bool
    reason: str = ""
    at: float = 0.0
    waited: float = 0.0
    """The seconds for which the question had waited then, by the journal's clock."""


class Wording(msgspec.Struct, frozen=True):
    """What a person reads above the data of a question: a sentence, and a heading if there is one."""

    message: str
    title: str = ""

    @classmethod
    def of(cls, kind: str, message: str | None, title: str | None) -> Wording:
        """Return the wording of a question of this kind. A message or title that is None is derived from the kind.

        Raises `DefinitionError` if one that was given is blank or not a string.
        """
        for name, given in (("message", message), ("title", title)):
            if given is not None and (not isinstance(given, str) or not given.strip()):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
                raise DefinitionError(
                    f"wait_for({kind!r}): the {name} is {given!r}. Pass a text that a person can read, or leave it out."
                )
        words = " ".join(re.findall(r"[^\W_]+", kind))
        if message is None:
            message = f"Please answer: {words or kind}."
        if title is None:
            title = words[:1].upper() + words[1:]
        return cls(message, title)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question that a run asks a person.

    `digest` is keyed and covers everything the answer is about. An answer carries the same digest, which proves
    that it answers what was shown.
    """

    id: str
    kind: QuestionKind
    name: str
    """What the question is about: a `wait_for` kind, a tool, a handoff, a permission, a `once`, or the message of `request_approval`."""
    message: str
    """The sentence that the person reads, such as the reason for an approval. Invisible characters in it are escaped."""
    payload: Any
    """The data to show, as plain JSON without secrets."""
    schema: dict[str, Any]
    """The JSON Schema that an answer must match."""
    digest: str
    principal: str
    """The run's principal, who may answer unless quorums decide."""
    asked_by: tuple[str, ...]
    """The path of calls that leads to the asker, outermost first."""
    call_id: str
    asked_at: datetime
    expires_at: datetime | None = None
    run_id: str = ""
    """The id of the outermost run that waits for the answer."""
    decision_keys: DecisionKeys | None = None
    """The keys under which the answer can be remembered; None if it can't be. They are recorded but never shown."""
    quorums: tuple[Quorum, ...] = ()
    """The people who decide an approval instead of the principal. All quorums must be met."""
    title: str = ""
    """A heading for people; "" if there is none. Invisible characters in it are escaped."""
    markdown: tuple[str, ...] = ()
    """The names of the payload's fields that are `Markdown`. An approval has none."""
    secret: bool = False
    """Whether the answer may contain a secret. If so, it is recorded masked, and accepted only while the asker waits."""

    @property
    def askers(self) -> tuple[str, ...]:
        """The path of calls that leads to the asker, without the acts of handoffs, for people to read."""
        return tuple(name for name in self.asked_by if "." not in name)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The payload as every environment shows it; for an approval, only the call's parsed arguments."""
        return rows_of_payload(self.kind, self.payload)

    def may_vote(self, by: str, roles: Collection[str], waited: float) -> bool:
        """Return whether this person's vote counts towards a quorum, once the question has waited for this many seconds.

        A vote by the run's principal never does. Whether the person has the right to vote at all is checked elsewhere.
        """
        vote = Vote(
            question_id=self.id, digest=self.digest, by=by, roles=tuple(roles), approved=True, waited=waited
        )
        return by != self.principal and any(quorum.counts(vote) for quorum in self.quorums)

    def decided_by(self, votes: Iterable[Vote]) -> bool | None:
        """Return False if a vote that counts is a denial, True once every quorum is met, and None otherwise.

        A vote counts only if it has this question's digest, and only if `may_vote` is true for its person and roles. Of
        several such votes by one person, the first counts.
        """
        counted: dict[str, Vote] = {}
        for vote in votes:
            if vote.digest == self.digest and self.may_vote(vote.by, vote.roles, vote.waited):
                counted.setdefault(vote.by, vote)
        if any(not vote.approved for vote in counted.values()):
            return False
        met = (
            sum(quorum.counts(vote) for vote in counted.values()) >= quorum.approvals
            for quorum in self.quorums
        )
        return True if self.quorums and all(met) else None


def markdown_fields(payload: object) -> tuple[str, ...]:
    """Return the names of the fields of a payload whose type is `Markdown`; () if the payload's type names no fields."""
    try:
        hints = get_type_hints(type(payload), include_extras=True)
    except (NameError, TypeError):  # a name that only a type checker knows
        return ()
    return tuple(name for name, hint in hints.items() if MARKDOWN in getattr(hint, "__metadata__", ()))


def rows_of_payload(kind: QuestionKind, payload: Any) -> tuple[Row, ...]:
    """Return a question's payload as rows. For an approval, these are the call's arguments."""
    if kind == "approval" and isinstance(payload, dict):
        payload = cast(dict[str, Any], payload).get("arguments")
    if isinstance(payload, dict):
        return rows_of(cast(dict[str, Any], payload))
    return () if payload in (None, "", []) else rows_of({"given": payload})


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question, or how the question ended without one."""

    question_id: str
    digest: str
    by: str
    outcome: AnswerOutcome = "answered"
    value: Any = None
    reason: str = ""
    votes: tuple[Vote, ...] = ()
    """The votes that led to this answer, if quorums decide the question; otherwise empty."""
    seal: str = ""
    """For a recorded answer whose value is masked, a digest of the actual value; otherwise "". Only the journal sets it."""
    remark: str = ""
    """What the person said along with the answer. The run's model is told after the results of the calls that were asked about."""
    attachments: tuple[Attachment, ...] = ()
    """The files that come with the remark."""

    @property
    def has_remark(self) -> bool:
        """Whether the person said something, or gave files, along with the answer."""
        return bool(self.remark or self.attachments)
