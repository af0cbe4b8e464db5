"""The errors that serving raises, and the responses that clients get for them.

A refusal is always JSON. It says what happened and often what to do, and reveals nothing that the client may not know.

    HandrailError
    ├── RequestRefused (ValueError)              .status, .kind, .fields, .retry_after, .challenge: a request is refused
    └── ServeError                               .thread: a thread can't do what was requested
        ├── ThreadNameRefused (ValueError)         the id or the principal is invalid
        ├── ThreadUnknown (LookupError)            the principal has no thread with this id
        ├── ThreadElsewhere (LookupError)          .app: the thread belongs to an app that is not served here
        ├── ThreadBusy (RuntimeError)              a run is in progress
        ├── QuestionsOpen (RuntimeError)           .count: questions are waiting for answers
        ├── NotForWorkers (ValueError)             workers take no client tools or earlier messages
        └── ServerStopping (RuntimeError)          no new work is accepted
"""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from handrail.errors import (
    AnswerRefused,
    HandrailError,
    JournalAltered,
    JournalError,
    MessageRefused,
    RunBusy,
    RunUnknown,
    SessionBusy,
    SessionError,
    SessionOutdated,
    UndoRefused,
)
from handrail.schema.problems import Problem

log = logging.getLogger("handrail.serve")

INCIDENT = "handrail.incident"
"""The key in a request's scope for its incident id. If the request fails, the error is logged under this id."""


class RequestRefused(HandrailError, ValueError):
    """Raised to refuse a request. Clients can tell refusals apart by `kind`."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        fields: Sequence[tuple[str, str]] = (),
        retry_after: float | None = None,
        challenge: str | None = None,
    ) -> None:
        super().__init__(message)
        if challenge is None:
            challenge = 'Bearer realm="handrail"' if status == 401 else ""
        self.status = status
        self.kind = kind
        self.fields = tuple(fields)
        """The problems in the body, as pairs of a JSON pointer and a message."""
        self.retry_after = retry_after
        self.challenge = challenge
        """The value of the header `WWW-Authenticate`, which says how to authenticate; "" for none."""


class ServeError(HandrailError):
    """Raised when a thread can't do what was requested."""

    def __init__(self, thread: str, problem: str, hint: str) -> None:
        self.thread = thread
        super().__init__(f"thread {thread!r}: {problem}. {hint}")


class ThreadNameRefused(ServeError, ValueError):
    """Raised when a thread's id or its principal is invalid."""


class ServerStopping(ServeError, RuntimeError):
    """Raised when the server is stopping and accepts no new work."""

    def __init__(self, thread: str) -> None:
        super().__init__(thread, "the server is stopping", "Try again soon.")


class ThreadUnknown(ServeError, LookupError):
    """Raised when the thread does not exist or belongs to another principal."""

    def __init__(self, thread: str) -> None:
        super().__init__(thread, "you have no thread with this id", "Send a message to start one.")


class ThreadElsewhere(ServeError, LookupError):
    """Raised when the thread belongs to a different app, which records its runs in the same journal."""

    def __init__(self, thread: str, app: str, prompt: str) -> None:
        self.app = app
        """The app's name, as `app_name` returns it; "" if only the prompt's name is known."""
        owner = app or f"the prompt {prompt!r}"
        where = " in the folder of that file" if app.endswith(".md") and "/" not in app else ""
        hint = f"Serve it with `handrail serve {shlex.quote(app)}`{where}." if app else "Serve that prompt."
        super().__init__(thread, f"it belongs to {owner}", hint)


class ThreadBusy(ServeError, RuntimeError):
    """Raised when one of the thread's runs is in progress."""

    def __init__(self, thread: str) -> None:
        super().__init__(thread, "a run is in progress", "Wait until it ends, or cancel it.")


class QuestionsOpen(ServeError, RuntimeError):
    """Raised when the thread's run waits for answers."""

    def __init__(self, thread: str, count: int) -> None:
        self.count = count
        waits = "a question is" if count == 1 else f"{count} questions are"
        super().__init__(thread, f"{waits} waiting for an answer", "Answer first, or cancel the run.")


class NotForWorkers(ServeError, ValueError):
    """Raised when a message can't be submitted to workers, because it comes with a client's tools or earlier messages."""

    def __init__(self, thread: str) -> None:
        super().__init__(
            thread,
            "workers execute this server's runs, and take no client tools or earlier messages",
            "Send a message without them, or serve the app without --submit.",
        )


# --- responses ----------------------------------------------------------------------------------------

