"""What stops an agent from starting. Apart from `kube`, which takes a second to import and which an
agent that runs alone never needs."""

from __future__ import annotations

__all__ = ["ConfigurationError", "StartError"]


class StartError(Exception):
    """The agent cannot start as asked; one line that says what to do."""


class ConfigurationError(Exception):
    """Credentials or address cannot be had; the message says what to give."""
