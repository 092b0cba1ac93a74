"""Token streams, and decoding one of them token by token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from cflow.engine.measure.bare import decode, open_stream
from cflow.engine.native import Context, Model, Pick, crc32c

GREEDY = Pick(0, temperature=0.0)


@dataclass(frozen=True)
class Case:
    """A stream of fixed tokens. chosen: experts a token and layer."""

    routing: str
    tokens: tuple[int, ...]
    threads: int
    chosen: int


def uniform_tokens(n_tokens: int, n: int) -> tuple[int, ...]:
    return tuple(random.Random(1).choices(range(n_tokens), k=n))


def local_tokens(n_tokens: int, n: int) -> tuple[int, ...]:
    """Zipf-like, with temporal locality: every other token repeats one of the last four."""
    generator, tokens = random.Random(2), list[int]()
    weights = [1 / rank for rank in range(1, n_tokens + 1)]
    while len(tokens) < n:
        if tokens and generator.random() < 0.5:
            tokens.append(generator.choice(tokens[-4:]))
        else:
            tokens += generator.choices(range(n_tokens), weights)
    return tuple(tokens)


def story(model: Model, n: int) -> tuple[int, ...]:
    """n tokens that the model generates greedily after an end of text, which is the first of them."""
    tokens = [int(model.metadata["eos_ids"][0])]
    with closing(open_stream(model, n, threads=1)) as context:
        for _ in decode(context, ([tokens[-1]] for _ in range(n - 1))):
            tokens.append(context.sample([GREEDY])[0].token)
    return tuple(tokens)


@dataclass(frozen=True)
class Pass:
    """A case, decoded up to some token. seconds: of each token. choices: the greedy ones. crc: of the
    logits of all tokens."""

    seconds: tuple[float, ...] = ()
    choices: tuple[int, ...] = ()
    crc: int = 0


def open_case(model: Model, case: Case, *, keep_values: bool = False) -> Context:
    return open_stream(model, len(case.tokens), threads=case.threads, keep_values=keep_values)


def passes(context: Context, case: Case) -> Iterator[Pass]:
    """Decodes the case; yields after each token. Time that the caller takes in between is not counted."""
    done = Pass()
    start = time.perf_counter()
    for _ in decode(context, ([token] for token in case.tokens), n_experts=case.chosen):
        choices = (*done.choices, context.sample([GREEDY])[0].token)
        crc = crc32c(context.logits(0), done.crc)
        done = Pass((*done.seconds, time.perf_counter() - start), choices, crc)
        yield done
        start = time.perf_counter()


def decode_case(context: Context, case: Case) -> Pass:
    *_, done = passes(context, case)
    return done
