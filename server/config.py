"""Settings of the server, checked once.

A setting has one name: `max_queue` in a file, CFLOW_MAX_QUEUE in the environment, --max-queue as a
flag. Flags override the environment, which overrides the file. A reader turns a value into its type,
or raises a ValueError that completes "NAME = VALUE ...".
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from cflow.engine.base.config import EngineConfig, read_share
from cflow.engine.base.errors import CflowError

PREFIX = "CFLOW_"
DEFAULT_MODEL = "smollm2-135m"
MOST_BYTES = 1 << 50

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def read_size(value: object) -> int:
    """Bytes: a number, or text like 512M, 2GiB, 1.5G (powers of 1024)."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError("is not a size such as 512M or 2GiB")
    number, unit = match.groups()
    size = float(number) * (1 << _UNITS[unit.upper()])
    if size > MOST_BYTES:
        raise ValueError(f"is too large: the limit is {MOST_BYTES:,} bytes")
    return int(size)


def read_limit(value: object) -> int:
    if not (limit := read_size(value)):
        raise ValueError("must be above 0")
    return limit


def read_share_or_size(value: object) -> int | str:
    """Bytes, or a percentage as text: "25%"."""
    text = value.replace(" ", "") if isinstance(value, str) else ""
    if isinstance(value, int) or _SIZE.fullmatch(text):
        return read_limit(value)
    try:
        read_share(text)
    except ValueError:
        raise ValueError("is neither a size such as 8GiB nor a percentage up to 100%") from None
    return text


def read_count(value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value[:20])
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("is not a whole number of at least 1")
    return value


def read_count_or_none(value: object) -> int:
    if value in (0, "0") and value is not False:
        return 0
    try:
        return read_count(value)
    except ValueError:
        raise ValueError("is not a whole number of at least 0") from None


def read_port(value: object) -> int:
    if isinstance(value, str) and value.startswith("tcp://"):
        # Kubernetes sets CFLOW_PORT to this for a service named cflow.
        raise ValueError("is not a port; in Kubernetes set enableServiceLinks: false")
    try:
        port = read_count_or_none(value)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise ValueError("is not a port in 0..65535")
    return port


