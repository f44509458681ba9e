"""What workers write down so that it outlives them, in memory that they share with the supervisor.

The board is one anonymous file: a cell of words for each worker, and a journal for each consumer. A worker stores each
word or entry before (or after) the act that it speaks of; what a killed one had stored is there to be read.
"""

from __future__ import annotations

import mmap
import struct
import time
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shmq import fence

CELL_WORDS = 64
ENTRIES = 1 << 17

DELIVERED = 1
"""A message was taken, and is about to be looked at."""
RELEASED = 2
"""A message was given back."""
ASIDE = 3
"""A message was set aside: ``number`` is its sequence, ``nbytes`` its ring."""
DROPPED = 4
"""The publisher of the topic went on without this reader, which was told so."""

REDELIVERED = 1

ENTRY = struct.Struct("<BBHIQQQQ")
ENTRY_TYPE = np.dtype(
    [
        ("kind", "u1"),
        ("flags", "u1"),
        ("producer", "<u2"),
        ("life", "<u4"),
        ("number", "<u8"),
        ("nbytes", "<u8"),
        ("taken", "<u8"),
        ("latency", "<u8"),
    ]
)
"""One line of a journal. ``taken`` on the monotonic clock and ``latency`` since the put began, both in nanoseconds."""

Entries: TypeAlias = "NDArray[np.void]"

_PAUSE = 0.0005


class Cell:
    """The words of one worker. Each is stored by one side only."""

    # Stored by the supervisor.
    LIFE, FIRST, LAST, SEEN, STOP, ORDERS, ORDER, ORDER_NS = range(8)
    # Stored by the worker.
    BEGUN, RETURNED, RING, REFUSED = range(16, 20)
    # The journal's ends: the worker's, the supervisor's.
    HEAD, TAIL = 32, 33

    __slots__ = ("_base", "_words")

    def __init__(self, words: memoryview, index: int) -> None:
        self._words = words
        self._base = index * CELL_WORDS

    def __getitem__(self, word: int) -> int:
        value: int = self._words[self._base + word]
        return value

    def __setitem__(self, word: int, value: int) -> None:
        self._words[self._base + word] = value

    def clear(self) -> None:
        """Make all words zero, before a new life."""
        for word in range(CELL_WORDS):
            self[word] = 0


class Board:
    """The shared memory of a run: cells for producers and then for consumers, and then the journals."""

    def __init__(self, fd: int, producers: int, consumers: int) -> None:
        self._producers = producers
        self._start = mmap.PAGESIZE * -(-(producers + consumers) * CELL_WORDS * 8 // mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, self.nbytes(producers, consumers))
        self._words = memoryview(self._memory).cast("Q")

    @staticmethod
    def nbytes(producers: int, consumers: int) -> int:
        """How large the file has to be."""
        cells = mmap.PAGESIZE * -(-(producers + consumers) * CELL_WORDS * 8 // mmap.PAGESIZE)
        return cells + consumers * ENTRIES * ENTRY.size

    def cell(self, role: str, slot: int) -> Cell:
        """The cell of a worker; ``role`` is producer or consumer."""
        return Cell(self._words, slot if role == "producer" else self._producers + slot)

    def writer(self, slot: int) -> JournalWriter:
        """The journal of a consumer, for the consumer."""
        return JournalWriter(self._memory, self._start + slot * ENTRIES * ENTRY.size, self.cell("consumer", slot))

    def reader(self, slot: int) -> JournalReader:
        """The journal of a consumer, for the supervisor."""
        entries = np.frombuffer(self._memory, ENTRY_TYPE, ENTRIES, self._start + slot * ENTRIES * ENTRY.size)
        return JournalReader(entries, self.cell("consumer", slot))


class JournalWriter:
    """Appends to a journal; waits while it is full, until the supervisor has read on."""

    __slots__ = ("_cell", "_head", "_memory", "_room", "_start")

    def __init__(self, memory: mmap.mmap, start: int, cell: Cell) -> None:
        self._memory = memory
        self._start = start
        self._cell = cell
        self._head = cell[Cell.HEAD]
        self._room = 0

    def add(self, *entry: Any) -> None:
        """Append one entry (the fields of ``ENTRY``)."""
        while self._room == 0:
            self._room = ENTRIES - (self._head - self._cell[Cell.TAIL])
            if self._room == 0:
                time.sleep(_PAUSE)
        ENTRY.pack_into(self._memory, self._start + self._head % ENTRIES * ENTRY.size, *entry)
        self._head += 1
        self._room -= 1
        fence.publish()
        self._cell[Cell.HEAD] = self._head


class JournalReader:
    """Takes what was appended, in order."""

    def __init__(self, entries: Entries, cell: Cell) -> None:
        self._entries = entries
        self._cell = cell

    def take(self) -> Entries:
        """A copy of the entries that came since the last call."""
        tail, head = self._cell[Cell.TAIL], self._cell[Cell.HEAD]
        fence.observe()
        first, last = tail % ENTRIES, head % ENTRIES
        if tail == head:
            return self._entries[:0]
        if first < last:
            taken: Entries = self._entries[first:last].copy()
        else:
            taken = np.concatenate([self._entries[first:], self._entries[:last]])
        self._cell[Cell.TAIL] = head
        return taken
