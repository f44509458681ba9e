"""What goes on around a queue: other directories, files that vanish, limits that are reached and pass."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from fmq import (
    ClosedError,
    Consumer,
    FmqError,
    PeerUnavailableError,
    Producer,
    QueueEmptyError,
    QueueInUseError,
    SegmentError,
    SegmentLimitError,
    ShmqError,
)
from fmq.paths import QueuePath
from shmq import Segment
from shmq.segment import DIRECTORY, names, unlink
from tests.queues import DEADLINE_S, Child, Place, drain, eventually, fill, open_descriptors, place_fixture

__all__ = ["place_fixture"]


@pytest.fixture(name="elsewhere")
def elsewhere_fixture() -> Iterator[str]:
    """A runtime directory that is not the test's own."""
    with tempfile.TemporaryDirectory(prefix="fmqe", dir="/tmp") as directory:
        yield directory


@contextlib.contextmanager
def no_descriptors(left: int) -> Iterator[None]:
    """Let this process open only ``left`` descriptors more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, open_descriptors() + 64), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for fd in [taken.pop() for _ in range(left)]:
            os.close(fd)
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connected(consumer: Consumer) -> None:
    """Wait until a producer's first frame has come: with no descriptor left libzmq dies of one more to accept."""
    eventually(consumer._bell.readable, "a producer is connected")


# -- one consumer, wherever its lock is -------------------------------------------------------------------------------


def test_a_consumer_with_another_runtime_directory_is_refused_and_no_view_overwritten(
    place: Place, elsewhere: str
) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put(np.zeros(10_000, np.uint8))
    array = consumer.get(timeout=5).payload
    with pytest.raises(QueueInUseError, match=rf"process {os.getpid()}, which has another runtime directory") as caught:
        Consumer(place.queue, namespace=place.where["namespace"], runtime_dir=elsewhere)
    assert caught.value.pid == os.getpid()
    for _ in range(20):
        producer.put(np.ones(10_000, np.uint8), timeout=0)
        with consumer.get(timeout=5):
            pass
    assert not array.any()


