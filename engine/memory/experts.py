"""Experts that stay on disk: how large their cache is, how they are read, its warm start.

A record is one expert of one layer: the file stores it in one piece, and one read fetches it.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cflow.engine.base.cache_folder import cache_folder
from cflow.engine.base.config import EngineConfig, read_share
from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.reports import Progress
from cflow.engine.memory.expert_uses import read_uses, uses_path, write_uses
from cflow.engine.native import ExpertOptions, Model, const

TIMEOUT_S = 10.0  # a read that takes longer has failed
SAVE_S = 10.0  # interval between saves of the uses

log = logging.getLogger("cflow.worker")

_RECORD = np.dtype(
    [("block", "<u4"), ("expert", "<u4"), ("offset", "<u8"), ("bytes", "<u8"), ("crc", "<u8")]
)


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """All records of a model. record_bytes: of the largest, which is the size of a cache slot."""

    offsets: tuple[int, ...]  # from the start of the file
    record_bytes: int
    n_bytes: int

    @staticmethod
    def of(model: Model) -> ExpertBank:
        records = np.frombuffer(model.section(const.SectionId.EXPERTS), _RECORD)
        padded = -(-records["bytes"].astype(np.int64) // 4096) * 4096
        start, _ = model.place(const.SectionId.EXPERT_BANK)
        return ExpertBank(
            offsets=tuple(start + offset for offset in records["offset"].tolist()),
            record_bytes=int(padded.max(initial=0)),
            n_bytes=int(padded.sum()),
        )

    @property
    def n_records(self) -> int:
        return len(self.offsets)


def choose_cache(config: EngineConfig, bank: ExpertBank, room: int) -> int:
    """Size of the expert cache in bytes, 0 if all experts stay in memory. room: bytes that nothing
    else needs. EngineError if the cache cannot hold a record per read in flight and one more."""
    asked = config.expert_cache
    if config.precision == "f32" or not bank.n_records:
        if asked is not None:
            why = "f32 keeps all in memory" if bank.n_records else "this model has no experts"
            raise EngineError("invalid_request", f"expert_cache is set, but {why}; leave it out")
        return 0
    budget = room if asked is None else asked_cache(asked, bank)
    if budget >= bank.n_bytes:
        return 0
    _check_budget(config, bank, budget)
    return budget


def asked_cache(asked: int | str, bank: ExpertBank) -> int:
    """Bytes of an expert_cache setting."""
    return asked if isinstance(asked, int) else round(read_share(asked) * bank.n_bytes)


def _check_budget(config: EngineConfig, bank: ExpertBank, budget: int) -> None:
    n = config.expert_reads + 1
    least = n * bank.record_bytes
    if budget < least:
        need = (
            f"but at least {least:,} are needed: {n} experts of {bank.record_bytes:,} each, for "
            f"{config.expert_reads} reads in flight and one more"
        )
        if config.expert_cache is not None:
            message = f"expert_cache is {budget:,} bytes, {need}; raise it or lower expert_reads"
            raise EngineError("invalid_request", message)
        message = f"{max(budget, 0):,} bytes are left for experts, {need}"
        advice = "lower expert_reads, kv_memory or context"
        raise EngineError("out_of_memory", f"{message}; {advice}")
    check_rate(config, "expert", bank.record_bytes)


def check_rate(config: EngineConfig, what: str, n_bytes: int) -> None:
    """EngineError if expert_read_rate makes one read so slow that it would count as stuck."""
    seconds = n_bytes / (config.expert_read_rate or math.inf)
    if seconds > config.stuck_s / 2:
        raise EngineError(
            "invalid_request",
            f"at expert_read_rate {config.expert_read_rate:,} one {what} of {n_bytes:,} "
            f"bytes takes {seconds:.0f} s, and {config.stuck_s:g} s without progress count as stuck; "
            "raise it",
        )


def expert_options(config: EngineConfig, cache: int) -> ExpertOptions:
    """How to open a model with an expert cache of this size, from choose_cache()."""
    return {
        "cache": cache,
        "io": config.expert_io,
        "expert_reads": config.expert_reads,
        "timeout_s": min(TIMEOUT_S, config.stuck_s / 2),
        "bytes_per_s": float(config.expert_read_rate or 0),
    }


class Experts:
    """Warm start of a model's expert cache, and the file that makes it possible."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._path = _find_uses(Path(model.path))
        self._saved_at = time.monotonic()
        self._trouble: str | None = None  # the last error of a save

    def warm(self, progress: Progress) -> None:
        """Read the experts that earlier runs used most. Each restart halves old counts."""
        if self._path is None:
            return
        uses = read_uses(self._path, self._model.header.n_records)
        if uses is not None:
            self._model.warm(uses // 2, progress)

    def save(self, *, at_once: bool = False) -> None:
        """Save the uses for the next start, if SAVE_S has passed or at_once is set."""
        now = time.monotonic()
        if self._path is None or (not at_once and now < self._saved_at + SAVE_S):
            return
        self._saved_at = now
        trouble = None
        try:
            write_uses(self._path, self._model.expert_uses)
        except OSError as error:
            trouble = error.strerror
        if trouble and trouble != self._trouble:
            log.warning("cannot write %s, will try again: %s", self._path, trouble)
        self._trouble = trouble


def _find_uses(model: Path) -> Path | None:
    """The path of the uses; None, with a log line, if there is no place for them."""
    try:
        return uses_path(model, cache_folder())
    except (OSError, ModelError) as error:
        log.warning("the expert cache starts cold, and its uses will not be saved: %s", error)
        return None
