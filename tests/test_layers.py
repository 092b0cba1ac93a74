"""The one-way street: what each package may import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "engine": ("cflow.server", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"),
    "server": ("cflow.engine._native", "cflow.engine.native", "cffi"),
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            assert not any(is_inside(name, p) for p in FORBIDDEN[package]), (
                f"{path.relative_to(ROOT)} imports {name}"
            )


def test_only_its_command_imports_the_lab() -> None:
    """torch comes with the lab and is imported nowhere else."""
    users, torch_users = set(), set()
    for path in (*(ROOT / "engine").rglob("*.py"), *(ROOT / "server").rglob("*.py")):
        if path.is_relative_to(ROOT / "engine/lab"):
            continue
        names = list(imports(path))
        if any(is_inside(name, "cflow.engine.lab") for name in names):
            users.add(path.relative_to(ROOT).as_posix())
        if any(is_inside(name, "torch") for name in names):
            torch_users.add(path)
    assert users == {"server/commands/lab.py"}
    assert not torch_users


def test_cffi_is_touched_in_one_file() -> None:
    users = {
        p.relative_to(ROOT).as_posix()
        for package in ("engine", "server")
        for p in (ROOT / package).rglob("*.py")
        if any(is_inside(name, "cflow.engine._native") for name in imports(p))
    }
    assert users == {"engine/native.py"}
