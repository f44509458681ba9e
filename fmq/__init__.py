"""The message queue: rings in shared memory, ZeroMQ messages as doorbells."""

from fmq.consumer import AsyncConsumer, Consumer
from fmq.errors import (
    ClosedError,
    CodecRefusedError,
    DecodeError,
    DTypeError,
    EncodeError,
    FmqError,
    ForkedError,
    PeerUnavailableError,
    ProtocolError,
    QueueEmptyError,
    QueueFullError,
    QueueInUseError,
    QueueNameError,
    QueueTimeoutError,
)
from fmq.lifetime import exit_on_signals
from fmq.message import Message, SetAside
from fmq.producer import AsyncProducer, Producer
from shmq.errors import (
    CorruptRecordError,
    SegmentError,
    SegmentLimitError,
    SegmentSpaceError,
    ShmqError,
    TooLargeError,
    ViewsHeldError,
)

__all__ = [
    "AsyncConsumer",
    "AsyncProducer",
    "ClosedError",
    "CodecRefusedError",
    "Consumer",
    "CorruptRecordError",
    "DTypeError",
    "DecodeError",
    "EncodeError",
    "FmqError",
    "ForkedError",
    "Message",
    "PeerUnavailableError",
    "Producer",
    "ProtocolError",
    "QueueEmptyError",
    "QueueFullError",
    "QueueInUseError",
    "QueueNameError",
    "QueueTimeoutError",
    "SegmentError",
    "SegmentLimitError",
    "SegmentSpaceError",
    "SetAside",
    "ShmqError",
    "TooLargeError",
    "ViewsHeldError",
    "exit_on_signals",
]
