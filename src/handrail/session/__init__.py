"""Sessions: typed state that can be forked, committed and restored."""

from handrail.session.bus import Dispatcher
from handrail.session.fork import SessionFork, Snapshot
from handrail.session.serialization import check_serialisable, load, save
from handrail.session.session import Session
from handrail.session.slices import Items, Reducer, SliceKind, SliceRules, Table, append, kept

__all__ = [
    "Dispatcher",
    "Items",
    "Reducer",
    "Session",
    "SessionFork",
    "SliceKind",
    "SliceRules",
    "Snapshot",
    "Table",
    "append",
    "check_serialisable",
    "kept",
    "load",
    "save",
]
