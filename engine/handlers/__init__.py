"""Handlers that come with the engine, and how one is found by name."""

from engine.handlers.echo import Echo
from engine.handlers.named import HANDLERS, load_handler
from engine.handlers.patch_stats import PatchStats, patch_stats

__all__ = ["HANDLERS", "Echo", "PatchStats", "load_handler", "patch_stats"]
