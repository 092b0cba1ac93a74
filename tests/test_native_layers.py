"""The files of native/src form layers: includes and calls between them never close a circle."""

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "native" / "src"

COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
DIRECTIVE = re.compile(r"^#(?:.*\\\n)*.*$", re.MULTILINE)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
FUNCTION = re.compile(
    r"^(?P<type>[a-z][\w *]*?)\b(?P<name>\w+)\([^;{}]*?\)\s*"
    r"(?:__attribute__\(\(.*?\)\)\)\s*)?(?P<end>[;{])",
    re.MULTILINE | re.DOTALL,
)
CALL = re.compile(r"(?<![\w.>])(\w+)\(")

Graph = dict[str, set[str]]


def files(root: Path) -> Iterator[tuple[str, Path, str]]:
    """The C files below `root`: node, path, text. A .c file and its header are one node, and so are
    all files of a folder (kernels/, with kernels.c and kernels.h)."""
    for path in sorted(root.rglob("*.[ch]")):
        yield node_of(path, root), path, path.read_text()


def node_of(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").parts[0]


def functions(text: str, end: str) -> dict[str, bool]:
    """Functions defined (`end` is "{") or declared (";") in a file, and whether each is static."""
    bare = DIRECTIVE.sub("", COMMENT_OR_STRING.sub(" ", text))
    return {
        found["name"]: found["type"].startswith("static")
        for found in FUNCTION.finditer(bare)
        if found["end"] == end and not found["type"].startswith("typedef")
    }


def definitions(root: Path) -> dict[str, str]:
    """The node that defines each function that other files can call."""
    nodes: dict[str, str] = {}
    for node, path, text in files(root):
        for name, is_static in functions(text, "{").items():
            if is_static and path.suffix == ".c":
                continue
            assert nodes.setdefault(name, node) == node, f"{name} is defined in two files"
    return nodes


def includes(path: Path, text: str, root: Path) -> set[str]:
    """The nodes whose headers a file includes; headers outside `root` have none."""
    found = ((path.parent / name).resolve() for name in INCLUDE.findall(text))
    beside = [target if target.exists() else root / target.name for target in found]
    return {node_of(target, root) for target in beside if target.exists()}


def calls(text: str, nodes: dict[str, str]) -> set[str]:
    """The nodes whose functions a file calls."""
    bare = DIRECTIVE.sub("", COMMENT_OR_STRING.sub(" ", text))
    names = set(CALL.findall(bare)) - functions(text, "{").keys()
    return {nodes[name] for name in names if name in nodes}


def dependencies(root: Path) -> Graph:
    """For each node the nodes that it includes or calls."""
    nodes = definitions(root)
    graph: Graph = {}
    for node, path, text in files(root):
        used = includes(path, text, root) | calls(text, nodes)
        graph.setdefault(node, set()).update(used - {node})
    return graph


def circle(root: Path) -> list[str]:
    """One circle of files, its first repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(dependencies(root)).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def misplaced(root: Path) -> list[str]:
    """Functions that a header declares though another file defines them."""
    nodes = definitions(root)
    return [
        f"{path.name}: {name}"
        for node, path, text in files(root)
        if path.suffix == ".h"
        for name in functions(text, ";")
        if nodes.get(name) != node
    ]


def test_native_files_form_no_circle() -> None:
    assert "forward" in dependencies(SOURCES)
    assert not circle(SOURCES)


def test_a_native_header_declares_what_its_own_file_defines() -> None:
    assert not misplaced(SOURCES)


# ---- the checks themselves, on a tree of three layers ----

LOW_H = '#include "outside.h"\nint low(int x);\nstatic inline int twice(int x) {\n    return 2 * x;\n}\n'
LOW_C = '#include "low.h"\n\nint low(int x) {\n    return x; /* top(x) */\n}\n'
KERNEL_H = "int inner(int x);\n"
KERNEL_C = '#include "inner.h"\n#include "../low.h"\n\nint inner(int x) {\n    return low(x);\n}\n'
TOP_C = '#include "low.h"\n\nint top(int x) {\n    return twice(inner(x));\n}\n'


def write_tree(root: Path) -> None:
    (root / "kernels").mkdir()
    for name, text in {
        "low.h": LOW_H,
        "low.c": LOW_C,
        "kernels/inner.h": KERNEL_H,
        "kernels/inner.c": KERNEL_C,
        "top.c": TOP_C,
        "top.h": "int top(int x);\n",
    }.items():
        (root / name).write_text(text)


def test_layers_of_a_small_tree(tmp_path: Path) -> None:
    write_tree(tmp_path)
    assert dependencies(tmp_path) == {
        "low": set(),
        "kernels": {"low"},
        "top": {"low", "kernels"},
    }
    assert not circle(tmp_path)
    assert not misplaced(tmp_path)


@pytest.mark.parametrize(
    ("file", "violation"),
    [
        ("low.h", '#include "top.h"\n'),
        ("low.c", "int more(int x) {\n    return top(x);\n}\n"),
        ("low.h", "static inline int more(int x) {\n    return inner(x);\n}\n"),
        ("low.c", '#include "kernels/inner.h"\n'),
    ],
)
def test_a_circle_is_found(tmp_path: Path, file: str, violation: str) -> None:
    write_tree(tmp_path)
    with (tmp_path / file).open("a") as out:
        out.write(violation)
    assert "low" in circle(tmp_path)


def test_a_misplaced_declaration_is_found(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "low.h").write_text(LOW_H + "int top(int x);\n")
    assert misplaced(tmp_path) == ["low.h: top"]
