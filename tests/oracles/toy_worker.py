"""A real worker process around the toy model: `python toy_worker.py FD`.

The model's name in the config holds the settings: "step_s=0.01 n_blocks=64 load_s=1 fail=the reason".
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
from cflow.engine.worker.loading import Loaded
from cflow.engine.worker.worker import serve
from oracles.toy_model import EOS, TOKEN_BYTES, ToyContext, toy_vocabulary


def load(config: EngineConfig, _digest: str, report: Callable[[str, int, int], None]) -> Loaded:
    settings = dict(part.split("=") for part in config.model.split())
    report("weights", 1, 2)
    time.sleep(float(settings.get("load_s", 0)))
    if "fail" in settings:
        raise ModelError(settings["fail"])
    n_blocks = int(settings.get("n_blocks", 64))
    context = ToyContext(n_blocks, step_s=float(settings.get("step_s", 0)))
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
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1])), load))
