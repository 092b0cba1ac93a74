"""Errors of the engine. The text of each is written for the user.

CflowError            root
  ConfigError         a setting is out of range; has .field
  EngineError         running a model failed; has .code
    ModelError        a model file or reference cannot be used
      FetchError      a model cannot be downloaded
      NoModelError    a reference names no model
    TemplateError     the chat template failed on these messages; has .is_limit
"""

from __future__ import annotations


class CflowError(Exception):
    """Root of all errors of cflow."""


class ConfigError(CflowError):
    """A setting that cannot be used. field: its name in EngineConfig."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class EngineError(CflowError):
    """Running a model failed. code: "cancelled", "worker_died", "worker_stuck", "draining",
    "timeout", "numeric", "out_of_memory", "internal", "queue_full", "key_queue_full",
    "too_many_answers", "loading", "invalid_request", "template_error", "io_error" or "model_error"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ModelError(EngineError):
    """A model file or reference that cannot be used; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__("model_error", message)


class FetchError(ModelError):
    """A model that is not on this machine and cannot be downloaded; the message says what helps."""


class NoModelError(ModelError):
    """A reference that names no file, folder, repository or catalogue entry."""


class TemplateError(EngineError):
    """The chat template rejected the messages, failed, or exceeded its time or memory (is_limit)."""

    def __init__(self, message: str, *, is_limit: bool = False) -> None:
        super().__init__("template_error", message)
        self.is_limit = is_limit
