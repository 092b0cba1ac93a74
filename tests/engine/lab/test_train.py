"""Training: what a run leaves, how it goes on after a kill, what it refuses."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch.nn import functional as F

from cflow.engine.lab import corpus, train
from cflow.engine.lab.architectures import build
from cflow.engine.lab.arms import ARMS, Arm, Shape, Training
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.train import Config, Report

SHAPE = Shape(300, 16, 2, 2, 32, 4, 2, 16, context=16)
TRAINING = Training(
    epochs=2, batch=4, peak_rate=1e-2, final_rate=1e-3, warm_up=3, betas=(0.9, 0.95),
    weight_decay=0.1, clip=1.0, dropout=0.1, balance=0.01, validate_every=5,
)  # fmt: skip
CONFIGS = Path(__file__).parents[3] / "configs" / "train"


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "cat", "dog", "sat", "ran", "on", "to", "a", "mat", "big", "red", "hill"]
    random = np.random.default_rng(0)
    for name, n in (("train.txt", 120), ("valid.txt", 20)):
        stories = [" ".join(random.choice(words, 20)) + ". é" for _ in range(n)]
        (folder / name).write_text(f"\n{corpus.END}\n".join(stories))
    return folder


def config(text: Path, **arms: Arm) -> Config:
    shape = replace(SHAPE, vocab_size=270)
    return Config([0], shape, TRAINING, arms or {"combined": ARMS["arch2_4_combined"]}, str(text))


def losses(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def run(config: Config, out: Path, watch: train.Watch = lambda _: None) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(
        train.train(config, out, n_threads=1, watch=watch).read_text()
    )
    return results


class Finished(NamedTuple):
    folder: Path
    results: dict[str, Any]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of config(text), to be read and copied."""
    folder = tmp_path_factory.mktemp("whole")
    return Finished(folder, run(config(text), folder))


def test_a_run_learns_and_leaves_its_model(text: Path, whole: Finished) -> None:
    how = config(text)
    results = whole.results
    folder = whole.folder / "combined-s0"
    records = losses(folder)
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    assert records[0]["loss"] == pytest.approx(math.log(270), rel=0.02)
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]
    (only,) = results["runs"]
    assert only["n_tokens"] == len(records) * TRAINING.batch * SHAPE.context
    assert only["valid_perplexity"] == pytest.approx(math.exp(only["valid_loss"]))
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")

    # The result is the loss, by hand, of the model that is left, over every window.
    model = build(ARMS["arch2_4_combined"], how.shape)
    model.load_state_dict(load_file(folder / "model" / "model.safetensors"))
    ids = torch.from_numpy(corpus.load(text, 270).valid)
    n = (len(ids) - 1) // SHAPE.context
    assert results["n_valid_tokens"] == n * SHAPE.context
    total = 0.0
    for at in range(0, n * SHAPE.context, SHAPE.context):
        logits = model.eval()(ids[None, at : at + SHAPE.context]).logits[0]
        total += F.cross_entropy(logits, ids[at + 1 : at + SHAPE.context + 1]).item() / n
    assert only["valid_loss"] == pytest.approx(total, rel=1e-5)
    assert only["valid_loss"] <= min(r["valid_loss"] for r in records if "valid_loss" in r) * 1.1


def test_a_killed_run_goes_on_with_the_same_numbers(
    text: Path, tmp_path: Path, whole: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "CHECKPOINT_S", 0.0)
    deaths = [4, 11]

    def kill(report: Report) -> None:
        if report.step in deaths:
            deaths.remove(report.step)
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            run(config(text), tmp_path, kill)
    parts = run(config(text), tmp_path, kill)
    assert losses(tmp_path / "combined-s0") == losses(whole.folder / "combined-s0")
    assert parts["runs"][0]["valid_loss"] == whole.results["runs"][0]["valid_loss"]


def test_finished_runs_are_not_done_again(text: Path, tmp_path: Path, whole: Finished) -> None:
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    seen: list[str] = []
    arms = {"combined": ARMS["arch2_4_combined"], "registers": ARMS["arch3"]}
    results = run(config(text, **arms), tmp_path, lambda report: seen.append(report.run.name))
    assert set(seen) == {"registers"}
    assert [r["name"] for r in results["runs"]] == ["combined", "registers"]
    assert not (tmp_path / "registers-s0" / "model").exists()  # the engine has no such file


def test_a_checkpoint_of_other_settings_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "CHECKPOINT_S", 0.0)

    def kill(report: Report) -> None:
        if report.step == 2:
            raise Killed

    with pytest.raises(Killed):
        run(config(text), tmp_path, kill)
    with pytest.raises(LabError, match="other settings"):
        run(with_other_settings(text), tmp_path)


def test_a_result_of_other_settings_is_refused(text: Path, tmp_path: Path, whole: Finished) -> None:
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(LabError, match="other settings"):
        run(with_other_settings(text), tmp_path)


def with_other_settings(text: Path) -> Config:
    return replace(config(text), training=replace(TRAINING, clip=2.0))


