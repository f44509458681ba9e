"""The producers and consumers of a run: each a process of its own, forked by the launcher, that may be killed anywhere.

Both are written once, for blocking and asyncio alike, as coroutines over a *front*; the blocking front never suspends.
A worker ends in order on SIGTERM, between two messages, or when it has put its last one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import heapq
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import numpy as np
import zmq
from numpy.typing import NDArray

from fmq import (
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    CorruptRecordError,
    DecodeError,
    ForkedError,
    Message,
    PeerUnavailableError,
    Producer,
    QueueEmptyError,
    QueueFullError,
    SegmentSpaceError,
    SetAside,
)
from fmq.stress.faults import Saboteur
from fmq.stress.journal import ASIDE, DELIVERED, REDELIVERED, RELEASED, Board, Cell
from fmq.stress.load import HEADER, MAGIC, Content, WrongContentError, open_payload
from fmq.stress.notes import NoteWriter
from fmq.stress.place import Place
from fmq.stress.plan import Plan

SLOW, HOLD, FORK, FULL = range(1, 5)
"""What the supervisor can order: for ``ORDER_NS`` nanoseconds, save a fork, whose child lives as long."""

FAILED = 70
"""The exit code of a worker that met an error which it should not have met."""

_PUT_TIMEOUT = 0.25
_GET_TIMEOUT = 0.1
_SLOW_SECONDS = 0.01
_PAUSE = 0.002
_WINDOW = 1 << 16
"""How far a held message may be behind the newest one of its consumer, in messages (see ``verify.WINDOW``)."""
_DESCRIPTOR_SECONDS = 3.0
_LOOKS = 3

T = TypeVar("T")


class ProducerFront(Protocol):
    """What of AsyncProducer a worker uses."""

    @property
    def ring(self) -> str: ...
    async def put(self, obj: Any, *, timeout: float | None, ttl: float | None) -> int: ...
    async def empty(self, shape: int, *, timeout: float | None) -> NDArray[Any]: ...
    async def close(self, *, timeout: float | None) -> None: ...


class ConsumerFront(Protocol):
    """What of AsyncConsumer a worker uses."""

    async def get(self, *, timeout: float | None) -> Message: ...
    async def close(self) -> None: ...
    def set_aside(self) -> list[SetAside]: ...


class BlockingProducer:
    """A Producer that can be awaited, and never suspends."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    @property
    def ring(self) -> str:
        return self._producer.ring

    async def put(self, obj: Any, *, timeout: float | None, ttl: float | None) -> int:
        return self._producer.put(obj, timeout=timeout, ttl=ttl)

    async def empty(self, shape: int, *, timeout: float | None) -> NDArray[Any]:
        return self._producer.empty(shape, timeout=timeout)

    async def close(self, *, timeout: float | None) -> None:
        self._producer.close(timeout=timeout)


