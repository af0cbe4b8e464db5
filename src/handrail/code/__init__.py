"""Code mode: a model writes a script that calls the other tools. Needs `pip install 'handrail[code]'`."""

from handrail.code.section import CodeMode

__all__ = ["CodeMode"]
