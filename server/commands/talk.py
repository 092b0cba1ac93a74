"""cflow run, chat: a model in the terminal, without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflow.server.commands.models import MODEL, engine_for
from cflow.server.commands.options import engine_flags

if TYPE_CHECKING:
    from cflow.server.api.schemas import Sampling

TEMPERATURE = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature, 0 to 2; 0 always takes the likeliest token. Default: the model's "
        "own."
    ),
]
TOP_P = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens that hold this share of the probability, as in 0.9. "
        "Default: the model's own."
    ),
]
TOP_K = Annotated[
    int | None,
    typer.Option(help="Sample from the K likeliest tokens. Default: the model's own."),
]
SEED = Annotated[
    int | None,
    typer.Option(help="Seed of the sampling; the same seed gives the same text. Default: random."),
]


@engine_flags()
def run(
    model: MODEL,
    engine: dict[str, Any],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 128,
    temperature: TEMPERATURE = None,
    top_p: TOP_P = None,
    top_k: TOP_K = None,
    seed: SEED = None,
) -> None:
    """Continue a text in the terminal. Ctrl-C ends the answer.

    \b
    cflow run tinystories -p "Once upon a time" --seed 1
    """
    ask = _sampling(max_tokens, temperature, top_p, top_k, seed)
    config = engine_for(model, engine)
    from cflow.server.commands import conversation

    conversation.run(config, prompt, ask)


@engine_flags()
def chat(
    model: MODEL,
    engine: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="System message. Default: none.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer in tokens. Default: until the model ends it."),
    ] = None,
    temperature: TEMPERATURE = None,
    top_p: TOP_P = None,
    top_k: TOP_K = None,
    seed: SEED = None,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D the conversation.

    \b
    cflow chat smollm2-135m --system "Answer in one sentence."
    """
    ask = _sampling(max_tokens, temperature, top_p, top_k, seed)
    config = engine_for(model, engine)
    from cflow.server.commands import conversation

    conversation.chat(config, system, ask)


def _sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
) -> Sampling:
    """The sampling fields of a request, checked as the API does. RequestError names a wrong one."""
    from cflow.server.api.schemas import Sampling, parse

    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    return parse(Sampling, {name: value for name, value in given.items() if value is not None})
