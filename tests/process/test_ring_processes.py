"""Rings between real processes: streams, and deaths at any moment."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
from numpy.typing import NDArray

from shmq import Payload, RingReader, RingWriter, Segment, SegmentMissingError, layout, segment

Bytes = NDArray[np.uint8]
MakeName = Callable[[], str]

KIB = 1024
MIB = 1024 * KIB
SECONDS = 60
CONTENT = np.frombuffer(random.Random(7).randbytes(2 * MIB), np.uint8)
REPORT = struct.Struct("@3Q")


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another process brings about; fail when it does not."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the other process did not get there in time"
        time.sleep(0.0002)


def content(sequence: int, index: int, nbytes: int) -> Bytes:
    start = (sequence * 7919 + index * 104_729) % MIB
    return CONTENT[start : start + nbytes]


def plan(sequence: int, large: int) -> tuple[bytes, list[int]]:
    """What message ``sequence`` holds: its blob, and the sizes of its buffers (small ones lie in the record)."""
    chance = random.Random(sequence)
    blob = content(sequence, 99, chance.randrange(200)).tobytes()
    sizes = [chance.choice([0, 10, 500, 3000, large]) for _ in range(chance.choice([0, 0, 1, 1, 3]))]
    if chance.random() < 0.002:
        sizes.append(600 * KIB)
    return blob, sizes


def reserve(writer: RingWriter, nbytes: int) -> Payload:
    found: list[Payload] = []

    def is_there() -> bool:
        payload = writer.reserve(nbytes)
        if payload is not None:
            found.append(payload)
        return bool(found)

    until(is_there)
    return found[0]


def produce_one(writer: RingWriter, sequence: int, large: int, aborts: bool) -> None:
    blob, sizes = plan(sequence, large)
    buffers: list[tuple[Payload, int, int] | int] = []
    payloads: list[Payload] = []
    targets: list[Bytes] = []
    for index, nbytes in enumerate(sizes):
        if nbytes <= 500:
            buffers.append(nbytes)
            continue
        payload = reserve(writer, nbytes)
        targets.append(writer.lend(payload) if sequence % 3 == 0 else writer.target(payload))
        targets[-1][:] = content(sequence, index, nbytes)
        payloads.append(payload)
        buffers.append((payload, 0, nbytes))
        if aborts and sequence % 5 == 0 and (given_up := writer.reserve(nbytes)) is not None:
            writer.let_go(given_up)

    def copy(index: int, target: Bytes) -> None:
        target[:] = content(sequence, index, target.size)

    until(lambda: writer.post_with(blob, 1, 0, 0, buffers, copy) is not None)
    for payload in payloads:
        writer.let_go(payload)


def check_one(reader: RingReader, taken: tuple[int, int, int, int, bytes, int, int], large: int) -> list[Bytes]:
    offset, sequence, _, count, blob, _, _ = taken
    expected_blob, sizes = plan(sequence, large)
    assert blob == expected_blob
    assert count == len(sizes)
    views = reader.views(offset, len(blob), count)
    for index, view in enumerate(views):
        assert np.array_equal(view, content(sequence, index, sizes[index])), f"message {sequence} was damaged"
    return views


def produce(name: str, size: int, count: int, aborts: bool, report: int) -> None:
    """A producer's life: ``count`` messages, each reported through the pipe ``report`` (if any) once it is posted."""
    owned = Segment.create(name, size, ring_id=os.urandom(16))
    writer = RingWriter(owned, spill_limit=4 * MIB)
    for sequence in range(count):
        produce_one(writer, sequence, size // 16, aborts)
        if report >= 0:
            os.write(report, REPORT.pack(sequence, 0, 0))
    until(lambda: writer.unfinished() == 0)
    writer.close(remove=True)


@contextmanager
def started(
    target: Callable[..., None], *args: object, method: str = "fork", report: int = -1
) -> Iterator[BaseProcess]:
    process = multiprocessing.get_context(method).Process(target=target, args=(*args, report))
    process.start()
    if report >= 0:
        os.close(report)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def attach(name: str) -> Segment:
    found: list[Segment] = []

    def is_there() -> bool:
        try:
            found.append(Segment.attach(name))
        except SegmentMissingError:
            return False
        return True

    until(is_there)
    return found[0]


def reports(pipe: int) -> list[tuple[int, int, int]]:
    """All that was reported before the pipe's writers were gone."""
    with os.fdopen(pipe, "rb") as file:
        data = file.read()
    return [REPORT.unpack_from(data, at) for at in range(0, len(data) - REPORT.size + 1, REPORT.size)]


def remove(name: str) -> None:
    for left in [*segment.names(name), *segment.names(segment.MAKING + name)]:
        segment.unlink(left)


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "size", "count"), [("spawn", MIB, 20_000), ("fork", 256 * KIB, 20_000), ("fork", 64 * KIB, 5000)]
)
def test_a_stream_from_another_process_arrives_whole_and_in_order(
    make_name: MakeName, method: str, size: int, count: int
) -> None:
    name = make_name()
    with started(produce, name, size, count, True, method=method) as producer:
        reader = RingReader(attach(name), epoch=1)
        held: list[Bytes] = []
        chance = random.Random(size)
        for sequence in range(count):
            taken = next_message(reader)
            assert taken[1] == sequence
            assert taken[6] == 0
            views = check_one(reader, taken, size // 16)
            lease = reader.lease(taken[0], views)
            reader.finish(lease)
            if chance.random() < 0.05:
                held.extend(views)
            if len(held) > 2 or sequence == count - 1:
                held.clear()
            del views
            reader.reap()
        producer.join(SECONDS)
        assert producer.exitcode == 0
    assert reader.segment.words[layout.TURNS] > 10
    reader.close()
    assert segment.names(name) == []


def next_message(reader: RingReader) -> tuple[int, int, int, int, bytes, int, int]:
    found: list[tuple[int, int, int, int, bytes, int, int]] = []

    def is_there() -> bool:
        taken = reader.take()
        if taken is not None:
            found.append(taken)
        return bool(found)

    if not is_there():
        until(is_there)
    return found[0]


def test_readers_that_start_while_the_writer_is_at_work_find_their_place(make_name: MakeName) -> None:
    name, size, count = make_name(), 128 * KIB, 4000
    with started(produce, name, size, count, True) as producer:
        reader = RingReader(attach(name), epoch=1)
        lives = 1
        chance = random.Random(3)
        expected = 0
        while expected < count:
            if chance.random() < 0.03:
                reader.retire()
                lives += 1
                reader = RingReader(Segment.attach(name), epoch=lives)
            taken = next_message(reader)
            if taken[6]:
                assert taken[1] < expected, "marked as delivered before, and never was"
            else:
                assert taken[1] == expected
                expected += 1
            check_one(reader, taken, size // 16)
            if taken[6] or (chance.random() < 0.95 and taken[1] < count - 1):
                reader.free(taken[0])
        # The last message was kept, so the writer still waits, and the ring is there for one more life.
        reader.retire()
        reader = RingReader(Segment.attach(name), epoch=lives + 1)
        rest = list(iter(reader.take, None))
        assert rest[-1][1] == count - 1
        for taken in rest:
            assert taken[6] > 0
            reader.free(taken[0])
        reader.close()
        producer.join(SECONDS)
        assert producer.exitcode == 0
    assert lives > 50


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2, *range(30, 1500, 77)])
def test_all_that_a_killed_writer_had_posted_is_read_by_whoever_adopts_its_ring(
    make_name: MakeName, after: int
) -> None:
    name, size = make_name(), 256 * KIB
    receive, send = os.pipe()
    with started(produce, name, size, 1_000_000, True, report=send) as producer:
        reader = RingReader(attach(name), epoch=1)
        assert not reader.segment.adopt()
        for sequence in range(after):
            taken = next_message(reader)
            assert taken[1] == sequence
            check_one(reader, taken, size // 16)
            reader.free(taken[0])
        assert producer.pid is not None
        os.kill(producer.pid, signal.SIGKILL)
        producer.join(SECONDS)
    until(reader.segment.adopt)
    rest = list(iter(reader.take, None))
    assert [taken[1] for taken in rest] == list(range(after, after + len(rest)))
    for taken in rest:
        check_one(reader, taken, size // 16)
    reported = [sequence for sequence, _, _ in reports(receive)]
    assert reported == list(range(len(reported)))
    # One more may have been posted and not yet reported; never fewer.
    assert len(reported) <= after + len(rest) <= len(reported) + 1
    for taken in rest:
        reader.free(taken[0])
    assert reader.pending() == 0
    reader.close()
    remove(name)


def test_an_orphaned_ring_is_read_by_the_next_process_after_both_ends_were_killed(make_name: MakeName) -> None:
    name, size = make_name(), 256 * KIB
    receive, send = os.pipe()
    with started(produce, name, size, 1_000_000, True, report=send) as producer:
        attach(name).close()
        taken_receive, taken_send = os.pipe()
        with started(consume, name, size, 0.5, 1, report=taken_send) as consumer:
            # Far enough for a few laps of the ring.
            seen = [REPORT.unpack(os.read(taken_receive, REPORT.size)) for _ in range(500)]
            for process in (consumer, producer):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join(SECONDS)
    attached = attach(name)
    until(attached.adopt)
    reader = RingReader(attached, epoch=2)
    seen += reports(taken_receive)
    freed = {sequence for sequence, _, was_freed in seen if was_freed}
    rest = list(iter(reader.take, None))
    for taken in rest:
        check_one(reader, taken, size // 16)
    sequences = [taken[1] for taken in rest]
    posted = len(reports(receive))
    assert sequences == sorted(set(sequences))
    assert not freed.intersection(sequences)
    missing = set(range(posted)).difference(freed, sequences)
    # The one that the consumer freed when it was killed may not have been reported.
    assert len(missing) <= 1
    handed_out = {sequence for sequence, _, _ in seen} | missing
    assert all(taken[6] == 1 for taken in rest if taken[1] in handed_out)
    reader.close()
    remove(name)


def consume(name: str, size: int, keep: float, epoch: int, report: int) -> None:
    """A consumer's life: take, check, give most back, and report (sequence, deliveries, whether it was freed)."""
    reader = RingReader(attach(name), epoch=epoch)
    chance = random.Random(epoch)
    kept = 0
    while True:
        taken = next_message(reader)
        check_one(reader, taken, size // 16)
        is_kept = kept < 3 and chance.random() < keep
        if is_kept:
            kept += 1
        else:
            reader.free(taken[0])
        os.write(report, REPORT.pack(taken[1], taken[6], not is_kept))


def test_messages_of_killed_readers_come_again_and_none_that_was_given_back(make_name: MakeName) -> None:
    name, size, count = make_name(), 256 * KIB, 3000
    lives = 12
    seen: list[tuple[int, int, int]] = []
    with started(produce, name, size, count, True) as producer:
        attach(name).close()
        for life in range(1, lives + 1):
            receive, send = os.pipe()
            with started(consume, name, size, 0.3, life, report=send) as consumer:
                before = [REPORT.unpack(os.read(receive, REPORT.size)) for _ in range(count // lives // 2)]
                assert consumer.pid is not None
                os.kill(consumer.pid, signal.SIGKILL)
                consumer.join(SECONDS)
            of_this_life = before + reports(receive)
            earlier = {sequence for sequence, _, _ in seen}
            freed = {sequence for sequence, _, was_freed in seen if was_freed}
            sequences = [sequence for sequence, _, _ in of_this_life]
            assert sequences == sorted(set(sequences)), "out of order, or twice in one life"
            assert not freed.intersection(sequences), "given back, and delivered again"
            # The very last of a life may have been taken without a report.
            unmarked = [sequence for sequence, deliveries, _ in of_this_life if deliveries == 0]
            assert not earlier.intersection(unmarked), "delivered again without a mark"
            seen += of_this_life
        reader = RingReader(attach(name), epoch=lives + 1)
        while producer.exitcode is None:
            for taken in iter(reader.take, None):
                check_one(reader, taken, size // 16)
                seen.append((taken[1], taken[6], 1))
                reader.free(taken[0])
            producer.join(0.001)
        assert producer.exitcode == 0
    freed_last = {sequence for sequence, _, was_freed in seen if was_freed}
    # At each kill one message may have been freed and not yet reported.
    assert len(set(range(count)) - freed_last) <= lives
    assert reader.segment.words[layout.REDELIVERED_COUNT] > lives
    reader.close()


def test_a_writer_that_is_stopped_is_not_taken_for_dead_and_goes_on(make_name: MakeName) -> None:
    name, size, count = make_name(), 128 * KIB, 1000
    with started(produce, name, size, count, True) as producer:
        reader = RingReader(attach(name), epoch=1)
        assert producer.pid is not None
        for sequence in range(count):
            if sequence % 100 == 10:
                os.kill(producer.pid, signal.SIGSTOP)
                assert not reader.segment.adopt()
            taken = reader.take()
            if taken is None:
                # All that a stopped writer had posted is read; what comes next it has still to write.
                os.kill(producer.pid, signal.SIGCONT)
                taken = next_message(reader)
            assert taken[1] == sequence
            check_one(reader, taken, size // 16)
            reader.free(taken[0])
        os.kill(producer.pid, signal.SIGCONT)
        producer.join(SECONDS)
        assert producer.exitcode == 0
    reader.close()
