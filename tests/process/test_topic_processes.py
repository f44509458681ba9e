"""Publishers and subscribers in processes of their own: killed, stopped, restarted, forked."""

from __future__ import annotations

import contextlib
import os
import zlib
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from fmq import ForkedError, Publisher, QueueEmptyError, QueueFullError, ReaderDroppedError, Subscriber
from fmq.paths import collect_files
from shmq import collect
from tests.queues import DEADLINE_S, Child, Place, eventually, place_fixture

__all__ = ["place_fixture"]

END = b"end"


def array(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, 500 + number * 7919 % 60_000, np.uint8)


def read(connection: Connection, place: Place, hold: int = 0) -> None:
    """Read to the end, check every message, hold the last few, and tell what came."""
    with Subscriber(place.queue, **place.where) as subscriber:
        connection.send("joined")
        numbers, held = [], []
        while True:
            with subscriber.get(timeout=DEADLINE_S) as message:
                payload = message.payload
            if payload == END:
                break
            assert zlib.crc32(payload["a"]) == payload["crc"]
            numbers.append(payload["n"])
            held = [*held, payload][-hold:] if hold else []
            del payload, message
        assert all(zlib.crc32(payload["a"]) == payload["crc"] for payload in held)
        del held
    connection.send(numbers)


def take_and_wait(connection: Connection, place: Place, count: int) -> None:
    """Take a number of messages, hold them, and wait to be killed."""
    subscriber = Subscriber(place.queue, **place.where)
    connection.send("joined")
    held = [subscriber.get(timeout=DEADLINE_S) for _ in range(count)]
    connection.send("taken")
    connection.recv()
    del held


def publish(connection: Connection, place: Place, count: int) -> None:
    """Publish numbered messages, and wait to be killed."""
    publisher = Publisher(place.queue, ring_size=1 << 20, **place.where)
    connection.send(publisher.ring)
    connection.recv()
    publisher.wait_for_readers(2, timeout=DEADLINE_S)
    for number in range(count):
        put(publisher, number)
    connection.send("put")
    connection.recv()


def put(publisher: Publisher, number: int) -> None:
    data = array(number)
    publisher.put({"n": number, "a": data, "crc": zlib.crc32(data)}, timeout=DEADLINE_S)


def test_eight_processes_read_every_message_in_order_while_others_come_and_are_killed(place: Place) -> None:
    publisher = place.publisher(ring_size=1 << 20)
    readers = [Child(read, place, index % 3) for index in range(8)]
    for reader in readers:
        assert reader.hear() == "joined"
    publisher.wait_for_readers(8, timeout=5)
    total = 600
    for number in range(total):
        if number % 60 == 30:
            with Child(take_and_wait, place, 3) as careless:
                assert careless.hear() == "joined"
                publisher.wait_for_readers(9, timeout=5)
                for more in range(3):
                    put(publisher, total + number + more)
                assert careless.hear() == "taken"
                careless.kill()
        put(publisher, number)
    publisher.put(END, timeout=DEADLINE_S)
    for reader in readers:
        numbers = [number for number in reader.hear() if number < total]
        assert numbers == list(range(total))
        assert reader.join() == 0
    publisher.flush(timeout=5)
    assert publisher.readers == 0


def test_what_a_killed_publisher_had_put_is_read_by_all_and_its_ring_goes_with_the_last(place: Place) -> None:
    with Child(publish, place, 10) as child:
        ring = child.hear()
        quick, slow = place.subscriber(), place.subscriber()
        child.tell("go on")
        assert child.hear() == "put"
        child.kill()
    assert [finding.removed for finding in collect(f"shmq:{place.namespace}:")] == [False]
    for subscriber in (quick, slow):
        for number in range(10):
            with subscriber.get(timeout=5) as message:
                assert message.payload["n"] == number
                assert np.array_equal(message.payload["a"], array(number))
        with pytest.raises(QueueEmptyError):
            subscriber.get(timeout=0)
    assert place.topic_segments() == [ring]
    eventually(lambda: not nothing(quick, slow) and place.topic_segments() == [], "the ring is removed")
    # Its socket and its lock are replaced.
    place.publisher()


def nothing(*subscribers: Subscriber) -> list[Any]:
    """Let subscribers look after their rings; what came nevertheless."""
    came = []
    for subscriber in subscribers:
        try:
            came.append(subscriber.get(timeout=0.01))
        except QueueEmptyError:
            continue
    return came


