"""Record and replay: what a journal records about a run, and how a resumed run uses it.

log               the records of one run, found by place
records           the recorded form of results, inner calls and deposits
commits           writes a finished call to the journal, together with its files
finished_calls    replays a finished call from its record
interrupted_calls decides what becomes of a call that was interrupted
marks             records the beginning of each call that must not run twice
parked_run        parks a run that waits only for answers
attachments       stores and loads the bytes of attachments
workspaces        stores the files that a call changed in a workspace
"""
