"""The law of sessions: any interleaving of forks has the same result as replaying the commits in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from handrail.errors import Conflict, ContextExpired
from session.session_model import SLICES, Fold, Heard, Note, Put, contents, new_session, replayed


@dataclass(eq=False)
class Branch:
    """A fork and its model: the events at its start, its own events, and what it read."""

    fork: Any
    parent: Any
    base: list[Any]
    own: list[Any]
    reads: set[str]
    open: bool = True

    @property
    def all(self) -> list[Any]:
        return self.base + self.own


class Interleavings(RuleBasedStateMachine):
    """Forks, dispatches, reads, commits and drops in any order, compared with a replay of the commits."""

    branches = Bundle("branches")
    events = st.one_of(
        st.builds(Note, st.integers(0, 9)),
        st.builds(Put, st.integers(0, 3), st.integers(0, 9)),
        st.builds(Fold, st.integers(0, 9)),
        st.builds(Heard, st.integers(0, 9)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.session = new_session()
        self.root = Branch(self.session, None, [], [], set())
        self.all = [self.root]
        self.heard: list[Any] = []
        self.expected: list[Any] = []
        self.session.dispatcher.subscribe(object, self.heard.append)

    @rule(event=events)
    def dispatch_on_root(self, event: Any) -> None:
        self.session.dispatch(event)
        self.root.own.append(event)
        self.expected.append(event)

    @rule(target=branches)
    def fork_root(self) -> Branch:
        return self._forked(self.root)

    @rule(target=branches, parent=branches)
    def fork_fork(self, parent: Branch) -> Branch:
        if parent.open:
            return self._forked(parent)
        with pytest.raises(ContextExpired):
            parent.fork.fork()
        return parent

    def _forked(self, parent: Branch) -> Branch:
        branch = Branch(parent.fork.fork(), parent, parent.all, [], set())
        self.all.append(branch)
        return branch

    @rule(branch=branches, event=events)
    def dispatch(self, branch: Branch, event: Any) -> None:
        if not branch.open:
            with pytest.raises(ContextExpired):
                branch.fork.dispatch(event)
            return
        branch.fork.dispatch(event)
        branch.own.append(event)
        if isinstance(event, Heard):
            self.expected.append(event)

    @rule(branch=branches, kind=st.sampled_from(SLICES))
    def read(self, branch: Branch, kind: type) -> None:
        if branch.open:
            assert branch.fork[kind].all() == replayed(branch.all)[kind.__name__]
            branch.reads.add(kind.__name__)

    @rule(branch=consumes(branches))
    def commit(self, branch: Branch) -> None:
        if not branch.open or not branch.parent.open:
            with pytest.raises(ContextExpired):
                branch.fork.commit()
            return
        branch.open = False
        parent = branch.parent
        parent.reads |= branch.reads
        since = parent.all[len(branch.base) :]
        touched = {{Fold: "Folded", Heard: "Items"}.get(type(e), type(e).__name__) for e in since}
        if stale := sorted(touched & branch.reads):
            with pytest.raises(Conflict) as raised:
                branch.fork.commit()
            assert list(raised.value.places) == stale
            return
        branch.fork.commit()
        parent.own.extend(branch.own)
        if parent is self.root:
            self.expected.extend(event for event in branch.own if not isinstance(event, Heard))

    @rule(branch=consumes(branches))
    def drop(self, branch: Branch) -> None:
        branch.fork.drop()
        if branch.open:
            branch.open = False
            branch.parent.reads |= branch.reads

    @invariant()
    def the_law(self) -> None:
        for branch in self.all:
            if branch.open:
                assert contents(branch.fork) == replayed(branch.all)
        assert self.heard == self.expected


def test_any_interleaving_of_forks_equals_replaying_the_commits():
    """Forks, nested forks, dispatches, reads, commits and drops in any order give the same result as a replay."""
    run_state_machine_as_test(Interleavings)
