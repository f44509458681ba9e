"""The reading side of a ring: walk the records, hand out messages and views of their buffers, give them back.

One process reads a ring at a time (which one, is settled above this package), and within it one thread at a time calls
these methods, save where it says *any thread*. Nothing waits here.

The ring is taken as input, not as truth: every length, position and reference is checked against the bounds before it
is used, and what can't be true is a CorruptRecordError. Memory outside the segment is never read.

A reader that starts walks from the tail, and so do recovery and redelivery: a message that is still *pending* is new,
one that is *taken* was handed to a consumer that died with it and comes again, marked so (as does one that a consumer
*returned* at its end), one that is *done* only waits to be freed. What too many consumers died with is *set aside*. The
writer may reclaim while the reader looks; then the header under the cursor is invalid and the reader looks again from
the tail, which leads to the same place.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shmq import fence
from shmq.errors import CorruptRecordError, SegmentError, ViewsHeldError
from shmq.fence import TOTAL_STORE_ORDER
from shmq.layout import (
    ALIGN,
    ASLEEP,
    COMMITTED,
    CONSUMER_PID,
    DEATH,
    DELIVERIES_WORD,
    DONE,
    EPOCH,
    EXPIRED_COUNT,
    FOLDS,
    FREE,
    GENERATION,
    HEAD,
    HEADER_BYTES,
    IN_RECORD,
    IN_RING,
    IN_SPILL,
    JUMP_TARGET_WORD,
    MESSAGE,
    NEW_RECORD,
    PAYLOAD,
    PENDING,
    RECORD,
    RECORD_BYTES,
    REDELIVERED_COUNT,
    REFERENCE,
    RELEASE_BYTE,
    RETURNED,
    SET_ASIDE,
    SET_ASIDE_COUNT,
    SPILL_MAGIC,
    TAIL,
    TAKEN,
    WANTED,
    align,
    descriptor,
    reference_offset,
    tail_names,
    tail_offset,
)
from shmq.segment import Segment, abandon_in_child

_MESSAGE = descriptor(MESSAGE, COMMITTED, 0)
_PAYLOAD = descriptor(PAYLOAD, COMMITTED, 0)
_KIND_AND_STATE = 0x3FF
_MAX_LOOKS = 10_000
_WORD = (1 << 64) - 1


ALL = 1 << 62
"""As a number of records: however many there are."""

Taken: TypeAlias = "tuple[int, int, int, int, bytes, int, int]"
"""A message that was just handed out: (offset, sequence, encoding, number of buffers, blob, timestamp, how often it was
delivered before). ``offset`` is its name towards the reader. A named tuple would cost each message 0.2 us more."""


class Record(NamedTuple):
    """A message where it lies in the ring. ``state`` is its release byte, ``timestamp`` in ns since the epoch."""

    position: int
    offset: int
    sequence: int
    state: int
    timestamp: int
    deliveries: int


class Lease:
    """Keeps a message's space while views of its buffers are alive. Changed only by the reader's own thread.

    ``finished``: the message was acknowledged, which *any thread* may note before it appends the lease to ``dropped``.
    ``gone``: whoever had the message has dropped it, so that it is done when its last view is gone as well.
    """

    __slots__ = ("finished", "gone", "offset", "views", "watched")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.views = 0
        self.finished = False
        self.gone = False
        self.watched: list[_View] = []


class _View(weakref.ref[NDArray[np.uint8]]):
    """A weak reference to an array that was handed out; it knows whose message it looks into."""

    __slots__ = ("lease",)
    lease: Lease


class Mappings(Protocol):
    """Who wants to know what memory a reader maps: to register it with a device, say. Called by the reader's thread."""

    def mapped(self, name: str, memory: NDArray[np.uint8]) -> None:
        """A segment, ring or spill, was mapped: all of it, from a page's start. It stays mapped while this is kept."""
        ...

    def unmapping(self, name: str) -> None:
        """A segment will be unmapped as soon as nobody keeps its memory. Told again while somebody does."""
        ...


