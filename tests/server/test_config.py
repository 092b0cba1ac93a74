"""Settings: which source wins, and errors that name source, key and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cflow.engine.base.errors import CflowError
from cflow.server.config import (
    ENGINE_KEYS,
    SERVER_KEYS,
    gather_settings,
    read_size,
    server_config,
)
from cflow.server.http.listen import listen

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text('port = 1\nhost = "file"\nthreads = 3\nkv_memory = "2GiB"\n')
    return path


def test_flags_beat_environment_beats_file_beats_default(file: Path) -> None:
    environ = {"CFLOW_PORT": "2", "CFLOW_HOST": "environment", "OTHER": "x"}
    config = server_config(gather_settings(file, environ, {"port": 3, "host": None}))
    assert config.port == 3
    assert config.host == ("environment",)
    assert config.engine.threads == 3
    assert config.engine.kv_memory == 2 << 30
    assert config.drain_timeout_s == 30


def test_every_key_has_an_environment_name() -> None:
    good: dict[str, Any] = {
        "model": "m", "served_name": "s", "threads": "2", "context": "64", "kv_memory": "1M",
        "expert_cache": "12.5 %", "expert_io": "cached", "expert_reads": "4",
        "defer_experts": "0", "weights_memory": "2GiB",
        "expert_read_rate": "500M", "kv": "q8", "precision": "f32", "isa": "scalar", "max_sequences": "4",
        "speculation": "off",
        "max_step_tokens": "64", "max_queue": "9", "max_step_ms": "10", "stuck": "5",
        "host": "h", "port": "0", "api_keys": "/k", "max_body": "2M", "ping": "1.5",
        "drain_timeout": "7", "access_log": "yes", "moe_top_k": "3",
        "cors_origins": "http://a, https://b.c:8", "tls_cert": "/c", "tls_key": "/d",
        "otlp_traces_endpoint": "https://otel:4318/v1/traces",
        "keep_alive": "100", "root_path": "/llm", "trusted_proxies": "10.0.0.0/8,::1",
        "response_memory": "1M", "response_age": "60", "special_in_messages": "yes", "special_in_prompts": "no",
        "json_calls": "no",
    }  # fmt: skip
    assert good.keys() == ENGINE_KEYS.keys() | SERVER_KEYS.keys()
    environ = {f"CFLOW_{key.upper()}": value for key, value in good.items()}
    config = server_config(gather_settings(None, environ, {}))
    assert (config.engine.model, config.engine.kv, config.engine.stuck_s) == ("m", "q8", 5.0)
    assert (config.engine.expert_cache, config.engine.expert_io) == ("12.5%", "cached")
    assert config.engine.weights_memory == 2 << 30
    assert config.engine.speculation == "off"
    assert (config.engine.expert_reads, config.engine.expert_read_rate) == (4, 500 << 20)
    assert (config.port, config.max_body_bytes, config.access_log) == (0, 2 << 20, True)
    assert config.moe_top_k == 3
    assert config.cors_origins == ("http://a", "https://b.c:8")
    assert (config.tls_cert, config.tls_key) == (Path("/c"), Path("/d"))
    assert (config.ping_s, config.drain_timeout_s, config.api_keys) == (1.5, 7.0, Path("/k"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "x"), ("port", 70000), ("port", -1), ("port", True), ("port", 1.5),
        ("threads", 0), ("threads", "two"), ("kv_memory", "lots"), ("kv_memory", -5),
        ("expert_cache", "some"), ("expert_cache", "0%"), ("expert_cache", "101%"),
        ("expert_cache", "nan%"), ("expert_cache", 0), ("expert_read_rate", 0),
        ("weights_memory", "0%"), ("weights_memory", "lots"),
        ("cors_origins", "ui.test"), ("cors_origins", "http://a/b"), ("cors_origins", [5]),
        ("cors_origins", ""), ("moe_top_k", 0),
        ("ping", 0), ("ping", "nan"), ("drain_timeout", "inf"), ("access_log", "maybe"),
        ("host", ""), ("host", 5), ("nope", 1), ("max_body", 0),
        ("kv_memory", "9" * 400), ("expert_cache", "9" * 400), ("expert_cache", 1 << 60),
        ("expert_cache", "1000000TiB"), ("weights_memory", "0"), ("defer_experts", "-1"),
    ],
)  # fmt: skip
def test_bad_values_name_source_key_and_value(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CflowError) as caught:
        gather_settings(None, {}, {key: value})
    assert f"flag --{key.replace('_', '-')}" in str(caught.value)
    path = tmp_path / "bad.toml"
    path.write_text(f"{key} = {str(value).lower() if value is True else repr(value)}\n")
    with pytest.raises(CflowError) as caught:
        gather_settings(path, {}, {})
    assert str(path) in str(caught.value)
    assert key in str(caught.value)
    if key != "nope":
        assert repr(value) in str(caught.value)


def test_a_kubernetes_service_named_cflow_is_explained() -> None:
    environ = {"CFLOW_PORT": "tcp://10.0.0.1:8000"}
    with pytest.raises(CflowError, match="enableServiceLinks"):
        gather_settings(None, environ, {})


def test_values_the_engine_refuses_name_the_field() -> None:
    with pytest.raises(CflowError, match=r"precision.*f64"):
        server_config(gather_settings(None, {}, {"precision": "f64"}))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("port = \n")
    for path in (broken, tmp_path / "missing.toml"):
        with pytest.raises(CflowError, match=path.name):
            gather_settings(path, {}, {})


@pytest.mark.parametrize(
    ("text", "n"),
    [("0", 0), ("512", 512), ("1K", 1024), ("2MiB", 2 << 20), ("1.5g", 3 << 29), ("1 TB", 1 << 40)],
)
def test_sizes(text: str, n: int) -> None:
    assert read_size(text) == n


def test_the_example_is_valid_and_complete() -> None:
    path = ROOT / "configs" / "server.toml"
    values = gather_settings(path, {}, {})
    server_config(values)
    text = path.read_text()
    for key in (*ENGINE_KEYS, *SERVER_KEYS):
        assert f"{key} = " in text


@pytest.mark.parametrize("value", [-1, 65536, "-1", "x"])
def test_what_a_port_may_be(value: object) -> None:
    with pytest.raises(CflowError, match=r"0\.\.65535"):
        gather_settings(None, {}, {"port": value})


def test_what_cannot_be_listened_on_names_the_flag_to_change() -> None:
    (sock,) = listen(["127.0.0.1"], 0)
    with sock, pytest.raises(CflowError, match="another --port"):
        listen(["127.0.0.1"], sock.getsockname()[1])
    for host in ("192.0.2.1", "no.such.host.invalid", "a" * 300):
        with pytest.raises(CflowError, match="another --host"):
            listen([host], 0)


def test_a_count_that_may_be_none_says_so() -> None:
    with pytest.raises(CflowError, match=r"-1.*at least 0"):
        gather_settings(None, {}, {"defer_experts": -1})
