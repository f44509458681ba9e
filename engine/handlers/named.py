"""Handlers by name: those that are included, and everybody else's as ``module:name``."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any, Final

from engine.errors import HandlerNameError
from engine.scheduling import Handler

HANDLERS: Final = MappingProxyType(
    {
        "echo": "engine.handlers.echo:Echo",
        "patch-stats": "engine.handlers.patch_stats:PatchStats",
        "vision": "engine.handlers.vision:Vision",
    }
)


def load_handler(name: str, options: dict[str, Any] | None = None) -> Handler:
    """Import a handler's class and make one, with ``options`` as its arguments by name.

    ``name`` is one of HANDLERS, or ``module:class`` of anything that can be imported. Raises HandlerNameError.
    """
    module, colon, attribute = HANDLERS.get(name, name).partition(":")
    if not (module and colon and attribute):
        raise HandlerNameError(f"there is no handler {name!r}; choose {', '.join(HANDLERS)}, or give module:class")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise HandlerNameError(f"handler {name!r} can't be imported: {error}") from error
    try:
        handler: Handler = made(**(options or {}))
    except TypeError as error:
        raise HandlerNameError(f"handler {name!r} can't be made: {error}") from error
    if not callable(getattr(handler, "run", None)):
        raise HandlerNameError(f"handler {name!r} has no method run(tasks)")
    return handler
