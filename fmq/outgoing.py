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
        self._loans: list[tuple[int, Payload]] = []

    def add(self, root: NDArray[np.uint8], payload: Payload) -> None:
        """Remember a loan, and forget those whose arrays are gone."""
        loans = zip(self._starts, self._loans, strict=True)
        alive = [(start, loan) for start, loan in loans if loan[1].array() is not None]
        start = _address(root)
        alive.append((start, (start + root.nbytes, payload)))
        alive.sort(key=_start)
        self._starts = [start for start, _ in alive]
        self._loans = [loan for _, loan in alive]

    def find(self, array: Array) -> tuple[Payload, int, int] | None:
        """(payload, first byte, bytes) if the array is a C-contiguous view of a loan that is alive."""
        if not self._starts or not array.flags.c_contiguous:
            return None
        start = _address(array)
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0:
            return None
        end, payload = self._loans[index]
        if start + array.nbytes > end or payload.array() is None:
            return None
        return payload, start - self._starts[index], array.nbytes


class Outgoing:
    """One message between ``put`` and the ring.

    ``expires`` in nanoseconds of the monotonic clock, 0 for never. Raises TooLargeError if no record can describe it.
    """

    __slots__ = (
        "_blob",
        "_buffers",
        "_copies",
        "_encoding",
        "_expires",
        "_places",
        "_writer",
        "array_bytes",
        "copied_bytes",
        "long_copy_bytes",
    )

    def __init__(
        self, writer: RingWriter, loans: Loans, encoding: int, blob: bytes, buffers: list[Array], expires: int
    ) -> None:
        self._writer = writer
        self._encoding = encoding
        self._blob = blob
        self._buffers = buffers
        self._expires = expires
        self._places: list[Slice | int | None] = [loans.find(buffer) for buffer in buffers]
        self._copies: list[tuple[Array, Payload]] = []
        self.array_bytes = sum(buffer.nbytes for buffer in buffers)
        self.copied_bytes = sum(
            buffer.nbytes for buffer, place in zip(buffers, self._places, strict=True) if place is None
        )
        self._choose_small()
        self.long_copy_bytes = sum(
            buffer.nbytes for buffer, place in zip(self._buffers, self._places, strict=True) if place is None
        )
        """How many bytes ``copy`` will move; small buffers are copied by ``post``."""

    def _choose_small(self) -> None:
        """Decide what is kept in the record: the small buffers, the smallest first, as long as there is room."""
        writer = self._writer
        inline = min(INLINE_BYTES, writer.max_record // 4)
        if len(self._blob) > max(inline, writer.max_record // 2):
            self._buffers.append(np.frombuffer(self._blob, np.uint8))
            self._places.append(None)
            self._encoding |= BLOB_LAST
            self._blob = b""
        room = writer.max_record - record_length(len(self._blob), self._places)
        if room < 0:
            raise TooLargeError(
                f"a message with {len(self._buffers):,} arrays is too much for a ring of {writer.size:,} bytes; raise "
                "ring_size, or stack the arrays into fewer"
            )
        small = [(buffer.nbytes, index) for index, buffer in enumerate(self._buffers) if self._places[index] is None]
        for nbytes, index in sorted(small):
            room -= align(nbytes)
            if nbytes > inline or room < 0:
                break
            self._places[index] = nbytes

    def place(self) -> bool:
        """Reserve what is still without a place. False if there is no room for the next one now; the lock is held."""
        for index, place in enumerate(self._places):
            if place is None:
                buffer = self._buffers[index]
                payload = self._writer.reserve(buffer.nbytes)
                if payload is None:
                    return False
                self._places[index] = (payload, 0, buffer.nbytes)
                self._copies.append((buffer, payload))
        return True

    def copy(self) -> None:
        """Copy the large buffers into their places. Needs no lock; releases the interpreter lock while it copies."""
        for buffer, payload in self._copies:
            codec.copy_buffer(buffer, self._writer.target(payload))

    def post(self) -> int | None:
        """Write the MESSAGE and return its sequence, or None if there is no room now; the lock is held."""
        writer = self._writer
        if not self._buffers:
            return writer.post(self._blob, self._encoding, time.time_ns(), self._expires)
        sequence = writer.post_with(
            self._blob,
            self._encoding,
            time.time_ns(),
            self._expires,
            cast("list[Slice | int]", self._places),
            self._copy,
        )
        if sequence is not None:
            self._freeze_loans()
        return sequence

    def finish(self) -> None:
        """Let go of the payloads, whether the message was posted or not; the lock is held. Idempotent."""
        for _, payload in self._copies:
            self._writer.let_go(payload)

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


def _start(loan: tuple[int, tuple[int, Payload]]) -> int:
    return loan[0]
