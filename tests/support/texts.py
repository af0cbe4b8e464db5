"""Sentences that tests in several files compare with, each in one place.

A test holds an error by its class, its data or one telling word. It takes a sentence from here if neighbouring errors differ
only in their words. `tests/project/test_texts.py` finds sentences that stand in two files instead.
"""

# What the model is told about a call that was interrupted.
OUTCOME_UNKNOWN = "it is not known whether it happened"
MCP_OUTCOME_UNKNOWN = "not known whether the call happened"
WAS_UNDONE = "anything it may have done was undone"
WAS_DONE = "was done before the process ended"
NO_EFFECTS = "none of its own effects remain"

# What a person is told about a mistake.
ANSWER_NOT_DECLARED = "type of the answer is not declared"
NO_COMMIT_KEPT = "no commit of this call is kept"
NO_PARAMS = "takes params, and none were given"
NO_SUCH_PROVIDER = "no module or provider of that name"
NOT_A_MODEL_NAME = "is not the name of a model"
RUN_ID_TAKEN = "already has a run with this id"
WRONG_KEY = "were not written with this key"
