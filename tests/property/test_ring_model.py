"""A ring against a plain model of it: whatever is done in whatever order, what is read is what was written.

The same model is driven by hypothesis, which looks for the shortest way to break it, by long seeded schedules, and by
schedules in which one side is interrupted before each of its loads or stores and the other side goes on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from shmq import Lease, Payload, RingReader, RingWriter, Segment, layout
from shmq.layout import (
    DESCRIPTOR_WORD,
    DONE,
    FREE,
    HEAD,
    HEADER_BYTES,
    MESSAGE,
    POSITION_WORD,
    RECORD_BYTES,
    RELEASE_BYTE,
    TAIL,
    TAKEN,
)

Bytes = NDArray[np.uint8]
Slice = tuple[Payload, int, int]

KIB = 1024
CONTENT = random.Random(20).randbytes(1024 * KIB)


def content(seed: int, nbytes: int) -> bytes:
    start = seed * 977 % (128 * KIB)
    return CONTENT[start : start + nbytes]


@dataclass(eq=False, slots=True)
class Message:
    sequence: int
    blob: bytes
    buffers: list[bytes]
    expired: bool = False
    state: str = "pending"
    deliveries: int = 0


@dataclass(eq=False, slots=True)
class Reserved:
    payload: Payload
    content: bytes
    loan: Bytes | None = None


@dataclass(eq=False, slots=True)
class Held:
    message: Message
    offset: int
    lease: Lease
    views: list[Bytes]
    unreaped: bool
    finished: bool = False


@dataclass(eq=False, slots=True)
class Model:
    """A writer, a reader, and what they have to agree on."""

    name: str
    size: int = 64 * KIB
    lap: int = 1024 * KIB
    spill_limit: int = 256 * KIB
    writer: RingWriter = field(init=False)
    reader: RingReader = field(init=False)
    on_load: Callable[[], None] | None = None
    """Called before each load and store that the reader makes of a word."""
    live: list[Message] = field(default_factory=list)
    """The messages that are not free, by sequence."""
    coming: list[Message] = field(default_factory=list)
    """Those of them that the reader has still to take."""
    reserved: list[Reserved] = field(default_factory=list)
    lent: list[Reserved] = field(default_factory=list)
    """Loans that the writer has let go of and somebody holds."""
    held: list[Held] = field(default_factory=list)
    posted: int = 0
    made: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        owned = Segment.create(self.name, self.size, ring_id=os.urandom(16))
        self.writer = RingWriter(owned, spill_limit=self.spill_limit, lap=self.lap)
        self._start_reader()

    def _start_reader(self) -> None:
        segment = Segment.attach(self.name)
        if self.on_load is not None:
            segment.words = Interrupted(segment.words, self.on_load)  # type: ignore[assignment]
        self.epoch += 1
        self.reader = RingReader(segment, epoch=self.epoch)

    def count(self, word: int) -> int:
        return int(self.writer.segment.words[word])

    def is_empty(self) -> bool:
        return not (self.live or self.reserved or self.lent)

    # -- the writer's side --------------------------------------------------------------------------------------------

    def post(self, nbytes: int, expired: bool = False) -> None:
        blob = content(self.posted, min(nbytes, self.writer.max_record - RECORD_BYTES))
        was_empty = self.is_empty()
        sequence = self.writer.post(blob, 1, 2, 1 if expired else 0)
        self._posted(Message(self.posted, blob, [], expired), sequence, was_empty)

    def send(self, nbytes: int, chosen: list[tuple[int, int, int]], small: list[int], let_go: bool) -> None:
        """Post a blob, small buffers, and slices (reserved payload, first byte, nbytes) taken modulo what there is."""
        blob = content(self.posted, nbytes)
        buffers: list[Slice | int] = []
        expected: list[bytes] = []
        used: list[Reserved] = []
        for index, first, length in chosen if self.reserved else ():
            reserved = self.reserved[index % len(self.reserved)]
            first %= len(reserved.content) + 1
            length %= len(reserved.content) - first + 1
            buffers.append((reserved.payload, first, length))
            expected.append(reserved.content[first : first + length])
            used.append(reserved)
        for number, length in enumerate(small):
            buffers.insert(number % (len(buffers) + 1), length)
            expected.insert(number % (len(expected) + 1), content(self.posted + number, length))

        def copy(index: int, target: Bytes) -> None:
            target[:] = np.frombuffer(expected[index], np.uint8)

        was_empty = self.is_empty()
        sequence = self.writer.post_with(blob, 1, 2, 0, buffers, copy)
        if self._posted(Message(self.posted, blob, expected), sequence, was_empty) and let_go:
            for reserved in used:
                self._let_go(reserved)

    def _posted(self, message: Message, sequence: int | None, was_empty: bool) -> bool:
        if sequence is None:
            assert not was_empty, "an empty ring refused a message"
            return False
        assert sequence == message.sequence
        self.posted += 1
        self.live.append(message)
        self.coming.append(message)
        return True

    def reserve(self, nbytes: int, lend: bool = False) -> None:
        nbytes = min(nbytes, self.spill_limit)
        was_empty = self.is_empty()
        payload = self.writer.reserve(nbytes)
        if payload is None:
            assert not was_empty, "an empty ring refused a payload"
            return
        self.made += 1
        reserved = Reserved(payload, content(self.made, nbytes))
        target = self.writer.lend(payload) if lend else self.writer.target(payload)
        target[:] = np.frombuffer(reserved.content, np.uint8)
        if lend:
            reserved.loan = target
        self.reserved.append(reserved)

    def let_go(self, index: int) -> None:
        if self.reserved:
            self._let_go(self.reserved[index % len(self.reserved)])

    def _let_go(self, reserved: Reserved) -> None:
        self.writer.let_go(reserved.payload)
        if reserved in self.reserved:
            self.reserved.remove(reserved)
            if reserved.loan is not None:
                self.lent.append(reserved)

    def drop_loan(self, index: int) -> None:
        if self.lent:
            self.lent.pop(index % len(self.lent)).loan = None

    def reclaim(self) -> None:
        self.writer.reclaim()

    # -- the reader's side --------------------------------------------------------------------------------------------

    def take(self) -> bool:
        known = len(self.coming)
        taken = self.reader.take()
        if taken is None:
            assert all(message.expired for message in self.coming[:known]), "a message was lost"
            passed = self.posted if known == len(self.coming) else self.coming[known].sequence
            del self.coming[:known]
            self._pass_until(passed)
            return False
        while self.coming[0].expired:
            self.coming.pop(0)
        message = self.coming.pop(0)
        self._pass_until(message.sequence)
        offset, sequence, encoding, count, blob, timestamp, deliveries = taken
        if message.state == "taken":
            message.deliveries += 1
        assert (sequence, encoding, timestamp, deliveries) == (
            message.sequence,
            1 if True else 0,
            2,
            message.deliveries,
        )
        assert blob == message.blob
        assert count == len(message.buffers)
        message.state = "taken"
        views = self.reader.views(offset, len(blob), count)
        lease = self.reader.lease(offset, views)
        self.held.append(Held(message, offset, lease, views, unreaped=any(view.size for view in views)))
        return True

    def _pass_until(self, sequence: int) -> None:
        """What a starting reader walks over and frees: the expired, and what was done in the life of another."""
        mine = {held.message.sequence for held in self.held}
        self.live = [
            message
            for message in self.live
            if not (
                message.sequence < sequence
                and message.sequence not in mine
                and (message.state == "done" or (message.expired and message.state == "pending"))
            )
        ]

    def finish(self, index: int) -> None:
        unfinished = [held for held in self.held if not held.finished]
        if unfinished:
            self._finish(unfinished[index % len(unfinished)])
            self._free_what_is_finished()

    def drop_views(self, index: int) -> None:
        with_views = [held for held in self.held if held.views]
        if with_views:
            with_views[index % len(with_views)].views.clear()

    def reap(self) -> None:
        self.reader.reap()
        for held in self.held:
            held.unreaped = held.unreaped and bool(held.views)
        self._free_what_is_finished()

    def give_back(self, chosen: list[Held]) -> None:
        for held in chosen:
            held.views.clear()
            if not held.finished:
                self._finish(held)
        self.reap()

    def _finish(self, held: Held) -> None:
        self.reader.finish(held.lease)
        held.finished = True
        held.message.state = "done"

    def _free_what_is_finished(self) -> None:
        for held in [held for held in self.held if held.finished and not held.unreaped]:
            self.held.remove(held)
            self.live.remove(held.message)

    def restart(self) -> None:
        """The consumer dies with all that it holds, and the next one starts."""
        self.held.clear()
        self.reader.retire()
        self.coming = [message for message in self.live if message.state != "done"]
        self._start_reader()

    # -- what always holds --------------------------------------------------------------------------------------------

    def check_content(self) -> None:
        """Nothing that somebody can see has changed."""
        for held in self.held:
            for view, expected in zip(held.views, held.message.buffers, strict=False):
                assert view.tobytes() == expected, f"a view of message {held.message.sequence} was overwritten"
        for reserved in [*self.reserved, *self.lent]:
            if reserved.loan is not None:
                assert reserved.loan.tobytes() == reserved.content, "a loan was overwritten"

    def check_ring(self) -> None:
        """The chain is whole, is what the shared memory says, overlaps nowhere, and holds all that is not free."""
        words = self.writer.segment.words
        memory = self.writer.segment.memory
        chain = list(self.writer._chain)
        position, offset = self.writer.position, self.writer._offset
        assert words[HEAD] == position
        for entry in reversed(chain):
            at = (HEADER_BYTES + entry[0]) // 8
            assert words[at + POSITION_WORD] == entry[2]
            assert words[at + DESCRIPTOR_WORD] >> 10 == position - entry[2]
            assert offset == (entry[5] if entry[5] >= 0 else entry[0] + entry[1])
            offset, position = entry[0], entry[2]
        assert layout.tail_offset(words[TAIL]) == offset
        assert layout.tail_names(words[TAIL], position)

        at = 0
        for offset, nbytes in sorted(entry[:2] for entry in chain):
            assert at <= offset, "two records overlap"
            at = offset + nbytes
        assert at <= self.size
        self.writer._extents[-1][1] = self.writer._offset
        assert stretches(self.writer._extents) == stretches(self.writer._trace())

        messages = [entry[0] for entry in chain if words[(HEADER_BYTES + entry[0]) // 8 + 1] & 0xFF == MESSAGE]
        not_free = [offset for offset in messages if memory[HEADER_BYTES + offset + RELEASE_BYTE] != FREE]
        assert len(not_free) == len(self.live) == self.reader.pending()
        for held in self.held:
            state = memory[HEADER_BYTES + held.offset + RELEASE_BYTE]
            assert state == (DONE if held.finished else TAKEN)

    def empty(self) -> None:
        """Let everybody finish, and see the ring as good as new."""
        while self.take():
            pass
        self.give_back(list(self.held))
        while self.reserved:
            self.let_go(0)
        self.lent.clear()
        assert self.is_empty()
        self.reclaim()
        self.check_ring()
        assert not self.writer._chain
        assert stretches(self.writer._extents) == []
        for nbytes in (self.writer.max_payload, self.spill_limit):
            self.reserve(nbytes)
            self.let_go(0)

    def close(self) -> None:
        self.held.clear()
        self.reader.retire()
        self.writer.close(remove=True)


def stretches(extents: Iterable[list[int]]) -> list[tuple[int, int]]:
    """What a number of extents cover, without the empty ones and with those that touch made one."""
    covered: list[tuple[int, int]] = []
    for start, end in sorted(extents):
        if covered and start <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(end, covered[-1][1])
        elif start < end:
            covered.append((start, end))
    return covered


class Interrupted:
    """The words of a segment for one side, with something that happens before each load and each store."""

    def __init__(self, words: memoryview, before: Callable[[], None], *, loads: bool = True) -> None:
        self._words = words
        self._before = before
        self._loads = loads

    def __getitem__(self, index: int) -> int:
        if self._loads:
            self._before()
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._before()
        self._words[index] = value

    def release(self) -> None:
        self._words.release()


# -- any order --------------------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 200), st.integers(0, 3000), st.integers(0, 30_000))
INDEX = st.integers(0, 30)


class RingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model: Model | None = None

    @initialize(
        size=st.sampled_from([64 * KIB, 64 * KIB + 64 * 37, 128 * KIB]),
        lap=st.sampled_from([2048, 8192, 1024 * KIB]),
    )
    def start(self, size: int, lap: int) -> None:
        self.model = Model(f"shmq-test-{os.getpid()}-{os.urandom(8).hex()}", size, lap)

    @property
    def ring(self) -> Model:
        assert self.model is not None
        return self.model

    @rule(nbytes=SIZES, expired=st.sampled_from([False, False, False, True]))
    def post(self, nbytes: int, expired: bool) -> None:
        self.ring.post(nbytes, expired)

    @rule(nbytes=st.integers(0, 500), count=st.integers(10, 60))
    def post_many(self, nbytes: int, count: int) -> None:
        for _ in range(count):
            self.ring.post(nbytes)

    @rule(nbytes=SIZES, lend=st.booleans())
    def reserve(self, nbytes: int, lend: bool) -> None:
        self.ring.reserve(nbytes, lend)

    @rule(nbytes=st.integers(30_000, 256 * KIB))
    def reserve_a_large_one(self, nbytes: int) -> None:
        self.ring.reserve(nbytes)

    @rule(
        nbytes=st.integers(0, 300),
        chosen=st.lists(st.tuples(INDEX, st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=3),
        small=st.lists(st.integers(0, 500), max_size=3),
        let_go=st.booleans(),
    )
    def send(self, nbytes: int, chosen: list[tuple[int, int, int]], small: list[int], let_go: bool) -> None:
        self.ring.send(nbytes, chosen, small, let_go)

    @rule(index=INDEX)
    def let_go(self, index: int) -> None:
        self.ring.let_go(index)

    @rule(index=INDEX)
    def drop_loan(self, index: int) -> None:
        self.ring.drop_loan(index)

    @rule()
    def reclaim(self) -> None:
        self.ring.reclaim()

    @rule(count=st.integers(1, 40))
    def take(self, count: int) -> None:
        for _ in range(count):
            self.ring.take()

    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        self.ring.finish(index)

    @rule(index=INDEX)
    def drop_views(self, index: int) -> None:
        self.ring.drop_views(index)

    @rule()
    def reap(self) -> None:
        self.ring.reap()

    @rule(keep=st.integers(0, 3))
    def catch_up(self, keep: int) -> None:
        while self.ring.take():
            pass
        self.ring.give_back(self.ring.held[keep:])

    @rule()
    def restart(self) -> None:
        self.ring.restart()

    @invariant()
    def nothing_that_is_seen_has_changed(self) -> None:
        if self.model is not None:
            self.model.check_content()

    @invariant()
    def the_ring_is_whole(self) -> None:
        if self.model is not None:
            self.model.check_ring()

    def teardown(self) -> None:
        if self.model is not None:
            try:
                self.model.empty()
            finally:
                self.model.close()


EFFORT = int(os.environ.get("SHMQ_TEST_EXAMPLES", "150"))

RingMachine.TestCase.settings = settings(
    max_examples=EFFORT,
    stateful_step_count=60,
    deadline=None,
    database=None,
    derandomize=EFFORT == 150,
    suppress_health_check=list(HealthCheck),
)
TestAnyOrder = RingMachine.TestCase


# -- long seeded schedules --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Schedule:
    """Random steps of both sides, in phases in which now one side and now the other is ahead."""

    model: Model
    random: random.Random
    spills: bool = True
    phase: int = 0

    def step(self) -> None:
        if self.random.random() < 0.02:
            self.phase = self.random.randrange(3)
        if self.random.random() < (0.7, 0.35, 0.5)[self.phase]:
            self.writer_step()
        else:
            self.reader_step()

    def writer_step(self) -> None:
        model, number = self.model, self.random.randrange(100)
        if number < 40:
            model.post(self._size(2000), expired=number < 3)
        elif number < 60:
            model.reserve(self._size(model.writer.max_payload // (1 if number == 59 else 8)), lend=number < 50)
        elif number < 61 and self.spills:
            model.reserve(self.random.randrange(model.spill_limit // 2))
        elif number < 85:
            chosen = [(self.random.randrange(9), self._size(5000), self._size(5000)) for _ in range(number % 3)]
            small = [self._size(800) for _ in range(number % 4)]
            model.send(self._size(300), chosen, small, let_go=self.random.random() < 0.8)
        elif number < 93:
            model.let_go(self.random.randrange(99))
        elif number < 97:
            model.drop_loan(self.random.randrange(99))
        elif number < 99:
            while model.reserved or model.lent:
                model.let_go(0)
                model.drop_loan(0)
        else:
            model.reclaim()

    def reader_step(self) -> None:
        model, number = self.model, self.random.randrange(100)
        if number < 40:
            model.take()
        elif number < 55:
            model.finish(self.random.randrange(99))
        elif number < 70:
            model.drop_views(self.random.randrange(99))
        elif number < 85:
            model.reap()
        elif number < 99:
            # What is kept now may stay for long and stand in the way.
            keep = self.random.choice([0, 0.02, 0.2])
            model.give_back([held for held in model.held if self.random.random() >= keep])
        elif self.random.random() < 0.3:
            model.restart()

    def _size(self, most: int) -> int:
        return self.random.randrange(self.random.choice([1, 300, most, most]) + 1)


@pytest.mark.parametrize(
    ("seed", "size", "lap"),
    [(1, 64 * KIB, 4096), (2, 64 * KIB, 1024 * KIB), (3, 128 * KIB + 64, 16 * KIB), (4, 256 * KIB, 1024 * KIB)],
)
def test_a_long_life_of_a_ring_turns_folds_and_spills_and_loses_nothing(
    make_name: Callable[[], str], seed: int, size: int, lap: int
) -> None:
    model = Model(make_name(), size, lap, spill_limit=2 * size)
    schedule = Schedule(model, random.Random(seed))
    try:
        for number in range(12_000):
            schedule.step()
            model.check_content()
            if number % 10 == 0:
                model.check_ring()
        model.empty()
        assert model.writer.position > 6 * size
        assert model.count(layout.TURNS) > 20
        assert model.count(layout.FOLDS) > 20
        assert model.count(layout.SPILLS) > 10
        assert model.count(layout.EXPIRED_COUNT) > 5
        assert model.count(layout.REDELIVERED_COUNT) > 5
        assert model.epoch > 5
    finally:
        model.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_that_looks_before_each_store_of_the_writer_sees_a_whole_ring(
    make_name: Callable[[], str], seed: int
) -> None:
    model = Model(make_name(), lap=8192)
    schedule = Schedule(model, random.Random(seed), spills=False)
    looking = False

    def look() -> None:
        nonlocal looking
        if not looking:
            looking = True
            schedule.reader_step()
            if schedule.random.random() < 0.05:
                model.restart()
            looking = False

    model.writer._words = Interrupted(model.writer._words, look, loads=False)  # type: ignore[assignment]
    try:
        for _ in range(10_000):
            schedule.writer_step()
            model.check_content()
        model.empty()
        assert model.count(layout.FOLDS) > 20
        assert model.count(layout.TURNS) > 20
    finally:
        model.close()


BURSTS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 30]
"""How many steps of the writer may lie between two loads of the reader."""


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_that_goes_on_before_each_load_of_the_reader_is_followed(
    make_name: Callable[[], str], seed: int
) -> None:
    left = 0

    def write() -> None:
        nonlocal left
        steps = min(left, schedule.random.choice(BURSTS))
        left, after = 0, left - steps
        for _ in range(steps):
            schedule.writer_step()
        left = after

    model = Model(make_name(), lap=8192)
    schedule = Schedule(model, random.Random(seed), spills=False)
    model.on_load = write
    model.restart()
    try:
        for _ in range(2000):
            left = 100
            schedule.reader_step()
            model.check_content()
        assert model.count(layout.FOLDS) > 20
        assert model.count(layout.TURNS) > 20
        left = 0
        model.empty()
    finally:
        model.close()


def test_counting_while_the_writer_goes_on_finds_no_damage(make_name: Callable[[], str]) -> None:
    left = 0

    def write() -> None:
        nonlocal left
        steps = min(left, schedule.random.choice(BURSTS))
        left, after = 0, left - steps
        for _ in range(steps):
            schedule.writer_step()
        left = after

    model = Model(make_name(), lap=8192)
    schedule = Schedule(model, random.Random(1), spills=False)
    model.on_load = write
    model.restart()
    try:
        for _ in range(200):
            schedule.reader_step()
            left = 100
            model.reader.pending()
            left = 0
    finally:
        model.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_writer_that_dies_before_any_of_its_stores_leaves_all_that_it_posted(
    make_name: Callable[[], str], seed: int
) -> None:
    model = Model(make_name(), lap=8192)
    remains = Segment.create(make_name(), model.size)
    schedule = Schedule(model, random.Random(seed), spills=False)
    deaths = 0

    def die() -> None:
        nonlocal deaths
        deaths += 1
        remains.memory[:] = model.writer.segment.memory[:]
        reader = RingReader(Segment.attach(remains.name), epoch=deaths)
        expected = [message for message in model.live if message.state != "done" and not message.expired]
        for message in expected:
            taken = reader.take()
            assert taken is not None
            assert (taken[1], taken[4]) == (message.sequence, message.blob)
            views = reader.views(taken[0], len(taken[4]), taken[3])
            assert [view.tobytes() for view in views] == message.buffers
            del views
        assert reader.take() is None
        reader.close()

    model.writer._words = Interrupted(model.writer._words, die, loads=False)  # type: ignore[assignment]
    try:
        for _ in range(3000):
            schedule.step()
        assert deaths > 1000
        assert model.count(layout.FOLDS) > 5
        assert model.count(layout.TURNS) > 5
    finally:
        model.close()
        os.unlink(f"/dev/shm/{remains.name}")
        remains.close()
