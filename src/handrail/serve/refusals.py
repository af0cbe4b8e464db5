"""What a client is told where it is refused: always JSON, always with the mend, never more than it may know."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from handrail.errors import (
    AnswerRefused,
    HandrailError,
    QuestionsOpen,
    RequestRefused,
    RunBusy,
    RunUnknown,
    ServerStopping,
    SessionError,
    ThreadBusy,
    ThreadNameRefused,
    ThreadUnknown,
    UndoRefused,
)
from handrail.schema import Problem
from handrail.serve.metrics import Metrics

INCIDENT = "handrail.incident"
"""Where in a request's scope it stands what the log calls it, should it fail."""

STATUSES: Mapping[type[HandrailError], int] = {
    ThreadUnknown: 404,
    RunUnknown: 404,
    ThreadBusy: 409,
    QuestionsOpen: 409,
    RunBusy: 409,
    UndoRefused: 409,
    AnswerRefused: 409,
    ThreadNameRefused: 422,
    ServerStopping: 503,
    SessionError: 404,
}
_PLAIN = {
    404: ("NotFound", "there is nothing at this address. The page is at `/`, AG-UI at `/agent`."),
    405: ("MethodRefused", "not with this method. The header `Allow` says which there are."),
}
_PART = re.compile(r'\[(\d+|"(?:[^"\\]|\\.)*")\]|([^.\[]+)')


def handlers(metrics: Metrics) -> dict[Any, Any]:
    """How each exception of a route is answered."""

    async def ours(request: Request, error: Exception) -> Response:
        told = of_ours(error)
        metrics.refuse(error.kind if isinstance(error, RequestRefused) else type(error).__name__)
        return told

    return {HTTPException: of_framework, HandrailError: ours, Exception: of_defect}


def body(kind: str, message: str, fields: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": kind, "message": message}
    if fields:
        told["fields"] = [{"path": path, "message": what} for path, what in fields]
    return {"error": told}


def response(refused: RequestRefused) -> Response:
    headers: dict[str, str] = {}
    if refused.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(refused.retry_after)))
    if refused.status == 401:
        headers["www-authenticate"] = 'Bearer realm="handrail"'
    return JSONResponse(body(refused.kind, str(refused), refused.fields), refused.status, headers)


async def of_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind, message = _PLAIN.get(error.status_code, ("Refused", "the request can't be served like this"))
    return JSONResponse(body(kind, message), error.status_code, error.headers)


async def of_defect(request: Request, error: Exception) -> Response:
    """The log has the rest, under the same name: see `Guard`."""
    told = f"the server failed at this; its log says more, under {request.scope[INCIDENT]}"
    return JSONResponse(body("ServerError", told), 500)


def of_ours(error: Exception) -> Response:
    if isinstance(error, RequestRefused):
        return response(error)
    if isinstance(error, AnswerRefused) and error.problems:
        return JSONResponse(body("AnswerRefused", str(error), fields_of(error.problems)), 422)
    status = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 400)
    return JSONResponse(body(type(error).__name__, str(error)), status)


def fields_of(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Problems by the JSON pointers of their places; "" is the value itself."""
    return [(pointer_of(each.where), each.what) for each in problems]


def pointer_of(where: str) -> str:
    """`orders[2].price` as `/orders/2/price`."""
    parts = (str(json.loads(found[1])) if found[1] else found[2] for found in _PART.finditer(where))
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)
