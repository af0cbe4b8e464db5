"""Record and replay: what a journal keeps of a run, and how a resumed run uses it.

log               the records of one run, found by place
records           results, inner calls and deposits in their recorded form
commits           how a finished call is written, together with its files
finished_calls    a finished call comes from its record
interrupted_calls an interrupted call runs again, is undone, or its outcome is unknown
marks             calls that must not run twice are marked before they begin
parked_run        a run that waits only for answers is left to its journal
"""