class RingReader:
    """Reads one ring, from the oldest message that is not done. ``epoch`` names this life of the consumer.

    A message with which ``max_deliveries`` consumers died is set aside (0: never): ``on_set_aside`` is told of it once,
    and ``records`` finds it again. With ``peek`` a reader only looks, and leaves no trace in the ring. ``mappings`` is
    told of the segments. Raises CorruptRecordError for a ring without a tail.
    """

    _slot = 0
    """Which of the release bytes is this reader's."""
    _mark = HEADER_BYTES + RELEASE_BYTE
    """Added to a message's offset: where in the segment that byte lies."""
    _new = PENDING
    """What that byte says of a message that was not handed out."""

    def __init__(
        self,
        segment: Segment,
        *,
        epoch: int,
        max_deliveries: int = 0,
        peek: bool = False,
        mappings: Mappings | None = None,
    ) -> None:
        self.segment = segment
        self.name = segment.name
        self.size = segment.payload_bytes
        self._memory = segment.memory
        self._words = segment.words
        self._readonly = memoryview(segment.memory).toreadonly()
        self._spills: dict[int, Segment] = {}
        self._leases: dict[int, Lease] = {}
        self._closed = False
        self._looked_at = (0, 0, -1)
        self._answered = 0
        self._has_freed = False
        self._max_deliveries = max_deliveries
        self._mappings = mappings
        self.on_set_aside: Callable[[Record], None] | None = None
        """Told, from within ``take``, of every message that is set aside."""
        try:
            self._position, self._offset = self._find_tail()
        except CorruptRecordError:
            self._readonly.release()
            raise
        self._head = self._position
        if not peek:
            self._enter(epoch)
        self.dropped: deque[Lease | _View] = deque()
        """Views and messages that are gone, to be reaped. *Any thread* may append; nothing else may be done there."""
        abandon_in_child(self)
        self._tell_mapped(segment)

    def _enter(self, epoch: int) -> None:
        """Let the writer know of this reader."""
        self._words[CONSUMER_PID] = os.getpid()
        self._words[EPOCH] = epoch

    # -- walking ------------------------------------------------------------------------------------------------------

    def take(self) -> Taken | None:
        """The next message, now marked as taken; None if there is none.

        Raises CorruptRecordError; then the ring can't be read any further, save after an error about one message's own
        body or references (``views``), which leaves the walk intact.
        """
        memory = self._memory
        words = self._words
        while True:
            position = self._position
            if position == self._head and not self._look():
                return None
            offset = self._offset
            at = HEADER_BYTES + offset
            _, word, sequence, body, timestamp, expires, extra, deliveries, release = NEW_RECORD.unpack_from(memory, at)
            state = memory[self._mark + offset] if self._slot else release & 0xFF
            if not TOTAL_STORE_ORDER:
                fence.observe()
            # If the position stands after all else was read, then nothing had been written over the header before.
            if words[at >> 3] != position:
                self._find_again(position)
                continue
            length = word >> 10
            if word & _KIND_AND_STATE != _MESSAGE:
                self._pass(position, offset, word)
                continue
            end = offset + length
            if end + RECORD_BYTES > self.size or position + length > self._head or length < RECORD_BYTES:
                raise self._corrupt(position, f"a message of {length} bytes at offset {offset} of {self.size}")
            # First of all: of a message that is free, the writer may be making a JUMP, and its fields say nothing.
            if state or expires:
                state = self._admit(offset, state, expires)
                if state < 0:
                    self._offset, self._position = end, position + length
                    continue
            if state:
                deliveries = self._count_delivery(offset, state, deliveries)
                if 0 < self._max_deliveries <= deliveries // DEATH:
                    self._offset, self._position = end, position + length
                    self._set_aside(Record(position, offset, sequence, SET_ASIDE, timestamp, deliveries % DEATH))
                    continue
                words[REDELIVERED_COUNT] += 1
                deliveries %= DEATH
            buffers = extra >> 8
            if RECORD_BYTES + body + REFERENCE.size * buffers > length:
                raise self._corrupt(
                    position,
                    f"a body of {body} bytes and {buffers} buffers in a message of {length} at offset {offset}",
                )
            start = at + RECORD_BYTES
            taken = offset, sequence, extra & 0xFF, buffers, memory[start : start + body], timestamp, deliveries
            memory[self._mark + offset] = TAKEN
            # Last of all: an exception between any two calls (Ctrl-C raises one) must not make us pass over it.
            self._offset = end
            self._position = position + length
            return taken

    def put_back(self, offset: int, deliveries: int) -> None:
        """Undo the last ``take``, which gave ``offset`` and ``deliveries``: the next one gives the same message."""
        self._leases.pop(offset, None)
        start = HEADER_BYTES + offset
        if deliveries:
            self._words[(start >> 3) + DELIVERIES_WORD] -= 1
            self._words[REDELIVERED_COUNT] -= 1
        self._memory[self._mark + offset] = RETURNED if deliveries else self._new
        self._offset, self._position = offset, self._words[start >> 3]

    def postpone(self, offset: int) -> None:
        """Of a message that is taken: its work waits, and if this process dies it is not held against the message."""
        self._memory[self._mark + offset] = RETURNED

    def begin(self, offset: int) -> None:
        """Undo ``postpone``: if this process dies now, the message may be to blame."""
        self._memory[self._mark + offset] = TAKEN

    def deaths(self, offset: int) -> int:
        """How many consumers died with a message that is taken."""
        return self._words[((HEADER_BYTES + offset) >> 3) + DELIVERIES_WORD] // DEATH

    @property
    def closed(self) -> bool:
        """Whether it was closed; then nothing is looked at any more."""
        return self._closed

    def _count_delivery(self, offset: int, state: int, deliveries: int) -> int:
        deliveries = deliveries + (1 if state == RETURNED else DEATH + 1) & _WORD
        self._words[((HEADER_BYTES + offset) >> 3) + DELIVERIES_WORD] = deliveries
        return deliveries

    def _admit(self, offset: int, state: int, expires: int) -> int:
        """The state of a message that is not simply new, or -1 if it is not to be handed out.

        What only waits to be freed is freed.
        """
        if state == DONE:
            self.free(offset)
        if DONE <= state <= SET_ASIDE:
            return -1
        return -1 if self._expire(offset, expires) else state

    def _expire(self, offset: int, expires: int) -> bool:
        """Free a message whose time is over. False if it is not."""
        if not expires or expires > time.monotonic_ns():
            return False
        self.free(offset)
        self._count_expired()
        return True

    def _count_expired(self) -> None:
        self._words[EXPIRED_COUNT] += 1

    def _set_aside(self, record: Record) -> None:
        self._memory[self._mark + record.offset] = SET_ASIDE
        self._words[SET_ASIDE_COUNT] += 1
        if self.on_set_aside is not None:
            self.on_set_aside(record)

    def is_set_aside(self, record: Record) -> bool:
        """Whether a message that was set aside is still kept."""
        if self._closed:
            return False
        start = HEADER_BYTES + record.offset
        return bool(
            self._words[start >> 3] == record.position and self._memory[self._mark + record.offset] == SET_ASIDE
        )

    def has_more(self) -> bool:
        """Whether ``take`` has something to look at. Costs one load."""
        return bool(self._words[HEAD] != self._position)

    def _look(self) -> bool:
        head = self._words[HEAD]
        if head == self._position:
            return False
        if head < self._position or head % ALIGN:
            raise self._corrupt(self._position, f"the head went back to {head}")
        fence.observe()
        self._head = head
        return True

    def _pass(self, position: int, offset: int, word: int) -> None:
        """Move the cursor over a record that is no message."""
        kind = word & 0xFF
        length = word >> 10
        if position + length > self._head:
            # A JUMP that replaced what was there when the head was seen last may reach further.
            self._head = max(self._head, self._words[HEAD])
        if length < RECORD_BYTES or length % ALIGN or position + length > self._head:
            raise self._corrupt(position, f"a record of kind {kind} and {length} bytes at offset {offset}")
        if kind in JUMP_TARGET_WORD:
            target = self._words[((HEADER_BYTES + offset) >> 3) + JUMP_TARGET_WORD[kind]]
        elif kind == PAYLOAD:
            target = offset + length
        else:
            raise self._corrupt(position, f"a record of unknown kind {kind} at offset {offset}")
        if not TOTAL_STORE_ORDER:
            fence.observe()
        if self._words[(HEADER_BYTES + offset) >> 3] != position:
            # Reclaimed, and perhaps written over, before the target was read.
            return
        if target % ALIGN or target + RECORD_BYTES > self.size:
            raise self._corrupt(position, f"a chain that goes on at offset {target} of {self.size}")
        self._position = position + length
        self._offset = target

    def _find_tail(self) -> tuple[int, int]:
        """The (position, offset) of the oldest record in use, or of the next one if there is none."""
        words = self._words
        for _ in range(_MAX_LOOKS):
            tail = words[TAIL]
            offset = tail_offset(tail)
            head = words[HEAD]
            if offset + RECORD_BYTES > self.size:
                raise self._corrupt(0, f"a tail at offset {offset} of {self.size}")
            fence.observe()
            position = words[(HEADER_BYTES + offset) >> 3]
            fence.observe()
            if words[TAIL] != tail:
                continue
            if position < head and tail_names(tail, position):
                return position, offset
            if tail_names(tail, head):
                return head, offset
        raise self._corrupt(0, "no record where the tail points to")

    def _find_again(self, position: int) -> None:
        """Set the cursor on the first record that is not before ``position``, from the tail."""
        words = self._words
        # Only a reclaim explains that a header is gone, and it moves the tail or counts a fold before that.
        fence.observe()
        state = (words[TAIL], words[FOLDS], position)
        if state == self._looked_at:
            raise self._corrupt(position, f"no record of that position at offset {self._offset}")
        try:
            self._walk_to(position)
        except BaseException:
            # Ctrl-C included: never go on from somewhere before, which would hand out messages twice.
            self._position = position
            raise
        self._looked_at = state

    def _walk_to(self, position: int) -> None:
        words = self._words
        # What was reclaimed may have reached beyond the head that was seen last.
        self._head = words[HEAD]
        at, offset = self._find_tail()
        self._head = max(self._head, at)
        self._position, self._offset = at, offset
        while at < position:
            word = words[((HEADER_BYTES + offset) >> 3) + 1]
            if not TOTAL_STORE_ORDER:
                fence.observe()
            if words[(HEADER_BYTES + offset) >> 3] != at:
                # Reclaimed meanwhile. Begin anew; the position sought is not behind the tail for long.
                self._position = position
                return
            if word & _KIND_AND_STATE == _MESSAGE:
                word = descriptor(PAYLOAD, COMMITTED, 0) | word & ~_KIND_AND_STATE
            self._pass(at, offset, word)
            at, offset = self._position, self._offset

    def read(self, offset: int) -> tuple[int, int, bytes]:
        """(encoding, number of buffers, blob) of a message that is taken and not yet given back."""
        body = HEADER_BYTES + offset + RECORD_BYTES
        fields = RECORD.unpack_from(self._memory, HEADER_BYTES + offset)
        return fields[6] & 0xFF, fields[6] >> 8, self._memory[body : body + fields[3]]

    # -- buffers ------------------------------------------------------------------------------------------------------

    def views(self, offset: int, blob_bytes: int, count: int) -> list[NDArray[np.uint8]]:
        """Read-only uint8 arrays over the buffers of a taken message, in order.

        As long as one of them, or anything made from it without a copy, is alive, the space is not used again. Raises
        CorruptRecordError for a reference that points where no such payload is.
        """
        memory = self._memory
        start = HEADER_BYTES + offset
        position = self._words[start >> 3]
        length = self._words[(start >> 3) + 1] >> 10
        table = start + RECORD_BYTES + align(blob_bytes, 8)
        if table + REFERENCE.size * count > start + length or offset + length > self.size:
            raise self._corrupt(position, f"{count} references in a message of {length} bytes")
        arrays = []
        for index in range(count):
            where, at, first, nbytes = REFERENCE.unpack_from(memory, table + REFERENCE.size * index)
            kind, record = reference_offset(where)
            if kind == IN_RECORD:
                if record + nbytes > length:
                    raise self._corrupt(position, f"a buffer of {nbytes} bytes at {record} in a message of {length}")
                source, begin = self._readonly, start + record
            elif kind == IN_RING:
                source, begin = self._readonly, self._check_payload(position, record, at, first, nbytes)
            elif kind == IN_SPILL:
                segment = self._spill(position, at >> 32, at & 0xFFFFFFFF, first + nbytes)
                source, begin = memoryview(segment.memory).toreadonly(), HEADER_BYTES + first
            else:
                raise self._corrupt(position, f"a reference of unknown kind {kind}")
            arrays.append(np.frombuffer(source, np.uint8, nbytes, begin) if nbytes else np.empty(0, np.uint8))
        return arrays

    def _check_payload(self, position: int, record: int, at: int, first: int, nbytes: int) -> int:
        if record % ALIGN or record + RECORD_BYTES > self.size:
            raise self._corrupt(position, f"a reference to offset {record} of {self.size}")
        start = HEADER_BYTES + record
        found, word, _, body = RECORD.unpack_from(self._memory, start)[:4]
        length = word >> 10
        if found != at or word & _KIND_AND_STATE != _PAYLOAD or body > length - RECORD_BYTES:
            raise self._corrupt(position, f"a reference to a payload at offset {record} that is not there")
        if first + nbytes > body or record + length > self.size:
            raise self._corrupt(
                position, f"a reference to bytes {first} to {first + nbytes} of a payload of {body} at offset {record}"
            )
        return start + RECORD_BYTES + first

    def _spill(self, position: int, number: int, generation: int, end: int) -> Segment:
        segment = self._spills.get(number)
        if segment is None:
            self.tidy()
            try:
                segment = Segment.attach(f"{self.name}.{number}", magic=SPILL_MAGIC)
            except SegmentError as error:
                raise self._corrupt(
                    position, f"a reference to spill segment {number}, which can't be read ({error})"
                ) from error
            self._spills[number] = segment
            self._tell_mapped(segment)
        if segment.words[GENERATION] != generation or end > segment.payload_bytes:
            raise self._corrupt(position, f"a reference to byte {end} of use {generation} of spill segment {number}")
        return segment

    def lease(self, offset: int, arrays: list[NDArray[np.uint8]]) -> Lease:
        """Watch over the arrays of a message: its space is freed when all are gone and it is finished."""
        lease = Lease(offset)
        drop = self.dropped.append
        for array in arrays:
            if array.size:
                view = _View(array, drop)
                view.lease = lease
                lease.watched.append(view)
        lease.views = len(lease.watched)
        self._leases[offset] = lease
        return lease

    # -- giving back --------------------------------------------------------------------------------------------------

    def free(self, offset: int) -> None:
        """Give back a message that has no lease: done, and its space free. One store; *any thread*."""
        if self._closed:
            return
        if not TOTAL_STORE_ORDER:
            fence.publish()
        try:
            self._memory[self._mark + offset] = FREE
        except ValueError:
            # Closed and unmapped between the two lines: then the message is the next reader's.
            return
        self._has_freed = True

    def finish(self, lease: Lease) -> None:
        """Mark a leased message as done, and free it if no view of it is left."""
        if not lease.finished:
            lease.finished = True
            self._settle(lease)

    def reap(self) -> None:
        """Take note of views and messages that are gone."""
        dropped = self.dropped
        while dropped:
            item = dropped.popleft()
            if isinstance(item, Lease):
                item.gone = True
                self._settle(item)
            else:
                lease = item.lease
                lease.views -= 1
                if lease.views == 0:
                    self._settle(lease)

    def _settle(self, lease: Lease) -> None:
        if self._closed or self._leases.get(lease.offset) is not lease:
            return
        if lease.views:
            if lease.finished:
                fence.publish()
                self._memory[self._mark + lease.offset] = DONE
                self._has_freed = True
        elif lease.finished or lease.gone:
            self.free(lease.offset)
            del self._leases[lease.offset]

    def wanted(self) -> int:
        """The number of a producer's request for space that is to be answered now, or 0.

        Only what was given back since the last answer is worth one; else two idle sides would keep each other awake.
        """
        if self._closed:
            return 0
        try:
            number: int = self._words[WANTED]
        except ValueError:
            # Closed and unmapped between the two lines.
            return 0
        return number if number and self._has_freed and number != self._answered else 0

    def answered(self, number: int) -> None:
        """Note that the producer is being woken."""
        self._has_freed = False
        self._answered = number

    def sleep(self, number: int) -> None:
        """Say that this reader is going to sleep and wants the bell rung (``number`` > 0), or that it is awake (0)."""
        self._words[ASLEEP] = number

    # -- the end ------------------------------------------------------------------------------------------------------

    def pending(self) -> int:
        """How many messages are not free. Walks the ring: for ends, not for loops."""
        return sum(record.state != FREE for record in self.records())

    def unfinished(self) -> int:
        """How many messages are still to be delivered or acknowledged. Walks the ring, as ``pending``."""
        return sum(record.state < DONE for record in self.records())

    def records(self, most: int = ALL) -> list[Record]:
        """The messages from the tail on, whatever their state; only those of the first ``most`` records of the chain.

        Those that are free may be written over at any time, the others stay where they are.
        """
        words = self._words
        keep = self._position, self._offset, self._head
        try:
            for _ in range(_MAX_LOOKS):
                found: list[Record] = []
                seen = (words[TAIL], words[FOLDS])
                self._head = words[HEAD]
                self._position, self._offset = self._find_tail()
                left = most
                while self._position < self._head and left:
                    left -= 1
                    position, offset = self._position, self._offset
                    start = HEADER_BYTES + offset
                    _, word, sequence, _, timestamp, _, _, deliveries, release = NEW_RECORD.unpack_from(
                        self._memory, start
                    )
                    state = self._memory[self._mark + offset] if self._slot else release & 0xFF
                    if not TOTAL_STORE_ORDER:
                        fence.observe()
                    if words[start >> 3] != position:
                        break
                    if word & _KIND_AND_STATE == _MESSAGE:
                        found.append(Record(position, offset, sequence, state, timestamp, deliveries % DEATH))
                        word = _PAYLOAD | word & ~_KIND_AND_STATE
                    self._pass(position, offset, word)
                    if self._position == position:
                        break
                else:
                    return found
                fence.observe()
                if seen == (words[TAIL], words[FOLDS]):
                    # Not reclaimed while it was looked at; then it would be right to begin anew.
                    break
            raise self._corrupt(self._position, f"no record of that position at offset {self._offset}")
        finally:
            self._position, self._offset, self._head = keep

    def tidy(self) -> None:
        """Unmap spill segments that their writer has given up and that no view looks into."""
        for number, segment in list(self._spills.items()):
            if not segment.is_linked():
                self._tell_unmapping(segment)
                with contextlib.suppress(ViewsHeldError):
                    segment.close()
                    del self._spills[number]

    def held(self) -> list[Lease]:
        """The leases of messages with views that are alive."""
        return [lease for lease in self._leases.values() if lease.views]

    def close(self, *, hand_back: bool = False) -> None:
        """Unmap the ring. Raises ViewsHeldError, and leaves it usable, while views are alive. Idempotent.

        ``hand_back``: this is an orderly end, and what was not acknowledged is not to be held against the messages.
        """
        if self._closed:
            return
        for number, segment in list(self._spills.items()):
            self._tell_unmapping(segment)
            segment.close()
            del self._spills[number]
        # Before the memory goes: other threads may give back messages at any time.
        self._closed = True
        if hand_back:
            self._hand_back()
        self._readonly.release()
        self._tell_unmapping(self.segment)
        try:
            self.segment.close()
        except ViewsHeldError:
            self._readonly = memoryview(self.segment.memory).toreadonly()
            self._words = self.segment.words
            self._closed = False
            raise

    def _hand_back(self) -> None:
        with contextlib.suppress(CorruptRecordError):
            for record in self.records():
                # What lies further on was taken by a reader before, which died with it.
                if record.state == TAKEN and record.position < self._position:
                    self._memory[self._mark + record.offset] = RETURNED

    def retire(self) -> None:
        """Read the ring no further; it is unmapped now or, while views are alive, when the last of them is gone."""
        self._closed = True
        self._readonly.release()
        for segment in [self.segment, *self._spills.values()]:
            self._tell_unmapping(segment)
            segment.retire()
        self._spills.clear()

    def _tell_mapped(self, segment: Segment) -> None:
        if self._mappings is not None:
            self._mappings.mapped(segment.name, np.frombuffer(segment.memory, np.uint8))

    def _tell_unmapping(self, segment: Segment) -> None:
        if self._mappings is not None:
            self._mappings.unmapping(segment.name)

    def abandon(self) -> None:
        """From here on give nothing back: in a forked child it is the parent's to do, at an end the next reader's."""
        self._closed = True

    def _corrupt(self, position: int, what: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"ring {self.name} is damaged at position {position}: {what}. Its unread messages can't be trusted; "
            "restart its producer, which makes a new ring",
            ring=self.name,
            position=position,
        )
