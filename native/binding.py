"""The cffi builder for cflow.engine._native: include/cflow.h is its one source."""

import re
from pathlib import Path

from cffi import FFI

header = (Path(__file__).parent / "include" / "cflow.h").read_text()
marked = re.search(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", header, re.DOTALL)
if not marked:
    raise SystemExit("include/cflow.h lost its cffi marks")

ffibuilder = FFI()
ffibuilder.cdef(marked.group(1))
ffibuilder.set_source("cflow.engine._native", '#include "cflow.h"')
