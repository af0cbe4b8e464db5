"""Histories of calls that read and wrote versioned keys, and whether a serial order explains them.

Every attempt at a call leaves its own token in each key that it writes. So what a call read names the attempt that wrote
it, and the check is exact: `History.problem` is empty if and only if the calls could have run one after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

NOBODY = ""
"""The version of a key that nobody has written."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a call, as seen from outside."""

    call: str
    """The name of the call. At most one attempt at a call commits."""
    token: str
    """The version that this attempt leaves in each key that it writes."""
    reads: tuple[tuple[str, str], ...] = ()
    """The keys that it read before it wrote them, each with the version that it found."""
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The folders that it listed, each with the names found. In such a folder, every file is named after the token of its only writer."""
    writes: tuple[str, ...] = ()

    def __str__(self) -> str:
        reads = [f"{key} from {version or 'nobody'}" for key, version in self.reads]
        lists = [f"{folder} as {{{', '.join(names)}}}" for folder, names in self.lists]
        return f"{self.token} read [{', '.join([*reads, *lists])}] and wrote [{', '.join(self.writes)}]"


class History(msgspec.Struct, kw_only=True):
    """What is known about a set of calls after all of them have ended."""

    committed: Sequence[Attempt]
    """The attempts that committed: their results say so, or a journal does."""
    final: Mapping[str, str]
    """The version of each key at the end. A key that is not in it has its initial version."""
    possible: Sequence[Attempt] = ()
    """Attempts that may have committed, because nobody was told their outcome."""
    initial: Mapping[str, str] = {}

    def problem(self) -> str:
        """Return why no serial order of the calls explains what they read and the final versions; "" if one does."""
        try:
            calls = self._seen()
            _check_names(calls)
            self._check_lost(calls)
            _Order(calls, self.initial, self.final).check()
        except _Unexplained as found:
            return str(found)
        return ""

    def _seen(self) -> list[Attempt]:
        """Return the attempts that committed, and those of the others whose writes were seen, with their lists as reads."""
        by_token: dict[str, Attempt] = {}
        for attempt in (*self.committed, *self.possible):
            other = by_token.setdefault(attempt.token, attempt)
            if other != attempt:
                raise _Unexplained(f"double commit: {other}, and {attempt}")
        keys = {*self.final, *(key for attempt in by_token.values() for key in attempt.writes)}
        found: dict[str, Attempt] = {}
        wanted = list(self.committed)
        for key, version in self.final.items():
            if version != self.initial.get(key, NOBODY):
                wanted.append(self._writer(by_token, key, version, "the final state has"))
        while wanted:
            attempt = wanted.pop()
            if attempt.token in found:
                continue
            attempt = found[attempt.token] = _with_listed(attempt, keys)
            for key, version in attempt.reads:
                if version != self.initial.get(key, NOBODY):
                    wanted.append(self._writer(by_token, key, version, f"{attempt.token} read"))
        return list(found.values())

    def _writer(self, by_token: Mapping[str, Attempt], key: str, version: str, who: str) -> Attempt:
        writer = by_token.get(version)
        if writer is None or key not in writer.writes:
            raise _Unexplained(f"dirty read: {who} {key} from {version!r}, which no successful call wrote")
        return writer

    def _check_lost(self, calls: Iterable[Attempt]) -> None:
        for attempt in calls:
            for key in attempt.writes:
                if self.final.get(key, NOBODY) == self.initial.get(key, NOBODY):
                    raise _Unexplained(f"lost write: at the end nobody has written {key}, but {attempt}")


class _Unexplained(Exception):
    """There is no serial order. The message says why."""


def _with_listed(attempt: Attempt, keys: Iterable[str]) -> Attempt:
    """Return the attempt with the folders that it listed as reads: of the files it found, and of all others that are missing."""
    if not attempt.lists:
        return attempt
    reads = list(attempt.reads)
    for folder, names in attempt.lists:
        listed = {f"{folder}/{name}": name for name in names}
        absent = {key: NOBODY for key in keys if key.startswith(f"{folder}/") and key not in attempt.writes}
        reads += {**absent, **listed}.items()
    return msgspec.structs.replace(attempt, reads=tuple(reads), lists=())


def _check_names(calls: Iterable[Attempt]) -> None:
    """Check that every call is there once, and that it read one version of each key."""
    by_name: dict[str, Attempt] = {}
    for attempt in calls:
        other = by_name.setdefault(attempt.call, attempt)
        if other is not attempt:
            raise _Unexplained(f"double commit of {attempt.call}: {other}, and {attempt}")
        versions: dict[str, str] = {}
        for key, version in attempt.reads:
            if versions.setdefault(key, version) != version:
                raise _Unexplained(f"unrepeatable read: {attempt.token} read {key} twice: {attempt}")


class _Order:
    """A search for a serial order.

    It runs the calls one after another on the versions. A call can be next if every version that it read is the current
    one, and if it overwrites no version that a call still has to read. Such a call is forced unless it writes a key
    that it has not read and that another call writes too: it can stand before all others in whatever order exists.
    Only for calls that are not forced are there several possibilities, which are tried in turn.
    """

    def __init__(self, calls: Iterable[Attempt], state: Mapping[str, str], final: Mapping[str, str]) -> None:
        self._left = {attempt.token: attempt for attempt in calls}
        self._state = dict(state)
        self._final = final
        self._readers: dict[tuple[str, str], set[str]] = defaultdict(set)
        """The calls left that read a version of a key."""
        self._writers: dict[str, set[str]] = defaultdict(set)
        """The calls left that write a key."""
        self._blind: dict[str, set[str]] = defaultdict(set)
        """Those of them that have not read it."""
        for token, attempt in self._left.items():
            read = dict(attempt.reads)
            for place in attempt.reads:
                self._readers[place].add(token)
            for key in attempt.writes:
                self._writers[key].add(token)
                if key not in read:
                    self._blind[key].add(token)

    def check(self, seen: set[object] | None = None) -> None:
        """Raise `_Unexplained` if there is no order."""
        self._run_forced()
        if not self._left:
            return
        seen = set() if seen is None else seen
        here = (frozenset(self._left), frozenset(self._state.items()))
        if here not in seen:
            seen.add(here)
            for attempt in [each for each in self._left.values() if self._obstacle(each) is None]:
                try:
                    others = [each for each in self._left.values() if each is not attempt]
                    after = {**self._state, **dict.fromkeys(attempt.writes, attempt.token)}
                    return _Order(others, after, self._final).check(seen)
                except _Unexplained:
                    continue
        raise _Unexplained(f"no serial order: {self._circle()}")

    def _run_forced(self) -> None:
        candidates = dict.fromkeys(self._left)
        while candidates:
            token, _ = candidates.popitem()
            attempt = self._left.get(token)
            if attempt is None or not self._is_forced(attempt) or self._obstacle(attempt) is not None:
                continue
            del self._left[token]
            for place in attempt.reads:
                self._readers[place].discard(token)
            for key in attempt.writes:
                self._state[key] = token
                self._writers[key].discard(token)
                self._blind[key].discard(token)
            for key in {*attempt.writes, *(key for key, _ in attempt.reads)}:
                candidates |= dict.fromkeys(self._readers[key, self._version(key)])
                candidates |= dict.fromkeys(self._blind[key])

    def _version(self, key: str) -> str:
        return self._state.get(key, NOBODY)

    def _is_forced(self, attempt: Attempt) -> bool:
        read = dict(attempt.reads)
        return all(key in read or self._writers[key] == {attempt.token} for key in attempt.writes)

    def _obstacle(self, attempt: Attempt) -> tuple[str, str] | None:
        """Return a call left that must be before this one, and why; None if this one can be next."""
        for key, version in attempt.reads:
            if self._version(key) != version:
                return version, f"it read {key} from"
        for key in attempt.writes:
            others = self._readers[key, self._version(key)] - {attempt.token}
            if others:
                return min(others), f"it overwrote the {key} that was read by"
            others = self._writers[key] - {attempt.token}
            if others and self._final.get(key, NOBODY) == attempt.token:
                return min(others), f"it is the last that wrote {key}, and before it did"
        return None

    def _circle(self) -> str:
        """Describe calls left that must each come after the next of them."""
        return "; ".join(self._steps())

    def _steps(self) -> Iterator[str]:
        token = min(self._left)
        passed: dict[str, str] = {}
        while token in self._left and token not in passed:
            obstacle = self._obstacle(self._left[token])
            if obstacle is None:  # it can be next, and then another call has no place
                yield f"{self._left[token]}, which writes without reading, has no place"
                return
            passed[token] = f"{self._left[token]}, so {obstacle[1]} {obstacle[0]}"
            token = obstacle[0]
        words = list(passed.values())
        if token not in self._left:
            yield f"{words[-1]}, whose version is gone"
            return
        yield from words[list(passed).index(token) :]
