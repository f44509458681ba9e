from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

from fmq import (
    AsyncPublisher,
    AsyncSubscriber,
    ClosedError,
    CodecRefusedError,
    Publisher,
    QueueEmptyError,
    QueueFullError,
    QueueInUseError,
    QueueTimeoutError,
    ReaderDroppedError,
    SegmentLimitError,
    Subscriber,
    ViewsHeldError,
    wire,
)
from fmq.paths import TopicPath
from shmq import Segment
from shmq.layout import SLOTS
from tests.queues import SMALL_RING, Place, Run, eventually, lies_in, place_fixture, runner_fixture

__all__ = ["place_fixture", "runner_fixture"]

ARRAY = np.arange(5000, dtype=np.int32)


def payloads(subscriber: Subscriber) -> list[Any]:
    """The payloads of all messages that are there, detached."""
    found = []
    while True:
        try:
            with subscriber.get(timeout=0) as message:
                found.append(message.detach())
        except QueueEmptyError:
            return found


def meet(publisher: Publisher, subscriber: Subscriber) -> None:
    """Wait until a subscriber that was there before its publisher has found it; nobody else reads."""
    eventually(lambda: payloads(subscriber) == [] and publisher.readers == 1, "the reader joined")


def fill(publisher: Publisher, obj: Any = bytes(4000)) -> int:
    count = 0
    try:
        while True:
            publisher.put(obj, timeout=0)
            count += 1
    except QueueFullError:
        return count


def test_one_array_is_seen_by_all_readers_where_it_lies(place: Place) -> None:
    publisher, subscribers = place.publisher(), [place.subscriber() for _ in range(3)]
    publisher.wait_for_readers(3, timeout=5)
    publisher.put({"images": ARRAY, "id": 7})
    for subscriber in subscribers:
        with subscriber.get(timeout=5) as message:
            assert message.payload["id"] == 7
            assert np.array_equal(message.payload["images"], ARRAY)
            assert not message.payload["images"].flags.writeable
            assert lies_in(message.payload["images"], publisher.ring)
    publisher.flush(timeout=5)
    assert publisher.copied_bytes == ARRAY.nbytes


def test_a_subscriber_may_come_first(place: Place) -> None:
    subscriber = place.subscriber()
    publisher = place.publisher()
    meet(publisher, subscriber)
    publisher.put("x")
    assert payloads(subscriber) == ["x"]


def test_what_is_put_before_a_reader_came_is_not_for_it(place: Place) -> None:
    publisher = place.publisher()
    for number in range(1000):
        publisher.put([number, bytes(1000)], timeout=0)
    assert publisher.readers == 0
    subscriber = place.subscriber()
    publisher.put("newest")
    assert payloads(subscriber) == ["newest"]


def test_a_second_publisher_is_refused_and_told_whose_the_topic_is(place: Place) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    with pytest.raises(
        QueueInUseError, match=rf"topic {place.queue} .* has a publisher already, process {os.getpid()}"
    ):
        place.publisher()
    publisher.put("x")
    assert payloads(subscriber) == ["x"]


def test_a_topic_and_a_queue_of_one_name_do_not_meet(place: Place) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    producer, consumer = place.producer(), place.consumer()
    publisher.put("published")
    producer.put("put")
    with consumer.get(timeout=0) as message:
        assert message.payload == "put"
    assert payloads(subscriber) == ["published"]
    assert payloads(consumer) == []


def test_a_restarted_publisher_is_found_by_its_readers(place: Place) -> None:
    subscriber = place.subscriber()
    for number in range(3):
        publisher = place.publisher()
        meet(publisher, subscriber)
        publisher.put(number)
        with subscriber.get(timeout=5) as message:
            assert message.payload == number
        publisher.close(timeout=5)
        eventually(lambda: payloads(subscriber) == [] and place.topic_segments() == [], "the old ring is gone")


def test_what_a_publisher_leaves_is_read_and_then_removed_by_the_last_reader(place: Place) -> None:
    publisher, quick, slow = place.publisher(ring_size=1 << 20), place.subscriber(), place.subscriber()
    publisher.wait_for_readers(2, timeout=5)
    for number in range(5):
        publisher.put([number, ARRAY])
    publisher.close(timeout=0)
    assert [payload[0] for payload in payloads(quick)] == [0, 1, 2, 3, 4]
    quick.close()
    assert place.topic_segments() == [publisher.ring]
    found = payloads(slow)
    assert [payload[0] for payload in found] == [0, 1, 2, 3, 4]
    assert all(np.array_equal(payload[1], ARRAY) for payload in found)
    slow.close()
    assert place.topic_segments() == []


