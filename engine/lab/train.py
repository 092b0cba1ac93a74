"""Trains the arms: every run of a configuration once, resumed where it stopped.

    OUT/ARM-sSEED/    run.json: its settings; checkpoint.pt, best.pt; log.jsonl, curve.png,
                      result.json; model/: the best model as a folder for `cflow convert`, if
                      the engine runs the arm
    OUT/results.json  all finished runs, shown in curves.png

Several processes can share one OUT; each skips the runs that another one is training.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from cflow.engine.base import machine
from cflow.engine.lab import corpus
from cflow.engine.lab.architectures import Pipeline, build, n_parameters
from cflow.engine.lab.arms import Arm, Shape, Training
from cflow.engine.lab.corpus import Corpus
from cflow.engine.lab.curves import draw_arms, draw_curve
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.export import export
from cflow.engine.lab.results import Result, Trained

N_QUICK_BATCHES = (
    16  # of the validation text, for the loss during training; at the end all of it counts
)
CHECKPOINT_S = 60.0  # between two checkpoints

Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^\w[\w.-]*$")]  # becomes part of a folder's name


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A TOML file such as configs/train/tinystories.toml.

    text: folder with train.txt and valid.txt; None uses the bundled TinyStories text.
    """

    seeds: Annotated[list[Seed], msgspec.Meta(min_length=1)]
    shape: Shape
    training: Training
    arms: Annotated[dict[Name, Arm], msgspec.Meta(min_length=1)]
    text: str | None = None


class Run(msgspec.Struct, frozen=True):
    """One model to train."""

    name: str
    arm: Arm
    seed: int
    shape: Shape
    training: Training

    @property
    def folder(self) -> str:
        return f"{self.name}-s{self.seed}"


class Report(msgspec.Struct, frozen=True):
    """Progress of a run. loss: of the last batch, in nats a token."""

    run: Run
    step: int
    n_steps: int
    loss: float
    tokens_per_s: float


Watch = Callable[[Report], None]


