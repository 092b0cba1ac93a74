"""Which room may import which: the arrows of docs/architecture.md, checked against the sources.

A room is a folder of `engine/` or `server/`, or a file that stands alone there (`native.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Engine rooms, lowest first: a room imports only rooms above it in this table.
ENGINE = {
    "engine.base": set[str](),
    "engine.native": {"engine.base"},
    "engine.text": {"engine.base"},
    "engine.memory": {"engine.base", "engine.native"},
    "engine.files": {"engine.base", "engine.native"},
    "engine.client": {"engine.base", "engine.text"},
    "engine.worker": {"engine.base", "engine.native", "engine.text", "engine.memory"},
    "engine.measure": {
        "engine.base",
        "engine.native",
        "engine.text",
        "engine.memory",
        "engine.files",
    },
}
LAB = {"engine.lab": set(ENGINE) - {"engine.client", "engine.worker"}}
FRONT = {"engine.base", "engine.text", "engine.client"}
SERVER = {
    "server.errors": {"engine.base"},
    "server.config": {"engine.base", "server.errors"},
    "server.metrics": FRONT | {"server.meter"},
    "server.meter": set[str](),
    "server.version": set[str](),
    "server.api": FRONT | {"server.config", "server.errors", "server.metrics"},
    "server.http": FRONT
    | {"server.config", "server.errors", "server.metrics", "server.version", "server.api"},
    "server.commands": FRONT
    | {"engine.files", "engine.measure"}
    | {"server.config", "server.errors", "server.version", "server.api", "server.http"},
    "server.__main__": {"server.commands"},
}
ROOMS = ENGINE | LAB | SERVER
# One file reaches further than its room.
DOORS = {"server/commands/lab.py": {"engine.lab"}}

# Modules of others, and the only rooms that may import them.
OTHERS = {
    "cflow.engine._native": {"engine.native"},
    "cffi": set[str](),
    "torch": {"engine.lab"},
    "matplotlib": {"engine.lab"},
    "fastapi": {"server.http"},
    "starlette": {"server.http"},
    "uvicorn": {"server.http"},
    "pydantic": {"server.api"},
    "prometheus_client": {"server.metrics", "server.meter", "server.http"},
    "typer": {"server.commands"},
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room_of(module: str) -> str | None:
    """ "engine.text" for "cflow.engine.text.grammar"; None for a module that is not ours."""
    parts = module.split(".")
    return ".".join(parts[1:3]) if parts[0] == "cflow" and len(parts) > 2 else None


def violations(root: Path) -> list[str]:
    """Every import below `root` that no arrow allows, as "file imports module"."""
    found = []
    for path in chain((root / "engine").rglob("*.py"), (root / "server").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        room = ".".join(file.removesuffix(".py").split("/")[:2])
        if room.endswith(".__init__"):
            continue
        allowed = {room} | ROOMS.get(room, set()) | DOORS.get(file, set())
        for name in imports(path):
            target = room_of(name)
            is_wrong = target is not None and target in ROOMS and target not in allowed
            is_wrong |= any(is_inside(name, m) and room not in r for m, r in OTHERS.items())
            if is_wrong:
                found.append(f"{file} imports {name}")
    return sorted(set(found))


def test_imports_follow_the_arrows() -> None:
    assert violations(ROOT) == []


def test_every_room_is_in_the_table() -> None:
    on_disk = {
        f"{package}.{path.stem}"
        for package in ("engine", "server")
        for path in (ROOT / package).iterdir()
        if (path.is_dir() and any(path.glob("*.py"))) or path.suffix == ".py"
    }
    assert {room for room in on_disk if not room.endswith(".__init__")} == set(ROOMS)


def test_the_arrows_form_no_circle() -> None:
    order: list[str] = []
    while len(order) < len(ROOMS):
        free = [r for r, targets in ROOMS.items() if r not in order and targets <= set(order)]
        assert free, f"a circle among {set(ROOMS) - set(order)}"
        order += free


FORBIDDEN = sorted(
    (room, target) for room in ROOMS for target in set(ROOMS) - ROOMS[room] - {room}
) + sorted((room, f"!{module}") for module, rooms in OTHERS.items() for room in set(ROOMS) - rooms)


@pytest.mark.parametrize(("room", "target"), FORBIDDEN)
def test_each_forbidden_import_is_found(room: str, target: str, tmp_path: Path) -> None:
    name = target[1:] if target.startswith("!") else f"cflow.{target}"
    file = tmp_path / room.replace(".", "/") / "new.py"
    if (ROOT / f"{room.replace('.', '/')}.py").is_file():
        file = tmp_path / f"{room.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def late():\n    import {name}.anything\n")
    assert violations(tmp_path) == [f"{file.relative_to(tmp_path)} imports {name}.anything"]
