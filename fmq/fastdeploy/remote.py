"""Endpoints of protocol tcp: what else is imported for them, and only for them."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from fmq.config import Endpoint
from fmq.errors import ConfigError


def remote_producer(kind: type[Any], endpoint: Endpoint) -> Any:
    """The producer of a tcp endpoint that stands where ``kind`` would."""
    refuse(endpoint)


def remote_consumer(kind: type[Any], endpoint: Endpoint, accept: tuple[str, ...]) -> Any:
    """The consumer of a tcp endpoint that stands where ``kind`` would."""
    refuse(endpoint)


def refuse(endpoint: Endpoint) -> NoReturn:
    """There is no tcp yet."""
    importlib.import_module("fmq")
    raise ConfigError(f"endpoint {endpoint.address}: protocol tcp is not in this version; use ipc")
