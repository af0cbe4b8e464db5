"""Conditions: `enabled` and `visibility` as a plain value, or as a function called at every rendering."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from handrail.errors import PromptDefinitionError, PromptRenderError
from handrail.tools.signature import body_of

_GIVEN = ("params", "session")
"""The parameters such a function may have."""


class Condition:
    """One `enabled` or `visibility`, ready to be evaluated.

    A function takes `params`, `session`, both or neither; `**given` takes both. Anything else is a
    `PromptDefinitionError`.
    """

    __slots__ = ("_allowed", "_function", "_takes", "_takes_all", "_value", "_what")

    def __init__(self, given: object, what: str, allowed: tuple[object, ...]) -> None:
        self._value = given
        self._what = what
        self._allowed = allowed
        self._function = cast("Callable[..., Any]", given) if callable(given) else None
        self._takes: set[str] = set()
        self._takes_all = False
        if self._function is not None:
            self._read(self._function)
        elif type(given) is not type(allowed[0]) or given not in allowed:
            words = ", ".join(map(repr, allowed))
            raise PromptDefinitionError(
                what, f"is {given!r}", f"Give {words}, or a function that returns one of them."
            )

    def _read(self, function: Callable[..., Any]) -> None:
        form = "Write it as a function of `params`, of `session`, or of both, by these names."
        body = body_of(function)
        if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
            raise PromptDefinitionError(
                self._what, "is async or yields, and rendering does not wait", "Make it a plain function."
            )
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return  # a C function without a signature is called without arguments
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_all = True
            elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and (
                parameter.name in _GIVEN
            ):
                self._takes.add(parameter.name)
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
                raise PromptDefinitionError(self._what, f"is a function that takes {str(parameter)!r}", form)

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same at every rendering."""
        return self._function is None

    @property
    def takes_params(self) -> bool:
        """Whether its function names `params`."""
        return "params" in self._takes

    @property
    def may_read_params(self) -> bool:
        """Whether its function can read any field of the params."""
        return self._takes_all or self.takes_params

    def may_be(self, value: object) -> bool:
        """Whether it can have this value."""
        return self._function is not None or self._value == value

    def evaluate(self, prompt: str, path: str, given: Mapping[str, Any]) -> Any:
        """Its value, or what its function returns for the params and session of a rendering."""
        function = self._function
        if function is None:
            return self._value
        where = f"`{self._what}` of section {path!r}"
        if "session" in self._takes and given["session"] is None:
            raise PromptRenderError(
                prompt, f"{where} asks for the session, and there is none", "Give `session=`."
            )
        try:
            found = function(**(given if self._takes_all else {name: given[name] for name in self._takes}))
        except Exception as error:
            problem = f"{where} raised {type(error).__name__}: {error}".rstrip(".")
            raise PromptRenderError(prompt, problem, "Correct the function.") from error
        if type(found) is not type(self._allowed[0]) or found not in self._allowed:
            words = " or ".join(map(repr, self._allowed))
            raise PromptRenderError(prompt, f"{where} returned {found!r}", f"It must return {words}.")
        return found
