"""The file that somebody who wants to tune a prompt's words starts from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from handrail.prompt import toml
from handrail.prompt.originals import Original
from handrail.prompt.plan import example_words

_HEAD = """\
# The words of the prompt {prompt}, to be tuned here instead of in the code.
#
# Change a text and leave its `replaces` as it is: that is the hash of the text in the code. Once the text in
# the code changes, yours is no longer applied and is reported, until you have looked at both and written the
# new hash. What you do not change can be deleted. Names, types and structure stay in the code.
"""


def starter(prompt: str, known: Iterable[Original]) -> str:
    """A file of overrides in which every text is still the one in the code."""
    blocks = [_HEAD.format(prompt=prompt)]
    written: set[tuple[str, str]] = set()
    for original in known:
        if original.accepts and (original.kind, original.path) not in written:
            written.add((original.kind, original.path))
            blocks.append("\n".join(_lines(original)) + "\n")
    return "\n".join(blocks)


def _lines(original: Original) -> Iterator[str]:
    group = "sections" if original.tool is None else "tools"
    name = toml.key(group, original.path, original.kind)
    yield f"[{name}]"
    yield f"replaces = {toml.string(original.replaces)}"
    if isinstance(original.value, str):
        yield f"text = {toml.string(original.value)}"
    elif not original.value:
        yield f"example = []  # write each under [[{name}.example]]: description, and input and output as JSON"
    elif original.tool is not None:
        for example in original.value:
            yield f"[[{name}.example]]"
            for field, text in example_words(original.tool, example).items():
                yield f"{field} = {toml.string(text)}"
