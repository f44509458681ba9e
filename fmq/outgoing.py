"""A message on its way into a ring: encoded, given places, copied, posted.

The steps are apart so that whoever drives them can wait between them, and the long one, the copy, needs no lock:

    place   (lock held)   reserve a payload for each large buffer; False: no room, wait and call again
    copy    (no lock)     move the bytes
    post    (lock held)   write the MESSAGE record; None: no room, wait and call again
    finish  (lock held)   let go of the payloads: sent if the message was posted, else given back
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fmq import codec
from fmq.encoding import BLOB_LAST
from shmq import Payload, RingWriter, TooLargeError
from shmq.layout import align
from shmq.writer import Slice, record_length

INLINE_BYTES = 8192
"""Buffers up to this size are copied into the MESSAGE record itself."""

Array = NDArray[Any]


class Loans:
    """The arrays that were lent out over payloads of one ring, to be found again by where they lie in memory."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._loans: dict[int, tuple[int, Payload]] = {}

    def add(self, root: NDArray[np.uint8], payload: Payload) -> None:
        """Remember a loan, and forget those whose arrays are gone. The producer's lock is held."""
        alive = {start: loan for start, loan in self._loans.items() if loan[1].array() is not None}
        start = _address(root)
        alive[start] = (start + root.nbytes, payload)
        self._loans = alive
        self._starts = sorted(alive)

    def __len__(self) -> int:
        return len(self._starts)

    def find(self, array: Array) -> Slice | None:
        """(payload, first byte, bytes) if the array is a C-contiguous view of a loan that is alive."""
        if not array.flags.c_contiguous:
            return None
        address = _address(array)
        starts = self._starts
        index = bisect.bisect_right(starts, address) - 1
        loan = self._loans.get(starts[index]) if index >= 0 else None
        if loan is None or address + array.nbytes > loan[0] or loan[1].array() is None:
            return None
        return loan[1], address - starts[index], array.nbytes


