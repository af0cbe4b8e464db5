"""Sentences that tests in several files compare with, each in one place.

A test holds an error by its class, its data or one telling word. It takes a sentence from here only if the words are all there is,
as in what a model is told about a call. `tests/project/test_texts.py` finds a sentence that stands in two files instead.
"""

OUTCOME_UNKNOWN = "it is not known whether it happened"
"""What the model is told about a call that was interrupted and is not rerun."""
WAS_UNDONE = "anything it may have done was undone"
"""What the model is told about an interrupted call that was compensated or rolled back."""
NO_EFFECTS = "none of its own effects remain"
"""What the model is told about an interrupted call that is not rerun, and has changed nothing outside its transaction."""
