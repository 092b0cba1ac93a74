"""What a file is, by its first bytes; apart from the readers so that a look at a file is cheap."""

from __future__ import annotations

from pathlib import Path

from cflow.engine.base.errors import ModelError

MAGIC = b"cflow\r\n\x1a"  # of a .cflow or .vflow file
LFS_POINTER = b"version https://git-lfs.github.com/"
LOOK_BYTES = 64  # enough for refuse_stand_in


def refuse_stand_in(path: Path, beginning: bytes) -> None:
    """Raise ModelError for what failed downloads leave in place of a file. beginning: the first
    LOOK_BYTES bytes of the file, fewer if it is shorter."""
    if not beginning:
        raise ModelError(f"{path} is empty (0 bytes); download it again")
    if beginning.startswith(LFS_POINTER):
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file that it stands for; run `git lfs pull` in "
            "its folder, or download the file again"
        )
    if beginning.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html")):
        raise ModelError(
            f"{path} is an HTML page: the download saved a web page instead of the file. Download "
            "it again, from the address of the file itself (on Hugging Face: /resolve/, not /blob/)"
        )
