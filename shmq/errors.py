"""What can go wrong with a ring or a segment. Every error of this package is a ``ShmqError``."""

from __future__ import annotations


class ShmqError(Exception):
    """The root of all errors of shmq and of the packages that stand on it."""


class SegmentError(ShmqError):
    """A shared-memory segment can't be made or used."""


class SegmentMissingError(SegmentError):
    """There is no segment of that name: its owner has removed it, or it never was."""


class SegmentExistsError(SegmentError):
    """A segment of that name is there already; nothing was touched."""


class SegmentSpaceError(SegmentError):
    """The shared-memory directory has no room for the bytes that were asked for."""


class SegmentLimitError(SegmentError):
    """This process, or the host, has reached a limit: of descriptors, of address space. The segment is not to blame."""


class ForeignSegmentError(SegmentError):
    """The file under the segment's name was not made by shmq."""


class LayoutVersionError(SegmentError):
    """The segment was made by a version of shmq whose byte layout differs from this one's."""


class TruncatedSegmentError(SegmentError):
    """The segment's file is shorter (or longer) than its own header says."""


class CorruptRecordError(ShmqError):
    """A record holds a length, position or reference that can't be true.

    ``ring`` names the segment, ``position`` is where in it the record starts.
    """

    def __init__(self, message: str, *, ring: str = "", position: int = -1) -> None:
        super().__init__(message)
        self.ring = ring
        self.position = position


class ReaderDroppedError(ShmqError):
    """A reader of a topic was too slow, and its publisher went on without it. It has joined again, at the newest."""


class TooLargeError(ShmqError):
    """The payload can never fit: neither the ring nor a spill segment may hold it."""


class ViewsHeldError(ShmqError):
    """Memory can't be given back, because arrays that look into it are still alive."""
