"""The app that the AG-UI clients are tried with, in a process of its own where it is to be killed.

python agui_app.py FOLDER PORT
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvicorn

from handrail import SqliteJournal, ToolCall
from handrail.errors import ModelUnavailable
from handrail.models.scripted import Reply, Scripted
from handrail.serve.http import asgi
from served import PLAYS, said, source_in

PLANS: Mapping[str, Sequence[Scripted]] = {
    **PLAYS,
    "map": [said("Look.", ToolCall("showMap", {"place": "Oslo"}, "map-1")), said("You have seen it.")],
    "map and pay": [
        said("", ToolCall("showMap", {"place": "Oslo"}, "map-2"), ToolCall("pay", {"amount": 5}, "pay-2")),
        said("Seen and paid."),
    ],
    "pay two": [
        said("", ToolCall("pay", {"amount": 1}, "pay-a"), ToolCall("pay", {"amount": 2}, "pay-b")),
        said("Both paid."),
    ],
    "think": [Reply("So it is.", thinking="Let me think about it.", usage=said("").usage)],
    "down": [ModelUnavailable("scripted:played", "it is down")],
}


def main(folder: Path, port: int) -> None:
    app = asgi(source_in(folder, PLANS), journal=SqliteJournal(folder / "runs.db"))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
