from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from shmq import CorruptRecordError, Lease, Payload, RingReader, RingWriter, Segment, ViewsHeldError, layout
from shmq.layout import DONE, FREE, HEADER_BYTES, PENDING, TAKEN

Ring = tuple[RingWriter, RingReader]
MakeRing = Callable[..., Ring]
Bytes = NDArray[np.uint8]

KIB = 1024
MIB = 1024 * 1024


def release_byte(reader: RingReader, offset: int) -> int:
    return int(reader.segment.memory[HEADER_BYTES + offset + layout.RELEASE_BYTE])


def counter(reader: RingReader, word: int) -> int:
    return int(reader.segment.words[word])


def post(writer: RingWriter, *blobs: bytes) -> None:
    for blob in blobs:
        assert writer.post(blob, 0, 0) is not None


def post_arrays(writer: RingWriter, *values: int, nbytes: int = 1000, small: bool = False) -> None:
    """One message with one buffer for each of ``values``, filled with it."""
    buffers: list[tuple[Payload, int, int] | int] = []
    for value in values:
        if small:
            buffers.append(nbytes)
        else:
            payload = writer.reserve(nbytes)
            assert payload is not None
            writer.target(payload)[:] = value
            buffers.append((payload, 0, nbytes))
    filled = iter(values)

    def copy(index: int, target: Bytes) -> None:
        target[:] = next(filled)

    assert writer.post_with(b"", 0, 0, 0, buffers, copy) is not None
    for buffer in buffers:
        if not isinstance(buffer, int):
            writer.let_go(buffer[0])


def take_views(reader: RingReader) -> tuple[int, Lease, list[Bytes]]:
    taken = reader.take()
    assert taken is not None
    views = reader.views(taken[0], len(taken[4]), taken[3])
    return taken[0], reader.lease(taken[0], views), views


def blobs(reader: RingReader) -> list[bytes]:
    return [taken[4] for taken in iter(reader.take, None)]


@pytest.fixture
def restart() -> Iterator[Callable[[RingReader], RingReader]]:
    """Ends the life of a reader without giving anything back, as a kill does, and starts the next one."""
    started: list[RingReader] = []

    def begin_anew(reader: RingReader) -> RingReader:
        name, epoch = reader.name, counter(reader, layout.EPOCH)
        reader.retire()
        started.append(RingReader(Segment.attach(name), epoch=epoch + 1))
        return started[-1]

    yield begin_anew
    for reader in started:
        reader.retire()


# -- taking -----------------------------------------------------------------------------------------------------------


