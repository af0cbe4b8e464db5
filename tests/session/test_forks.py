"""Forks of a session: what they read, how they commit, when they conflict, and when their events are published."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from handrail.errors import Conflict, ContextExpired, ReducerError, SessionError
from handrail.session import Session, SessionFork
from session.session_model import Fold, Folded, Heard, Note, Put, contents, new_session, replayed


def test_a_fork_sees_its_own_and_the_past():
    """A fork reads the state at its start and its own changes, which nobody else sees."""
    session = new_session()
    session.dispatch(Note(1))
    fork = session.fork()
    session.dispatch(Note(2))
    fork.dispatch(Note(3))
    assert fork[Note].all() == (Note(1), Note(3))
    assert session[Note].all() == (Note(1), Note(2))


def test_committing_replays_onto_newer_state():
    """On commit, a fork's events are reduced on top of everything that was committed earlier."""
    session = new_session()
    one, two = session.fork(), session.fork()
    for number in (1, 2):
        one.dispatch(Fold(number))
        two.dispatch(Fold(10 * number))
    two.commit()
    one.commit()
    assert contents(session) == replayed([Fold(10), Fold(20), Fold(1), Fold(2)])


def test_an_unchanged_base_takes_the_fork_as_it_is():
    """If nothing else was committed, the session takes the fork's state without reducing its events again."""
    session = new_session()
    ran: list[int] = []
    session.register(Note, on=Fold, reducer=lambda slice_, event: (ran.append(1), slice_.append(event))[1])
    fork = session.fork()
    fork.dispatch(Fold(1))
    state = fork.state
    fork.commit()
    assert session.state is state
    assert ran == [1]


def test_a_slice_nobody_else_touched_is_taken_as_it_is():
    """A slice that only the fork changed is not reduced again. Others' changes to other slices are kept."""
    session = new_session()
    ran: list[int] = []
    session.register(Note, on=Fold, reducer=lambda slice_, event: (ran.append(1), slice_.append(event))[1])
    fork = session.fork()
    fork.dispatch(Fold(1))
    session.dispatch(Put(1, 1))
    mine = fork.state[Note]
    fork.commit()
    assert session.state[Note] is mine
    assert ran == [1]
    assert contents(session)["Put"] == (Put(1, 1),)


def test_what_was_read_and_changed_meanwhile_is_a_conflict():
    """A commit conflicts if a slice that the fork read has changed since, but not if the fork only wrote the slice."""
    session = new_session()
    reader, writer = session.fork("reader"), session.fork("writer")
    assert len(reader[Note]) == 0
    reader.dispatch(Put(1, 1))
    writer.dispatch(Put(2, 2))
    session.dispatch(Note(1))
    session.dispatch(Put(3, 3))
    assert (reader.stale(), writer.stale()) == (("Note",), ())
    with pytest.raises(Conflict, match="Note") as raised:
        reader.commit()
    assert raised.value.places == ("Note",)
    writer.commit()
    assert session[Put].all() == (Put(3, 3), Put(2, 2))
    with pytest.raises(ContextExpired, match="'reader'"):
        reader.dispatch(Note(2))


def test_a_snapshot_brings_state_back_and_leaves_logs():
    """Restoring a snapshot restores the state and keeps later log entries."""
    session = new_session()
    session.dispatch(Note(1))
    session.dispatch(Heard(1))
    before = session.snapshot()
    for event in (Note(2), Put(1, 1), Heard(2)):
        session.dispatch(event)
    session.restore(before)
    assert contents(session) == replayed([Note(1), Heard(1)])
    assert session[Heard].all() == (Heard(1), Heard(2))
    assert session.snapshot() == before


def test_a_snapshot_of_another_session_is_refused():
    """Another session's snapshot is refused with an error that gives both sessions' ids, and nothing is restored."""
    session = Session(id="mine")
    session.dispatch(Note(1))
    with pytest.raises(SessionError, match=r"'mine'.*'theirs'"):
        session.restore(Session(id="theirs").snapshot())
    assert len(session[Note]) == 1


def test_restoring_what_was_read_is_no_conflict():
    """If a slice that a fork read is changed and then restored, the fork is not stale."""
    session = new_session()
    session.dispatch(Note(1))
    before, fork = session.snapshot(), session.fork()
    assert len(fork[Note]) == 1
    session.dispatch(Note(2))
    assert fork.stale() == ("Note",)
    session.restore(before)
    assert fork.stale() == ()


@pytest.mark.parametrize("end", ["commit", "drop"])
def test_reads_of_an_inner_fork_count_for_the_outer(end: str):
    """An inner fork's reads also count as reads of the outer fork, even if the inner fork was dropped."""
    session = new_session()
    outer = session.fork()
    inner = outer.fork()
    assert len(inner[Note]) == 0
    getattr(inner, end)()
    session.dispatch(Note(1))
    assert outer.stale() == ("Note",)


def test_a_child_session_lives_long_and_commits_into_its_parent():
    """A child session reads its parent's state as it was at the fork, accepts many commits, and is committed as a whole."""
    session, heard = new_session(), list[Any]()
    session.dispatcher.subscribe(object, heard.append)
    session.dispatch(Note(0))
    child = session.fork("child")
    for number in range(1, 4):
        call = child.fork(f"call {number}")
        call.dispatch(Note(number))
        call.commit()
        session.dispatch(Put(number, number))
    assert child[Note].all() == tuple(map(Note, range(4)))
    assert len(child[Put]) == 0
    assert session[Note].all() == (Note(0),)
    with_put = child.stale()
    assert with_put == ("Put",)
    child.prepare()
    child.apply()
    child.publish()
    assert session[Note].all() == tuple(map(Note, range(4)))
    assert [event for event in heard if isinstance(event, Note)] == [Note(n) for n in range(4)]


