"""The program that MCP's conformance suite starts for each scenario. The client runs in another process, which listens on a port.

This program sends that process the server's address and the suite's variables, and exits with the code that it gets back.
Starting an interpreter without Handrail costs little, which matters because there are many scenarios.
"""

import json
import os
import socket
import sys

PREFIX = "MCP_CONFORMANCE_"

with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    connection.sendall(json.dumps({"url": sys.argv[-1], **variables}).encode() + b"\n")
    sys.exit(connection.recv(1) != b"0")
