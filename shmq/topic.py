"""A topic's ring: one writer, up to 64 readers, and one record for all of them.

It is the ring of ``shmq.writer`` and ``shmq.reader``, with a *reader slot* for each reader: its number says which
release byte of a record is the reader's, and which words of the header. A record is free when all its 64 release bytes
are; a message holds OFFERED in those of the readers it is for, and FREE in the others.

Rules
    1.  A slot is had by who holds its lock, which the kernel drops when the process dies (``Segment.claim``). Only its
        holder writes the release bytes of a slot. So they are freed by the reader; by the publisher, if it gets the
        lock because the reader is gone; or by the next reader that gets it. Nobody comes by messages that were offered
        to another.
    2.  A reader joins by storing a new number in ``joined``, after it freed what the reader before had taken. Messages
        are offered to it from when the publisher sees that, before each message: it begins with the newest. What was
        offered by that slot before, the publisher takes back.
    3.  The publisher may take back what was offered to a reader and not taken, and so *skip* it: it stores the head in
        ``skip to``, fences, and frees what is still OFFERED, save the message in ``claim``. The reader stores the
        position of what it is about to take in ``claim``, fences, and loads ``skip to``; what lies before that is not
        its own any more, and it writes nothing there. So one of the two sees the other. If both do, nobody has freed
        the message: the reader says so by another ``claim``, and the publisher looks at it again. This is the one case
        in which the publisher writes release bytes of a reader that lives.
    4.  The low bits of ``skip to`` name the number in ``joined`` that it is said to: what they say to a reader that was
        there before is of no concern to the one that has the slot now, and tells it that nothing is its own yet.
    5.  The lowest bit of ``skip to`` says that the reader is *dropped*: nothing is offered to it until it joins again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shmq import fence
from shmq.errors import ReaderDroppedError, SegmentLimitError
from shmq.layout import (
    ALIGN,
    CLAIM,
    DONE,
    FREE,
    HEADER_BYTES,
    INVALID_POSITION,
    JOINED,
    OFFERED,
    PENDING,
    POSITION_WORD,
    RELEASE_BYTE,
    RETURNED,
    SETTLED_BYTE,
    SKIP_TO,
    SKIPPED_COUNT,
    SLOT_ASLEEP,
    SLOT_PID,
    SLOTS,
    TAKEN,
)
from shmq.reader import RingReader
from shmq.segment import Segment
from shmq.writer import LAP_BYTES, Payload, RingWriter, Slice, record_length

_DROPPED = 1
_NUMBERS = 32
"""How many numbers ``skip to`` tells apart; its position leaves five bits for that."""
_NOBODY = bytes(8 * SLOTS)
_ALL_FREE = bytes([FREE]) * SLOTS
_RELEASE = HEADER_BYTES + RELEASE_BYTE


class TopicWriter(RingWriter):
    """Writes a topic's ring; ``segment`` has TOPIC_MAGIC. What is not said here is as for RingWriter."""

    _mark = HEADER_BYTES + SETTLED_BYTE

    def __init__(self, segment: Segment, *, spill_limit: int, lap: int = LAP_BYTES) -> None:
        super().__init__(segment, spill_limit=spill_limit, lap=lap)
        self._joined = _NOBODY
        self._offers = _ALL_FREE
        self._left: dict[int, tuple[int, bool]] = {}
        """For each slot the offset of the message that was not taken back because its reader claimed it, and whether it
        counts as skipped."""

    # -- readers ------------------------------------------------------------------------------------------------------

    def readers(self) -> list[int]:
        """The slots of the readers that messages are offered to."""
        self._meet()
        return [slot for slot in range(SLOTS) if self._offers[slot] == OFFERED]

    def has_readers(self) -> bool:
        """Whether there are readers, those that are dropped included: they may hold messages."""
        return self._joined != _NOBODY

    def has_joined(self, slot: int, number: int) -> bool:
        """Whether the reader that has a slot now is the one that joined by this number, if only at first."""
        return bool(self._words[JOINED + slot] // _NUMBERS == number // _NUMBERS)

    def pid(self, slot: int) -> int:
        """The process of a reader."""
        return self._words[SLOT_PID + slot]

    def _meet(self) -> None:
        """Offer messages, from now on, to the readers that joined."""
        if self._left:
            self._look_at_left()
        joined = self._memory[8 * JOINED : 8 * (JOINED + SLOTS)]
        if joined == self._joined:
            return
        words = [slice(8 * slot, 8 * slot + 8) for slot in range(SLOTS)]
        new = [slot for slot, word in enumerate(words) if joined[word] != self._joined[word]]
        self._joined = joined
        for slot in new:
            # No longer dropped, if it was; and what was offered to the reader before is for nobody.
            self._take_back(slot)
            self._offer_to(slot, OFFERED)

    def _offer_to(self, slot: int, offer: int) -> None:
        self._offers = self._offers[:slot] + bytes([offer]) + self._offers[slot + 1 :]

    def free_dead(self) -> int:
        """Take back the slots of readers that are gone, and what they held. Returns how many there were."""
        self._meet()
        dead = [slot for slot in range(SLOTS) if any(self._joined[8 * slot : 8 * slot + 8]) and self._free_slot(slot)]
        return len(dead)

    def _free_slot(self, slot: int) -> bool:
        if not self.segment.claim(slot):
            return False
        try:
            for offset in self._messages():
                self._memory[_RELEASE + offset + slot] = FREE
            self._words[SLOT_ASLEEP + slot] = 0
            self._words[JOINED + slot] = 0
            at = 8 * slot
            self._joined = self._joined[:at] + bytes(8) + self._joined[at + 8 :]
            self._offer_to(slot, FREE)
            self._left.pop(slot, None)
        finally:
            self.segment.unclaim(slot)
        return True

    def slow(self) -> list[int]:
        """The slots of the readers that have still to take the oldest message that any has still to take."""
        for offset in self._messages():
            release = self._release(offset)
            if OFFERED in release:
                return [slot for slot in range(SLOTS) if release[slot] == OFFERED]
        return []

    def skip(self, slot: int, *, drop: bool = False) -> int:
        """Take back what was offered to a reader that has not taken it, and return how many messages that were.

        With ``drop`` nothing more is offered to it until it joins again.
        """
        if drop:
            self._offer_to(slot, FREE)
        skipped = self._take_back(slot, _DROPPED if drop else 0, is_skip=True)
        self._words[SKIPPED_COUNT] += skipped
        return skipped

    def _take_back(self, slot: int, flag: int = 0, *, is_skip: bool = False) -> int:
        words, memory = self._words, self._memory
        number = memoryview(self._joined).cast("Q")[slot]
        words[SKIP_TO + slot] = self._position | number % _NUMBERS << 1 | flag
        fence.full()
        claimed = words[CLAIM + slot]
        fence.observe()
        taken_back = 0
        for offset in self._messages():
            at = _RELEASE + offset + slot
            if memory[at] != OFFERED:
                continue
            if words[(HEADER_BYTES + offset >> 3) + POSITION_WORD] == claimed:
                self._left[slot] = offset, is_skip
            else:
                memory[at] = FREE
                taken_back += 1
        return taken_back

    def _look_at_left(self) -> None:
        """Free what was left to readers that claimed it, and that saw it taken back."""
        words, memory = self._words, self._memory
        for slot, (offset, is_skip) in list(self._left.items()):
            claimed = words[CLAIM + slot]
            fence.observe()
            at = _RELEASE + offset + slot
            if memory[at] == OFFERED:
                if words[(HEADER_BYTES + offset >> 3) + POSITION_WORD] == claimed:
                    continue
                memory[at] = FREE
                words[SKIPPED_COUNT] += is_skip
            del self._left[slot]

    def asleep(self) -> int:
        """Not 0 if a reader sleeps."""
        return int(self._memory[8 * SLOT_ASLEEP : 8 * (SLOT_ASLEEP + SLOTS)] != _NOBODY)

    def slot_asleep(self, slot: int) -> int:
        """The number that a sleeping reader raised to have the bell rung, or 0 while it is awake."""
        return self._words[SLOT_ASLEEP + slot]

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, blob: bytes, encoding: int, timestamp: int, expires: int = 0) -> int | None:
        """As RingWriter.post."""
        return self.post_with(blob, encoding, timestamp, expires, (), _nothing_to_copy)

    def _post_with(
        self,
        blob: bytes,
        encoding: int,
        timestamp: int,
        expires: int,
        buffers: Sequence[Slice | int],
        copy: Callable[[int, NDArray[np.uint8]], None],
    ) -> int | None:
        self._meet()
        if not buffers and self._offset > self._turn_at and not self._make_room(record_length(len(blob), 0)):
            return None
        return super()._post_with(blob, encoding, timestamp, expires, buffers, copy)

    def _offer(self, start: int) -> None:
        self._memory[start + RELEASE_BYTE : start + RELEASE_BYTE + SLOTS] = self._offers

    # -- space --------------------------------------------------------------------------------------------------------

    def _release(self, offset: int) -> bytes:
        at = _RELEASE + offset
        return self._memory[at : at + SLOTS]

    def _is_settled(self, offset: int) -> bool:
        """Whether all readers are through with a message; then it is noted where the base class looks."""
        at = self._mark + offset
        if self._memory[at] == FREE:
            return True
        if self._release(offset) != _ALL_FREE:
            return False
        self._memory[at] = FREE
        if self._left:
            # Before another message may lie there.
            self._left = {slot: left for slot, left in self._left.items() if left[0] != offset}
        return True

    def _settle_all(self) -> None:
        for offset in self._messages():
            self._is_settled(offset)

    def _reap(self) -> None:
        super()._reap()
        if self._left:
            self._look_at_left()
        for offset in self._messages():
            if not self._is_settled(offset):
                break

    def _fold(self) -> bool:
        self._settle_all()
        return super()._fold()

    def reserve_spill(self, nbytes: int) -> Payload | None:
        """As RingWriter.reserve_spill."""
        self._settle_all()
        return super().reserve_spill(nbytes)

    def _make_room(self, length: int, share: int = 0) -> bool:
        return super()._make_room(length, share) or (self.free_dead() > 0 and super()._make_room(length, share))

    def _state(self, offset: int) -> int:
        """PENDING while a reader has still to take a message, TAKEN while one has it, then DONE, FREE at last."""
        if self._is_settled(offset):
            return FREE
        release = self._release(offset)
        if OFFERED in release or RETURNED in release:
            return PENDING
        return TAKEN if TAKEN in release else DONE


