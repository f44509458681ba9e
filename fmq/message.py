"""A message that was handed out, and how it is given back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from fmq.errors import ClosedError
from shmq import Lease, Record, RingReader


class Source:
    """The ring that a message came from, as its messages and the consumer's protocol know it.

    ``released`` is called by ``Message.release`` when somebody should look: a lease to settle, a producer to wake.
    ``decode`` makes a payload of (encoding, blob, views).
    """

    __slots__ = ("address", "decode", "orphan", "producer", "reader", "released", "watched")

    def __init__(
        self, reader: RingReader, released: Callable[[], None], decode: Callable[[int, bytes, list[Any]], Any]
    ) -> None:
        self.reader = reader
        self.producer = reader.name.rpartition(":")[2]
        self.released = released
        self.decode = decode
        self.address: bytes | None = None
        self.orphan = False
        self.watched: dict[int, float] = {}
        """When the oldest messages that are held were seen first, by their position; the protocol's."""

    def copy(self, offset: int) -> Any:
        """The payload of a message that is not given back, with private copies of its arrays."""
        encoding, count, blob = self.reader.read(offset)
        return self.decode(encoding, blob, [view.copy() for view in self.reader.views(offset, len(blob), count)])


# A Struct, because making one costs 0.1 us, and a class with slots 0.2.
class Message(msgspec.Struct, eq=False, weakref=True):
    """One message. Its arrays are read-only views into the ring.

    It is *done*, and will not be delivered again, when it is released: by ``release()``, by leaving its ``with`` block,
    or when the Message and every view of it are gone. Its space is used again when, besides, no view is left.
    ``release`` and ``detach`` may be called from any thread.

    Attributes
        payload: what was put. Gone after ``release`` (reading it raises ClosedError), a private copy after ``detach``.
        sequence: counts the messages of one producer, from 0.
        timestamp_ns: when it was put, in nanoseconds since the epoch.
        deliveries: how often it had been handed out before.
    """

    payload: Any
    sequence: int
    timestamp_ns: int
    deliveries: int
    _source: Source
    _offset: int
    _lease: Lease | None

    @property
    def producer(self) -> str:
        """The id of the producer's ring, 16 hexadecimal digits; a restarted producer has another one."""
        return self._source.producer

    @property
    def timestamp(self) -> float:
        """When it was put: seconds since the epoch, by this host's clock."""
        return self.timestamp_ns / 1e9

    @property
    def redelivered(self) -> bool:
        """Whether a consumer that is gone had been handed this message already."""
        return self.deliveries > 0

    @property
    def deaths(self) -> int:
        """How many consumers died with this message, or with its work begun. Not to be asked after ``release``."""
        return self._source.reader.deaths(self._offset) if self.deliveries and self._offset >= 0 else 0

    def postpone(self) -> None:
        """Say that work on it has not begun: if this process dies before ``begin``, it is not held against the message.

        For those who take many messages and work on some. Not while another thread may release it.
        """
        if self._offset >= 0:
            self._source.reader.postpone(self._offset)

    def begin(self) -> None:
        """Say that work on it begins, after ``postpone``. Not while another thread may release it."""
        if self._offset >= 0:
            self._source.reader.begin(self._offset)

    def release(self) -> None:
        """Acknowledge the message. Arrays taken from it stay valid, and keep its space as long. Idempotent."""
        offset, self._offset = self._offset, -1
        if offset < 0:
            return
        try:
            del self.payload
        except AttributeError:
            # Deleted by hand before; the message is given back all the same.
            self._give_back(offset)
            return
        self._give_back(offset)

    def detach(self) -> Any:
        """Copy the payload out of the ring, acknowledge the message, return the copy (``payload`` from now on).

        For what is kept for long. The arrays of the copy are private and writable. Raises ClosedError after release.
        """
        offset = self._offset
        if offset < 0:
            return self.payload
        # A consumer that was closed had no views left, so what is there is private already.
        if self._lease is not None and not self._source.reader.closed:
            self.payload = self._source.copy(offset)
        self._offset = -1
        self._give_back(offset)
        return self.payload

    def _give_back(self, offset: int) -> None:
        source = self._source
        if self._lease is None:
            source.reader.free(offset)
            if source.reader.wanted():
                source.released()
        else:
            self._lease.finished = True
            source.reader.dropped.append(self._lease)
            source.released()

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __copy__(self) -> Message:
        # Two of them would give back the same space, the second time that of another message.
        raise TypeError("a Message can't be copied or pickled; pass on its payload, or what detach() returns")

    def __deepcopy__(self, memo: object) -> Message:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        self.__copy__()
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        if name == "payload":
            raise ClosedError(
                f"message {self.sequence} was released, and its payload with it; take what you need before, or detach()"
            )
        raise AttributeError(f"a Message has no attribute {name!r}")

    def __del__(self) -> None:
        # Any thread, inside any collection: one store, or one append.
        if self._offset >= 0:
            if self._lease is None:
                self._source.reader.free(self._offset)
            else:
                self._source.reader.dropped.append(self._lease)

    def __repr__(self) -> str:
        state = "released" if self._offset < 0 else "held"
        return f"<Message {self.sequence} of producer {self.producer}, {state}>"


class SetAside:
    """A message that is not delivered any more, because too many consumers died with it; kept until it is discarded.

    Attributes
        producer, sequence: which message it is.
        timestamp_ns: when it was put, in nanoseconds since the epoch.
        deliveries: how often it was handed out.
    """

    __slots__ = ("_lock", "_record", "_source", "deliveries", "producer", "sequence", "timestamp_ns")

    def __init__(self, source: Source, record: Record, lock: threading.Lock) -> None:
        self.producer = source.producer
        self.sequence = record.sequence
        self.timestamp_ns = record.timestamp
        self.deliveries = record.deliveries
        self._source = source
        self._record = record
        self._lock = lock

    def read(self) -> Any:
        """A private copy of the payload. Any thread.

        Raises ClosedError if it was discarded, or the consumer closed; DecodeError or CorruptRecordError.
        """
        with self._lock:
            if not self._source.reader.is_set_aside(self._record):
                raise ClosedError(
                    f"message {self.sequence} of producer {self.producer} can't be read: it was discarded, or its "
                    "consumer is closed; the next Consumer.set_aside() lists it if it is still kept"
                )
            return self._source.copy(self._record.offset)

    def discard(self) -> None:
        """Give its space back. Any thread; idempotent."""
        with self._lock:
            kept = self._source.reader.is_set_aside(self._record)
            if kept:
                self._source.reader.free(self._record.offset)
        if kept:
            self._source.released()

    def __repr__(self) -> str:
        return f"<SetAside {self.sequence} of producer {self.producer}, handed out {self.deliveries} times>"
