from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from shmq import (
    Payload,
    RingReader,
    RingWriter,
    Segment,
    SegmentMissingError,
    SegmentSpaceError,
    TooLargeError,
    layout,
    segment,
)
from shmq.spill import SpillPool

Ring = tuple[RingWriter, RingReader]
MakeRing = Callable[..., Ring]
MakeName = Callable[[], str]
Bytes = NDArray[np.uint8]

MIB = 1024 * 1024
GIB = 1024 * MIB


def no_copy(index: int, target: Bytes) -> NoReturn:
    raise AssertionError("no buffer of this message lies in its record")


def send(writer: RingWriter, *buffers: tuple[Payload, int, int]) -> int | None:
    return writer.post_with(b"", 0, 0, 0, buffers, no_copy)


def spill_names(writer: RingWriter) -> list[str]:
    return segment.names(writer.segment.name + ".")


def reserve(writer: RingWriter, nbytes: int) -> Payload:
    payload = writer.reserve(nbytes)
    assert payload is not None
    return payload


def take_view(reader: RingReader) -> tuple[int, Bytes]:
    taken = reader.take()
    assert taken is not None
    (view,) = reader.views(taken[0], len(taken[4]), 1)
    return taken[0], view


@pytest.fixture
def make_pool(make_name: MakeName) -> Iterator[Callable[[int], SpillPool]]:
    pools: list[SpillPool] = []

    def make(limit: int) -> SpillPool:
        pools.append(SpillPool(make_name(), os.urandom(16), limit))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(remove=True)


