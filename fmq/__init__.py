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
from fmq.topics import AsyncPublisher, AsyncSubscriber, Publisher, Subscriber
from shmq.errors import (
    CorruptRecordError,
    ReaderDroppedError,
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
    "AsyncPublisher",
    "AsyncSubscriber",
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
    "Publisher",
    "QueueEmptyError",
    "QueueFullError",
    "QueueInUseError",
    "QueueNameError",
    "QueueTimeoutError",
    "ReaderDroppedError",
    "SegmentError",
    "SegmentLimitError",
    "SegmentSpaceError",
    "SetAside",
    "ShmqError",
    "Subscriber",
    "TooLargeError",
    "ViewsHeldError",
    "exit_on_signals",
]
