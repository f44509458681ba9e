"""The ring in shared memory: one writer, views instead of copies, nothing lost when a process dies."""

from shmq.board import Board
from shmq.errors import (
    CorruptRecordError,
    ForeignSegmentError,
    LayoutVersionError,
    ReaderDroppedError,
    SegmentError,
    SegmentExistsError,
    SegmentLimitError,
    SegmentMissingError,
    SegmentSpaceError,
    ShmqError,
    TooLargeError,
    TruncatedSegmentError,
    ViewsHeldError,
)
from shmq.orphans import Finding, collect
from shmq.reader import Lease, Mappings, Record, RingReader, Taken
from shmq.segment import Segment
from shmq.topic import TopicReader, TopicWriter, claim_slot
from shmq.writer import Payload, RingWriter

__all__ = [
    "Board",
    "CorruptRecordError",
    "Finding",
    "ForeignSegmentError",
    "LayoutVersionError",
    "Lease",
    "Mappings",
    "Payload",
    "ReaderDroppedError",
    "Record",
    "RingReader",
    "RingWriter",
    "Segment",
    "SegmentError",
    "SegmentExistsError",
    "SegmentLimitError",
    "SegmentMissingError",
    "SegmentSpaceError",
    "ShmqError",
    "Taken",
    "TooLargeError",
    "TopicReader",
    "TopicWriter",
    "TruncatedSegmentError",
    "ViewsHeldError",
    "claim_slot",
    "collect",
]
