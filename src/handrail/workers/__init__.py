"""Workers: agents kept in files and called by name. Requires the `workers` extra (jinja2, pyyaml)."""

from handrail.context import WorkerContext, WorkerMessage, WorkerUserContext
from handrail.workers.front_matter import SCHEMA_FILE as WORKER_SCHEMA
from handrail.workers.front_matter import WorkerProblem
from handrail.workers.registry import WorkerRegistry
from handrail.workers.worker import Worker

__all__ = [
    "WORKER_SCHEMA",
    "Worker",
    "WorkerContext",
    "WorkerMessage",
    "WorkerProblem",
    "WorkerRegistry",
    "WorkerUserContext",
]
