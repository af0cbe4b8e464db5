"""Serve llmock on a free loopback port, print the address, and end when stdin closes.

.components/llmock/bin/python tests/support/launch_llmock.py

The script runs on the Python of llmock's own venv. The tests set the server's answers and inspect its requests over
llmock's control API, /_llmock.
"""

import functools
import os
import sys
from typing import Any

# llmock is not installed in the venv that the type checker uses.
import uvicorn
from llmock import simulation, testing  # pyright: ignore

# llmock adds a Retry-After of one second to each 429, 503, 504 and 529 without one. With this set empty, it sends the
# header only if the script asks for it.
simulation.RETRYABLE_STATUS_CODES = frozenset()

# On a busy machine, the server may start late, and a client may send its next request late on the same connection.
PATIENCE = 300
testing._STARTUP_TIMEOUT = PATIENCE
configure: Any = uvicorn.Config.__init__
uvicorn.Config.__init__ = functools.partialmethod(configure, timeout_keep_alive=PATIENCE)  # type: ignore[method-assign]

print(testing.LLMockServer().start().url, flush=True)
sys.stdin.read()
os._exit(0)  # do not wait for streams that are stalled on purpose
