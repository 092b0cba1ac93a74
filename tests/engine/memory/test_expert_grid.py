"""Answers do not depend on how experts come: one digest a prompt over slots, speculation, readers,
ways of reading and page cache, two prompts at once, from a disk whose reads take their time."""

import json
import os
import subprocess
import sys
from pathlib import Path

from makefiles.shape_file import synth_model
from oracles import running, tier_grid
from oracles.bad_disk import BadDisk

TESTS = Path(__file__).parents[2]
N_TOKENS = 10
LATE_PERCENT = 5


def test_one_digest_a_prompt_over_the_grid(tmp_path: Path) -> None:
    path = synth_model(
        tmp_path / "m.cflow", "qwen2moe", n_layers=3, d_model=96, heads=(6, 2, 16),
        n_experts=8, top_k=2, d_expert=48,
    )  # fmt: skip
    with running.opened(path) as context:
        want = tier_grid.digests(context, N_TOKENS)
    disk = BadDisk(path, tmp_path)
    disk.disturb(delayed=LATE_PERCENT, delay_ms=20)
    command = [sys.executable, str(TESTS / "oracles" / "tier_grid.py"), str(path), str(N_TOKENS)]
    environment = os.environ | disk.environment | {"PYTHONPATH": str(TESTS)}
    found = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    assert disk.n_struck > 0
    assert json.loads(found) == [[digest] for digest in want]
    assert len(set(want)) == len(tier_grid.PROMPTS)
