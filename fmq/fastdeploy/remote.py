"""Endpoints of protocol tcp. What serves them is imported when the first of them is used."""

from __future__ import annotations

import importlib
from typing import Any

from fmq.config import Config
from fmq.errors import ConfigError


def remote_producer(kind: type[Any], config: Config, name: str) -> Any:
    """The producer of a tcp endpoint, with the methods of ``kind``, Producer or AsyncProducer."""
    # Copied, for whoever has put an array may use it again, as in a ring.
    return _class_like(kind)(_address(config, name), codec="msgpack", copy=True)


def remote_consumer(kind: type[Any], config: Config, name: str) -> Any:
    """The consumer of a tcp endpoint, with the methods of ``kind``, Consumer or AsyncConsumer."""
    return _class_like(kind)(_address(config, name), accept=("msgpack",))


def _class_like(kind: type[Any]) -> Any:
    try:
        module = importlib.import_module("fmq.remote")
    except ModuleNotFoundError as error:
        raise ConfigError("endpoints of protocol tcp are not in this version; use ipc") from error
    name = kind.__name__
    return getattr(module, f"AsyncRemote{name[5:]}" if name.startswith("Async") else f"Remote{name}")


def _address(config: Config, name: str) -> str:
    endpoint = config.endpoints[name]
    if endpoint.codec == "pickle":
        raise ConfigError(
            f"endpoint {name}: pickles are taken over tcp only from clients that are known by their keys, which "
            "settings don't have; leave out its codec, and send what msgpack can take"
        )
    return f"tcp://{endpoint.address.removeprefix('tcp://')}"
