"""The committed figures in docs/results, of runs too long for every `make claims`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from cflow.engine.lab.arms import Arm, Shape, Training
from cflow.engine.lab.errors import LabError

T = TypeVar("T")


class Result(msgspec.Struct, frozen=True):
    """A trained model. Losses in nats a token, of the best checkpoint over all validation tokens."""

    name: str
    arm: Arm
    seed: int
    n_params: int
    valid_loss: float
    valid_perplexity: float
    n_tokens: int  # of training
    seconds: float


class Trained(msgspec.Struct, frozen=True):
    """training.json: the arms, trained with the same seeds, shape, settings, start and batches."""

    machine: str
    shape: Shape
    training: Training
    n_valid_tokens: int
    runs: Annotated[tuple[Result, ...], msgspec.Meta(min_length=1)]

    def of(self, name: str) -> dict[int, Result]:
        """The runs of an arm, by seed."""
        return {run.seed: run for run in self.runs if run.name == name}

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(run.name for run in self.runs))


def mean_perplexity(runs: Iterable[Result]) -> float:
    return statistics.fmean(run.valid_perplexity for run in runs)


@dataclass(frozen=True)
class Difference:
    """Perplexity of one arm minus that of another, for each seed that both have."""

    pairs: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.pairs)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds."""
        return statistics.stdev(self.pairs) if len(self.pairs) > 1 else None

    @property
    def separable(self) -> bool:
        return self.spread is not None and abs(self.mean) > self.spread

    def text(self) -> str:
        if self.spread is None:
            return f"{self.mean:+.2f} (one seed)"
        return f"{self.mean:+.2f} ± {self.spread:.2f}" + (
            "" if self.separable else ", not separable"
        )


def difference(training: Trained, name: str, other: str) -> Difference | None:
    """None if the arms have no seed in common."""
    ours, theirs = training.of(name), training.of(other)
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    return Difference(
        tuple(ours[seed].valid_perplexity - theirs[seed].valid_perplexity for seed in seeds)
    )


class Rate(msgspec.Struct, frozen=True):
    min: float
    median: float
    max: float


class BigRun(msgspec.Struct, frozen=True):
    model: str
    engine: str
    params_b: float
    file_bytes: int
    bytes_per_token: int
    decode_tok_s: Rate
    probe_gb_s: float | None
    command: str

    @property
    def read_gb_s(self) -> float:
        return self.bytes_per_token * self.decode_tok_s.median / 1e9


class BigModels(msgspec.Struct, frozen=True):
    """big_models.json: files of some 17 GB, cflow beside its peers."""

    machine: str
    date: str
    runs: tuple[BigRun, ...]

    def of(self, engine: str) -> Sequence[BigRun]:
        return [run for run in self.runs if run.engine == engine]


def check_checkout(root: Path) -> None:
    """Fails before hours of measuring if there is nowhere to write the results."""
    if not (root / "docs").is_dir():
        raise LabError(f"{root.resolve()} is not the root of a checkout: it has no folder docs")


def read(path: Path, kind: type[T]) -> T | None:
    """None if it has not been measured yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise LabError(f"{path}: not valid results: {error}") from error


def write(path: Path, found: msgspec.Struct) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
