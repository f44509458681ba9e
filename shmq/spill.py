"""Spill segments: a segment of its own for a payload that the ring can't take, pooled and used again.

They are named after their ring and belong to its owner: when the ring goes, so do they.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from shmq import layout
from shmq.errors import SegmentSpaceError
from shmq.segment import Segment, unlink


class Spill:
    """One spill segment. ``generation`` counts its uses, so that a reference to an earlier use is recognised."""

    __slots__ = ("capacity", "generation", "number", "segment")

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.capacity = segment.payload_bytes
        self.generation = 0


class SpillPool:
    """The spill segments of one ring's writer. The caller holds the ring's lock; ``limit`` bounds their bytes."""

    def __init__(self, ring: str, ring_id: bytes, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._ring = ring
        self._ring_id = ring_id
        self._numbers = itertools.count(1)
        self._closed = False
        self._idle: list[Spill] = []
        self._all: set[Spill] = set()

    def take(self, nbytes: int) -> Spill | None:
        """A spill segment that holds at least ``nbytes``, or None if the limit allows no further one now.

        Raises SegmentSpaceError when the shared-memory directory is full and no idle segment can make room.
        """
        fitting = [spill for spill in self._idle if nbytes <= spill.capacity]
        if fitting:
            spill = min(fitting, key=_capacity)
            if spill.capacity <= 2 * nbytes or self.bytes + nbytes > self.limit:
                self._idle.remove(spill)
                return self._use(spill)
        capacity = _round_up(nbytes)
        while self._idle and self.bytes + capacity > self.limit:
            self._remove(self._idle[0])
        # Room for more of nearly the same size only if there is any.
        capacity = max(nbytes, min(capacity, self.limit - self.bytes))
        if self.bytes + capacity > self.limit:
            return None
        while True:
            try:
                return self._use(self._create(capacity))
            except SegmentSpaceError:
                if not self._idle:
                    raise
                self._remove(self._idle[0])

    def missing(self, sizes: Iterable[int]) -> list[int]:
        """The capacities of the segments that ``take`` would have to make for payloads of these sizes."""
        idle = sorted(spill.capacity for spill in self._idle)
        missing: list[int] = []
        for nbytes in sizes:
            fitting = [capacity for capacity in idle if nbytes <= capacity <= 2 * nbytes]
            if fitting:
                idle.remove(fitting[0])
            elif self.bytes + sum(missing) + _round_up(nbytes) <= self.limit:
                missing.append(_round_up(nbytes))
        return missing

    def make(self, capacity: int) -> Spill:
        """Make a segment, to be handed to ``add``. Takes a while (a second for a GiB), and needs no lock.

        Raises SegmentSpaceError.
        """
        number = next(self._numbers)
        segment = Segment.create(f"{self._ring}.{number}", capacity, magic=layout.SPILL_MAGIC, ring_id=self._ring_id)
        return Spill(number, segment)

    def add(self, spill: Spill) -> None:
        """Keep what ``make`` made for the payload that it was made for, unless there is no room for it any more."""
        if self._closed or self.bytes + spill.capacity > self.limit:
            unlink(spill.segment.name)
            spill.segment.close()
        else:
            self._keep(spill)
            self._idle.append(spill)

    def give_back(self, spill: Spill) -> None:
        """Keep a spill segment for the next payload."""
        if spill in self._all:
            self._idle.append(spill)

    def close(self, *, remove: bool) -> None:
        """Let go of all; with ``remove`` also give up their names."""
        self._closed = True
        for spill in self._all:
            if remove:
                unlink(spill.segment.name)
            spill.segment.retire()
        self._all.clear()
        self._idle.clear()

    def _use(self, spill: Spill) -> Spill:
        spill.generation = (spill.generation + 1) & 0xFFFFFFFF
        spill.segment.words[layout.GENERATION] = spill.generation
        return spill

    def _create(self, capacity: int) -> Spill:
        spill = self.make(capacity)
        self._keep(spill)
        return spill

    def _keep(self, spill: Spill) -> None:
        self._all.add(spill)
        self.bytes += spill.capacity

    def _remove(self, spill: Spill) -> None:
        self._idle.remove(spill)
        self._all.discard(spill)
        self.bytes -= spill.capacity
        unlink(spill.segment.name)
        spill.segment.close()


def _capacity(spill: Spill) -> int:
    return spill.capacity


def _round_up(nbytes: int) -> int:
    """Up to an eighth more, so that payloads of nearly one size share segments."""
    granule = max(layout.PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return layout.align(max(nbytes, 1), granule)
