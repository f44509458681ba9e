"""Topics: what one publisher puts, every reader gets. One record in shared memory for all, and no copy for any.

``Publisher`` and ``AsyncPublisher`` have the methods of producers, ``Subscriber`` and ``AsyncSubscriber`` those of
consumers, and they are those: only who reads, and who binds, is different.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fmq import encoding
from fmq.consumer import AsyncConsumer, Consumer, ConsumerBase
from fmq.doorbell import ConsumerBell, PublisherBell, SubscriberBell
from fmq.errors import PeerUnavailableError, QueueFullError, QueueTimeoutError
from fmq.paths import QueueLock, TopicPath
from fmq.producer import RECHECK, RING_SIZE, SPILL_LIMIT, TIMEOUT, AsyncProducer, Producer, ProducerBase
from fmq.rings import TopicRings, create_topic_ring
from fmq.topic_protocol import PublisherProtocol, SubscriberProtocol
from fmq.waiting import Steps, deadline_of, run
from shmq import SegmentLimitError, TopicWriter, collect

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics

logger = logging.getLogger("fmq")

PATIENCE = 1.0
_POLICIES = ("block", "skip", "drop")


class PublisherBase(ProducerBase):
    """What both publishers share. Every method may be called from any thread; in a forked child it raises ForkedError.

    A topic has one publisher at a time: QueueInUseError, with the pid of the other, if there is one that lives. Readers
    may come and go, up to 64 at a time, and get what is put from then on; without any, what is put is for nobody.

    ``policy`` says what becomes of a reader that is too slow: when a put has waited ``patience`` seconds for room,
    "block" goes on waiting, up to the put's timeout; "skip" takes back what the slowest readers have not taken, so that
    they go on with the newest; "drop" does that too, and tells them so: their ``get`` raises ReaderDroppedError, once,
    after which they are in again. What a reader holds is never taken back. The other arguments are ProducerBase's.
    """

    _noun = "publisher"
    _heirs = "its readers"
    _writer: TopicWriter
    _protocol: PublisherProtocol

    def __init__(
        self,
        topic: str,
        *,
        namespace: str | None = None,
        ring_size: int = RING_SIZE,
        spill_limit: int = SPILL_LIMIT,
        codec: str = "msgpack",
        policy: str = "block",
        patience: float = PATIENCE,
        runtime_dir: str | os.PathLike[str] | None = None,
        metrics: QueueMetrics | None = None,
    ) -> None:
        if policy not in _POLICIES:
            raise ValueError(f"there is no policy {policy!r}; choose one of {', '.join(map(repr, _POLICIES))}")
        deadline_of(patience)
        self._policy = policy
        self._patience = patience
        path = TopicPath(topic, namespace, runtime_dir)
        self._topic_lock = QueueLock(path)
        self._begin(path, ring_size, spill_limit, codec, metrics)

    def _connect(self, undo: contextlib.ExitStack, ring_size: int, spill_limit: int) -> None:
        self._topic_lock.acquire()
        undo.callback(self._topic_lock.release)
        collect(self._path.rings)
        self._writer = create_topic_ring(self._path, ring_size, spill_limit)
        undo.callback(self._writer.close, remove=True)
        self._bell = PublisherBell(self._path.endpoint)
        self._protocol = PublisherProtocol(self._writer)

    def _disconnect(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path.socket)
        # If it left its ring to readers of which none is left.
        collect(self._path.rings)
        self._topic_lock.release()

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._path.queue

    @property
    def readers(self) -> int:
        """How many readers there are now."""
        with self._lock:
            self._check()
            self._writer.free_dead()
            return len(self._writer.readers())

    def _ring(self) -> None:
        # The reader that sleeps may be one whose address has come, but was not read.
        with self._lock:
            if self._refusal is None:
                self._pump()

    def _peer_is_alive(self) -> bool:
        self._writer.free_dead()
        return self._writer.has_readers()

    def _make_way(self, waited: float) -> bool:
        if self._policy == "block" or waited < self._patience:
            return False
        slow = self._writer.slow()
        for slot in slow:
            skipped = self._writer.skip(slot, drop=self._policy == "drop")
            logger.warning(
                "%s: a reader, process %d, did not keep up: %d messages were taken back from it%s",
                self._path,
                self._writer.pid(slot),
                skipped,
                ", and it is dropped" if self._policy == "drop" else "",
            )
        return bool(slow)

    def _met(self, count: int) -> Steps[bool]:
        return (yield from self._until(lambda: self._protocol.met() >= count or None))

    def _slow(self) -> str:
        with self._lock:
            pids = [] if self._refusal else [str(self._writer.pid(slot)) for slot in self._writer.slow()]
        return f"the slowest readers are of processes {', '.join(pids)}" if pids else "readers hold what is in it"

    def _expired(self) -> Exception:
        if nameless := self._nameless():
            return PeerUnavailableError(nameless)
        return QueueFullError(
            f"{self._path} in {self.namespace}: the ring of {self._writer.size:,} bytes is full; {self._slow()}. Wait "
            "longer, read faster, raise ring_size, or choose policy='skip' or 'drop'"
        )

    def _not_flushed(self) -> Exception:
        return QueueTimeoutError(f"{self._unfinished()}the time is over; {self._slow()}")

    def _not_met(self) -> Exception:
        with self._lock:
            found = 0 if self._refusal else len(self._writer.readers())
        return QueueTimeoutError(
            f"{self._path} in {self.namespace} has {found} readers, and no more came in the time given"
        )


class Publisher(PublisherBase, Producer):
    """Puts messages for every reader of a topic. How it is made: see PublisherBase; what it can: see Producer."""

    def wait_for_readers(self, count: int = 1, *, timeout: float | None = TIMEOUT) -> None:
        """Wait until the topic has ``count`` readers, which get what is put from then on. Raises QueueTimeoutError."""
        run(self._met(count), self._descriptors, deadline_of(timeout), RECHECK, self._not_met)


class AsyncPublisher(PublisherBase, AsyncProducer):
    """As Publisher, for asyncio: see AsyncProducer."""

    async def wait_for_readers(self, count: int = 1, *, timeout: float | None = TIMEOUT) -> None:
        """As Publisher.wait_for_readers."""
        await self._drive(self._met(count), timeout, self._not_met)


class SubscriberBase(ConsumerBase):
    """What both subscribers share. Every method may be called from any thread; in a forked child it raises ForkedError.

    Gets what is put from now on, if there is a publisher, else from when there is one: who waits in ``get`` joins
    within 0.1 s, and a publisher that was killed and restarted is found within a second. ``type``, ``accept`` and
    ``warn_held`` and ``metrics`` are ConsumerBase's. Raises SegmentLimitError if the topic has 64 readers.
    """

    _noun = "subscriber"
    _protocol_class = SubscriberProtocol
    _protocol: SubscriberProtocol

    def __init__(
        self,
        topic: str,
        *,
        namespace: str | None = None,
        type: Any = Any,
        accept: Iterable[str] = ("msgpack",),
        warn_held: float | None = 60.0,
        runtime_dir: str | os.PathLike[str] | None = None,
        metrics: QueueMetrics | None = None,
    ) -> None:
        path = TopicPath(topic, namespace, runtime_dir)
        self._begin(path, TopicRings(path), encoding.decoder(accept, type), warn_held, metrics)
        with self._lock:
            self._bell.send_to(b"", self._protocol.join())
            self._wake_producers()

    def _connect(self, undo: contextlib.ExitStack) -> ConsumerBell | SubscriberBell:
        return SubscriberBell(self._path.endpoint)

    def _disconnect(self) -> None:
        # If the publisher is gone, and no other reader is left.
        collect(self._path.rings)

    def _tidy(self) -> None:
        if not self._protocol.has_publisher():
            # Look for one each time: what it puts first is not for who joins a second later.
            self._tidied = -math.inf
        super()._tidy()

    def _discover_first(self) -> None:
        super()._discover_first()
        for error in self._protocol.postponed.values():
            if isinstance(error, SegmentLimitError):
                raise error

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._path.queue


class Subscriber(SubscriberBase, Consumer):
    """Gets every message of a topic, read-only, where all readers see it. See SubscriberBase and Consumer."""


class AsyncSubscriber(SubscriberBase, AsyncConsumer):
    """As Subscriber, for asyncio: see AsyncConsumer."""
