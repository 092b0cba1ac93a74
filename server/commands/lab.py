"""cflow lab: training pipeline-native models and measuring what the design buys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cflow.engine.base import machine
from cflow.engine.base.errors import CflowError
from cflow.engine.lab import results
from cflow.server.commands.output import table
from cflow.server.commands.progress import console, count_progress, training_progress
from cflow.server.config import read_limit

if TYPE_CHECKING:
    from cflow.engine.lab.overlap.figures import Cell

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
    """Train every arm and seed that has no result yet.

    Those of CONFIG, into OUT; a run that was stopped goes on. Start it twice with --threads 1 and
    two cores train two models: each run is done once."""
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
    """Make the model `tinystories` of cflow out of a trained run."""
    from cflow.engine.lab.bundle import bundle as make

    make(run, out)
    console.print(f"cflow: wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")


@app.command()
def claims(
    retrain: Annotated[
        bool,
        typer.Option("--retrain", help="Train first what build/train has no result of: hours."),
    ] = False,
    big: Annotated[
        Path | None,
        typer.Option(help="Measure the 17 GB models anew: a folder for them with 18 GB free."),
    ] = None,
) -> None:
    """Measure what the design claims.

    From the root of a checkout; writes docs/claims.md."""
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


@app.command()
def overlap(
    read_rate: Annotated[
        str, typer.Option(help="Bound on reads, as 800M (a second). Default: what the disk holds.")
    ] = "",
) -> None:
    """Measure what a delay of experts from disk is worth.

    From the root of a checkout. Writes docs/results/overlap.json and overlap.png. Takes 17 GB of
    memory, 3 GB of disk in build/ and a quarter of an hour of a machine that has nothing else to
    do."""
    try:
        rate = read_limit(read_rate) if read_rate else None
    except ValueError as error:
        raise CflowError(f"flag --read-rate: {read_rate!r} {error}") from None
    results.check_checkout(Path())
    with _lab():
        from cflow.engine.lab.claims import machine_text
        from cflow.engine.lab.overlap import bench, figures
        from cflow.engine.lab.overlap.picture import draw

    here = machine_text(machine.cores().threads)
    with count_progress() as report:
        found = bench.measure(Path("build"), here, read_rate=rate, report=report)
    path = Path(figures.RESULTS)
    results.write(path, found)
    picture = path.with_suffix(".png")
    draw(found, picture)
    for cell in found.cells:
        table(cell.name, _cell_rows(cell, figures.ARMS))
    console.print(f"cflow: wrote {path} and {picture}")


@app.command()
def storage() -> None:
    """Measure layers from disk.

    Both orders of the file, and prefetch hints; from the root of a checkout. Writes
    docs/results/storage.json. Needs the programs that `make claims` builds, 2.4 GB of disk in build/
    and three minutes of a machine that has nothing else to do."""
    results.check_checkout(Path())
    with _lab():
        from cflow.engine.lab import storage as storages
        from cflow.engine.lab.claims import machine_text
        from cflow.engine.lab.measurements import Bench, Sizes

    threads = machine.cores().threads
    with count_progress() as report:
        bench = Bench(Path().resolve(), Sizes.of_machine(), threads, report)
        found = storages.measure(bench, machine_text(threads))
    path = Path(storages.RESULTS)
    results.write(path, found)
    for run in found.runs:
        rows = [
            ("tok/s", run.rate.text(2)),
            ("read", f"{run.token_bytes / 1e6:.0f} MB a token in {run.token_reads:.1f} pieces"),
            ("cold", f"{run.cold.text(2)} s to the first token"),
        ]
        table(", ".join(run.setting), rows)
    console.print(f"cflow: wrote {path}")


def _cell_rows(cell: Cell, arms: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        ("misses", f"{cell.misses:.1f} a token, hits {cell.hits:.1f}"),
        ("alone", f"C {cell.c:.1f}, IO {cell.io:.1f} ms a token"),
        *((text, _arm(cell, window)) for window, text in arms.items()),
        ("net", f"{cell.net('delay'):.2f}x; of the window of a layer {cell.net('layer'):.2f}x"),
        ("law", f"{cell.law:.2f}x, off by {100 * cell.law_error:+.1f} %"),
        (
            "recursion",
            f"{cell.recursion('delay'):.2f}x, off by {100 * cell.recursion_error('delay'):+.1f} %",
        ),
    ]


def _arm(cell: Cell, window: str) -> str:
    return f"{cell.ms(window):.1f} ms a token; recursion {cell.predicted(window):.1f}"
