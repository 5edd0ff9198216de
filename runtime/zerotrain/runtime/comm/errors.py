"""The error of the package, in a module of its own so that every other module can raise it."""

from __future__ import annotations


class CommError(RuntimeError):
    """The process group cannot be set up, the ranks disagree on what they do, or a rank is gone."""
