"""What can go wrong in the engine.

CflowError                 str() is for the person who reads it
  EngineError              running a model failed; has .code
    ModelError             a model file or reference cannot be used
"""

from __future__ import annotations


class CflowError(Exception):
    """Root of all errors of cflow."""


class EngineError(CflowError):
    """Running a model failed. code: "cancelled", "worker_died", "worker_stuck", "draining", "timeout",
    "numeric", "out_of_memory", "internal", "queue_full", "loading" or "model_error"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ModelError(EngineError):
    """A model file or reference that cannot be used; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__("model_error", message)
