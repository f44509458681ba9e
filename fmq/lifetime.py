"""What becomes of a producer or consumer that nobody closed: at the end of the process, or when it is collected."""

from __future__ import annotations

import atexit
import contextlib
import warnings
import weakref
from typing import Protocol

from shmq import ShmqError


class Closable(Protocol):
    """What can be given up without waiting."""

    @property
    def closed(self) -> bool:
        """Whether there is nothing left to give up."""

    def give_up(self) -> None:
        """Close without waiting; what is not done is left to the next consumer."""

    def end(self) -> None:
        """The same at the end of the process, where nothing may be left open that acknowledges what is only dying."""


_open: weakref.WeakSet[Closable] | None = None


def close_at_exit(thing: Closable) -> None:
    """Give up ``thing`` when the interpreter ends in order, unless it is closed or gone by then."""
    global _open
    if _open is None:
        _open = weakref.WeakSet()
        atexit.register(_give_up_all)
    _open.add(thing)


def collected(thing: Closable) -> None:
    """To be called by ``__del__``: warn about what was not closed, and give it up."""
    if not thing.closed:
        warnings.warn(f"unclosed {thing!r}; use it in a with block, or close() it", ResourceWarning, 2, source=thing)
        with contextlib.suppress(ShmqError):
            thing.give_up()


def _give_up_all() -> None:
    for thing in list(_open or ()):
        if not thing.closed:
            with contextlib.suppress(ShmqError):
                thing.end()