def test_a_publisher_that_gives_up_leaves_no_ring_to_readers_that_are_gone(place: Place) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    publisher.put("x")
    subscriber.close()
    publisher.give_up()
    assert place.topic_segments() == []


def test_a_ring_whose_last_reader_leaves_while_it_is_looked_at_is_removed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    publisher.put("x")
    has_readers = Segment.has_readers

    def leave_after(segment: Segment) -> bool:
        found = has_readers(segment)
        monkeypatch.undo()
        subscriber.close()
        return found

    monkeypatch.setattr(Segment, "has_readers", leave_after)
    publisher.give_up()
    assert place.topic_segments() == []


@pytest.mark.parametrize("codec", ["msgpack", "pickle"])
def test_a_subscriber_takes_the_codecs_it_accepts(place: Place, codec: str) -> None:
    publisher = place.publisher(codec=codec)
    narrow, wide = place.subscriber(), place.subscriber(accept=("msgpack", "pickle"))
    publisher.put({"a": ARRAY})
    assert np.array_equal(payloads(wide)[0]["a"], ARRAY)
    if codec == "pickle":
        with pytest.raises(CodecRefusedError):
            narrow.get(timeout=0)
    else:
        assert len(payloads(narrow)) == 1
    publisher.flush(timeout=5)


def test_a_message_whose_time_is_over_is_delivered_to_nobody(place: Place) -> None:
    publisher, subscribers = place.publisher(), [place.subscriber(), place.subscriber()]
    publisher.put("old", ttl=1e-9)
    publisher.put("new")
    assert [payloads(subscriber) for subscriber in subscribers] == [["new"], ["new"]]


def test_the_65th_subscriber_is_told_that_there_is_no_slot(place: Place) -> None:
    publisher = place.publisher()
    subscribers = [place.subscriber() for _ in range(SLOTS)]
    with pytest.raises(SegmentLimitError, match="64 readers already"):
        place.subscriber()
    publisher.put("x")
    assert [payloads(subscriber) for subscriber in subscribers] == [["x"]] * SLOTS
    subscribers[5].close()
    newest = place.subscriber()
    publisher.put("y")
    assert payloads(newest) == ["y"]


