"""Serve llmock on a free port of loopback, print the address, end when stdin closes.

    .components/llmock/bin/python tests/support/launch_llmock.py

Run by the Python of llmock's own venv. What is served is llmock's own application; it is scripted and
read over its control API, /_llmock.
"""

import os
import sys

# llmock is not in the venv that the checks look at.
from llmock import simulation  # pyright: ignore
from llmock.testing import LLMockServer  # pyright: ignore

# llmock adds a Retry-After of one second to every 429 that was given none. With no status in this set it
# sends the header exactly when the script asks for it.
simulation.RETRYABLE_STATUS_CODES = frozenset()

print(LLMockServer().start().url, flush=True)
sys.stdin.read()
os._exit(0)  # without waiting for the streams that are stalled on purpose
