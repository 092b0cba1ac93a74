"""The same prompts however their experts are read: `python tier_grid.py MODEL N_TOKENS` prints, for
each prompt, a digest of its logits in every cell of a grid, as JSON."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import product
from pathlib import Path

from cflow.engine.memory.experts import ExpertBank
from cflow.engine.native import Context, ExpertOptions, Model
from oracles import running

PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(4 + i)] for i in range(5)]
AT_ONCE = 2


def cells(path: Path) -> Iterator[ExpertOptions]:
    """Slots, speculation, readers, way of reading; each with the page cache as it is and emptied."""
    model = Model(str(path), header_only=True)
    bank, top_k = ExpertBank.of(model), model.layers[0].top_k
    slots = (top_k, 2 * top_k, bank.n_records // 4, bank.n_records)
    for n, speculate, reads, io, drop in product(
        slots, (False, True), (1, 8), ("direct", "cached"), (False, True)
    ):
        if drop:
            drop_pages(path)
        cache = max(n, reads + 1) * bank.record_bytes
        yield {"cache": cache, "io": io, "expert_reads": reads, "speculate": speculate}


def drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def digests(context: Context, n_tokens: int) -> list[str]:
    """Of each prompt's logits while it is answered greedily, some prompts at once."""
    return [
        digest
        for i in range(0, len(PROMPTS), AT_ONCE)
        for digest in answer(context, PROMPTS[i : i + AT_ONCE], n_tokens)
    ]


def answer(context: Context, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[str]:
    sums = [blake2b(digest_size=16) for _ in prompts]
    todo = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    for _ in range(n_tokens):
        rows = [running.rows(tokens, done[i], i) for i, tokens in enumerate(todo)]
        logits = iter(running.step(context, [row for some in rows for row in some]))
        for i, tokens in enumerate(todo):
            for _ in tokens:
                last = next(logits)
                sums[i].update(last.tobytes())
            done[i] += len(tokens)
            todo[i] = [int(last.argmax())]
    return [total.hexdigest() for total in sums]


def main() -> None:
    path, n_tokens = Path(sys.argv[1]), int(sys.argv[2])
    found: list[set[str]] = [set() for _ in PROMPTS]
    for experts in cells(path):
        with running.opened(path, experts=experts) as context:
            for some, digest in zip(found, digests(context, n_tokens), strict=True):
                some.add(digest)
    print(json.dumps([sorted(some) for some in found]))


if __name__ == "__main__":
    main()
