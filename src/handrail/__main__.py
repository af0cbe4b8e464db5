"""Run the command-line program `handrail` as `python -m handrail`."""

import os
import sys

if __name__ == "__main__":
    # `python -m` puts the current folder first on `sys.path`. Tools may write there, and a `json.py` would shadow the
    # standard library's.
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]

    from handrail.cli import main

    main()
