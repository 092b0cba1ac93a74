"""Run a worker: `python -m cflow.engine.worker FD`, where FD is its end of the socket."""

import sys

from cflow.engine.worker.worker import main

main(int(sys.argv[1]))
