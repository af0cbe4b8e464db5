"""Serve llmock on a free loopback port, print the address, and end when stdin closes.

.components/llmock/bin/python tests/support/launch_llmock.py

The script runs on the Python of llmock's own venv. Tests script and inspect the server over llmock's control API,
/_llmock.
"""

import os
import sys

# llmock is not installed in the venv that the type checker uses.
from llmock import simulation  # pyright: ignore
from llmock.testing import LLMockServer  # pyright: ignore

# llmock adds a Retry-After of one second to every 429 without one. With this set empty, it sends the header only if the
# script asks for it.
simulation.RETRYABLE_STATUS_CODES = frozenset()

print(LLMockServer().start().url, flush=True)
sys.stdin.read()
os._exit(0)  # do not wait for streams that are stalled on purpose
