"""Messages that kill their consumers: set aside after a few deaths, and no other message with them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from fmq import ClosedError, Consumer, Producer, SetAside
from shmq import collect
from shmq.layout import SET_ASIDE_COUNT
from tests.queues import Child, Place, drain, fill, is_empty, place_fixture

__all__ = ["place_fixture"]

POISON = "poison"
PAYLOADS: dict[str, Callable[[], Any]] = {
    "raw": lambda: b"poison",
    "tree": lambda: {"kind": POISON, "n": 1},
    "small arrays": lambda: {"kind": POISON, "a": np.arange(10)},
    "large arrays": lambda: {"kind": POISON, "a": np.arange(2000.0)},
    "a spill": lambda: {"kind": POISON, "a": np.arange(20_000.0)},
}


def is_poison(payload: Any) -> bool:
    return payload == b"poison" or (isinstance(payload, dict) and payload.get("kind") == POISON)


def same(left: Any, right: Any) -> bool:
    if isinstance(right, bytes):
        return bool(left == right)
    return bool(left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in right))


def work(connection: Connection, place: Place, death: str, options: dict[str, Any]) -> None:
    """Take messages and say which, until one is poison: then die of it."""
    consumer = Consumer(place.queue, **place.where, **options)
    with consumer:
        for message in consumer:
            connection.send((message.sequence, message.deliveries))
            if is_poison(message.payload):
                if death == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif death == "an exception":
                    raise ValueError("poison")
                elif death == "a system exit":
                    raise SystemExit(3)
                elif death == "closed":
                    del message
                    break
            message.release()


def die_of_it(place: Place, death: str = "killed", **options: Any) -> list[tuple[int, int]]:
    with Child(work, place, death, options) as child:
        heard = []
        while True:
            try:
                heard.append(child.hear())
            except EOFError:
                break
        child.join()
    return heard


@pytest.mark.parametrize("what", PAYLOADS)
def test_a_message_that_kills_three_consumers_is_set_aside_and_no_other_with_it(
    place: Place, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer = place.producer()
    producer.put_many([{"n": 0}, PAYLOADS[what](), {"n": 2}, {"n": 3}])
    assert die_of_it(place) == [(0, 0), (1, 0)]
    assert die_of_it(place) == [(1, 1)]
    assert die_of_it(place) == [(1, 2)]
    told: list[SetAside] = []
    with caplog.at_level(logging.ERROR, "fmq"):
        consumer = place.consumer(on_set_aside=told.append)
        assert drain(consumer) == [2, 3]
    assert [(aside.sequence, aside.deliveries, aside.producer) for aside in told] == [
        (1, 3, producer.ring.rpartition(":")[2])
    ]
    assert len([record for record in caplog.records if "set aside" in record.message]) == 1
    assert same(told[0].read(), PAYLOADS[what]())
    # It is nobody's unfinished work, and it keeps its space.
    producer.flush(timeout=0)
    assert not is_empty(producer)
    assert producer._writer.segment.words[SET_ASIDE_COUNT] == 1
    consumer.close()
    with pytest.raises(ClosedError):
        told[0].read()
    told[0].discard()
    # The next consumer is not told again, and can look at it.
    consumer = place.consumer(on_set_aside=told.append)
    assert drain(consumer) == []
    assert len(told) == 1
    (kept,) = consumer.set_aside()
    assert (kept.sequence, kept.deliveries, kept.timestamp_ns) == (1, 3, told[0].timestamp_ns)
    copy = kept.read()
    kept.discard()
    kept.discard()
    assert consumer.set_aside() == []
    with pytest.raises(ClosedError):
        kept.read()
    assert is_empty(producer)
    # What was read is a copy, and stays.
    fill(producer)
    assert same(copy, PAYLOADS[what]())
    drain(consumer)


def test_a_thing_that_was_set_aside_is_not_mistaken_for_what_comes_to_lie_in_its_place(place: Place) -> None:
    producer = place.producer()
    producer.put(PAYLOADS["raw"]())
    die_of_it(place, max_deliveries=1)
    consumer = place.consumer(max_deliveries=1)
    assert drain(consumer) == []
    first, second = consumer.set_aside(), consumer.set_aside()
    first[0].discard()
    for _ in range(3):
        fill(producer)
        drain(consumer)
    count = fill(producer)
    second[0].discard()
    with pytest.raises(ClosedError):
        second[0].read()
    assert len(drain(consumer)) == count


@pytest.mark.parametrize(("death", "counts"), [("killed", True), ("an exception", True), ("a system exit", False)])
def test_only_an_end_that_may_be_a_messages_fault_counts(place: Place, death: str, counts: bool) -> None:
    producer = place.producer()
    producer.put_many([PAYLOADS["tree"](), {"n": 1}])
    for _ in range(3):
        # What it holds outlives the frame that the exception leaves, so that it is not acknowledged.
        die_holding(place, death)
    consumer = place.consumer()
    # The second and the third had message 0 alone: it was a suspect.
    assert drain(consumer) == ([1] if counts else [0, 1])
    for aside in consumer.set_aside():
        aside.discard()


def die_holding(place: Place, death: str) -> None:
    with Child(hold, place, death) as child:
        assert child.hear() > 0
        child.join()


HELD: list[Any] = []


def hold(connection: Connection, place: Place, death: str) -> None:
    with Consumer(place.queue, **place.where) as consumer:
        HELD.extend(consumer.get_many(timeout=5))
        connection.send(len(HELD))
        if death == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError if death == "an exception" else SystemExit(0)


def test_a_consumer_that_closes_in_order_hands_back_any_number_of_times(place: Place) -> None:
    producer = place.producer()
    producer.put_many([b"a", {"b": 1}])
    for life in range(6):
        with place.consumer() as consumer:
            messages = consumer.get_many(timeout=1)
            assert [message.sequence for message in messages] == [0, 1]
            assert [message.deliveries for message in messages] == [life, life]
            assert [message.redelivered for message in messages] == [life > 0] * 2
    with place.consumer(max_deliveries=1) as consumer:
        assert drain(consumer) == [0, 1]


@pytest.mark.parametrize("limit", [1, 5])
def test_the_limit_is_the_number_of_consumers_that_die(place: Place, limit: int) -> None:
    producer = place.producer()
    producer.put(b"poison")
    assert [die_of_it(place, max_deliveries=limit) for _ in range(limit)] == [[(0, life)] for life in range(limit)]
    consumer = place.consumer(max_deliveries=limit)
    assert drain(consumer) == []
    assert consumer.set_aside()[0].deliveries == limit
    consumer.set_aside()[0].discard()


def test_without_a_limit_nothing_is_set_aside(place: Place) -> None:
    producer = place.producer()
    producer.put(b"poison")
    for life in range(5):
        assert die_of_it(place, max_deliveries=None) == [(0, life)]
    consumer = place.consumer(max_deliveries=None)
    with consumer.get(timeout=0) as message:
        assert message.deliveries == 5


@pytest.mark.parametrize("bad", [0, -1, 1.5, "3"])
def test_a_limit_that_is_none_is_refused(place: Place, bad: Any) -> None:
    with pytest.raises(ValueError, match="max_deliveries"):
        place.consumer(max_deliveries=bad)
    with pytest.raises(ValueError, match="warn_held"):
        place.consumer(warn_held=bad if not isinstance(bad, float) else float("nan"))


def test_the_ring_of_a_closed_producer_is_kept_for_inspection_and_then_goes(place: Place) -> None:
    producer = place.producer()
    producer.put(b"poison")
    die_of_it(place, max_deliveries=1)
    consumer = place.consumer(max_deliveries=1)
    assert drain(consumer) == []
    producer.close()
    consumer.close()
    (finding,) = collect(place.path.rings)
    assert not finding.removed
    assert "set aside for inspection" in finding.reason
    assert "--discard" in finding.reason
    consumer = place.consumer()
    (aside,) = consumer.set_aside()
    assert aside.read() == b"poison"
    aside.discard()
    consumer.close()
    assert place.segments() == []


def test_an_orphan_with_what_was_set_aside_can_be_discarded(place: Place) -> None:
    with Child(put_and_stay, place) as child:
        assert child.hear() == "put"
        die_of_it(place, max_deliveries=1)
        consumer = place.consumer(max_deliveries=1)
        assert drain(consumer) == []
        child.kill()
    consumer.close()
    assert [finding.removed for finding in collect(place.path.rings)] == [False]
    assert [finding.removed for finding in collect(place.path.rings, discard=True)] == [True]


def put_and_stay(connection: Connection, place: Place) -> None:
    producer = Producer(place.queue, ring_size=64 * 1024, **place.where)
    producer.put(b"poison")
    connection.send("put")
    connection.recv()


def test_a_callback_may_do_anything(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    producer = place.producer()
    producer.put_many([b"poison", b"poison", b"fine"])
    die_of_it(place, max_deliveries=1)
    read: list[Any] = []

    def callback(aside: SetAside) -> None:
        read.append(aside.read())
        assert len(consumer.set_aside()) == 1
        aside.discard()
        raise ValueError("of the callback")

    consumer = place.consumer(max_deliveries=1, on_set_aside=callback)
    with consumer.get(timeout=0) as message:
        assert message.payload == b"poison"
        assert message.sequence == 1
    assert read == [b"poison"]
    assert "on_set_aside failed" in caplog.text
    assert drain(consumer) == [2]
    assert is_empty(producer)


def postpone_and_die(connection: Connection, place: Place, begin: bool) -> None:
    """Take two messages, postpone both, begin the first or none, and die."""
    with Consumer(place.queue, **place.where, max_deliveries=1) as consumer:
        messages = [consumer.get(timeout=5), consumer.get(timeout=5)]
        for message in messages:
            message.postpone()
        if begin:
            messages[0].begin()
        connection.send([message.deaths for message in messages])
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("begin", [False, True])
def test_of_what_a_consumer_had_taken_only_what_it_had_begun_is_to_blame_for_its_death(
    place: Place, begin: bool, payload: Callable[[], Any]
) -> None:
    producer = place.producer()
    producer.put(payload())
    producer.put(payload())
    with Child(postpone_and_die, place, begin) as child:
        assert child.hear() == [0, 0]
        assert child.join() == -signal.SIGKILL
    consumer = place.consumer(max_deliveries=1)
    assert drain(consumer) == ([1] if begin else [0, 1])
    assert [aside.sequence for aside in consumer.set_aside()] == ([0] if begin else [])
    for aside in consumer.set_aside():
        aside.discard()


def test_a_message_that_was_given_back_is_neither_postponed_nor_begun(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put({"n": 1})
    message = consumer.get(timeout=5)
    message.postpone()
    message.release()
    message.begin()
    message.postpone()
    assert message.deaths == 0
    assert is_empty(producer)
