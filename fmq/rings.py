"""The rings of one queue in the shared-memory directory: make, find, attach, remove."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from fmq.errors import QueueInUseError
from fmq.paths import QueuePath
from shmq import (
    Mappings,
    RingReader,
    RingWriter,
    Segment,
    SegmentError,
    SegmentMissingError,
    TopicReader,
    TopicWriter,
    claim_slot,
)
from shmq.layout import CONSUMER_PID, RING_MAGIC, TOPIC_MAGIC
from shmq.segment import names, unlink
from shmq.writer import check_ring_size


class QueueRings:
    """What a consumer sees of its queue's rings; implements ``fmq.protocol.Rings``."""

    def __init__(self, path: QueuePath, max_deliveries: int = 0, mappings: Mappings | None = None) -> None:
        self._prefix = path.rings
        self._max_deliveries = max_deliveries
        self._mappings = mappings
        self.reader: Callable[..., RingReader] = RingReader
        """Makes the readers."""

    def names(self) -> list[str]:
        """The names of the rings that are there, their spill segments left out."""
        return [name for name in names(self._prefix) if "." not in name[len(self._prefix) :]]

    def attach(self, name: str, epoch: int) -> RingReader:
        """Attach a ring for reading. Raises a SegmentError, a CorruptRecordError, or QueueInUseError.

        Whoever has the queue's lock is the only consumer that knows this lock. Another one may hold one elsewhere.
        """
        segment = Segment.attach(name)
        try:
            if not segment.claim():
                pid = int(segment.words[CONSUMER_PID])
                raise QueueInUseError(
                    f"ring {name} has a consumer already, process {pid}, which has another runtime directory or whose "
                    "lock file was removed; give all processes of a host the same FMQ_RUNTIME_DIR, or use another "
                    "namespace (FMQ_NAMESPACE)",
                    pid,
                )
            return self.reader(segment, epoch=epoch, max_deliveries=self._max_deliveries, mappings=self._mappings)
        except BaseException:
            segment.close()
            raise

    def remove(self, name: str) -> None:
        """Remove a ring and its spill segments."""
        unlink(name)
        for spill in names(f"{name}."):
            unlink(spill)


class TopicRings(QueueRings):
    """What a reader sees of its topic's rings: that of the publisher, and those of publishers that are gone."""

    def __init__(self, path: QueuePath) -> None:
        super().__init__(path)
        self.reader = TopicReader
        self._attached: dict[str, Segment] = {}
        self._done: set[str] = set()

    def names(self) -> list[str]:
        """As QueueRings.names."""
        names = super().names()
        self._done.intersection_update(names)
        return names

    def attach(self, name: str, epoch: int) -> RingReader:
        """Get a reader slot of a ring. Raises a SegmentError, SegmentLimitError if it has no slot left."""
        if name in self._done:
            raise SegmentMissingError(f"ring {name} was read to its end")
        segment = Segment.attach(name, magic=TOPIC_MAGIC)
        try:
            if segment.adopt():
                raise SegmentMissingError(f"the publisher of ring {name} is gone; there will be nothing new")
            reader = self.reader(segment, claim_slot(segment), epoch=epoch)
        except BaseException:
            segment.close()
            raise
        self._attached[name] = segment
        return reader

    def remove(self, name: str) -> None:
        """Remove a ring that this reader is through with, unless others read it."""
        self._done.add(name)
        if not self._attached.pop(name).has_readers():
            super().remove(name)


def create_ring(path: QueuePath, ring_size: int, spill_limit: int) -> RingWriter:
    """A new ring of a queue, under a name of its own, owned by this process. Raises a SegmentError."""
    return RingWriter(_create(path, ring_size, spill_limit, RING_MAGIC), spill_limit=spill_limit)


def create_topic_ring(path: QueuePath, ring_size: int, spill_limit: int) -> TopicWriter:
    """As ``create_ring``, for a topic."""
    return TopicWriter(_create(path, ring_size, spill_limit, TOPIC_MAGIC), spill_limit=spill_limit)


def _create(path: QueuePath, ring_size: int, spill_limit: int, magic: int) -> Segment:
    check_ring_size(ring_size)
    if type(spill_limit) is not int or spill_limit < 0:
        raise SegmentError(f"a spill limit is a number of bytes from 0 on; this one is {spill_limit!r}")
    ring_id = secrets.token_bytes(16)
    return Segment.create(path.rings + ring_id[:8].hex(), ring_size, magic=magic, ring_id=ring_id)
