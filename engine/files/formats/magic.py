"""The first bytes of a .cflow or .vflow file, apart from its writer so that a look at a file is cheap."""

from __future__ import annotations

MAGIC = b"cflow\r\n\x1a"
