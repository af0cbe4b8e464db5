"""Serve a family's inbox, where you sort the messages and approve the bills. Run it with `make serve`."""

from __future__ import annotations

from pathlib import Path

from app import adapter_for, new_mail, prompt

__all__ = ["adapter", "prompt"]

FOLDER = Path(".handrail", "inbox-on-a-page")

if not list(FOLDER.glob("inbox/*.txt")):
    new_mail(FOLDER)  # the inbox is empty, so new mail is added

adapter = adapter_for(FOLDER)
