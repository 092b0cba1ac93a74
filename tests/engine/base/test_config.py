"""Settings that cannot be used are named with their value."""

from typing import Any

import pytest

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import ConfigError

WRONG: list[tuple[str, Any]] = [
    ("threads", 0),
    ("context", -1),
    ("kv_memory", 10),
    ("kv", "f64"),
    ("precision", "int4"),
    ("expert_cache", 0),
    ("expert_cache", "25"),
    ("expert_cache", "x%"),
    ("weights_memory", 0),
    ("weights_memory", "101%"),
    ("expert_io", "mmap"),
    ("expert_reads", 65),
    ("defer_experts", -1),
    ("expert_read_rate", 1000),
    ("speculation", "draft"),
    ("isa", "sse"),
    ("max_sequences", 0),
    ("max_step_tokens", 0),
    ("max_queue", -1),
    ("max_step_ms", float("nan")),
    ("stuck_s", 0),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}: {value!r}") as caught:
        EngineConfig(model="m", **{field: value})
    assert caught.value.field == field


def test_a_step_has_room_for_every_sequence() -> None:
    with pytest.raises(ConfigError, match="32 is less than max_sequences"):
        EngineConfig(model="m", max_step_tokens=32, max_sequences=33)


@pytest.mark.parametrize(
    ("sequences", "tokens", "speculation", "logits"),
    [(64, 512, "ngram", 64), (1, 512, "ngram", 9), (1, 4, "ngram", 4), (1, 512, "off", 1)],
)
def test_one_sequence_can_guess_as_well(
    sequences: int, tokens: int, speculation: str, logits: int
) -> None:
    config = EngineConfig(
        model="m", max_sequences=sequences, max_step_tokens=tokens, speculation=speculation
    )
    assert config.max_logits == logits
