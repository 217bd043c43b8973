"""Why a benchmark cannot give a figure."""

from __future__ import annotations


class BenchError(Exception):
    """One line that says what is wrong and what to do."""
