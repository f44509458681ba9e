"""Shared memory as several processors see it, one load and one store at a time.

A store first enters the buffer of its processor. Its own loads find it there, the others' do not, until it becomes
visible. Two models say when that is, and what a load may return:

*total store order* (x86-64; Intel SDM vol. 3A, 9.2)
    Stores become visible in their order, at any later time. A load returns what is visible now, or what stands in the
    processor's own buffer. A full fence empties the buffer.
*weak* (as aarch64, and weaker in some places)
    Stores to different words become visible in any order, those before a fence before those after it. A load may return
    what was visible at an earlier time, as long as no fence, no later value of the same word that was read already and
    no store of its own stands in between.

What became visible lies in one ``bytearray`` for each segment, so that arrays over it are real arrays.
"""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from typing import Any

from shmq.layout import DONE, FREE

WORD = 8
_BUFFERED = 40
"""How many stores wait in a processor, at most; it makes the oldest of them visible first."""
_STALE = 0.4
"""How often a load returns an old value where it may."""
_CHUNKS = 4
"""In how many pieces, at most, a long copy is made."""

Store = tuple["Shared", int, bytes]
"""(segment, first byte, what is stored)"""


class Shared:
    """The bytes of one segment, as visible to all. ``history`` is kept in the weak model only."""

    __slots__ = (
        "address",
        "history",
        "linked",
        "name",
        "number",
        "owner",
        "raw",
        "records",
        "released",
        "slots",
        "words",
    )

    def __init__(self, name: str, number: int, nbytes: int) -> None:
        self.name = name
        self.number = number
        self.raw = bytearray(nbytes)
        self.words = memoryview(self.raw).cast("Q")
        self.linked = True
        self.owner: object | None = None
        self.history: dict[int, list[tuple[int, int, Processor | None]]] = {}
        """For each word that changed: (time of the change, the value before, whose store it was)."""
        self.records: set[int] = set()
        self.released = 0
        """How many release bytes were stored that give something back."""
        self.slots: dict[int, Any] = {}
        """Which mapping holds the lock of a reader slot."""
        self.address = 0


class Clock:
    """The steps of a schedule: who takes one asks whether it may go on."""

    def __init__(self, rng: random.Random, weak: bool) -> None:
        self.random = rng.random
        self.weak = weak
        self.left = 0
        """Steps that the running process may take before the scheduler is asked."""
        self.visible = 0
        """Counts the stores that became visible."""
        self.ambush = 0.0
        """How often a process is stopped right after it loaded or stored a single word or byte: those matter."""
        self.trace: list[str] | None = None

    def lie_in_wait(self) -> None:
        """Stop the running process, and let the others see what it has left."""
        raise NotImplementedError

    def pause(self) -> None:
        """Called before a step when none is left."""
        raise NotImplementedError

    def note(self, what: str, shared: Shared, at: int, value: Any) -> None:
        """Add a load or store to the trace."""


