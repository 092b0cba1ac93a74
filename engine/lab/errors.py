"""The error of the lab."""

from __future__ import annotations

from cflow.engine.base.errors import CflowError


class LabError(CflowError):
    """A run, its data or its results cannot be used; the message names which and why."""