# -- the pool ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_000, 3 * MIB + 1])
def test_a_spill_segment_holds_what_was_asked_and_little_more(
    make_pool: Callable[[int], SpillPool], nbytes: int
) -> None:
    pool = make_pool(16 * MIB)
    spill = pool.take(nbytes)
    assert spill is not None
    assert nbytes <= spill.capacity <= nbytes + max(layout.PAGE, nbytes // 8)
    assert spill.segment.payload_bytes == spill.capacity
    assert pool.bytes == spill.capacity


def test_a_spill_segment_that_came_back_is_used_again_under_a_new_generation(
    make_pool: Callable[[int], SpillPool],
) -> None:
    pool = make_pool(16 * MIB)
    first = pool.take(MIB)
    assert first is not None
    generation = first.generation
    assert first.segment.words[layout.GENERATION] == generation
    pool.give_back(first)
    again = pool.take(MIB - 5000)
    assert again is first
    assert again.generation == generation + 1 == again.segment.words[layout.GENERATION]
    assert pool.take(MIB) is not first


def test_the_smallest_idle_segment_that_fits_is_used(make_pool: Callable[[int], SpillPool]) -> None:
    pool = make_pool(64 * MIB)
    spills = [pool.take(nbytes * MIB) for nbytes in (4, 2, 3)]
    for spill in spills:
        assert spill is not None
        pool.give_back(spill)
    assert pool.take(2 * MIB - 5) is spills[1]
    assert pool.take(2 * MIB - 5) is spills[2]


def test_a_small_payload_takes_no_large_segment_unless_the_limit_leaves_nothing_else(
    make_pool: Callable[[int], SpillPool],
) -> None:
    pool = make_pool(9 * MIB)
    large = pool.take(8 * MIB)
    assert large is not None
    pool.give_back(large)
    small = pool.take(MIB // 2)
    assert small is not None
    assert small is not large
    assert pool.take(MIB) is large


def test_what_is_made_ahead_is_what_is_taken(make_pool: Callable[[int], SpillPool]) -> None:
    pool = make_pool(64 * MIB)
    (capacity,) = pool.missing([3 * MIB])
    made = pool.make(capacity)
    assert pool.bytes == 0
    pool.add(made)
    assert pool.bytes == made.capacity
    assert pool.missing([3 * MIB]) == []
    assert pool.missing([3 * MIB, 3 * MIB]) == [capacity]
    assert pool.take(3 * MIB) is made


def test_nothing_is_made_ahead_that_the_limit_forbids(make_pool: Callable[[int], SpillPool]) -> None:
    pool = make_pool(5 * MIB)
    assert pool.missing([4 * MIB, 4 * MIB]) == [4 * MIB]
    assert pool.missing([6 * MIB]) == []


def test_what_was_made_ahead_is_removed_if_there_is_no_room_for_it_any_more(
    make_pool: Callable[[int], SpillPool],
) -> None:
    pool = make_pool(5 * MIB)
    late, later = pool.make(4 * MIB), pool.make(4 * MIB)
    assert late.segment.name != later.segment.name
    pool.add(late)
    pool.add(later)
    assert pool.bytes == late.capacity
    assert segment.names(later.segment.name) == []
    latest = pool.make(MIB)
    pool.close(remove=True)
    pool.add(latest)
    assert segment.names(latest.segment.name) == []


def test_the_limit_makes_room_by_removing_what_is_idle(make_pool: Callable[[int], SpillPool]) -> None:
    pool = make_pool(4 * MIB)
    idle = [pool.take(MIB) for _ in range(3)]
    for spill in idle:
        assert spill is not None
        pool.give_back(spill)
    large = pool.take(3 * MIB)
    assert large is not None
    assert pool.bytes <= pool.limit
    left = [spill for spill in idle if spill is not None and not spill.segment.memory.closed]
    assert len(left) == 1
    for spill in idle:
        assert spill is not None
        if spill not in left:
            with pytest.raises(SegmentMissingError):
                Segment.attach(spill.segment.name, magic=layout.SPILL_MAGIC)


def test_the_limit_refuses_what_only_segments_in_use_could_make_room_for(
    make_pool: Callable[[int], SpillPool],
) -> None:
    pool = make_pool(4 * MIB)
    used = [pool.take(MIB) for _ in range(4)]
    assert all(used)
    before = pool.bytes
    assert pool.take(1) is None
    assert pool.bytes == before
    assert used[2] is not None
    pool.give_back(used[2])
    assert pool.take(1) is used[2]


def test_a_payload_as_large_as_the_limit_fits_whatever_rounding_would_add(
    make_pool: Callable[[int], SpillPool],
) -> None:
    pool = make_pool(3 * MIB + 5)
    spill = pool.take(3 * MIB + 5)
    assert spill is not None
    assert spill.capacity == pool.limit


def test_a_full_directory_takes_idle_segments_first_and_is_an_error_then(
    make_pool: Callable[[int], SpillPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(64 * MIB)
    idle = pool.take(MIB)
    used = pool.take(2 * MIB)
    assert idle is not None
    assert used is not None
    pool.give_back(idle)
    looks = 0

    def free_bytes() -> int:
        nonlocal looks
        looks += 1
        return 0

    monkeypatch.setattr(segment, "free_bytes", free_bytes)
    with pytest.raises(SegmentSpaceError, match="--shm-size"):
        pool.take(8 * MIB)
    assert looks == 2
    assert idle.segment.memory.closed
    assert not used.segment.memory.closed
    assert pool.bytes == used.capacity


# -- in a ring --------------------------------------------------------------------------------------------------------


def test_what_the_ring_takes_stays_in_the_ring_and_what_is_larger_spills(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    largest = reserve(writer, writer.max_payload)
    assert largest.spill is None
    writer.let_go(largest)
    larger = reserve(writer, writer.max_payload + 1)
    assert larger.spill is not None
    assert spill_names(writer) == [f"{writer.segment.name}.{larger.spill.number}"]
    assert writer.segment.words[layout.SPILLS] == 1
    assert writer.segment.words[layout.SPILLED_BYTES] == writer.max_payload + 1
    writer.target(larger)[:] = 7
    assert send(writer, (larger, 0, 1000)) == 0
    writer.let_go(larger)
    _, view = take_view(reader)
    assert view.tolist() == [7] * 1000


def test_a_spilled_payload_is_sent_by_parts_and_read_in_place(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = reserve(writer, MIB)
    target = writer.target(payload)
    target[:] = np.arange(MIB) % 251
    assert send(writer, (payload, 10, 100), (payload, MIB - 7, 7), (payload, 0, MIB)) == 0
    taken = reader.take()
    assert taken is not None
    views = reader.views(taken[0], 0, 3)
    assert [view.tolist() for view in views[:2]] == [target[10:110].tolist(), target[-7:].tolist()]
    assert np.array_equal(views[2], target)
    target[0] = 200
    assert views[2][0] == 200
    assert not any(view.flags.writeable for view in views)


def test_any_payload_can_be_made_to_spill(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = writer.reserve_spill(10)
    assert payload is not None
    assert payload.spill is not None
    writer.target(payload)[:] = 3
    assert send(writer, (payload, 0, 10)) == 0
    _, view = take_view(reader)
    assert view.tolist() == [3] * 10


def test_a_payload_that_nothing_can_hold_is_an_error_that_names_the_limits(make_ring: MakeRing) -> None:
    writer, _ = make_ring(spill_limit=MIB)
    before = writer.position, spill_names(writer)
    with pytest.raises(TooLargeError) as caught:
        writer.reserve(MIB + 1)
    for number in (MIB + 1, writer.size, writer.max_payload, MIB):
        assert f"{number:,}" in str(caught.value)
    assert "spill_limit" in str(caught.value)
    assert (writer.position, spill_names(writer)) == before


def test_spills_beyond_the_limit_wait_for_the_reader(make_ring: MakeRing) -> None:
    writer, reader = make_ring(spill_limit=MIB)
    for value in (1, 2):
        payload = reserve(writer, MIB // 2)
        writer.target(payload)[:] = value
        assert send(writer, (payload, 0, MIB // 2)) is not None
        writer.let_go(payload)
    assert writer.reserve(MIB // 2) is None
    assert writer.post(b"small ones still fit", 0, 0) is not None
    first, view = take_view(reader)
    lease = reader.lease(first, [view])
    reader.finish(lease)
    assert writer.reserve(MIB // 2) is None
    assert view[0] == 1
    del view
    reader.reap()
    again = writer.reserve(MIB // 2)
    assert again is not None
    assert again.spill is not None
    assert again.spill.generation == 2
    writer.target(again)[:] = 9
    _, view = take_view(reader)
    assert view.min() == view.max() == 2


def test_a_spilled_payload_is_kept_until_all_its_messages_are_free(make_ring: MakeRing) -> None:
    writer, reader = make_ring(spill_limit=MIB)
    payload = reserve(writer, MIB)
    assert send(writer, (payload, 0, 10)) == 0
    assert send(writer, (payload, 10, 10)) == 1
    writer.let_go(payload)
    offsets = [taken[0] for taken in iter(reader.take, None)]
    assert writer.reserve(MIB) is None
    reader.free(offsets[0])
    writer.reclaim()
    assert writer.reserve(MIB) is None
    reader.free(offsets[1])
    writer.reclaim()
    assert reserve(writer, MIB).spill is payload.spill


def test_a_spill_that_is_let_go_unsent_or_whose_loan_is_dropped_is_used_again(make_ring: MakeRing) -> None:
    writer, _ = make_ring(spill_limit=MIB)
    first = reserve(writer, MIB)
    assert writer.reserve(MIB) is None
    writer.let_go(first)
    second = reserve(writer, MIB)
    loan = writer.lend(second)
    part = loan[5:]
    writer.let_go(second)
    del loan
    assert writer.reserve(MIB) is None
    del part
    third = reserve(writer, MIB)
    assert first.spill is second.spill is third.spill
    assert third.spill is not None
    assert third.spill.generation == 3


def test_the_next_reader_finds_the_spills_of_messages_that_come_again(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = reserve(writer, MIB)
    writer.target(payload)[:] = 8
    assert send(writer, (payload, 0, MIB)) == 0
    writer.let_go(payload)
    _, view = take_view(reader)
    del view
    reader.retire()
    reader = RingReader(Segment.attach(writer.segment.name), epoch=2)
    taken = reader.take()
    assert taken is not None
    assert taken[6] == 1
    (view,) = reader.views(taken[0], 0, 1)
    assert view.min() == view.max() == 8
    del view
    reader.close()


def test_a_view_of_a_spill_outlives_the_segments_name(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = reserve(writer, MIB)
    writer.target(payload)[:] = 8
    assert send(writer, (payload, 0, MIB)) == 0
    _, view = take_view(reader)
    writer.close(remove=True)
    assert spill_names(writer) == []
    assert view.min() == view.max() == 8


@pytest.fixture
def sparse_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments whose pages are allocated when they are touched: huge ones cost nothing then, in time or memory."""

    def map_unpopulated(name: str, fd: int, size: int) -> mmap.mmap:
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED)

    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: os.ftruncate(fd, offset + length))
    monkeypatch.setattr(segment, "_map", map_unpopulated)
    monkeypatch.setattr(segment, "free_bytes", lambda: 1 << 50)


@pytest.mark.usefixtures("sparse_segments")
@pytest.mark.parametrize("nbytes", [4 * GIB + 5, 40 * GIB])
def test_a_payload_of_many_gibibytes_is_addressed_to_its_last_byte(make_ring: MakeRing, nbytes: int) -> None:
    writer, reader = make_ring(spill_limit=nbytes)
    payload = reserve(writer, nbytes)
    target = writer.target(payload)
    assert target.nbytes == nbytes
    target[:3] = [1, 2, 3]
    target[-5:] = [4, 5, 6, 7, 8]
    assert send(writer, (payload, 0, nbytes), (payload, nbytes - 4, 3)) == 0
    taken = reader.take()
    assert taken is not None
    whole, part = reader.views(taken[0], 0, 2)
    assert whole.nbytes == nbytes
    assert whole[:3].tolist() == [1, 2, 3]
    assert whole[-5:].tolist() == [4, 5, 6, 7, 8]
    assert part.tolist() == [5, 6, 7]
    assert writer.segment.words[layout.SPILLED_BYTES] == nbytes


@pytest.mark.usefixtures("sparse_segments")
def test_a_ring_of_many_gibibytes_is_used_to_its_end(make_ring: MakeRing) -> None:
    writer, reader = make_ring(20 * GIB)
    payloads = [reserve(writer, 5 * GIB) for _ in range(3)]
    assert [payload.offset for payload in payloads] == [number * (5 * GIB + 128) for number in range(3)]
    for value, payload in enumerate(payloads, 1):
        writer.target(payload)[-1] = value
        assert send(writer, (payload, 5 * GIB - 2, 2)) == value - 1
        writer.let_go(payload)
    for value in (1, 2, 3):
        offset, view = take_view(reader)
        assert view.tolist() == [0, value]
        assert offset > 15 * GIB
        reader.free(offset)
    reader.retire()
    reader = RingReader(Segment.attach(writer.segment.name), epoch=2)
    assert reader.take() is None
    assert reserve(writer, writer.max_payload).offset == 0
    assert writer.post(b"after a turn", 0, 0) == 3
    taken = reader.take()
    assert taken is not None
    assert taken[4] == b"after a turn"
    reader.close()
