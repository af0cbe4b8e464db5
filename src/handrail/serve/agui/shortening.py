"""What is too long to be looked at, as clients get it: its beginning, how much is missing, and where all of it is."""

from __future__ import annotations

from handrail.place import split_run_id

MOST_CHARACTERS = 100_000


def shortened(text: str, run_id: str) -> str:
    """A call's result as clients are shown it. The model and the record have the whole.

    Many results may come at once, and a reader is given what fits into its feed: one that is too large for that
    would send it away.
    """
    left_out = len(text) - MOST_CHARACTERS
    if left_out <= 0:
        return text
    root, _ = split_run_id(run_id)
    return (
        f"{text[:MOST_CHARACTERS]}\n\n[{left_out:,} of {len(text):,} characters are left out here. "
        f"All of it: GET /threads/THREAD/runs/{root}]"
    )
