"""`Prompt`: instructions, tools and policies in one tree, as a frozen value checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast, overload

from typing_extensions import TypeVar

from handrail.deadline import Deadline
from handrail.errors import PromptRenderError
from handrail.prompt.checking import Checked, check_prompt
from handrail.prompt.plan import resolved
from handrail.prompt.rendering import RenderedPrompt, Tree
from handrail.prompt.section import Section, as_sections
from handrail.protocols import SessionView, ToolPolicy
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.prompt.overrides import Overrides
    from handrail.resources import Binding

OutputT = TypeVar("OutputT", default=Any)

_MOST_KEPT = 64
"""How many renderings of one prompt are kept: one for each set of opened sections that came up."""


@dataclasses.dataclass(frozen=True, init=False)
class Prompt(Generic[OutputT]):
    """Instructions, tools and policies in one tree.

    `Prompt("guide", "Answer briefly.", tools=[weather])` is a prompt with one section and no heading, and so is each
    text among sections: `Prompt("guide", ["Answer briefly.", FileTools()])`. With
    `output=Report` it is a `Prompt[Report]`: the model's answer is a `Report`. Whatever is wrong with a
    definition is a `PromptDefinitionError` here, not later. Policies given here decide on every tool; a
    section's decide on the tools of the section and of those below it.
    """

    name: str
    sections: tuple[Section[Any], ...]
    tools: tuple[Tool[Any, Any], ...]
    output: type[OutputT] | None
    policies: tuple[ToolPolicy, ...]
    feedback: tuple[Any, ...]
    completion: tuple[Any, ...]
    resources: tuple[Binding[Any], ...]
    overrides: Overrides | None

    params_type: Any = dataclasses.field(init=False, repr=False, compare=False)
    """The one type of params its sections take; None where they take none."""
    _checked: Checked = dataclasses.field(init=False, repr=False, compare=False)
    _kept: dict[frozenset[str], RenderedPrompt[OutputT]] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    @overload
    def __init__(
        self: Prompt[None],
        name: str,
        sections: str | Sequence[str | Section[Any]],
        *,
        tools: Iterable[Tool[Any, Any]] = (),
        output: None = None,
        policies: Iterable[ToolPolicy] = (),
        feedback: Iterable[Any] = (),
        completion: Iterable[Any] = (),
        resources: Iterable[Binding[Any]] = (),
        overrides: Overrides | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        sections: str | Sequence[str | Section[Any]],
        *,
        tools: Iterable[Tool[Any, Any]] = (),
        output: type[OutputT],
        policies: Iterable[ToolPolicy] = (),
        feedback: Iterable[Any] = (),
        completion: Iterable[Any] = (),
        resources: Iterable[Binding[Any]] = (),
        overrides: Overrides | None = None,
    ) -> None: ...
    def __init__(
        self,
        name: str,
        sections: Any,
        *,
        tools: Any = (),
        output: Any = None,
        policies: Any = (),
        feedback: Any = (),
        completion: Any = (),
        resources: Any = (),
        overrides: Any = None,
    ) -> None:
        given = {
            "name": name,
            "sections": as_sections(sections),
            "tools": tools,
            "output": output,
            "policies": policies,
        }
        given |= {
            "feedback": feedback,
            "completion": completion,
            "resources": resources,
            "overrides": overrides,
        }
        for field, value in given.items():
            object.__setattr__(self, field, value)
        checked = check_prompt(cast("Prompt[Any]", self))
        object.__setattr__(self, "params_type", checked.params_type)
        object.__setattr__(self, "_checked", checked)
        object.__setattr__(self, "_kept", {})

    def __hash__(self) -> int:
        return hash(self.name)

    def render(
        self,
        params: Any = None,
        *,
        session: SessionView | None = None,
        opened: Collection[str] = (),
        deadline: Deadline | None = None,
    ) -> RenderedPrompt[OutputT]:
        """What a model is shown of this prompt.

        `params` are of the params type of the sections, or a mapping with its fields. `opened` are the paths
        of summaries to show in full, with those around them; ones that are disabled or no summaries now make
        no difference. The same is rendered for the same params and session, and a prompt that depends on
        neither is rendered once.
        """
        checked = self._checked
        opened = (opened,) if isinstance(opened, str) else opened
        if not checked.is_fixed:
            return self._rendered(params, session, opened, deadline)
        if params is not None:
            checked.taker.take(params)
        key = frozenset(opened)
        found = self._kept.get(key)
        if found is None:
            found = self._rendered(None, None, key, None)
            if len(self._kept) < _MOST_KEPT:
                self._kept[key] = found
        return found if deadline is None else dataclasses.replace(found, deadline=deadline)

    def _rendered(
        self, params: Any, session: SessionView | None, opened: Collection[str], deadline: Deadline | None
    ) -> RenderedPrompt[OutputT]:
        checked = self._checked
        taken = checked.taker.take(params)
        unknown = [path for path in opened if path not in checked.paths]
        if unknown:
            known = ", ".join(map(repr, sorted(checked.paths)))
            raise PromptRenderError(
                self.name, f"{unknown[0]!r} in `opened` is no section", f"Its sections are {known}."
            )
        values = {name: getattr(taken, name) for name in checked.used}
        nodes = resolved(self.name, checked.plans, values, {"params": taken, "session": session})
        tree = Tree(self.name, nodes, checked.tools, checked.examples, self.policies, checked.output_schema)
        return tree.rendered(tree.summaries(opened), deadline)
