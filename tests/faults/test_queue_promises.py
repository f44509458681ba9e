"""The promises of the queue, held against the faults that queues of this kind are known for."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmq import (
    ClosedError,
    Consumer,
    DecodeError,
    Message,
    Producer,
    QueueEmptyError,
    QueueFullError,
    QueueInUseError,
    ShmqError,
    codec,
)
from fmq.doorbell import ConsumerBell, ProducerBell
from fmq.paths import consumer_is_alive
from shmq import collect, orphans, segment
from shmq.layout import DOORBELLS, HEADER_BYTES
from tests.queues import (
    DEADLINE_S,
    Child,
    Place,
    drain,
    eventually,
    fill,
    is_empty,
    place_fixture,  # noqa: F401
)

ARRAY = np.arange(3000, dtype=np.int16)


def settle(consumer: Consumer) -> None:
    with pytest.raises(QueueEmptyError):
        consumer.get(timeout=0)


# -- a put that returned is delivered ---------------------------------------------------------------------------------


def test_messages_arrive_though_no_doorbell_ever_does(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProducerBell, "send", lambda self, frame: True)
    producer, consumer = place.producer(), place.consumer()
    with ThreadPoolExecutor(1) as pool:
        for index in range(10):
            waiting = pool.submit(consumer.get, timeout=DEADLINE_S)
            producer.put(index)
            with waiting.result(DEADLINE_S) as message:
                assert message.payload == index


def test_a_put_gets_its_space_though_no_word_of_the_consumer_ever_arrives(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConsumerBell, "send_to", lambda self, address, frame: None)
    producer, consumer = place.producer(), place.consumer()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(10):
            fill(producer)
            waiting = pool.submit(producer.put, bytes(4000), timeout=DEADLINE_S)
            eventually(lambda: producer._protocol._waiting, "the put waits")
            drain(consumer)
            waiting.result(DEADLINE_S)
            drain(consumer)


def test_after_many_waits_without_traffic_the_first_message_comes_by_its_doorbell(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    words = producer._writer.segment.words
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            waiting = pool.submit(consumer.get, timeout=DEADLINE_S)
            sleeps: set[int] = set()
            eventually(lambda seen=sleeps: seen.add(producer._asleep()) or len(seen) > 6, "it slept again and again")
            eventually(producer._asleep, "it sleeps")
            rung = words[DOORBELLS]
            producer.put(b"x")
            assert words[DOORBELLS] == rung + 1
            waiting.result(DEADLINE_S).release()


def test_a_put_that_waits_goes_on_with_the_next_consumer(place: Place) -> None:
    producer, first = place.producer(), place.consumer()
    count = fill(producer)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(producer.put, bytes(4000), timeout=None)
        eventually(lambda: producer._protocol._waiting, "the put waits")
        first.close()
        second = place.consumer()
        assert drain(second)[:count] == list(range(count))
        assert waiting.result(DEADLINE_S) == count


def die_while_copying(connection: Connection, place: Place) -> None:
    def stuck(source: Any, target: Any) -> None:
        connection.send("copying")
        signal.pause()

    producer = Producer(place.queue, ring_size=1024 * 1024, **place.where)
    producer.put(b"before")
    codec.copy_buffer = stuck
    producer.put({"a": np.arange(30_000)})


def test_a_producer_that_dies_in_the_middle_of_a_copy_put_nothing_and_leaves_nothing(place: Place) -> None:
    consumer = place.consumer()
    with Child(die_while_copying, place) as child:
        assert child.hear() == "copying"
        child.kill()
    with consumer.get(timeout=DEADLINE_S) as message:
        assert message.payload == b"before"
    del message
    eventually(lambda: is_settled(consumer) and place.segments() == [], "the ring was removed")


def is_settled(consumer: Consumer) -> bool:
    try:
        consumer.get(timeout=0.01)
    except QueueEmptyError:
        return True
    return False


def test_a_spill_made_while_a_consumer_starts_is_not_taken_for_left_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Producer] = []
    names = orphans.names

    def names_and_then_a_producer(prefix: str) -> list[str]:
        found = names(prefix)
        if prefix == place.path.rings and not made:
            made.append(place.producer())
            made[0].put(np.arange(100_000))
        return found

    monkeypatch.setattr(orphans, "names", names_and_then_a_producer)
    consumer = place.consumer()
    assert made
    with consumer.get(timeout=DEADLINE_S) as message:
        assert (message.payload == np.arange(100_000)).all()


def test_a_producer_and_a_consumer_can_start_in_the_same_instant(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Consumer] = []
    open_ = segment._open

    def open_after_a_consumer_started(name: str) -> int:
        monkeypatch.setattr(segment, "_open", open_)
        made.append(place.consumer())
        return open_(name)

    monkeypatch.setattr(segment, "_open", open_after_a_consumer_started)
    producer = place.producer()
    producer.put(b"x")
    with made[0].get(timeout=DEADLINE_S) as message:
        assert message.payload == b"x"


def test_many_that_ask_whether_a_consumer_lives_do_not_keep_one_from_starting(place: Place) -> None:
    over = threading.Event()
    place.path.make_directory()
    Path(place.path.lock).touch()

    def ask() -> None:
        while not over.is_set():
            consumer_is_alive(place.path)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for _ in range(20):
                place.consumer().close()
                place.path.make_directory()
                Path(place.path.lock).touch()
        finally:
            over.set()
        for future in asking:
            future.result(DEADLINE_S)
    os.unlink(place.path.lock)
    place.path.tidy()


def test_of_many_consumers_that_start_at_once_one_gets_the_queue(place: Place) -> None:
    for _ in range(5):
        barrier = threading.Barrier(6)

        def start(barrier: threading.Barrier) -> Consumer | None:
            barrier.wait(DEADLINE_S)
            try:
                return place.consumer()
            except QueueInUseError as error:
                assert error.pid == os.getpid()  # noqa: PT017
                return None

        with ThreadPoolExecutor(6) as pool:
            started = [future.result(DEADLINE_S) for future in [pool.submit(start, barrier) for _ in range(6)]]
        (winner,) = [consumer for consumer in started if consumer is not None]
        producer = place.producer()
        producer.put(b"x")
        winner.get(timeout=DEADLINE_S).release()
        winner.close()


def test_a_consumer_that_follows_another_at_once_keeps_its_socket(place: Place) -> None:
    for _ in range(20):
        place.consumer().close()
        consumer = place.consumer()
        # The socket of the one before is closed in the background, which may remove a file of that name.
        producer = place.producer()
        eventually(lambda here=consumer: hears(here), "the producer was heard")
        assert os.path.exists(place.path.socket)
        producer.close()
        consumer.close()


def hears(consumer: Consumer) -> bool:
    settle(consumer)
    return any(source.address is not None for source in consumer._protocol._order)


# -- a view is never overwritten --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_held_however_long_stays_as_it_was(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    producer = place.producer(ring_size=chance.choice([64, 128, 1024]) * 1024, spill_limit=400_000)
    consumer = place.consumer()
    sizes = [3, 100, 2000, 9000, 20_000, 70_000]
    held: list[tuple[int, Any]] = []
    loans: list[tuple[int, Any]] = []
    put = got = 0
    for step in range(1500):
        match chance.randrange(8):
            case 0 | 1 | 2:
                arrays = [np.full(chance.choice(sizes), put % 251, np.uint8) for _ in range(chance.randrange(3))]
                try:
                    producer.put([put, *arrays], timeout=0)
                    put += 1
                except QueueFullError:
                    pass
            case 3:
                try:
                    loan = producer.empty(chance.choice(sizes), timeout=0)
                except QueueFullError:
                    continue
                loan[:] = put % 251
                if chance.random() < 0.7:
                    try:
                        producer.put([put, loan[: loan.size // 2], loan], timeout=0)
                        put += 1
                    except QueueFullError:
                        pass
                if chance.random() < 0.3:
                    loans.append((int(loan[0]), loan))
                del loan
            case 4 | 5 | 6:
                try:
                    message = consumer.get(timeout=0)
                except QueueEmptyError:
                    continue
                number, *views = message.payload
                assert number == got
                got += 1
                assert all((view == number % 251).all() for view in views)
                if views and chance.random() < 0.4:
                    held.append((number % 251, chance.choice(views)[1:]))
                if chance.random() < 0.1:
                    held.append((number % 251, message))
                elif chance.random() < 0.5:
                    message.release()
                del message, views
            case 7:
                for things in (held, loans):
                    while len(things) > 8:
                        things.pop(chance.randrange(len(things)))
        if step % 10 == 0:
            for value, thing in held + loans:
                arrays = thing.payload[1:] if isinstance(thing, Message) else [thing]
                assert all((array == value).all() for array in arrays)
            thing = arrays = None
    assert got > 100
    held.clear()
    loans.clear()
    thing = arrays = None
    rest = drain(consumer)
    assert len(rest) == put - got
    settle(consumer)
    assert is_empty(producer)


def test_large_buffers_never_pass_through_the_serialiser() -> None:
    for payload in ({"a": np.zeros(1_000_000)}, {"b": bytes(1_000_000)}, [memoryview(bytes(1_000_000))]):
        assert len(codec.encode(payload).blob) < 100


# -- errors touch their own message only ------------------------------------------------------------------------------


def test_an_exception_in_the_users_code_gives_the_message_back(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    for _ in range(100):
        producer.put({"a": ARRAY}, timeout=0)
        with pytest.raises(ZeroDivisionError):
            work(consumer)
        settle(consumer)
    assert is_empty(producer)


def work(consumer: Consumer) -> None:
    with consumer.get(timeout=0) as message:
        assert int(message.payload["a"][0]) / 0


@pytest.mark.parametrize("seed", range(4))
def test_damage_anywhere_in_a_ring_is_a_typed_error_and_other_rings_go_on(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    good = place.producer()
    for _ in range(40):
        bad = place.producer()
        bad.put_many([b"x" * 300, {"a": ARRAY[:1000]}, "text", {"a": ARRAY}, {"b": np.arange(20_000)}, b"y"])
        words = bad._writer.segment.memory
        for _ in range(chance.randrange(1, 6)):
            where = chance.choice([chance.randrange(512, 1056), HEADER_BYTES + chance.randrange(8192)])
            words[where] = chance.randrange(256)
        good.put(b"good")
        consumer = place.consumer()
        seen = 0
        for _ in range(100):
            try:
                message = consumer.get(timeout=0)
            except QueueEmptyError:
                break
            except ShmqError:
                continue
            seen += message.payload == b"good"
            message.release()
            del message
        assert seen == 1
        gc.collect()
        consumer.close()
        forget(place, bad)


def forget(place: Place, producer: Producer) -> None:
    """Close a producer whose ring was damaged, and remove what it left."""
    producer.close(timeout=0)
    place._made.remove(producer)
    for name in place.segments():
        if name.startswith(producer.ring):
            segment.unlink(name)


def test_a_payload_damaged_in_the_ring_is_a_decode_error_at_worst(place: Place) -> None:
    chance = random.Random(0)
    producer, consumer = place.producer(), place.consumer()
    for index in range(300):
        start = HEADER_BYTES + producer._writer._offset + 128
        producer.put({"n": index, "a": ARRAY[:50], "t": ("x", 2**70), "d": [1.5, None, b"raw"]})
        producer._writer.segment.memory[start + chance.randrange(100)] = chance.randrange(256)
        try:
            consumer.get(timeout=0).release()
        except (DecodeError, ShmqError):
            pass
        except QueueEmptyError:
            break
    producer.put(b"next")
    messages = consumer.get_many(timeout=0)
    assert messages[-1].payload == b"next"


# -- nothing leaks, and nothing of others is touched ------------------------------------------------------------------


def test_a_foreign_file_that_only_looks_like_a_spill_is_left_alone(place: Place) -> None:
    foreign = Path(segment.DIRECTORY, place.path.rings + "notes.txt")
    foreign.write_bytes(b"something else")
    try:
        place.consumer().close()
        collect(place.path.rings)
        assert foreign.read_bytes() == b"something else"
    finally:
        foreign.unlink(missing_ok=True)


def test_collecting_while_all_are_alive_removes_nothing(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put({"a": np.arange(100_000)})
    message = consumer.get(timeout=0)
    before = place.segments()
    assert collect(place.path.rings, discard=True) == []
    assert place.segments() == before
    message.release()


def test_threads_that_put_and_get_while_all_is_closed_see_nothing_but_that_it_is_closed(place: Place) -> None:
    for _ in range(10):
        producer, consumer = place.producer(), place.consumer()
        begun = threading.Barrier(5)

        def put(producer: Producer, begun: threading.Barrier) -> str:
            begun.wait(DEADLINE_S)
            index = 0
            while True:
                producer.put({"a": ARRAY[: index % 500]} if index % 2 else b"x", timeout=DEADLINE_S)
                index += 1

        def get(consumer: Consumer, begun: threading.Barrier) -> None:
            begun.wait(DEADLINE_S)
            while True:
                consumer.get(timeout=DEADLINE_S).release()

        with ThreadPoolExecutor(4) as pool:
            putting = [pool.submit(put, producer, begun) for _ in range(2)]
            getting = [pool.submit(get, consumer, begun) for _ in range(2)]
            begun.wait(DEADLINE_S)
            eventually(lambda writer=producer._writer: writer.next_sequence > 50, "traffic goes on")
            producer.close(timeout=0)
            for future in putting:
                with pytest.raises(ClosedError):
                    future.result(DEADLINE_S)
            close(consumer)
            for future in getting:
                with pytest.raises(ClosedError):
                    future.result(DEADLINE_S)


def close(consumer: Consumer) -> None:
    """Close, as soon as no other thread looks into a message."""

    def closed() -> bool:
        try:
            consumer.close()
        except ShmqError:
            return False
        return True

    eventually(closed, "no view was alive")


@pytest.mark.parametrize("kind", ["directory", "link", "dangling link"])
def test_what_is_no_file_under_the_name_of_a_ring_stops_nobody(place: Place, kind: str) -> None:
    foreign = Path(segment.DIRECTORY, place.path.rings + "0000000000000001")
    if kind == "directory":
        foreign.mkdir()
    else:
        foreign.symlink_to("/dev/null" if kind == "link" else "/nowhere/at/all")
    try:
        producer, consumer = place.producer(), place.consumer()
        producer.put(b"x")
        assert consumer.get(timeout=DEADLINE_S).detach() == b"x"
        assert [finding.removed for finding in collect(place.path.rings)] == [False]
    finally:
        if kind == "directory":
            foreign.rmdir()
        else:
            foreign.unlink()
