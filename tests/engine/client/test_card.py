"""Reading a model's header: by a process that may die without harm."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.model_header import HeaderError, encode_header
from cflow.engine.client import card
from cflow.engine.client.card import read_card, read_header
from cflow.engine.files.hub import BUNDLED_FILE


def say(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have `code` run in place of the reader."""
    monkeypatch.setattr(card, "READER", (sys.executable, "-c", code))


def test_a_card_has_what_the_file_says() -> None:
    found = read_card(EngineConfig(model=str(BUNDLED_FILE), served_name="mine"))
    try:
        assert (found.name, found.path) == ("mine", str(BUNDLED_FILE))
        assert found.context > 0
        assert len(found.digest) == 32
        ids = found.tokenizer.encode("Once upon a time")
        assert found.tokenizer.decode(ids) == "Once upon a time"
    finally:
        found.grammars.close()


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(EngineError, match="exceeds the model") as caught:
        read_card(EngineConfig(model=str(BUNDLED_FILE), context=1 << 20))
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("n_bytes", [0, 3, 5000])
def test_a_file_that_is_no_model(n_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "x.cflow"
    path.write_bytes(bytes(n_bytes))
    with pytest.raises(ModelError, match=r"x\.cflow"):
        read_header(str(path))


@pytest.mark.parametrize(("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")])
def test_a_reader_that_crashes_is_an_error_that_names_the_file(
    number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, f"import os; os.kill(os.getpid(), {int(number)})")
    with pytest.raises(ModelError, match=rf"^evil\.cflow: .* died \({name}\)$"):
        read_header("evil.cflow")


def test_a_reader_that_fails_or_says_half_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "raise SystemExit(3)")
    with pytest.raises(ModelError, match="exit status 3"):
        read_header("x.cflow")
    half = encode_header(HeaderError("io_error", "the disk"))[:-3]
    say(monkeypatch, f"import sys; sys.stdout.buffer.write({half!r})")
    with pytest.raises(ModelError, match="not read completely"):
        read_header("x.cflow")


def test_errors_of_the_reader_keep_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode_header(HeaderError("io_error", "the disk"))
    say(monkeypatch, f"import sys; sys.stdout.buffer.write({whole!r})")
    with pytest.raises(EngineError, match="the disk") as caught:
        read_header("x.cflow")
    assert caught.value.code == "io_error"
    assert not isinstance(caught.value, ModelError)


def test_a_reader_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "READER", ("/no/such/program",))
    with pytest.raises(EngineError, match=r"reads x\.cflow cannot be started"):
        read_header("x.cflow")
