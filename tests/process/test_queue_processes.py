"""Producers and consumers in processes of their own: started in any order, stopped, killed, and forked."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmq import (
    ClosedError,
    Consumer,
    ForkedError,
    Message,
    PeerUnavailableError,
    Producer,
    QueueEmptyError,
    QueueFullError,
    QueueInUseError,
)
from tests.queues import (
    DEADLINE_S,
    Child,
    Place,
    drain,
    eventually,
    fill,
    is_empty,
    open_descriptors,
    place_fixture,  # noqa: F401
    take_all,
)

ARRAY = np.arange(3000, dtype=np.int16)
METHODS = ["spawn", "fork"]


# -- what children do -------------------------------------------------------------------------------------------------


def put_numbers(connection: Connection, place: Place, who: int, count: int, ending: str) -> None:
    """Put numbered messages; then close, return, or wait to be killed."""
    producer = Producer(place.queue, ring_size=256 * 1024, **place.where)
    connection.send(producer.ring)
    connection.recv()
    for index in range(count):
        size = (index * 37) % 3000
        producer.put({"who": who, "n": index, "a": ARRAY[:size]} if index % 3 else [who, index], timeout=DEADLINE_S)
    connection.send("put")
    if ending == "close":
        producer.close(timeout=0)
    elif ending == "wait":
        connection.recv()


def put_one_of_each(connection: Connection, place: Place) -> None:
    """Put messages that lie in the ring in every way there is, and wait to be killed."""
    producer = Producer(place.queue, ring_size=1024 * 1024, **place.where)
    loan = producer.empty(20_000)
    loan[:] = 7
    producer.put_many([b"small", {"a": ARRAY}, {"big": np.arange(300_000)}, {"loan": loan}, "last"])
    unsent = producer.empty(5000)
    connection.send(producer.ring)
    connection.recv()
    del unsent


def put_without_end(connection: Connection, place: Place) -> None:
    """Put until the ring is full for good, telling each sequence as soon as put has returned."""
    producer = Producer(place.queue, ring_size=64 * 1024, **place.where)
    index = 0
    while True:
        connection.send(producer.put({"n": index, "a": ARRAY[: index % 3000]}, timeout=None))
        index += 1


def consume(connection: Connection, place: Place) -> None:
    """Do as told: "get", "hold" (get and keep), "close"."""
    consumer = Consumer(place.queue, max_deliveries=None, **place.where)
    held = []
    connection.send("ready")
    while (order := connection.recv()) != "close":
        message = consumer.get(timeout=DEADLINE_S)
        if order == "hold":
            held.append((message, message.payload))
        else:
            message.release()
        connection.send((message.sequence, message.redelivered))
        del message
    held.clear()
    consumer.close()
    connection.send("closed")


def consume_numbers(connection: Connection, place: Place, count: int) -> None:
    """Get numbered messages, check them, and say what came."""
    got = defaultdict(list)
    with Consumer(place.queue, **place.where) as consumer:
        connection.send("ready")
        for _ in range(count):
            with consumer.get(timeout=DEADLINE_S) as message:
                who, n = read(message)
                got[who].append(n)
            del message
    connection.send(dict(got))


def read(message: Message) -> tuple[int, int]:
    payload = message.payload
    if isinstance(payload, list):
        return payload[0], payload[1]
    assert (payload["a"] == ARRAY[: (payload["n"] * 37) % 3000]).all()
    return payload["who"], payload["n"]


def take_numbers(consumer: Consumer, count: int) -> dict[int, list[int]]:
    got = defaultdict(list)
    for _ in range(count):
        with consumer.get(timeout=DEADLINE_S) as message:
            who, n = read(message)
            got[who].append(n)
        del message
    return dict(got)


# -- any order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_four_producers_to_one_consumer_lose_nothing_and_each_keeps_its_order(place: Place, method: str) -> None:
    count = 500
    consumer = place.consumer()
    children = [Child(put_numbers, place, who, count, "close", method=method) for who in range(4)]
    for child in children:
        child.hear()
    for child in children:
        child.tell("go")
    assert take_numbers(consumer, 4 * count) == {who: list(range(count)) for who in range(4)}
    for child in children:
        assert child.hear() == "put"
        assert child.join() == 0
    with pytest.raises(QueueEmptyError):
        consumer.get(timeout=0)
    consumer.close()
    assert place.segments() == []


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_who_starts_first_does_not_matter(place: Place, first: str) -> None:
    if first == "producer":
        producing = Child(put_numbers, place, 0, 300, "close")
        producing.hear()
        producing.tell("go")
    consuming = Child(consume_numbers, place, 300)
    assert consuming.hear() == "ready"
    if first == "consumer":
        producing = Child(put_numbers, place, 0, 300, "close")
        producing.hear()
        producing.tell("go")
    assert consuming.hear() == {0: list(range(300))}
    assert producing.hear() == "put"
    assert producing.join() == consuming.join() == 0
    place.consumer().close()
    assert place.segments() == []


@pytest.mark.parametrize("ending", ["close", "return"])
@pytest.mark.parametrize("method", METHODS)
def test_a_producer_that_put_and_is_gone_before_any_consumer_came_is_heard(
    place: Place, method: str, ending: str
) -> None:
    with Child(put_numbers, place, 0, 30, ending, method=method) as child:
        ring = child.hear()
        child.tell("go")
        assert child.hear() == "put"
        assert child.join() == 0
    assert place.segments() == [ring]
    consumer = place.consumer()
    assert take_numbers(consumer, 30) == {0: list(range(30))}
    eventually(lambda: empty(consumer) and place.segments() == [], "the ring was removed")


def empty(consumer: Consumer) -> bool:
    try:
        consumer.get(timeout=0.01)
    except QueueEmptyError:
        return True
    return False


# -- deaths of producers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the consumer came", "while the consumer waits"])
def test_what_a_killed_producer_had_put_is_delivered_and_its_ring_removed(place: Place, when: str) -> None:
    with Child(put_one_of_each, place) as child:
        consumer = place.consumer() if when.startswith("while") else None
        ring = child.hear()
        child.kill()
    assert len(place.segments()) == 2
    consumer = consumer or place.consumer()
    payloads = []
    for _ in range(5):
        message = consumer.get(timeout=DEADLINE_S)
        assert message.producer == ring.rpartition(":")[2]
        assert not message.redelivered
        payloads.append(message.detach())
        del message
    assert payloads[0] == b"small"
    assert (payloads[1]["a"] == ARRAY).all()
    assert (payloads[2]["big"] == np.arange(300_000)).all()
    assert (payloads[3]["loan"] == 7).all()
    assert payloads[4] == "last"
    eventually(lambda: empty(consumer) and place.segments() == [], "the ring was removed")


def test_views_into_the_ring_of_a_killed_producer_keep_it_until_they_are_gone(place: Place) -> None:
    consumer = place.consumer()
    with Child(put_one_of_each, place) as child:
        child.hear()
        child.kill()
    messages = [consumer.get(timeout=DEADLINE_S) for _ in range(5)]
    views = messages[1].payload["a"], messages[2].payload["big"], messages[3].payload["loan"]
    for message in messages:
        message.release()
    messages.clear()
    del message
    over = time.monotonic() + 1.5
    eventually(lambda: empty(consumer) and time.monotonic() > over, "the consumer looked for dead producers")
    assert len(place.segments()) == 2
    assert (views[0] == ARRAY).all()
    assert (views[1] == np.arange(300_000)).all()
    assert (views[2] == 7).all()
    del views
    eventually(lambda: empty(consumer) and place.segments() == [], "the ring was removed")


@pytest.mark.parametrize("round_", range(3))
def test_a_producer_killed_at_any_moment_loses_nothing_that_put_had_returned_for(place: Place, round_: int) -> None:
    consumer = place.consumer()
    got, told = [], []
    with Child(put_without_end, place) as child:
        for _ in range(50 + 77 * round_):
            with consumer.get(timeout=DEADLINE_S) as message:
                got.append(message.sequence)
            del message
        child.process.kill()
        child.process.join()
        while child.connection.poll():
            try:
                told.append(child.connection.recv())
            except EOFError:
                break
    while True:
        try:
            message = consumer.get(timeout=0)
        except QueueEmptyError:
            break
        assert (message.payload["a"] == ARRAY[: message.payload["n"] % 3000]).all()
        got.append(message.sequence)
        message.release()
        del message
    assert got == list(range(len(got)))
    assert len(got) >= len(told)
    eventually(lambda: empty(consumer) and place.segments() == [], "the ring was removed")


def test_a_producer_that_is_stopped_is_not_taken_for_dead(place: Place) -> None:
    consumer = place.consumer()
    with Child(put_numbers, place, 0, 20, "wait") as child:
        ring = child.hear()
        child.tell("go")
        child.hear()
        child.stop()
        assert take_numbers(consumer, 20) == {0: list(range(20))}
        over = time.monotonic() + 1.5
        eventually(lambda: empty(consumer) and time.monotonic() > over, "the consumer looked for dead producers")
        assert place.segments() == [ring]
        child.go_on()
        child.tell("end")
        assert child.join() == 0


# -- deaths of consumers ----------------------------------------------------------------------------------------------


def test_a_second_consumer_is_refused_with_the_pid_of_the_first_though_that_is_stopped(place: Place) -> None:
    with Child(consume, place) as child:
        assert child.hear() == "ready"
        for _ in range(2):
            with pytest.raises(QueueInUseError, match=f"process {child.pid};") as caught:
                place.consumer()
            assert caught.value.pid == child.pid
            child.stop()
        child.go_on()
        child.tell("close")
        assert child.hear() == "closed"
        assert child.join() == 0
    assert place.files() == []
    place.consumer()


def test_a_killed_consumer_is_followed_by_another_at_once_on_the_socket_that_it_left(place: Place) -> None:
    producer = place.producer()
    for _ in range(3):
        with Child(consume, place) as child:
            assert child.hear() == "ready"
            producer.put(b"x")
            child.tell("get")
            child.hear()
            child.kill()
        assert os.path.exists(place.path.socket)
    consumer = place.consumer()
    producer.put(b"y")
    with consumer.get(timeout=DEADLINE_S) as message:
        assert message.payload == b"y"


def test_what_a_killed_consumer_held_comes_again_marked_and_in_order(place: Place) -> None:
    producer = place.producer()
    producer.put_many([b"0", {"a": ARRAY}, b"2", {"a": ARRAY}, b"4", {"a": np.arange(100_000)}, b"6", b"7"])
    with Child(consume, place) as child:
        assert child.hear() == "ready"
        for sequence, order in enumerate(["get", "hold", "hold", "get", "hold", "hold"]):
            child.tell(order)
            assert child.hear() == (sequence, False)
        child.kill()
    consumer = place.consumer()
    messages = take_all(consumer)
    assert [(message.sequence, message.redelivered) for message in messages] == [
        (1, True),
        (2, True),
        (4, True),
        (5, True),
        (6, False),
        (7, False),
    ]
    assert [message.deliveries for message in messages] == [1, 1, 1, 1, 0, 0]
    assert (messages[0].payload["a"] == ARRAY).all()
    assert (messages[3].payload["a"] == np.arange(100_000)).all()
    for message in messages:
        message.release()
    messages.clear()
    del message
    drain(consumer)
    assert is_empty(producer)


def test_producer_and_consumer_killed_one_after_the_other_lose_nothing(place: Place) -> None:
    with Child(put_one_of_each, place) as producing, Child(consume, place) as consuming:
        producing.hear()
        assert consuming.hear() == "ready"
        for sequence, order in enumerate(["get", "hold", "hold"]):
            consuming.tell(order)
            assert consuming.hear() == (sequence, False)
        producing.kill()
        consuming.kill()
    consumer = place.consumer()
    messages = [consumer.get(timeout=DEADLINE_S) for _ in range(4)]
    assert [(message.sequence, message.redelivered) for message in messages] == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]
    assert (messages[1].payload["big"] == np.arange(300_000)).all()
    for message in messages:
        message.release()
    messages.clear()
    del message
    eventually(lambda: empty(consumer) and place.segments() == [], "the ring was removed")


def test_a_producer_waits_out_the_death_of_its_consumer(place: Place) -> None:
    producer = place.producer()
    with Child(consume, place) as child:
        assert child.hear() == "ready"
        count = fill(producer)
        with pytest.raises(QueueFullError):
            producer.put(bytes(4000), timeout=0)
        child.stop()
        with pytest.raises(QueueFullError):
            producer.put(bytes(4000), timeout=0.05)
        child.kill()
        with pytest.raises(PeerUnavailableError):
            producer.put(bytes(4000), timeout=0.05)
    consumer = place.consumer()
    assert drain(consumer) == list(range(count))
    producer.put(bytes(4000), timeout=0)


def test_the_ring_is_empty_after_each_of_a_thousand_consumers_and_nothing_grows(place: Place) -> None:
    producer = place.producer(ring_size=256 * 1024)
    segments = []
    for index in range(1003):
        producer.put_many([b"x", {"a": ARRAY}, {"a": np.arange(50_000)}])
        consumer = Consumer(place.queue, **place.where)
        assert drain(consumer) == [3 * index, 3 * index + 1, 3 * index + 2]
        consumer.close()
        assert is_empty(producer)
        if index == 2:
            segments = place.segments()
    assert place.segments() == segments


def test_a_hundred_consumers_one_after_another_leave_no_descriptor(place: Place) -> None:
    for _ in range(3):
        place.consumer().close()
    before = open_descriptors()
    for _ in range(100):
        Consumer(place.queue, **place.where).close()
    eventually(lambda: open_descriptors() <= before + 5, "the descriptors were closed", 2)


def test_consumers_killed_again_and_again_leave_room_for_the_next(place: Place) -> None:
    producer = place.producer(ring_size=1024 * 1024)
    for index in range(10):
        producer.put_many([b"x", {"a": ARRAY}])
        with Child(consume, place) as child:
            assert child.hear() == "ready"
            for _ in range(2):
                child.tell("hold")
                sequence, redelivered = child.hear()
                assert redelivered == (index > 0)
                assert sequence < 2
            child.kill()
    consumer = place.consumer(max_deliveries=None)
    messages = take_all(consumer)
    assert [message.sequence for message in messages] == list(range(20))
    assert [message.deliveries for message in messages[:3]] == [10, 10, 0]
    messages.clear()
    drain(consumer)
    assert is_empty(producer)


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_the_next_start_just_works(place: Place, signal_: signal.Signals) -> None:
    producer = place.producer()
    with Child(consume, place, method="spawn") as child:
        assert child.hear() == "ready"
        producer.put_many([b"held", b"x"])
        child.tell("hold")
        child.hear()
        os.kill(child.pid, signal_)
        assert child.join() != 0
    # An interpreter that is interrupted drops what it holds, which is to acknowledge it.
    expected = [(b"held", True), (b"x", False)] if signal_ == signal.SIGTERM else [(b"x", False)]
    messages = take_all(place.consumer())
    assert [(message.payload, message.redelivered) for message in messages] == expected


# -- forks ------------------------------------------------------------------------------------------------------------


def in_child(work: Any) -> str:
    """Fork, do ``work`` in the child and return what it returned there, or the error."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = str(work())
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(write_end, result.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        result = file.read().decode()
    os.waitpid(pid, 0)
    return result


def test_in_a_forked_child_the_parents_ends_refuse_every_use(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    loan = producer.empty(5000)
    acts = {
        "put": lambda: producer.put(b"x"),
        "put array": lambda: producer.put({"a": ARRAY}),
        "put large": lambda: producer.put(np.arange(100_000)),
        "put loan": lambda: producer.put(loan),
        "put_many": lambda: producer.put_many([1]),
        "empty": lambda: producer.empty(10),
        "reserve": lambda: producer.reserve(10),
        "flush": producer.flush,
        "get": consumer.get,
        "get now": lambda: consumer.get(timeout=0),
        "get_many": consumer.get_many,
        "iterate": lambda: next(iter(consumer)),
    }

    def try_all() -> str:
        answers = {}
        for name, act in acts.items():
            try:
                answers[name] = repr(act())
            except ForkedError as error:
                assert "parent process's" in str(error)  # noqa: PT017
            except BaseException as error:
                answers[name] = repr(error)
        return str(answers)

    assert in_child(try_all) == "{}"
    producer.put(loan)
    assert consumer.get(timeout=0).payload.size == 5000


def test_a_fork_while_a_thread_holds_the_locks_does_not_hang_the_child(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    with producer._lock, consumer._lock, consumer._turn:
        answer = in_child(lambda: (repr(producer), repr(consumer)) and producer.put(b"x"))
    assert answer.startswith("ForkedError")


@pytest.mark.parametrize("how", ["exit", "collect", "close"])
def test_the_parent_is_not_touched_by_the_end_of_its_child(place: Place, how: str) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put_many([b"0", {"a": ARRAY}, {"big": np.arange(100_000)}])
    messages = consumer.get_many(timeout=0)
    segments = place.segments()

    def end() -> str:
        if how == "collect":
            for message in messages:
                message.release()
            messages.clear()
            gc.collect()
        if how == "close":
            for thing in (producer, consumer):
                try:
                    thing.close()
                except (ForkedError, ClosedError):
                    continue
        return "done"

    assert in_child(end) == "done"
    assert place.segments() == segments
    assert sorted(os.listdir(place.path.directory)) == [f"{place.queue}.lock", f"{place.queue}.sock"]
    assert not is_empty(producer)
    assert producer._writer.unfinished() == 3
    assert (messages[1].payload["a"] == ARRAY).all()
    with pytest.raises(QueueInUseError):
        place.consumer()
    for message in messages:
        message.release()
    messages.clear()
    del message
    producer.put(b"more")
    assert consumer.get(timeout=0).payload == b"more"
    drain(consumer)
    assert is_empty(producer)


def test_a_child_can_have_ends_of_its_own(place: Place) -> None:
    consumer = place.consumer()
    producer = place.producer()

    def put() -> str:
        with Producer(place.queue, ring_size=64 * 1024, **place.where) as own:
            own.put(b"from the child")
            own.flush(timeout=DEADLINE_S)
        return "done"

    pid = os.fork()
    if pid == 0:
        put()
        os._exit(0)
    with consumer.get(timeout=DEADLINE_S) as message:
        assert message.payload == b"from the child"
        assert message.producer != producer.ring.rpartition(":")[2]
    assert os.waitpid(pid, 0)[1] == 0


def test_a_child_that_lives_on_does_not_keep_a_dead_parents_queue_or_ring(place: Place) -> None:
    with Child(fork_and_wait, place) as parent:
        child, ring = parent.hear()
        try:
            parent.kill()
            consumer = place.consumer()
            with consumer.get(timeout=DEADLINE_S) as message:
                assert message.producer == ring.rpartition(":")[2]
            del message
            eventually(lambda: empty(consumer) and place.segments() == [], "the ring was removed")
        finally:
            os.kill(child, signal.SIGKILL)


def fork_and_wait(connection: Connection, place: Place) -> None:
    consumer = Consumer(place.queue, **place.where)
    producer = Producer(place.queue, ring_size=64 * 1024, **place.where)
    producer.put(b"x")
    child = os.fork()
    if child == 0:
        # Should this test die, so does the child.
        ctypes.CDLL(None).alarm(60)
        while True:
            signal.pause()
    connection.send((child, producer.ring))
    connection.recv()
    consumer.close()


def test_messages_of_the_parent_dropped_at_the_exit_of_a_child_stay_the_parents(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put_many([b"0", {"a": ARRAY}])
    messages = consumer.get_many(timeout=0)
    with Child(drop, messages) as child:
        assert child.join() == 0
    assert producer._writer.unfinished() == 2
    messages.clear()
    drain(consumer)
    assert is_empty(producer)


def drop(connection: Connection, messages: list[Message]) -> None:
    messages.clear()
    gc.collect()


# -- the start --------------------------------------------------------------------------------------------------------


def test_importing_the_queue_imports_neither_paddle_nor_a_web_framework_and_starts_nothing() -> None:
    code = (
        "import sys, threading, fmq; "
        "heavy = {'paddle', 'torch', 'fastapi', 'uvicorn', 'starlette', 'ml_dtypes'}; "
        "print(heavy & set(sys.modules), threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("set() 1\n", "")


def test_a_process_that_ends_without_closing_leaves_no_warning_and_a_queue_that_can_be_taken(place: Place) -> None:
    code = f"""
from fmq import Consumer, Producer
where = {place.where!r}
producer = Producer({place.queue!r}, ring_size=65536, **where)
consumer = Consumer({place.queue!r}, **where)
producer.put(b"x")
message = consumer.get(timeout=20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with place.consumer().get(timeout=0) as message:
        assert message.payload == b"x"
        assert message.redelivered


def test_stale_files_of_a_dead_consumer_are_no_obstacle(place: Place) -> None:
    place.path.make_directory()
    Path(place.path.lock).write_text("1")
    Path(place.path.socket).write_text("")
    producer, consumer = place.producer(), place.consumer()
    producer.put(b"x")
    assert consumer.get(timeout=0).payload == b"x"


@pytest.mark.parametrize("end", ["pass", "1 / 0", "c.close()", "view = m.payload['a'][3:]; del m"])
@pytest.mark.parametrize("payload", ["np.ones(5000)", "np.ones(3)"])
def test_what_a_consumer_holds_at_its_ordinary_end_comes_again(place: Place, end: str, payload: str) -> None:
    lines = ["import sys, numpy as np, fmq", f"options = {place.where!r}"]
    put = [*lines, f"fmq.Producer({place.queue!r}, ring_size=1 << 20, **options).put({{'a': {payload}}})"]
    get = [*lines, f"c = fmq.Consumer({place.queue!r}, **options)", "m = c.get(timeout=5)", end]
    subprocess.run([sys.executable, "-c", "\n".join(put)], check=True, timeout=DEADLINE_S)
    subprocess.run([sys.executable, "-c", "\n".join(get)], capture_output=True, check=False, timeout=DEADLINE_S)
    with place.consumer().get(timeout=5) as message:
        assert message.redelivered
        assert (message.payload["a"] == 1).all()
