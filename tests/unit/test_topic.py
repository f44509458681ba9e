from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmq import ReaderDroppedError, Segment, SegmentLimitError, TopicReader, TopicWriter, claim_slot, fence, layout
from shmq.layout import CLAIM, FREE, HEADER_BYTES, OFFERED, RELEASE_BYTE, SLOTS, TOPIC_MAGIC
from shmq.segment import names, unlink

MIB = 1024 * 1024
SMALL = 64 * 1024

Join = Callable[[], TopicReader]
Ring = tuple[TopicWriter, Join]


@pytest.fixture(name="make")
def make_fixture() -> Iterator[Callable[..., Ring]]:
    """Makes topics' rings: (writer, what makes a reader)."""
    segments: list[Segment] = []
    name = f"shmq:test:@t{os.urandom(4).hex()}"

    def make(size: int = SMALL, spill_limit: int = 0) -> Ring:
        segment = Segment.create(name, size, magic=TOPIC_MAGIC)
        segments.append(segment)
        epochs = iter(range(1, 1_000_000))

        def join() -> TopicReader:
            mine = Segment.attach(name, magic=TOPIC_MAGIC)
            segments.append(mine)
            return TopicReader(mine, claim_slot(mine), epoch=next(epochs))

        return TopicWriter(segment, spill_limit=spill_limit, lap=16 * 1024), join

    yield make
    for segment in segments:
        segment.retire()
    for left in names(name):
        unlink(left)


@pytest.fixture(name="ring")
def ring_fixture(make: Callable[..., Ring]) -> Ring:
    return make()


def post(writer: TopicWriter, *blobs: bytes) -> list[int]:
    sequences = [writer.post(blob, 0, 0) for blob in blobs]
    assert None not in sequences
    return sequences  # type: ignore[return-value]


def fill(writer: TopicWriter, blob: bytes = bytes(1000)) -> int:
    count = 0
    while writer.post(blob, 0, 0) is not None:
        count += 1
    return count


def take_all(reader: TopicReader) -> list[tuple[int, bytes]]:
    """(offset, blob) of all messages that are there."""
    return [(taken[0], taken[4]) for taken in iter(reader.take, None)]


def blobs(reader: TopicReader) -> list[bytes]:
    """The blobs of all messages that are there, which are given back."""
    found = take_all(reader)
    for offset, _ in found:
        reader.free(offset)
    return [blob for _, blob in found]


def release(writer: TopicWriter, offset: int) -> bytes:
    at = HEADER_BYTES + offset + RELEASE_BYTE
    return writer.segment.memory[at : at + SLOTS]


def test_every_reader_gets_every_message_once_in_order(ring: Ring) -> None:
    writer, join = ring
    readers = [join() for _ in range(5)]
    assert writer.readers() == [0, 1, 2, 3, 4]
    post(writer, b"a", b"b", b"c")
    for reader in readers:
        assert blobs(reader) == [b"a", b"b", b"c"]
        assert reader.take() is None


def test_without_readers_a_message_is_for_nobody_and_takes_no_room(ring: Ring) -> None:
    writer, join = ring
    for _ in range(10_000):
        post(writer, bytes(500))
    assert writer.unfinished() == 0
    assert blobs(join()) == []


def test_who_joins_late_begins_with_the_newest(ring: Ring) -> None:
    writer, join = ring
    early = join()
    post(writer, b"a", b"b")
    late = join()
    post(writer, b"c")
    assert blobs(late) == [b"c"]
    assert blobs(early) == [b"a", b"b", b"c"]


def test_a_message_is_free_when_all_readers_have_freed_it_and_no_sooner(ring: Ring) -> None:
    writer, join = ring
    readers = [join() for _ in range(3)]
    count = fill(writer)
    taken = [take_all(reader) for reader in readers]
    assert [len(found) for found in taken] == [count] * 3
    for reader, found in zip(readers[:2], taken[:2], strict=True):
        for offset, _ in found:
            reader.free(offset)
    assert writer.post(bytes(1000), 0, 0) is None
    assert writer.unfinished() == count
    for offset, _ in taken[2]:
        readers[2].free(offset)
    assert writer.unfinished() == 0
    assert fill(writer) >= count - 1


