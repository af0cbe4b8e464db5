"""Settings for every test: how many examples are drawn, here and in a deep run.

An ordinary run draws the same examples every time, so that it says the same of the same code; a deep
run draws new ones.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from filesystems import folders, new_files

__all__ = ["folders", "new_files"]

settings.register_profile(
    "quick", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("deep" if os.environ.get("HANDRAIL_DEEP") else "quick")
