"""cflow lab: training pipeline-native models and measuring what the design buys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cflow.engine import machine
from cflow.engine.errors import CflowError
from cflow.server.progress import console, count_progress, training_progress

app = typer.Typer(
    help="Train pipeline-native models and measure what the design buys. Needs the extra `lab`.",
    no_args_is_help=True,
)


@contextmanager
def _lab() -> Iterator[None]:
    """What the extra brings, or a word on how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise CflowError(
            f"`cflow lab` needs {error.name}, which comes with: pip install 'cflow[lab]'"
        ) from None


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A file as configs/train/tinystories.toml.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: build/train/CONFIG's name.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: this machine's cores.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda. Default: cuda where there is one.")
    ] = "",
) -> None:
    """Train every arm and seed of CONFIG that OUT has no result of; a run that was stopped goes on.

    Start it twice with --threads 1 and two cores train two models: each run is done once."""
    with _lab():
        from cflow.engine.lab import train as trainer

    settings = trainer.read_config(config)
    folder = out or Path("build") / "train" / config.stem
    with training_progress() as watch:
        results = trainer.train(
            settings,
            folder,
            n_threads=threads or machine.cores().threads,
            device=device,
            watch=watch,
        )
    console.print(f"cflow: wrote {results}")


@app.command()
def bundle(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run of `cflow lab train`.")],
    out: Annotated[Path, typer.Argument(help="The .cflow file to write.")],
) -> None:
    """Make the model `tinystories` that cflow brings out of a trained run."""
    from cflow.engine.lab.bundle import bundle as make

    make(run, out)
    console.print(f"cflow: wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")


@app.command()
def claims(
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train every arm and seed anew first: hours.")
    ] = False,
    big: Annotated[
        Path | None,
        typer.Option(help="Measure the 17 GB models anew: a folder for them with 36 GB free."),
    ] = None,
) -> None:
    """Measure what the design claims and write docs/claims.md, from the root of a checkout."""
    with _lab():
        from cflow.engine.lab import claims as claim_table

    if retrain:
        train(Path("configs/train/tinystories.toml"))
        results = Path("build/train/tinystories")
        shutil.copy(results / "results.json", "docs/results/training.json")
        shutil.copy(results / "curves.png", "docs/results/training.png")
    with count_progress() as report:
        page = claim_table.write_claims(Path(), big_folder=big, report=report)
    console.print(f"cflow: wrote {page}")