def test_readers_may_free_in_any_order_and_what_they_hold_costs_only_its_own_bytes(ring: Ring) -> None:
    writer, join = ring
    one, two = join(), join()
    post(writer, b"held by one", b"x", b"held by two")
    first, last = take_all(one), take_all(two)
    for offset, _ in [first[2], first[1]]:
        one.free(offset)
    for offset, _ in [last[1], last[0]]:
        two.free(offset)
    for number in range(2000):
        blob = b"%d" % number + bytes(200)
        post(writer, blob)
        assert blobs(one) + blobs(two) == [blob, blob]
    memory = writer.segment.memory
    for offset, blob in (first[0], last[2]):
        body = HEADER_BYTES + offset + layout.RECORD_BYTES
        assert memory[body : body + len(blob)] == blob


def test_what_a_dead_reader_held_is_freed_when_room_is_needed(ring: Ring) -> None:
    writer, join = ring
    alive, dead = join(), join()
    count = fill(writer)
    assert len(blobs(alive)) == count
    assert len(take_all(dead)) == count
    assert writer.post(bytes(1000), 0, 0) is None
    dead.segment.retire()
    post(writer, bytes(1000))
    assert writer.readers() == [0]
    assert blobs(alive) == [bytes(1000)]


def test_who_gets_the_slot_of_a_dead_reader_gets_none_of_its_messages(ring: Ring) -> None:
    writer, join = ring
    dead = join()
    post(writer, b"taken", b"offered")
    assert dead.take() is not None
    dead.segment.retire()
    heir = join()
    assert heir.slot == dead.slot
    assert writer.readers() == [heir.slot]
    assert writer.unfinished() == 0
    post(writer, b"new")
    assert blobs(heir) == [b"new"]


