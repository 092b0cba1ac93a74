"""The cflow command, also as `python -m cflow.server`: signals are taken before all else is imported."""

from __future__ import annotations

import signal
import sys


def _end(*_: object) -> None:
    """On SIGTERM. A server was asked to end, other commands were cut short."""
    sys.exit(0 if sys.argv[1:2] == ["serve"] else 128 + signal.SIGTERM)


def main() -> None:
    # The first process of a container is not ended by default. The server sets its own, once it is up.
    signal.signal(signal.SIGTERM, _end)
    try:
        from cflow.server.commands import cli

        cli.main()
    except KeyboardInterrupt:
        print("cflow: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
