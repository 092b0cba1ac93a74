"""cflow lab: train pipeline-native models and measure what the design buys.

The lab is part of a checkout, not of the wheel: it is looked for when one of its commands runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cflow.engine.base.errors import CflowError
from cflow.server.commands.output import table
from cflow.server.commands.progress import Bars, count_progress, say

if TYPE_CHECKING:
    from cflow.engine.lab.overlap.figures import Cell
    from cflow.engine.lab.train import Report as TrainingReport

HAS_LAB = find_spec("cflow.engine.lab") is not None

app = typer.Typer(
    help="Train and measure pipeline-native models, in a checkout. Needs the extra lab.",
    no_args_is_help=HAS_LAB,
    invoke_without_command=True,
)


@app.callback()
def lab() -> None:
    if not HAS_LAB:
        raise CflowError(
            "the lab is not part of the installed package, only of a checkout: clone cflow's "
            "repository with `git clone`, then run `pip install -e '.[lab]'` in it"
        )


@contextmanager
def _needs_extra() -> Iterator[None]:
    """Turn a missing module into an error that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise CflowError(
            f"`cflow lab` needs {error.name}; install it in the checkout with: pip install -e '.[lab]'"
        ) from None


@app.command()
def train(
    config: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="Settings, as configs/train/tinystories.toml."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs. Default: build/train/NAME, by the name of CONFIG."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads. Default: this machine's cores.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda. Default: cuda if there is one.", show_default=False)
    ] = "",
) -> None:
    """Train every arm and seed of CONFIG that has no result yet.

    A run that was stopped continues. Each run is trained once, so two processes with --threads 1 train
    two models at the same time.

    \b
    cflow lab train configs/train/tinystories.toml
    """
    with _needs_extra():
        from cflow.engine.lab import train as trainer
    from cflow.engine.base import machine

    settings = trainer.read_config(config)
    folder = out or Path("build") / "train" / config.stem
    with _training_progress() as watch:
        results = trainer.train(
            settings,
            folder,
            n_threads=threads or machine.cores().threads,
            device=device,
            watch=watch,
        )
    say(f"wrote {results}")


@contextmanager
def _training_progress() -> Iterator[Callable[[TrainingReport], None]]:
    """Yields watch(report): a bar for each run, or a line every hundred steps without a terminal."""
    import sys

    with Bars("steps") as bars:

        def watch(report: TrainingReport) -> None:
            name = report.run.folder
            state = f"loss {report.loss:.3f}, {report.tokens_per_s:,.0f} tok/s"
            bars.update(name, report.step, report.n_steps, state=state)
            if report.step == report.n_steps:
                say(f"{name} is trained: {state}")
            elif not sys.stderr.isatty() and report.step % 100 == 0:
                say(f"{name}: step {report.step} of {report.n_steps}, {state}")

        yield watch


@app.command()
def bundle(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run of `cflow lab train`.")],
    out: Annotated[Path, typer.Argument(help="The .cflow file to write.")],
) -> None:
    """Make cflow's bundled model, tinystories, from a trained run."""
    from cflow.engine.lab.bundle import bundle as make

    make(run, out)
    say(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")


@app.command()
def claims(
    retrain: Annotated[
        bool,
        typer.Option(
            "--retrain", help="First train the runs that build/train has no result of: hours."
        ),
    ] = False,
    big: Annotated[
        Path | None,
        typer.Option(
            help="Measure the 17 GB models again, in this folder with 18 GB free. Default: keep their "
            "committed figures."
        ),
    ] = None,
) -> None:
    """Measure what the design claims.

    Run it in the root of a checkout. Writes docs/claims.md.
    """
    with _needs_extra():
        from cflow.engine.lab import claims as claim_table

    if retrain:
        import shutil

        train(Path("configs/train/tinystories.toml"))
        results = Path("build/train/tinystories")
        shutil.copy(results / "results.json", "docs/results/training.json")
        shutil.copy(results / "curves.png", "docs/results/training.png")
    with count_progress() as report:
        page = claim_table.write_claims(Path(), big_folder=big, report=report)
    say(f"wrote {page}")


@app.command()
def overlap(
    read_rate: Annotated[
        str,
        typer.Option(
            help="Limit on reads in bytes a second, as in 800M. Default: no limit.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Measure what delaying experts gains when they are on disk.

    Run it in the root of a checkout, on a machine with nothing else to do. Takes a quarter of an hour,
    17 GB of memory and 3 GB of disk in build/. Writes docs/results/overlap.json and overlap.png.
    """
    from cflow.engine.lab import results
    from cflow.server.config import read_limit

    try:
        rate = read_limit(read_rate) if read_rate else None
    except ValueError as error:
        raise CflowError(f"flag --read-rate: {read_rate!r} {error}") from None
    results.check_checkout(Path())
    with _needs_extra():
        from cflow.engine.lab.claims import machine_text
        from cflow.engine.lab.overlap import bench, figures
        from cflow.engine.lab.overlap.picture import draw
    from cflow.engine.base import machine

    here = machine_text(machine.cores().threads)
    with count_progress() as report:
        found = bench.measure(Path("build"), here, read_rate=rate, report=report)
    path = Path(figures.RESULTS)
    results.write(path, found)
    picture = path.with_suffix(".png")
    draw(found, picture)
    for cell in found.cells:
        table(cell.name, _cell_rows(cell, figures.ARMS))
    say(f"wrote {path} and {picture}")


@app.command()
def storage() -> None:
    """Measure layers read from disk.

    Both orders of the file, and prefetch hints. Run it in the root of a checkout, after `make claims`
    built its programs, on a machine with nothing else to do. Takes three minutes and 2.4 GB of disk in
    build/. Writes docs/results/storage.json.
    """
    from cflow.engine.lab import results

    results.check_checkout(Path())
    with _needs_extra():
        from cflow.engine.lab import storage as storages
        from cflow.engine.lab.claims import machine_text
        from cflow.engine.lab.measurements import Bench, Sizes
    from cflow.engine.base import machine

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
    say(f"wrote {path}")


def _cell_rows(cell: Cell, arms: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        ("misses", f"{cell.misses:.1f} a token, hits {cell.hits:.1f}"),
        ("alone", f"C {cell.c:.1f}, IO {cell.io:.1f} ms a token"),
        *((text, _arm(cell, window)) for window, text in arms.items()),
        ("net", f"{cell.net('delay'):.2f}x; with the window of one layer {cell.net('layer'):.2f}x"),
        ("law", f"{cell.law:.2f}x, off by {100 * cell.law_error:+.1f} %"),
        (
            "recursion",
            f"{cell.recursion('delay'):.2f}x, off by {100 * cell.recursion_error('delay'):+.1f} %",
        ),
    ]


def _arm(cell: Cell, window: str) -> str:
    return f"{cell.ms(window):.1f} ms a token; recursion {cell.predicted(window):.1f}"