def read_seconds(value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400 or isinstance(value, bool):
        raise ValueError("is not a time in seconds above 0 and up to 86400")
    return seconds


def read_bool(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError("is not true or false")
    return value


def read_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("is not text, or is empty")
    return value


def read_hosts(value: object) -> tuple[str, ...]:
    """Addresses or names: a list, or text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items:
        raise ValueError("is not an address, or a list of addresses")
    if not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError("has an address that is empty or not text")
    return tuple(item.strip() for item in items)


def read_networks(value: object) -> tuple[str, ...]:
    """Addresses or networks such as 10.0.0.0/8: a list, or text with commas."""
    networks = read_hosts(value)
    for network in networks:
        try:
            ip_network(network, strict=False)
        except ValueError:
            raise ValueError(f"has {network!r}, which is no address or network") from None
    return networks


def read_root_path(value: object) -> str:
    if not isinstance(value, str) or not _ROOT_PATH.fullmatch(value):
        raise ValueError("is not a path such as /llm, without a slash at its end")
    return value


def read_origins(value: object) -> tuple[str, ...]:
    """Origins such as https://ui.example:8080, or *: a list, or text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("is not a list of origins")
    origins = tuple(item.strip() for item in items)
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError("must be * or of the form https://host or https://host:port")
    return origins


def read_path(value: object) -> Path:
    return value if isinstance(value, Path) else Path(read_text(value)).expanduser()


def read_url(value: object) -> str:
    if not isinstance(value, str) or not _URL.fullmatch(value):
        raise ValueError("is not of the form http://host:port/path")
    return value


_URL = re.compile(r"https?://[^/\s]+(/\S*)?")
_ROOT_PATH = re.compile(r"(/[\w.~-]+)*", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@?#*]+")

Reader = Callable[[object], Any]

SERVER_KEYS: dict[str, Reader] = {
    "host": read_hosts,
    "port": read_port,
    "api_keys": read_path,
    "max_body": read_limit,
    "ping": read_seconds,
    "drain_timeout": read_seconds,
    "access_log": read_bool,
    "moe_top_k": read_count,
    "response_memory": read_size,
    "response_age": read_seconds,
    "json_calls": read_bool,
    "special_in_messages": read_bool,
    "special_in_prompts": read_bool,
    "cors_origins": read_origins,
    "tls_cert": read_path,
    "tls_key": read_path,
    "otlp_traces_endpoint": read_url,
    "keep_alive": read_seconds,
    "root_path": read_root_path,
    "trusted_proxies": read_networks,
}
ENGINE_KEYS: dict[str, Reader] = {
    "model": read_text,
    "served_name": read_text,
    "threads": read_count,
    "context": read_count,
    "kv_memory": read_size,
    "kv": read_text,
    "precision": read_text,
    "expert_cache": read_share_or_size,
    "weights_memory": read_share_or_size,
    "expert_io": read_text,
    "defer_experts": read_count_or_none,
    "expert_reads": read_count,
    "expert_read_rate": read_limit,
    "speculation": read_text,
    "isa": read_text,
    "max_sequences": read_count,
    "max_step_tokens": read_count,
    "max_queue": read_count,
    "max_step_ms": read_count,
    "stuck": read_seconds,
}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the front end."""

    engine: EngineConfig
    host: tuple[str, ...] = ("127.0.0.1",)  # addresses or names to listen on
    port: int = 8000
    api_keys: Path | None = None  # a file of keys; None: no key is needed
    max_body_bytes: int = 8 << 20
    ping_s: float = 15.0  # a stream that is silent for this long gets a comment
    drain_timeout_s: float = 30.0
    access_log: bool = False
    keep_alive_s: float = 120.0  # an idle connection is closed after this
    root_path: str = ""  # of a proxy in front, if it does not send X-Forwarded-Prefix
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")  # whose X-Forwarded-Prefix counts
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call from a browser
    tls_cert: Path | None = None  # a file in PEM form; None: no TLS
    tls_key: Path | None = None  # None: in the same file
    moe_top_k: int | None = None  # for requests that do not set it; None: the model's number
    response_memory: int = 64 << 20  # bytes of responses kept for previous_response_id; 0: none
    response_age_s: float = 3600.0
    json_calls: bool = True  # an answer that is a call in JSON, without marks, is a call
    special_in_messages: bool = False  # text of messages may spell special tokens
    special_in_prompts: bool = True
    otlp_traces_endpoint: str | None = None  # None: as OTEL_* variables say, or no traces


# Fields whose names carry a unit that their keys lack.
_FIELDS = {
    "max_body": "max_body_bytes",
    "ping": "ping_s",
    "keep_alive": "keep_alive_s",
    "drain_timeout": "drain_timeout_s",
    "stuck": "stuck_s",
    "response_age": "response_age_s",
}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CflowError(f"config file {path}: {error}") from None


def _check(source: str, key: str, value: object) -> Any:
    reader = SERVER_KEYS.get(key) or ENGINE_KEYS.get(key)
    if reader is None:
        known = ", ".join([*ENGINE_KEYS, *SERVER_KEYS])
        raise CflowError(f"{source}: unknown setting {key!r}; the settings are {known}")
    try:
        return reader(value)
    except ValueError as error:
        raise CflowError(f"{source}: {key} = {value!r} {error}") from None


def gather_settings(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> dict[str, Any]:
    """All settings that are given, checked. A flag overrides the environment, which overrides the file.

    None means the flag was not given. Raises CflowError naming source, key and value."""
    values: dict[str, Any] = {}
    if file is not None:
        for key, value in _read_file(file).items():
            values[key] = _check(f"config file {file}", key, value)
    for key in (*ENGINE_KEYS, *SERVER_KEYS):
        name = PREFIX + key.upper()
        if environ.get(name):
            values[key] = _check(f"environment {name}", key, environ[name])
    for key, value in flags.items():
        if value is not None:
            values[key] = _check(f"flag --{key.replace('_', '-')}", key, value)
    return values


def _fields(values: Mapping[str, Any], keys: Mapping[str, Reader]) -> dict[str, Any]:
    return {_FIELDS.get(key, key): values[key] for key in keys if key in values}


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(**({"model": DEFAULT_MODEL} | _fields(values, ENGINE_KEYS)))


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    return ServerConfig(engine=engine_config(values), **_fields(values, SERVER_KEYS))
