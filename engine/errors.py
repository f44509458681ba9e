"""What can go wrong in the engine. Every error of this package is an ``EngineError``."""

from __future__ import annotations


class EngineError(Exception):
    """The root of all errors of engine."""


class AdapterError(EngineError):
    """The sockets of an adapter can't be had."""


class HandlerNameError(EngineError, ValueError):
    """There is no handler of this name, or it can't be made."""


class PlaceError(EngineError):
    """Tensors can't be had there: Paddle is not installed, or not for that place."""


class RequestError(EngineError, ValueError):
    """A request is none that this handler can answer: the client's fault. For handlers to raise."""


class SchedulerError(EngineError):
    """A scheduler can run no more requests."""


class TensorError(EngineError, TypeError):
    """An array can't become a tensor. The error names its path in the tree and what to do."""
