"""Conditions: `enabled` and `visibility` as a plain value, or as a function asked at every rendering."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from handrail.errors import PromptRenderError
from handrail.tools.signature import body_of, mentions

ASKABLE = ("params", "session")
"""What such a function can ask for, by these names."""


class ConditionError(ValueError):
    """A function that can't be asked; `.problem` and `.mend` say why."""

    def __init__(self, problem: str, mend: str) -> None:
        super().__init__(f"{problem}. {mend}")
        self.problem = problem
        self.mend = mend


def asked_for(function: Callable[..., Any]) -> frozenset[str]:
    """Which of `params` and `session` a function takes, or `ConditionError` if it takes anything else."""
    form = "Write it as a function of `params`, of `session`, or of both, by these names."
    body = body_of(function)
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
        raise ConditionError("is async or yields, and rendering does not wait", "Make it a plain function.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConditionError("has a signature that can't be read", form) from None
    asked: set[str] = set()
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name in ASKABLE:
            asked.add(parameter.name)
        elif not by_name or parameter.default is parameter.empty:
            raise ConditionError(f"takes {str(parameter)!r}", form)
    return frozenset(asked)


def fields_used(function: Callable[..., Any], fields: frozenset[str]) -> frozenset[str]:
    """Which fields of the params a function reads, by the names in its code.

    One that names none hands its params on to somebody else, who may read any of them.
    """
    if "params" not in asked_for(function):
        return frozenset()
    return frozenset(field for field in fields if mentions(body_of(function), field)) or fields


class Asked:
    """What the conditions of one rendering are asked with."""

    __slots__ = ("_given", "_prompt")

    def __init__(self, prompt: str, params: Any, session: Any) -> None:
        self._prompt = prompt
        self._given = {"params": params, "session": session}

    def answer(self, condition: object, path: str, what: str, allowed: tuple[object, ...]) -> Any:
        """The value of a condition: itself, or what its function says."""
        if not callable(condition):
            return condition
        where = f"`{what}` of section {path!r}"
        function = cast("Callable[..., Any]", condition)
        names = asked_for(function)
        if "session" in names and self._given["session"] is None:
            raise PromptRenderError(
                self._prompt, f"{where} asks for the session, and there is none", "Give `session=`."
            )
        try:
            found = function(**{name: self._given[name] for name in names})
        except Exception as error:
            problem = f"{where} raised {type(error).__name__}: {error}"
            raise PromptRenderError(self._prompt, problem, "Correct the function.") from error
        if not any(found is one or (type(found) is str and found == one) for one in allowed):
            words = " or ".join(map(repr, allowed))
            raise PromptRenderError(self._prompt, f"{where} gave {found!r}", f"It must give {words}.")
        return found
