"""What an adapter and its evaluations were given, checked before anything begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from handrail.adapter.bound import one_message
from handrail.dispatch.frame import Frame
from handrail.dispatch.opening import check_kinds
from handrail.errors import DefinitionError
from handrail.messages import Model
from handrail.prompt import Prompt
from handrail.prompt.section import walk
from handrail.protocols import EventBus, Filesystem, WorkerSource
from handrail.session import Session


def given_to_evaluate(arguments: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation was given, checked where it can be before it begins."""
    del arguments["self"]
    prompt, params, message = arguments.pop("prompt"), arguments["params"], arguments["message"]
    if not isinstance(prompt, Prompt):
        raise DefinitionError(
            f"evaluate takes a Prompt, not a {type(prompt).__name__}. "
            'Write `evaluate(Prompt("guide", "Answer briefly."), "the message")`.'
        )
    if isinstance(params, str):
        one_message(params, message)
    check_kinds(session=(arguments["session"], Session, "a Session"))
    return arguments


def given_to_resume(arguments: dict[str, Any]) -> dict[str, Any]:
    """What resuming a run was given, beside the run."""
    for name in ("self", "run_id", "prompt"):
        del arguments[name]
    return arguments


def check_files(prompt: Prompt[Any], frame: Frame) -> None:
    """Sections whose tools work on files want a run that has some."""
    wanting = [type(section).__name__ for _, section in walk(prompt.sections) if section.needs_files]
    if wanting and frame.filesystem is None and not frame.resources.binds(Filesystem):
        raise DefinitionError(
            f"prompt {prompt.name!r} has {wanting[0]}, and the run has no files. Give it some: "
            "evaluate(..., filesystem=DirectoryFilesystem('folder'))."
        )


def checked_model(model: Any) -> Model:
    if isinstance(model, type) or not all(hasattr(model, member) for member in ("name", "traits", "stream")):
        raise DefinitionError(
            f"{model!r} is not a model. Give one, such as OpenAIModel('gpt-5') or ScriptedModel([...]), "
            "or a name like 'openai:gpt-5'."
        )
    return model


def checked_workers(workers: Any) -> WorkerSource | None:
    if workers is None or callable(getattr(workers, "enter", None)):
        return workers
    raise DefinitionError(f"workers is a {type(workers).__name__}. Give WorkerRegistry(folder).")


def forwarding(session: Session, *buses: EventBus | None) -> Callable[[], None]:
    """Until what is returned is called, whoever listens on one of these hears of the run as well."""
    own = session.dispatcher
    stops = [own.subscribe(object, bus.publish) for bus in buses if bus is not None and bus is not own]

    def stop() -> None:
        for each in stops:
            each()

    return stop