def test_the_ring_of_a_topic_whose_last_process_was_killed_is_collected(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Child(publish, place, 3) as publisher, Child(take_and_wait, place, 9) as one, Child(read, place) as two:
        publisher.hear()
        publisher.tell("go on")
        assert publisher.hear() == "put"
        for child in (publisher, one, two):
            child.kill()
    findings = collect(f"shmq:{place.namespace}:")
    assert [(finding.removed, finding.reason) for finding in findings] == [
        (True, "its publisher is dead, and all its readers are gone")
    ]
    monkeypatch.setenv("FMQ_RUNTIME_DIR", place.runtime)
    assert [os.path.basename(finding.name) for finding in collect_files(place.namespace)] == [f"@{place.queue}.lock"]
    assert place.files() == []


def test_files_of_the_living_are_not_collected(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMQ_RUNTIME_DIR", place.runtime)
    publisher, consumer = place.publisher(), place.consumer()
    files = place.files()
    assert collect_files() == []
    assert place.files() == files
    assert len(files) == 5
    del publisher, consumer


def test_a_reader_that_is_stopped_holds_up_a_publisher_that_blocks_and_misses_nothing(place: Place) -> None:
    publisher = place.publisher()
    with Child(read, place) as reader:
        assert reader.hear() == "joined"
        publisher.wait_for_readers(1, timeout=5)
        reader.stop()
        sent = 0
        message = {"n": 0, "a": array(0), "crc": zlib.crc32(array(0))}
        with contextlib.suppress(QueueFullError):
            while publisher.put(message, timeout=0.05) >= 0:
                sent += 1
                message["n"] = sent
        with pytest.raises(QueueFullError, match=f"processes {reader.pid}"):
            publisher.put(message, timeout=0)
        assert publisher.readers == 1
        reader.go_on()
        publisher.put(END, timeout=DEADLINE_S)
        assert reader.hear() == list(range(sent))


@pytest.mark.parametrize("policy", ["skip", "drop"])
def test_a_reader_that_is_stopped_does_not_hold_up_one_that_reads(place: Place, policy: str) -> None:
    publisher = place.publisher(ring_size=1 << 20, policy=policy, patience=0.02)
    subscriber = place.subscriber()
    with Child(take_and_wait, place, 1) as stopped:
        assert stopped.hear() == "joined"
        publisher.wait_for_readers(2, timeout=5)
        put(publisher, 0)
        assert stopped.hear() == "taken"
        stopped.stop()
        for number in range(300):
            with subscriber.get(timeout=5) as message:
                assert message.payload["n"] == number
                assert zlib.crc32(message.payload["a"]) == message.payload["crc"]
            put(publisher, number + 1)
        assert publisher.readers == (1 if policy == "drop" else 2)
        stopped.go_on()


def drop_and_go_on(connection: Connection, place: Place) -> None:
    with Subscriber(place.queue, **place.where) as subscriber:
        connection.send("joined")
        connection.recv()
        try:
            subscriber.get(timeout=DEADLINE_S)
        except ReaderDroppedError:
            connection.send("dropped")
        with subscriber.get(timeout=DEADLINE_S) as message:
            connection.send(message.payload)


def test_a_dropped_process_is_told_and_gets_what_is_put_then(place: Place) -> None:
    publisher = place.publisher(policy="drop", patience=0)
    with Child(drop_and_go_on, place) as child:
        assert child.hear() == "joined"
        publisher.wait_for_readers(1, timeout=5)
        for _ in range(100):
            publisher.put(bytes(4000), timeout=5)
        child.tell("read")
        assert child.hear() == "dropped"
        publisher.wait_for_readers(1, timeout=5)
        publisher.put("newest")
        assert child.hear() == "newest"
        assert child.join() == 0


def use_the_parents(connection: Connection, publisher: Publisher, subscriber: Subscriber) -> None:
    refused = 0
    for use in (lambda: publisher.put(1), lambda: publisher.readers, lambda: subscriber.get(timeout=0)):
        try:
            use()
        except ForkedError:
            refused += 1
    connection.send(refused)


def test_a_forked_child_can_use_neither_and_leaves_both_alone(place: Place) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    with Child(use_the_parents, publisher, subscriber) as child:
        assert child.hear() == 3
        assert child.join() == 0
    assert publisher.readers == 1
    publisher.put("x")
    with subscriber.get(timeout=5) as message:
        assert message.payload == "x"
