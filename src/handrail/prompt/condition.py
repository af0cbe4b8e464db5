"""Conditions: `enabled` and `visibility` as a plain value, or as a function asked at every rendering."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import CodeType
from typing import Any, cast

from handrail.errors import PromptDefinitionError, PromptRenderError
from handrail.tools.signature import body_of

ASKABLE = ("params", "session")
"""What such a function can ask for, by these names."""


def asked_for(function: Callable[..., Any]) -> frozenset[str]:
    """Which of `params` and `session` a function takes, or `PromptDefinitionError` if it takes anything else."""
    form = "Write it as a function of `params`, of `session`, or of both, by these names."
    body = body_of(function)
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
        raise PromptDefinitionError(
            "function", "is async or yields, and rendering does not wait", "Make it a plain one."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise PromptDefinitionError("function", "has a signature that can't be read", form) from None
    asked: set[str] = set()
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name in ASKABLE:
            asked.add(parameter.name)
        elif parameter.name in ASKABLE or parameter.default is parameter.empty:
            raise PromptDefinitionError("function", f"takes {str(parameter)!r}", form)
    return frozenset(asked)


class Condition:
    """One `enabled` or `visibility`, ready to be asked."""

    __slots__ = ("_allowed", "_asked", "_function", "_value", "_what")

    def __init__(self, given: object, what: str, allowed: tuple[object, ...]) -> None:
        self._value = given
        self._what = what
        self._allowed = allowed
        self._function = cast("Callable[..., Any]", given) if callable(given) else None
        self._asked = frozenset[str]() if self._function is None else asked_for(self._function)

    @property
    def is_fixed(self) -> bool:
        """Is it the same at every rendering?"""
        return self._function is None

    @property
    def asks_params(self) -> bool:
        return "params" in self._asked

    def may_be(self, value: object) -> bool:
        """Can the answer be this?"""
        return self._function is not None or self._value == value

    def fields_used(self, fields: frozenset[str]) -> frozenset[str]:
        """Which fields of the params its function reads; all, where that can't be told from its code."""
        if self._function is None or not self.asks_params:
            return frozenset()
        read = _attributes_read(body_of(self._function), "params")
        return fields if read is None else fields & read

    def answer(self, prompt: str, path: str, given: Mapping[str, Any]) -> Any:
        """Its value, or what its function says to the params and session of a rendering."""
        function = self._function
        if function is None:
            return self._value
        where = f"`{self._what}` of section {path!r}"
        if "session" in self._asked and given["session"] is None:
            raise PromptRenderError(
                prompt, f"{where} asks for the session, and there is none", "Give `session=`."
            )
        try:
            found = function(**{name: given[name] for name in self._asked})
        except Exception as error:
            problem = f"{where} raised {type(error).__name__}: {error}".rstrip(".")
            raise PromptRenderError(prompt, problem, "Correct the function.") from error
        if type(found) is not type(self._allowed[0]) or found not in self._allowed:
            words = " or ".join(map(repr, self._allowed))
            raise PromptRenderError(prompt, f"{where} gave {found!r}", f"It must give {words}.")
        return found


def _attributes_read(function: Any, name: str) -> frozenset[str] | None:
    """The attributes that a function reads of this parameter; None where it does anything else with it."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return None
    read: set[str] = set()
    for used, following in pairwise(dis.get_instructions(code)):
        names = cast("object", used.argval)
        if names != name and not (isinstance(names, tuple) and name in names):
            continue
        if names != name or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return None
        read.add(following.argval)
    return frozenset(read)