def test_a_run_that_another_process_has_is_left_to_it(text: Path, tmp_path: Path) -> None:
    arms = {"combined": ARMS["arch2_4_combined"], "sync": ARMS["arch2_4_sync"]}
    with train._held(tmp_path / "combined-s0"):
        results = run(config(text, **arms), tmp_path)
    assert [r["name"] for r in results["runs"]] == ["sync"]
    assert not (tmp_path / "combined-s0" / "log.jsonl").exists()


def test_arms_see_the_same_batches(text: Path) -> None:
    ids = corpus.load(text, 270).train
    first = torch.cat(list(corpus.epoch(ids, 16, 4, (3, 0))))
    again = torch.cat(list(corpus.epoch(ids, 16, 4, (3, 0))))
    other = torch.cat(list(corpus.epoch(ids, 16, 4, (3, 1))))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    n = corpus.n_batches(ids, 16, 4)
    assert first.shape == (4 * n, 17)
    # No window twice, and every window lies in the text.
    starts = {tuple(row.tolist()) for row in first}
    in_text = {tuple(ids[i : i + 17].tolist()) for i in range(len(ids) - 16)}
    assert starts <= in_text


def test_the_bundled_text_and_configuration() -> None:
    for path in CONFIGS.glob("*.toml"):
        how = train.read_config(path)
        for name, arm in how.arms.items():
            assert ARMS.get(name, arm) == arm
    text = corpus.load(corpus.BUNDLED, 4096)
    sample = "Once upon a time, Zoë's 3 cats ran!"
    assert text.tokenizer.decode(text.tokenizer.encode(sample).ids) == sample
    end = text.tokenizer.token_to_id(corpus.END)
    assert text.train[-1] == end
    assert int((text.train == end).sum()) == 4710


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("d_model =", "d_modell = 3\nd_model =", "d_modell"),
        ('dense_source = "x_in"', 'dense_source = "x_out"', "x_out"),
        ("epochs = 1", "epochs = 1.5", "epochs"),
        ("batch = 8", "batch = 0", "batch"),
        ("validate_every = 200", "validate_every = 0", "validate_every"),
        ("n_heads = 4", "n_heads = 0", "n_heads"),
        ("passes = 3", "passes = 0", "passes"),
        ("[shape]", "[shape", r"x\.toml"),
        ("seeds = ", "seeds = []  # ", "seeds"),
        ("seeds = ", "seeds = [-1]  # ", "seeds"),
        ("seeds = ", "seeds = [9223372036854775808]  # ", "seeds"),
        ("betas = [0.9, 0.95]", "betas = [0.9, 1.0]", "betas"),
        ("weight_decay = 0.1", "weight_decay = -1.0", "weight_decay"),
        ("clip = 1.0", "clip = 0.0", "clip"),
        ("dropout = 0.0", "dropout = 1.5", "dropout"),
        ("sequential = {}", '"../evil" = {}', "arms"),
    ],
)
def test_wrong_configurations_are_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    text = (CONFIGS / "tinystories.toml").read_text()
    assert old in text
    path = tmp_path / "x.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(LabError, match=named):
        train.read_config(path)


def test_sizes_that_make_no_model_are_named(text: Path, tmp_path: Path) -> None:
    wrong = config(text)
    with pytest.raises(LabError, match="combined-s0: 3 of 2 experts cannot be chosen"):
        run(replace(wrong, shape=replace(wrong.shape, n_experts=2, top_k=3)), tmp_path)
    with pytest.raises(LabError, match=r"thirds-s0: .*cannot be 3 passes"):
        run(config(text, thirds=Arm(passes=3)), tmp_path)


def test_a_device_that_is_not_there_is_named(text: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="'gpu0': this machine has cpu"):
        train.train(config(text), tmp_path, n_threads=1, device="gpu0")


def test_a_folder_that_cannot_be_written_is_named(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_text("")
    with pytest.raises(LabError, match=r"file: .*Not a directory"):
        run(config(text), out)


def test_a_disk_that_fills_ends_the_run(text: Path, tmp_path: Path) -> None:
    (tmp_path / "combined-s0").mkdir()
    (tmp_path / "combined-s0" / "best.part").symlink_to("/dev/full")
    with pytest.raises(LabError, match="No space left on device"):
        run(config(text), tmp_path)


def test_a_vocabulary_that_the_text_does_not_give(text: Path) -> None:
    with pytest.raises(LabError, match="lower vocab_size"):
        corpus.load(text, 5000)


def test_too_little_text_is_told_before_any_step(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(text, folder)
    (folder / "valid.txt").write_text("")
    with pytest.raises(LabError, match="0 to validate are too few"):
        run(config(folder), tmp_path / "out")


def test_rates() -> None:
    rates = [TRAINING.rate(step, 23) for step in range(23)]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert rates[13] == pytest.approx((1e-2 + 1e-3) / 2)
    assert rates[-1] == pytest.approx(1e-3, rel=0.1)