class TopicReader(RingReader):
    """Reads a topic's ring by a slot whose lock ``segment`` holds (``claim_slot``), from the newest message on.

    ``epoch``, any number above 0, names this life of the reader. ``take`` raises ReaderDroppedError, once, when the
    publisher went on without this reader; then it has joined again. What is not said here is as for RingReader.
    """

    _new = RETURNED
    """Not OFFERED, which the publisher might take back."""

    def __init__(self, segment: Segment, slot: int, *, epoch: int) -> None:
        self._slot = slot
        self._mark = _RELEASE + slot
        self._epoch = epoch
        self.expired = 0
        """How many messages were past their time."""
        super().__init__(segment, epoch=epoch)

    def _enter(self, epoch: int) -> None:
        words = self._words
        words[CLAIM + self._slot] = INVALID_POSITION
        # What the reader before had taken, and died with; what was only offered to it, the publisher takes back.
        for record in self.records():
            if record.state not in (FREE, OFFERED):
                self._memory[self._mark + record.offset] = FREE
        words[SLOT_ASLEEP + self._slot] = 0
        words[SLOT_PID + self._slot] = os.getpid()
        self._join()

    def _join(self) -> None:
        words, slot = self._words, self._slot
        # Another one than those that the publisher may be speaking to, if it has not yet seen that they are gone.
        before = words[JOINED + slot] or words[SKIP_TO + slot] >> 1
        self._number = self._epoch * _NUMBERS % (1 << 64) + (before + 1) % _NUMBERS
        fence.publish()
        words[JOINED + slot] = self._number

    def _is_met(self, skip_to: int) -> bool:
        """Whether the publisher says this to this reader, and to none that had the slot before (rule 4)."""
        return bool((skip_to >> 1) % _NUMBERS == self._number % _NUMBERS)

    @property
    def slot(self) -> int:
        """The number of this reader's slot."""
        return self._slot

    @property
    def number(self) -> int:
        """The number by which it joined."""
        return self._number

    def take(self) -> tuple[int, int, int, int, bytes, int, int] | None:
        """As RingReader.take. Raises ReaderDroppedError."""
        if self._is_dropped():
            self._join()
            raise ReaderDroppedError(
                f"a reader of {self.name} did not keep up, and its publisher went on without it; messages are missing, "
                "and the next ones are the newest. Read faster, or give the publisher a larger ring_size, more "
                "patience, or policy='block'"
            )
        return super().take()

    def has_more(self) -> bool:
        """As RingReader.has_more: it has something to say, too."""
        return super().has_more() or self._is_dropped()

    def _is_dropped(self) -> bool:
        skip_to = self._words[SKIP_TO + self._slot]
        return bool(skip_to & _DROPPED) and self._is_met(skip_to)

    def _admit(self, offset: int, state: int, expires: int) -> int:
        if state != RETURNED and (state != OFFERED or not self._claim(self._position)):
            return -1
        return -1 if self._expire(offset, expires) else PENDING

    def _claim(self, position: int) -> bool:
        """Make the message at ``position`` this reader's (rule 3). False if it was taken back."""
        words = self._words
        # That the message before was taken has to be seen before this.
        fence.publish()
        words[CLAIM + self._slot] = position
        fence.full()
        skip_to = words[SKIP_TO + self._slot]
        if skip_to & -ALIGN <= position and self._is_met(skip_to):
            return True
        # The publisher may have left it to this reader, which has now given it back.
        words[CLAIM + self._slot] = INVALID_POSITION
        self._has_freed = True
        return False

    def _count_expired(self) -> None:
        # Not in the ring, where other readers count too.
        self.expired += 1

    def pending(self) -> int:
        """How many messages this reader holds; what it was not offered itself a dead publisher can't take back."""
        return sum(record.state not in (FREE, OFFERED) for record in self.records())

    def sleep(self, number: int) -> None:
        """As RingReader.sleep."""
        self._words[SLOT_ASLEEP + self._slot] = number

    def retire(self) -> None:
        """As RingReader.retire, but the slot is kept while views are alive: who gets it would free what they see."""
        if self.held():
            self._closed = True
        else:
            super().retire()

    def _hand_back(self) -> None:
        """Nothing: what was not taken is for nobody else."""


def claim_slot(segment: Segment) -> int:
    """Get a reader slot of a topic's ring. Raises SegmentLimitError if all have readers."""
    for slot in range(SLOTS):
        if segment.claim(slot):
            return slot
    raise SegmentLimitError(
        f"topic's ring {segment.name} has {SLOTS} readers already, and that is the most it can have; close one"
    )


def _nothing_to_copy(index: int, target: NDArray[np.uint8]) -> None:
    """A message that is all blob has no buffers."""
