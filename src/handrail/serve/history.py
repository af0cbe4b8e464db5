"""What the addresses do that are about what has happened in a thread: its runs, its files, its decisions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from handrail import runs
from handrail.errors import RunUnknown
from handrail.runs.deciding import approval_json
from handrail.serve import requests, snapshots
from handrail.serve.asked import limit_of, thread_of
from handrail.serve.middleware import PRINCIPAL
from handrail.serve.threads import Threads


class History:
    """Runs, files, undoing, and remembered decisions."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._journal = threads.journal

    async def run(self, request: Request) -> Response:
        thread = thread_of(self._threads, request)
        found = await runs.show(self._journal, request.path_params["run_id"])
        if found.row.record.session_id != thread.session_id:
            raise RunUnknown(request.path_params["run_id"])
        return JSONResponse(snapshots.tree(found))

    async def runs(self, request: Request) -> Response:
        found = await self._journal.runs(principal=request.scope[PRINCIPAL], limit=limit_of(request))
        lines: list[dict[str, Any]] = []
        for row in found:
            line = snapshots.run_line(row, await runs.show(self._journal, row.record.id))
            lines.append({**line, "thread_id": row.record.session_id.rpartition("/")[2]})
        return JSONResponse({"runs": lines})

    async def files(self, request: Request) -> Response:
        thread = thread_of(self._threads, request)
        await thread.check_known()
        return JSONResponse({"changes": await snapshots.changes(self._journal, thread)})

    async def undo(self, request: Request) -> Response:
        thread = thread_of(self._threads, request)
        requests.read(await request.body(), requests.Nothing)
        done = await thread.undo(request.path_params["call_id"])
        return JSONResponse(
            {
                "tool": done.tool,
                "paths": list(done.paths),
                "slices": list(done.slices),
                "stands": list(done.stands),
            }
        )

    async def approvals(self, request: Request) -> Response:
        kept = await thread_of(self._threads, request).approvals()
        return JSONResponse({"approvals": [approval_json(each) for each in kept]})

    async def revoke(self, request: Request) -> Response:
        await thread_of(self._threads, request).revoke(request.path_params["approval_id"])
        return JSONResponse({})
