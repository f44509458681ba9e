"""Pickled messages between processes: classes found by import, deaths with such messages in hand."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import textwrap
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from fmq import CodecRefusedError, Consumer, DecodeError, Producer
from tests.queues import DEADLINE_S, Child, Place, drain, is_empty, lies_in, place_fixture

__all__ = ["place_fixture"]

BOTH = ("msgpack", "pickle")


@dataclasses.dataclass
class Task:
    """What an API worker sends to an engine."""

    name: str
    images: Any
    count: Any = None


def count_patches(task: Task) -> int:
    """A function that travels by its name."""
    return len(task.images)


def put_tasks(connection: Connection, place: Place, count: int) -> None:
    """Put tasks, of which every other one lies in a loan, and wait to be told to end."""
    producer = Producer(place.queue, ring_size=1 << 20, codec="pickle", **place.where)
    for index in range(count):
        images = producer.empty((100, 588)) if index % 2 else np.empty((100, 588), np.uint8)
        images[:] = index
        producer.put(Task(f"r{index}", images, count_patches), timeout=DEADLINE_S)
        del images
    connection.send((producer.ring, producer.copied_bytes))
    connection.recv()


def die_with_a_task(connection: Connection, place: Place) -> None:
    """Take a message and hold it until killed."""
    consumer = Consumer(place.queue, accept=BOTH, **place.where)
    message = consumer.get(timeout=DEADLINE_S)
    connection.send(message.payload.name)
    connection.recv()
    message.release()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_objects_put_by_another_process_arrive_and_its_arrays_are_views_of_its_ring(place: Place, method: str) -> None:
    with Child(put_tasks, place, 6, method=method) as child:
        ring, copied = child.hear()
        assert copied == 3 * 58_800
        consumer = place.consumer(accept=BOTH)
        for index in range(6):
            with consumer.get(timeout=DEADLINE_S) as message:
                task = message.payload
                assert type(task) is Task
                assert task.name == f"r{index}"
                assert task.count is count_patches
                assert task.count(task) == 100
                assert (task.images == index).all()
                assert lies_in(task.images, ring)
                del task
            del message
        child.tell("end")
        assert child.join() == 0


def test_messages_of_a_producer_that_was_killed_are_unpickled_all_the_same(place: Place) -> None:
    with Child(put_tasks, place, 3) as child:
        child.hear()
        child.kill()
    consumer = place.consumer(accept=BOTH)
    for index in range(3):
        task = consumer.get(timeout=DEADLINE_S).detach()
        assert (task.images == index).all()


def test_a_pickled_message_with_which_consumers_died_is_set_aside_and_can_be_read(place: Place) -> None:
    producer = place.producer(ring_size=1 << 20, codec="pickle")
    producer.put(Task("deadly", np.full((100, 588), 7, np.uint8)))
    for _ in range(3):
        with Child(die_with_a_task, place) as child:
            assert child.hear() == "deadly"
            child.kill()
    producer.put(Task("next", None))
    consumer = place.consumer(accept=BOTH)
    with consumer.get(timeout=DEADLINE_S) as message:
        assert message.payload.name == "next"
    del message
    (aside,) = consumer.set_aside()
    task = aside.read()
    assert task.name == "deadly"
    assert (task.images == 7).all()
    aside.discard()
    consumer.close()
    refusing = place.consumer()
    producer.put(Task("refused", np.arange(3)))
    with pytest.raises(CodecRefusedError):
        refusing.get(timeout=DEADLINE_S)
    gc.collect()
    assert drain(refusing) == []
    assert is_empty(producer)


def test_an_object_of_a_class_that_is_not_known_here_is_a_decode_error_and_the_next_message_comes(place: Place) -> None:
    program = f"""
        import numpy as np
        import fmq
        class Unknown:
            def __init__(self):
                self.images = np.zeros(3000)
        with fmq.Producer({place.queue!r}, codec="pickle", ring_size=1 << 20, **{place.where!r}) as producer:
            producer.put(Unknown())
            producer.put({{1, 2}})
            producer.close(timeout=0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
    consumer = place.consumer(accept=BOTH)
    with pytest.raises(DecodeError, match="Unknown"):
        consumer.get(timeout=DEADLINE_S)
    with consumer.get(timeout=DEADLINE_S) as message:
        assert message.payload == {1, 2}
    del message
