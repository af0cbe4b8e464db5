#!/usr/bin/env python3
"""Break the code on purpose, one place at a time, and see that the tests notice.

Each mutant is a guarantee taken away. One that no test catches is a guarantee nobody checks, and
fails this script. Run by `make test-deep`; names as arguments choose some of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str


SIMULATED = "tests/testing/test_simulation.py"

MUTANTS = [
    Mutant(
        "file rollback skipped",
        "dispatch/transaction.py",
        "        for fork in self.touched:\n            fork.drop()",
        "        for fork in self._forks.values() if self._forks else ():\n            fork.prepare()\n            fork.apply()",
        "tests/dispatch/test_failure_table.py",
    ),
    Mutant(
        "version check skipped",
        "dispatch/gate.py",
        "        stale = transaction.stale()\n",
        "        stale = ()\n",
        "tests/dispatch/test_effects.py tests/dispatch/test_transactions.py",
    ),
    Mutant(
        "double end event",
        "dispatch/gate.py",
        "        result = self._end(call)  # 10\n",
        "        result = self._end(call)  # 10\n        self._end(call)\n",
        "tests/dispatch/test_gate.py",
    ),
    Mutant(
        "published before commit",
        "session/fork.py",
        "        if route.logs:\n            root.dispatcher.publish(event)",
        "        root.dispatcher.publish(event)",
        "tests/dispatch/test_gate.py tests/dispatch/test_transactions.py",
    ),
    Mutant(
        "stale read accepted",
        "dispatch/gate.py",
        "        if stale and EFFECTS[call.tool.effect].transactional:",
        "        if stale and EFFECTS[call.tool.effect].transactional and call.tool.effect != 'staged':",
        "tests/dispatch/test_effects.py tests/dispatch/test_transactions.py",
    ),
    Mutant(
        "inner commit leaks",
        "dispatch/transaction.py",
        "    parent = None if call.parent is None else call.parent.transaction\n",
        "    parent = None\n",
        "tests/dispatch/test_gate.py tests/dispatch/test_transactions.py",
    ),
    Mutant(
        "late thread's write accepted",
        "dispatch/call.py",
        "        self.ended = True\n",
        "",
        "tests/dispatch/test_gate.py",
    ),
    Mutant(
        "policy error allows",
        "dispatch/gate.py",
        '                raise Refused(\n                    "denied", f"The policy {policy.name!r} could not decide',
        '                continue\n                raise Refused(\n                    "denied", f"The policy {policy.name!r} could not decide',
        "tests/dispatch/test_failure_table.py",
    ),
    Mutant(
        "an approval goes before a denial",
        "guard/memory.py",
        "            if not each.approved and each.key in self._cover(",
        "            if False and not each.approved and each.key in self._cover(",
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "an approval of one diff is one of another",
        "guard/coverage.py",
        "        exact=_key(whose, *about, exactly, diff),\n",
        '        exact=_key(whose, *about, exactly, ""),\n',
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "links lead out of a scope",
        "dispatch/places.py",
        "            found += _followed(call, named)\n",
        "            pass\n",
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "a scope is held to what a call said",
        "dispatch/places.py",
        "        found += changed\n",
        "        pass\n",
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "any scope can be answered with",
        "guard/approval.py",
        "answer.scope not in offered:",
        "False:",
        "tests/guard/test_approval_attacks.py",
    ),
    Mutant(
        "memory of another session",
        "guard/coverage.py",
        "    return hashlib.sha256(json.dumps(parts,",
        "    return hashlib.sha256(json.dumps(parts[1:],",
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "reservation not returned",
        "limits/budget.py",
        '        """Nothing was spent."""\n        self._end({})',
        '        """Nothing was spent."""',
        "tests/limits/test_budget.py",
    ),
    Mutant(
        "foreign edit overwritten",
        "resources/directory/commit.py",
        "            self._disk.exchange(slots, step.slot, there, name)\n            if not self._as_expected(step):\n",
        "            self._disk.exchange(slots, step.slot, there, name)\n            if False:\n",
        "tests/resources/directory/test_directory.py",
    ),
    Mutant(
        "links followed by the kernel",
        "resources/directory/syscalls.py",
        "_RESOLVE = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS\n",
        "_RESOLVE = 0\n",
        "tests/resources/directory/test_attacks.py",
    ),
    Mutant(
        "staged bytes forgotten before the record is void",
        "resources/directory/fork.py",
        "                    if not asked_for:\n                        self.drop()\n",
        "                    self.drop()\n",
        "tests/resources/directory/test_crash.py",
    ),
    Mutant(
        "staged files not synced",
        "resources/directory/area.py",
        "        for name in slots:\n            self.disk.sync_file(folder / name)\n",
        "",
        "tests/resources/directory/test_crash.py",
    ),
    Mutant(
        "files renamed before they are recorded",
        "dispatch/recording.py",
        "    await journal.commit(unit)  # 2\n    try:\n        await run_in_thread(lambda: transaction.apply_durable(synced))  # 3\n",
        "    await run_in_thread(lambda: transaction.apply_durable(synced))  # 3\n    await journal.commit(unit)  # 2\n    try:\n",
        "tests/resources/directory/test_gate.py tests/resources/directory/test_crash.py",
    ),
    Mutant(
        "retry of an irreversible call",
        "tools/effect.py",
        '"irreversible": EffectRules(5, True, False, False,',
        '"irreversible": EffectRules(5, True, False, True,',
        "tests/dispatch/test_effects.py",
    ),
    Mutant(
        "disabled section shown",
        "prompt/plan.py",
        "        if not self.enabled.evaluate(prompt, self.path, given):\n            return None\n",
        "",
        "tests/prompt/test_rendering.py",
    ),
    Mutant(
        "tools of closed sections offered",
        "prompt/rendering.py",
        "for node in shown if _is_open(node, opened) for tool in node.tools",
        "for node in shown for tool in node.tools",
        "tests/prompt/test_disclosure.py",
    ),
    Mutant(
        "values looked into",
        "prompt/template.py",
        '        return "".join(filled)',
        '        return template_of("".join(filled).replace("$$", "$")).parts[0]',
        "tests/prompt/test_rendering.py",
    ),
    Mutant(
        "stale override applied",
        "prompt/overrides.py",
        "one for one in accepting if one.replaces == override.replaces",
        "one for one in accepting",
        "tests/prompt/test_overrides.py",
    ),
    Mutant(
        "answer taken twice",
        "journal/sqlite.py",
        "                if msgspec.msgpack.decode(found[0], type=Answer) != _plain(encoded):\n",
        "                connection.execute('UPDATE questions SET answer = ? WHERE id = ?', (encoded, answer.question_id))\n                if False:\n",
        SIMULATED,
    ),
    Mutant(
        "step recorded after its effect",
        "journal/sqlite.py",
        "            row = await self._do(lambda connection: self._reserve(connection, key, run_id))\n"
        "            if row is not None and row[0] is not None:\n"
        "                return msgspec.msgpack.decode(row[0])\n"
        "            try:\n"
        "                value = await (function() if row is None or unsettled is None else unsettled())\n",
        "            row = await self._do(_first('SELECT value FROM steps WHERE key = ?', key))\n"
        "            if row is not None and row[0] is not None:\n"
        "                return msgspec.msgpack.decode(row[0])\n"
        "            try:\n"
        "                value = await (function() if row is None or unsettled is None else unsettled())\n"
        "                await self._do(lambda connection: self._reserve(connection, key, run_id))\n",
        SIMULATED,
    ),
    Mutant(
        "inner result without its state",
        "dispatch/replaying.py",
        "        [encode_item(event, call.frame.session.id) for event in transaction.events]\n        if succeeded and transaction is not None\n        else [],\n        files,\n",
        "        [],\n        [],\n",
        SIMULATED,
    ),
    Mutant(
        "random nested id",
        "dispatch/frame.py",
        '        run_id = f"{ids.request_id}{place}"\n',
        '        run_id = f"{ids.request_id}{place}{id(call)}"\n',
        SIMULATED,
    ),
    Mutant(
        "undo over a later read",
        "runs/undoing.py",
        "    touched = (*other.reads, *other.writes)\n",
        "    touched = tuple(other.writes)\n",
        "tests/runs/test_undo.py",
    ),
    Mutant(
        "lease not checked",
        "journal/lease.py",
        "    return not owner or owner == me or now >= leased_until or is_dead(owner)\n",
        "    return True\n",
        SIMULATED,
    ),
    Mutant(
        "overtaken process goes on writing",
        "journal/sqlite.py",
        "        if row[0] != self.owner:\n            raise RunBusy(run_id, row[0])\n\n    # --- steps",
        "\n    # --- steps",
        SIMULATED,
    ),
    Mutant(
        "finished call run again",
        "dispatch/replaying.py",
        "        return None if unit is None else _taken_up(call, unit)\n",
        "        return None\n",
        SIMULATED,
    ),
    Mutant(
        "recorded answer of the model asked for again",
        "adapter/answer.py",
        "        if recorded is not None:\n",
        "        if recorded is not None and recorded.calls:\n",
        SIMULATED,
    ),
    Mutant(
        "irreversible call not marked as begun",
        "dispatch/replaying.py",
        "    if log is not None and not call.tool.enters_again:\n",
        "    if log is not None and not call.tool.enters_again and False:\n",
        SIMULATED,
    ),
    Mutant(
        "nested usage forgotten",
        "dispatch/replaying.py",
        "        frame.spending.add(spent.usage or Usage(), spent.cost)\n",
        "",
        SIMULATED,
    ),
    Mutant(
        "private part of a handoff on the event bus",
        "handoff/acts.py",
        'fill(made, "shown", _without_private)',
        "pass",
        "tests/handoff/test_private.py",
    ),
    Mutant(
        "words of an act's exception passed on",
        "handoff/acts.py",
        "    lines = traceback.extract_tb",
        "    return error\n    lines = traceback.extract_tb",
        "tests/handoff/test_private.py",
    ),
    Mutant(
        "acts approved and counted again",
        "dispatch/gate.py",
        "policies = () if call.act else frame.policies",
        "policies = frame.policies",
        "tests/handoff/test_handoff.py",
    ),
    Mutant(
        "somebody asked twice because something changed",
        "dispatch/gate.py",
        " or call.tool.reenters",
        "",
        "tests/handoff/test_handoff.py",
    ),
    Mutant(
        "client's answer not checked",
        "handoff/acts.py",
        "parsed = self.answer.parse_value(value)",
        "parsed = value",
        "tests/handoff/test_handoff.py",
    ),
    Mutant(
        "session's run mode not heard",
        "dispatch/frame.py",
        "return tool.run_mode or self.session.run_mode or default",
        "return tool.run_mode or default",
        "tests/environment/test_environments.py",
    ),
    Mutant(
        "tool offered where nobody can play it",
        "adapter/run.py",
        "shown = [tool for tool in rendered.tools if frame.offers(tool)]",
        "shown = list(rendered.tools)",
        "tests/environment/test_environments.py",
    ),
]


def caught(mutant: Mutant) -> bool:
    """Does a test fail on the mutant? A mutant that can't be made or run is an error."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source)
        file = source / "handrail" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"{mutant.name}: {mutant.file} holds its text {text.count(mutant.old)} times, not once")
        file.write_text(text.replace(mutant.old, mutant.new))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(source),
                "HANDRAIL_DEEP": "",
                "HYPOTHESIS_STORAGE_DIRECTORY": folder,
            },
            capture_output=True,
            text=True,
        )
    if run.returncode not in (0, 1):
        sys.exit(f"{mutant.name}: the tests could not be run\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.returncode == 1


def main() -> int:
    survivors: list[str] = []
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    for number, mutant in enumerate(chosen, 1):
        verdict = "caught" if caught(mutant) else "SURVIVED"
        print(f"mutant {number:2} {verdict:8} {mutant.name} ({mutant.file})", flush=True)
        if verdict == "SURVIVED":
            survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
