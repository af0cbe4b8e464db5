"""Serves llmock on a free port of loopback, prints the address, and ends when stdin closes.

.components/llmock/bin/python tests/support/launch_llmock.py

The script runs on the Python of llmock's own venv, and serves llmock's own application, which is scripted and
inspected over its control API, /_llmock.
"""

import os
import sys

# llmock is not installed in the venv that the type checker uses.
from llmock import simulation  # pyright: ignore
from llmock.testing import LLMockServer  # pyright: ignore

# llmock adds a Retry-After of one second to every 429 without one. With no status in this set it sends the
# header only when the script asks for it.
simulation.RETRYABLE_STATUS_CODES = frozenset()

print(LLMockServer().start().url, flush=True)
sys.stdin.read()
os._exit(0)  # do not wait for streams that are stalled on purpose
