"""What can go wrong in the lab."""

from __future__ import annotations

from cflow.engine.base.errors import CflowError


class LabError(CflowError):
    """A training run, its data or its model cannot be used; the message names what and why."""
