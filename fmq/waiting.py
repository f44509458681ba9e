"""Waiting, the only thing in which the blocking and the asyncio front ends differ.

What can't be done at once is written once, as a generator of *steps*. It yields None where it has to wait for the other
side, and a function where a long copy is due; it returns the result. ``run`` drives it in a thread, ``run_async`` in an
event loop. Closing the generator, after a timeout or a cancellation, makes it give back what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import numbers
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor
from threading import TIMEOUT_MAX
from typing import TypeAlias, TypeVar

from fmq.doorbell import wait_readable

T = TypeVar("T")
Steps: TypeAlias = "Generator[Callable[[], None] | None, None, T]"


def deadline_of(timeout: float | None) -> float:
    """The monotonic time at which a timeout in seconds is over; None never is. Raises ValueError or TypeError."""
    if timeout is None:
        return math.inf
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"a timeout is a number of seconds, or None for no limit; this one is {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"a timeout is a number of seconds from 0 on, or None for no limit; this one is {timeout!r}")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = TIMEOUT_MAX
    return time.monotonic() + min(seconds, TIMEOUT_MAX)


def run(
    steps: Steps[T],
    descriptors: Sequence[int],
    deadline: float,
    recheck: float,
    expired: Callable[[], Exception],
) -> T:
    """Drive steps in this thread. Waits until a descriptor is readable, and never longer than ``recheck`` seconds.

    Raises what ``expired`` returns if the steps still want to wait at the deadline.
    """
    try:
        while True:
            try:
                step = next(steps)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            if step is not None:
                step()
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise expired()
            wait_readable(descriptors, min(left, recheck))
    finally:
        steps.close()


async def run_async(
    steps: Steps[T],
    waiter: LoopWaiter,
    deadline: float,
    recheck: float,
    expired: Callable[[], Exception],
    executor: Callable[[], Executor] | None = None,
) -> T:
    """Drive steps in the running event loop; long copies go to ``executor``.

    When cancelled in the middle of a copy, the steps are closed as soon as the copy is over: its target must not be
    given to anybody else before.
    """
    copying = None
    try:
        while True:
            copying = None
            try:
                step = next(steps)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            if step is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise expired()
                await waiter.wait(min(left, recheck))
            elif executor is None:
                step()
            else:
                copying = executor().submit(step)
                await asyncio.shield(asyncio.wrap_future(copying))
    finally:
        if copying is None:
            steps.close()
        else:
            copying.add_done_callback(lambda _: steps.close())


class LoopWaiter:
    """Wakes tasks when a descriptor becomes readable. Serves any number of event loops, in one thread each."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = tuple(descriptors)
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.AbstractEventLoop, set[asyncio.Future[None]]] = {}
        self._when_idle: Callable[[], None] | None = None

    async def wait(self, timeout: float) -> None:
        """Wait until a descriptor is readable, for at most ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            waiting = self._waiting.get(loop)
            if waiting is None:
                # The tasks of a loop that is closed are gone with it.
                self._waiting = {other: theirs for other, theirs in self._waiting.items() if not other.is_closed()}
                waiting = self._waiting[loop] = set()
                for descriptor in self._descriptors:
                    loop.add_reader(descriptor, self._wake, loop)
            waiting.add(future)
        timer = loop.call_later(timeout, _finish, future)
        try:
            await future
        finally:
            timer.cancel()
            self._leave(loop, future)

    def _leave(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        when_idle = None
        with self._lock:
            waiting = self._waiting.get(loop)
            if waiting is None:
                return
            waiting.discard(future)
            if not waiting:
                for descriptor in self._descriptors:
                    loop.remove_reader(descriptor)
                del self._waiting[loop]
                if not self._waiting:
                    when_idle, self._when_idle = self._when_idle, None
        if when_idle is not None:
            when_idle()

    def close(self, when_idle: Callable[[], None]) -> None:
        """Wake all who wait, and call ``when_idle`` when none is left: only then may the descriptors be closed.

        May be called from any thread.
        """
        with self._lock:
            loops = [loop for loop in self._waiting if not loop.is_closed()]
            if loops:
                self._when_idle = when_idle
                self._call_in(loops)
                return
        when_idle()

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the tasks of ``loop``, in its thread, and those of the other loops, which may have missed the edge."""
        with self._lock:
            futures = list(self._waiting.get(loop, ()))
            if len(self._waiting) > 1:
                self._call_in(other for other in self._waiting if other is not loop)
        for future in futures:
            _finish(future)

    def _call_in(self, loops: Iterable[asyncio.AbstractEventLoop]) -> None:
        for loop in loops:
            # A loop may be closed at any moment, and nobody waits in it then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish_all, loop)

    def _finish_all(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            futures = list(self._waiting.get(loop, ()))
        for future in futures:
            _finish(future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
