"""The options that `run` and `chat` share: each has its name, its type, its default and its words here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Model = Annotated[
    str | None,
    typer.Option(help="Another model than the worker's, as provider:name, or module:name of your own."),
]
Files = Annotated[
    Path | None,
    typer.Option(help="The folder tools may change. Default: `files` beside the worker, if there is one."),
]
JournalFile = Annotated[
    Path | None,
    typer.Option(
        "--journal", help="Where runs are recorded. Default: $HANDRAIL_JOURNAL, else .handrail/runs.db here."
    ),
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for by these options."""

    worker: Annotated[
        str,
        typer.Argument(help="A worker's file (demo/main.md), or a folder with workers (demo, demo/main)."),
    ]
    model: Model = None
    approve: Annotated[
        str,
        typer.Option(
            help="What needs approval: ask whoever is there (nobody there: no), all (yes), strict (no), or later: "
            "the run is parked until `handrail runs answer`."
        ),
    ] = "ask"
    files: Files = None
    deadline: Annotated[
        str | None, typer.Option(help="How long a run may take: 90s, 5m, 1h. Waiting for you does not count.")
    ] = None
    tokens: Annotated[int | None, typer.Option("--budget-tokens", min=0, help="Tokens at most.")] = None
    money: Annotated[float | None, typer.Option("--budget-money", min=0, help="US dollars at most.")] = None
    requests: Annotated[
        int | None, typer.Option("--budget-requests", min=0, help="Requests to models at most.")
    ] = None
    calls: Annotated[int | None, typer.Option("--budget-calls", min=0, help="Tool calls at most.")] = None
    journal: JournalFile = None
    no_journal: Annotated[bool, typer.Option("--no-journal", help="Record nothing.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer and nothing else.")] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say more; show tracebacks (so does HANDRAIL_DEBUG=1).")
    ] = False


def takes_asked(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is an `Asked`, as one that takes its options by name, as typer wants them."""
    names = [field.name for field in dataclasses.fields(Asked)]

    @functools.wraps(command)
    def taking(**given: Any) -> None:
        asked = Asked(**{name: given.pop(name) for name in names})
        command(asked, **given)

    hints = get_type_hints(Asked, include_extras=True)
    worker, *shared = (
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(Asked)
    )
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    taking.__signature__ = inspect.Signature([worker, *own, *shared])  # pyright: ignore[reportAttributeAccessIssue]  # what inspect looks at
    taking.__annotations__ = {}  # those of the command, which has another signature
    return taking
