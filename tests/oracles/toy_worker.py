"""A real worker process around the toy model: `python toy_worker.py FD`.

The model's name in the config holds the settings: "step_s=0.01 n_blocks=64 load_s=1 fail=reason
late_after=5". After `late_after` steps the worker's clock jumps by a day.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import ModelError
from cflow.engine.base.messages import Ready
from cflow.engine.worker import worker
from cflow.engine.worker.loading import Loaded
from oracles.toy_model import EOS, TOKEN_BYTES, ToyContext, toy_vocabulary


class Clock:
    """The module `time`, whose monotonic() is a day ahead after `n_steps` steps."""

    def __init__(self, context: ToyContext, n_steps: int) -> None:
        self._context = context
        self._n_steps = n_steps

    def monotonic(self) -> float:
        is_late = len(self._context.n_rows) >= self._n_steps
        return time.monotonic() + 86400 * is_late

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def load(config: EngineConfig, _digest: str, report: Callable[[str, int, int], None]) -> Loaded:
    settings = dict(part.split("=") for part in config.model.split())
    report("weights", 1, 2)
    time.sleep(float(settings.get("load_s", 0)))
    if "fail" in settings:
        raise ModelError(settings["fail"])
    n_blocks = int(settings.get("n_blocks", 64))
    context = ToyContext(n_blocks, step_s=float(settings.get("step_s", 0)))
    if "late_after" in settings:
        vars(worker)["time"] = Clock(context, int(settings["late_after"]))
    ready = Ready(
        pid=os.getpid(),
        isa="toy",
        n_threads=1,
        n_kv_blocks=n_blocks,
        max_context=min(config.context or 1024, 32 * n_blocks),
        resident_bytes=0,
        huge_bytes=0,
        kv_bytes=0,
        scratch_bytes=0,
        load_s=0.0,
    )
    return Loaded(context, TOKEN_BYTES, (EOS,), ready, toy_vocabulary())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    sys.exit(worker.serve(socket.socket(fileno=int(sys.argv[1])), load))
