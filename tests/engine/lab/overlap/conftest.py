"""A small delayed mixture: 16 layers of 8 experts, 2 a token."""

from pathlib import Path

import pytest

from cflow.engine.files.synth import synth
from cflow.engine.lab.measurements import shape_text


@pytest.fixture(scope="package")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "small.toml"
    path.write_text(
        shape_text("arch2_4_combined", 64, 16, d_ff=128, n_experts=8, top_k=2, d_expert=32)
    )
    return str(path)


@pytest.fixture(scope="package")
def model_path(shape: str) -> Path:
    path = Path(shape).with_suffix(".cflow")
    synth(shape, path)
    return path