STATUSES: Mapping[type[HandrailError], int] = {
    ThreadUnknown: 404,
    ThreadElsewhere: 404,
    RunUnknown: 404,
    ThreadBusy: 409,
    QuestionsOpen: 409,
    RunBusy: 409,
    UndoRefused: 409,
    AnswerRefused: 409,
    MessageRefused: 409,
    ThreadNameRefused: 422,
    NotForWorkers: 422,
    ServerStopping: 503,
    SessionBusy: 409,
    SessionOutdated: 409,
    SessionError: 404,
}
_FRAMEWORK = {
    404: ("NotFound", "there is nothing at this address. {served}"),
    405: (
        "MethodRefused",
        "this address does not accept the method. The `Allow` header lists the methods that it accepts.",
    ),
}
_PART = re.compile(r'\[(\d+|"(?:[^"\\]|\\.)*")\]|([^.\[]+)')


def exception_handlers(
    refused: Callable[[str], None], *, served: str = "The page is at `/`, AG-UI at `/agent`."
) -> dict[Any, Any]:
    """Return the exception handlers that Starlette uses for every route.

    `refused` is called with the kind of each `HandrailError` that a route raises. `served` tells a client that requests
    an unknown address what the server has.
    """

    async def handle_ours(request: Request, error: Exception) -> Response:
        refused(error.kind if isinstance(error, RequestRefused) else type(error).__name__)
        return error_response(error)

    async def handle_journal(request: Request, error: Exception) -> Response:
        assert isinstance(error, JournalError)
        return await handle_ours(request, journal_refusal(error, request.scope[INCIDENT]))

    async def handle_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind, message = _FRAMEWORK.get(error.status_code, ("Refused", "the request can't be served"))
        body = error_body(kind, message.format(served=served))
        return JSONResponse(body, error.status_code, error.headers)

    async def handle_defect(request: Request, error: Exception) -> Response:
        return error_response(server_error(request.scope[INCIDENT]))

    return {
        HTTPException: handle_framework,
        JournalError: handle_journal,
        HandrailError: handle_ours,
        Exception: handle_defect,
    }


def error_body(kind: str, message: str, fields: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Return the JSON body of a refusal: `{"error": {"kind", "message", "fields"}}`. `fields` is left out if it is empty."""
    error: dict[str, Any] = {"kind": kind, "message": message}
    if fields:
        error["fields"] = [{"path": path, "message": what} for path, what in fields]
    return {"error": error}


def error_response(error: Exception) -> Response:
    """Return the response for one of Handrail's own errors."""
    if isinstance(error, RequestRefused):
        return _refusal_response(error)
    if isinstance(error, AnswerRefused) and error.problems:
        return JSONResponse(error_body("AnswerRefused", str(error), fields_of(error.problems)), 422)
    status = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 400)
    return JSONResponse(error_body(type(error).__name__, str(error)), status)


def server_error(incident: str) -> RequestRefused:
    """Return the refusal for an internal error. The log has the details under the same incident id."""
    return RequestRefused(
        500,
        "ServerError",
        f"an internal server error occurred. The server's log has the details under {incident}",
    )


def journal_refusal(error: JournalError, incident: str) -> RequestRefused:
    """Log an error of the journal, and return the refusal, which does not say where the journal is."""
    log.error("the journal failed a request (%s): %s", incident, error)
    if error.is_lost:
        return RequestRefused(
            503,
            "JournalLost",
            "the server's journal does not answer. Try again soon. If you sent something, look first whether it has arrived.",
            retry_after=5.0,
        )
    if isinstance(error, JournalAltered):
        return RequestRefused(
            500,
            "JournalAltered",
            f"{error.place_and_problem}. Ask the server's operator to run `handrail runs verify`.",
        )
    return server_error(incident)


def fields_of(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Return problems as pairs of a JSON pointer and a message. The pointer "" means the whole value."""
    return [(pointer_of(each.where), each.what) for each in problems]


def pointer_of(where: str) -> str:
    """Convert a location such as `orders[2].price` to a JSON pointer such as `/orders/2/price`."""
    parts = (str(json.loads(found[1])) if found[1] else found[2] for found in _PART.finditer(where))
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)


def _refusal_response(refused: RequestRefused) -> Response:
    headers: dict[str, str] = {}
    if refused.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(refused.retry_after)))
    if refused.challenge:
        headers["www-authenticate"] = refused.challenge
    return JSONResponse(error_body(refused.kind, str(refused), refused.fields), refused.status, headers)
