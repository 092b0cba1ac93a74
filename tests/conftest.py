"""Set-up that all tests share: outside data, and hypothesis without a clock."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("cflow", deadline=None)  # no test fails by the clock
settings.load_profile("cflow")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def data() -> Path:
    """Test data that may not be committed."""
    folder = Path(os.environ.get("CFLOW_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}; set CFLOW_TEST_DATA")
    return folder
