"""Break the code on purpose, in one place at a time, and check that the tests notice.

Each mutant removes a guarantee. If no test catches one, that guarantee is untested, and this script fails. `make
test-deep` runs this script. Arguments select mutants by name. `--jobs N`, before the names, tries N mutants at a time
instead of two. `--find` only checks that the text which each mutant replaces is still in the code. If a change to the
code removes that text, update the mutant.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
        "run/transaction.py",
        "                fork.drop()\n",
        "                if not isinstance(fork, SessionFork):\n                    fork.prepare()\n                    fork.apply()\n",
        "tests/run/test_failure_table.py",
    ),
    Mutant(
        "version check skipped",
        "run/commit.py",
        "if stale and EFFECTS[attempt.tool.effect].transactional:",
        "if False:",
        "tests/run/test_effects.py tests/run/test_transactions.py",
    ),
    Mutant(
        "results are shown after the commit",
        "run/handlers.py",
        "    _check_rendering(tool, result, attempt)\n",
        "    pass\n",
        "tests/run/test_shown_results.py",
    ),
    Mutant(
        "an error holds on to its call",
        "run/gate.py",
        "            forget_frames(error)",
        "            pass",
        "tests/run/test_any_error.py",
    ),
    Mutant(
        "double end event",
        "run/gate.py",
        "        self._end(attempt, ending)  # 10\n",
        "        self._end(attempt, ending)  # 10\n        self._end(attempt, ending)\n",
        "tests/run/test_gate.py",
    ),
    Mutant(
        "published before commit",
        "session/fork.py",
        "        if route.logs:\n            root.dispatcher.publish(event)",
        "        root.dispatcher.publish(event)",
        "tests/run/test_gate.py tests/run/test_transactions.py",
    ),
    Mutant(
        "stale read accepted",
        "run/commit.py",
        "    if stale and EFFECTS[attempt.tool.effect].transactional:",
        "    if stale and EFFECTS[attempt.tool.effect].transactional and attempt.tool.effect != 'staged':",
        "tests/run/test_effects.py tests/run/test_transactions.py",
    ),
    Mutant(
        "inner commit leaks",
        "run/transaction.py",
        "    parent = None if outer is None or outer.is_undone else outer.open_transaction.around_inner\n",
        "    parent = None\n",
        "tests/run/test_gate.py tests/run/test_transactions.py",
    ),
    Mutant(
        "late thread's write accepted",
        "run/call.py",
        "        self.ended = True\n",
        "",
        "tests/run/test_gate.py",
    ),
    Mutant(
        "policy error allows",
        "run/policies.py",
        "        except (Exception, GeneratorExit) as error:\n            raise _undecided(attempt, policy) from error\n        if decision is ALLOWED",
        "        except Exception:\n            continue\n        if decision is ALLOWED",
        "tests/run/test_failure_table.py",
    ),
    Mutant(
        "an approval goes before a denial",
        "guard/remembered.py",
        "            if not each.approved and each.key in self._cover(",
        "            if False and not each.approved and each.key in self._cover(",
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "an approval of one diff covers another diff",
        "guard/remembered.py",
        "        exact=_key(whose, *about, exactly, diff) if",
        '        exact=_key(whose, *about, exactly, "") if',
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "the installation that runs Handrail can be changed",
        "resources/directory/fork.py",
        "            self.store.refuse_installed(join(folder, name), around=not node.is_folder)\n",
        "            pass\n",
        "tests/resources/test_installation.py",
    ),
    Mutant(
        "a sandbox shows what a link in its folder leads to",
        "resources/shell/sandbox.py",
        "            if not each.leads_through(request.root)\n",
        "",
        "tests/resources/test_installation.py",
    ),
    Mutant(
        "links lead out of a scope",
        "run/approval.py",
        "            found += _followed(attempt, named)\n",
        "            pass\n",
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "a scope is compared only with what a call declared",
        "run/approval.py",
        "        found += changed\n",
        "        pass\n",
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "an answer may name a scope that was not offered",
        "guard/approval.py",
        "answer.scope not in offered:",
        "False:",
        "tests/guard/test_approval_attacks.py",
    ),
    Mutant(
        "a decision of another session applies",
        "guard/remembered.py",
        "    return hashlib.sha256(json.dumps(parts,",
        "    return hashlib.sha256(json.dumps(parts[1:],",
        "tests/guard/test_approval_memory.py",
    ),
    Mutant(
        "reservation not returned",
        "run/limits.py",
        '        """Give the whole reservation back to the budget. Does nothing if it was settled or released before."""\n        self._end({})',
        '        """Give the whole reservation back to the budget. Does nothing if it was settled or released before."""',
        "tests/run/test_budget.py",
    ),
    Mutant(
        "foreign edit overwritten",
        "resources/directory/commit.py",
        "            if busy or not _is_expected(step, slots, step.slot, displaced):\n",
        "            if False:\n",
        "tests/resources/directory/test_directory.py",
    ),
    Mutant(
        "newer save overwritten",
        "resources/directory/commit.py",
        "            if _identity_in(slots, step.slot) == ours:\n",
        "            if True:\n",
        "tests/resources/directory/test_processes.py",
    ),
    Mutant(
        "two processes rename at once",
        "resources/directory/claim_table.py",
        "                if _lock(fd):\n",
        "                if True:\n",
        "tests/resources/directory/test_processes.py",
    ),
    Mutant(
        "claims in one process ignored",
        "concurrency/claims.py",
        "        return any(clash(each.places, claim.places)",
        "        return False and any(clash(each.places, claim.places)",
        "tests/isolation/test_law.py tests/isolation/test_cases.py",
    ),
    Mutant(
        "claims of other processes ignored",
        "resources/directory/claim_table.py",
        "                    place = self._blocked(claim)\n",
        "                    place = None\n",
        "tests/isolation/test_law.py tests/isolation/test_cases.py tests/resources/directory/test_claim_table.py",
    ),
    Mutant(
        "commits since the check ignored",
        "resources/directory/claim_table.py",
        "                        self._check_since(claim)\n",
        "",
        "tests/isolation/test_law.py tests/isolation/test_cases.py tests/resources/directory/test_claim_table.py",
    ),
    Mutant(
        "calls that conflict fail",
        "run/commit.py",
        "    if can_repeat and transaction.others_committed():\n",
        "    if False:\n",
        "tests/isolation/test_cases.py",
    ),
    Mutant(
        "overlapping roots accepted",
        "resources/directory/roots.py",
        "            _refuse_overlap(mine, other)\n",
        "            pass\n",
        "tests/resources/directory/test_roots.py",
    ),
    Mutant(
        "links followed by the kernel",
        "resources/directory/disk.py",
        "_RESOLVE = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS\n",
        "_RESOLVE = 0\n",
        "tests/resources/directory/test_attacks.py",
    ),
    Mutant(
        "staged bytes forgotten before the record is void",
        "resources/directory/fork.py",
        "                if not asked_for:\n                    self.drop()\n",
        "                self.drop()\n",
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
        "run/commit.py",
        "    await journal.calls.commit(unit)  # 2\n    try:\n        await run_in_thread(lambda: transaction.apply_durable(synced))  # 3\n",
        "    await run_in_thread(lambda: transaction.apply_durable(synced))  # 3\n    await journal.calls.commit(unit)  # 2\n    try:\n",
        "tests/resources/directory/test_gate.py tests/resources/directory/test_crash.py",
    ),
    Mutant(
        "retry of an irreversible call",
        "tools/effect.py",
        '"irreversible": EffectRules(5, True, False, False,',
        '"irreversible": EffectRules(5, True, False, True,',
        "tests/run/test_effects.py",
    ),
    Mutant(
        "disabled section shown",
        "prompt/rendering.py",
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
        "placeholders in values are filled in",
        "prompt/section.py",
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
        "journal/sql/questions.py",
        "    if asked.answer is not None:\n        return asked\n",
        "",
        f"{SIMULATED} tests/journal/test_journal_contract.py",
    ),
    Mutant(
        "step recorded after its effect",
        "journal/sql/calls.py",
        "            row = await self._reserved(key, run_id)\n"
        "            if row is None:\n"
        "                self._note(run_id, key, None)\n"
        "            elif row[0] is not None:\n"
        "                return msgspec.msgpack.decode(row[0])\n"
        "            if run_id and self._database.leases.is_lapsed():\n"
        "                await self._database.transact(lambda connection: self._still_owns(connection, run_id))\n"
        "            try:\n"
        "                value = await (function() if row is None or unsettled is None else unsettled())\n",
        "            known = dict(await self.load(run_id))\n"
        "            row = (known[key],) if key in known else None\n"
        "            if row is not None and row[0] is not None:\n"
        "                return msgspec.msgpack.decode(row[0])\n"
        "            try:\n"
        "                value = await (function() if row is None or unsettled is None else unsettled())\n"
        "                await self._database.transact(lambda connection: self._reserve(connection, key, run_id))\n",
        SIMULATED,
    ),
    Mutant(
        "inner result without its state",
        "run/record/format.py",
        "        events,\n        files,\n        [_write_effect",
        "        [],\n        [],\n        [_write_effect",
        SIMULATED,
    ),
    Mutant(
        "random nested id",
        "run/run.py",
        "run_id = place.id(ids.request_id)\n",
        'run_id = f"{place.id(ids.request_id)}{id(call)}"\n',
        SIMULATED,
    ),
    Mutant(
        "undo over a later read",
        "runs/reversal.py",
        "    touched = (*other.reads, *other.writes)\n",
        "    touched = tuple(other.writes)\n",
        "tests/runs/test_undo.py",
    ),
    Mutant(
        "lease not checked",
        "journal/sql/leases.py",
        "    return not owner or owner == me or now >= leased_until or is_dead(owner)\n",
        "    return True\n",
        SIMULATED,
    ),
    Mutant(
        "overtaken process goes on writing",
        "journal/sql/leases.py",
        "    if row[0] != owner:\n        raise RunBusy(run_id, row[0])\n\n\ndef check_not_taken",
        "\n\ndef check_not_taken",
        SIMULATED,
    ),
    Mutant(
        "finished call run again",
        "run/record/recorded_calls.py",
        "    unit = log.finished(attempt.call.place)\n",
        "    unit = None\n",
        SIMULATED,
    ),
    Mutant(
        "a cap on spending leaves what it does not have",
        "journal/sql/spending.py",
        "            if state.missing(amounts, caps[state.window]):\n",
        "            if False:\n",
        "tests/journal/test_journal_contract.py::test_amounts_are_reserved_in_every_window_or_in_none",
    ),
    Mutant(
        "a run raises the cap of its own principal",
        "run/spend.py",
        "() if principal == ONLY_USER else",
        "() if True else",
        "tests/run/test_spend.py::test_a_run_parks_at_the_cap_and_goes_on_once_somebody_raised_it",
    ),
    Mutant(
        "recorded answer of the model asked for again",
        "run/request.py",
        "        if recorded is not None:\n",
        "        if recorded is not None and recorded.calls:\n",
        SIMULATED,
    ),
    Mutant(
        "irreversible call not marked as begun",
        "run/record/format.py",
        '    if attempt.call.place.kind == "compensation" or not can_reenter(attempt) or _is_not_repeated(attempt):\n',
        "    if False:\n",
        SIMULATED,
    ),
    Mutant(
        "charge of an interrupted call forgotten",
        "run/record/recorded_calls.py",
        "    attempt.passage.charged = log.was_charged(place)\n",
        "",
        SIMULATED,
    ),
    Mutant(
        "nested usage forgotten",
        "run/record/recorded_calls.py",
        "        for each in (*answer.failed, answer):\n            charge_again(run, each)\n",
        "",
        SIMULATED,
    ),
    Mutant(
        "nested summaries forgotten",
        "run/record/recorded_calls.py",
        'run.log.bodies_under("compaction", place, before)',
        "()",
        SIMULATED,
    ),
    Mutant(
        "private part of a handoff on the event bus",
        "handoff/acts.py",
        'fill(made, "shown", without_private)',
        "pass",
        "tests/handoff/test_privacy.py",
    ),
    Mutant(
        "words of an act's exception passed on",
        "handoff/acts.py",
        "    lines = traceback.extract_tb",
        "    return error\n    lines = traceback.extract_tb",
        "tests/handoff/test_privacy.py",
    ),
    Mutant(
        "acts approved and counted again",
        "run/gate.py",
        "        if call.kind.is_part or not run.policies:",
        "        if not run.policies:",
        "tests/handoff/test_handoff.py",
    ),
    Mutant(
        "somebody asked twice because something changed",
        "run/commit.py",
        " and not tool.reenters",
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
        "session's run mode ignored",
        "run/run.py",
        "return tool.run_mode or self.session.run_mode or default",
        "return tool.run_mode or default",
        "tests/environment/test_environments.py",
    ),
    Mutant(
        "tool offered where nobody can play it",
        "run/evaluation.py",
        "if self.run.offers(tool) and not self.rendered.is_searched(tool)]",
        "if not self.rendered.is_searched(tool)]",
        "tests/environment/test_environments.py",
    ),
    Mutant(
        "the gate sees call_tool instead of the tool that was found",
        "run/loop.py",
        "tuple([unwrapped(each, run.tools) for each in calls])",
        "calls",
        "tests/run/test_search.py",
    ),
    # --- calls and their places ------------------------------------------------------------------------
    Mutant(
        "an idempotency key differs between attempts",
        "run/place.py",
        "return self._text(attempts=False)",
        "return self._text(attempts=True)",
        "tests/run/test_place.py",
    ),
    Mutant(
        "question ids are the same in all attempts",
        "run/call.py",
        "return self.place.question(which)",
        "return self.call.place.attempt(1).question(which)",
        "tests/run/test_questions.py::test_each_try_asks_a_question_of_its_own",
    ),
    Mutant(
        "depth not counted through agents",
        "run/call.py",
        "        around.depth + 1,\n",
        "        1,\n",
        "tests/run/test_adapter.py::test_depth_is_limited_through_nested_runs",
    ),
    Mutant(
        "a context lives on after its call",
        "run/call.py",
        "            raise ContextExpired(self.call.id)",
        "            pass",
        "tests/resources/test_resources.py::test_a_dead_context_gives_no_resources",
    ),
    # --- inheritance of nested runs ---------------------------------------------------------------------
    Mutant(
        "a nested run ignores its caller's budget",
        "run/options.py",
        "budget=tracker.share(budget) if limited else None",
        "budget=budget",
        "tests/run/test_adapter.py::test_a_share_for_a_child",
    ),
    Mutant(
        "a nested run ignores its caller's deadline",
        "run/options.py",
        "deadline=_earlier(self.deadline, given.deadline)",
        "deadline=given.deadline",
        "tests/run/test_options.py::test_of_two_deadlines_the_earlier_holds",
    ),
    Mutant(
        "a nested run ignores its caller's depth limit",
        "run/options.py",
        "depth_limit=_shallower(self.depth_limit, depth, levels)",
        "depth_limit=99",
        "tests/run/test_options.py::test_depth_can_only_get_tighter",
    ),
    Mutant(
        "a model in a person's place is under no policy",
        "run/entry.py",
        "            policies=own_policies(attempt.run.policies),\n",
        "",
        "tests/environment/test_environments.py::test_a_model_in_a_persons_place_is_under_the_policies_of_the_run",
    ),
    Mutant(
        "a nested run is free of its caller's denials",
        "run/options.py",
        "            outer_policies=tuple(policies),\n",
        "",
        "tests/guard/test_outer_policies.py",
    ),
    Mutant(
        "policies share their params",
        "run/policies.py",
        "        seen = copy_params(params, arguments)\n",
        "        seen = params\n",
        "tests/guard/test_own_params.py",
    ),
    Mutant(
        "a check that fails lets the run end",
        "run/loop.py",
        "            elif said.problem:\n",
        "            elif said.problem and not said.problem:\n",
        "tests/guard/test_completion.py",
    ),
    # --- time ------------------------------------------------------------------------------------------
    Mutant(
        "a deadline is not paused for people",
        "run/questions.py",
        "        deadline.pause()\n",
        "        pass\n",
        "tests/guard/test_approvals.py::test_a_deadline_pauses_for_people_only_if_it_says_so",
    ),
    Mutant(
        "a timeout runs on while a person thinks",
        "concurrency/cancellation.py",
        "        timer.pause()\n        return timer.resume\n",
        "        return _do_nothing\n",
        "tests/guard/test_approvals.py::test_time_a_person_takes_does_not_count_towards_the_timeout",
    ),
    Mutant(
        "a handler is cancelled together with the signal",
        "concurrency/cancellation.py",
        "        self.task.get_loop().call_soon(self._land)",
        "        self._land()",
        "tests/run/test_signal.py",
    ),
    Mutant(
        "a timeout counts as a cancel from outside",
        "concurrency/cancellation.py",
        "        else:\n            self.task.uncancel()\n        return True\n",
        "        return True\n",
        "tests/run/test_gate.py::test_timeouts_nest",
    ),
    Mutant(
        "a cancel from outside is taken for a timeout",
        "concurrency/cancellation.py",
        "self._stop(timer) and not self.interrupted:\n            raise TimedOut",
        "self._stop(timer):\n            raise TimedOut",
        "tests/run/test_gate.py::test_timeout_and_an_outer_cancellation_at_the_same_moment",
    ),
    Mutant(
        "the time before a call first waits does not count",
        "concurrency/timers.py",
        "            self.wait(self.left())\n\n    def _leave_heap",
        "            self.restart()\n            self.wait(self.left())\n\n    def _leave_heap",
        "tests/concurrency/test_timers.py",
    ),
    Mutant(
        "the timers of a call that waits are not armed",
        "run/gate.py",
        "            attempt.passage.note_wait()\n",
        "            pass\n",
        "tests/run/test_gate.py::test_timeouts_nest",
    ),
    Mutant(
        "a deadline that passes while a call ends cancels its caller",
        "concurrency/cancellation.py",
        "            self._stop(self._deadline_timer)\n",
        "            self._deadline_timer.stop()\n",
        "tests/run/test_gate.py::test_a_deadline_that_passes_while_a_call_is_recorded_cancels_nobody",
    ),
    # --- cancellation ----------------------------------------------------------------------------------
    Mutant(
        "a swallowed cancel is committed",
        "run/handlers.py",
        "        return cancelled_after_all()\n",
        "        pass\n",
        "tests/run/test_gate.py",
    ),
    Mutant(
        "a cancel that comes while something is undone is lost",
        "run/gate.py",
        "            ending = asyncio.CancelledError()  # the call was cancelled during a shielded step\n",
        "            pass\n",
        "tests/run/test_effects.py::test_a_cancel_during_compensation_is_raised_after_it",
    ),
    Mutant(
        "the outer call is cancelled first",
        "concurrency/cancellation.py",
        "        stopping.append(self)\n",
        "        stopping.insert(0, self)\n",
        "tests/concurrency/test_cancellation.py::test_the_whole_tree_stops_children_first",
    ),
    Mutant(
        "a cancelled run stops what undoes it",
        "run/run.py",
        "for attempt, scope in self.live.items() if not attempt.kind.undoes]",
        "for attempt, scope in self.live.items()]",
        "tests/run/test_auxiliary_calls.py",
    ),
    Mutant(
        "a compensation is undone with the call around it",
        "run/commit.py",
        "    if transaction.parent is not None and not attempt.kind.is_auxiliary:\n",
        "    if transaction.parent is not None:\n",
        "tests/run/test_auxiliary_calls.py",
    ),
    Mutant(
        "a call that was being undone is replayed as done",
        "run/record/recorded_calls.py",
        "        if any(log.was_being_undone(",
        "        if False and any(log.was_being_undone(",
        "tests/run/record/test_crash_recovery.py",
    ),
    Mutant(
        "compensations run in the order of their calls",
        "run/effects.py",
        "in reversed(settled):",
        "in settled:",
        "tests/run/test_effects.py::test_compensable_inner_calls_are_compensated_in_reverse_order",
    ),
    Mutant(
        "an inner call is applied to one that is over",
        "run/commit.py",
        "    if outer.ended:\n",
        "    if False:\n",
        "tests/run/test_gate.py::test_an_inner_call_is_not_applied_once_the_call_around_it_is_over",
    ),
    # --- questions -------------------------------------------------------------------------------------
    Mutant(
        "a late answer is taken",
        "journal/answers.py",
        "question.expires_at is not None and now >= question.expires_at",
        "False",
        "tests/journal/test_journal_contract.py tests/run/test_questions.py",
    ),
    Mutant(
        "the last answer wins",
        "journal/local.py",
        "            if pending.answer is not None:\n                return False\n",
        "",
        "tests/run/test_questions.py",
    ),
    Mutant(
        "an answered question is withdrawn",
        "journal/sql/runs.py",
        "DELETE FROM questions WHERE answer IS NULL AND",
        "DELETE FROM questions WHERE",
        "tests/journal/test_sqlite_journal.py::test_an_answered_question_is_not_withdrawn",
    ),
    Mutant(
        "a run that is over leaves its questions open",
        "journal/sql/runs.py",
        "    if status in OVER:\n        withdraw(",
        "    if False:\n        withdraw(",
        "tests/journal/test_journal_contract.py",
    ),
    # --- records ---------------------------------------------------------------------------------------
    Mutant(
        "files that could not be changed stay in the record",
        "run/commit.py",
        "            await journal.calls.void(unit)\n",
        "            pass\n",
        "tests/resources/directory/test_gate.py::test_an_edit_in_the_last_moment_makes_it_void",
    ),
    Mutant(
        "a finished inner call is run again",
        "run/record/recorded_calls.py",
        "        if inner is None:\n            return None\n",
        "        if inner is not None or inner is None:\n            return None\n",
        SIMULATED,
    ),
    Mutant(
        "random call ids",
        "run/call.py",
        "        id = id or run.call_prefix + str(number)",
        "        id = id or run.call_prefix + str(number) + __import__('os').urandom(4).hex()",
        "tests/run/test_gate.py::test_calls_are_numbered_in_their_run",
    ),
    Mutant(
        "a handler that diverges from the record is not noticed",
        "run/record/log.py",
        "        if was is not None and was != verb:\n",
        "        if False:\n",
        "tests/run/test_resume.py::test_a_verb_in_another_ones_place_is_a_divergence",
    ),
    Mutant(
        "a lease is not renewed",
        "run/record/lease.py",
        "await self._journal.runs.keep(*asked)",
        "{each: (await self._journal.runs.get(each)).stopping for each in asked}",
        "tests/run/test_run_ownership.py::test_the_lease_of_a_run_at_work_is_renewed",
    ),
    Mutant(
        "a run is taken twice in one process",
        "run/record/lease.py",
        "        if mine in _held:\n",
        "        if False:\n",
        "tests/run/test_run_ownership.py::test_of_two_concurrent_resumes_one_wins",
    ),
    Mutant(
        "a resumed run has a new budget",
        "run/record/recorded_session.py",
        "budget=None if limits is None else Budget(**limits)",
        "budget=None",
        "tests/run/test_run_ownership.py::test_a_resumed_run_keeps_its_budget_and_its_deadline",
    ),
    Mutant(
        "a resumed run has no deadline",
        "run/record/recorded_session.py",
        "deadline=deadline_after(begin.deadline, begin.pauses, row, self.log, options.clock)",
        "deadline=None",
        "tests/run/test_run_ownership.py::test_a_resumed_run_keeps_its_budget_and_its_deadline",
    ),
    # --- parking ---------------------------------------------------------------------------------------
    Mutant(
        "what a parked run did is undone",
        "run/gate.py",
        "    if run.left_to_the_record:\n",
        "    if False:\n",
        "tests/run/record/test_parked_run.py::test_by_force_nothing_is_undone",
    ),
    Mutant(
        "a run is parked while a call is working",
        "run/record/parking.py",
        "        return all(_rests(",
        "        return any(_rests(",
        "tests/run/record/test_parked_run.py",
    ),
    Mutant(
        "an irreversible call is parked",
        "run/record/parking.py",
        "is_ready = attempt.token is None or attempt.tool.enters_again",
        "is_ready = True",
        "tests/run/record/test_parked_run.py::test_a_handler_that_can_not_be_entered_again_rests_and_is_not_parked",
    ),
    Mutant(
        "a resumed call to an MCP server is made again, although it started a task",
        "mcp/section.py",
        "task = None if attempt is None else attempt.run.log.find_remote(attempt.place)",
        "task = None",
        "tests/mcp/test_remote_tasks.py::test_a_resumed_run_continues_with_its_task",
    ),
    Mutant(
        "a parked call to an MCP server cancels its task",
        "mcp/remote_tasks.py",
        "if attempt is None or not attempt.run.log.closed:",
        "if True:",
        "tests/mcp/test_remote_tasks.py::test_a_parked_run_leaves_its_task",
    ),
    Mutant(
        "the time that a person takes to log in to an MCP server counts as the server's",
        "mcp/connection.py",
        "self._set_limits(paused=True)",
        "pass",
        "tests/mcp/test_login.py::test_person_may_take_long_to_log_in",
    ),
    Mutant(
        "two servers send one notification",
        "journal/sql/outbox.py",
        "if self._find(connection, receiver) != before:",
        "if False:",
        "tests/journal/test_journal_contract.py::test_the_state_of_a_receiver_is_replaced_by_whoever_knows_it",
    ),
    Mutant(
        "a link says where anybody's question is",
        "serve/inbox.py",
        'return None if await self._thread_for(question, person) is None else ""',
        'return ""',
        "tests/serve/test_notifier.py::test_a_link_leads_only_those_who_may_answer",
    ),
    Mutant(
        "another role may approve at once",
        "question.py",
        " and waited >= self.after",
        "",
        "tests/serve/test_notifier.py::test_a_reminder_another_role_and_then_a_denial",
    ),
    Mutant(
        "a notification quotes a question",
        "serve/notifier.py",
        "tool = question.askers[-1] if question.askers else",
        "tool = question.message if question.askers else",
        "tests/serve/test_notifier.py::test_the_owner_is_told_about_their_own_question_without_its_words",
    ),
    Mutant(
        "a notification that did not arrive gets a new id",
        "serve/notifier.py",
        "again = replace(before, attempt=before.attempt + 1)",
        'again = replace(before, id=f"{before.id}x", attempt=before.attempt + 1)',
        "tests/serve/test_notifier.py::test_a_receiver_that_is_down_for_a_day",
    ),
]


def find(mutant: Mutant) -> str:
    """Return why a mutant can't be tried; "" if it can.

    Its code must be in the file exactly once, the changed file must be valid Python, and the files of its tests must exist.
    """
    file = ROOT / "src" / "handrail" / mutant.file
    if not file.is_file():
        return f"there is no {mutant.file}"
    times = file.read_text().count(mutant.old)
    if times != 1:
        return f"{mutant.file} contains the text {times} times instead of once"
    try:
        compile(file.read_text().replace(mutant.old, mutant.new), mutant.file, "exec")
    except SyntaxError as error:
        return f"with the mutant, {mutant.file} is no longer valid Python ({error})"
    missing = [test for test in mutant.tests.split() if not (ROOT / test.partition("::")[0]).exists()]
    return f"there is no {', '.join(missing)}" if missing else ""


def catch(mutant: Mutant) -> str:
    """Return the name of a test that fails on the mutant, or "" if none does. Exits if the tests can't be run."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source)
        file = source / "handrail" / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(source),
                "HANDRAIL_DEEP": "",
                "HANDRAIL_POINTS": "all",
                "HYPOTHESIS_STORAGE_DIRECTORY": folder,
            },
            capture_output=True,
            text=True,
        )
    if run.returncode not in (0, 1):
        sys.exit(f"{mutant.name}: the tests could not be run\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return failed[1] if failed else "a test" if run.returncode else ""


def main(arguments: list[str]) -> int:
    wrong = [f"{mutant.name}: {problem}" for mutant in MUTANTS if (problem := find(mutant))]
    if wrong:
        print("\n".join(wrong))
        return 1
    if arguments == ["--find"]:
        print(f"{len(MUTANTS)} mutants match the code")
        return 0
    jobs = 2
    if arguments[:1] == ["--jobs"]:
        jobs, arguments = int(arguments[1]), arguments[2:]
    survivors: list[str] = []
    chosen = [mutant for mutant in MUTANTS if not arguments or mutant.name in arguments]
    with ThreadPoolExecutor(jobs) as pool:
        for number, (mutant, by) in enumerate(zip(chosen, pool.map(catch, chosen), strict=True), 1):
            verdict = f"caught by {by}" if by else "SURVIVED"
            print(f"mutant {number:2} {mutant.name} ({mutant.file}): {verdict}", flush=True)
            if not by:
                survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
