"""Ends in order: by signal, by exception, by leaving; and what is alive in another PID namespace."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import fmq
from fmq import AsyncConsumer, AsyncProducer, Consumer, Producer, QueueInUseError
from fmq.paths import QueueLock
from shmq import Segment, collect, segment
from tests.queues import DEADLINE_S, Child, Place, drain, eventually, place_fixture, run_to_end

__all__ = ["place_fixture"]

# -- signals ----------------------------------------------------------------------------------------------------------

PRODUCER = """
with fmq.Producer(queue, ring_size=1 << 20, **options) as producer:
    n = 0
    while True:
        producer.put({"n": n, "a": np.full(1000, n)})
        n += 1
        print(n, flush=True)
"""
ASYNC_PRODUCER = """
async def main():
    async with fmq.AsyncProducer(queue, ring_size=1 << 20, **options) as producer:
        n = 0
        while True:
            await producer.put({"n": n, "a": np.full(1000, n)})
            n += 1
            print(n, flush=True)
            await asyncio.sleep(0)
asyncio.run(main())
"""
CONSUMER = """
with fmq.Consumer(queue, **options) as consumer:
    held = [consumer.get()]
    while True:
        with consumer.get() as message:
            print(message.sequence, flush=True)
        del message
"""
ASYNC_CONSUMER = """
async def main():
    async with fmq.AsyncConsumer(queue, **options) as consumer:
        held = [await consumer.get()]
        while True:
            with await consumer.get() as message:
                print(message.sequence, flush=True)
            del message
asyncio.run(main())
"""
CODES = {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: -signal.SIGINT}


@contextmanager
def program(place: Place, text: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs ``text`` and ends in order on SIGTERM."""
    head = "import asyncio, sys, numpy as np, fmq\nfmq.exit_on_signals()\n"
    head += f"queue, options = {place.queue!r}, {place.where!r}\n"
    command = [sys.executable, "-W", "error", "-c", head + text]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[list[int], str]:
    """Send a signal; returns the numbers that the process printed, and what it said on stderr."""
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == CODES[number], err
    return [int(line) for line in out.split()], err