def test_a_lock_file_that_is_removed_lets_no_second_consumer_in(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put(1)
    os.unlink(QueuePath(place.queue, **place.where).lock)
    with pytest.raises(QueueInUseError, match="whose lock file was removed"):
        Consumer(place.queue, **place.where)
    assert drain(consumer) == [0]


def test_a_ring_that_has_a_consumer_elsewhere_is_left_to_it_and_taken_over_when_it_goes(
    place: Place, elsewhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = Consumer(place.queue, namespace=place.where["namespace"], runtime_dir=elsewhere)
    consumer = place.consumer()
    producer = place.producer()
    producer.put("x")
    # Whoever looks first has it, and keeps it.
    with other.get(timeout=5) as message:
        assert message.payload == "x"
    producer.put("y")
    with pytest.raises(QueueEmptyError):
        consumer.get(timeout=0.1)
    assert "has a consumer already" in caplog.text
    other.close()
    with consumer.get(timeout=10) as message:
        assert message.payload == "y"


# -- limits that are reached, and pass --------------------------------------------------------------------------------


def test_a_ring_that_came_while_there_was_no_descriptor_is_read_when_there_is(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = place.consumer()
    producer = place.producer()
    producer.put("x")
    connected(consumer)
    with no_descriptors(1), contextlib.suppress(ShmqError):
        consumer.get(timeout=0.2)
    assert "no descriptor left (ulimit -n)" in caplog.text
    assert drain(consumer) == [0]
    producer.flush(timeout=5)


@pytest.mark.parametrize("left", range(9))
def test_without_descriptors_every_error_has_a_type(place: Place, left: int) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put("x")
    connected(consumer)
    with no_descriptors(left):
        for make in (Producer, Consumer):
            with contextlib.suppress(ShmqError):
                made = make(place.queue + make.__name__, **place.where)
                made.close()
        for call in (
            lambda: producer.flush(timeout=0.01),
            lambda: producer.empty(1 << 25, timeout=0.01),
            lambda: consumer.get(timeout=0.01).release(),
            consumer.set_aside,
        ):
            with contextlib.suppress(ShmqError):
                call()
    drain(consumer)
    producer.flush(timeout=5)


def at_its_limit(pipe: Connection, place: Place) -> None:
    with place.consumer() as consumer:
        with no_descriptors(3):
            while consumer._bell._listens:
                with contextlib.suppress(ShmqError):
                    consumer.get(timeout=0.1)
            pipe.send("nobody is let in")
            pipe.recv()
        with consumer.get(timeout=DEADLINE_S) as message:
            pipe.send(message.payload)
        while not consumer._bell._listens:
            with contextlib.suppress(QueueEmptyError):
                consumer.get(timeout=0.1)
        pipe.send("let in again")


def test_a_consumer_at_its_limit_of_descriptors_does_not_die_of_a_producer_that_connects(place: Place) -> None:
    with Child(at_its_limit, place) as child:
        assert child.hear() == "nobody is let in"
        producer = place.producer()
        producer.put("x")
        child.tell("go on")
        assert child.hear() == "x"
        assert child.hear() == "let in again"
        assert child.join() == 0
        producer.flush(timeout=5)


def test_a_segment_that_no_descriptor_is_left_for_says_so() -> None:
    with no_descriptors(0):
        with pytest.raises(SegmentLimitError, match=r"no descriptor left \(ulimit -n\)"):
            Segment.create("shmq:test:limit", 4096)
        with pytest.raises(SegmentLimitError, match="can't be listed"):
            names("shmq:")


def test_a_segment_that_can_not_be_linked_is_an_error_with_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(SegmentError, match=r"can't be given its name .* no inode left"):
        Segment.create("shmq:test:inode", 4096)
    assert names("making-shmq:test:inode") == names("shmq:test:inode") == []


def test_a_runtime_directory_that_can_not_be_written_to_is_an_error_with_a_type(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".lock"):
            raise OSError(30, "Read-only file system")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(FmqError, match=r"lock file .* can't be made or written: .*Read-only file system"):
        place.consumer()


def test_a_process_that_changes_its_directory_finds_its_queue_again(
    place: Place, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(elsewhere)
    consumer = Consumer(place.queue, namespace="n", runtime_dir="run")
    with Producer(place.queue, namespace="n", runtime_dir="run", ring_size=65536) as producer:
        monkeypatch.chdir("/")
        producer.put(1)
        consumer.get(timeout=5).release()
        producer.flush(timeout=5)
    consumer.close()
    assert os.listdir(elsewhere) == []


# -- names that vanish ------------------------------------------------------------------------------------------------


def test_a_ring_whose_name_was_removed_is_named_when_it_is_waited_for(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = place.consumer()
    producer = Producer(place.queue, ring_size=65536, **place.where)
    unlink(producer.ring)
    producer.put("x")
    with pytest.raises(PeerUnavailableError, match=r"somebody has removed the ring shmq:.* from /dev/shm"):
        producer.flush(timeout=0.3)
    fill(producer)
    with pytest.raises(PeerUnavailableError, match="somebody has removed"):
        producer.put(bytes(4000), timeout=0)
    producer.close(timeout=0)
    assert "messages are lost" in caplog.text
    consumer.close()


# -- suspects ---------------------------------------------------------------------------------------------------------

BATCHES = """
import os, signal, sys
from fmq import Consumer
consumer = Consumer(sys.argv[1], namespace=sys.argv[2], runtime_dir=sys.argv[3])
messages = consumer.get_many(8, timeout=20)
if any(message.payload == "poison" for message in messages):
    os.kill(os.getpid(), signal.SIGKILL)
for message in messages:
    print(message.payload)
    message.release()
del message
consumer.close()
"""


def test_a_message_that_kills_every_batch_it_is_in_takes_no_other_with_it(place: Place) -> None:
    producer = place.producer()
    for number in range(9):
        producer.put("poison" if number == 4 else number)
    command = [sys.executable, "-c", BATCHES, place.queue, place.where["namespace"], str(place.where["runtime_dir"])]
    done: list[str] = []
    for _ in range(20):
        if len(done) == 8:
            break
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        done += ended.stdout.split()
    assert done == ["0", "1", "2", "3", "5", "6", "7", "8"]
    consumer = place.consumer()
    (aside,) = consumer.set_aside()
    assert aside.read() == "poison"
    aside.discard()
    with pytest.raises(QueueEmptyError):
        consumer.get(timeout=0.1)


def test_suspects_come_one_by_one_in_order_and_are_counted_once_each(place: Place) -> None:
    producer = place.producer()
    for number in range(3):
        producer.put([number])
    first = place.consumer()
    with contextlib.suppress(RuntimeError), first:
        held = first.get_many(8, timeout=5)
        raise RuntimeError("which counts as a death")
    assert [message.sequence for message in held] == [0, 1, 2]
    producer.put([3])
    producer.put([4])
    consumer = place.consumer()
    batches = []
    for _ in range(4):
        batch = consumer.get_many(8, timeout=5)
        batches.append([(message.sequence, message.deliveries) for message in batch])
        for message in batch:
            message.release()
        del message, batch
    assert batches == [[(0, 1)], [(1, 1)], [(2, 1)], [(3, 0), (4, 0)]]
    assert drain(consumer) == []


def test_an_orderly_end_says_nothing_of_messages_that_it_had_not_reached(place: Place) -> None:
    producer = place.producer()
    producer.put([0])
    producer.put([1])
    first = place.consumer()
    with contextlib.suppress(RuntimeError), first:
        held = first.get_many(8, timeout=5)
        raise RuntimeError("which counts as a death")
    assert len(held) == 2
    second = place.consumer()
    second.get(timeout=5).release()
    second.close()
    producer.put([2])
    third = place.consumer()
    assert [message.sequence for message in third.get_many(8, timeout=5)] == [1]
    assert [message.sequence for message in third.get_many(8, timeout=5)] == [2]


# -- odd things to do to a message, and odd timeouts ------------------------------------------------------------------


def test_a_message_can_not_be_copied_for_that_would_give_it_back_twice(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put("x")
    with consumer.get(timeout=5) as message:
        for copying in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"a Message can't be copied or pickled; pass on its payload"):
                copying(message)


def test_an_end_can_not_be_sent_to_another_process(place: Place) -> None:
    for end in (place.producer(), place.consumer()):
        with pytest.raises(TypeError, match="nor sent to another process"):
            pickle.dumps(end)


def test_a_message_that_outlives_its_consumer_can_be_detached(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put({"x": b"q" * 10_000})
    message = consumer.get(timeout=5)
    consumer.close()
    assert message.detach() == {"x": b"q" * 10_000}
    assert message.payload == {"x": b"q" * 10_000}
    message.release()
    again = place.consumer()
    assert drain(again) == [0]
    with pytest.raises(ClosedError):
        consumer.get(timeout=0)


@pytest.mark.parametrize(
    "timeout", [math.inf, 1e10, 1e300, 2**63, 10**400, np.float64(5.0), np.float32(5.0), np.int64(5)], ids=repr
)
def test_a_get_with_any_number_of_seconds_waits_for_what_comes(place: Place, timeout: float) -> None:
    producer, consumer = place.producer(), place.consumer()
    with pytest.raises(QueueEmptyError):
        consumer.get(timeout=0)
    producer.put("x", timeout=timeout)
    # The first wait of a consumer that has met nobody is a real one.
    with consumer.get(timeout=timeout) as message:
        assert message.payload == "x"
    producer.flush(timeout=timeout)


# -- an engine that was killed ----------------------------------------------------------------------------------------


def test_an_engine_removes_the_rings_that_killed_engines_left_to_queues_of_the_dead(place: Place) -> None:
    namespace = place.where["namespace"]
    environment = os.environ | {"FMQ_RUNTIME_DIR": str(place.where["runtime_dir"])}
    code = (
        "import os, signal; from fmq import Producer; "
        f"producer = Producer('r.reply.1', namespace={namespace!r}, ring_size=1048576); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    prefix = f"shmq:{namespace}:r.reply.1:"
    assert len(names(prefix)) == 1
    command = [sys.executable, "-m", "engine", "--queue", place.queue, "--namespace", namespace]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as engine:
        eventually(lambda: not names(prefix), "the orphaned ring is gone")
        engine.terminate()
        assert engine.wait(60) == 0
    assert not [name for name in os.listdir(DIRECTORY) if name.startswith(f"shmq:{namespace}:")]
    assert not Path(place.where["runtime_dir"], namespace).exists()
