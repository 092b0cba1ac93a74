"""Whatever /openapi.json allows, and much that it does not, gets an answer that it describes.

What it allows may be refused all the same: a schema knows neither the context nor which fields go
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from cflow.server.config import server_config
from harness.fake_engine import FakeEngine
from harness.live import Live

EXAMPLES = 25
OPERATIONS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/tokenize"),
    ("POST", "/v1/embeddings"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses/input_tokens"), ("GET", "/v1/responses/{response_id}"), ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/detokenize"), ("GET", "/tokenizer_info"), ("GET", "/v1/models"), ("GET", "/v1/models/{model}"),
    ("GET", "/health"), ("GET", "/ready"), ("GET", "/live"), ("GET", "/version"),
    ("GET", "/metrics"), ("GET", "/status"), ("GET", "/"),
]  # fmt: skip


@pytest.fixture(scope="module")
def document() -> Iterator[Any]:
    live = Live(FakeEngine(top_k=2), server_config({}))
    yield schemathesis.openapi.from_url(f"http://127.0.0.1:{live.port}/openapi.json")
    live.close()


def test_all_operations_are_tried(document: Any) -> None:
    found = {(op.method.upper(), op.path) for op in (r.ok() for r in document.get_all_operations())}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in OPERATIONS
        for mode in GenerationMode
        if method == "POST" or mode == GenerationMode.POSITIVE  # a GET has nothing to get wrong
    ],
)
def test_every_answer_is_described(
    document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = document[path][method]

    @settings(
        max_examples=EXAMPLES if method == "POST" else 3,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()