def test_a_reducer_that_refuses_the_newer_state_fails_the_commit():
    """If a reducer refuses the newer state, the commit raises an error, and nothing is changed or published."""
    session, heard = new_session(), list[Any]()

    def at_most_one(slice_: Any, event: Any) -> Any:
        if len(slice_):
            raise ValueError("there is one already")
        return slice_.append(event)

    session.register(Folded, on=Fold, reducer=at_most_one)
    one, two = session.fork(), session.fork()
    one.dispatch(Fold(1))
    two.dispatch(Note(2))
    two.dispatch(Fold(2))
    one.commit()
    session.dispatcher.subscribe(object, heard.append)
    with pytest.raises(ReducerError, match="there is one already"):
        two.commit()
    assert session.state.keys() == {Folded}
    assert session[Folded].all() == (Fold(1),)
    assert heard == []
    two.drop()


def test_a_fork_ends_once():
    """A fork refuses a second commit, an `apply` without `prepare`, and reads, dispatches and forks after its end."""
    session, heard = new_session(), list[Any]()
    session.dispatcher.subscribe(object, heard.append)
    done, dropped, never = session.fork("done"), session.fork("dropped"), session.fork("never")
    for fork in (done, dropped, never):
        fork.dispatch(Note(1))
    done.commit()
    dropped.prepare()
    dropped.drop()
    for wrong in (done.commit, done.prepare, done.apply, dropped.prepare, dropped.apply, never.apply):
        with pytest.raises(ContextExpired):
            wrong()
    for fork in (done, dropped):
        for use in (lambda f=fork: f[Note], lambda f=fork: f.dispatch(Note(2)), fork.fork):
            with pytest.raises(ContextExpired, match=fork.owner):
                use()
        fork.publish()
        fork.drop()
        fork.drop()
    assert session[Note].all() == (Note(1),)
    assert heard == [Note(1)]


def test_nothing_commits_into_a_fork_that_is_over():
    """An inner fork can't commit into a prepared outer fork, even if the inner one was prepared before."""
    session, heard = new_session(), list[Any]()
    session.dispatcher.subscribe(object, heard.append)
    outer = session.fork("outer")
    late, later = outer.fork("late"), outer.fork("later")
    for fork in (late, later):
        fork.dispatch(Note(1))
    late.prepare()
    outer.prepare()
    for commit in (late.apply, later.prepare, later.commit):
        with pytest.raises(ContextExpired):
            commit()
    outer.apply()
    outer.publish()
    assert len(session[Note]) == 0
    assert heard == []


def test_what_changes_between_prepare_and_apply_is_kept():
    """Events dispatched to the session between `prepare` and `apply` come after the fork's, whose reads were checked before."""
    session = new_session()
    fork = session.fork()
    fork.dispatch(Fold(1))
    fork.dispatch(Put(1, 1))
    fork.prepare()
    session.dispatch(Fold(2))
    session.dispatch(Note(2))
    fork.apply()
    assert contents(session) == replayed([Fold(1), Put(1, 1), Fold(2), Note(2)])


def test_a_thread_that_outlived_its_fork_is_refused():
    """If a thread outlives its fork, each of its dispatches is either committed or refused."""
    for _ in range(30):
        session = new_session()
        fork = session.fork()
        taken: list[int] = []
        running = threading.Event()

        def work(
            fork: SessionFork = fork, taken: list[int] = taken, running: threading.Event = running
        ) -> None:
            number = 0
            try:
                while True:
                    fork.dispatch(Note(number))
                    taken.append(number)
                    number += 1
                    running.set()
            except ContextExpired:
                running.set()

        thread = threading.Thread(target=work)
        thread.start()
        running.wait()
        fork.commit()
        thread.join()
        assert [note.number for note in session[Note].all()] == taken


def test_state_is_heard_once_at_the_outermost_commit_and_logs_at_once():
    """State events are published once, at the outermost commit. Log entries are published immediately and survive a drop."""
    session, heard = new_session(), list[Any]()
    session.dispatcher.subscribe(object, heard.append)
    outer = session.fork()
    inner, lost = outer.fork(), outer.fork()
    lost.dispatch(Note(-1))
    lost.dispatch(Heard(-2))
    inner.dispatch(Note(1))
    inner.dispatch(Heard(2))
    assert heard == [Heard(-2), Heard(2)]
    lost.drop()
    inner.commit()
    outer.dispatch(Note(3))
    assert heard == [Heard(-2), Heard(2)]
    outer.commit()
    outer.publish()
    assert heard == [Heard(-2), Heard(2), Note(1), Note(3)]
    assert session[Heard].all() == (Heard(-2), Heard(2))
    assert contents(session)["Items"] == (2,)


def test_a_subscriber_may_dispatch():
    """A listener may dispatch, because events are published after they are applied, while no lock is held."""
    session = new_session()
    session.dispatcher.subscribe(Note, lambda note: session.dispatch(Put(note.number, len(session[Note]))))
    fork = session.fork()
    fork.dispatch(Note(5))
    fork.commit()
    assert session[Put].all() == (Put(5, 1),)
