"""What is measured while a run goes on: latencies, the rings from outside, the workers' memory and descriptors."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmq import layout
from shmq.segment import DIRECTORY

_SUB_BITS = 6
_BUCKETS = (64 - _SUB_BITS) << _SUB_BITS
_POINTS = 1200


class Histogram:
    """Counts of values, in buckets whose width is at most 1/64 of the value: the idea of HdrHistogram (Gil Tene).

    Not the package hdrhistogram, which records one value a call (about 1 us): here a whole journal is recorded at once.
    """

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(_BUCKETS, np.int64)
        self.largest = 0

    def add(self, values: NDArray[np.uint64]) -> None:
        """Count some values."""
        if len(values):
            exponents = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1
            shifts = np.maximum(exponents - _SUB_BITS, 0)
            indices = (shifts << _SUB_BITS) + (values.astype(np.int64) >> shifts)
            self.counts += np.bincount(indices, minlength=_BUCKETS)
            self.largest = max(self.largest, int(values.max()))

    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    def percentile(self, percent: float) -> float:
        """The value that so many percent do not exceed, within 1/64; 0 if there are none."""
        total = self.total()
        if total == 0:
            return 0.0
        rank = max(1, int(np.ceil(total * percent / 100)))
        index = int(np.searchsorted(np.cumsum(self.counts), rank))
        return float(min(self._bounds(index)[1], self.largest))

    def buckets(self) -> list[tuple[float, float, int]]:
        """(lower bound, upper bound, count) of every bucket that holds something."""
        return [(*self._bounds(int(index)), int(self.counts[index])) for index in np.flatnonzero(self.counts)]

    @staticmethod
    def _bounds(index: int) -> tuple[float, float]:
        shift = max(0, (index >> _SUB_BITS) - 1)
        low = index - (shift << _SUB_BITS)
        return float(low << shift), float(low + 1 << shift)


class RingGauge:
    """The header of one ring, from outside: stays readable when the ring is removed. Raises FileNotFoundError."""

    def __init__(self, name: str) -> None:
        self._fd = os.open(os.path.join(DIRECTORY, name), os.O_RDONLY | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._fd, layout.HEADER_BYTES, prot=mmap.PROT_READ)
        self._size = self[layout.RING_SIZE]

    def __getitem__(self, word: int) -> int:
        value: int = struct.unpack_from("@Q", self._memory, 8 * word)[0]
        return value

    def is_linked(self) -> bool:
        """Whether the ring still has its name."""
        return os.fstat(self._fd).st_nlink > 0

    def fill(self) -> float:
        """How much of the ring lies between its oldest record in use and its end, from 0 to 1."""
        tail = self[layout.TAIL]
        behind = (self[layout.HEAD] // layout.ALIGN - (tail >> 30)) % (1 << 34) * layout.ALIGN
        return min(1.0, behind / self._size)

    def readers(self) -> list[int]:
        """The processes of a topic's readers that have joined, some of which may be gone."""
        joined, pids = (
            struct.unpack_from(f"@{layout.SLOTS}Q", self._memory, 8 * word) for word in (layout.JOINED, layout.SLOT_PID)
        )
        return [pid for number, pid in zip(joined, pids, strict=True) if number]

    def close(self) -> None:
        """Let go of the ring."""
        self._memory.close()
        os.close(self._fd)


class Sample(msgspec.Struct, frozen=True):
    """One moment: seconds since the start, what was delivered in the ``span`` before it, and how things stand.

    ``fill`` of the fullest ring (0 to 1), ``p50`` and ``p99`` latency of the span in seconds, ``shm`` bytes of all
    segments, ``memory`` bytes of private memory and ``descriptors`` of the worker of each role that has the most.
    """

    at: float
    span: float
    messages: int
    nbytes: int
    fill: float
    p50: float
    p99: float
    shm: int
    producer_memory: int
    consumer_memory: int
    producer_descriptors: int
    consumer_descriptors: int

    def joined(self, later: Sample) -> Sample:
        """The two as one, for a coarser series: sums of what is counted, the larger of what is measured."""
        values = {
            name: max(getattr(self, name), getattr(later, name))
            for name in self.__struct_fields__
            if name not in ("at", "span", "messages", "nbytes")
        }
        return Sample(
            at=later.at,
            span=self.span + later.span,
            messages=self.messages + later.messages,
            nbytes=self.nbytes + later.nbytes,
            **values,
        )


def thinned(samples: list[Sample], most: int) -> list[Sample]:
    """No more than ``most`` samples, each of as many in a row as it takes."""
    every = -(-len(samples) // most)
    return [_join(samples[start : start + every]) for start in range(0, len(samples), max(1, every))]


class Series:
    """Samples of a run of any length, in bounded memory: when there are too many, pairs become one."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.recent: deque[Sample] = deque(maxlen=8)
        self._every = 1
        self._open: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Append a sample."""
        self.recent.append(sample)
        self._open.append(sample)
        if len(self._open) == self._every:
            self.samples.append(_join(self._open))
            self._open = []
        if len(self.samples) >= _POINTS:
            self.samples = [_join(self.samples[start : start + 2]) for start in range(0, len(self.samples), 2)]
            self._every *= 2

    def all(self) -> list[Sample]:
        """The samples, oldest first, with those not yet joined."""
        return self.samples + ([_join(self._open)] if self._open else [])


def _join(samples: list[Sample]) -> Sample:
    joined = samples[0]
    for sample in samples[1:]:
        joined = joined.joined(sample)
    return joined


def private_memory(pid: int) -> int:
    """Bytes of memory that are the process's own, shared mappings left out; 0 if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def descriptors(pid: int) -> int:
    """How many file descriptors a process has; 0 if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0