class Outgoing:
    """One message between ``put`` and the ring.

    ``expires`` in nanoseconds of the monotonic clock, 0 for never. Raises TooLargeError if no record can describe it.
    """

    __slots__ = (
        "_blob",
        "_buffers",
        "_encoding",
        "_expires",
        "_places",
        "_reserved",
        "_timestamp",
        "_to_copy",
        "_writer",
        "array_bytes",
        "copied_bytes",
        "long_copy_bytes",
        "posted",
    )

    def __init__(
        self, writer: RingWriter, loans: Loans, encoding: int, blob: bytes, buffers: list[Array], expires: int
    ) -> None:
        self._writer = writer
        self._encoding = encoding
        self._blob = blob
        self._buffers = buffers
        self._expires = expires
        # Now, and not when it is posted: waiting for room and copying are part of the time that it takes.
        self._timestamp = time.time_ns()
        self._reserved: list[Payload] = []
        self._to_copy: list[tuple[Array, Payload]] = []
        self.posted = False
        inline = min(INLINE_BYTES, writer.max_record // 4)
        if len(blob) > max(inline, writer.max_record // 2):
            self._buffers = [*buffers, np.frombuffer(blob, np.uint8)]
            self._encoding |= BLOB_LAST
            self._blob = b""
        room = writer.max_record - record_length(len(self._blob), len(self._buffers))
        if room < 0:
            raise TooLargeError(
                f"a message with {len(buffers):,} arrays is too much for a ring of {writer.size:,} bytes; raise "
                "ring_size, or stack the arrays into fewer"
            )
        self.array_bytes = self.copied_bytes = self.long_copy_bytes = 0
        self._places: list[Slice | int | None] = []
        for buffer in self._buffers:
            nbytes = buffer.nbytes
            place: Slice | int | None = loans.find(buffer) if loans else None
            if place is None:
                self.copied_bytes += nbytes
                if nbytes <= inline and (room := room - align(nbytes)) >= 0:
                    place = nbytes
                else:
                    self.long_copy_bytes += nbytes
            self.array_bytes += nbytes
            self._places.append(place)

    @property
    def large(self) -> list[int]:
        """The sizes of the buffers that need a payload."""
        return [buffer.nbytes for buffer, place in zip(self._buffers, self._places, strict=True) if place is None]

    def place(self, spill: bool = False) -> bool:
        """Reserve a place for each large buffer, or for none of them: False if there is no room now. The lock is held.

        Arrays that fit the ring one by one, but not together, spill; with ``spill`` also what has no room now.
        """
        if self._reserved:
            return True
        reserved: list[Payload | None] = []
        try:
            complete = self._reserve(reserved, spill)
        except BaseException:
            self._give_back(reserved)
            raise
        if not complete:
            # Not kept while we wait: it might be in our own way, or in that of another put that waits.
            self._give_back(reserved)
            return False
        for index, payload in enumerate(reserved):
            if payload is not None:
                buffer = self._buffers[index]
                self._places[index] = (payload, 0, buffer.nbytes)
                self._reserved.append(payload)
                self._to_copy.append((buffer, payload))
        return True

    def _reserve(self, reserved: list[Payload | None], spill: bool) -> bool:
        """Append a payload, or None if it needs none, for each buffer. False if there is no room for the next one."""
        writer = self._writer
        in_ring, in_spills = writer.max_payload, writer.spill_limit
        for buffer, place in zip(self._buffers, self._places, strict=True):
            payload = None
            if place is None:
                nbytes = buffer.nbytes
                if nbytes <= in_ring:
                    in_ring -= nbytes
                    payload = writer.reserve(nbytes)
                    if payload is None and spill:
                        payload = writer.reserve_spill_if_possible(nbytes)
                else:
                    in_spills -= nbytes
                    if in_spills < 0 and nbytes <= writer.spill_limit:
                        raise TooLargeError(
                            f"a message with {self.long_copy_bytes:,} bytes of large arrays is too much for a ring of "
                            f"{writer.size:,} bytes (which takes {writer.max_payload:,} of them) and spill segments of "
                            f"{writer.spill_limit:,}; raise ring_size or spill_limit, or send it in parts"
                        )
                    payload = writer.reserve_spill(nbytes)
                if payload is None:
                    return False
            reserved.append(payload)
        return True

    def _give_back(self, payloads: Sequence[Payload | None]) -> None:
        for payload in payloads:
            if payload is not None:
                self._writer.let_go(payload)

    def copy(self) -> None:
        """Copy the large buffers into their places. Needs no lock, and leaves the interpreter lock to other threads."""
        for buffer, payload in self._to_copy:
            codec.copy_buffer(buffer, self._writer.target(payload))
        self._to_copy = []

    def post(self) -> int | None:
        """Write the MESSAGE and return its sequence, or None if there is no room now; the lock is held."""
        writer = self._writer
        if not self._buffers:
            sequence = writer.post(self._blob, self._encoding, self._timestamp, self._expires)
        else:
            places = cast("list[Slice | int]", self._places)
            sequence = writer.post_with(self._blob, self._encoding, self._timestamp, self._expires, places, self._copy)
        if sequence is not None:
            self.posted = True
            if self.array_bytes != self.copied_bytes:
                self._freeze_loans()
        return sequence

    def finish(self) -> None:
        """Let go of the payloads, whether the message was posted or not; the lock is held. Idempotent."""
        self._give_back(self._reserved)

    def _copy(self, index: int, target: NDArray[np.uint8]) -> None:
        codec.copy_buffer(self._buffers[index], target)

    def _freeze_loans(self) -> None:
        for buffer, place in zip(self._buffers, self._places, strict=True):
            if isinstance(place, tuple) and (root := place[0].array()) is not None:
                # The consumer reads it from now on. Earlier views of the loan can't be reached; see Producer.empty.
                buffer.setflags(write=False)
                root.setflags(write=False)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
