from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from shmq import Payload, RingReader, RingWriter, Segment, SegmentError, layout, segment
from shmq.layout import HEADER_BYTES, RECORD_BYTES

Ring = tuple[RingWriter, RingReader]
MakeRing = Callable[..., Ring]
Bytes = NDArray[np.uint8]

KIB = 1024
MIB = 1024 * 1024
RECORD = 192
"""What a message with a blob of up to 64 bytes takes of the ring."""


def counter(writer: RingWriter, word: int) -> int:
    return int(writer.segment.words[word])


def release_byte(writer: RingWriter, offset: int) -> int:
    return int(writer.segment.memory[HEADER_BYTES + offset + layout.RELEASE_BYTE])


def fill(writer: RingWriter, blob: bytes = b"") -> int:
    """Post until the ring is full; the number of messages that fitted."""
    count = 0
    while writer.post(blob, 0, 0) is not None:
        count += 1
    return count


def take_all(reader: RingReader) -> list[int]:
    """The offsets of all messages that are there."""
    return [taken[0] for taken in iter(reader.take, None)]


def reserve_filled(writer: RingWriter, nbytes: int, value: int) -> Payload:
    payload = writer.reserve(nbytes)
    assert payload is not None
    writer.target(payload)[:] = value
    return payload


def send(writer: RingWriter, *buffers: tuple[Payload, int, int], blob: bytes = b"") -> int | None:
    return writer.post_with(blob, 0, 0, 0, buffers, no_copy)


def no_copy(index: int, target: Bytes) -> NoReturn:
    raise AssertionError("no buffer of this message lies in its record")


def snapshot(writer: RingWriter) -> bytes:
    return bytes(writer.segment.memory)


# -- records ----------------------------------------------------------------------------------------------------------


def test_every_record_begins_at_a_multiple_of_64(make_ring: MakeRing) -> None:
    writer, reader = make_ring(256 * KIB)
    for nbytes in [*range(200), 1000, 4095, 4096, 4097]:
        assert writer.post(bytes(nbytes), 0, 0) is not None
        payload = reserve_filled(writer, nbytes, 1)
        assert send(writer, (payload, 0, nbytes)) is not None
        writer.let_go(payload)
        first, second = take_all(reader)
        assert first % 64 == second % 64 == payload.offset % 64 == 0
        reader.free(first)
        reader.free(second)


def test_sequences_count_messages_and_positions_count_bytes(make_ring: MakeRing) -> None:
    writer, _ = make_ring()
    assert [writer.post(b"x" * nbytes, 0, 0) for nbytes in (0, 64, 65)] == [0, 1, 2]
    assert writer.next_sequence == 3 == counter(writer, layout.NEXT_SEQUENCE)
    assert writer.position == 128 + 192 + 256 == counter(writer, layout.HEAD)
    writer.reserve(64)
    assert writer.next_sequence == 3
    assert writer.position == 128 + 192 + 256 + 192 == counter(writer, layout.HEAD)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4000])
def test_small_buffers_lie_in_the_record_at_multiples_of_64(make_ring: MakeRing, nbytes: int) -> None:
    writer, reader = make_ring()

    def copy(index: int, target: Bytes) -> None:
        assert target.shape == (nbytes,)
        assert target.dtype == np.uint8
        target[:] = index + 1

    for blob in (b"", b"b", b"b" * 100):
        sequence = writer.post_with(blob, 7, 0, 0, [nbytes] * 3, copy)
        taken = reader.take()
        assert taken is not None
        offset, found, encoding, count, read, _, _ = taken
        assert (found, encoding, count, read) == (sequence, 7, 3, blob)
        views = reader.views(offset, len(blob), 3)
        assert [view.tolist() for view in views] == [[index + 1] * nbytes for index in range(3)]
        assert nbytes == 0 or all(view.ctypes.data % 64 == 0 for view in views)


