"""What a docstring says: the sentence for the model, and a line for each parameter."""

from __future__ import annotations

import re

_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Params)\s*:\s*$"  # Google
    r"|^\s*Parameters\s*\n\s*-{3,}\s*$"  # NumPy
    r"|^\s*:param\s+[^:]+:",  # Sphinx
    re.MULTILINE,
)


def summary(docstring: str) -> str:
    """The first paragraph, on one line; what is said of the parameters is no part of it."""
    found = _SECTION.search(docstring)
    prose = docstring[: found.start()] if found else docstring
    return " ".join(re.split(r"\n\s*\n", prose.strip(), maxsplit=1)[0].split())


def parameter_descriptions(docstring: str) -> dict[str, str]:
    """What the docstring says of each parameter, in the Google, NumPy or Sphinx style."""
    found = _SECTION.search(docstring)
    if found is None:
        return {}  # most docstrings: the parser is not even imported
    head, section = docstring[: found.start()], docstring[found.start() :].lstrip("\n")
    return _parsed(f"{head.rstrip()}\n\n{section}", _style_of(found.group()))


def _style_of(section: str) -> str:
    if section.lstrip().startswith(":param"):
        return "sphinx"
    return "numpy" if "---" in section else "google"


def _parsed(docstring: str, style: str) -> dict[str, str]:
    import logging

    from griffe import Docstring, DocstringSectionParameters, Parser

    logging.getLogger("griffe").setLevel(logging.ERROR)  # it warns that the types are not in the docstring
    sections = Docstring(docstring).parse(Parser(style))
    return {
        parameter.name: " ".join(parameter.description.split())
        for section in sections
        if isinstance(section, DocstringSectionParameters)
        for parameter in section.value
    }