def test_messages_come_in_order_with_all_that_was_said_of_them(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    assert reader.take() is None
    writer.post(b"first", 3, 111)
    writer.post_with(b"second", 255, 222, 0, [10, 20], lambda index, target: None)
    first, second = reader.take(), reader.take()
    assert first is not None
    assert second is not None
    assert first[1:] == (0, 3, 0, b"first", 111, 0)
    assert second[1:] == (1, 255, 2, b"second", 222, 0)
    assert reader.read(first[0]) == (3, 0, b"first")
    assert reader.read(second[0]) == (255, 2, b"second")
    assert reader.take() is None


def test_a_message_is_marked_as_taken_and_then_as_free(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post(writer, b"one", b"two")
    taken = reader.take()
    assert taken is not None
    assert release_byte(reader, taken[0]) == TAKEN
    assert release_byte(reader, taken[0] + 192) == PENDING
    reader.free(taken[0])
    assert release_byte(reader, taken[0]) == FREE


def test_has_more_tells_whether_take_has_something_to_look_at(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    assert not reader.has_more()
    post(writer, b"one")
    assert reader.has_more()
    reader.take()
    assert not reader.has_more()


def test_reserved_and_aborted_payloads_are_passed_over(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payloads = [writer.reserve(100) for _ in range(3)]
    post(writer, b"behind them")
    assert payloads[1] is not None
    writer.let_go(payloads[1])
    assert blobs(reader) == [b"behind them"]


def test_a_reader_follows_when_what_it_stood_on_was_taken_back(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post(writer, b"one")
    aborted = writer.reserve(100)
    assert aborted is not None
    taken = reader.take()
    assert taken is not None
    reader.free(taken[0])
    writer.let_go(aborted)
    another = writer.reserve(100)
    assert another is not None
    writer.let_go(another)
    writer.reclaim()
    assert reader.take() is None
    post(writer, b"two")
    assert blobs(reader) == [b"two"]


def test_a_reader_follows_when_the_tail_went_past_the_head_it_saw_last(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post(writer, b"one")
    aborted = writer.reserve(100)
    assert aborted is not None
    taken = reader.take()
    assert taken is not None
    reader.free(taken[0])
    writer.let_go(aborted)
    another = writer.reserve(100)
    assert another is not None
    writer.let_go(another)
    post(writer, b"two")
    writer.reclaim()
    assert blobs(reader) == [b"two"]


def test_a_reader_follows_a_jump_that_a_fold_laid_under_it(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post(writer, b"held")
    aborted = writer.reserve(5000)
    assert aborted is not None
    assert reader.take() is not None
    writer.let_go(aborted)
    while (another := writer.reserve(5000)) is not None and not counter(reader, layout.FOLDS):
        writer.let_go(another)
    assert counter(reader, layout.FOLDS)
    post(writer, b"behind the fold")
    assert blobs(reader) == [b"behind the fold"]


# -- views ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [True, False])
def test_views_are_read_only_and_show_what_was_written(make_ring: MakeRing, small: bool) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 1, 2, 3, small=small)
    _, _, views = take_views(reader)
    assert [(view.dtype, view.shape, set(view.tolist())) for view in views] == [
        (np.uint8, (1000,), {value}) for value in (1, 2, 3)
    ]
    for view in views:
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)


def test_views_look_into_the_ring_and_not_at_a_copy(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    payload = writer.reserve(100)
    assert payload is not None
    target = writer.target(payload)
    writer.post_with(b"", 0, 0, 0, [(payload, 10, 50)], lambda index, target: None)
    _, _, (view,) = take_views(reader)
    target[:] = np.arange(100)
    assert view.tolist() == list(range(10, 60))


def test_a_message_is_free_when_it_is_finished_and_its_last_view_is_gone(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 1, 2)
    offset, lease, views = take_views(reader)
    reader.reap()
    assert release_byte(reader, offset) == TAKEN
    reader.finish(lease)
    reader.finish(lease)
    assert release_byte(reader, offset) == DONE
    views.pop()
    reader.reap()
    assert release_byte(reader, offset) == DONE
    assert reader.held() == [lease]
    views.pop()
    assert release_byte(reader, offset) == DONE
    reader.reap()
    assert release_byte(reader, offset) == FREE
    assert reader.held() == []


def test_a_message_whose_views_are_gone_first_is_free_when_it_is_finished(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 1, 2)
    offset, lease, views = take_views(reader)
    del views
    reader.reap()
    assert release_byte(reader, offset) == TAKEN
    reader.finish(lease)
    assert release_byte(reader, offset) == FREE


def make_slice(view: Bytes) -> object:
    return view[10:][5:]


def make_reshaped(view: Bytes) -> object:
    return view.reshape(10, 100).T.view(np.int8)


def make_memoryview(view: Bytes) -> object:
    return memoryview(view)[3:]


def make_array_over_memoryview(view: Bytes) -> object:
    return np.frombuffer(memoryview(view), np.uint16)


def make_iterator(view: Bytes) -> object:
    return iter(view)


@pytest.mark.parametrize(
    "derive", [make_slice, make_reshaped, make_memoryview, make_array_over_memoryview, make_iterator]
)
@pytest.mark.parametrize("small", [True, False])
def test_whatever_was_made_from_a_view_without_a_copy_keeps_the_space(
    make_ring: MakeRing, derive: Callable[[Bytes], object], small: bool
) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 7, small=small)
    offset, lease, views = take_views(reader)
    derived = derive(views[0])
    del views
    gc.collect()
    reader.reap()
    reader.finish(lease)
    assert release_byte(reader, offset) == DONE
    with pytest.raises(ViewsHeldError):
        reader.close()
    del derived
    gc.collect()
    reader.reap()
    assert release_byte(reader, offset) == FREE


def test_a_copy_keeps_nothing(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 7)
    offset, lease, views = take_views(reader)
    copies = [view.copy() for view in views]
    reader.finish(lease)
    del views
    reader.reap()
    assert release_byte(reader, offset) == FREE
    assert copies[0].tolist() == [7] * 1000


def test_views_may_die_on_other_threads_and_in_cycles(make_ring: MakeRing) -> None:
    writer, reader = make_ring(MIB)
    handed: list[tuple[int, Lease, list[Bytes]]] = []
    for value in range(40):
        post_arrays(writer, value, value)
        handed.append(take_views(reader))
    offsets = [offset for offset, _, _ in handed]
    for _, lease, _ in handed:
        reader.finish(lease)
    stacks: list[list[list[object]]] = [[] for _ in range(4)]
    for index, (_, _, views) in enumerate(handed):
        cycle: list[object] = [views]
        cycle.append(cycle)
        stacks[index % 4].append(cycle)
    del handed, views, cycle

    def drop(stack: list[list[object]]) -> None:
        stack.clear()
        gc.collect()

    threads = [threading.Thread(target=drop, args=(stack,)) for stack in stacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    gc.collect()
    assert {release_byte(reader, offset) for offset in offsets} == {DONE}
    reader.reap()
    assert {release_byte(reader, offset) for offset in offsets} == {FREE}


def test_a_message_that_was_dropped_by_its_holder_is_done_when_its_last_view_is_gone_too(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 1)
    post_arrays(writer, 2)
    first, first_lease, first_views = take_views(reader)
    second, second_lease, second_views = take_views(reader)
    del first_views
    reader.dropped.append(first_lease)
    reader.dropped.append(second_lease)
    reader.reap()
    assert release_byte(reader, first) == FREE
    assert release_byte(reader, second) == TAKEN
    assert second_views[0][0] == 2
    del second_views
    reader.reap()
    assert release_byte(reader, second) == FREE


def test_an_empty_buffer_is_an_empty_array_and_holds_nothing(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 0, 0, nbytes=0)
    offset, lease, views = take_views(reader)
    assert [view.size for view in views] == [0, 0]
    reader.finish(lease)
    assert release_byte(reader, offset) == FREE


def test_a_view_survives_the_reuse_of_everything_around_it(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    kept: list[tuple[int, Lease, Bytes]] = []
    for round_ in range(400):
        post_arrays(writer, round_ % 256, nbytes=700, small=round_ % 2 == 0)
        _, lease, views = take_views(reader)
        kept.append((round_ % 256, lease, views.pop()))
        if round_ % 3 or len(kept) > 5:
            # The oldest, the youngest and one in the middle take turns.
            lease = kept.pop([0, -1, len(kept) // 2][round_ % 3])[1]
            reader.finish(lease)
        del lease, views
        reader.reap()
        for value, _, view in kept:
            assert view.min() == view.max() == value
    assert counter(reader, layout.TURNS) > 5


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_the_next_reader_gets_what_was_taken_first_and_then_what_was_not(
    make_ring: MakeRing, restart: Callable[[RingReader], RingReader]
) -> None:
    writer, reader = make_ring()
    post(writer, b"freed")
    for value in (1, 2, 3):
        post_arrays(writer, value)
    post(writer, b"taken", b"pending", b"pending too")
    freed = reader.take()
    assert freed is not None
    reader.free(freed[0])
    held = [take_views(reader) for _ in range(3)]
    done, done_lease, done_views = held[1]
    reader.finish(done_lease)
    taken = reader.take()
    assert taken is not None
    assert release_byte(reader, done) == DONE
    assert reader.pending() == 6
    del held, done_views

    reader = restart(reader)
    assert reader.pending() == 6
    got = list(iter(reader.take, None))
    assert [(each[1], each[6]) for each in got] == [(1, 1), (3, 1), (4, 1), (5, 0), (6, 0)]
    assert [each[4] for each in got[2:]] == [b"taken", b"pending", b"pending too"]
    assert reader.views(got[1][0], 0, 1)[0].tolist() == [3] * 1000
    assert release_byte(reader, done) == FREE
    assert counter(reader, layout.REDELIVERED_COUNT) == 3
    for each in got:
        reader.free(each[0])
    assert reader.pending() == 0


def test_deliveries_count_the_consumers_that_died_with_a_message(
    make_ring: MakeRing, restart: Callable[[RingReader], RingReader]
) -> None:
    writer, reader = make_ring()
    post(writer, b"poison")
    for deliveries in range(5):
        taken = reader.take()
        assert taken is not None
        assert taken[4:] == (b"poison", 0, deliveries)
        reader = restart(reader)
    assert counter(reader, layout.REDELIVERED_COUNT) == 4


def test_the_next_reader_is_known_by_its_epoch_and_pid(
    make_ring: MakeRing, restart: Callable[[RingReader], RingReader]
) -> None:
    _, reader = make_ring()
    assert counter(reader, layout.EPOCH) == 1
    reader = restart(reader)
    assert counter(reader, layout.EPOCH) == 2
    assert counter(reader, layout.CONSUMER_PID) == os.getpid()


def test_a_thousand_restarts_leave_nothing_in_use(
    make_ring: MakeRing, restart: Callable[[RingReader], RingReader]
) -> None:
    writer, reader = make_ring()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        post_arrays(writer, number % 256, nbytes=3000)
        _, _, views = take_views(reader)
        del views
        reader = restart(reader)
        offset, lease, views = take_views(reader)
        assert views[0][-1] == number % 256
        del views
        reader.reap()
        reader.finish(lease)
        assert release_byte(reader, offset) == FREE
    assert len(os.listdir("/proc/self/fd")) == before
    writer.reclaim()
    assert reader.pending() == 0
    assert writer.reserve(writer.max_payload) is not None


def test_a_reader_that_starts_finds_its_place_wherever_the_ring_stands(
    make_ring: MakeRing, restart: Callable[[RingReader], RingReader]
) -> None:
    writer, reader = make_ring()
    held: list[int] = []
    expected: list[bytes] = []
    for number in range(1500):
        blob = number.to_bytes(4, "little") * (number % 90)
        post(writer, blob)
        taken = reader.take()
        assert taken is not None
        if number % 11 == 0:
            held.append(taken[0])
            expected.append(blob)
        else:
            reader.free(taken[0])
        if len(held) > 12:
            reader.free(held.pop(5))
            expected.pop(5)
        if number % 10 == 0:
            reader = restart(reader)
            got = list(iter(reader.take, None))
            assert [each[4] for each in got] == expected
            held = [each[0] for each in got]
    assert counter(reader, layout.TURNS) > 3
    assert counter(reader, layout.FOLDS) > 0


def test_a_reader_that_only_counts_leaves_no_trace(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post(writer, b"one", b"two", b"three")
    reader.take()
    before = bytes(reader.segment.memory)
    peeking = RingReader(Segment.attach(reader.name), epoch=77, peek=True)
    assert peeking.pending() == 3
    assert peeking.unfinished() == 3
    peeking.close()
    assert bytes(reader.segment.memory) == before


# -- expiry -----------------------------------------------------------------------------------------------------------


def test_an_expired_message_is_never_handed_out_but_freed_and_counted(
    make_ring: MakeRing, restart: Callable[[RingReader], RingReader]
) -> None:
    writer, reader = make_ring()
    now = time.monotonic_ns()
    writer.post(b"too late", 0, 0, expires=1)
    writer.post(b"in time", 0, 0, expires=now + 3_600_000_000_000)
    writer.post(b"too late as well", 0, 0, expires=now)
    writer.post(b"at any time", 0, 0)
    assert blobs(reader) == [b"in time", b"at any time"]
    assert counter(reader, layout.EXPIRED_COUNT) == 2
    assert reader.pending() == 2
    reader = restart(reader)
    assert blobs(reader) == [b"in time", b"at any time"]
    assert counter(reader, layout.EXPIRED_COUNT) == 2


def test_a_message_that_expired_after_its_consumer_died_with_it_is_not_delivered_again(
    make_ring: MakeRing, restart: Callable[[RingReader], RingReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = make_ring()
    expires = time.monotonic_ns() + 3_600_000_000_000
    writer.post(b"short-lived", 0, 0, expires)
    taken = reader.take()
    assert taken is not None
    reader = restart(reader)
    monkeypatch.setattr(time, "monotonic_ns", lambda: expires)
    assert reader.take() is None
    assert release_byte(reader, taken[0]) == FREE
    assert counter(reader, layout.EXPIRED_COUNT) == 1
    assert counter(reader, layout.REDELIVERED_COUNT) == 0


def test_a_message_that_was_set_aside_is_not_handed_out_again(
    make_ring: MakeRing, restart: Callable[[RingReader], RingReader]
) -> None:
    writer, reader = make_ring()
    post(writer, b"poison", b"food")
    taken = reader.take()
    assert taken is not None
    reader.segment.memory[HEADER_BYTES + taken[0] + layout.RELEASE_BYTE] = layout.SET_ASIDE
    reader = restart(reader)
    assert blobs(reader) == [b"food"]
    assert writer.unfinished() == 1
    assert release_byte(reader, taken[0]) == layout.SET_ASIDE


# -- counting ---------------------------------------------------------------------------------------------------------


def test_pending_counts_all_that_is_not_free_wherever_the_reader_stands(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    assert reader.pending() == 0
    for value in range(5):
        post_arrays(writer, value)
    assert reader.pending() == 5
    _, lease, views = take_views(reader)
    reader.finish(lease)
    assert reader.pending() == 5
    assert reader.unfinished() == 4 == writer.unfinished()
    del views
    reader.reap()
    assert reader.pending() == 4
    second = reader.take()
    assert second is not None
    assert second[1] == 1
    assert reader.pending() == 4


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_with_live_views_is_an_error_and_the_reader_stays_usable(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 5)
    offset, lease, views = take_views(reader)
    for _ in range(2):
        with pytest.raises(ViewsHeldError, match=reader.name):
            reader.close()
    assert views[0].tolist() == [5] * 1000
    post(writer, b"still read")
    post_arrays(writer, 6)
    taken = reader.take()
    assert taken is not None
    assert taken[4] == b"still read"
    reader.free(taken[0])
    another, another_lease, another_views = take_views(reader)
    assert another_views[0].tolist() == [6] * 1000
    reader.finish(lease)
    reader.finish(another_lease)
    del views, another_views
    reader.reap()
    assert [release_byte(reader, each) for each in (offset, taken[0], another)] == [FREE] * 3
    reader.close()
    reader.close()


def test_closing_with_a_live_view_of_a_spill_segment_is_an_error_too(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 5, nbytes=100_000)
    post_arrays(writer, 6)
    _, _, spilled = take_views(reader)
    with pytest.raises(ViewsHeldError):
        reader.close()
    _, _, views = take_views(reader)
    assert views[0].tolist() == [6] * 1000
    assert spilled[0].min() == spilled[0].max() == 5
    del spilled, views
    reader.close()


def test_a_retired_reader_gives_nothing_back_and_its_views_stay_readable(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 5)
    post_arrays(writer, 6)
    post_arrays(writer, 7, nbytes=100_000)
    handed = [take_views(reader) for _ in range(3)]
    reader.retire()
    reader.retire()
    for offset, lease, _ in handed:
        reader.finish(lease)
        reader.free(offset)
    assert [views[0].tolist() for _, _, views in handed[:2]] == [[5] * 1000, [6] * 1000]
    assert handed[2][2][0].min() == 7
    memory = writer.segment.memory
    assert {memory[HEADER_BYTES + offset + layout.RELEASE_BYTE] for offset, _, _ in handed} == {TAKEN}


def test_a_retired_reader_still_lets_its_messages_be_finished(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 5)
    _, lease, views = take_views(reader)
    del views
    reader.retire()
    reader.finish(lease)
    reader.reap()


def test_a_reader_that_was_closed_can_still_be_told_to_free(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post(writer, b"one")
    taken = reader.take()
    assert taken is not None
    reader.close()
    reader.free(taken[0])
    assert writer.segment.memory[HEADER_BYTES + taken[0] + layout.RELEASE_BYTE] == TAKEN


def test_a_forked_child_gives_nothing_back(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post_arrays(writer, 1)
    post_arrays(writer, 2)
    post(writer, b"three")
    handed = [take_views(reader), take_views(reader)]
    plain = reader.take()
    assert plain is not None
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            (_, first_lease, first_views), (_, second_lease, _) = handed
            reader.free(plain[0])
            reader.finish(second_lease)
            first_views.clear()
            reader.dropped.append(first_lease)
            reader.reap()
            reader.finish(first_lease)
            reader.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert [release_byte(reader, offset) for offset in (handed[0][0], handed[1][0], plain[0])] == [TAKEN] * 3


def test_spill_segments_that_are_gone_and_not_looked_at_are_unmapped(make_ring: MakeRing) -> None:
    writer, reader = make_ring(spill_limit=600_000)
    name = writer.segment.name

    def mapped() -> set[str]:
        """The spill segments that the reader has mapped (the writer's were mapped under another name)."""
        with open("/proc/self/maps") as maps:
            return {line.split()[5] for line in maps if f"/{name}." in line}

    post_arrays(writer, 1, nbytes=100_000)
    _, lease, views = take_views(reader)
    reader.finish(lease)
    del views
    reader.reap()
    reader.tidy()
    assert mapped() == {f"/dev/shm/{name}.1"}
    # Too small and in the way of the limit, the first one is removed for the second.
    post_arrays(writer, 2, nbytes=550_000)
    _, _, views = take_views(reader)
    assert mapped() == {f"/dev/shm/{name}.2"}
    assert views[0].min() == views[0].max() == 2


def test_a_reader_of_a_ring_without_a_tail_does_not_start(make_ring: MakeRing) -> None:
    writer, reader = make_ring()
    post(writer, b"one")
    writer.segment.words[layout.TAIL] = layout.pack_tail(64, 4096)
    with pytest.raises(CorruptRecordError, match=reader.name):
        RingReader(Segment.attach(reader.name), epoch=2)
