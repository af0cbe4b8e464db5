"""The files in deploy/: units that systemd accepts, and YAML whose commands the program accepts."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.machine import commands as machine_commands
from support import ROOT
from support.commands import check_command, commands_in

pytestmark = pytest.mark.once  # the files do not depend on the Python version

DEPLOY = ROOT / "deploy"
UNITS = ["handrail-server.service", "handrail-worker@.service"]


def settings(unit: str) -> list[tuple[str, str]]:
    lines = (DEPLOY / unit).read_text().splitlines()
    return [
        (name, value)
        for name, found, value in (line.partition("=") for line in lines)
        if found and name[0] != "#"
    ]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Fixture: a folder with the units, the drop-in, and the program at the place that they name."""
    units = tmp_path / "etc/systemd/system"
    drop_in = units / "handrail-worker@.service.d"
    drop_in.mkdir(parents=True)
    for each in UNITS:
        shutil.copy(DEPLOY / each, units)
    shutil.copy(DEPLOY / "handrail-worker-commands.conf", drop_in / "commands.conf")
    return units


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_units_and_finds_them_hardened(unit: str, tmp_path: Path) -> None:
    program = tmp_path / "handrail"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    instance = tmp_path / unit.replace("@", "@1")
    text = (DEPLOY / unit).read_text()
    # The program and its user are on the machine where the units are installed, and not on this one.
    instance.write_text(
        text.replace("/srv/shop/.venv/bin/handrail", str(program)).replace("User=shop", "User=daemon")
    )
    verified = subprocess.run(["systemd-analyze", "verify", instance], capture_output=True, text=True)
    ours = [line for line in (verified.stdout + verified.stderr).splitlines() if "handrail" in line]
    assert not ours
    assert verified.returncode == 0
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", instance],
        capture_output=True,
        text=True,
    )
    assert rated.returncode == 0, rated.stdout[-500:]
    assert re.search(r"exposure level for .*: 1\.\d OK", rated.stdout)


@pytest.mark.parametrize("unit", [*UNITS, "handrail-worker-commands.conf"])
def test_the_program_accepts_the_commands_of_the_units(unit: str) -> None:
    commands = [value for name, value in settings(unit) if name in ("ExecStart", "ExecStartPre") and value]
    assert commands
    for each in commands:
        check_command(shlex.split(each))


def test_the_drop_in_for_commands_changes_only_what_the_unit_sets(machine: Path) -> None:
    worker = {name for name, _ in settings("handrail-worker@.service")}
    assert {name for name, _ in settings("handrail-worker-commands.conf")} <= worker


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_gives_the_process_more_time_to_stop_than_its_runs(unit: str) -> None:
    given = dict(settings(unit))
    words = shlex.split(given["ExecStart"])
    grace = float(words[words.index("--grace") + 1]) if "--grace" in words else 5.0
    assert float(given["TimeoutStopSec"]) > grace + 5


def test_the_program_accepts_the_commands_of_the_compose_file() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name in ("server", "worker"):
        service = compose["services"][name]
        shell, option, script = shlex.split(service["command"])
        assert (shell, option) == ("sh", "-c")
        commands = commands_in(script)
        assert [each[1] for each in commands] == ["doctor", "serve" if name == "server" else "worker"]
        for each in commands:
            check_command(each)
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert set(service["secrets"]) <= compose["secrets"].keys()
    check_variables(compose["services"]["worker"]["environment"])


def test_the_program_accepts_the_commands_of_the_kubernetes_manifest() -> None:
    parts: list[Any] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    names = {(each["kind"], each["metadata"]["name"]) for each in parts}
    assert names == {("Deployment", "shop-worker"), ("Deployment", "shop-server"), ("Service", "shop")}
    for each in parts[:2]:
        pod = each["spec"]["template"]["spec"]
        assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            check_command(container["command"])
            check_variables({one["name"]: one for one in container["env"]})
            secure = container["securityContext"]
            assert secure["readOnlyRootFilesystem"]
            assert not secure["allowPrivilegeEscalation"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            for probe in ("livenessProbe", "readinessProbe"):
                if probe in container:
                    server = SERVER if container["name"] == "server" else WORKER
                    assert f'"{container[probe]["httpGet"]["path"]}"' in server


def test_the_image_runs_as_an_ordinary_user_and_starts_a_worker() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert "USER 10001:10001" in lines
    [command] = [line.removeprefix("CMD ") for line in lines if line.startswith("CMD ")]
    check_command(yaml.safe_load(command))


WORKER = (ROOT / "src/handrail/fleet/status.py").read_text()
SERVER = (ROOT / "src/handrail/serve/app.py").read_text()


def check_variables(given: dict[str, Any]) -> None:
    """Check that the program reads each variable of its own that a file sets."""
    source = "".join(each.read_text() for each in (ROOT / "src/handrail").rglob("*.py"))
    for name in given:
        assert not name.startswith("HANDRAIL_") or name in source


def test_the_program_accepts_the_commands_of_the_page_on_production() -> None:
    found = [command for block in machine_commands() for command in commands_in(block)]
    assert {each[1] for each in found} >= {"doctor", "users", "submit", "runs", "journal"}
    for each in found:
        check_command(each)


def test_the_page_on_production_names_only_files_that_exist() -> None:
    for name in re.findall(r"deploy/[\w.@-]+", "\n".join(machine_commands())):
        assert (ROOT / name).is_file(), name
