"""FastDeploy's names between processes: deaths, restarts, and services that must not meet."""

from __future__ import annotations

import asyncio
import json
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from fmq import EndpointManager, FMQFactory, QueueInUseError
from fmq.fastdeploy import sync
from tests.faces import Settings, segments, settings_fixture
from tests.queues import DEADLINE_S, Child, Place, place_fixture

__all__ = ["place_fixture", "settings_fixture"]

PATIENCE = DEADLINE_S * 1000


class Task:
    """A request as an object."""

    def __init__(self, name: str, images: Any) -> None:
        self.name = name
        self.images = images


def put_tasks(connection: Connection, count: int) -> None:
    """An API worker: sends tasks, says so, and waits to be killed or told to end."""

    async def main() -> None:
        producer = FMQFactory.q_a2e_producer()
        for index in range(count):
            await producer.put(Task(f"{os.getpid()}-{index}", np.full(20_000, index, np.uint8)))
        connection.send(os.getpid())
        await asyncio.to_thread(connection.recv)
        await FMQFactory.destroy()

    asyncio.run(main())


def put_one_after_another(connection: Connection) -> None:
    """An API worker that sends what it is told."""

    async def main() -> None:
        producer = FMQFactory.q_a2e_producer()
        while (what := await asyncio.to_thread(connection.recv)) is not None:
            connection.send(await producer.put(what))
        await FMQFactory.destroy()

    asyncio.run(main())


def hold_a_message(connection: Connection) -> None:
    """An engine: takes a message, says which, and holds it until it is killed."""

    async def main() -> None:
        message = await FMQFactory.q_a2e_consumer().get(timeout=PATIENCE)
        assert message is not None
        connection.send(message.payload)
        await asyncio.to_thread(connection.recv)

    asyncio.run(main())


def serve(connection: Connection, settings: dict[str, Any]) -> None:
    """An engine of a service: tells what it gets, or that it is refused, and ends when told None."""
    os.environ["FMQ_CONFIG_JSON"] = json.dumps(settings)
    EndpointManager.config = None

    async def main() -> None:
        consumer = FMQFactory.q_a2e_consumer()
        try:
            await consumer.open()
        except QueueInUseError as error:
            connection.send((error.pid, str(error)))
            return
        connection.send(os.getpid())
        while await asyncio.to_thread(connection.recv) is not None:
            message = await consumer.get(timeout=PATIENCE)
            connection.send(None if message is None else message.payload)
            del message
        await FMQFactory.destroy()

    asyncio.run(main())


def get_names(consumer: Any, count: int) -> list[str]:
    """Take so many tasks in, and check them."""
    names = []
    for _ in range(count):
        message = asyncio.run(consumer.get(timeout=PATIENCE))
        assert message is not None
        with message:
            task = message.payload
            assert type(task) is Task
            assert (task.images == int(task.name.partition("-")[2])).all()
            names.append(task.name)
            del task
    return names


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_several_workers_send_to_one_engine_each_in_order(settings: Settings, method: str) -> None:
    settings(close_timeout=DEADLINE_S)
    consumer = FMQFactory.q_a2e_consumer()
    children = [Child(put_tasks, 5, method=method) for _ in range(3)]
    try:
        names = get_names(consumer, 15)
        for child in children:
            pid = child.hear()
            assert [name for name in names if name.startswith(f"{pid}-")] == [f"{pid}-{index}" for index in range(5)]
            child.tell("end")
            assert child.join() == 0
    finally:
        for child in children:
            with child:
                pass


def test_what_a_worker_sent_before_it_was_killed_arrives_whole(settings: Settings, place: Place) -> None:
    with Child(put_tasks, 5) as child:
        pid = child.hear()
        child.kill()
    consumer = FMQFactory.q_a2e_consumer()
    assert get_names(consumer, 5) == [f"{pid}-{index}" for index in range(5)]
    assert asyncio.run(consumer.get(timeout=0)) is None
    asyncio.run(consumer.close())
    assert segments(place) == []
    assert place.files() == []


def test_what_an_engine_held_when_it_was_killed_comes_again_and_nothing_is_missing(settings: Settings) -> None:
    with Child(put_one_after_another) as worker:
        for index in range(3):
            worker.tell(index)
            assert worker.hear() == index
        with Child(hold_a_message) as engine:
            assert engine.hear() == 0
            engine.kill()
        worker.tell(3)
        assert worker.hear() == 3
        consumer = FMQFactory.q_a2e_consumer()
        found = []
        for _ in range(4):
            message = asyncio.run(consumer.get(timeout=PATIENCE))
            assert message is not None
            found.append((message.payload, message.msg_id, message.redelivered))
            message.release()
        assert found == [(0, 0, True), (1, 1, False), (2, 2, False), (3, 3, False)]
        worker.tell(None)
        assert worker.join() == 0


def test_two_services_with_the_default_names_do_not_meet_in_two_namespaces(settings: Settings) -> None:
    east = settings(namespace=f"{settings()['namespace']}-east")
    west = settings(namespace=f"{settings()['namespace']}-west")
    with Child(serve, east) as first, Child(serve, west) as second:
        assert first.hear() == first.pid
        assert second.hear() == second.pid
        # This process is of the west.
        producer = sync.FMQFactory.q_a2e_producer()
        producer.put("for the west")
        second.tell("get")
        assert second.hear() == "for the west"
        producer.close()
        settings(namespace=east["namespace"])
        producer = sync.FMQFactory.q_a2e_producer()
        producer.put("for the east")
        first.tell("get")
        assert first.hear() == "for the east"
        producer.close()
        for child in (first, second):
            child.tell(None)
            assert child.join() == 0


def test_the_namespace_is_that_of_the_environment_unless_it_is_set(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settings()
    name = found.pop("namespace")
    monkeypatch.setenv("FMQ_CONFIG_JSON", json.dumps(found))
    for namespace in (f"{name}-east", f"{name}-west"):
        monkeypatch.setenv("FMQ_NAMESPACE", namespace)
        producer, consumer = sync.FMQFactory.q_a2e_producer(), sync.FMQFactory.q_a2e_consumer()
        assert consumer.get(timeout=0) is None
        producer.put(namespace)
        assert consumer.open()._consumer.open().namespace == namespace
        assert consumer.get() == namespace
        producer.close()
        consumer.close()


def test_a_second_engine_with_the_same_queue_is_refused_with_the_pid_and_takes_nothing(settings: Settings) -> None:
    found = settings()
    with Child(serve, found) as first:
        assert first.hear() == first.pid
        with Child(serve, found) as second:
            pid, said = second.hear()
            assert pid == first.pid
            assert f"process {first.pid}" in said
            assert "FMQ_NAMESPACE" in said
            assert second.join() == 0
        producer = sync.FMQFactory.q_a2e_producer()
        producer.put("still the first")
        first.tell("get")
        assert first.hear() == "still the first"
        producer.close()
        first.tell(None)
        assert first.join() == 0


def test_an_engine_that_was_killed_is_replaced_at_once(settings: Settings) -> None:
    found = settings()
    with Child(serve, found) as first:
        assert first.hear() == first.pid
        first.kill()
    with Child(serve, found) as second:
        assert second.hear() == second.pid
        producer = sync.FMQFactory.q_a2e_producer()
        producer.put("for the second")
        second.tell("get")
        assert second.hear() == "for the second"
        producer.close()
        second.tell(None)
        assert second.join() == 0
