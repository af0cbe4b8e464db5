"""What a server offers besides tools: the sections of a prompt as MCP prompts, and files as MCP resources."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_type_hints
from urllib.parse import quote, unquote

import mcp_types as wire
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from handrail.content import guess_type
from handrail.errors import FileError, HandrailError
from handrail.mcp.contents import block_of
from handrail.mcp.forms import can_ask, principal_of
from handrail.prompt import Prompt, Section
from handrail.prompt.section import (
    LiveSection,
    MarkdownSection,
    PlainSection,
    condition_of,
    fields_of,
    template_of,
    walk,
)
from handrail.schema.problems import location_of
from handrail.skills import Skills
from mcp import MCPError

MAX_VALUES = 100
"""Maximum number of values in one completion, as MCP requires."""
PAGE = 500
"""Maximum number of resources on one page of the list."""
MAX_BYTES = 8 * 2**20
"""Maximum size of a resource that is read, in bytes."""
_OLD_NOT_FOUND = -32002
_ARGUMENTS = "arguments"
"""The key of the form that asks for the missing arguments of a prompt."""


class SectionPrompts:
    """The titled sections of a prompt that have a text or attachments, as MCP prompts. Live sections are left out.

    Of skills, each is a prompt, but not the section that has them all.

    The arguments of an MCP prompt are the fields that `_narrowed` leaves in the params of its section.
    """

    def __init__(self, sections: Sequence[Section[Any]]) -> None:
        left_out = (PlainSection, LiveSection, Skills)
        titled = [(path, each) for path, each in walk(sections) if not isinstance(each, left_out)]
        self._prompts: Mapping[str, Prompt[Any]] = {
            path: Prompt(each.key, [_narrowed(each)])
            for path, each in titled
            if each.template.strip() or each.attachments
        }

    def __bool__(self) -> bool:
        return bool(self._prompts)

    async def list(self, request: Any, params: Any) -> wire.ListPromptsResult:
        """Return the prompts, sorted by name."""
        return wire.ListPromptsResult(
            prompts=[
                wire.Prompt(
                    name=name,
                    title=prompt.sections[0].title,
                    description=prompt.sections[0].summary or prompt.sections[0].title,
                    arguments=[
                        wire.PromptArgument(name=argument, required=needed)
                        for argument, needed in _fields(prompt.params_type)
                    ],
                )
                for name, prompt in sorted(self._prompts.items())
            ]
        )

    async def get(
        self, request: Any, params: wire.GetPromptRequestParams
    ) -> wire.GetPromptResult | wire.InputRequiredResult:
        """Return a section's text, with its placeholders filled in, and its attachments.

        If required arguments are missing, a client with protocol version 2026-07-28 that can show forms is asked for them.
        Raises `MCPError` if there is no such prompt, if the arguments are missing or invalid, if the client's user did not
        give them, or if the section can't be rendered.
        """
        prompt = self._prompts.get(params.name)
        if prompt is None:
            raise MCPError(wire.INVALID_PARAMS, f"there is no prompt {params.name!r}")
        arguments = {**(params.arguments or {}), **_responses(params)}
        missing = [name for name, needed in _fields(prompt.params_type) if needed and name not in arguments]
        if missing and request.protocol_version in MODERN_PROTOCOL_VERSIONS and can_ask(request):
            form = _form(prompt, missing)
            return wire.InputRequiredResult(input_requests={_ARGUMENTS: wire.ElicitRequest(params=form)})
        given: Any = None
        try:
            if prompt.params_type is not None:
                given = TypeAdapter[Any](prompt.params_type).validate_python(arguments)
            rendered = prompt.render(given)
            closed = [each.path for each in rendered.closed]
            opening = rendered.open(closed) if closed else None
            text = rendered.text if opening is None else opening.text
        except (ValidationError, HandrailError) as error:
            problem = _problems(error) if isinstance(error, ValidationError) else str(error)
            raise MCPError(
                wire.INVALID_PARAMS, f"{params.name!r} can't be rendered with these arguments: {problem}"
            ) from None
        attachments = (rendered if opening is None else opening.rendered).attachments
        content = [wire.TextContent(text=text), *map(block_of, attachments)]
        return wire.GetPromptResult(
            messages=[wire.PromptMessage(role="user", content=each) for each in content]
        )

    async def complete(self, request: Any, params: wire.CompleteRequestParams) -> wire.CompleteResult:
        """Return at most `MAX_VALUES` values of a prompt's argument that begin with the typed text, ignoring case.

        Only an argument whose type lists its values has any. Raises `MCPError` if there is no such prompt.
        """
        found: Sequence[str] = ()
        if isinstance(params.ref, wire.PromptReference):
            prompt = self._prompts.get(params.ref.name)
            if prompt is None:
                raise MCPError(wire.INVALID_PARAMS, f"there is no prompt {params.ref.name!r}")
            begun = params.argument.value.casefold()
            found = [
                value
                for value in _values(prompt.params_type, params.argument.name)
                if value.casefold().startswith(begun)
            ]
        shown = list(found[:MAX_VALUES])
        completion = wire.Completion(values=shown, total=len(found), has_more=len(found) > len(shown))
        return wire.CompleteResult(completion=completion)


def _problems(error: ValidationError) -> str:
    """Describe what is wrong with each argument, without the values that were sent."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{location_of(each['loc'])}: {each['msg']}".removeprefix(": ") for each in found)