def read_config(path: Path) -> Config:
    """LabError: the file cannot be read or holds an invalid setting, which the message names."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise LabError(f"{path}: {error}") from None


def runs_of(config: Config) -> list[Run]:
    """All runs, seed by seed, so that every arm has one run before any has two."""
    return [
        Run(name, arm, seed, config.shape, config.training)
        for seed in config.seeds
        for name, arm in config.arms.items()
    ]


def train(
    config: Config, out: Path, *, n_threads: int, device: str = "", watch: Watch = lambda _: None
) -> Path:
    """Trains every run that has no result in `out`; returns the path of results.json.

    device: "cpu", "cuda", or "" for CUDA if there is any. LabError: out holds runs with other
    settings, or cannot be written."""
    keep_freed_memory()
    torch.set_num_threads(n_threads)
    device = _device(device)
    folder = Path(config.text) if config.text else corpus.BUNDLED
    text = corpus.load(folder, config.shape.vocab_size)
    try:
        for run in runs_of(config):
            with _held(out / run.folder) as ours:
                if ours:
                    _keep_settings(run, out / run.folder)
                if ours and not (out / run.folder / "result.json").exists():
                    Trainer(run, out / run.folder, text, device).run(watch)
        with _held(out, wait=True):  # the last process to finish sees all runs
            return collect(config, out, text, device)
    except OSError as error:
        raise LabError(f"{out}: {error}") from None


def collect(config: Config, out: Path, text: Corpus, device: str) -> Path:
    """Writes results.json and curves.png from the finished runs."""
    folders = [out / run.folder for run in runs_of(config)]
    done = [folder for folder in folders if (folder / "result.json").exists()]
    runs = [msgspec.json.decode((f / "result.json").read_bytes(), type=Result) for f in done]
    results = Trained(
        machine=machine.cpu().model if device == "cpu" else torch.cuda.get_device_name(),
        shape=config.shape,
        training=config.training,
        n_valid_tokens=_n_scored(text, config.shape.context),
        runs=tuple(runs),
    )
    path = out / "results.json"
    _write(path, msgspec.json.format(msgspec.json.encode(results)))
    logs: dict[str, list[Path]] = {}
    perplexities: dict[str, list[float]] = {}
    for folder, run in zip(done, runs, strict=True):
        logs.setdefault(run.name, []).append(folder / "log.jsonl")
        perplexities.setdefault(run.name, []).append(run.valid_perplexity)
    draw_arms(logs, perplexities, out / "curves.png")
    return path


class Trainer:
    """One run. A checkpoint holds all state, so that a resumed run gives the same numbers."""

    def __init__(self, run: Run, folder: Path, text: Corpus, device: str) -> None:
        self._run, self._folder, self._text, self._device = run, folder, text, device
        how = run.training
        self._epoch_steps = corpus.n_batches(text.train, run.shape.context, how.batch)
        if self._epoch_steps < 1 or _n_scored(text, run.shape.context) < 1:
            raise LabError(
                f"{len(text.train)} tokens to train on and {len(text.valid)} to validate are too few: "
                f"training needs a batch of {how.batch} windows of {run.shape.context} tokens, "
                "validation one window"
            )
        self._n_steps = how.epochs * self._epoch_steps
        torch.manual_seed(run.seed)
        try:
            self._model = build(run.arm, run.shape, how.dropout).to(device)
        except (ValueError, RuntimeError) as error:  # RuntimeError: also for lack of memory
            raise LabError(f"{run.folder}: {error}") from None
        self._optimiser = torch.optim.AdamW(
            parameter_groups(self._model, how.weight_decay), betas=how.betas, fused=True
        )
        self._step, self._seconds, self._best = 0, 0.0, math.inf
        self._precision = training_precision(device)

    def run(self, watch: Watch) -> None:
        self._resume()
        saved = began = time.monotonic()
        for batch in self._batches():
            loss = self._train_step(batch.to(self._device))
            self._step += 1
            record: dict[str, Any] = {"step": self._step, "loss": loss}
            is_last = self._step == self._n_steps
            if is_last or self._step % self._run.training.validate_every == 0:
                record["valid_loss"] = self._validate(N_QUICK_BATCHES)
            now = time.monotonic()
            self._seconds, began = self._seconds + now - began, now
            self._log(record)
            watch(Report(self._run, self._step, self._n_steps, loss, self._tokens / self._seconds))
            if is_last or now - saved > CHECKPOINT_S:
                self._save()
                saved = now
        self._finish()

    @property
    def _tokens(self) -> int:
        return self._step * self._run.training.batch * self._run.shape.context

    def _batches(self) -> Iterator[Tensor]:
        """The batches from the current step on."""
        how, seed = self._run.training, self._run.seed
        first, skip = divmod(self._step, self._epoch_steps)
        for epoch in range(first, how.epochs):
            order = (seed, epoch)
            batches = corpus.epoch(self._text.train, self._run.shape.context, how.batch, order)
            yield from islice(batches, skip, None)
            skip = 0

    def _train_step(self, tokens: Tensor) -> float:
        """tokens (batch, context + 1)"""
        how = self._run.training
        for group in self._optimiser.param_groups:
            group["lr"] = how.rate(self._step, self._n_steps)
        self._model.train()
        with torch.autocast(self._device, self._precision, self._precision != torch.float32):
            out = self._model(tokens[:, :-1])
        loss = F.cross_entropy(out.logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss + how.balance * out.balance()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), how.clip)
        self._optimiser.step()
        self._optimiser.zero_grad()
        if not math.isfinite(value := loss.item()):
            raise LabError(
                f"{self._run.folder}: the loss is {value} at step {self._step}; lower peak_rate"
            )
        return value

    def _validate(self, n_batches: int | None) -> float:
        """Loss over the first n_batches of the validation text; saves the model if it is the best so far."""
        loss = valid_loss(self._model, self._text, self._run.training.batch, n_batches)
        if not math.isfinite(loss):
            raise LabError(f"{self._run.folder}: the validation loss is {loss}; lower peak_rate")
        if loss < self._best:
            self._best = loss
            _save_torch(self._folder / "best.pt", self._model.state_dict())
        return loss

    def _log(self, record: dict[str, Any]) -> None:
        with (self._folder / "log.jsonl").open("ab") as log:
            log.write(msgspec.json.encode(record) + b"\n")

    def _save(self) -> None:
        state = {
            "step": self._step,
            "seconds": self._seconds,
            "best": self._best,
            "model": self._model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if self._device == "cuda" else None,
        }
        _save_torch(self._folder / "checkpoint.pt", state)

    def _resume(self) -> None:
        path, log = self._folder / "checkpoint.pt", self._folder / "log.jsonl"
        if not path.exists():
            log.unlink(missing_ok=True)
            return
        state = torch.load(path, map_location=self._device)
        self._step, self._seconds, self._best = state["step"], state["seconds"], state["best"]
        self._model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["random"].cpu())
        if self._device == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"].cpu())
        lines = log.read_bytes().splitlines(keepends=True)[: self._step]
        _write(log, b"".join(lines))

    def _finish(self) -> None:
        self._model.load_state_dict(torch.load(self._folder / "best.pt", map_location=self._device))
        loss = valid_loss(self._model, self._text, self._run.training.batch)
        draw_curve(self._folder / "log.jsonl", self._folder / "curve.png", self._run.folder)
        result = Result(
            self._run.name, self._run.arm, self._run.seed, n_parameters(self._model), loss,
            math.exp(loss), self._tokens, round(self._seconds, 1),
        )  # fmt: skip
        if self._run.arm.streams == "one":
            export(self._model, self._folder / "model", self._text.tokenizer, corpus.END)
        _write(self._folder / "result.json", msgspec.json.format(msgspec.json.encode(result)))
        (self._folder / "checkpoint.pt").unlink()


@torch.inference_mode()
def valid_loss(model: Pipeline, text: Corpus, batch: int, n_batches: int | None = None) -> float:
    """Loss in nats a token over all validation text, or its first n_batches, computed in f32."""
    model.eval()
    device = next(model.parameters()).device
    total, n = 0.0, 0
    for tokens in islice(corpus.windows(text.valid, model.shape.context, batch), n_batches):
        tokens = tokens.to(device)
        logits, targets = model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
        total += F.cross_entropy(logits, targets, reduction="sum").item()
        n += targets.numel()
    return total / n


def parameter_groups(model: Pipeline, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay applies to matrices and arch3's stacked gates, not to vectors."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def training_precision(device: str) -> torch.dtype:
    """bf16 if the machine multiplies it at least as fast as f32."""
    if device == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = "avx512_bf16" in machine.cpu().flags
    return torch.bfloat16 if fast else torch.float32


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step. Touching fresh pages for the logits of every
    step took a third of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def _device(name: str) -> str:
    has_cuda = torch.cuda.is_available()
    if name not in ("", "cpu", "cuda") or (name == "cuda" and not has_cuda):
        raise LabError(f"device {name!r}: this machine has cpu{' and cuda' if has_cuda else ''}")
    return name or ("cuda" if has_cuda else "cpu")


def _n_scored(text: Corpus, context: int) -> int:
    return (len(text.valid) - 1) // context * context


def _keep_settings(run: Run, folder: Path) -> None:
    """LabError if the folder's checkpoint or result was made with other settings."""
    path, settings = folder / "run.json", msgspec.json.format(msgspec.json.encode(run))
    if not path.exists():
        _write(path, settings)
    elif path.read_bytes() != settings:
        raise LabError(
            f"{path}: {folder} holds a run with other settings; remove it or train into another "
            "folder"
        )


@contextmanager
def _held(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Makes folder and locks it; False if another process holds it. wait: block until it is free."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _save_torch(path: Path, value: Any) -> None:
    # Through memory: on a full disk, torch raises an error that looks like a bug.
    data = io.BytesIO()
    torch.save(value, data)
    _write(path, data.getvalue())


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