@pytest.mark.parametrize("text", [PRODUCER, ASYNC_PRODUCER], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_producer_that_is_told_to_end_drains_and_unlinks(place: Place, text: str, number: signal.Signals) -> None:
    consumer = place.consumer()
    got: list[int] = []

    def consume() -> None:
        while (message := consumer.get(timeout=DEADLINE_S)).payload is not None:
            with message:
                assert np.all(message.payload["a"] == message.payload["n"])
                got.append(message.payload["n"])

    thread = threading.Thread(target=consume)
    thread.start()
    with program(place, text) as process:
        assert process.stdout is not None
        eventually(lambda: len(got) > 50, "messages came")
        rings = place.segments()
        assert len(rings) == 1
        printed, _ = end(process, number)
        # Drained before the process was gone, and unlinked by itself.
        assert place.segments() == []
        assert printed == list(range(1, len(printed) + 1))
        assert len(printed) <= len(got) <= len(printed) + 1
        assert got == list(range(len(got)))
    place.producer().put(None)
    thread.join()


@pytest.mark.parametrize("text", [PRODUCER, ASYNC_PRODUCER], ids=["blocking", "asyncio"])
def test_a_producer_without_a_consumer_hands_over_at_once(place: Place, text: str) -> None:
    with program(place, text) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        begun = time.monotonic()
        end(process, signal.SIGTERM)
        assert time.monotonic() - begun < 4
    consumer = place.consumer()
    assert len(drain(consumer)) >= 20
    consumer.close()
    assert place.segments() == []


@pytest.mark.parametrize("text", [CONSUMER, ASYNC_CONSUMER], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_consumer_that_is_told_to_end_hands_back_what_it_holds(
    place: Place, text: str, number: signal.Signals
) -> None:
    producer = place.producer()
    for life in range(1, 5):
        producer.put_many([b"held"] if life == 1 else [])
        with program(place, text) as process:
            producer.put(b"taken")
            assert process.stdout is not None
            assert int(process.stdout.readline()) == life
            end(process, number)
        assert place.files() == []
    # More often than max_deliveries: to be told to end is no death.
    consumer = place.consumer()
    with consumer.get(timeout=1) as message:
        assert (message.sequence, message.redelivered, message.deliveries) == (0, True, 4)


def test_the_same_signal_again_ends_the_process_at_once(place: Place) -> None:
    consumer = place.consumer()
    text = """
with fmq.Producer(queue, **options) as producer:
    producer.put(b"x")
    print(1, flush=True)
    try:
        input()
    finally:
        print(2, flush=True)
        producer.close(timeout=None)
"""
    with program(place, text) as process:
        assert process.stdout is not None
        process.stdout.readline()
        message = consumer.get(timeout=5)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "2\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == -signal.SIGTERM
    message.release()
    drain(consumer)


def test_an_exit_with_frames_that_nobody_takes_does_not_hang(place: Place) -> None:
    text = """
producers = [fmq.Producer(queue, **options) for _ in range(5)]
for producer in producers:
    producer.put(b"x")
"""
    begun = time.monotonic()
    with program(place, text) as process:
        assert process.wait(DEADLINE_S) == 0
    assert time.monotonic() - begun < 5
    assert len(drain(place.consumer())) == 5


# -- collected, and used again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Producer, Consumer, AsyncProducer, AsyncConsumer])
def test_what_is_dropped_without_being_closed_gives_everything_up_with_a_warning(
    place: Place, make: Callable[..., Any]
) -> None:
    thing = make(place.queue, **place.where)
    assert place.segments() != [] or place.files() != []
    things = [thing]
    del thing
    with pytest.warns(ResourceWarning, match="unclosed"):
        drop(things)
    assert place.segments() == []
    assert place.files() == []


def drop(things: list[Any]) -> None:
    things.clear()
    gc.collect()


def test_one_object_works_in_one_event_loop_after_another(place: Place) -> None:
    producer, consumer = place.async_producer(), place.async_consumer()

    async def round_(number: int) -> None:
        await producer.put({"n": number, "a": np.arange(2000)})
        with await consumer.get(timeout=5) as message:
            assert message.payload["n"] == number

    for number in range(20):
        run_to_end(round_(number))


# -- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_waits_until_a_segment_that_is_being_made_is_known(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the child would keep a copy of its lock that it does not know of, and the lock would outlive the owner."""
    allocating, forked = threading.Event(), threading.Event()
    allocate = os.posix_fallocate

    def slowly(fd: int, offset: int, size: int) -> None:
        allocate(fd, offset, size)
        allocating.set()
        forked.wait(0.3)

    monkeypatch.setattr(os, "posix_fallocate", slowly)
    made: list[Producer] = []
    thread = threading.Thread(target=lambda: made.append(place.producer()))
    thread.start()
    assert allocating.wait(5)
    with Child(wait, place) as child:
        forked.set()
        thread.join()
        assert child.hear() == "here"
        (name,) = place.segments()
        assert segment.is_owned(name)
        made[0]._writer.segment.drop_lock()
        assert not segment.is_owned(name)


def wait(connection: Connection, _: Place) -> None:
    connection.send("here")
    connection.recv()


def test_a_fork_in_the_middle_of_taking_a_queue_does_not_keep_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = threading.Event()
    read = os.getpid

    def slowly() -> int:
        locked.set()
        time.sleep(0.2)
        return read()

    monkeypatch.setattr("fmq.paths.os.getpid", slowly)
    lock = QueueLock(place.path)
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    assert locked.wait(5)
    with Child(wait, place) as child:
        thread.join()
        assert child.hear() == "here"
        lock.release()
        again = QueueLock(place.path)
        again.acquire()
        again.release()
    place.path.tidy()


# -- PID namespaces ---------------------------------------------------------------------------------------------------


def namespaces() -> str:
    """Why no PID namespace can be made here; empty if one can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    return done.stderr.strip() if done.returncode else ""


@contextmanager
def elsewhere(place: Place, text: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a PID namespace of its own, where it is number 1."""
    head = f"import os, fmq\nassert os.getpid() == 1\nqueue, options = {place.queue!r}, {place.where!r}\n"
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        "-c",
        head + text,
    ]
    if os.getuid() == 0:
        # Another user namespace would make the directories somebody else's.
        command = [word for word in command if word not in {"--user", "--map-root-user"}]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(bool(namespaces()), reason=f"no PID namespace can be made here: {namespaces()}")
def test_who_lives_in_another_pid_namespace_is_known_to_live_and_to_die(place: Place) -> None:
    producer = """
producer = fmq.Producer(queue, ring_size=1 << 16, **options)
producer.put(b"from elsewhere")
print("ready", flush=True)
input()
"""
    consumer = """
consumer = fmq.Consumer(queue, **options)
print("ready", flush=True)
input()
"""
    with elsewhere(place, consumer) as there:
        with pytest.raises(QueueInUseError, match="has a consumer already"):
            place.consumer()
        there.kill()
        there.wait()
        eventually(lambda: can_be_taken(place), "the queue of the dead consumer is free")
    with elsewhere(place, producer) as there:
        (name,) = place.segments()
        assert collect(place.path.rings) == []
        assert segment.is_owned(name)
        there.kill()
        there.wait()
        eventually(lambda: not segment.is_owned(name), "the lock went with its owner")
    (finding,) = collect(place.path.rings)
    assert not finding.removed
    assert "1 messages wait" in finding.reason
    here = place.consumer()
    with here.get(timeout=5) as message:
        assert message.payload == b"from elsewhere"
    here.close()
    assert place.segments() == []


def can_be_taken(place: Place) -> bool:
    try:
        place.consumer().close()
    except QueueInUseError:
        return False
    return True


# -- what is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut short", "another layout"])
def test_an_orphan_that_can_t_be_read_is_kept_with_a_hint_and_can_be_discarded(place: Place, damage: str) -> None:
    name = place.path.rings + "0123456789abcdef"
    made = Segment.create(name, 64 * 1024)
    if damage == "another layout":
        made.words[1] = 99
    made.close()
    if damage == "cut short":
        os.truncate(os.path.join(segment.DIRECTORY, name), 8192)
    (finding,) = collect(place.path.rings)
    assert not finding.removed
    assert "--discard" in finding.reason
    (finding,) = collect(place.path.rings, discard=True)
    assert finding.removed
    assert place.segments() == []


def test_a_segment_whose_maker_died_between_its_two_names_is_linked_no_longer_than_its_own(make_name: Any) -> None:
    made = Segment.create(make_name(), 4096)
    left = os.path.join(segment.DIRECTORY, segment.MAKING + made.name)
    os.link(os.path.join(segment.DIRECTORY, made.name), left)
    assert made.is_linked()
    segment.unlink(made.name)
    assert not made.is_linked()
    made.close()
    assert [finding.removed for finding in collect(made.name)] == [True]
    assert not os.path.exists(left)


def test_a_mapping_that_the_kernel_refuses_is_a_typed_error(make_name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("shmq.segment.mmap.mmap", refuse)
    with pytest.raises(fmq.SegmentLimitError, match=r"can't be mapped: .*ulimit -v"):
        Segment.create(make_name(), 4096)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 1e10, "1", b"1"])
def test_a_ttl_that_is_none_is_refused_and_puts_nothing(place: Place, bad: Any) -> None:
    producer = place.producer()
    for payload in (b"small", {"a": np.zeros(5000)}):
        with pytest.raises(ValueError, match="a ttl is a number of seconds"):
            producer.put(payload, ttl=bad)
    assert drain(place.consumer()) == []


@pytest.mark.parametrize("bad", [(1.5,), "ab", 2.5, ("3",)])
def test_a_shape_that_is_none_is_refused(place: Place, bad: Any) -> None:
    with pytest.raises(TypeError):
        place.producer().empty(bad)


@pytest.mark.parametrize("bad", [5, b"/tmp/x", ["/tmp"]])
def test_a_runtime_directory_that_is_no_path_is_refused(bad: Any) -> None:
    with pytest.raises(fmq.QueueNameError, match="runtime directory"):
        Producer("q", runtime_dir=bad)
