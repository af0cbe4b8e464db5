"""Runs the commands of docs/production.md on an empty Debian, which systemd boots in a container of its own.

    python tests/deploy/machine.py FOLDER

It needs root, `debootstrap` and `systemd-container`, a Debian mirror and an index of Python packages. The machine shares
this one's network, so its ports 443, 5432 and 8600 must be free. FOLDER keeps the empty machine for the next time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/production.md"
FENCE = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PACKAGES = "systemd,systemd-sysv,dbus,ca-certificates"
APP = """
from handrail import Agent, ScriptedModel

agent = Agent(ScriptedModel(lambda request: "Welcome."), "Greet people.")
"""
UNIT = """
[Unit]
After=multi-user.target
[Service]
Type=oneshot
WorkingDirectory=/root
ExecStart=/bin/bash /root/commands.sh
StandardOutput=file:/root/said
StandardError=file:/root/said
ExecStopPost=/bin/systemctl --no-block poweroff
"""
LAST = """
for wait in $(seq 60); do
    .venv/bin/handrail runs list | grep -q done && break
    sleep 1
done
.venv/bin/handrail runs list
systemctl is-active handrail-server.service handrail-worker@1.service handrail-worker@2.service nginx.service
curl --fail --silent --cacert /etc/handrail/tls.crt --resolve chat.example:443:127.0.0.1 --retry 30 --retry-all-errors https://chat.example/agents/readyz
echo
echo ALL DONE
"""


def commands() -> list[str]:
    """Return the blocks of commands of the page, in order."""
    return FENCE.findall(PAGE.read_text())


def prepare(folder: Path) -> Path:
    """Create the empty machine, unless the folder has it already, and return a fresh copy of it."""
    empty, machine, wheels = folder / "empty", folder / "machine", folder / "wheels"
    if not (empty / "done").exists():
        shutil.rmtree(empty, ignore_errors=True)
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(empty)]
        subprocess.run([*words, "http://deb.debian.org/debian"], check=True)
        (empty / "done").touch()
    shutil.rmtree(machine, ignore_errors=True)
    shutil.rmtree(wheels, ignore_errors=True)
    subprocess.run(["cp", "-a", empty, machine], check=True)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, ROOT], check=True)
    [wheel] = wheels.glob("handrail-*.whl")
    subprocess.run([*pip, "download", "-d", wheels, f"{wheel}[cli,serve,postgres]"], check=True)
    root = machine / "root"
    shutil.copytree(wheels, root / "wheels")
    shutil.copytree(ROOT / "deploy", root / "deploy")
    shutil.copy("/etc/resolv.conf", machine / "etc/resolv.conf")
    (machine / "etc/pip.conf").write_text("[global]\nno-index = yes\npre = yes\nfind-links = /root/wheels\n")
    (root / "shop.py").write_text(APP)
    script = "set -ex\n" + "\n".join(commands()).replace("cp deploy/", "cp /root/deploy/").replace(
        " deploy/", " /root/deploy/"
    )
    (root / "commands.sh").write_text(script + LAST)
    (machine / "etc/systemd/system/commands.service").write_text(UNIT)
    wants = machine / "etc/systemd/system/graphical.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (wants / "commands.service").symlink_to("/etc/systemd/system/commands.service")
    return machine


def run(folder: Path) -> str:
    """Boot the machine, run the commands, and return what they printed."""
    machine = prepare(folder)
    words = ["systemd-nspawn", "-q", "--boot", "--register=no", "--keep-unit", "-D", str(machine)]
    subprocess.run(
        [*words, "--console=read-only", "--capability=CAP_SYS_ADMIN"],
        stdin=subprocess.DEVNULL,
        stdout=(folder / "console").open("wb"),
        stderr=subprocess.STDOUT,
        timeout=1200,
        check=False,
    )
    return (machine / "root/said").read_text()


if __name__ == "__main__":
    said = run(Path(sys.argv[1]).resolve())
    sys.stdout.write(said)
    sys.exit(0 if said.endswith("ALL DONE\n") else 1)
