"""Cheap password hashes, for tests of users in this process. Real hashes would take most of the time of such a test.

    from support.passwords import cheap_hashes      in a test module, applies to all of its tests

Another process hashes at the real cost. Pass `COST` to `monkeypatch` for users that another process verifies.
"""

from __future__ import annotations

import pytest

from handrail.serve import people

COST = people._SCRYPT
"""The real cost of a hash, as the arguments of `hashlib.scrypt`."""


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture: hashes passwords at the lowest cost that scrypt has."""
    monkeypatch.setattr(people, "_SCRYPT", {**COST, "n": 2, "r": 1})