def while_joining(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Do something when the next reader has its slot and has not yet said so."""
    join = TopicReader._join

    def late(reader: TopicReader) -> None:
        monkeypatch.undo()
        what()
        join(reader)

    monkeypatch.setattr(TopicReader, "_join", late)


def test_what_is_offered_to_a_dead_reader_while_its_slot_is_taken_over_is_for_nobody(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, join = ring
    dead = join()
    post(writer, b"a")
    dead.segment.retire()
    while_joining(monkeypatch, lambda: post(writer, b"b"))
    heir = join()
    assert heir.take() is None
    post(writer, b"c")
    assert blobs(heir) == [b"c"]
    assert writer.unfinished() == 0


def test_that_a_dead_reader_was_dropped_is_not_told_to_who_takes_over_its_slot(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, join = ring
    dead = join()
    post(writer, b"a")
    dead.segment.retire()
    while_joining(monkeypatch, lambda: writer.skip(dead.slot, drop=True))
    heir = join()
    assert heir.take() is None
    post(writer, b"b")
    assert blobs(heir) == [b"b"]


def test_what_a_dead_reader_held_and_was_skipped_over_is_freed_by_who_gets_its_slot(ring: Ring) -> None:
    writer, join = ring
    dead = join()
    post(writer, b"held", b"skipped")
    assert dead.take() is not None
    assert writer.skip(dead.slot) == 1
    dead.segment.retire()
    heir = join()
    assert heir.slot == dead.slot
    assert writer.readers() == [heir.slot]
    assert writer.unfinished() == 0


def test_a_reader_that_died_asleep_rings_no_bells_any_more(ring: Ring) -> None:
    writer, join = ring
    dead = join()
    dead.sleep(5)
    assert writer.asleep()
    assert writer.readers() == [dead.slot]
    dead.segment.retire()
    assert writer.free_dead() == 1
    assert not writer.asleep()


def test_what_a_reader_held_that_was_skipped_and_died_is_freed_by_who_gets_its_slot(ring: Ring) -> None:
    writer, join = ring
    first = join()
    post(writer, b"a", b"b")
    assert first.take() is not None
    assert writer.skip(0) == 1
    first.segment.retire()
    second = join()
    post(writer, b"c")
    assert blobs(second) == [b"c"]
    assert writer.unfinished() == 0


def test_what_a_dead_publisher_had_not_taken_back_from_a_dead_reader_is_not_pending(ring: Ring) -> None:
    writer, join = ring
    dead = join()
    post(writer, b"a")
    dead.segment.retire()
    heir = join()
    assert heir.slot == dead.slot
    writer.segment.retire()
    assert heir.take() is None
    assert heir.pending() == 0


def test_a_thousand_readers_may_come_and_go_while_the_publisher_does_nothing(ring: Ring) -> None:
    writer, join = ring
    for _ in range(1000):
        join().segment.retire()
    reader = join()
    post(writer, b"x")
    assert blobs(reader) == [b"x"]


def test_64_readers_have_slots_and_the_next_one_is_told_so(ring: Ring) -> None:
    writer, join = ring
    readers = [join() for _ in range(SLOTS)]
    with pytest.raises(SegmentLimitError, match="has 64 readers already"):
        join()
    post(writer, b"x")
    assert [blobs(reader) for reader in readers] == [[b"x"]] * SLOTS
    assert writer.unfinished() == 0


def test_what_was_not_taken_can_be_skipped_and_what_is_held_can_not(ring: Ring) -> None:
    writer, join = ring
    slow, quick = join(), join()
    post(writer, b"held", b"a", b"b")
    held = slow.take()
    assert held is not None
    assert writer.slow() == [quick.slot]
    assert blobs(quick) == [b"held", b"a", b"b"]
    assert writer.slow() == [slow.slot]
    assert writer.skip(slow.slot) == 2
    assert writer.slow() == []
    assert int(writer.segment.words[layout.SKIPPED_COUNT]) == 2
    post(writer, b"c")
    assert blobs(slow) == [b"c"]
    assert release(writer, held[0])[slow.slot] == layout.TAKEN
    slow.free(held[0])
    assert blobs(quick) == [b"c"]
    assert writer.unfinished() == 0


def test_what_was_skipped_is_used_again_although_the_reader_has_not_looked(ring: Ring) -> None:
    writer, join = ring
    reader = join()
    for _ in range(20):
        fill(writer)
        assert writer.skip(reader.slot) > 0
    post(writer, b"last")
    assert blobs(reader)[-1] == b"last"


def test_a_message_that_is_just_being_taken_is_not_skipped(ring: Ring) -> None:
    writer, join = ring
    reader = join()
    post(writer, b"a", b"b")
    record = reader.records()[0]
    writer.segment.words[CLAIM + reader.slot] = record.position
    assert writer.skip(reader.slot) == 1
    assert release(writer, record.offset)[reader.slot] == OFFERED


def test_a_message_that_was_skipped_before_it_was_claimed_is_left_alone(ring: Ring) -> None:
    writer, join = ring
    reader = join()
    post(writer, b"a")
    record = reader.records()[0]
    writer.skip(reader.slot)
    post(writer, b"b")
    writer.segment.memory[HEADER_BYTES + record.offset + RELEASE_BYTE + reader.slot] = OFFERED
    assert blobs(reader) == [b"b"]
    assert release(writer, record.offset)[reader.slot] == OFFERED


def test_a_message_that_is_skipped_and_claimed_at_once_is_freed_nevertheless(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, join = ring
    reader = join()
    post(writer, b"a")
    full = fence.full

    def skip_before() -> None:
        monkeypatch.undo()
        assert writer.skip(reader.slot) == 0
        full()

    # The reader has stored its claim, and not yet looked whether it was skipped.
    monkeypatch.setattr(fence, "full", skip_before)
    assert reader.take() is None
    post(writer, b"b")
    assert blobs(reader) == [b"b"]
    assert writer.unfinished() == 0


def test_a_drop_is_told_to_a_reader_that_has_nothing_else_to_take(ring: Ring) -> None:
    writer, join = ring
    reader = join()
    post(writer, b"a")
    assert blobs(reader) == [b"a"]
    assert not reader.has_more()
    writer.skip(reader.slot, drop=True)
    assert reader.has_more()
    with pytest.raises(ReaderDroppedError):
        reader.take()
    assert not reader.has_more()


def test_a_dropped_reader_is_told_once_and_is_in_again_from_then_on(ring: Ring) -> None:
    writer, join = ring
    reader, other = join(), join()
    post(writer, b"a", b"b")
    assert writer.skip(reader.slot, drop=True) == 2
    assert writer.readers() == [other.slot]
    post(writer, b"c")
    with pytest.raises(ReaderDroppedError, match="did not keep up"):
        reader.take()
    assert reader.take() is None
    assert writer.readers() == [reader.slot, other.slot]
    post(writer, b"d")
    assert blobs(reader) == [b"d"]
    assert blobs(other) == [b"a", b"b", b"c", b"d"]


def test_who_gets_the_slot_of_a_dropped_reader_is_not_dropped(ring: Ring) -> None:
    writer, join = ring
    reader = join()
    writer.skip(reader.slot, drop=True)
    reader.segment.retire()
    heir = join()
    post(writer, b"x")
    assert blobs(heir) == [b"x"]


def test_what_is_put_back_comes_again(ring: Ring) -> None:
    writer, join = ring
    reader = join()
    post(writer, b"x")
    taken = reader.take()
    assert taken is not None
    reader.put_back(taken[0], taken[6])
    assert writer.unfinished() == 1
    assert blobs(reader) == [b"x"]


def test_what_was_put_back_is_not_skipped(ring: Ring) -> None:
    writer, join = ring
    reader = join()
    post(writer, b"x", b"y")
    taken = reader.take()
    assert taken is not None
    reader.put_back(taken[0], taken[6])
    assert writer.skip(reader.slot) == 1
    assert blobs(reader) == [b"x"]
    assert writer.unfinished() == 0


def test_a_message_whose_time_is_over_is_freed_for_each_reader(ring: Ring) -> None:
    writer, join = ring
    readers = [join(), join()]
    writer.post(b"old", 0, 0, 1)
    post(writer, b"new")
    assert [blobs(reader) for reader in readers] == [[b"new"], [b"new"]]
    assert writer.unfinished() == 0


@pytest.mark.parametrize("nbytes", [100_000, 2 * MIB], ids=["in the ring", "spilled"])
def test_a_payload_is_shared_by_all_readers_until_the_last_view_is_gone(make: Callable[..., Ring], nbytes: int) -> None:
    writer, join = make(MIB, spill_limit=2 * MIB + 4096)
    readers = [join(), join(), join()]

    def send(value: int) -> bool:
        payload = writer.reserve(nbytes)
        if payload is None:
            return False
        writer.target(payload)[:] = value
        sequence = writer.post_with(b"", 0, 0, 0, [(payload, 0, nbytes)], lambda *_: None)
        writer.let_go(payload)
        return sequence is not None

    views: list[Any] = []
    assert send(1)
    for reader in readers:
        offset, _, _, count, blob, _, _ = reader.take()  # type: ignore[misc]
        views.append(reader.views(offset, len(blob), count))
        reader.finish(reader.lease(offset, views[-1]))
    sent = sum(send(2) for _ in range(20))
    assert sent < 20
    while len(views) > 1:
        views.pop()
        gc.collect()
        for reader in readers:
            reader.reap()
        assert np.array_equal(views[0][0], np.ones(nbytes, np.uint8))
        assert not send(3)
    del views[:]
    gc.collect()
    for reader in readers:
        reader.reap()
        for offset, _ in take_all(reader):
            reader.free(offset)
    assert send(4)
    assert all(release(writer, offset)[3:] == bytes([FREE]) * (SLOTS - 3) for offset in writer._messages())
