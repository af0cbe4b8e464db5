"""A FastAPI app with a page of its own, and an agent mounted in it. Start it with `uvicorn app:app` in this folder.

Needs fastapi and the extra `serve`.
"""

import os
import secrets
from pathlib import Path
from typing import Annotated

from fastapi import Body, FastAPI, Request
from fastapi.responses import FileResponse, Response

from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, SqliteJournal, ToolCall, tool
from handrail.messages import ModelRequest, ToolMessage
from handrail.models.scripted import Scripted
from handrail.serve import PromptSource, asgi


@tool(capabilities={"money"})
async def refund(order: int) -> str:
    """Refund an order."""
    return f"order {order} is refunded"


def script(request: ModelRequest) -> Scripted:
    """Answer as a model would. Use Adapter("openai:gpt-5") for a real one."""
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return f"I asked for the refund: {last.text}"
    return ToolCall("refund", {"order": 17})


signed_in: dict[str, str] = {}  # stands for your app's own sessions


def user(request: Request) -> str | None:
    """Return the name of the user whose request this is, or None."""
    return signed_in.get(request.cookies.get("session", ""))


prompt = Prompt("desk", "Help customers.", tools=[refund], policies=[CapabilityPolicy({"money": "ask"})])
desk = asgi(
    PromptSource(prompt, Adapter(ScriptedModel(script))),
    journal=SqliteJournal(os.environ.get("HANDRAIL_JOURNAL", "desk.db")),
    authenticate=user,
)
app = FastAPI(lifespan=desk.lifespan)
app.mount("/agents", desk)


@app.get("/")
async def page() -> FileResponse:
    return FileResponse(Path(__file__).with_name("page.html"))


@app.post("/login")
async def login(name: Annotated[str, Body(embed=True)]) -> Response:  # check a password here
    session = secrets.token_urlsafe()
    signed_in[session] = name
    response = Response(status_code=204)
    response.set_cookie("session", session, httponly=True, samesite="strict")
    return response
