"""What a message says about itself, and the ways in which it gives its space back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fmq import ClosedError, Consumer, Message, Producer, QueueEmptyError
from shmq import Segment
from tests.queues import Place, fill, is_empty, lies_in, place_fixture  # noqa: F401

ARRAY = np.arange(3000, dtype=np.int16)


@pytest.fixture
def producer(place: Place) -> Producer:
    return place.producer()


@pytest.fixture
def consumer(place: Place, producer: Producer) -> Consumer:
    return place.consumer()


def settle(consumer: Consumer) -> None:
    with pytest.raises(QueueEmptyError):
        consumer.get(timeout=0)


# -- what it says -----------------------------------------------------------------------------------------------------


def test_a_message_tells_when_and_by_whom_it_was_put(producer: Producer, consumer: Consumer) -> None:
    before = time.time_ns()
    sequences = [producer.put(b"a"), producer.put({"b": ARRAY})]
    after = time.time_ns()
    for sequence in sequences:
        message = consumer.get(timeout=0)
        assert message.sequence == sequence
        assert before <= message.timestamp_ns <= after
        assert message.timestamp == pytest.approx(message.timestamp_ns / 1e9)
        assert message.producer == producer.ring.rpartition(":")[2]
        assert (message.deliveries, message.redelivered) == (0, False)


def test_sequences_count_from_zero_for_each_producer(place: Place, consumer: Consumer) -> None:
    producers = [place.producer() for _ in range(3)]
    for producer in producers:
        assert [producer.put(b"x") for _ in range(5)] == list(range(5))


def test_a_message_shows_whether_it_is_held_and_not_what_is_in_it(producer: Producer, consumer: Consumer) -> None:
    producer.put({"secret": ARRAY})
    message = consumer.get(timeout=0)
    assert repr(message) == f"<Message 0 of producer {message.producer}, held>"
    message.release()
    assert repr(message) == f"<Message 0 of producer {message.producer}, released>"


def test_a_message_has_no_other_attributes(producer: Producer, consumer: Consumer) -> None:
    producer.put(b"x")
    with pytest.raises(AttributeError, match="no attribute 'body'"):
        consumer.get(timeout=0).body  # noqa: B018


# -- giving back ------------------------------------------------------------------------------------------------------


def by_release(messages: list[Message]) -> None:
    for message in messages:
        message.release()


def by_with(messages: list[Message]) -> None:
    for message in messages:
        with message as same:
            assert same is message


def by_a_failing_with(messages: list[Message]) -> None:
    for message in messages:
        with pytest.raises(KeyError), message:
            raise KeyError("user code")


def by_del(messages: list[Message]) -> None:
    messages.clear()


def by_detach(messages: list[Message]) -> None:
    for message in messages:
        message.detach()


def by_a_cycle(messages: list[Message]) -> None:
    for message in messages:
        cycle: list[Any] = [message]
        cycle.append(cycle)
    messages.clear()
    del message, cycle
    gc.collect()


def by_another_thread(messages: list[Message]) -> None:
    thread = threading.Thread(target=by_release, args=[messages])
    thread.start()
    thread.join()


WAYS = [by_release, by_with, by_a_failing_with, by_del, by_detach, by_a_cycle, by_another_thread]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("payload", [bytes(4000), {"a": ARRAY}, {"a": ARRAY, "b": ARRAY[:7]}, "text"], ids=type)
def test_a_full_ring_is_free_again_by(
    producer: Producer, consumer: Consumer, payload: object, way: Callable[[list[Message]], None]
) -> None:
    for _ in range(3):
        count = fill(producer, payload)
        assert count > 5
        messages = consumer.get_many(10_000, timeout=0)
        assert len(messages) == count
        way(messages)
        settle(consumer)
        assert is_empty(producer)


@pytest.mark.parametrize("way", [by_release, by_with, by_del, by_another_thread])
def test_the_space_comes_back_with_the_last_view_and_not_before(
    producer: Producer, consumer: Consumer, way: Callable[[list[Message]], None]
) -> None:
    count = fill(producer, {"a": ARRAY})
    messages = consumer.get_many(10_000, timeout=0)
    views = [message.payload["a"][10:20].reshape(2, 5).view(np.uint16) for message in messages]
    way(messages)
    settle(consumer)
    assert fill(producer, {"a": ARRAY}) == 0
    expected = ARRAY[10:20].reshape(2, 5).view(np.uint16)
    assert len(views) == count
    assert all((view == expected).all() for view in views)
    views.clear()
    settle(consumer)
    assert is_empty(producer)


def test_space_in_the_middle_comes_back_while_older_messages_are_held(producer: Producer, consumer: Consumer) -> None:
    fill(producer, {"a": ARRAY})
    messages = consumer.get_many(10_000, timeout=0)
    by_release(messages[3:6])
    assert fill(producer, {"a": ARRAY}) >= 1


def test_a_release_counts_for_the_message_though_views_are_left(place: Place, producer: Producer) -> None:
    consumer = place.consumer()
    producer.put({"a": ARRAY})
    message = consumer.get(timeout=0)
    view = message.payload["a"]
    message.release()
    producer.flush(timeout=5)
    assert not is_empty(producer)
    del view
    settle(consumer)
    assert is_empty(producer)


def test_after_a_release_the_payload_is_gone_with_a_hint(producer: Producer, consumer: Consumer) -> None:
    for payload in (b"x", {"a": ARRAY}):
        producer.put(payload)
        message = consumer.get(timeout=0)
        message.release()
        with pytest.raises(ClosedError, match=rf"message {message.sequence} was released.*detach\(\)"):
            message.payload  # noqa: B018
        with pytest.raises(ClosedError):
            message.detach()


def test_releasing_twice_gives_back_once(producer: Producer, consumer: Consumer) -> None:
    for payload in (b"first", {"a": ARRAY}):
        producer.put(payload)
        message = consumer.get(timeout=0)
        message.release()
        assert is_empty(producer)
        fill(producer)
        held = consumer.get_many(10_000, timeout=0)
        with message:
            message.release()
        del message
        settle(consumer)
        assert fill(producer) == 0
        by_release(held)


def test_views_stay_unchanged_after_release_while_the_producer_goes_round_and_round(
    producer: Producer, consumer: Consumer
) -> None:
    producer.put({"a": ARRAY, "b": b"\x07" * 5000})
    message = consumer.get(timeout=0)
    view, data = message.payload["a"], message.payload["b"]
    assert lies_in(view, producer.ring)
    message.release()
    del message
    for index in range(300):
        producer.put({"a": np.full(3000, index, np.int16)})
        with consumer.get(timeout=0) as other:
            assert (other.payload["a"] == index).all()
        del other
    assert (view == ARRAY).all()
    assert data == b"\x07" * 5000


def test_a_message_whose_payload_was_deleted_by_hand_can_be_released(producer: Producer, consumer: Consumer) -> None:
    producer.put({"a": ARRAY})
    message = consumer.get(timeout=0)
    del message.payload
    try:
        message.release()
    finally:
        del message
        gc.collect()
        settle(consumer)
    assert is_empty(producer)


# -- detach -----------------------------------------------------------------------------------------------------------


def test_what_was_detached_is_a_private_writable_copy_and_stays(producer: Producer, consumer: Consumer) -> None:
    producer.put({"a": ARRAY, "n": [1, b"x" * 9000]})
    message = consumer.get(timeout=0)
    copy = message.detach()
    assert is_empty(producer)
    assert message.payload is copy
    assert message.detach() is copy
    message.release()
    assert (copy["a"] == ARRAY).all()
    assert copy["n"] == [1, b"x" * 9000]
    assert not lies_in(copy["a"], producer.ring)
    copy["a"][:] = 0
    assert message.payload is copy


def test_views_taken_before_detach_still_hold_the_space(producer: Producer, consumer: Consumer) -> None:
    producer.put({"a": ARRAY})
    message = consumer.get(timeout=0)
    view = message.payload["a"]
    copy = message.detach()
    copy["a"][:] = 0
    assert (view == ARRAY).all()
    assert not is_empty(producer)
    del view
    settle(consumer)
    assert is_empty(producer)


def test_bytes_are_the_same_object_after_detach(producer: Producer, consumer: Consumer) -> None:
    producer.put(b"abc")
    message = consumer.get(timeout=0)
    assert message.detach() == b"abc"
    assert message.payload == b"abc"
    assert is_empty(producer)


def test_a_large_message_that_spilled_can_be_detached(place: Place, producer: Producer, consumer: Consumer) -> None:
    array = np.arange(100_000)
    producer.put({"a": array, "t": "x" * 50_000})
    message = consumer.get(timeout=0)
    assert len(place.segments()) > 1
    copy = message.detach()
    assert (copy["a"] == array).all()
    assert copy["t"] == "x" * 50_000
    assert copy["a"].flags.writeable
    assert is_empty(producer)


# -- without a consumer -----------------------------------------------------------------------------------------------


def test_a_consumer_knows_its_messages_weakly_only(producer: Producer, consumer: Consumer) -> None:
    producer.put({"a": ARRAY})
    gone = weakref.ref(consumer.get(timeout=0))
    assert gone() is None


def test_a_message_that_outlives_its_consumer_can_be_released(place: Place, producer: Producer) -> None:
    consumer = place.consumer()
    producer.put(b"x")
    message = consumer.get(timeout=0)
    consumer.close()
    message.release()


def test_a_message_can_be_released_in_the_very_moment_in_which_its_consumer_is_closed(
    place: Place, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = place.consumer()
    producer.put(b"x")
    message = consumer.get(timeout=0)
    close = Segment.close
    errors: list[BaseException] = []

    def release() -> None:
        try:
            message.release()
        except BaseException as error:
            errors.append(error)

    def close_while_another_thread_releases(segment: Segment) -> None:
        close(segment)
        thread = threading.Thread(target=release)
        thread.start()
        thread.join()

    monkeypatch.setattr(Segment, "close", close_while_another_thread_releases)
    consumer.close()
    for error in errors:
        raise error


def test_a_message_that_outlives_its_consumer_can_be_dropped(place: Place, producer: Producer) -> None:
    consumer = place.consumer()
    producer.put(b"x")
    message = consumer.get(timeout=0)
    consumer.close()
    assert message.payload == b"x"
    del message
    again = place.consumer().get(timeout=0)
    assert (again.payload, again.redelivered) == (b"x", True)
    again.release()
