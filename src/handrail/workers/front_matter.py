"""The front matter of a worker's file, as types. Its JSON Schema, for editors, is `worker.schema.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from handrail.schema import JsonSchema, Schema

SCHEMA_FILE = Path(__file__).with_name("worker.schema.json")
"""For editors: `# yaml-language-server: $schema=<this file>`."""

Name = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """A mapping in the front matter. What is not named here is refused."""

    model_config = ConfigDict(frozen=True)


class Limits(Part):
    """At most this much for one run of the worker, with everything below it."""

    requests: Annotated[Count | None, Field(description="Requests to models.")] = None
    tokens: Annotated[Count | None, Field(description="Tokens, sent and received.")] = None
    money: Annotated[float | None, Field(ge=0, description="US dollars.")] = None
    tool_calls: Annotated[Count | None, Field(description="Calls of tools and workers.")] = None
    seconds: Annotated[float | None, Field(gt=0, description="Time for one run.")] = None
    depth: Annotated[Count | None, Field(description="How deep calls may nest below this worker.")] = None


class AttachmentRule(Part):
    """Which files the worker may be given. Without a rule: none."""

    count: Annotated[int, Field(ge=0, le=1000, description="How many at most.")] = 1
    max_bytes: Annotated[int, Field(ge=1, le=100_000_000, description="How large each may be.")] = 1_000_000
    suffixes: Annotated[
        list[str] | None, Field(description="Which endings of a name, as in `.md`; left out, any.")
    ] = None


class CapabilityRules(Part):
    """Verdicts on what tools may touch: `fs.write`, `fs.*`, `*`."""

    allow: Annotated[list[str], Field(description="Runs without asking.")] = []
    ask: Annotated[list[str], Field(description="Runs if somebody approves.")] = []
    deny: Annotated[list[str], Field(description="Never runs.")] = []
    scope: Annotated[list[str] | None, Field(description="Folders that may be written to.")] = None


class RateRule(Part):
    """So many calls in so many seconds."""

    most: Annotated[int, Field(ge=1)]
    per_seconds: Annotated[float, Field(gt=0)]
    tools: Annotated[list[str] | None, Field(description="Of these tools only.")] = None


class PolicyEntry(Part):
    """One policy with its settings: exactly one of these."""

    capability: CapabilityRules | None = None
    rate_limit: RateRule | None = None
    sequential: Annotated[
        dict[str, list[str]] | None, Field(description="A tool, and those that must have succeeded before.")
    ] = None


class ShellEntry(Part):
    """The tool `run_command`, for these commands only."""

    shell: Annotated[
        list[Annotated[list[str], Field(min_length=1)]],
        Field(description='Commands as lists of arguments; a last "..." stands for any arguments.'),
    ]


class CreationDefaults(Part):
    """What a worker that this one creates gets where its maker leaves it out."""

    model: str | None = None
    tools: list[str] | None = None
    workers: list[str] | None = None
    limits: Limits | None = None


class FrontMatter(Part):
    """What stands between the two `---` lines of a worker's file."""

    name: Annotated[
        Name | None, Field(description="What it is called by; left out, the file's name without `.md`.")
    ] = None
    description: Annotated[
        str | None,
        Field(min_length=1, max_length=200, description="What it does, for whoever may call it."),
    ] = None
    model: Annotated[str | None, Field(description="`provider:name`; left out, the caller's.")] = None
    tools: Annotated[
        list[str | ShellEntry],
        Field(
            description="Functions of `tools.py` beside the file, `files`, `files.read`, or `shell: [...]`."
        ),
    ] = []
    policies: Annotated[
        list[Literal["capability", "read_before_write"] | PolicyEntry] | None,
        Field(description="In the place of `capability`, which a worker carries otherwise; [] for none."),
    ] = None
    output: Annotated[
        dict[str, Any] | None, Field(description="A JSON Schema that the answer is held to.")
    ] = None
    attachments: AttachmentRule | None = None
    limits: Limits = Limits()
    workers: Annotated[
        list[str] | Literal["*"], Field(description='The workers it may call; "*" for all of the folder.')
    ] = []
    locked: Annotated[
        bool, Field(description="No worker that a model creates may take its name, in any session.")
    ] = False
    create: Annotated[bool, Field(description="May its model create workers? Each one is asked about.")] = (
        False
    )
    creation_defaults: CreationDefaults | None = None


FRONT_MATTER: Schema[FrontMatter] = Schema(FrontMatter)


def front_matter_schema() -> JsonSchema:
    """The JSON Schema of the front matter: what `worker.schema.json` holds."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The front matter of a Handrail worker",
        **FRONT_MATTER.json_schema,
    }


def schema_text() -> str:
    """The same as the file has it."""
    return json.dumps(front_matter_schema(), indent=2, ensure_ascii=False) + "\n"
