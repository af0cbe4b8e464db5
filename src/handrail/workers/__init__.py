"""Workers: agents kept in files and called by name. Needs the extra `workers` (jinja2, pyyaml)."""

from handrail.context import Attachment, WorkerContext, WorkerMessage
from handrail.workers.front_matter import SCHEMA_FILE
from handrail.workers.problem import WorkerProblem
from handrail.workers.registry import WorkerRegistry
from handrail.workers.worker import Worker

WORKER_SCHEMA = SCHEMA_FILE
"""The JSON Schema of the front matter, as a file: editors complete by it."""

__all__ = [
    "SCHEMA_FILE",
    "WORKER_SCHEMA",
    "Attachment",
    "Worker",
    "WorkerContext",
    "WorkerMessage",
    "WorkerProblem",
    "WorkerRegistry",
]
