"""One slow message, one busy producer, one careless holder: none of them may stop the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from fmq import Producer, QueueFullError
from shmq.layout import SPILLS
from tests.queues import Child, Place, Run, drain, fill, is_empty, place_fixture, runner_fixture

__all__ = ["place_fixture", "runner_fixture"]

RING = 256 * 1024


def largest(producer: Any) -> np.ndarray[Any, Any]:
    """An array that fits the ring when that is empty, and in no half of it."""
    return np.arange(producer._writer.max_payload // 8)


def spills(producer: Any) -> int:
    return int(producer._writer.segment.words[SPILLS])


# -- what is stuck spills ---------------------------------------------------------------------------------------------


def test_a_consumer_that_waits_for_more_than_the_ring_holds_gets_it(place: Place) -> None:
    """An engine that gathers a batch before it begins would otherwise wait for ever, and the producer for it."""
    producer, consumer = place.producer(ring_size=RING), place.consumer()
    arrays = [np.full(RING // 8, index, np.uint8) for index in range(24)]
    thread = threading.Thread(target=producer.put_many, args=(arrays,))
    thread.start()
    batch = [consumer.get(timeout=20) for _ in arrays]
    thread.join()
    for index, message in enumerate(batch):
        assert np.array_equal(message.payload, arrays[index])
    assert spills(producer) > 5
    assert producer.ring == producer._writer.segment.name
    batch.clear()
    del message
    assert drain(consumer) == []
    assert is_empty(producer)


@pytest.mark.parametrize("way", ["put", "empty"])
def test_what_fits_no_stretch_between_messages_that_are_held_spills(place: Place, way: str) -> None:
    producer, consumer = place.producer(ring_size=RING), place.consumer()
    # Two that are held, with less than the largest payload before, between and behind them.
    held = []
    filler = np.zeros(RING // 8, np.uint8)
    for index in range(5):
        producer.put(filler)
        message = consumer.get(timeout=5)
        if index in (1, 3):
            held.append(message)
        else:
            message.release()
        del message
    array = largest(producer)
    begun = time.monotonic()
    if way == "put":
        producer.put(array, timeout=20)
    else:
        loan = producer.empty(array.shape, array.dtype, timeout=20)
        loan[:] = array
        producer.put(loan)
        del loan
    assert time.monotonic() - begun < 10
    assert spills(producer) == 1
    with consumer.get(timeout=5) as message:
        assert np.array_equal(message.payload, array)
    del message
    held.clear()
    drain(consumer)
    # The ring is used again as soon as it can be.
    producer.put(array)
    assert spills(producer) == 1
    assert len(drain(consumer)) == 1


def test_a_consumer_that_is_merely_slow_is_waited_for(place: Place) -> None:
    producer, consumer = place.producer(ring_size=RING), place.consumer()
    array = np.zeros(RING // 8, np.uint8)
    count = fill(producer, array)
    held = consumer.get(timeout=1)
    with pytest.raises(QueueFullError, match=rf"{count} messages still to finish, the oldest, message 0, .* is held"):
        producer.put(array, timeout=0.5)
    assert spills(producer) == 0
    held.release()
    assert len(drain(consumer)) == count - 1


def test_without_room_for_a_spill_what_is_stuck_waits_and_says_for_what(place: Place) -> None:
    producer, consumer = place.producer(ring_size=RING, spill_limit=0), place.consumer()
    fill(producer, np.zeros(RING // 8, np.uint8))
    held = consumer.get_many(timeout=1)
    held[0].release()
    views = held[0]
    with pytest.raises(QueueFullError, match=r"the oldest, message 1, put \d+\.\d s ago, is held"):
        producer.put(largest(producer), timeout=0.3)
    held.clear()
    del views
    drain(consumer)


def test_awaited_puts_spill_as_well(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(ring_size=RING), place.async_consumer()
        held = []
        for index in range(20):
            await producer.put(np.full(RING // 8, index, np.uint8))
            held.append(await consumer.get(timeout=5))
        assert [int(message.payload[7]) for message in held] == list(range(20))
        assert spills(producer) > 5

    runner(main())


# -- what is held long is named ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [b"raw", np.arange(5000)], ids=["raw", "array"])
def test_a_message_that_is_held_long_is_named_once_with_its_age(
    place: Place, payload: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmq.consumer._TIDY_SECONDS", 0.05)
    producer, consumer = place.producer(), place.consumer(warn_held=0.3)
    producer.put_many([payload, b"next"])
    held = consumer.get(timeout=1)
    consumer.get(timeout=1).release()
    with caplog.at_level(logging.WARNING, "fmq"):
        until(lambda: bool(caplog.records), lambda: settle(consumer))
        for _ in range(10):
            settle(consumer)
    (record,) = caplog.records
    assert f"message 0 of producer {producer.ring.rpartition(':')[2]} has been held for" in record.getMessage()
    assert "detach()" in record.getMessage()
    copy = held.detach()
    del held
    drain(consumer)
    assert is_empty(producer)
    assert np.array_equal(copy, payload) if isinstance(payload, np.ndarray) else copy == payload


def settle(consumer: Any) -> None:
    assert drain(consumer) == []
    time.sleep(0.06)


def until(condition: Callable[[], bool], step: Callable[[], None]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        step()


# -- nobody is drowned out --------------------------------------------------------------------------------------------


def flood(connection: Connection, place: Place) -> None:
    """Put without end, always a full ring ahead of the consumer."""
    producer = Producer(place.queue, ring_size=1024 * 1024, **place.where)
    connection.send("ready")
    while not connection.poll(0):
        for _ in range(200):
            producer.put(b"flood")


@pytest.mark.parametrize("pause", [0.0, 0.002])
def test_a_producer_that_comes_while_another_keeps_the_consumer_busy_is_heard(place: Place, pause: float) -> None:
    with Child(flood, place) as child:
        assert child.hear() == "ready"
        consumer = place.consumer()
        assert consumer.get(timeout=5).payload == b"flood"
        newcomer = place.producer()
        newcomer.put(b"newcomer")
        deadline = time.monotonic() + 5
        while True:
            with consumer.get(timeout=5) as message:
                if message.payload == b"newcomer":
                    break
            assert time.monotonic() < deadline, "the newcomer was not heard"
            time.sleep(pause)
        child.tell("stop")
        child.kill()
    drain(consumer)


def test_an_orphan_is_drained_and_removed_while_another_producer_keeps_the_consumer_busy(place: Place) -> None:
    with Child(flood, place) as child, Child(flood, place) as other:
        assert child.hear() == other.hear() == "ready"
        consumer = place.consumer()
        other.kill()
        deadline = time.monotonic() + 10
        while len(place.segments()) > 1:
            consumer.get(timeout=5).release()
            assert time.monotonic() < deadline, "the ring of the dead producer is still there"
        child.kill()
    drain(consumer)
