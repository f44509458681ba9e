"""Queues over tcp://, on the loopback: both ends killed and restarted, keys, strangers, asyncio."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import zmq

from fmq import (
    AsyncRemoteConsumer,
    AsyncRemoteProducer,
    ClosedError,
    CodecRefusedError,
    CurveKeys,
    DecodeError,
    ForkedError,
    Message,
    PeerUnavailableError,
    QueueEmptyError,
    QueueFullError,
    QueueInUseError,
    QueueNameError,
    QueueTimeoutError,
    RemoteConsumer,
    RemoteProducer,
    TooLargeError,
)
from fmq.remote.protocol import Data, Hello
from tests.queues import DEADLINE_S, Child, Run, eventually, open_descriptors, runner_fixture

__all__ = ["runner_fixture"]

ANY = "tcp://127.0.0.1:0"
LARGE = np.arange(1_000_000, dtype=np.float64)


def free_endpoint() -> str:
    """An endpoint where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(name="consumer")
def consumer_fixture() -> Iterator[RemoteConsumer]:
    with RemoteConsumer(ANY) as consumer:
        yield consumer


@pytest.fixture(name="producer")
def producer_fixture(consumer: RemoteConsumer) -> Iterator[RemoteProducer]:
    producer = RemoteProducer(consumer.endpoint)
    yield producer
    producer.close(timeout=0)


def get(consumer: RemoteConsumer) -> Message:
    return consumer.get(timeout=DEADLINE_S)


# -- messages ---------------------------------------------------------------------------------------------------------


