"""Perplexity of a model on a text: exp of the mean negative log-likelihood of its tokens.

The text is cut into windows of 512 tokens that do not overlap. A window starts with the
beginning-of-sequence token if the model's tokenizer adds one. All but its first token are scored.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import CflowError
from cflow.engine.base.reports import Report, silent
from cflow.engine.measure.bare import open_bare, step
from cflow.engine.memory.kv_blocks import n_blocks_for
from cflow.engine.native import Context, Model, Row, const
from cflow.engine.text.tokenizer import Tokenizer

WINDOW = 512


@dataclass(frozen=True)
class PerplexityResult:
    model: str
    quant: str
    perplexity: float
    mean_nll: float  # nats a token
    stderr_nll: float  # standard error of mean_nll, as if tokens were independent
    n_windows: int
    n_scored: int
    tokens_per_s: float
    isa: str
    threads: int
    precision: str  # this and the next two are the settings that change logits
    kv: str
    defer_experts: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    config: EngineConfig,
    text_file: Path | str,
    *,
    windows: int | None = None,
    progress: Report = silent,
) -> PerplexityResult:
    """Score the first `windows` windows of a file (None: all)."""
    text = _read(Path(text_file))
    todo = _windows(Model(config.model, header_only=True), text)[:windows]
    if not todo:
        raise CflowError(f"{text_file}: fewer than two tokens, nothing to score")
    model, context, threads, _ = open_bare(
        config,
        progress,
        max_rows=WINDOW,
        max_sequences=1,
        max_context=WINDOW,
        n_kv_blocks=n_blocks_for(WINDOW),
    )
    context.bind(0, range(n_blocks_for(WINDOW)))
    losses: list[float] = []
    start = time.perf_counter()
    for n_done, window in enumerate(todo):
        progress("score", n_done, len(todo))
        losses += _losses(context, window)
    progress("score", len(todo), len(todo))
    elapsed_s = time.perf_counter() - start
    mean, stderr = _mean(losses)
    return PerplexityResult(
        model=model.metadata.get("name") or Path(config.model).stem,
        quant=model.encoding,
        perplexity=math.exp(mean),
        mean_nll=mean,
        stderr_nll=stderr,
        n_windows=len(todo),
        n_scored=len(losses),
        tokens_per_s=len(losses) / elapsed_s,
        isa=context.isa,
        threads=threads,
        precision=config.precision,
        kv="f32" if config.precision == "f32" else config.kv,
        defer_experts=config.defer_experts,
    )


def _read(text_file: Path) -> str:
    try:
        return text_file.read_bytes().decode()  # read_text would turn \r\n into \n
    except OSError as error:
        raise CflowError(f"cannot read {text_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CflowError(f"{text_file} is not UTF-8 at byte {error.start}") from error


def _windows(model: Model, text: str) -> list[list[int]]:
    """Token ids of each window. A last window without a token to score is dropped."""
    metadata = model.metadata
    tokenizer = Tokenizer(model.section(const.SectionId.TOKENIZER), model.token_bytes, metadata)
    tokens = tokenizer.encode(text, add_bos=False)
    begin = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    size = WINDOW - len(begin)
    cut = (begin + tokens[i : i + size] for i in range(0, len(tokens), size))
    return [window for window in cut if len(window) > 1]


def _losses(context: Context, window: Sequence[int]) -> list[float]:
    """-log p of every token except the first."""
    rows = [
        Row(0, token, i, const.CFLOW_ROW_SCORE, target)
        for i, (token, target) in enumerate(itertools.pairwise(window))
    ]
    return [-score.logprob for score in step(context, rows).scores]


def _mean(losses: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    n = len(losses)
    mean = math.fsum(losses) / n
    variance = math.fsum((loss - mean) ** 2 for loss in losses) / max(1, n - 1)
    return mean, math.sqrt(variance / n)
