"""Waiting, the only thing in which the blocking and the asyncio front ends differ.

What can't be done at once is written once, as a generator of *steps*. It yields None where it has to wait for the other
side, and a function where a long copy is due; it returns the result. ``run`` drives it in a thread, ``run_async`` in an
event loop. Closing the generator, after a timeout or a cancellation, makes it give back what it holds.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import time
from collections.abc import Callable, Generator, Sequence
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
    """Wakes tasks when a descriptor becomes readable. Serves one event loop after another."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = tuple(descriptors)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._when_idle: Callable[[], None] | None = None

    async def wait(self, timeout: float) -> None:
        """Wait until a descriptor is readable, for at most ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # The tasks of a loop that is gone are gone with it.
            self._loop = loop
            self._waiting = set()
        future: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            for descriptor in self._descriptors:
                loop.add_reader(descriptor, self._wake)
        self._waiting.add(future)
        timer = loop.call_later(timeout, _finish, future)
        try:
            await future
        finally:
            timer.cancel()
            self._waiting.discard(future)
            if not self._waiting:
                for descriptor in self._descriptors:
                    loop.remove_reader(descriptor)
                if self._when_idle is not None:
                    self._when_idle()

    def close(self, when_idle: Callable[[], None]) -> None:
        """Wake all who wait, and call ``when_idle`` when none is left: only then may the descriptors be closed.

        May be called from any thread.
        """
        loop = self._loop
        if not self._waiting or loop is None or loop.is_closed():
            when_idle()
            return
        self._when_idle = when_idle
        loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for future in self._waiting:
            _finish(future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
