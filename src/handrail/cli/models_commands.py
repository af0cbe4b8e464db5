"""`handrail models` lists the models that work here. `handrail model serve` serves the embedded model."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import typer

from handrail.cli.command_options import Port
from handrail.cli.outcome import DONE, fail, print_json, print_line
from handrail.cli.streams import unguarded
from handrail.text.rendering import escape_line
from handrail.text.terminal import Styler, wants_colour

app = typer.Typer(name="model", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

_MOST_SHOWN = 8
"""Maximum number of models that are listed for one provider."""


def models(as_json: bool) -> int:
    """List the providers, with their models or with what they need to work, and return the exit code."""
    from handrail.models.availability import survey

    try:
        found = asyncio.run(survey())
    except Exception as error:
        return fail(error, as_json=as_json)
    if as_json:
        print_json({"ok": True, "exit_code": DONE, "models": msgspec.to_builtins(found)})
        return DONE
    style = Styler(wants_colour(sys.stdout))
    for each in found:
        names = ", ".join(each.models[:_MOST_SHOWN])
        more = f" and {len(each.models) - _MOST_SHOWN} more" if len(each.models) > _MOST_SHOWN else ""
        detail = f"{names}{more}, {each.detail}" if names else each.detail
        state = style(f"{each.state:13}", "green" if each.state == "ready" else "yellow")
        unguarded(sys.stdout).write(f"{each.provider:11}{state} {escape_line(detail)}\n")
    return DONE


@app.callback()
def _model() -> None:
    """Keep `serve` a command of its own, although it is the only one."""


@app.command()
def serve(
    port: Port = 8601,
) -> None:
    """Serve the embedded model through OpenAI's chat completions and responses APIs, on this machine only.

    Ctrl-C or SIGTERM stops it.
    """
    try:
        _serve(port)
    except Exception as error:
        raise typer.Exit(fail(error)) from None


def _serve(port: int) -> None:
    from handrail.cli.serve_commands import check_extra, listen_at

    check_extra()
    from handrail.models.local import LocalModel
    from handrail.serve.model_server import run
    from handrail.serve.server import address_of

    model = LocalModel()
    listening = listen_at("127.0.0.1", port)
    address = f"{address_of(listening)}v1"

    def ready() -> None:
        print_line(
            f"{model.name} is at {address} (Ctrl-C stops it). To use it, in another terminal:\n"
            f"  export OPENAI_BASE_URL={address}\n"
            f"  handrail run WORKER --model openai:{model.name.partition(':')[2]}"
        )

    asyncio.run(run(model, listening, ready))
