"""The benchmark of growth measures every curve and draws it."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_growth_measures_and_draws_curves(tmp_path: Path):
    """A quick run prints three figures for each curve, and draws them as a picture that names all of them."""
    out = tmp_path / "growth.svg"
    command = [
        sys.executable,
        BENCH / "growth.py",
        "--quick",
        "--out",
        out,
        "turns",
        "messages",
        "tools",
        "journals",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    curves = {line[:46].strip() for line in printed.splitlines()[1:-1]}
    assert len(curves) == 8
    picture = ElementTree.fromstring(out.read_text())
    ns = "{http://www.w3.org/2000/svg}"
    names = {each.text for each in picture.iter(f"{ns}text") if each.get("class") == "name"}
    assert names == curves
    assert len(list(picture.iter(f"{ns}circle"))) == 3 * len(curves)
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for circle in picture.iter(f"{ns}circle"):
        assert 0 < float(circle.attrib["cx"]) < width
        assert 0 < float(circle.attrib["cy"]) < height


def test_an_unknown_curve_is_refused():
    """A misspelt curve is an error that lists the curves."""
    command = [sys.executable, BENCH / "growth.py", "--quick", "turn"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.search(r"no curve 'turn'. Choose from turns, ", result.stderr)
