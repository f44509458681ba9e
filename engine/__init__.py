"""The engine's side: requests from the queue, as Paddle tensors. Paddle itself is imported when first needed."""

from engine.errors import EngineError, PlaceError, TensorError
from engine.serve import Replies, Served, serve
from engine.tensors import load_paddle, to_paddle

__all__ = [
    "EngineError",
    "PlaceError",
    "Replies",
    "Served",
    "TensorError",
    "load_paddle",
    "serve",
    "to_paddle",
]
