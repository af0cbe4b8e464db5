"""Cheap password hashes, for tests that add or verify users. Real hashes would take most of such a test's time.

    from support.passwords import cheap_hashes      in a test module, applies to all of its tests

Other processes hash at the real cost. If one of them verifies the users, set `_SCRYPT` back to `COST` with `monkeypatch`.
"""

from __future__ import annotations

import pytest

from handrail.serve import people

COST = people._SCRYPT
"""The real cost of a hash, as the arguments of `hashlib.scrypt`."""


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture: hashes passwords at the lowest cost that scrypt allows."""
    monkeypatch.setattr(people, "_SCRYPT", {**COST, "n": 2, "r": 1})