def _narrowed(section: Section[Any]) -> Section[Any]:
    """Return a section whose params have only the fields that its text and summary use. Clients need not send the others.

    All sections of a prompt share one params type. A section keeps all fields if it has children, if its params are a pydantic
    dataclass, or if code may read its params: a condition, a validator, or a different section class.
    """
    kind = section.params_type
    made_of: Any = type(section)
    if not isinstance(kind, type) or section.children or made_of is not MarkdownSection[kind]:
        return section
    if any(condition_of(section, what).may_read_params for what in ("enabled", "visibility")):
        return section
    texts = [section.template, section.summary or ""]
    used = frozenset[str]().union(*(template_of(text).names for text in texts))
    if used == fields_of(kind):
        return section
    fields = _definitions(kind)
    if fields is None:
        return dataclasses.replace(section, enabled=_reads_params) if section.enabled is True else section
    narrow: Any = None
    if used:
        narrow = create_model(
            kind.__name__,
            __config__=getattr(kind, "model_config", None),
            **{name: fields[name] for name in fields if name in used},
        )
    values = {each.name: getattr(section, each.name) for each in dataclasses.fields(section)}
    return MarkdownSection[narrow](**values)


def _reads_params(*, params: Any) -> bool:
    """Return True. A condition with the parameter `params` counts as a use of all fields, even of those that only validators read."""
    return True


def _definitions(kind: type[Any]) -> dict[str, Any] | None:
    """Return the type and default of each field of a params type.

    Returns None if the type has validators or other code, or is a pydantic dataclass.
    """
    if issubclass(kind, BaseModel):
        decorators: Any = kind.__pydantic_decorators__
        has_code = any(getattr(decorators, each.name) for each in dataclasses.fields(decorators))
        if has_code or kind.model_post_init is not BaseModel.model_post_init:
            return None
        return {name: (each.annotation, each) for name, each in kind.model_fields.items()}
    if hasattr(kind, "__post_init__") or hasattr(kind, "__pydantic_fields__"):
        return None
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        default: Any = ... if each.default is dataclasses.MISSING else each.default
        if each.default_factory is not dataclasses.MISSING:
            default = Field(default_factory=each.default_factory)
        found[each.name] = (hints[each.name], default)
    return found


def _form(prompt: Prompt[Any], missing: Sequence[str]) -> wire.ElicitRequestFormParams:
    """Return a form that asks for these arguments of a prompt. In MCP, all arguments of prompts are strings."""
    fields: dict[str, Any] = {}
    for name in missing:
        values = _values(prompt.params_type, name)
        fields[name] = {"type": "string", "title": name, **({"enum": list(values)} if values else {})}
    message = f"The prompt {prompt.sections[0].title} needs: {', '.join(missing)}"
    schema = {"type": "object", "properties": fields, "required": list(missing)}
    return wire.ElicitRequestFormParams(message=message, requested_schema=schema)


def _responses(params: wire.GetPromptRequestParams) -> Mapping[str, Any]:
    """Return the arguments that a client sent in response to a form; empty if it sent none, or an invalid response.

    Raises `MCPError` if the client's user declined or cancelled.
    """
    response = (params.input_responses or {}).get(_ARGUMENTS)
    if response is None:
        return {}
    try:
        result = wire.ElicitResult.model_validate(response)
    except ValidationError:
        return {}
    if result.action != "accept":
        raise MCPError(
            wire.INVALID_PARAMS, f"the arguments of {params.name!r} were not given: {result.action}"
        )
    return {name: value for name, value in (result.content or {}).items() if value is not None}


def _fields(params: Any) -> list[tuple[str, bool]]:
    """Return the name of each field of a params type, and whether it is required. Empty without a params type."""
    if params is None:
        return []
    schema = TypeAdapter[Any](params).json_schema()
    return [(name, name in schema.get("required", ())) for name in schema.get("properties", {})]


