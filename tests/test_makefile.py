"""Targets of the Makefile name what they lack, and track what they write."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RULES = dict(re.findall(r"^([a-z-]+):([^=#\n]*)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_f06_what_is_missing_is_named_with_the_way_to_get_it() -> None:
    done = subprocess.run(
        ["make", "need-no-such-program"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode
    assert "no-such-program is missing; on Debian: apt-get install no-such-program" in done.stderr


@pytest.mark.parametrize("target", ["image", "test-page", "records", "test-clients"])
def test_f06_needs_come_before_anything_is_built(target: str) -> None:
    needs = RULES[target].split()
    n = sum(name.startswith("need-") for name in needs)
    assert n
    assert all(name.startswith("need-") for name in needs[:n])


def test_f05_pictures_that_a_test_takes_are_tracked() -> None:
    source = (ROOT / "tests/e2e/test_page.py").read_text()
    names = set(re.findall(r'keep\(page, "([\w-]+)"\)', source))
    assert len(names) == source.count("keep(page, ")
    assert {f"{name}.png" for name in names} <= {
        path.name for path in (ROOT / "docs/pictures").iterdir()
    }
