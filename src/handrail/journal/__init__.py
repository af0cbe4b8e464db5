"""The record of runs: leases, committed calls, steps, questions, decisions, tickets and blobs."""
