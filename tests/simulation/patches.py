"""Puts the simulated machine under the real code: which names of which modules stand for what, as long as it runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fmq.consumer
import fmq.outgoing
import fmq.producer
import fmq.rings
import fmq.topics
import fmq.waiting
import shmq.fence
import shmq.orphans
import shmq.reader
import shmq.spill
import shmq.topic
import shmq.writer
from fmq.paths import QueuePath, TopicPath
from shmq.layout import NEW_RECORD, RECORD, REFERENCE
from tests.simulation.memory import Memory, Readonly, WordStruct
from tests.simulation.topic_world import PublisherBell, SubscriberBell, TopicReader, TopicWriter
from tests.simulation.world import (
    RECHECK,
    ConsumerBell,
    Killed,
    Lock,
    Nudge,
    ProducerBell,
    QueueLock,
    Segment,
    Time,
    world,
)

QUEUE = "q"
_MISSING = object()


class _Path(QueuePath):
    """The places of the simulated queue; there is no directory."""

    def make_directory(self) -> None:
        """Nothing to make."""

    def tidy(self) -> None:
        """Nothing to remove."""


class _TopicPath(TopicPath):
    """The same for the simulated topic."""

    def make_directory(self) -> None:
        """Nothing to make."""

    def tidy(self) -> None:
        """Nothing to remove."""


class _Waiter:
    """Stands for ``LoopWaiter``, which only an event loop needs."""

    def __init__(self, descriptors: object) -> None:
        pass

    def close(self, when_idle: Any) -> None:
        """As of the real one."""
        when_idle()


def _frombuffer(source: Any, dtype: Any, count: int, offset: int) -> NDArray[Any]:
    if isinstance(source, Memory):
        return np.frombuffer(source.shared.raw, dtype, count, offset)
    if isinstance(source, Readonly):
        array = np.frombuffer(source.shared.raw, dtype, count, offset)
        array.setflags(write=False)
        return array
    return np.frombuffer(source, dtype, count, offset)


def _copy_buffer(source: NDArray[Any], target: NDArray[np.uint8]) -> None:
    world().write(target, source.tobytes())


def _full() -> None:
    machine = world()
    machine.step()
    machine.process().fence()
    machine.say("fence", "")


def _publish() -> None:
    if world().weak:
        _full()


def _nothing(*_: object) -> None:
    """What the real one does has no meaning here."""


def _no_file(path: str) -> None:
    raise FileNotFoundError(path)


def _token(nbytes: int) -> bytes:
    return world().rng.randbytes(nbytes)


def _names() -> Iterator[tuple[ModuleType, str, Any]]:
    time = Time()
    path = _Path(QUEUE, "sim", "/nowhere")
    topic_path = _TopicPath(QUEUE, "sim", "/nowhere")
    threading = SimpleNamespace(Lock=Lock)
    numpy = SimpleNamespace(frombuffer=_frombuffer, uint8=np.uint8, empty=np.empty)

    def find_path(*_: object) -> _Path:
        return path

    def find_topic_path(*_: object) -> _TopicPath:
        return topic_path

    def call(name: str) -> Any:
        def method(*args: Any) -> Any:
            return getattr(world(), name)(*args)

        return method

    for module in (fmq.rings, shmq.orphans):
        yield module, "names", call("names")
    for module in (fmq.rings, shmq.orphans, shmq.writer, shmq.spill):
        yield module, "unlink", call("unlink")
    for module in (fmq.rings, shmq.orphans, shmq.reader, shmq.spill):
        yield module, "Segment", Segment
    yield shmq.orphans, "is_owned", call("is_owned")
    yield shmq.orphans, "size_of", call("size_of")
    yield fmq.rings, "secrets", SimpleNamespace(token_bytes=_token)
    yield fmq.rings, "RingWriter", fmq.rings.RingWriter
    yield shmq.writer, "MIN_RING_SIZE", 1024
    for front in (fmq.producer, fmq.consumer):
        yield front, "QueuePath", find_path
        yield front, "time", time
        yield front, "threading", threading
        yield front, "LoopWaiter", _Waiter
        yield front, "close_at_exit", _nothing
        yield front, "abandon_in_child", _nothing
        yield front, "collected", _nothing
    yield fmq.producer, "RECHECK", RECHECK
    yield fmq.consumer, "_RECHECK", RECHECK
    yield fmq.producer, "ProducerBell", ProducerBell
    yield fmq.producer, "consumer_is_alive", call("consumer_is_alive")
    yield fmq.producer, "LOCK_IS_FENCE", True
    yield fmq.consumer, "ConsumerBell", ConsumerBell
    yield fmq.consumer, "Nudge", Nudge
    yield fmq.consumer, "QueueLock", QueueLock
    yield fmq.consumer, "os", SimpleNamespace(unlink=_no_file, sched_getaffinity=lambda _: (0, 1))
    yield fmq.consumer, "_TIDY_SECONDS", 1.0
    yield fmq.topics, "TopicPath", find_topic_path
    yield fmq.topics, "QueueLock", QueueLock
    yield fmq.topics, "PublisherBell", PublisherBell
    yield fmq.topics, "SubscriberBell", SubscriberBell
    yield fmq.topics, "RECHECK", RECHECK
    yield fmq.topics, "os", SimpleNamespace(unlink=_no_file)
    yield fmq.rings, "TopicWriter", TopicWriter
    yield fmq.rings, "TopicReader", TopicReader
    yield shmq.topic, "os", SimpleNamespace(getpid=lambda: 1)
    yield fmq.waiting, "time", time
    yield fmq.waiting, "wait_readable", call("wait_readable")
    yield fmq.outgoing, "time", time
    yield fmq.outgoing, "codec", SimpleNamespace(copy_buffer=_copy_buffer)
    for module in (shmq.reader, shmq.writer):
        yield module, "NEW_RECORD", WordStruct(NEW_RECORD)
        yield module, "REFERENCE", WordStruct(REFERENCE)
        yield module, "np", numpy
        yield module, "TOTAL_STORE_ORDER", True
    yield shmq.reader, "RECORD", WordStruct(RECORD)
    yield shmq.reader, "memoryview", Readonly
    yield shmq.reader, "abandon_in_child", _nothing
    yield shmq.reader, "time", time
    yield shmq.reader, "os", SimpleNamespace(getpid=lambda: 1)
    yield shmq.fence, "full", _full
    yield shmq.fence, "publish", _publish
    yield shmq.fence, "observe", _publish


_NEW = {(shmq.reader, "memoryview")}
"""Builtins, which the modules use without having such a name."""


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Let the real code run on simulated machines."""
    saved: list[tuple[ModuleType, str, Any]] = []
    logger = logging.getLogger("fmq")
    disabled, logger.disabled = logger.disabled, True
    hook, sys.unraisablehook = sys.unraisablehook, _unraisable
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for module, name, value in _names():
            if name not in vars(module) and (module, name) not in _NEW:
                raise AttributeError(f"{module.__name__} has no {name} any more")
            saved.append((module, name, vars(module).get(name, _MISSING)))
            setattr(module, name, value)
        yield
    finally:
        gc.collect()
        for module, name, value in reversed(saved):
            if value is _MISSING:
                delattr(module, name)
            else:
                setattr(module, name, value)
        sys.unraisablehook = hook
        logger.disabled = disabled
        if enabled:
            gc.enable()


def configure(*, weak: bool, lap: int, tidy_seconds: float) -> None:
    """Set what differs from schedule to schedule."""
    fmq.consumer._TIDY_SECONDS = tidy_seconds
    shmq.reader.TOTAL_STORE_ORDER = shmq.writer.TOTAL_STORE_ORDER = not weak
    fmq.producer.LOCK_IS_FENCE = not weak
    fmq.rings.RingWriter = functools.partial(shmq.writer.RingWriter, lap=lap)  # type: ignore[assignment, misc]
    fmq.rings.TopicWriter = functools.partial(TopicWriter, lap=lap)  # type: ignore[assignment, misc]


def _unraisable(args: Any) -> None:
    """An exception in a finalizer: part of a death, or a fault."""
    if not isinstance(args.exc_value, Killed):
        world().fail(args.exc_value)
