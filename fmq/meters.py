"""What is counted for metrics: plain numbers beside the hot paths, read by ``fmq.metrics`` now and then.

Nothing here knows of Prometheus. A message of 1 KiB takes 1 to 2 us on either side, and one call of prometheus_client
nearly as long. So a message costs no such call, and as little as can be otherwise: what stands in the ring's counters
is read from there; of a message that is put only the bytes are added up; of one that is taken the bytes and the number,
and the clock is read once for each turn of a ring (``ConsumerProtocol.take``), whose first message stands for the
others: of messages that come singly each is timed, of a backlog one in up to 64.

What counts here is driven under the lock of the producer or consumer that it belongs to, and so is ``reading``; only
``ProducerMeter.failed`` may be called without.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fmq.message import Source
from fmq.outgoing import Outgoing
from fmq.paths import QueuePath
from fmq.protocol import ConsumerProtocol
from fmq.rings import QueueRings
from fmq.topic_protocol import SubscriberProtocol
from shmq import Lease, Record, RingReader, RingWriter, TopicReader
from shmq.layout import (
    DOORBELLS,
    EXPIRED_COUNT,
    NEXT_SEQUENCE,
    REDELIVERED_COUNT,
    SET_ASIDE_COUNT,
    SKIPPED_COUNT,
    SPILLED_BYTES,
    SPILLS,
)
from shmq.reader import Taken

LATENCY_MS = (0.001, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""Upper bounds of the buckets of the latency, in milliseconds; FastDeploy's."""