def test_who_waits_finds_each_new_publisher_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmq.consumer._TIDY_SECONDS", 1000.0)
    subscriber = place.subscriber()
    got: list[Any] = []

    def read() -> None:
        for _ in range(3):
            with subscriber.get(timeout=20) as message:
                got.append(message.payload)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(3):
        with place.publisher() as publisher:
            publisher.wait_for_readers(1, timeout=20)
            publisher.put(number)
            publisher.flush(timeout=20)
    thread.join()
    assert got == [0, 1, 2]


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_sleeping_reader_is_woken_by_the_next_message(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmq.consumer._RECHECK", 30.0)
    publisher, subscribers = place.publisher(), [place.subscriber() for _ in range(2)]
    publisher.wait_for_readers(2, timeout=5)
    got: list[Any] = []

    def read(subscriber: Subscriber) -> None:
        for _ in range(3):
            with subscriber.get(timeout=20) as message:
                got.append(message.payload)

    threads = [threading.Thread(target=read, args=(subscriber,)) for subscriber in subscribers]
    for thread in threads:
        thread.start()
    for number in range(3):
        eventually(lambda: all(publisher._writer.slot_asleep(slot) for slot in (0, 1)), "both readers sleep")
        publisher.put(number)
        eventually(lambda number=number: got.count(number) == 2, "both readers have it")
    for thread in threads:
        thread.join()


def test_a_join_that_comes_late_does_not_divert_the_doorbells_of_who_has_the_slot_now(place: Place) -> None:
    publisher, gone = place.publisher(), place.subscriber()
    joins = [source.reader for source in gone._protocol._order]
    late = [wire.encode(wire.Join(wire.VERSION, publisher.ring, reader.slot, reader.number)) for reader in joins]
    gone.close()
    subscriber = place.subscriber()
    (reader,) = (source.reader for source in subscriber._protocol._order)
    assert reader.slot == 0
    protocol = publisher._protocol
    protocol.receive((b"new", wire.encode(wire.Join(wire.VERSION, publisher.ring, 0, reader.number))))
    protocol.receive((b"gone", late[0]))
    reader.sleep(1)
    publisher._writer.post(b"x", 0, 0)
    (frames,) = protocol.frames()
    assert [address for address, _ in frames] == [b"new"]


def test_a_waiting_put_is_woken_by_the_last_release(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmq.producer.RECHECK", 30.0)
    publisher, subscribers = place.publisher(), [place.subscriber() for _ in range(2)]
    publisher.wait_for_readers(2, timeout=5)
    count = fill(publisher)
    put = threading.Thread(target=publisher.put, args=(bytes(4000),), kwargs={"timeout": 20})
    put.start()
    eventually(lambda: publisher._writer.segment.words[67], "the put waits")
    assert len(payloads(subscribers[0])) == count
    assert put.is_alive()
    assert len(payloads(subscribers[1])) >= count
    put.join(10)
    assert not put.is_alive()


def test_a_waiting_put_is_woken_by_a_reader_that_leaves(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmq.producer.RECHECK", 30.0)
    publisher, subscriber = place.publisher(), place.subscriber()
    publisher.wait_for_readers(1, timeout=5)
    fill(publisher)
    put = threading.Thread(target=publisher.put, args=(bytes(4000),), kwargs={"timeout": 20})
    put.start()
    eventually(lambda: publisher._writer.segment.words[67], "the put waits")
    subscriber.close()
    put.join(10)
    assert not put.is_alive()


def test_a_full_ring_names_the_process_that_is_slow(place: Place) -> None:
    publisher, slow = place.publisher(), place.subscriber()
    fill(publisher)
    with pytest.raises(QueueFullError, match=rf"ring of 65,536 bytes is full; the slowest .* processes {os.getpid()}"):
        publisher.put(bytes(4000), timeout=0.05)
    assert payloads(slow)


def test_waiting_for_readers_ends_at_the_timeout(place: Place) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    publisher.wait_for_readers(1, timeout=5)
    with pytest.raises(QueueTimeoutError, match="has 1 readers, and no more came"):
        publisher.wait_for_readers(2, timeout=0.05)
    del subscriber


def test_a_reader_that_is_skipped_goes_on_with_the_newest(place: Place) -> None:
    publisher, quick, slow = place.publisher(policy="skip", patience=0), place.subscriber(), place.subscriber()
    total = 200
    for number in range(total):
        publisher.put([number, bytes(2000)], timeout=5)
        assert [payload[0] for payload in payloads(quick)] == [number]
    found = [payload[0] for payload in payloads(slow)]
    assert found == list(range(found[0], total))
    assert 0 < found[0] < total - 5


def test_what_a_skipped_reader_holds_stays_whole(place: Place) -> None:
    publisher, subscriber = place.publisher(policy="skip", patience=0, ring_size=1 << 20), place.subscriber()
    publisher.put(ARRAY)
    message = subscriber.get(timeout=5)
    for number in range(300):
        publisher.put(ARRAY + number)
    assert np.array_equal(message.payload, ARRAY)
    message.release()
    del message
    assert np.array_equal(payloads(subscriber)[-1], ARRAY + 299)


def test_a_reader_that_is_dropped_is_told_and_in_again(place: Place) -> None:
    publisher, slow = place.publisher(policy="drop", patience=0), place.subscriber()
    for _ in range(100):
        publisher.put(bytes(4000), timeout=0)
    assert publisher.readers == 0
    with pytest.raises(ReaderDroppedError, match="did not keep up"):
        slow.get(timeout=0)
    publisher.put("new")
    assert payloads(slow) == ["new"]


def test_what_a_dropped_reader_holds_is_waited_for(place: Place) -> None:
    publisher, slow = place.publisher(policy="drop", patience=0), place.subscriber()
    publisher.put(b"held")
    message = slow.get(timeout=5)
    for _ in range(100):
        publisher.put(bytes(4000), timeout=0)
    assert publisher.readers == 0
    with pytest.raises(QueueTimeoutError, match="1 messages are not yet done"):
        publisher.flush(timeout=0.05)
    message.release()
    publisher.flush(timeout=5)


def test_an_error_keeps_neither_the_messages_before_it_alive_nor_who_meets_it(place: Place) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    publisher.put(ARRAY)

    def fail() -> Any:
        raise ReaderDroppedError("dropped")

    def meet() -> weakref.ref[Any]:
        array = ARRAY.copy()
        with contextlib.suppress(ReaderDroppedError):
            subscriber.get(timeout=0)
        return weakref.ref(array)

    takes = iter([subscriber._protocol.take, fail])
    subscriber._take_one = lambda: next(takes)()
    gc.disable()
    try:
        (message,) = subscriber.get_many(2, timeout=5)
        kept = weakref.ref(message)
        del message
        assert kept() is None
        assert meet()() is None
    finally:
        gc.enable()


def test_patience_comes_before_a_reader_is_dropped(place: Place) -> None:
    publisher, slow = place.publisher(policy="drop", patience=0.2), place.subscriber()
    assert fill(publisher) < 20
    assert publisher.readers == 1
    begun = time.monotonic()
    publisher.put(bytes(4000), timeout=10)
    assert time.monotonic() - begun >= 0.2
    with pytest.raises(ReaderDroppedError):
        slow.get(timeout=0)


def test_a_ring_that_is_held_spills(place: Place) -> None:
    publisher, subscriber = place.publisher(ring_size=1 << 20, spill_limit=1 << 22), place.subscriber()
    array = np.arange(100_000, dtype=np.uint8)
    held = []
    for number in range(12):
        publisher.put(array + number, timeout=5)
        held.append(subscriber.get(timeout=5))
    assert publisher._writer.segment.words[128] > 0
    assert all(np.array_equal(message.payload, array + number) for number, message in enumerate(held))
    for message in held:
        message.release()
    del message, held
    gc.collect()
    publisher.flush(timeout=5)


@pytest.mark.parametrize("wrong", [{"policy": "forget"}, {"patience": -1}, {"codec": "json"}])
def test_a_setting_that_can_not_be_is_refused(place: Place, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"policy|timeout|codec"):
        place.publisher(**wrong)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_subscriber_with_views_can_not_be_closed(place: Place) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    publisher.put(ARRAY)
    message = subscriber.get(timeout=5)
    with pytest.raises(ViewsHeldError):
        subscriber.close()
    assert np.array_equal(message.payload, ARRAY)
    message.release()
    del message
    subscriber.close()
    with pytest.raises(ClosedError, match="this subscriber of topic"):
        subscriber.get(timeout=0)
    assert publisher.readers == 0


def test_what_was_not_closed_is_given_up_with_a_warning(place: Place) -> None:
    publisher = Publisher(place.queue, ring_size=SMALL_RING, **place.where)
    subscriber = Subscriber(place.queue, **place.where)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del subscriber
        gc.collect()
        assert publisher.readers == 0
        del publisher
        gc.collect()
    assert [str(warning.message).split(" of")[0] for warning in told] == ["unclosed <Subscriber", "unclosed <Publisher"]
    assert place.topic_segments() == []


def test_names_say_what_they_are(place: Place) -> None:
    publisher, subscriber = place.publisher(), place.subscriber()
    assert publisher.topic == subscriber.topic == place.queue
    assert repr(publisher) == f"<Publisher of topic {place.queue}, open>"
    assert TopicPath(place.queue, **place.where).rings == f"shmq:{place.namespace}:@{place.queue}:"


# -- asyncio ----------------------------------------------------------------------------------------------------------


def test_a_topic_serves_an_event_loop(place: Place, runner: Run) -> None:
    publisher = AsyncPublisher(place.queue, ring_size=SMALL_RING, **place.where)
    subscribers = [AsyncSubscriber(place.queue, **place.where) for _ in range(4)]

    async def read(subscriber: AsyncSubscriber) -> list[int]:
        found = []
        while len(found) < 200:
            with await subscriber.get(timeout=20) as message:
                assert message.payload["a"].sum() == ARRAY[:500].sum()
                found.append(message.payload["n"])
        return found

    async def main() -> None:
        await publisher.wait_for_readers(4, timeout=5)
        readers = [asyncio.create_task(read(subscriber)) for subscriber in subscribers]
        for number in range(200):
            await publisher.put({"n": number, "a": ARRAY[:500]}, timeout=20)
        assert await asyncio.gather(*readers) == [list(range(200))] * 4
        await publisher.flush(timeout=5)
        with pytest.raises(QueueTimeoutError, match="has 4 readers"):
            await publisher.wait_for_readers(5, timeout=0.02)
        for subscriber in subscribers:
            await subscriber.close()
        await publisher.close()

    runner(main())
