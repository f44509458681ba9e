"""Endpoints of protocol tcp. What serves them is imported when the first of them is used."""

from __future__ import annotations

import importlib
from typing import Any

from fmq.config import Config, Curve, Endpoint
from fmq.errors import ConfigError


def remote_producer(kind: type[Any], config: Config, name: str) -> Any:
    """The producer of a tcp endpoint, with the methods of ``kind``, Producer or AsyncProducer."""
    endpoint = config.endpoints[name]
    # Copied, for whoever has put an array may use it again, as in a ring.
    return _class_like(kind)(_address(endpoint), codec=_codec(endpoint, name), copy=True, keys=_keys(endpoint.curve))


def remote_consumer(kind: type[Any], config: Config, name: str) -> Any:
    """The consumer of a tcp endpoint, with the methods of ``kind``, Consumer or AsyncConsumer."""
    endpoint = config.endpoints[name]
    curve = endpoint.curve
    accept = ("msgpack", "pickle") if _codec(endpoint, name) == "pickle" else ("msgpack",)
    clients = None if curve is None else curve.clients
    return _class_like(kind)(_address(endpoint), accept=accept, keys=_keys(curve), clients=clients)


def _class_like(kind: type[Any]) -> Any:
    try:
        module = importlib.import_module("fmq.remote")
    except ModuleNotFoundError as error:
        raise ConfigError("endpoints of protocol tcp are not in this version; use ipc") from error
    name = kind.__name__
    return getattr(module, f"AsyncRemote{name[5:]}" if name.startswith("Async") else f"Remote{name}")


def _address(endpoint: Endpoint) -> str:
    return f"tcp://{endpoint.address.removeprefix('tcp://')}"


def _codec(endpoint: Endpoint, name: str) -> str:
    """The codec of an endpoint, msgpack if it names none. Raises ConfigError for pickles from anybody."""
    curve = endpoint.curve
    if endpoint.codec == "pickle" and (curve is None or (curve.server is None and curve.clients is None)):
        raise ConfigError(
            f"endpoint {name}: pickles are taken over tcp only from clients that are known by their keys; give it "
            "curve, with server for a producer or clients for a consumer, or leave out its codec"
        )
    return endpoint.codec or "msgpack"


def _keys(curve: Curve | None) -> Any:
    if curve is None:
        return None
    # Not above, as fmq.remote.
    return importlib.import_module("fmq.remote").CurveKeys(curve.public, curve.secret, curve.server)
