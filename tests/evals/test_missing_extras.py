"""Without their libraries, the names of `handrail.evals` say what to install."""

import importlib
import subprocess
import sys

import pytest

from handrail.errors import DefinitionError


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("AgentTask", "pydantic_evals", "evals"),
        ("DeniedCalls", "pydantic_evals", "evals"),
        ("check_report", "pydantic_evals", "evals"),
        ("inspect_agent", "inspect_ai", "inspect"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    name: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
):
    """Using a name without its library raises an error with the command that installs it."""
    for module in [*sys.modules]:
        if module.startswith("handrail.evals"):
            monkeypatch.delitem(sys.modules, module)
        elif module.partition(".")[0] == library:
            monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, library, None)
    evals = importlib.import_module("handrail.evals")
    with pytest.raises(DefinitionError, match=rf"needs {library}.*pip install 'handrail\[{extra}\]'"):
        getattr(evals, name)


def test_what_an_agent_did_needs_neither_library():
    """The package and `Conduct` load neither library."""
    code = "import sys, handrail.evals as e; e.Conduct; assert not {'pydantic_evals', 'inspect_ai'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
