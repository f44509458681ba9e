"""What becomes of producers and consumers at the end: of the process, by a signal or in order, or of themselves."""

from __future__ import annotations

import atexit
import contextlib
import signal
import warnings
import weakref
from types import FrameType
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


def exit_on_signals(*numbers: int) -> None:
    """Let these signals (by default SIGTERM) end the process in order: they raise SystemExit in the main thread.

    Then ``with`` blocks are left, producers drain or hand over, and what is open is given up, as it is for SIGINT,
    which raises KeyboardInterrupt. The exit code is 128 and the signal's number; the same signal once more ends the
    process at once. To be called in the main thread, and after Paddle was imported, which sets handlers of its own.
    """

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    for number in numbers or (signal.SIGTERM,):
        signal.signal(number, leave)


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