def _values(params: Any, name: str) -> Sequence[str]:
    """Return the strings that a field's type lists. Empty unless the type is an enum, a literal, or a union that contains one."""
    if params is None:
        return ()
    schema: dict[str, Any] = TypeAdapter[Any](params).json_schema()
    definitions: dict[str, Any] = schema.get("$defs", {})
    waiting: list[dict[str, Any]] = [schema.get("properties", {}).get(name, {})]
    values: dict[str, None] = {}
    while waiting:
        field = waiting.pop(0)
        if "$ref" in field:
            waiting.append(definitions.get(field["$ref"].removeprefix("#/$defs/"), {}))
        waiting += field.get("anyOf", ())
        listed: list[Any] = field.get("enum", [field["const"]] if "const" in field else [])
        values.update(dict.fromkeys(each for each in listed if isinstance(each, str)))
    return list(values)


def _is_regular(files: Any, path: str) -> bool:
    """Return whether a path is a regular file. False if it no longer exists or can't be examined."""
    try:
        info = files.stat(path)
    except (FileError, OSError):
        return False
    return not info.is_directory and not info.is_special


class FileResources:
    """The files of a principal as MCP resources. Their addresses begin with `base`, such as `files:///`.

    Files are read as the principal's calls see them. Nothing else can be read.
    """

    def __init__(self, base: str, files: Callable[[str], Any]) -> None:
        self._base = base
        self._files = files

    async def list(self, request: Any, params: Any) -> wire.ListResourcesResult:
        """Return a page of the regular files, sorted by path. Raises `MCPError` if the cursor is invalid."""
        files = self._files(principal_of(request))
        if files is None:
            return wire.ListResourcesResult(resources=[])
        cursor = None if params is None else params.cursor
        if cursor is not None and not re.fullmatch(r"[0-9]{1,9}", cursor):
            raise MCPError(
                wire.INVALID_PARAMS,
                "the cursor is not one that this server returned. List the resources without a cursor",
            )
        start = int(cursor or 0)
        paths: Sequence[str] = sorted(files.glob("**"))
        shown = [
            wire.Resource(uri=self._base + quote(path), name=path, mime_type=guess_type(b"", path))
            for path in paths[start : start + PAGE]
            if _is_regular(files, path)
        ]
        more = str(start + PAGE) if len(paths) > start + PAGE else None
        return wire.ListResourcesResult(resources=shown, next_cursor=more)

    async def templates(self, request: Any, params: Any) -> wire.ListResourceTemplatesResult:
        """Return the URI template that the addresses of all files match."""
        made = wire.ResourceTemplate(
            uri_template=f"{self._base}{{+path}}", name="file", description="A file by path."
        )
        return wire.ListResourceTemplatesResult(resource_templates=[made])

    async def read(self, request: Any, params: wire.ReadResourceRequestParams) -> wire.ReadResourceResult:
        """Return a file's content, as text if it is UTF-8. Raises `MCPError` if it can't be read or is larger than `MAX_BYTES`."""
        uri = str(params.uri)
        files = self._files(principal_of(request))
        missing = not_found(request, uri)
        if files is None or not uri.startswith(self._base):
            raise missing
        path = unquote(uri.removeprefix(self._base))
        try:
            if files.stat(path).size > MAX_BYTES:
                raise MCPError(
                    wire.INVALID_PARAMS, f"the resource is larger than {MAX_BYTES} bytes", data={"uri": uri}
                )
            content = cast(bytes, files.read_bytes(path))
        except (FileError, HandrailError, OSError, ValueError):
            raise missing from None
        return content_result(uri, content, path)


def not_found(request: Any, uri: str) -> MCPError:
    """Return the error for a resource that does not exist."""
    is_modern = request.protocol_version in MODERN_PROTOCOL_VERSIONS
    return MCPError(
        wire.INVALID_PARAMS if is_modern else _OLD_NOT_FOUND, "there is no such resource", data={"uri": uri}
    )


def content_result(uri: str, content: bytes, path: str) -> wire.ReadResourceResult:
    """Return a file's content, as text if it is UTF-8."""
    kind = guess_type(content, path)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        blob = base64.b64encode(content).decode()
        return wire.ReadResourceResult(
            contents=[wire.BlobResourceContents(uri=uri, mime_type=kind, blob=blob)]
        )
    kind = kind if kind != "application/octet-stream" else "text/plain"
    return wire.ReadResourceResult(contents=[wire.TextResourceContents(uri=uri, mime_type=kind, text=text)])