class BlockingConsumer:
    """A Consumer that can be awaited, and never suspends."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    async def get(self, *, timeout: float | None) -> Message:
        return self._consumer.get(timeout=timeout)

    async def close(self) -> None:
        self._consumer.close()

    def set_aside(self) -> list[SetAside]:
        return self._consumer.set_aside()


class Worker:
    """What both roles share: the cell, the orders, the end."""

    role = ""

    def __init__(self, plan: Plan, place: Place, content: Content, board: Board, notes: NoteWriter, slot: int) -> None:
        self.plan = plan
        self.place = place
        self.content = content
        self.notes = notes
        self.slot = slot
        self.cell = board.cell(self.role, slot)
        self._ended = False
        self._orders = 0
        self._children: set[int] = set()

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
                self.notes.violation("processes", f"a forked child could use the {self.role} of its parent")
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
            time.sleep(_PAUSE)
        if left > 0:
            names = sorted(_describe(fd) for fd in os.listdir("/proc/self/fd"))
            self.notes.violation(
                "descriptors", f"{self.role} {self.slot} closed, and {left} descriptors stayed open: {', '.join(names)}"
            )


class ProducerWorker(Worker):
    """Puts the messages from ``FIRST`` on, up to ``LAST`` or until it is told to stop."""

    role = "producer"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._full_until = 0
        self._producer: ProducerFront

    async def work(self) -> None:
        self._producer = self._open()
        cell = self.cell
        life = cell[Cell.LIFE]
        cell[Cell.RING] = int(self._producer.ring.rpartition(":")[2], 16)
        while not cell[Cell.SEEN] and not self.ending():
            # The supervisor opens the ring before the first put, so that it can read its counters to the end.
            await self.pause(_PAUSE)
        first, last = cell[Cell.FIRST], cell[Cell.LAST]
        interval = 1 / self.plan.rate if self.plan.rate else 0.0
        due = time.monotonic()
        number = first
        while number < last and not self.ending():
            self.hear()
            if self._full_until:
                self._relieve()
            if self._children:
                self.reap()
            if interval:
                due = max(due + interval, time.monotonic() - 1.0)
                if (early := due - time.monotonic()) > 0:
                    await self.pause(early)
            if not await self._put(life, number, number - first):
                break
            number += 1
        self._limit_files(False)
        # In the end every message has to be done; a restart hands over what is not.
        await self._producer.close(timeout=self.plan.patience if cell[Cell.STOP] or number >= last else 1.0)
        self.reap(block=True)

    def _open(self) -> ProducerFront:
        queue = self.place.queue(self.slot % self.plan.consumers)
        options: dict[str, Any] = {
            "namespace": self.place.namespace,
            "runtime_dir": self.place.runtime,
            "ring_size": self.plan.ring_size,
        }
        if self.plan.asyncio:
            return AsyncProducer(queue, **options)
        return BlockingProducer(Producer(queue, **options))

    async def _put(self, life: int, number: int, sequence: int) -> bool:
        """Put one message, however long it takes. False if the end came first: then nothing was put."""
        cell, content = self.cell, self.content
        kind = content.kind(self.slot, number)
        source = array = content.array(kind)
        begun = time.monotonic_ns()
        header = HEADER.pack(MAGIC, self.slot, life, number, begun)
        cell[Cell.BEGUN] = number + 1
        while True:
            try:
                if source is not None and content.is_lent(kind) and array is source:
                    array = await self._producer.empty(source.nbytes, timeout=_PUT_TIMEOUT)
                    np.copyto(array, source)
                put = await self._producer.put(
                    content.payload(kind, header, array), timeout=_PUT_TIMEOUT, ttl=self.plan.ttl
                )
                break
            except (QueueFullError, PeerUnavailableError):
                pass
            except SegmentSpaceError:
                await self.pause(10 * _PAUSE)
            cell[Cell.REFUSED] += 1
            self.hear()
            if self._full_until:
                self._relieve()
            if self.ending():
                cell[Cell.BEGUN] = number
                return False
        if put != sequence:
            self.notes.violation("order", f"put gave message {number} the sequence {put}, and {sequence} was due")
        cell[Cell.RETURNED] = number + 1
        return True

    def obey(self, order: int, until: int) -> None:
        if order == FULL:
            self._full_until = until
            self._limit_files(True)

    def use_in_child(self) -> None:
        drive(self._producer.put(b"from a child", timeout=0, ttl=None))

    def _relieve(self) -> None:
        if time.monotonic_ns() >= self._full_until:
            self._limit_files(False)

    def _limit_files(self, limited: bool) -> None:
        """For this process, a full /dev/shm: a new segment can't be allocated. The host's own is left alone."""
        if not limited:
            self._full_until = 0
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if limited else hard, hard))


class ConsumerWorker(Worker):
    """Takes messages, checks them, holds some, checks those again, and gives all back."""

    role = "consumer"

    def __init__(self, plan: Plan, place: Place, content: Content, board: Board, notes: NoteWriter, slot: int) -> None:
        super().__init__(plan, place, content, board, notes, slot)
        self._journal = board.writer(slot)
        self._saboteur = Saboteur(plan.fault, place.namespace, place.runtime) if plan.fault and slot == 0 else None
        self._add: Callable[..., None] = (
            self._journal.add if self._saboteur is None else self._saboteur.journal(self._journal.add)
        )
        self._held: list[tuple[int, int, Message, Any, int, int, int]] = []
        self._count = 0
        self._slow_until = self._hold_until = 0
        self._consumer: ConsumerFront

    async def work(self) -> None:
        self._consumer = self._open()
        for aside in self._consumer.set_aside():
            self._put_aside(aside)
        held = self._held
        while not self.ending():
            self.hear()
            if self._children:
                self.reap()
            timeout = _GET_TIMEOUT
            if held:
                now = time.monotonic_ns()
                while held and (held[0][0] <= now or self._count - held[0][1] > _WINDOW):
                    self._give_back(heapq.heappop(held))
                if held:
                    timeout = min(timeout, max(0.0, (held[0][0] - now) / 1e9))
                if len(held) >= self.plan.held:
                    await self.pause(timeout)
                    continue
            try:
                message = await self._consumer.get(timeout=timeout)
            except QueueEmptyError:
                continue
            except (CorruptRecordError, DecodeError) as error:
                self.notes.violation("content", f"get raised {type(error).__name__}: {error}")
                continue
            self._deliver(message)
            del message
            if self._slow_until:
                await self._be_slow()
        await self._leave()

    def _open(self) -> ConsumerFront:
        queue = self.place.queue(self.slot)
        options: dict[str, Any] = {
            "namespace": self.place.namespace,
            "runtime_dir": self.place.runtime,
            "max_deliveries": self.plan.max_deliveries,
            "on_set_aside": self._put_aside,
        }
        if self.plan.asyncio:
            return AsyncConsumer(queue, **options)
        return BlockingConsumer(Consumer(queue, **options))

    def _deliver(self, message: Message) -> None:
        taken = time.monotonic_ns()
        try:
            producer, life, number, begun, body = open_payload(message.payload)
        except WrongContentError as error:
            self.notes.violation("content", f"message {message.sequence} of ring {message.producer}: {error}")
            message.release()
            return
        flags = REDELIVERED if message.redelivered else 0
        self._count += 1
        self._add(DELIVERED, flags, producer, life, number, body.nbytes, taken, max(0, taken - begun))
        hold = self.content.hold(self.content.kind(producer, number))
        if self._hold_until > taken:
            hold = self._hold_until - taken
        if self._saboteur is not None:
            hold = self._saboteur.before(body, hold)
        self._check("content", "arrived wrong", producer, number, body)
        if hold:
            heapq.heappush(self._held, (taken + hold, self._count, message, body, producer, life, number))
            if self._saboteur is not None:
                self._saboteur.after(body)
            return
        del body
        message.release()
        self._add(RELEASED, 0, producer, life, number, 0, taken, 0)

    def _give_back(self, item: tuple[int, int, Message, Any, int, int, int]) -> None:
        _, _, message, body, producer, life, number = item
        self._check("views", "changed while it was held", producer, number, body)
        del item, body
        message.release()
        self._add(RELEASED, 0, producer, life, number, 0, time.monotonic_ns(), 0)

    def _check(self, check: str, what: str, producer: int, number: int, body: Any) -> None:
        try:
            self.content.check(producer, number, body)
        except WrongContentError as error:
            self.notes.violation(check, f"message {number} of producer {producer} {what}: {error}")

    def _put_aside(self, aside: SetAside) -> None:
        producer, _, number, _, body = open_payload(aside.read())
        self._check("content", "was set aside wrong", producer, number, body)
        self._add(ASIDE, 0, producer, 0, aside.sequence, int(aside.producer, 16), time.monotonic_ns(), 0)
        aside.discard()

    async def _be_slow(self) -> None:
        if time.monotonic_ns() < self._slow_until:
            await self.pause(_SLOW_SECONDS)
        else:
            self._slow_until = 0

    async def _leave(self) -> None:
        kept = []
        while self._held:
            item = heapq.heappop(self._held)
            if self.cell[Cell.STOP] or type(item[2].payload) is not bytes:
                self._give_back(item)
            else:
                # Has no views, so closing hands it to the next consumer.
                kept.append(item[2])
            del item
        await self._consumer.close()
        if self._saboteur is not None:
            self._saboteur.leave()
        self.reap(block=True)

    def obey(self, order: int, until: int) -> None:
        if order == SLOW:
            self._slow_until = until
        elif order == HOLD:
            self._hold_until = until

    def use_in_child(self) -> None:
        # What the child drops is still the parent's.
        self._held.clear()
        gc.collect()
        drive(self._consumer.get(timeout=0))


ROLES: dict[str, type[Worker]] = {"producer": ProducerWorker, "consumer": ConsumerWorker}


def live(worker: Worker, place: Place) -> int:
    """Be this worker from here on, in a process that was just forked; returns the exit code."""
    with open(place.stacks(worker.role, worker.slot), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        signal.signal(signal.SIGTERM, worker.end)
        before = settled_descriptors()
        try:
            if worker.plan.asyncio:
                asyncio.run(worker.work())
            else:
                drive(worker.work())
            gc.collect()
            worker.count_descriptors(before)
        except Exception:
            worker.notes.violation("processes", f"{worker.role} {worker.slot} failed:\n{traceback.format_exc()}")
            return FAILED
    return 0


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a blocking front suspended")


def settled_descriptors() -> int:
    """How many descriptors a process has when ZeroMQ has opened those of its context, once and for good."""
    zmq.Context.instance().socket(zmq.DEALER).close()
    # The socket's own are closed by another thread.
    count, looks = open_descriptors(), 0
    while looks < _LOOKS:
        time.sleep(_PAUSE)
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