def test_what_is_put_arrives_as_it_was(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    payloads: list[Any] = [
        b"bytes",
        bytes(200_000),
        {"a": (1, 2.5, None), "b": [True, "x"]},
        {"small": np.arange(10), "large": LARGE, "empty": np.empty((0, 3)), "scalar": np.float32(1.5)},
        np.asfortranarray(np.arange(60_000.0).reshape(300, 200)),
        np.arange(200_000).astype(ml_dtypes.bfloat16),
        np.full(50_000, "abc"),
        np.array(3),
        memoryview(bytes(100_000)),
        bytearray(b"x" * 100_000),
    ]
    assert producer.put_many(payloads) == list(range(len(payloads)))
    for sequence, payload in enumerate(payloads):
        with get(consumer) as message:
            assert (message.sequence, message.producer) == (sequence, producer.producer)
            assert not message.redelivered
            assert abs(message.timestamp - time.time()) < DEADLINE_S
            assert same(message.payload, payload)
    producer.flush(timeout=DEADLINE_S)
    assert producer.unacknowledged == 0


def same(left: Any, right: Any) -> bool:
    if isinstance(right, np.ndarray):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(right, dict):
        return bool(left.keys() == right.keys() and all(same(left[key], right[key]) for key in right))
    return type(left) is type(right) and bool(left == right)


def test_large_arrays_are_views_of_the_frames(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    producer.put({"x": LARGE})
    message = get(consumer)
    array = message.payload["x"]
    assert not array.flags.owndata
    assert not array.flags.writeable
    message.release()
    producer.flush(timeout=DEADLINE_S)
    assert np.array_equal(array, LARGE), "a view outlives the release"
    consumer.close()
    assert np.array_equal(array, LARGE), "and the consumer"


def test_an_array_is_not_copied_on_the_way_out(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    source = LARGE.copy()
    alive = weakref.ref(source)
    producer.put(source)
    del source
    assert alive() is not None, "it is kept until it is acknowledged"
    get(consumer).release()
    producer.flush(timeout=DEADLINE_S)
    eventually(lambda: alive() is None, "the array was let go")


def test_a_copying_producer_lets_its_caller_use_an_array_again(consumer: RemoteConsumer) -> None:
    with RemoteProducer(consumer.endpoint, copy=True) as producer:
        array = np.zeros(100_000)
        for number in range(5):
            array[:] = number
            producer.put(array)
        array[:] = 99
        assert [float(get(consumer).payload[-1]) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_loans_become_read_only(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    array = producer.empty((100, 200), np.float32)
    array[:] = 7
    view = producer.reserve(100_000)
    view[:3] = b"abc"
    producer.put({"a": array, "v": view})
    assert not array.flags.writeable
    with get(consumer) as message:
        assert (message.payload["a"] == 7).all()
        assert bytes(message.payload["v"][:3]) == b"abc"
    with pytest.raises(TooLargeError):
        producer.empty(1 << 40)


def test_detach_gives_a_private_copy(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    producer.put([LARGE])
    message = get(consumer)
    (array,) = message.detach()
    array[0] = 5
    producer.flush(timeout=DEADLINE_S)
    assert message.payload[0] is array
    message.release()
    message = None  # type: ignore[assignment]
    producer.put(1)
    message = get(consumer)
    message.release()
    with pytest.raises(ClosedError):
        _ = message.payload
    with pytest.raises(ClosedError):
        message.detach()


def test_a_dropped_message_is_done_when_its_arrays_are_gone(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    producer.put({"a": LARGE, "b": LARGE[:9000].copy(), "c": np.arange(3)})
    message = get(consumer)
    first, second = message.payload["a"][5:], message.payload["b"]
    del message
    gc.collect()
    with pytest.raises(QueueTimeoutError):
        producer.flush(timeout=0.2)
    del first
    assert producer.unacknowledged == 1
    del second
    producer.flush(timeout=DEADLINE_S)


def test_types_are_checked_and_what_does_not_fit_is_done() -> None:
    class Request(msgspec.Struct):
        name: str
        image: np.ndarray[Any, Any]

    with RemoteConsumer(ANY, type=Request) as consumer, RemoteProducer(consumer.endpoint) as producer:
        producer.put_many([{"name": 3}, {"name": "x", "image": LARGE}, {"name": 4}])
        with pytest.raises(DecodeError):
            get(consumer)
        with get(consumer) as message:
            assert message.payload.image.shape == LARGE.shape
        with pytest.raises(DecodeError):
            get(consumer)
        producer.flush(timeout=DEADLINE_S)


def test_get_many_gives_what_is_there_and_puts_an_error_off(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    with RemoteProducer(consumer.endpoint, codec="pickle") as pickler:
        producer.put_many(range(5))
        eventually(lambda: len(consumer._protocol) == 5, "five messages came")
        pickler.put({1, 2})
        eventually(lambda: len(consumer._protocol) == 6, "the sixth came")
        assert [message.payload for message in consumer.get_many(3)] == [0, 1, 2]
        assert [message.payload for message in consumer.get_many()] == [3, 4]
        with pytest.raises(CodecRefusedError):
            consumer.get(timeout=0)
        with pytest.raises(QueueEmptyError):
            consumer.get(timeout=0)


def test_what_is_past_its_time_to_live_is_not_delivered(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    producer.put("old", ttl=0.05)
    producer.put("good", ttl=60)
    eventually(lambda: len(consumer._protocol) == 2, "both came")
    deadline = time.monotonic() + 0.06
    eventually(lambda: time.monotonic() > deadline, "the time to live was over")
    assert get(consumer).payload == "good"
    producer.flush(timeout=DEADLINE_S)


def test_many_producers_each_keep_their_order(consumer: RemoteConsumer) -> None:
    def run(who: int) -> None:
        with RemoteProducer(consumer.endpoint, window_messages=7) as producer:
            for number in range(200):
                producer.put([who, number], timeout=DEADLINE_S)

    threads = [threading.Thread(target=run, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    got: dict[int, list[int]] = {who: [] for who in range(4)}
    for _ in range(800):
        with get(consumer) as message:
            who, number = message.payload
            got[who].append(number)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert all(numbers == list(range(200)) for numbers in got.values())


def test_one_producer_and_one_consumer_may_be_used_by_many_threads(
    producer: RemoteProducer, consumer: RemoteConsumer
) -> None:
    got: list[int] = []

    def put() -> None:
        for _ in range(100):
            producer.put(0, timeout=DEADLINE_S)

    def take() -> None:
        for _ in range(100):
            with get(consumer) as message:
                got.append(message.sequence)

    threads = [threading.Thread(target=work) for work in (put, take) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(got) == list(range(300))


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_full_window_waits_and_then_says_that_the_consumer_is_slow(consumer: RemoteConsumer) -> None:
    with RemoteProducer(consumer.endpoint, window_messages=2) as producer:
        producer.put_many([0, 1])
        held = [get(consumer), get(consumer)]
        with pytest.raises(QueueFullError, match="the consumer has 2 messages still to finish, the oldest, message 0"):
            producer.put(2, timeout=0.1)
        with pytest.raises(QueueFullError):
            producer.put(2, timeout=0)
        timer = threading.Timer(0.05, held[1].release)
        timer.start()
        cpu = time.process_time()
        assert producer.put(2, timeout=DEADLINE_S) == 2
        assert time.process_time() - cpu < 1
        timer.join()
        held[0].release()
        get(consumer).release()


def test_a_full_window_without_a_consumer_says_that_nobody_answers() -> None:
    endpoint = free_endpoint()
    producer = RemoteProducer(endpoint, window_bytes=1000)
    producer.put(bytes(600))
    with pytest.raises(PeerUnavailableError, match="does not answer: nobody answers there"):
        producer.put(bytes(600), timeout=0.1)
    with pytest.raises(PeerUnavailableError, match="1 messages are not yet done"):
        producer.flush(timeout=0.1)
    assert not producer.connected
    with RemoteConsumer(endpoint) as consumer:
        producer.put(bytes(400), timeout=DEADLINE_S)
        assert [len(get(consumer).payload) for _ in range(2)] == [600, 400]
        producer.close()


def test_what_is_too_large_is_an_error_at_once() -> None:
    with RemoteConsumer(ANY, max_message=1000) as consumer:
        producer = RemoteProducer(consumer.endpoint, window_bytes=5000)
        with pytest.raises(TooLargeError, match="raise window_bytes"):
            producer.put(bytes(5001))
        eventually(lambda: producer.connected, "it is connected")
        with pytest.raises(TooLargeError, match="raise its max_message"):
            producer.put(bytes(1001))
        with pytest.raises(TooLargeError, match="stack them"):
            producer.put([np.array([number]) for number in range(5000)])
        producer.close()


def test_what_was_put_before_it_was_known_to_be_too_large_is_named_and_kept() -> None:
    endpoint = free_endpoint()
    producer = RemoteProducer(endpoint)
    producer.put(bytes(2000))
    with RemoteConsumer(endpoint, max_message=1000):
        eventually(lambda: producer.connected, "it is connected")
        with pytest.raises(PeerUnavailableError, match="at most 1,000"):
            producer.flush(timeout=0.1)
    with RemoteConsumer(endpoint) as consumer:
        assert len(get(consumer).payload) == 2000
        producer.close()


def test_the_consumer_bounds_what_it_takes_before_it_releases() -> None:
    with RemoteConsumer(ANY, window_messages=3) as consumer, RemoteProducer(consumer.endpoint) as producer:
        producer.put_many(range(10))
        held = [get(consumer) for _ in range(3)]
        with pytest.raises(QueueEmptyError):
            consumer.get(timeout=0.2)
        for message in held:
            message.release()
        assert [get(consumer).payload for _ in range(7)] == list(range(3, 10))


# -- ends -------------------------------------------------------------------------------------------------------------


def consume(connection: Connection, endpoint: str) -> None:
    """Do as told: "hold" (get and keep), or get and release; say what came."""
    consumer = RemoteConsumer(endpoint)
    connection.send(consumer.endpoint)
    held = []
    while True:
        order = connection.recv()
        if order == "close":
            break
        message = consumer.get(timeout=DEADLINE_S)
        assert message.payload["n"] == message.sequence
        assert float(message.payload["x"][-1]) == message.sequence
        if order == "hold":
            held.append(message)
        else:
            message.release()
        connection.send((message.sequence, message.deliveries))
    consumer.close()


def numbered(number: int) -> dict[str, Any]:
    return {"n": number, "x": np.full(20_000, number, np.float64)}


def test_a_consumer_that_is_killed_loses_nothing() -> None:
    with Child(consume, ANY) as first:
        endpoint = first.hear()
        producer = RemoteProducer(endpoint)
        producer.put_many(map(numbered, range(10)))
        done = []
        for order in ("hold", "release", "release", "hold"):
            first.tell(order)
            sequence, deliveries = first.hear()
            assert deliveries == 0
            if order == "release":
                done.append(sequence)
        assert done == [1, 2]
        eventually(lambda: producer.unacknowledged == 8, "two are done")
        first.kill()
    producer.put_many(map(numbered, range(10, 12)))
    with Child(consume, endpoint) as second:
        second.hear()
        got = []
        for _ in range(10):
            second.tell("release")
            got.append(second.hear())
        assert [sequence for sequence, _ in got] == [0, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        assert all(deliveries == 1 for sequence, deliveries in got if sequence in (0, 3)), "what was handed out, marked"
        assert all(deliveries == 0 for sequence, deliveries in got if sequence >= 10), "what was not sent, not"
        producer.flush(timeout=DEADLINE_S)
        second.tell("close")
        second.join()
    producer.close()


def test_kill_after_kill_everything_arrives_in_order() -> None:
    endpoint = free_endpoint()
    chance = random.Random(5)
    producer = RemoteProducer(endpoint, window_messages=8)
    done: list[int] = []
    putting = threading.Thread(target=lambda: producer.put_many(map(numbered, range(60)), timeout=DEADLINE_S))
    putting.start()
    seen: set[int] = set()
    while len(set(done)) < 60:
        with Child(consume, endpoint) as child:
            child.hear()
            last = -1
            for _ in range(min(chance.randrange(5, 15), 60 - len(set(done)))):
                order = chance.choice(("release", "release", "release", "hold"))
                if 60 - len(set(done)) <= 8:
                    order = "release"
                child.tell(order)
                sequence, deliveries = child.hear()
                assert sequence > last
                assert deliveries > 0 or sequence not in seen, "what comes again is marked"
                last = sequence
                seen.add(sequence)
                if order == "release":
                    done.append(sequence)
            child.kill()
    putting.join(DEADLINE_S)
    assert not putting.is_alive()
    assert set(done) == set(range(60))
    producer.close(timeout=0)


def test_a_stopped_consumer_goes_on_where_it_was() -> None:
    with Child(consume, ANY) as child:
        producer = RemoteProducer(child.hear())
        producer.put(numbered(0))
        child.tell("release")
        child.hear()
        child.stop()
        producer.put_many(map(numbered, range(1, 4)))
        child.go_on()
        for number in range(1, 4):
            child.tell("release")
            assert child.hear() == (number, 0)
        producer.close()


def put_and_flush(connection: Connection, endpoint: str, count: int) -> None:
    producer = RemoteProducer(endpoint)
    producer.put_many(map(numbered, range(count)))
    producer.flush(timeout=DEADLINE_S)
    connection.send(producer.producer)
    connection.recv()


kept: RemoteProducer | None = None


def put_and_exit(connection: Connection, endpoint: str) -> None:
    """Put a message and see it done; put five more while nobody is there; end without a close."""
    global kept
    kept = RemoteProducer(endpoint)
    kept.put(numbered(0))
    kept.flush(timeout=DEADLINE_S)
    connection.send("done")
    connection.recv()
    kept.put_many(map(numbered, range(1, 6)))
    connection.send("put")


def test_producers_come_and_go(consumer: RemoteConsumer) -> None:
    for _ in range(3):
        with Child(put_and_flush, consumer.endpoint, 5) as child:
            for number in range(5):
                with get(consumer) as message:
                    assert message.payload["n"] == number
            producer = child.hear()
            assert message.producer == producer
            child.kill()
    assert not consumer._protocol.held()


def test_a_producer_that_ends_without_close_waits_for_what_it_put() -> None:
    endpoint = free_endpoint()
    with Child(put_and_exit, endpoint, method="spawn") as child:
        with RemoteConsumer(endpoint) as consumer, get(consumer) as message:
            assert message.payload["n"] == 0
            message.release()
            child.hear()
        child.tell("go on")
        child.hear()
        # All is sent while the interpreter ends.
        with RemoteConsumer(endpoint) as successor:
            for number in range(1, 6):
                with get(successor) as message:
                    assert message.payload["n"] == number
            assert child.join() == 0


def test_what_a_closed_consumer_held_goes_to_the_next_one() -> None:
    with RemoteConsumer(ANY) as consumer:
        endpoint = consumer.endpoint
        producer = RemoteProducer(endpoint)
        producer.put_many([1, 2])
        message = get(consumer)
        get(consumer).release()
        assert message.payload == 1
    message.release()  # too late, and no harm
    with RemoteConsumer(endpoint) as successor:
        again = get(successor)
        assert (again.payload, again.redelivered) == (1, True)
        again.release()
        producer.close()
        assert producer.unacknowledged == 0


def test_close_says_how_many_messages_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    producer = RemoteProducer(free_endpoint())
    producer.put_many([1, 2, 3])
    with caplog.at_level(logging.ERROR, "fmq"):
        producer.close(timeout=0.1)
    assert "3 messages were not acknowledged" in caplog.text
    assert producer.unacknowledged == 3
    producer.close()
    for call in (lambda: producer.put(1), producer.flush, lambda: producer.empty(3)):
        with pytest.raises(ClosedError):
            call()


def test_closing_wakes_who_waits(consumer: RemoteConsumer) -> None:
    ended = []

    def wait() -> None:
        ended.extend(consumer)
        ended.append("end")

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: consumer._turn.locked(), "it waits")
    consumer.close()
    thread.join(DEADLINE_S)
    assert ended == ["end"]
    with pytest.raises(ClosedError):
        consumer.get(timeout=0)


def test_what_is_dropped_without_close_is_closed_with_a_warning() -> None:
    def drop(make: Callable[[], Any]) -> None:
        thing = make()
        cycle = [thing]
        cycle.append(cycle)
        del thing, cycle
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed <RemoteConsumer"):
        drop(lambda: RemoteConsumer(ANY))
    with RemoteConsumer(ANY) as consumer, pytest.warns(ResourceWarning, match="unclosed <RemoteProducer"):
        drop(lambda: RemoteProducer(consumer.endpoint))
    assert not [thread for thread in threading.enumerate() if thread.name == "fmq-tcp"]


def test_nothing_leaks() -> None:
    def once() -> None:
        with RemoteConsumer(ANY) as consumer, RemoteProducer(consumer.endpoint) as producer:
            producer.put(LARGE)
            get(consumer).release()

    once()
    descriptors, threads = open_descriptors(), threading.active_count()
    for _ in range(5):
        once()
    eventually(lambda: open_descriptors() <= descriptors, "all descriptors are closed")
    assert threading.active_count() == threads


def test_a_forked_child_is_refused_and_does_no_harm(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    def use(connection: Connection) -> None:
        for call in (lambda: producer.put(1), lambda: consumer.get(timeout=0), producer.flush):
            with pytest.raises(ForkedError):
                call()
        producer.close()
        consumer.close()
        connection.send("refused")

    producer.put(1)
    with Child(use) as child:
        assert child.hear() == "refused"
        child.join()
    assert get(consumer).payload == 1
    producer.put(2)
    assert get(consumer).payload == 2


def test_a_forked_child_does_not_keep_the_port(consumer: RemoteConsumer, producer: RemoteProducer) -> None:
    def live(connection: Connection) -> None:
        connection.send("there")
        connection.recv()

    eventually(lambda: producer.connected, "it is connected")
    with Child(live) as child:
        assert child.hear() == "there"
        consumer.close()
        producer.put(1)
        with RemoteConsumer(consumer.endpoint) as successor:
            assert get(successor).payload == 1
        child.tell("end")
        assert child.join() == 0


@pytest.mark.parametrize("example", range(2))
def test_what_the_docs_show_works(example: int) -> None:
    text = (Path(__file__).parents[2] / "docs" / "remote.md").read_text()
    code = text.split("```python\n")[1 + example].split("```")[0]
    exec(compile(code, "docs/remote.md", "exec"), {})


# -- who may be there -------------------------------------------------------------------------------------------------


def test_a_port_has_one_consumer(consumer: RemoteConsumer) -> None:
    with pytest.raises(QueueInUseError):
        RemoteConsumer(consumer.endpoint)


@pytest.mark.parametrize("endpoint", ["", "queue", "ipc://x", "tcp://", "tcp://host", "tcp://:5", "tcp://host:x", 5])
def test_what_is_no_endpoint_is_refused(endpoint: Any) -> None:
    for kind in (RemoteProducer, RemoteConsumer):
        with pytest.raises(QueueNameError, match="tcp://host:port"):
            kind(endpoint)


def test_an_address_of_another_host_can_not_be_listened_at() -> None:
    with pytest.raises(QueueNameError, match="can't be listened at"):
        RemoteConsumer("tcp://192.0.2.1:0")


def test_all_addresses_and_any_port() -> None:
    with RemoteConsumer("tcp://*:*") as consumer:
        port = int(consumer.endpoint.rpartition(":")[2])
        assert port > 0
        with RemoteProducer(f"tcp://localhost:{port}") as producer:
            producer.put(1)
            get(consumer).release()


@pytest.mark.parametrize(
    "options",
    [
        {"max_message": 0},
        {"window_bytes": 10},
        {"window_messages": True},
        {"max_producers": "x"},
        {"accept": ("msgpack", "pickle")},
        {"accept": "nothing"},
        {"clients": ["x"]},
        {"clients": ["x"], "keys": CurveKeys.generate()},
    ],
)
def test_what_a_consumer_can_not_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_message|window_|max_producers|pickle|codec|keys|key"):
        RemoteConsumer(ANY, **options)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keys_show_no_secret_and_are_checked() -> None:
    keys = CurveKeys.generate()
    assert keys.secret not in repr(keys)
    assert len(keys.public) == len(keys.secret) == 40
    for public in ("", "x", "x" * 39, "\x00" * 40, "é" * 40, 5):
        with pytest.raises(ValueError, match="the public key is no CURVE key"):
            CurveKeys(public, keys.secret)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the public key of its consumer"):
        RemoteProducer(free_endpoint(), keys=keys)


@pytest.mark.parametrize("listed", [True, False])
def test_the_right_keys_let_messages_through(listed: bool) -> None:
    server = CurveKeys.generate()
    client = CurveKeys.generate(server.public)
    clients = [client.public] if listed else None
    with (
        RemoteConsumer(ANY, keys=server, clients=clients) as consumer,
        RemoteProducer(consumer.endpoint, keys=client) as producer,
    ):
        producer.put({"x": LARGE})
        with get(consumer) as message:
            assert np.array_equal(message.payload["x"], LARGE)


def test_a_pickle_is_accepted_from_known_clients() -> None:
    server = CurveKeys.generate()
    client = CurveKeys.generate(server.public)
    with (
        RemoteConsumer(ANY, keys=server, clients=[client.public], accept=("msgpack", "pickle")) as consumer,
        RemoteProducer(consumer.endpoint, keys=client, codec="pickle") as producer,
    ):
        producer.put({1, 2})
        assert get(consumer).payload == {1, 2}


@pytest.mark.parametrize("case", ["none", "not listed", "other server", "server has none"])
def test_wrong_keys_let_nothing_through_and_are_named(case: str) -> None:
    server = CurveKeys.generate()
    client: CurveKeys | None = CurveKeys.generate(server.public)
    known = CurveKeys.generate().public
    assert client is not None
    if case == "other server":
        client = CurveKeys.generate(CurveKeys.generate().public)
        known = client.public
    options: dict[str, Any] = {} if case == "server has none" else {"keys": server, "clients": [known]}
    if case == "none":
        client = None
    with RemoteConsumer(ANY, **options) as consumer:
        producer = RemoteProducer(consumer.endpoint, keys=client, window_messages=1)
        producer.put(1)
        eventually(lambda: "CurveKeys" in producer._link.trouble, "the cause is known")
        with pytest.raises(PeerUnavailableError, match=r"does not answer.*keys.*CurveKeys"):
            producer.put(2, timeout=0.2)
        with pytest.raises(QueueEmptyError):
            consumer.get(timeout=0.2)
        producer.close(timeout=0)


# -- strangers --------------------------------------------------------------------------------------------------------


def test_random_bytes_do_no_harm(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    chance = random.Random(3)
    host, port = "127.0.0.1", int(consumer.endpoint.rpartition(":")[2])
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
    for number in range(60):
        with socket.create_connection((host, port), timeout=DEADLINE_S) as stranger:
            begin = (b"", greeting, greeting + b"\4\x26\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0")
            try:
                stranger.sendall(begin[number % 3] + chance.randbytes(chance.randrange(2000)))
            except (BrokenPipeError, ConnectionResetError):
                continue
    producer.put("still there")
    assert get(consumer).payload == "still there"


def test_random_messages_do_no_harm_and_do_not_fill_the_log(
    producer: RemoteProducer, consumer: RemoteConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    begun = time.monotonic()
    chance = random.Random(4)
    encode = msgspec.msgpack.encode
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 1000
        stranger.connect(consumer.endpoint)
        stranger.send(encode(Hello(1, "ab" * 8, 0)))
        for number in range(300):
            frames = [chance.randbytes(chance.randrange(60)) for _ in range(chance.randrange(1, 5))]
            if number % 3 == 0:
                stranger.send(encode(Hello(1, "ab" * 8, 0)))
            if number % 2 == 0:
                frames.insert(0, encode(Data(number, 0, 0, chance.randrange(5), 0)))
            stranger.send_multipart(frames)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 1000
        stranger.connect(consumer.endpoint)
        stranger.send(encode(Hello(1, "cd" * 8, 0)))
        for number in range(20):
            stranger.send_multipart([encode(Data(number, 0, 0, 0, 0)), chance.randbytes(30), chance.randbytes(9000)])
    producer.put("still there")
    found = []
    deadline = time.monotonic() + DEADLINE_S
    while "still there" not in found and time.monotonic() < deadline:
        try:
            found.append(get(consumer).payload)
        except DecodeError:
            found.append("damaged")
    assert "still there" in found
    # One a second, and how many more there were.
    eventually(lambda: "more messages were passed over" in caplog.text, "the others were counted")
    assert 1 <= caplog.text.count("a message is passed over") <= time.monotonic() - begun + 2
    assert found.count("damaged") > 5


def test_a_consumer_that_sends_nonsense_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.linger = 0
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        producer = RemoteProducer(f"tcp://127.0.0.1:{port}")
        producer.put(1)
        stranger.rcvtimeo = int(DEADLINE_S * 1000)
        for answer in ([b"nonsense"], [b"", b""]):
            address = stranger.recv_multipart()[0]
            stranger.send_multipart([address, *answer])
        eventually(lambda: "no consumer of this version" in producer._link.trouble, "it is known")
        producer.close(timeout=0)


# -- asyncio ----------------------------------------------------------------------------------------------------------


def test_asyncio_has_the_same_calls(runner: Run) -> None:
    async def work() -> None:
        async with AsyncRemoteConsumer(ANY) as consumer, AsyncRemoteProducer(consumer.endpoint) as producer:
            array = await producer.empty(100_000)
            array[:] = 3
            view = await producer.reserve(10)
            await producer.put_many([array, LARGE[::2], bytes(view)])
            messages = [await consumer.get(timeout=DEADLINE_S) for _ in range(2)]
            assert (messages[0].payload == 3).all()
            assert np.array_equal(messages[1].payload, LARGE[::2])
            messages += await consumer.get_many()
            with pytest.raises(QueueEmptyError):
                await consumer.get(timeout=0)
            for message in messages:
                message.release()
            await producer.flush(timeout=DEADLINE_S)
            await producer.put("last")
            async for message in consumer:
                assert message.payload == "last"
                message.release()
                break

    runner(work())


def test_one_event_loop_after_another(runner: Run) -> None:
    consumer = AsyncRemoteConsumer(ANY)
    producer = AsyncRemoteProducer(consumer.endpoint)

    async def move(number: int) -> None:
        getting = asyncio.ensure_future(consumer.get(timeout=DEADLINE_S))
        await asyncio.sleep(0)
        await producer.put(number)
        with await getting as message:
            assert message.payload == number

    async def close() -> None:
        await producer.close()
        await consumer.close()

    for number in range(3):
        runner(move(number))
    runner(close())


def test_cancelling_loses_nothing(runner: Run) -> None:
    async def work() -> None:
        async with (
            AsyncRemoteConsumer(ANY) as consumer,
            AsyncRemoteProducer(consumer.endpoint, window_messages=1) as producer,
        ):
            chance = random.Random(1)
            put: list[int] = []
            got: list[int] = []

            async def take() -> None:
                message = await consumer.get(timeout=DEADLINE_S)
                got.append(message.payload)
                message.release()

            for number in range(100):
                getting = asyncio.ensure_future(take())
                putting = asyncio.ensure_future(producer.put(number, timeout=DEADLINE_S))
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                if chance.random() < 0.3:
                    putting.cancel()
                if (await asyncio.gather(putting, return_exceptions=True))[0] != number:
                    await producer.put(number, timeout=DEADLINE_S)
                put.append(number)
                if chance.random() < 0.5:
                    getting.cancel()
                await asyncio.gather(getting, return_exceptions=True)
                if getting.cancelled():
                    await take()
            assert got == put

    async def bounded() -> None:
        await asyncio.wait_for(work(), 60)

    runner(bounded())


def test_ctrl_c_in_get_leaves_the_consumer_whole(producer: RemoteProducer, consumer: RemoteConsumer) -> None:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        consumer.get(timeout=DEADLINE_S)
    timer.join()
    producer.put(1)
    assert get(consumer).payload == 1
