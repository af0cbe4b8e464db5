"""Run the command-line program `handrail` as `python -m handrail`."""

import os
import sys

if __name__ == "__main__":
    # `python -m` puts the current folder first, where tools may write: a `json.py` there would replace Python's own.
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]

    from handrail.cli import main

    main()
