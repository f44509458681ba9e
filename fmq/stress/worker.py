"""What producers and consumers of a run share: each is a process of its own, and may be killed anywhere.

A publisher is a producer here, and a reader a consumer. Both roles are written once, for blocking and asyncio alike, as
coroutines over a *front*; the blocking front never suspends.
A worker ends in order on SIGTERM, between two messages, or when it has put its last one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import time
import traceback

import zmq

from fmq import ForkedError
from fmq.stress.fronts import drive
from fmq.stress.journal import Board, Cell
from fmq.stress.load import Content
from fmq.stress.notes import NoteHandler, NoteWriter
from fmq.stress.place import Place
from fmq.stress.plan import Plan

SLOW, HOLD, FORK, FULL = range(1, 5)
"""What the supervisor can order: for ``ORDER_NS`` nanoseconds, save a fork, whose child lives as long."""

FAILED = 70
"""The exit code of a worker that met an error which it should not have met."""

PAUSE = 0.002
_DESCRIPTOR_SECONDS = 3.0
_LOOKS = 3


class Worker:
    """What both roles share: the cell, the orders, the end."""

    role = ""

    def __init__(self, plan: Plan, place: Place, content: Content, board: Board, notes: NoteWriter, slot: int) -> None:
        self.plan = plan
        self.place = place
        self.content = content
        self.notes = notes
        self.slot = slot
        self.noun = plan.words(self.role)
        """What it is called."""
        self.cell = board.cell(self.role, slot)
        self._ended = False
        self._orders = 0
        self._children: set[int] = set()

    def __str__(self) -> str:
        return f"{self.noun} {self.slot}"

    async def work(self) -> None:
        """The life of the worker."""
        raise NotImplementedError

    def end(self, *_: object) -> None:
        """Ends the worker between two messages; a handler of SIGTERM."""
        self._ended = True

    def ending(self) -> bool:
        """Whether it is time to go."""
        return self._ended or self.cell[Cell.STOP] != 0

    async def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        if self.plan.asyncio:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)  # noqa: ASYNC251 (the blocking front has no loop to hold up)

    def hear(self) -> None:
        """Do what the supervisor has ordered since."""
        orders = self.cell[Cell.ORDERS]
        if orders != self._orders:
            self._orders = orders
            nanoseconds = self.cell[Cell.ORDER_NS]
            order = self.cell[Cell.ORDER]
            if order == FORK:
                self._fork(nanoseconds / 1e9)
            else:
                self.obey(order, time.monotonic_ns() + nanoseconds)

    def obey(self, order: int, until: int) -> None:
        """Follow an order until that monotonic time."""

    def use_in_child(self) -> None:
        """Use in a forked child what is the parent's; has to raise ForkedError."""

    def _fork(self, seconds: float) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self.use_in_child()
            except ForkedError:
                time.sleep(seconds)
            except BaseException as error:
                self.notes.violation("processes", f"in a forked child, {error!r} was raised instead of ForkedError")
            else:
                self.notes.violation("processes", f"a forked child could use the {self.noun} of its parent")
            os._exit(0)
        self._children.add(pid)

    def reap(self, *, block: bool = False) -> None:
        """Take note of forked children that have ended."""
        for pid in list(self._children):
            if os.waitpid(pid, 0 if block else os.WNOHANG)[0]:
                self._children.discard(pid)

    def count_descriptors(self, expected: int) -> None:
        """Tell how many descriptors are left over, when ZeroMQ has closed its own."""
        deadline = time.monotonic() + _DESCRIPTOR_SECONDS
        while (left := open_descriptors() - expected) > 0 and time.monotonic() < deadline:
            time.sleep(PAUSE)
        if left > 0:
            names = sorted(_describe(fd) for fd in os.listdir("/proc/self/fd"))
            self.notes.violation(
                "descriptors", f"{self} closed, and {left} descriptors stayed open: {', '.join(names)}"
            )


def live(worker: Worker, place: Place) -> int:
    """Be this worker from here on, in a process that was just forked; returns the exit code."""
    with open(place.stacks(worker.role, worker.slot), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        signal.signal(signal.SIGTERM, worker.end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        log = logging.getLogger("fmq")
        log.addHandler(NoteHandler(worker.notes, str(worker)))
        log.propagate = False
        before = settled_descriptors()
        try:
            if worker.plan.asyncio:
                asyncio.run(worker.work())
            else:
                drive(worker.work())
            gc.collect()
            worker.count_descriptors(before)
        except Exception:
            worker.notes.violation("processes", f"{worker} failed:\n{traceback.format_exc()}")
            return FAILED
    return 0


def settled_descriptors() -> int:
    """How many descriptors a process has when ZeroMQ has opened those of its context, once and for good."""
    zmq.Context.instance().socket(zmq.DEALER).close()
    # The socket's own are closed by another thread.
    count, looks = open_descriptors(), 0
    while looks < _LOOKS:
        time.sleep(PAUSE)
        looks = looks + 1 if (now := open_descriptors()) == count else 0
        count = now
    return count


def open_descriptors() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def _describe(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return "gone"
