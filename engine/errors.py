"""What can go wrong in the engine. Every error of this package is an ``EngineError``."""

from __future__ import annotations


class EngineError(Exception):
    """The root of all errors of engine."""


class PlaceError(EngineError):
    """Tensors can't be had there: Paddle is not installed, or not for that place."""


class TensorError(EngineError, TypeError):
    """An array can't become a tensor. The error names its path in the tree and what to do."""
