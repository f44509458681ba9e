"""The rings of one queue in the shared-memory directory: make, find, attach, remove."""

from __future__ import annotations

import secrets

from fmq.errors import QueueInUseError
from fmq.paths import QueuePath
from shmq import RingReader, RingWriter, Segment, SegmentError, SegmentMissingError
from shmq.layout import CONSUMER_PID
from shmq.segment import names, unlink
from shmq.writer import check_ring_size


class QueueRings:
    """What a consumer sees of its queue's rings; implements ``fmq.protocol.Rings``."""

    def __init__(self, path: QueuePath, max_deliveries: int = 0) -> None:
        self._prefix = path.rings
        self._max_deliveries = max_deliveries

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
            return RingReader(segment, epoch=epoch, max_deliveries=self._max_deliveries)
        except BaseException:
            segment.close()
            raise

    def remove(self, name: str) -> None:
        """Remove a ring and its spill segments."""
        unlink(name)
        for spill in names(f"{name}."):
            unlink(spill)


def create_ring(path: QueuePath, ring_size: int, spill_limit: int) -> RingWriter:
    """A new ring of a queue, under a name of its own, owned by this process. Raises a SegmentError."""
    check_ring_size(ring_size)
    if type(spill_limit) is not int or spill_limit < 0:
        raise SegmentError(f"a spill limit is a number of bytes from 0 on; this one is {spill_limit!r}")
    for last in (False, False, True):
        ring_id = secrets.token_bytes(16)
        try:
            segment = Segment.create(path.rings + ring_id[:8].hex(), ring_size, ring_id=ring_id)
            return RingWriter(segment, spill_limit=spill_limit)
        except SegmentMissingError:
            # Somebody who looked for orphans took it for one while it was made.
            if last:
                raise
    raise AssertionError