def test_a_buffer_whose_copy_raises_leaves_the_ring_as_it_was(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = reserve_filled(writer, 100, 9)
    before = counter(writer, layout.HEAD), writer.position, writer.next_sequence

    def fail(index: int, target: Bytes) -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        writer.post_with(b"never sent", 0, 0, 0, [(payload, 0, 100), 10], fail)
    assert (counter(writer, layout.HEAD), writer.position, writer.next_sequence) == before
    assert reader.take() is None
    assert send(writer, (payload, 0, 100), blob=b"sent") == 0
    taken = reader.take()
    assert taken is not None
    assert taken[4] == b"sent"
    assert reader.views(taken[0], 4, 1)[0].tolist() == [9] * 100


@pytest.mark.parametrize("size", [0, 64 * KIB - 64, 64 * KIB + 1, 64 * KIB + 8])
def test_a_ring_of_a_size_that_no_ring_can_have_is_refused(make_name: Callable[[], str], size: int) -> None:
    owned = Segment.create(make_name(), size)
    try:
        with pytest.raises(SegmentError, match=f"{size:,}"):
            RingWriter(owned, spill_limit=0)
    finally:
        segment.unlink(owned.name)
        owned.close()


# -- laps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64 * KIB, 100 * KIB + 64, MIB])
def test_the_ring_wraps_by_jumps_and_keeps_order_and_content(make_ring: MakeRing, size: int) -> None:
    writer, reader = make_ring(size)
    held: list[tuple[int, bytes]] = []
    expected = 0
    for number in range(3000):
        blob = number.to_bytes(4, "little") * (number * 7 % 300)
        while writer.post(blob, 1, 0) is None:
            assert held
            reader.free(held.pop(0)[0])
        while taken := reader.take():
            assert taken[1] == expected
            assert taken[4] == expected.to_bytes(4, "little") * (expected * 7 % 300)
            expected += 1
            held.append((taken[0], taken[4]))
    assert expected == 3000
    assert counter(writer, layout.TURNS) >= 1500 * 700 // size
    assert all(offset + RECORD_BYTES + len(blob) <= size for offset, blob in held)


def test_a_large_ring_with_a_quick_reader_works_in_a_small_part_of_itself(make_ring: MakeRing) -> None:
    writer, reader = make_ring(8 * MIB)
    farthest = 0
    for _ in range(100_000):
        writer.post(b"x" * 60, 0, 0)
        taken = reader.take()
        assert taken is not None
        reader.free(taken[0])
        farthest = max(farthest, taken[0])
    assert writer.position > 2 * 8 * MIB
    assert farthest <= MIB + RECORD
    assert counter(writer, layout.TURNS) >= writer.position // (MIB + RECORD) - 1


def test_the_ring_marches_on_while_more_is_outstanding_and_works_small_again_afterwards(make_ring: MakeRing) -> None:
    writer, reader = make_ring(8 * MIB)
    outstanding = 0
    while outstanding < 6 * MIB:
        assert writer.post(bytes(1000), 0, 0) is not None
        outstanding += 1152
    offsets = take_all(reader)
    assert max(offsets) > 5 * MIB
    assert counter(writer, layout.TURNS) == 0
    for offset in offsets:
        reader.free(offset)
    farthest = 0
    for round_ in range(20_000):
        writer.post(bytes(1000), 0, 0)
        for offset in take_all(reader):
            reader.free(offset)
            if round_ > 2000:
                farthest = max(farthest, offset)
    assert farthest <= MIB + 1152


def test_space_comes_back_in_whatever_order_the_reader_gives_it_back(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    assert fill(writer) > 300
    offsets = take_all(reader)
    middle = len(offsets) // 2
    for offset in [*offsets[middle:], *reversed(offsets[:middle])]:
        reader.free(offset)
    assert fill(writer) >= len(offsets) - 1


def test_the_space_behind_a_record_that_is_held_is_used_again(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    count = fill(writer)
    offsets = take_all(reader)
    held = offsets[count // 3]
    for offset in offsets:
        if offset != held:
            reader.free(offset)
    assert fill(writer) >= count - 3
    assert counter(writer, layout.FOLDS) >= 1
    assert release_byte(writer, held) == layout.TAKEN


def test_what_is_free_between_records_that_are_held_is_used_for_smaller_ones(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    fill(writer, bytes(2000))
    offsets = take_all(reader)
    for offset in offsets[::2]:
        reader.free(offset)
    smaller = 2000 - 2 * RECORD_BYTES - 64
    assert fill(writer, bytes(smaller)) >= len(offsets[::2]) - 1
    assert all(release_byte(writer, offset) == layout.TAKEN for offset in offsets[1::2])


@pytest.mark.parametrize("size", [64 * KIB, 256 * KIB, MIB])
def test_a_message_that_is_held_for_gigabytes_costs_only_its_own_bytes(make_ring: MakeRing, size: int) -> None:
    writer, reader = make_ring(size)
    payload = reserve_filled(writer, 1000, 42)
    assert send(writer, (payload, 0, 1000)) == 0
    writer.let_go(payload)
    taken = reader.take()
    assert taken is not None
    (view,) = reader.views(taken[0], 0, 1)
    lease = reader.lease(taken[0], [view])
    sequence = 1
    large = writer.max_payload - 2000
    while writer.position < (5 << 30 if size == MIB else 1 << 28):
        passing = writer.reserve(large)
        assert passing is not None, f"no room at position {writer.position}"
        assert send(writer, (passing, 0, large)) == sequence
        writer.let_go(passing)
        taken = reader.take()
        assert taken is not None
        assert taken[1] == sequence
        reader.free(taken[0])
        sequence += 1
    assert counter(writer, layout.FOLDS) > 100
    assert np.all(view == 42)
    reader.finish(lease)
    del view
    reader.reap()
    writer.reclaim()
    assert writer.reserve(writer.max_payload) is not None


def test_many_messages_that_are_held_here_and_there_leave_the_rest_of_the_ring_in_use(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    held: dict[int, bytes] = {}
    for number in range(20_000):
        blob = number.to_bytes(4, "little") * 20
        assert writer.post(blob, 0, 0) is not None, f"full with {len(held)} messages held"
        taken = reader.take()
        assert taken is not None
        if number % 200 == 0:
            held[taken[0]] = blob
        else:
            reader.free(taken[0])
        if len(held) > 40:
            oldest = next(iter(held))
            del held[oldest]
            reader.free(oldest)
    assert counter(writer, layout.FOLDS) > 10
    assert all(reader.read(offset) == (0, 0, blob) for offset, blob in held.items())


def test_a_header_is_marked_invalid_before_its_space_is_written_again(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    for _ in range(9):
        writer.post(b"", 0, 0)
    offsets = take_all(reader)

    def positions() -> list[int]:
        return [counter(writer, (HEADER_BYTES + offset) // 8 + layout.POSITION_WORD) for offset in offsets]

    standing = positions()
    gone = [layout.INVALID_POSITION] * 9
    for offset in [*offsets[:3], *offsets[5:8]]:
        reader.free(offset)
    assert positions() == standing
    writer.reclaim()
    assert positions() == gone[:3] + standing[3:]
    fill(writer)
    # The first of those in the middle carries the JUMP over the others now.
    assert counter(writer, layout.FOLDS) == 1
    assert positions()[3:6] == standing[3:6]
    assert positions()[6:8] != standing[6:8]


@pytest.mark.parametrize("start", [(1 << 32) - 4096, (1 << 40) - 4096, (1 << 40) + (1 << 32) - 4096])
def test_positions_pass_the_widths_of_words_and_of_the_tail(
    make_ring: MakeRing, make_name: Callable[[], str], start: int
) -> None:
    owned = Segment.create(make_name(), 64 * KIB)
    writer = RingWriter(owned, spill_limit=0)
    writer._position = start
    owned.words[layout.HEAD] = start
    owned.words[layout.TAIL] = layout.pack_tail(start, 0)
    reader = RingReader(Segment.attach(owned.name), epoch=1)
    for number in range(2000):
        assert writer.post(bytes(100), 0, 0) == number
        taken = reader.take()
        assert taken is not None
        assert taken[1] == number
        if number % 7 == 3:
            reader.retire()
            reader = RingReader(Segment.attach(owned.name), epoch=number)
            again = reader.take()
            assert again is not None
            assert again[:2] == taken[:2]
        reader.free(taken[0])
    assert writer.position > start + 2000 * RECORD
    writer.close(remove=True)
    reader.close()


# -- a full ring ------------------------------------------------------------------------------------------------------


def test_a_full_ring_refuses_and_nothing_changes(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    fill(writer, b"x" * 1000)
    fill(writer)
    payload = Payload(0, 0, 0, None)
    before = snapshot(writer), writer.position, writer.next_sequence
    for _ in range(3):
        assert writer.post(b"", 0, 0) is None
        assert writer.post(bytes(5000), 0, 0) is None
        assert writer.reserve(1) is None
        assert writer.reserve(writer.max_payload) is None
        assert send(writer, (payload, 0, 0)) is None
    assert (snapshot(writer), writer.position, writer.next_sequence) == before
    assert len(take_all(reader)) == writer.next_sequence


def test_a_ring_that_is_full_takes_the_next_message_as_soon_as_one_is_given_back(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    count = fill(writer)
    for sequence in range(count, count + 3 * count):
        taken = reader.take()
        assert taken is not None
        assert taken[1] == sequence - count
        assert writer.post(b"", 0, 0) is None
        reader.free(taken[0])
        if writer.post(b"", 0, 0) is None:
            # One record's space may just be the JUMP that leads to it: two in a row are always enough.
            taken = reader.take()
            assert taken is not None
            reader.free(taken[0])
            assert writer.post(b"", 0, 0) == sequence
            break
    else:
        assert writer.next_sequence == 4 * count


@pytest.mark.parametrize("nbytes", [1, 500, 5000, 30_000])
@pytest.mark.parametrize("size", [64 * KIB, 256 * KIB, MIB])
def test_payloads_leave_room_for_the_messages_that_announce_them(make_ring: MakeRing, size: int, nbytes: int) -> None:
    writer, reader = make_ring(size)
    nbytes = min(nbytes, writer.max_payload)
    payloads: list[Payload] = []
    while (payload := writer.reserve(nbytes)) is not None:
        writer.target(payload)[:] = len(payloads) % 256
        payloads.append(payload)
    assert payloads
    announced = 0
    for number, payload in enumerate(payloads):
        # A reader that has everything it was told of back is all that more announcements may wait for.
        if send(writer, (payload, 0, nbytes), blob=b"x" * 40) is None:
            assert announced * 384 + RECORD_BYTES >= size // 8 - 2 * 384
            for offset in take_all(reader):
                reader.free(offset)
            announced = 0
            assert send(writer, (payload, 0, nbytes), blob=b"x" * 40) is not None
        announced += 1
        writer.let_go(payload)
        assert writer.next_sequence == number + 1


def test_one_message_of_the_longest_kind_fits_beside_a_ring_full_of_payloads(make_ring: MakeRing) -> None:
    writer, reader = make_ring(256 * KIB)
    while writer.reserve(3000) is not None:
        pass
    assert writer.post(bytes(writer.max_record - RECORD_BYTES), 0, 0) == 0
    taken = reader.take()
    assert taken is not None
    assert len(taken[4]) == writer.max_record - RECORD_BYTES


@pytest.mark.parametrize("at", [0, 10_000, 30_000, 50_000, 60_000])
def test_an_empty_ring_takes_the_largest_payload_wherever_the_writer_stands(make_ring: MakeRing, at: int) -> None:
    writer, reader = make_ring()
    while writer.position < at:
        writer.post(bytes(900), 0, 0)
    for offset in take_all(reader):
        reader.free(offset)
    payload = writer.reserve(writer.max_payload)
    assert payload is not None
    assert payload.spill is None
    assert send(writer, (payload, 0, writer.max_payload)) is not None


# -- payloads and loans -----------------------------------------------------------------------------------------------


def test_a_payload_that_is_let_go_unsent_gives_its_space_back(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    for _ in range(50):
        payloads = list(iter(lambda: writer.reserve(5000), None))
        assert len(payloads) >= 9
        for payload in payloads:
            writer.let_go(payload)
            writer.let_go(payload)
    assert reader.take() is None
    assert reader.pending() == 0


def test_a_payload_is_kept_until_the_writer_and_all_its_messages_are_through_with_it(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = reserve_filled(writer, 20_000, 1)
    assert send(writer, (payload, 0, 10_000)) == 0
    assert send(writer, (payload, 10_000, 10_000), (payload, 0, 5)) == 1
    first, second = take_all(reader)

    def is_reused() -> bool:
        taken = []
        while (other := writer.reserve(18_000)) is not None:
            taken.append(other)
        for other in taken:
            writer.let_go(other)
        return any(other.offset < payload.offset + 20_000 for other in taken)

    reader.free(first)
    assert not is_reused()
    writer.let_go(payload)
    assert not is_reused()
    reader.free(second)
    assert is_reused()


def test_a_payload_that_the_writer_still_holds_can_be_sent_again_after_its_message_is_free(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = reserve_filled(writer, 10_000, 5)
    for sequence in range(1000):
        assert send(writer, (payload, sequence, 100)) == sequence
        taken = reader.take()
        assert taken is not None
        assert reader.views(taken[0], 0, 1)[0].tolist() == [5] * 100
        reader.free(taken[0])
    writer.let_go(payload)
    writer.reclaim()
    assert writer.reserve(writer.max_payload) is not None


def test_a_loan_that_is_dropped_unsent_gives_its_space_back(make_ring: MakeRing) -> None:
    writer, _ = make_ring()
    for _ in range(50):
        loans = [writer.lend(payload) for payload in iter(lambda: writer.reserve(5000), None)]
        assert len(loans) >= 9
        part = loans[0][100:]
        del loans
        gc.collect()
        assert part.size == 4900
        del part


def test_a_loan_that_was_sent_is_not_reused_while_the_array_or_a_view_of_it_is_alive(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = writer.reserve(20_000)
    assert payload is not None
    loan = writer.lend(payload)
    loan[:] = 7
    assert payload.array() is loan
    part = loan.view(np.uint32)[5:100]
    assert send(writer, (payload, 0, 20_000)) == 0
    writer.let_go(payload)
    taken = reader.take()
    assert taken is not None
    assert np.all(reader.views(taken[0], 0, 1)[0] == 7)
    reader.free(taken[0])

    def overwrite() -> set[int]:
        others = []
        while (other := writer.reserve(4000)) is not None:
            writer.target(other)[:] = 0
            others.append(other)
        for other in others:
            writer.let_go(other)
        return {other.offset for other in others}

    overwrite()
    assert np.all(loan == 7)
    del loan
    overwrite()
    assert np.all(part == 0x07070707)
    del part
    writer.reclaim()
    assert payload.array() is None
    assert any(payload.offset <= offset < payload.offset + 20_000 for offset in overwrite())


def test_a_loan_whose_array_is_gone_waits_for_the_reader(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = writer.reserve(20_000)
    assert payload is not None
    writer.lend(payload)[:] = 7
    assert send(writer, (payload, 0, 20_000)) == 0
    taken = reader.take()
    assert taken is not None
    (view,) = reader.views(taken[0], 0, 1)
    lease = reader.lease(taken[0], [view])
    for _ in range(20):
        others = list(iter(lambda: writer.reserve(4000), None))
        assert others
        for other in others:
            writer.target(other)[:] = 0
            writer.let_go(other)
    assert np.all(view == 7)
    reader.finish(lease)
    del view
    reader.reap()
    writer.reclaim()
    assert writer.reserve(writer.max_payload) is not None


def test_an_empty_payload_can_be_reserved_lent_and_sent(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = writer.reserve(0)
    assert payload is not None
    assert writer.lend(payload).size == 0
    assert send(writer, (payload, 0, 0)) == 0
    taken = reader.take()
    assert taken is not None
    assert [view.size for view in reader.views(taken[0], 0, 1)] == [0]


# -- what the writer knows --------------------------------------------------------------------------------------------


def test_unfinished_counts_the_messages_that_are_not_done(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    assert writer.unfinished() == 0
    for _ in range(3):
        payload = reserve_filled(writer, 10, 0)
        send(writer, (payload, 0, 10))
        writer.let_go(payload)
    assert writer.unfinished() == 3
    offsets = take_all(reader)
    views = [reader.views(offset, 0, 1) for offset in offsets]
    leases = [reader.lease(offset, arrays) for offset, arrays in zip(offsets, views, strict=True)]
    assert writer.unfinished() == 3
    reader.finish(leases[1])
    assert release_byte(writer, offsets[1]) == layout.DONE
    assert writer.unfinished() == 2
    del views
    reader.reap()
    assert release_byte(writer, offsets[1]) == layout.FREE
    assert writer.unfinished() == 2
    reader.finish(leases[0])
    reader.finish(leases[2])
    assert writer.unfinished() == 0
    writer.reclaim()
    assert writer.unfinished() == 0


def test_the_high_water_mark_is_what_was_in_use_at_most(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    for count in (10, 3, 50, 20):
        for _ in range(count):
            writer.post(b"x", 0, 0)
        for offset in take_all(reader):
            reader.free(offset)
        writer.reclaim()
    assert counter(writer, layout.HIGH_WATER) == 50 * RECORD


def test_a_writer_that_waits_for_space_is_answered_once_for_what_was_given_back(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    for _ in range(3):
        writer.post(b"", 0, 0)
    offsets = take_all(reader)
    writer.want_space(1)
    assert reader.wanted() == 0
    reader.free(offsets[0])
    assert reader.wanted() == 1
    reader.answered(1)
    reader.free(offsets[1])
    assert reader.wanted() == 0
    writer.want_space(2)
    assert reader.wanted() == 2
    reader.answered(2)
    writer.want_space(3)
    assert reader.wanted() == 0
    reader.free(offsets[2])
    assert reader.wanted() == 3
    writer.want_space(0)
    assert reader.wanted() == 0
    assert counter(writer, layout.STALLS) == 3


def test_the_writer_sees_a_sleeping_reader_and_counts_doorbells(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    assert writer.asleep() == 0
    reader.sleep(5)
    assert writer.asleep() == 5
    reader.sleep(0)
    assert writer.asleep() == 0
    writer.count_doorbell()
    writer.count_doorbell()
    assert counter(writer, layout.DOORBELLS) == 2


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(make_name: Callable[[], str]) -> Iterator[RingWriter]:
    writer = RingWriter(Segment.create(make_name(), 64 * KIB), spill_limit=MIB)
    assert writer.reserve_spill(1000) is not None
    assert writer.post(b"left", 0, 0) == 0
    yield writer
    for name in segment.names(writer.segment.name):
        segment.unlink(name)


def test_a_writer_that_closes_and_removes_leaves_no_name(ended: RingWriter) -> None:
    name = ended.segment.name
    assert len(segment.names(name)) == 2
    ended.close(remove=True)
    ended.close(remove=True)
    assert segment.names(name) == []


def test_a_writer_that_closes_without_removing_leaves_an_orphan_that_can_be_read(ended: RingWriter) -> None:
    name = ended.segment.name
    ended.close(remove=False)
    assert len(segment.names(name)) == 2
    attached = Segment.attach(name)
    assert attached.adopt()
    reader = RingReader(attached, epoch=1)
    taken = reader.take()
    assert taken is not None
    assert taken[4] == b"left"
    reader.close()


def test_a_loan_outlives_its_writer(ended: RingWriter) -> None:
    payloads = [ended.reserve(1000), ended.reserve_spill(1000)]
    loans = [ended.lend(payload) for payload in payloads if payload is not None]
    ended.close(remove=True)
    del ended
    for loan in loans:
        loan[:] = 3
        assert loan.sum() == 3000


def test_a_ring_costs_no_descriptor_once_it_is_closed(make_name: Callable[[], str]) -> None:
    def cycle() -> None:
        writer = RingWriter(Segment.create(make_name(), 64 * KIB), spill_limit=MIB)
        reader = RingReader(Segment.attach(writer.segment.name), epoch=1)
        payload = writer.reserve_spill(1000)
        assert payload is not None
        send(writer, (payload, 0, 1000))
        taken = reader.take()
        assert taken is not None
        reader.views(taken[0], 0, 1)
        writer.close(remove=True)
        reader.close()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == before
