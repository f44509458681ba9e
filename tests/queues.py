"""What the tests of the queue share: a place of its own for every test, deadlines, children that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import uvloop

from fmq import (
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    Message,
    PeerUnavailableError,
    Producer,
    Publisher,
    QueueEmptyError,
    QueueFullError,
    Subscriber,
    ViewsHeldError,
)
from fmq.paths import QueuePath, TopicPath
from fmq.producer import ProducerBase
from shmq import collect
from shmq.layout import HEAD, TAIL, tail_names
from shmq.segment import names

DEADLINE_S = 20.0
SMALL_RING = 64 * 1024


def eventually(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """Wait until ``condition`` is true, and return what it gave; fails the test at the deadline."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"within {seconds} s it did not come about that {what}")
        time.sleep(0.002)
    return result


async def soon(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """As ``eventually``, in an event loop that goes on meanwhile."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"within {seconds} s it did not come about that {what}")
        await asyncio.sleep(0.001)
    return result


def open_descriptors() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


_left: list[Any] = []


class Place:
    """A queue of its own: a name, a namespace and a runtime directory that nobody else has. Can be pickled."""

    def __init__(self, parent: str = "/tmp") -> None:
        self.directory = tempfile.mkdtemp(prefix="fmq", dir=parent)
        self.runtime = os.path.join(self.directory, "run")
        self.queue = f"q{os.urandom(4).hex()}"
        self.namespace = f"n{os.urandom(4).hex()}"
        self._made: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": []}

    @property
    def path(self) -> QueuePath:
        return QueuePath(self.queue, self.namespace, self.runtime)

    @property
    def where(self) -> dict[str, Any]:
        return {"namespace": self.namespace, "runtime_dir": self.runtime}

    def producer(self, **options: Any) -> Producer:
        producer = Producer(self.queue, **{"ring_size": SMALL_RING, **self.where, **options})
        self._made.append(producer)
        return producer

    def consumer(self, **options: Any) -> Consumer:
        consumer = Consumer(self.queue, **{**self.where, **options})
        self._made.append(consumer)
        return consumer

    def async_producer(self, **options: Any) -> AsyncProducer:
        producer = AsyncProducer(self.queue, **{"ring_size": SMALL_RING, **self.where, **options})
        self._made.append(producer)
        return producer

    def async_consumer(self, **options: Any) -> AsyncConsumer:
        consumer = AsyncConsumer(self.queue, **{**self.where, **options})
        self._made.append(consumer)
        return consumer

    def publisher(self, **options: Any) -> Publisher:
        publisher = Publisher(self.queue, **{"ring_size": SMALL_RING, **self.where, **options})
        self._made.append(publisher)
        return publisher

    def subscriber(self, **options: Any) -> Subscriber:
        subscriber = Subscriber(self.queue, **{**self.where, **options})
        self._made.append(subscriber)
        return subscriber

    def topic_segments(self) -> list[str]:
        """The names of the topic's segments that are there."""
        return names(TopicPath(self.queue, **self.where).rings)

    def segments(self) -> list[str]:
        """The names of the queue's segments that are there."""
        return names(self.path.rings)

    def files(self) -> list[str]:
        """What is left in the runtime directory."""
        return [
            os.path.join(parent, entry)
            for parent, directories, files in os.walk(self.runtime)
            for entry in directories + files
        ]

    def close(self) -> None:
        """Close what was made here, and discard what was not delivered."""
        gc.collect()
        # Producers first, and without waiting: some tests leave messages on purpose.
        for thing in sorted(self._made, key=lambda thing: not isinstance(thing, ProducerBase)):
            try:
                closing = thing.close(timeout=0) if isinstance(thing, ProducerBase) else thing.close()
                if inspect.isawaitable(closing):
                    run_to_end(closing)
            except ViewsHeldError:
                # A test that failed keeps its arrays until the next one begins.
                _left.append(thing)
        self._made.clear()
        collect(self.path.rings, discard=True)
        collect(TopicPath(self.queue, **self.where).rings)


def run_to_end(coroutine: Coroutine[Any, Any, Any], make_loop: Callable[[], Any] = asyncio.new_event_loop) -> Any:
    """Run a coroutine in a new event loop, and cancel what it left, as ``asyncio.run`` does."""
    loop = make_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@pytest.fixture(name="place")
def place_fixture() -> Iterator[Place]:
    """A place of its own for a queue; it has to be empty when the test is over."""
    if _left:
        sys.last_exc = sys.last_value = sys.last_traceback = None
        gc.collect()
        while _left:
            _left[-1].close()
            _left.pop()
    place = Place()
    try:
        yield place
        place.close()
        assert not _left, "arrays that look into the ring are alive"
        assert place.files() == [], "sockets or locks were left behind"
        assert place.segments() + place.topic_segments() == [], "segments were left behind"
    finally:
        shutil.rmtree(place.directory, ignore_errors=True)


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(name="runner", params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner_fixture(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in a new event loop, of either kind, as ``asyncio.run`` does."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return run_to_end(coroutine, request.param)

    return run


# -- the ring, from outside -------------------------------------------------------------------------------------------


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array's memory begins."""
    return int(array.__array_interface__["data"][0])


def mappings(name: str) -> list[tuple[int, int]]:
    """The (start, end) addresses at which this process maps a segment."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(f"/{name}") or f"/{name} " in line or f"making-{name}" in line:
                start, end = line.split(maxsplit=1)[0].split("-")
                found.append((int(start, 16), int(end, 16)))
    return found


def lies_in(array: np.ndarray[Any, Any], name: str) -> bool:
    """Whether an array's memory is that of a segment."""
    start = address_of(array)
    return any(low <= start and start + array.nbytes <= high for low, high in mappings(name))


def is_empty(producer: ProducerBase) -> bool:
    """Whether all of a producer's ring is free again."""
    writer = producer._writer
    with producer._lock:
        writer.reclaim()
        return tail_names(writer.segment.words[TAIL], writer.segment.words[HEAD])


def fill(producer: Producer, obj: Any = bytes(4000)) -> int:
    """Put something until the ring is full, and return how often."""
    count = 0
    while True:
        try:
            producer.put(obj, timeout=0)
        except (QueueFullError, PeerUnavailableError):
            return count
        count += 1


def take_all(consumer: Consumer) -> list[Message]:
    """Take everything, what consumers died with (which comes one by one) included."""
    messages = []
    with contextlib.suppress(QueueEmptyError):
        while True:
            messages.append(consumer.get(timeout=0))
    return messages


def drain(consumer: Consumer) -> list[int]:
    """Take and release everything, and return the sequences."""
    sequences = []
    while True:
        try:
            message = consumer.get(timeout=0)
        except QueueEmptyError:
            return sequences
        sequences.append(message.sequence)
        message.release()


# -- processes --------------------------------------------------------------------------------------------------------


class Child:
    """A process that runs ``work(connection, *arguments)`` and can be told things, stopped, and killed."""

    def __init__(self, work: Callable[..., None], *arguments: Any, method: str = "fork") -> None:
        context = multiprocessing.get_context(method)
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: Any = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def hear(self) -> Any:
        """The next thing the child says."""
        if not self.connection.poll(DEADLINE_S):
            pytest.fail("the child said nothing in time")
        return self.connection.recv()

    def tell(self, what: Any) -> None:
        self.connection.send(what)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.join()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has come to a stop."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: self._state() == "T", "the child stopped")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def join(self) -> int:
        """Wait for the end of the child, and return its exit code."""
        # Not by joining, which would wait for the child's own children too.
        eventually(lambda: self.process.exitcode is not None, "the child ended")
        self.connection.close()
        return int(self.process.exitcode)

    def _state(self) -> str:
        with open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self.process.kill()
            self.process.join()
        self.connection.close()
