"""The one error of replay that is the user's to mend: a sentence, never a traceback."""

from __future__ import annotations


class ReplayError(Exception):
    """What went wrong and what to write instead, in one line."""
