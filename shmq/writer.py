"""The writing side of a ring: reserve, commit, abort, post, reclaim.

One process writes a ring, and within it one thread at a time: the caller holds a lock around every method here (the
copy into a reserved payload needs none). No method waits: what has no room returns None, and the caller decides.

How space is found. Records follow each other in a *chain*. The chain runs through one or more *extents*, stretches of
the ring without a hole; a JUMP at the end of an extent leads to the next. Whatever lies between the extents is free.
The writer appends at the end of the last extent, and turns to another stretch when

* the extent has become long enough (``lap``) and the start of the ring is free: the next records then land in memory
  that is still in the processor's cache (*short laps*; a cold ring of 256 MiB is several times slower), or
* what is ahead is too small.

How space comes back. Readers free messages in any order. ``reclaim`` moves the tail over what is free at the front of
the chain. If that yields too little, because something old is still held, ``fold`` takes the free stretches in the
middle: a run of free records becomes one JUMP over them. So a message that is held for hours costs its own bytes only.

A header that is taken back is marked invalid before anything is written over it. A reader that looks at a record
therefore reads the header and then looks at its position once more: if that still stands, the header was whole.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shmq import fence
from shmq.errors import SegmentError, SegmentSpaceError, TooLargeError
from shmq.fence import TOTAL_STORE_ORDER
from shmq.layout import (
    ABORTED,
    ALIGN,
    ASLEEP,
    COMMITTED,
    DESCRIPTOR_WORD,
    DONE,
    DOORBELLS,
    EPOCH,
    FOLDS,
    FREE,
    HEAD,
    HEADER_BYTES,
    HIGH_WATER,
    IN_RECORD,
    IN_RING,
    IN_SPILL,
    INVALID_POSITION,
    JUMP,
    JUMP_OTHER,
    JUMP_TARGET_WORD,
    MAX_LENGTH,
    MAX_RING_SIZE,
    MESSAGE,
    NEW_RECORD,
    NEXT_SEQUENCE,
    PAYLOAD,
    PENDING,
    RECORD_BYTES,
    REFERENCE,
    RELEASE_BYTE,
    RESERVED,
    SEQUENCE_WORD,
    SET_ASIDE,
    SPILLED_BYTES,
    SPILLS,
    STALLS,
    TAIL,
    TURNS,
    WANTED,
    align,
    descriptor,
    pack_tail,
)
from shmq.segment import Segment, unlink
from shmq.spill import Spill, SpillPool

MIN_RING_SIZE = 64 * 1024
LAP_BYTES = 1024 * 1024
"""A lap is at least this long."""
MAX_SHARE = 256 * 1024
"""Bytes of the ring, at most, that payloads leave to the messages that announce them."""

Bytes: TypeAlias = "NDArray[np.uint8]"
Slice: TypeAlias = "tuple[Payload, int, int]"
"""(payload, first byte, number of bytes): what a message refers to."""

_MESSAGE = descriptor(MESSAGE, COMMITTED, 0)
_RECORD_AND_ALIGN = RECORD_BYTES + ALIGN - 1


class Payload:
    """One large buffer that messages refer to, in the ring or in a spill segment (``spill``).

    Its space comes back when all ``messages`` (their offsets) are free and nobody holds its array any more (``held``).
    """

    __slots__ = ("__weakref__", "_root", "held", "messages", "nbytes", "offset", "position", "spill", "state")

    def __init__(self, nbytes: int, offset: int, position: int, spill: Spill | None) -> None:
        self.nbytes = nbytes
        self.offset = offset
        self.position = position
        self.spill = spill
        self.state = RESERVED
        self.held = True
        self.messages: set[int] = set()
        self._root: weakref.ref[Bytes] | None = None

    def array(self) -> Bytes | None:
        """The loan over this payload, if it was handed out and is still alive."""
        return None if self._root is None else self._root()

    def reference(self, start: int, nbytes: int) -> bytes:
        """The reference by which a message names ``nbytes`` of this payload, beginning at byte ``start``."""
        if self.spill is not None:
            return REFERENCE.pack(IN_SPILL << 56, self.spill.number << 32 | self.spill.generation, start, nbytes)
        return REFERENCE.pack(IN_RING << 56 | self.offset, self.position, start, nbytes)


_Entry: TypeAlias = "tuple[int, int, int, Payload | None, tuple[Payload, ...], int]"
"""A record that is not yet reclaimed: (offset, bytes of the ring, position, the payload that it is or None, the
payloads that it refers to, the offset where a JUMP goes on or -1). An object would cost each message 0.2 us more."""


class RingWriter:
    """Writes one ring. See the module's text for the rules; ``segment`` must be owned by this process.

    ``spill_limit`` bounds the bytes of all spill segments together; ``lap`` is the shortest lap in bytes. Raises
    SegmentError for a ring size that is not between 64 KiB and 64 GiB.
    """

    _mark = HEADER_BYTES + RELEASE_BYTE
    """Added to a message's offset: where in the segment it says whether the message is free."""

    def __init__(self, segment: Segment, *, spill_limit: int, lap: int = LAP_BYTES) -> None:
        self.segment = segment
        self.size = segment.payload_bytes
        check_ring_size(self.size)
        self._memory = segment.memory
        self._words = segment.words
        self._position = 0
        self._offset = 0
        self._limit = self.size
        self._sequence = 0
        self._chain: deque[_Entry] = deque()
        self._extents: deque[list[int]] = deque([[0, 0]])
        self._lap = min(self.size // 2, lap)
        self._turn_at = self._lap
        self._share = min(MAX_SHARE, self.size // 8)
        self._spills = SpillPool(segment.name, segment.ring_id, spill_limit)
        self._spilled: set[Payload] = set()
        self._dropped: deque[Payload] = deque()
        self.max_record = self._share // 2
        """The longest MESSAGE record in bytes; what is larger has to lie in payloads."""
        self.max_payload = self.size // 2 - self._share - 4 * RECORD_BYTES
        """The longest payload in bytes that the ring itself takes; what is larger spills."""

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, blob: bytes, encoding: int, timestamp: int, expires: int = 0) -> int | None:
        """Append a MESSAGE that is all blob, and announce it. Returns its sequence, or None if there is no room.

        ``timestamp`` in nanoseconds since the epoch; ``expires`` in nanoseconds of the monotonic clock, 0 for never.
        """
        try:
            nbytes = len(blob)
            length = (nbytes + _RECORD_AND_ALIGN) & -ALIGN
            offset = self._offset
            end = offset + length
            if end + RECORD_BYTES > self._limit or offset > self._turn_at:
                if not self._make_room(length):
                    return None
                offset = self._offset
                end = offset + length
            position = self._position
            sequence = self._sequence
            memory = self._memory
            start = HEADER_BYTES + offset
            body = start + RECORD_BYTES
            NEW_RECORD.pack_into(
                memory, start, position, length << 10 | _MESSAGE, sequence, nbytes, timestamp, expires, encoding, 0, 0
            )
            memory[body : body + nbytes] = blob
            self._chain.append((offset, length, position, None, (), -1))
            # As in _announce, whose call would cost 0.08 us.
            self._offset = end
            self._position = position = position + length
            self._sequence = sequence + 1
            words = self._words
            words[NEXT_SEQUENCE] = sequence + 1
            if not TOTAL_STORE_ORDER:
                fence.publish()
            words[HEAD] = position
            return sequence
        except BaseException:
            self._repair()
            raise

    def post_with(
        self,
        blob: bytes,
        encoding: int,
        timestamp: int,
        expires: int,
        buffers: Sequence[Slice | int],
        copy: Callable[[int, Bytes], None],
    ) -> int | None:
        """Append a MESSAGE with buffers. Each of ``buffers`` is a slice of a payload, or the nbytes of a small one.

        A small buffer is kept in the record: ``copy(index, target)`` is called to fill ``target`` (uint8 [nbytes]). An
        exception from it leaves the ring as it was. Returns as ``post`` does.
        """
        try:
            return self._post_with(blob, encoding, timestamp, expires, buffers, copy)
        except BaseException:
            self._repair()
            raise

    def _post_with(
        self,
        blob: bytes,
        encoding: int,
        timestamp: int,
        expires: int,
        buffers: Sequence[Slice | int],
        copy: Callable[[int, Bytes], None],
    ) -> int | None:
        parts = [blob, bytes(-len(blob) & 7)]
        end = record_length(len(blob), len(buffers))
        small: list[tuple[int, int, int]] = []
        payloads: list[Payload] = []
        for index, buffer in enumerate(buffers):
            if isinstance(buffer, int):
                small.append((index, end, buffer))
                parts.append(REFERENCE.pack(IN_RECORD << 56 | end, 0, 0, buffer))
                end = align(end + buffer)
            else:
                payload, first, nbytes = buffer
                if payload.state == ABORTED:
                    raise ValueError("the payload was given back before the message that refers to it was posted")
                parts.append(payload.reference(first, nbytes))
                if payload not in payloads:
                    payloads.append(payload)
        # With room for a JUMP behind, so that the same again fits where this was.
        length = align(end) + (RECORD_BYTES if payloads else 0)
        # No early turn here: that was for its payloads to decide.
        if self._offset + length + RECORD_BYTES > self._limit and not self._make_room(length):
            return None
        offset, position, sequence = self._offset, self._position, self._sequence
        memory = self._memory
        start = HEADER_BYTES + offset
        body = start + RECORD_BYTES
        head = b"".join(parts)
        memory[body : body + len(head)] = head
        for index, at, nbytes in small:
            copy(index, np.frombuffer(memory, np.uint8, nbytes, start + at))
        extra = len(buffers) << 8 | encoding
        NEW_RECORD.pack_into(
            memory, start, position, length << 10 | _MESSAGE, sequence, len(blob), timestamp, expires, extra, 0, 0
        )
        self._offer(start)
        self._chain.append((offset, length, position, None, tuple(payloads), -1))
        for payload in payloads:
            payload.messages.add(offset)
            self._settle(payload, COMMITTED)
        self._offset = offset + length
        self._announce(position + length, sequence + 1)
        return sequence

    def _offer(self, start: int) -> None:
        """Say whom a new message at byte ``start`` of the segment is for: here, its one reader."""

    def _announce(self, position: int, sequence: int) -> None:
        self._position = position
        self._sequence = sequence
        words = self._words
        words[NEXT_SEQUENCE] = sequence
        fence.publish()
        words[HEAD] = position

    def _repair(self) -> None:
        """After an exception between any two stores (Ctrl-C raises one): forget what was not announced."""
        words = self._words
        self._position = words[HEAD]
        while self._chain and self._chain[-1][2] >= self._position:
            entry = self._chain.pop()
            self._forget(entry)
            self._offset = entry[0]
            if entry[3] is None and entry[5] < 0:
                self._sequence = words[NEXT_SEQUENCE] = words[(HEADER_BYTES + entry[0]) // 8 + SEQUENCE_WORD]
        self._extents = self._trace()
        self._limit = self._gap_end()

    # -- payloads -----------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Payload | None:
        """Set aside room for one payload: in the ring, or in a spill segment if the ring can't ever hold it.

        Returns None if there is no room now. Raises TooLargeError for what will never fit, SegmentSpaceError if a
        spill segment is needed and the shared-memory directory is full.
        """
        if nbytes > self.max_payload:
            return self.reserve_spill(nbytes)
        payload = Payload(nbytes, -1, -1, None)
        try:
            return payload if self._place(payload) else None
        except BaseException:
            self._repair()
            if self._chain and self._chain[-1][3] is payload:
                self.let_go(payload)
            raise

    def _place(self, payload: Payload) -> bool:
        nbytes = payload.nbytes
        length = align(RECORD_BYTES + nbytes)
        # What announces the payload needs room as well, and finds it behind it.
        fits = self._offset + length + self._share + RECORD_BYTES <= self._limit and self._offset <= self._turn_at
        if not fits and not self._make_room(length, self._share):
            return False
        payload.offset, payload.position = offset, position = self._offset, self._position
        self._append(PAYLOAD, RESERVED, length, nbytes)
        self._chain.append((offset, length, position, payload, (), -1))
        self._offset = offset + length
        self._announce(position + length, self._sequence)
        return True

    def reserve_spill(self, nbytes: int) -> Payload | None:
        """Set aside a spill segment for one payload, whatever its size. Returns and raises as ``reserve`` does."""
        self._reap()
        if nbytes > self.spill_limit:
            raise TooLargeError(
                f"a payload of {nbytes:,} bytes fits neither the ring of {self.size:,} bytes (which takes payloads up "
                f"to {self.max_payload:,}) nor the spill limit of {self.spill_limit:,} bytes; raise ring_size or "
                "spill_limit, or send it in parts"
            )
        self._recover_spills()
        spill = self._spills.take(nbytes)
        if spill is None:
            return None
        payload = Payload(nbytes, 0, 0, spill)
        self._spilled.add(payload)
        self._words[SPILLS] += 1
        self._words[SPILLED_BYTES] += nbytes
        return payload

    def _recover_spills(self) -> None:
        for payload in [payload for payload in self._spilled if self._payload_is_free(payload)]:
            self._give_back(payload)

    def spills_missing(self, sizes: Iterable[int]) -> list[int]:
        """The capacities of the spill segments that would have to be made to reserve payloads of these sizes."""
        large = [nbytes for nbytes in sizes if nbytes > self.max_payload]
        if large:
            self._reap()
            self._recover_spills()
        return self._spills.missing(large)

    def make_spill(self, capacity: int) -> Spill:
        """Make a spill segment, which takes a while. Needs no lock; ``add_spill`` does. Raises SegmentSpaceError."""
        return self._spills.make(capacity)

    def add_spill(self, spill: Spill) -> None:
        """Have one more spill segment, for the next payload that needs it."""
        self._spills.add(spill)

    def reserve_spill_if_possible(self, nbytes: int) -> Payload | None:
        """As ``reserve_spill``, for a payload that might as well wait for the ring: None where that would raise."""
        if nbytes > self.spill_limit:
            return None
        try:
            return self.reserve_spill(nbytes)
        except SegmentSpaceError:
            return None

    def target(self, payload: Payload) -> Bytes:
        """A writable uint8 array [nbytes] over a reserved payload, for a copy that is over before ``let_go``."""
        if payload.spill is not None:
            return np.frombuffer(payload.spill.segment.memory, np.uint8, payload.nbytes, HEADER_BYTES)
        return np.frombuffer(self._memory, np.uint8, payload.nbytes, HEADER_BYTES + payload.offset + RECORD_BYTES)

    def lend(self, payload: Payload) -> Bytes:
        """The same array as a loan: as long as it or a view of it is alive, the space is not used again.

        A loan that is dropped without having been sent is aborted; one that was sent is not recycled under the hands
        of its holder.
        """
        if payload.array() is not None:
            raise ValueError("the payload is lent already")
        root = self.target(payload)
        dropped = self._dropped
        # Called on any thread, inside any collection: it may only enqueue.
        payload._root = weakref.ref(root, lambda _: dropped.append(payload))
        return root

    def let_go(self, payload: Payload) -> None:
        """Say that the writer's side is through with a payload: sent, if a message refers to it, else aborted.

        A loan whose array is alive stays held until that is gone. Idempotent.
        """
        if payload.array() is None:
            self._drop(payload)

    def _drop(self, payload: Payload) -> None:
        payload.held = False
        self._settle(payload, ABORTED)

    def _settle(self, payload: Payload, state: int) -> None:
        if payload.state == RESERVED:
            payload.state = state
            if payload.spill is None:
                word = (HEADER_BYTES + payload.offset) // 8 + DESCRIPTOR_WORD
                self._words[word] = descriptor(PAYLOAD, state, align(RECORD_BYTES + payload.nbytes))

    def _give_back(self, payload: Payload) -> None:
        assert payload.spill is not None
        self._spilled.discard(payload)
        self._spills.give_back(payload.spill)

    def _reap(self) -> None:
        while self._dropped:
            self._drop(self._dropped.popleft())

    # -- space --------------------------------------------------------------------------------------------------------

    def want_space(self, number: int) -> None:
        """Ask to be woken when something is released (``number`` > 0, a new one each time), or no longer (0)."""
        words = self._words
        if number:
            words[STALLS] += 1
        words[WANTED] = number
        fence.full()

    def unfinished(self) -> int:
        """How many messages are not yet done: neither acknowledged, nor expired, nor set aside."""
        return sum(self._state(offset) < DONE for offset in self._messages())

    def set_aside(self) -> int:
        """How many messages are kept for inspection."""
        return sum(self._state(offset) == SET_ASIDE for offset in self._messages())

    def is_held(self) -> bool:
        """Whether what is in the ring is in somebody's hands: no message is still to be taken."""
        for offset, _, _, payload, _, target in reversed(self._chain):
            if payload is None and target < 0:
                return self._state(offset) != PENDING
        return True

    def oldest(self) -> tuple[int, int, int] | None:
        """(sequence, timestamp in ns since the epoch, release byte) of the oldest message that is not free."""
        for offset in self._messages():
            state = self._state(offset)
            if state != FREE:
                _, _, sequence, _, timestamp, _, _, _, _ = NEW_RECORD.unpack_from(self._memory, HEADER_BYTES + offset)
                return sequence, timestamp, state
        return None

    def _messages(self) -> Iterator[int]:
        """The offsets of the messages that are not yet reclaimed, the oldest first."""
        return (offset for offset, _, _, payload, _, target in self._chain if payload is None and target < 0)

    def _state(self, offset: int) -> int:
        """The release byte of a message."""
        state: int = self._memory[HEADER_BYTES + offset + RELEASE_BYTE]
        return state

    def reclaim(self) -> None:
        """Move the tail over everything at the front of the chain that is free."""
        self._reap()
        chain = self._chain
        memory = self._memory
        extents = self._extents
        gone: list[_Entry] = []
        used = self._used()
        front = extents[0][0]
        mark = self._mark
        while chain:
            entry = chain[0]
            offset, length, _, payload, payloads, target = entry
            if payload is not None:
                if not self._payload_is_free(payload):
                    break
            elif target < 0 and memory[mark + offset] != FREE:
                break
            if payloads:
                self._forget(entry)
            front = offset + length
            if target >= 0:
                extents.popleft()
                front = target
            gone.append(chain.popleft())
        if not gone:
            return
        extents[0][0] = front
        words = self._words
        if used > words[HIGH_WATER]:
            words[HIGH_WATER] = used
        words[TAIL] = pack_tail(chain[0][2], chain[0][0]) if chain else pack_tail(self._position, self._offset)
        self._invalidate(gone)
        self._limit = self._gap_end()

    def used(self) -> int:
        """How many bytes of the ring are in use, once everything at its front that is free was reclaimed."""
        self.reclaim()
        return self._used()

    @property
    def spill_limit(self) -> int:
        """How many bytes all spill segments together may take."""
        return self._spills.limit

    def asleep(self) -> int:
        """The number that a sleeping reader raised to have the bell rung, or 0 while it is awake."""
        return self._words[ASLEEP]

    def consumer_epoch(self) -> int:
        """The epoch of the reader that attached the ring last, 0 if none did."""
        return self._words[EPOCH]

    @property
    def position(self) -> int:
        """The position of the next record."""
        return self._position

    @property
    def next_sequence(self) -> int:
        """The sequence of the next message."""
        return self._sequence

    def count_doorbell(self) -> None:
        """Count a doorbell that was rung."""
        self._words[DOORBELLS] += 1

    def close(self, *, remove: bool) -> None:
        """Let go of the ring and its spill segments; with ``remove`` also give up their names.

        Without, they are left as an orphan that the next reader drains. Loans that are alive keep their memory mapped,
        which no writer uses any more.
        """
        if remove:
            # The ring goes first: spill segments without their ring are known to be left over.
            unlink(self.segment.name)
        self._spills.close(remove=remove)
        self.segment.retire()

    def _append(self, kind: int, state: int, length: int, body: int, extra: int = 0) -> None:
        NEW_RECORD.pack_into(
            self._memory,
            HEADER_BYTES + self._offset,
            self._position,
            descriptor(kind, state, length),
            0,
            body,
            0,
            0,
            extra,
            0,
            0,
        )

    def _make_room(self, length: int, share: int = 0) -> bool:
        """Bring the writer to a place where ``length`` bytes and a JUMP fit. False if there is none.

        ``share`` more bytes have to stay free behind them, or in one piece elsewhere.
        """
        self.reclaim()
        if self._offset > self._turn_at:
            gap = self._find_gap(length, share)
            if gap is not None and gap[0] < self._offset and gap[1] - gap[0] >= self._lap // 2:
                self._turn(*gap)
                return True
            # Not yet: look again a little later, not at each record.
            self._turn_at = self._offset + self._lap // 4
        return self._go_where_it_fits(length, share) or (self._fold() and self._go_where_it_fits(length, share))

    def _go_where_it_fits(self, length: int, share: int) -> bool:
        if self._offset + length + share + RECORD_BYTES <= self._limit:
            return True
        gap = self._find_gap(length, share)
        if gap is None:
            return False
        self._turn(*gap)
        return True

    def _find_gap(self, length: int, share: int) -> tuple[int, int] | None:
        """The first free stretch, as (start, end), that takes ``length`` bytes and leaves ``share`` in one piece."""
        gaps = self._gaps(self._offset + RECORD_BYTES)
        for gap in gaps:
            left = gap[1] - gap[0] - length - RECORD_BYTES
            if left >= 0 and (
                left >= share or any(end - start >= share + RECORD_BYTES for start, end in gaps if start != gap[0])
            ):
                return gap
        return None

    def _turn(self, start: int, end: int) -> None:
        """Close the last extent with a JUMP, and go on in the free stretch from ``start`` to ``end``."""
        offset, position = self._offset, self._position
        self._append(JUMP, COMMITTED, RECORD_BYTES, 0, start)
        self._chain.append((offset, RECORD_BYTES, position, None, (), start))
        self._extents[-1][1] = offset + RECORD_BYTES
        self._extents.append([start, start])
        self._offset = start
        self._limit = end
        self._turn_at = start + self._lap
        self._words[TURNS] += 1
        self._announce(position + RECORD_BYTES, self._sequence)

    def _fold(self) -> bool:
        """Turn each run of free records into one JUMP over it. True if that freed anything."""
        words = self._words
        entries = list(self._chain)
        chain: deque[_Entry] = deque()
        gone: list[_Entry] = []
        folded = False
        at = 0
        while at < len(entries):
            first = entries[at]
            end = at
            while end < len(entries) and self._is_free(entries[end]):
                end += 1
            run = entries[at:end]
            position, target = (
                (entries[end][2], entries[end][0]) if end < len(entries) else (self._position, self._offset)
            )
            span = position - first[2]
            if sum(entry[1] for entry in run) > RECORD_BYTES and span <= MAX_LENGTH:
                word = (HEADER_BYTES + first[0]) // 8
                kind = JUMP_OTHER if words[word + DESCRIPTOR_WORD] & 0xFF == JUMP else JUMP
                words[word + JUMP_TARGET_WORD[kind]] = target
                fence.publish()
                words[word + DESCRIPTOR_WORD] = descriptor(kind, COMMITTED, span)
                chain.append((first[0], RECORD_BYTES, first[2], None, (), target))
                gone += run[1:]
                folded = True
                for entry in run:
                    self._forget(entry)
                at = end
            else:
                end = max(end, at + 1)
                chain.extend(entries[at:end])
                at = end
        if not folded:
            return False
        self._chain = chain
        self._extents = self._trace()
        # Who sees the count has to see the jumps too.
        fence.publish()
        words[FOLDS] += 1
        self._invalidate(gone)
        self._limit = self._gap_end()
        return True

    def _trace(self) -> deque[list[int]]:
        """The extents of the chain, followed from its front."""
        extents: deque[list[int]] = deque()
        start = self._chain[0][0] if self._chain else self._offset
        for offset, length, _, _, _, target in self._chain:
            if target >= 0:
                extents.append([start, offset + length])
                start = target
        extents.append([start, self._offset])
        return extents

    def _is_free(self, entry: _Entry) -> bool:
        offset, _, _, payload, _, target = entry
        if payload is not None:
            return self._payload_is_free(payload)
        return target >= 0 or self._memory[self._mark + offset] == FREE

    def _payload_is_free(self, payload: Payload) -> bool:
        memory, mark = self._memory, self._mark
        return not payload.held and all(memory[mark + offset] == FREE for offset in payload.messages)

    def _forget(self, entry: _Entry) -> None:
        for payload in entry[4]:
            payload.messages.discard(entry[0])

    def _invalidate(self, entries: Sequence[_Entry]) -> None:
        words = self._words
        # After the tail was moved or the fold counted: who sees a header gone has to see why.
        fence.publish()
        for entry in entries:
            words[(HEADER_BYTES + entry[0]) // 8] = INVALID_POSITION
        fence.publish()

    def _used(self) -> int:
        self._extents[-1][1] = self._offset
        return sum(end - start for start, end in self._extents)

    def _gaps(self, tip: int) -> list[tuple[int, int]]:
        """The free stretches of the ring as (start, end), in order of offset, if the last extent ended at ``tip``."""
        self._extents[-1][1] = tip
        gaps = []
        at = 0
        for start, end in sorted(self._extents):
            if start > at:
                gaps.append((at, start))
            at = max(at, end)
        if at < self.size:
            gaps.append((at, self.size))
        self._extents[-1][1] = self._offset
        return gaps

    def _gap_end(self) -> int:
        """Where the free stretch that begins at the writer's offset ends."""
        offset = self._offset
        self._extents[-1][1] = offset
        return min((start for start, end in self._extents if start < end and start >= offset), default=self.size)


def check_ring_size(size: int) -> None:
    """Raise SegmentError unless a ring can have ``size`` bytes."""
    if type(size) is not int:
        raise SegmentError(f"a ring's size is a number of bytes; this one is {size!r}")
    if not MIN_RING_SIZE <= size <= MAX_RING_SIZE or size % ALIGN:
        raise SegmentError(
            f"a ring can't have {size:,} bytes: {MIN_RING_SIZE:,} to {MAX_RING_SIZE:,}, a multiple of {ALIGN}"
        )


def record_length(blob_bytes: int, buffers: int) -> int:
    """The length of a MESSAGE record with this blob and so many buffers, none of them kept in the record."""
    return align(RECORD_BYTES + align(blob_bytes, 8) + REFERENCE.size * buffers)
