"""What ``Queue.get`` gives, under FastDeploy's names."""

from __future__ import annotations

import pickle
import time
import uuid
from typing import Any

import msgspec

from fmq.errors import DecodeError
from fmq.message import Message as CoreMessage
from shmq import Segment, SegmentError
from shmq.layout import HEADER_BYTES, SPILL_MAGIC
from shmq.segment import unlink

_PREFIX = "fmq_shm_"


class Descriptor(msgspec.Struct, frozen=True):
    """Where bytes lie in shared memory: the name of a segment, and how many there are.

    That of a Message says that its payload lies in a ring, and is for information: the ring is not to be read, nor
    removed, by its name. One from ``create`` is a segment of its own, which stays until somebody reads it.
    """

    shm_name: str
    size: int

    @classmethod
    def create(cls, data: bytes) -> Descriptor:
        """Put bytes into a segment of their own. Raises SegmentSpaceError, SegmentError."""
        segment = Segment.create(f"{_PREFIX}{uuid.uuid4().hex}", len(data), magic=SPILL_MAGIC)
        try:
            segment.memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data
            return cls(segment.name, len(data))
        finally:
            segment.close()

    def read_and_unlink(self) -> bytes:
        """The bytes; the segment is removed. Raises SegmentMissingError if it is gone, SegmentError if it is no such.

        Of two who read the same one at once, each gets the bytes or that error.
        """
        if not self.shm_name.startswith(_PREFIX):
            raise SegmentError(
                f"{self.shm_name} is the ring of a queue, and holds other messages too; what you look for is the "
                "payload of the message"
            )
        segment = Segment.attach(self.shm_name, magic=SPILL_MAGIC)
        try:
            if self.size != segment.payload_bytes:
                raise SegmentError(
                    f"segment {self.shm_name} holds {segment.payload_bytes:,} bytes, and its descriptor says "
                    f"{self.size:,}; it was left alone"
                )
            unlink(self.shm_name)
            return bytes(segment.memory[HEADER_BYTES : HEADER_BYTES + self.size])
        finally:
            segment.close()


class Message:
    """One message. Arrays in its payload are read-only views into the ring, unless the setting ``copy`` is true.

    It is acknowledged, and will not come again, when it and those arrays are gone; or by ``release()``, or by leaving
    its ``with`` block. The arrays stay valid for as long as anybody has them, and keep its space so long; for what is
    kept for minutes ``detach()`` makes a private copy. Any thread may call these.

    Attributes
        payload: what was put. Reading it after ``release`` raises ClosedError.
        msg_id: counts the messages of one producer, from 0, without a gap.
        timestamp: when it was put, in seconds since the epoch.
        descriptor: where its large parts lie in shared memory, or None if it has none.
        redelivered: whether a consumer that is gone had been handed this message already.
    """

    __slots__ = ("_held", "_payload", "descriptor", "msg_id", "redelivered", "timestamp")

    def __init__(
        self,
        payload: Any,
        msg_id: int | None = None,
        timestamp: float | None = None,
        descriptor: Descriptor | None = None,
    ) -> None:
        self._held: CoreMessage | None = None
        self._payload = payload
        self.msg_id = msg_id
        self.timestamp = time.time() if timestamp is None else timestamp
        self.descriptor = descriptor
        self.redelivered = False

    @classmethod
    def holding(cls, held: CoreMessage, *, copy: bool) -> Message:
        """The face of a message; with ``copy`` nothing of it stays in the ring."""
        message = cls(None, held.sequence, held.timestamp, _descriptor(held))
        message.redelivered = held.redelivered
        if copy:
            message._payload = held.detach()
        else:
            message._held = held
        return message

    @property
    def payload(self) -> Any:
        """What was put."""
        return self._payload if self._held is None else self._held.payload

    def release(self) -> None:
        """Acknowledge the message. Arrays taken from it stay valid. Idempotent."""
        if self._held is not None:
            self._held.release()

    def detach(self) -> Any:
        """Acknowledge the message, and return a private, writable copy of its payload (``payload`` from now on)."""
        return self._payload if self._held is None else self._held.detach()

    def serialize(self) -> bytes:
        """The message as a pickle, with everything that its payload holds."""
        return pickle.dumps((self.payload, self.msg_id, self.timestamp, self.descriptor), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def deserialize(cls, data: bytes) -> Message:
        """What ``serialize`` made. Runs what the pickle says: only for bytes of those who may run code here."""
        try:
            return cls(*pickle.loads(data))
        except Exception as error:
            # Anybody's code, which raises anything.
            raise DecodeError(f"these {len(data)} bytes are no message: {type(error).__name__}: {error}") from error

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Message {self.msg_id}>" if self._held is None else f"<Message {self.msg_id}, {self._held!r}>"


def _descriptor(held: CoreMessage) -> Descriptor | None:
    if held._lease is None:
        return None
    reader = held._source.reader
    _, count, blob = reader.read(held._offset)
    return Descriptor(reader.name, sum(view.nbytes for view in reader.views(held._offset, len(blob), count)))
