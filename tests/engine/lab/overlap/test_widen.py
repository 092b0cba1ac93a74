"""A widened model computes the same."""

from contextlib import closing
from pathlib import Path

import pytest

from cflow.engine.files.hub import BUNDLED_FILE
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.overlap.streams import Case, decode_case, open_case, story
from cflow.engine.lab.overlap.widen import widen
from cflow.engine.native import Model


def test_a_widened_model_has_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "wide.cflow"
    widen(BUNDLED_FILE, path, 1024, 256)
    with closing(Model(str(BUNDLED_FILE))) as narrow, closing(Model(str(path))) as wide:
        assert [(layer.d_ff, layer.d_expert) for layer in wide.layers] == [(1024, 256)] * 6
        assert path.stat().st_size > 1.4 * BUNDLED_FILE.stat().st_size
        tokens = story(narrow, 40)
        case = Case("real", tokens, 1, 2)
        assert len(set(tokens)) > 20
        got, want = (decode_case(open_case(model, case), case) for model in (wide, narrow))
        assert (got.choices, got.crc) == (want.choices, want.crc)
        assert tokens[1:] == want.choices[:-1]  # a story is the model's own greedy text


def test_no_model_becomes_narrower(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="gate of 512 x 128 exceeds 256"):
        widen(BUNDLED_FILE, tmp_path / "x.cflow", 256, 256)