class Processor:
    """What one process has in its processor: the stores that nobody else sees yet, and how old its loads may be."""

    __slots__ = ("_clock", "bounds", "buffer", "floor")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.buffer: list[Store] = []
        self.floor = 0
        """No load returns what was overwritten before this time: the last fence."""
        self.bounds: dict[tuple[int, int], int] = {}
        """The same for single words: (segment, word) to time."""

    def store(self, shared: Shared, at: int, data: bytes) -> None:
        """Take a store into the buffer."""
        buffer = self.buffer
        buffer.append((shared, at, data))
        if len(buffer) > _BUFFERED:
            self._show(*buffer.pop(0))

    def flush(self) -> None:
        """Make all stores visible."""
        if self.buffer:
            for store in self.buffer:
                self._show(*store)
            self.buffer.clear()

    def fence(self) -> None:
        """Order all before with all after."""
        self.flush()
        self.floor = self._clock.visible

    def show_one(self) -> None:
        """Make one word visible: the oldest, or in the weak model any that is no younger store of the same word."""
        buffer = self.buffer
        index = 0
        word = 0
        if self._clock.weak:
            index = int(self._clock.random() * len(buffer))
            shared, at, data = buffer[index]
            word = int(self._clock.random() * ((at + len(data) - 1) // WORD - at // WORD + 1))
            begin = max(at, at // WORD * WORD + word * WORD)
            for earlier in range(index):
                other, start, stored = buffer[earlier]
                if other is shared and start // WORD <= begin // WORD <= (start + len(stored) - 1) // WORD:
                    index, word = earlier, begin // WORD - start // WORD
                    break
        shared, at, data = buffer[index]
        begin = max(at, at // WORD * WORD + word * WORD)
        end = min(at + len(data), begin // WORD * WORD + WORD)
        self._show(shared, begin, data[begin - at : end - at])
        left = [(shared, at, data[: begin - at]), (shared, end, data[end - at :])]
        buffer[index : index + 1] = [store for store in left if store[2]]

    def _show(self, shared: Shared, at: int, data: bytes) -> None:
        clock = self._clock
        clock.visible += 1
        if clock.weak:
            words = shared.words
            for word in range(at // WORD, (at + len(data) - 1) // WORD + 1):
                shared.history.setdefault(word, []).append((clock.visible, words[word], self))
        shared.raw[at : at + len(data)] = data

    def seen(self, shared: Shared, word: int) -> int:
        """What a load of a word returns."""
        value = self._old(shared, word) if self._clock.weak else shared.words[word]
        if self.buffer:
            start = word * WORD
            for other, at, data in self.buffer:
                if other is shared and at < start + WORD and start < at + len(data):
                    value = self._forward(value, start, at, data)
        return value

    @staticmethod
    def _forward(value: int, start: int, at: int, data: bytes) -> int:
        known = bytearray(struct.pack("@Q", value))
        first, end = max(start, at), min(start + WORD, at + len(data))
        known[first - start : end - start] = data[first - at : end - at]
        return int(struct.unpack("@Q", known)[0])

    def _old(self, shared: Shared, word: int) -> int:
        value = shared.words[word]
        changes = shared.history.get(word)
        if changes is None or changes[-1][0] <= self.floor:
            return value
        key = shared.number, word
        low = max(self.floor, self.bounds.get(key, 0))
        first = len(changes)
        while first and changes[first - 1][0] > low and changes[first - 1][2] is not self:
            first -= 1
        if first == len(changes) or self._clock.random() >= _STALE:
            self.bounds[key] = self._clock.visible
            return value
        chosen = first + int(self._clock.random() * (len(changes) - first))
        self.bounds[key] = changes[chosen - 1][0] if chosen else 0
        return changes[chosen][1]


class Port:
    """One process's way to a segment: what ``Words`` and ``Memory`` have in common."""

    __slots__ = ("clock", "closed", "processor", "shared")

    def __init__(self, clock: Clock, processor: Processor, shared: Shared) -> None:
        self.clock = clock
        self.processor = processor
        self.shared = shared
        self.closed = False

    def close(self) -> None:
        """Unmap: every later access is a ValueError, as that of a closed mapping."""
        self.closed = True

    def _check(self) -> None:
        if self.closed:
            raise ValueError("the segment was unmapped")


class Words(Port):
    """Stands for ``Segment.words``."""

    __slots__ = ()

    def __getitem__(self, word: int) -> int:
        clock = self.clock
        clock.left -= 1
        if clock.left < 0:
            clock.pause()
        if self.closed:
            self._check()
        processor = self.processor
        direct = not (clock.weak or processor.buffer)
        value = self.shared.words[word] if direct else processor.seen(self.shared, word)
        if clock.trace is not None:
            clock.note("load", self.shared, word * WORD, value)
        if clock.ambush and clock.random() < clock.ambush:
            clock.lie_in_wait()
        return value

    def __setitem__(self, word: int, value: int) -> None:
        clock = self.clock
        clock.left -= 1
        if clock.left < 0:
            clock.pause()
        if self.closed:
            self._check()
        if clock.trace is not None:
            clock.note("store", self.shared, word * WORD, value)
        self.processor.store(self.shared, word * WORD, value.to_bytes(WORD, "little"))
        if clock.ambush and clock.random() < clock.ambush:
            clock.lie_in_wait()

    def release(self) -> None:
        """As of a memoryview."""


class Memory(Port):
    """Stands for ``Segment.memory``: single bytes and slices."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self.load_bytes(key.start, key.stop)
        word = self.load_record(key // WORD * WORD, WORD)
        clock = self.clock
        if clock.ambush and clock.random() < clock.ambush:
            clock.lie_in_wait()
        return word[key % WORD]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            self.store_bytes(key.start, value)
            return
        clock = self.clock
        clock.left -= 1
        if clock.left < 0:
            clock.pause()
        if self.closed:
            self._check()
        if clock.trace is not None:
            clock.note("store", self.shared, key, value)
        if value in (DONE, FREE):
            self.shared.released += 1
        self.processor.store(self.shared, key, bytes((value,)))

    def load_record(self, at: int, nbytes: int) -> bytes:
        """Load consecutive words, one by one."""
        clock = self.clock
        processor = self.processor
        shared = self.shared
        words = nbytes // WORD
        if clock.left >= words and not (clock.weak or processor.buffer or self.closed):
            # Nothing can come in between: the same in one go.
            clock.left -= words
            data = bytes(shared.raw[at : at + nbytes])
        else:
            parts = []
            for word in range(at // WORD, at // WORD + words):
                clock.left -= 1
                if clock.left < 0:
                    clock.pause()
                self._check()
                parts.append(processor.seen(shared, word).to_bytes(WORD, "little"))
            data = b"".join(parts)
        if clock.trace is not None:
            clock.note("load", shared, at, data)
        return data

    def store_record(self, at: int, data: bytes) -> None:
        """Store consecutive words, one by one."""
        clock = self.clock
        processor = self.processor
        words = len(data) // WORD
        self.shared.records.add(at)
        if clock.trace is not None:
            clock.note("store", self.shared, at, data)
        if clock.left >= words and not self.closed:
            clock.left -= words
            processor.store(self.shared, at, data)
            return
        for first in range(0, len(data), WORD):
            clock.left -= 1
            if clock.left < 0:
                clock.pause()
            self._check()
            processor.store(self.shared, at + first, data[first : first + WORD])

    def load_bytes(self, start: int, stop: int) -> bytes:
        """Load a stretch of bytes, in a few steps."""
        clock = self.clock
        shared = self.shared
        parts = []
        for first, end in _chunks(start, stop):
            clock.left -= 1
            if clock.left < 0:
                clock.pause()
            self._check()
            part = self._old_bytes(first, end) if clock.weak else bytearray(shared.raw[first:end])
            for other, at, stored in self.processor.buffer:
                if other is shared and at < end and first < at + len(stored):
                    low, high = max(first, at), min(end, at + len(stored))
                    part[low - first : high - first] = stored[low - at : high - at]
            parts.append(part)
        data = b"".join(parts)
        if clock.trace is not None:
            clock.note("load", shared, start, data)
        return data

    def _old_bytes(self, first: int, end: int) -> bytearray:
        shared, processor = self.shared, self.processor
        data = bytearray(shared.raw[first:end])
        floor = processor.floor
        for word in range(first // WORD, (end - 1) // WORD + 1):
            changes = shared.history.get(word)
            if changes is not None and changes[-1][0] > floor:
                value = processor.seen(shared, word).to_bytes(WORD, "little")
                low, high = max(first, word * WORD), min(end, word * WORD + WORD)
                data[low - first : high - first] = value[low - word * WORD : high - word * WORD]
        return data

    def store_bytes(self, start: int, data: bytes) -> None:
        """Store a stretch of bytes, in a few steps."""
        clock = self.clock
        if clock.trace is not None and len(data):
            clock.note("store", self.shared, start, data)
        stop = start + len(data)
        chunks = _chunks(start, stop)
        if clock.ambush and clock.random() < 0.5:
            # Cut what was a header between its position and the rest.
            cuts = {start, stop, *(at + WORD for at in self.shared.records if start < at + WORD < stop)}
            chunks = list(pairwise(sorted(cuts)))
        if clock.random() < 0.5:
            # A memcpy copies in whatever order it likes.
            chunks.reverse()
        for first, end in chunks:
            clock.left -= 1
            if clock.left < 0:
                clock.pause()
            self._check()
            self.processor.store(self.shared, first, data[first - start : end - start])
            if clock.ambush and clock.random() < clock.ambush:
                clock.lie_in_wait()


class Readonly:
    """Stands for ``memoryview(segment.memory).toreadonly()``."""

    def __init__(self, memory: Memory) -> None:
        self.shared = memory.shared

    def toreadonly(self) -> Readonly:
        """Itself."""
        return self

    def release(self) -> None:
        """As of a memoryview."""


class WordStruct:
    """Stands for a ``struct.Struct`` of words that is packed into memory, or unpacked, one word at a time."""

    def __init__(self, real: struct.Struct) -> None:
        self.size = real.size
        self.pack = real.pack
        self._unpack = real.unpack

    def pack_into(self, memory: Memory, at: int, *values: int) -> None:
        """Store the values."""
        memory.store_record(at, self.pack(*values))

    def unpack_from(self, memory: Memory, at: int) -> tuple[Any, ...]:
        """Load the values."""
        return self._unpack(memory.load_record(at, self.size))


def _chunks(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut a stretch of bytes into a few, at words."""
    if stop - start <= WORD:
        return [(start, stop)] if stop > start else []
    size = max(WORD, ((stop - start) // _CHUNKS + WORD - 1) // WORD * WORD)
    cuts = [start, *range(start // WORD * WORD + size, stop, size), stop]
    return list(pairwise(cuts))