WAIT_SECONDS = (0.0001, 0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of the time that a put waited for room, in seconds."""

Post: TypeAlias = "Callable[[bytes, int, int, int], int | None]"


class Tally:
    """Counts of values, in the buckets of a histogram: ``counts[i]`` up to ``bounds[i]`` inclusive, the last above."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def reading(self) -> tuple[list[int], float]:
        """The counts, and the sum of all values."""
        return self.counts.copy(), self.total


@dataclasses.dataclass(slots=True)
class Reading:
    """What one producer or consumer has counted so far: ``counts`` and ``tallies`` only grow, ``levels`` may fall."""

    counts: dict[str, float]
    tallies: dict[str, tuple[list[int], float]]
    levels: dict[str, float] = dataclasses.field(default_factory=dict)


class ProducerMeter:
    """Counts what one producer does. Its ``post`` and ``outgoing`` stand in for the writer's and for Outgoing."""

    def __init__(self, path: QueuePath, writer: RingWriter) -> None:
        self.path = path
        self.outgoing: Callable[..., Outgoing] = functools.partial(MeteredOutgoing, self)
        """Makes an Outgoing that counts: the arguments are those of Outgoing."""
        self.large_bytes = 0
        self.copied_bytes = 0
        self.copy_seconds = 0.0
        self._failed = 0
        self._failed_lock = threading.Lock()
        self._waits = Tally(WAIT_SECONDS)
        self._writer = writer
        self.post, self._small_bytes = _counted(writer.post)
        self._final: Reading | None = None

    def failed(self) -> None:
        """Count a put that put nothing. Any thread, with the producer's lock or without."""
        with self._failed_lock:
            self._failed += 1

    def waited(self, seconds: float) -> None:
        """Count a wait for room."""
        self._waits.add(seconds)

    def reading(self) -> Reading:
        """What was counted so far; after ``close``, in all."""
        return self._final or self._read()

    def close(self) -> None:
        """Take the last reading, before the ring is let go of."""
        self._final = self._read()
        self._final.levels = {}

    def _read(self) -> Reading:
        words = self._writer.segment.words
        put, failed, doorbells = words[NEXT_SEQUENCE], self._failed, words[DOORBELLS]
        return Reading(
            counts={
                "send": put + failed,
                "send_failed": failed,
                "bytes_send": self._small_bytes() + self.large_bytes,
                "spills": words[SPILLS],
                "spilled_bytes": words[SPILLED_BYTES],
                "skipped": words[SKIPPED_COUNT],
                "doorbells_sent": doorbells,
                "doorbells_saved": max(0, put - doorbells),
                "copied_bytes": self.copied_bytes,
                "copy_seconds": self.copy_seconds,
            },
            tallies={"wait": self._waits.reading()},
            levels={"ring": self._writer.size, "used": self._writer.used()},
        )


def _counted(post: Post) -> tuple[Post, Callable[[], int]]:
    """``post``, and what tells how many bytes it has posted. A closure: attributes would cost 15 ns more a message."""
    nbytes = 0

    def counted(blob: bytes, encoding: int, timestamp: int, expires: int) -> int | None:
        nonlocal nbytes
        sequence = post(blob, encoding, timestamp, expires)
        if sequence is not None:
            nbytes += len(blob)
        return sequence

    return counted, lambda: nbytes


class MeteredOutgoing(Outgoing):
    """An Outgoing that counts what becomes of it: its bytes and the time of its long copies, or a failure."""

    __slots__ = ("_copy_seconds", "_counted", "_meter", "_nbytes")

    def __init__(self, meter: ProducerMeter, *arguments: Any) -> None:
        try:
            super().__init__(*arguments)
        except BaseException:
            meter.failed()
            raise
        self._meter = meter
        self._counted = False
        self._nbytes = len(self._blob) + self.array_bytes
        self._copy_seconds = 0.0

    def copy(self) -> None:
        """As Outgoing.copy."""
        begun = time.perf_counter()
        super().copy()
        self._copy_seconds += time.perf_counter() - begun

    def finish(self) -> None:
        """As Outgoing.finish."""
        super().finish()
        if self._counted:
            return
        self._counted = True
        meter = self._meter
        meter.copy_seconds += self._copy_seconds
        if self.posted:
            meter.large_bytes += self._nbytes
            meter.copied_bytes += self.copied_bytes
        else:
            meter.failed()


def _counting(take: Callable[[Any], Taken | None]) -> Callable[[Any], Taken | None]:
    """``take``, counting; a closure, since a call by an attribute would cost 0.03 us more. Costs 0.1 us itself."""

    def counting(self: MeteredReader) -> Taken | None:
        taken = take(self)
        if taken is not None:
            if self.turned:
                self._begin_turn(taken[5])
            self._received += 1
            self._nbytes += len(taken[4])
        return taken

    return counting


class MeteredReader(RingReader):
    """A RingReader that counts what it hands out, and times the first message of each turn for ``latency``."""

    # 25 ns a message less than without.
    __slots__ = ("_counters", "_latency", "_latency_ms", "_nbytes", "_received", "_timed", "turned")

    take = _counting(RingReader.take)

    def __init__(self, latency: Tally, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._latency = latency
        self.turned = True
        """Whether a turn began since the last message was taken."""
        self._received = 0
        self._nbytes = 0
        self._timed = 0
        self._latency_ms = 0.0
        self._counters = self._read_counters()

    def put_back(self, offset: int, deliveries: int) -> None:
        """As RingReader.put_back."""
        _, count, blob = self.read(offset)
        self._received -= 1
        self._nbytes -= len(blob) + sum(view.nbytes for view in self.views(offset, len(blob), count))
        super().put_back(offset, deliveries)

    def lease(self, offset: int, arrays: list[NDArray[np.uint8]]) -> Lease:
        """As RingReader.lease."""
        self._nbytes += sum(array.nbytes for array in arrays)
        return super().lease(offset, arrays)

    def harvest(self) -> tuple[int, ...]:
        """What happened since the last harvest: messages, their bytes, redeliveries, expired and set aside ones."""
        self._count_latency()
        received, nbytes, before = self._received, self._nbytes, self._counters
        self._received = self._nbytes = self._timed = 0
        self._counters = self._read_counters()
        return received, nbytes, *(new - old for new, old in zip(self._counters, before, strict=True))

    def _begin_turn(self, timestamp: int) -> None:
        self.turned = False
        self._count_latency()
        # Not below 0: the clock may have been set back meanwhile.
        self._latency_ms = max(0.0, (time.time_ns() - timestamp) / 1e6)

    def _count_latency(self) -> None:
        """Count the latency of the first message of the turn for all that were taken since."""
        if untimed := self._received - self._timed:
            self._latency.add(self._latency_ms, untimed)
            self._timed = self._received

    def _read_counters(self) -> tuple[int, ...]:
        # The ring's own, which were there before this consumer and outlive it.
        words = self.segment.words
        return words[REDELIVERED_COUNT], words[EXPIRED_COUNT], words[SET_ASIDE_COUNT]


class MeteredTopicReader(MeteredReader, TopicReader):
    """The same of a topic."""

    take = _counting(TopicReader.take)

    def _read_counters(self) -> tuple[int, ...]:
        return 0, self.expired, 0


class ConsumerMeter:
    """What one consumer has counted. Knows its protocol by a weak reference only, for that knows the consumer."""

    def __init__(self, path: QueuePath, protocol: MeteredConsumerProtocol) -> None:
        self.path = path
        self.latency = Tally(LATENCY_MS)
        self._protocol = weakref.ref(protocol)
        self._totals: tuple[int, ...] = (0, 0, 0, 0, 0)

    def add(self, harvest: tuple[int, ...]) -> None:
        """Add what a reader has harvested."""
        self._totals = tuple(map(operator.add, self._totals, harvest))

    def reading(self) -> Reading:
        """What was counted so far; after the protocol was closed, in all."""
        protocol = self._protocol()
        if protocol is not None:
            protocol.harvest()
        names = ("recv", "bytes_recv", "redeliveries", "expired", "set_aside")
        return Reading(dict(zip(names, self._totals, strict=True)), {"latency": self.latency.reading()})


class MeteredConsumerProtocol(ConsumerProtocol):
    """A ConsumerProtocol whose ``meter`` counts what it takes from the rings of the queue at ``path``."""

    _reader: type[MeteredReader] = MeteredReader

    def __init__(
        self,
        path: QueuePath,
        rings: QueueRings,
        epoch: int,
        decode: Callable[[int, bytes, list[Any]], Any],
        released: Callable[[], None],
        report: Callable[[Exception], None],
        set_aside: Callable[[Source, Record], None],
        turn: Callable[[], int],
    ) -> None:
        self.meter = ConsumerMeter(path, self)
        rings.reader = functools.partial(self._reader, self.meter.latency)
        super().__init__(rings, epoch, decode, released, report, set_aside, self._noticed(turn))

    def _noticed(self, turn: Callable[[], int]) -> Callable[[], int]:
        def noticed() -> int:
            for source in self._order:
                source.reader.turned = True  # type: ignore[attr-defined]
            return turn()

        return noticed

    def _forget(self, source: Source) -> None:
        self.meter.add(source.reader.harvest())  # type: ignore[attr-defined]
        super()._forget(source)

    def harvest(self) -> None:
        """Add to ``meter`` what happened since the last harvest."""
        for source in self._order:
            self.meter.add(source.reader.harvest())  # type: ignore[attr-defined]

    def close(self, *, hand_back: bool) -> list[tuple[bytes, bytes]]:
        """As ConsumerProtocol.close."""
        self.harvest()
        return super().close(hand_back=hand_back)


class MeteredSubscriberProtocol(MeteredConsumerProtocol, SubscriberProtocol):
    """The same of a topic."""

    _reader = MeteredTopicReader


METERED: dict[type[ConsumerProtocol], type[MeteredConsumerProtocol]] = {
    ConsumerProtocol: MeteredConsumerProtocol,
    SubscriberProtocol: MeteredSubscriberProtocol,
}
