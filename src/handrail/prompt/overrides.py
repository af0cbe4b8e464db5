"""`Overrides`: tuned words for a prompt, kept in files beside the code."""

from __future__ import annotations


class Overrides:
    """A folder with tuned words, one TOML file for each prompt."""
