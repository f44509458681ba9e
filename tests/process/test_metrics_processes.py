"""Metrics of many processes in prometheus' multiprocess mode: they add up, and survive the processes they come from."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from fmq import Consumer, Producer
from fmq.metrics import QueueMetrics, forget_dead_processes
from tests.queues import DEADLINE_S, SMALL_RING, Child, Place, drain, eventually, place_fixture

__all__ = ["place_fixture"]

Value = Callable[..., "float | None"]


@pytest.fixture(name="directory")
def directory_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the processes that are started from now on keep their values."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return str(tmp_path)


@pytest.fixture(name="value")
def value_fixture(directory: str, place: Place) -> Value:
    """What a scrape of all processes finds."""

    own = {"queue": place.queue, "namespace": place.namespace}

    def value(name: str, **labels: str) -> float | None:
        registry = CollectorRegistry()
        labels |= own if name.startswith("shmq_") else {"address": place.path.endpoint}
        MultiProcessCollector(registry, path=directory)  # type: ignore[no-untyped-call]
        try:
            return registry.get_sample_value(name, labels)
        except struct.error:
            # prometheus_client's: a worker has just made its file, and it is empty yet.
            return None

    return value


# -- what children do -------------------------------------------------------------------------------------------------


def serve(connection: Connection, place: Place) -> None:
    """An API worker: put as many messages as it is told, until it is told to end by an empty message."""
    producer = Producer(place.queue, ring_size=SMALL_RING, metrics=QueueMetrics(), **place.where)
    while count := connection.recv():
        for _ in range(count):
            producer.put({"a": np.zeros(1000, np.uint8)}, timeout=DEADLINE_S)
        connection.send("put")
    producer.close(timeout=0)


def consume(connection: Connection, place: Place) -> None:
    """An engine: take everything until it is told to end."""
    with Consumer(place.queue, metrics=QueueMetrics(), **place.where) as consumer:
        connection.send("ready")
        while not connection.poll():
            drain(consumer)


def put_and_end(go_on: Event, place: Place, count: int, ending: str) -> None:
    """Put, and end when it is told to: by returning, by closing first, or by ``os._exit`` after a flush."""
    metrics = QueueMetrics()
    producer = Producer(place.queue, ring_size=SMALL_RING, metrics=metrics, **place.where)
    assert go_on.wait(DEADLINE_S)
    for _ in range(count):
        producer.put(b"x" * 10)
    if ending == "close":
        producer.close(timeout=0)
    elif ending == "flush":
        metrics.flush()
        os._exit(0)


def lead(connection: Connection, place: Place, method: str) -> None:
    """A server that puts something itself before its workers are made, while they live, and when they have ended."""
    producer = Producer(place.queue, ring_size=SMALL_RING, metrics=QueueMetrics(), **place.where)
    producer.put_many([b"x" * 10] * 5)
    # Else it may have no workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    context = multiprocessing.get_context(method)
    go_on = context.Event()
    workers = [
        context.Process(target=put_and_end, args=(go_on, place, 10, ending)) for ending in ("return", "close", "flush")
    ]
    for worker in workers:
        worker.start()
    producer.put_many([b"x" * 10] * 5)
    go_on.set()
    for worker in workers:
        worker.join()
    producer.put_many([b"x" * 10] * 5)
    connection.send([worker.exitcode for worker in workers])
    connection.recv()
    producer.close(timeout=0)


# -- tests ------------------------------------------------------------------------------------------------------------


def test_counts_of_all_workers_add_up_and_those_of_one_that_was_killed_stay(
    place: Place, directory: str, value: Value
) -> None:
    workers = [Child(serve, place, method="spawn") for _ in range(3)]
    with Child(consume, place, method="spawn") as engine, workers[0], workers[1], workers[2]:
        assert engine.hear() == "ready"
        for count, worker in zip((10, 20, 30), workers, strict=True):
            worker.tell(count)
        for worker in workers:
            assert worker.hear() == "put"
        # Nobody is told to write: the workers' threads do.
        eventually(lambda: value("fastdeploy:zmq:msg_send_total") == 60, "all puts are counted")
        eventually(lambda: value("fastdeploy:zmq:msg_recv_total") == 60, "all messages taken are counted")
        nbytes = value("fastdeploy:zmq:msg_bytes_send_total")
        assert nbytes is not None
        assert 60 * 1000 < nbytes < 60 * 1100
        assert value("fastdeploy:zmq:msg_bytes_recv_total") == nbytes
        assert value("fastdeploy:zmq:latency_count") == value("fastdeploy:zmq:latency_bucket", le="+Inf") == 60
        eventually(lambda: value("shmq_ring_bytes") == 3 * SMALL_RING, "the rings of all are there")

        os.kill(workers[2].pid, signal.SIGKILL)
        workers[2].join()
        assert value("shmq_ring_bytes") == 3 * SMALL_RING
        forget_dead_processes(directory)
        assert value("shmq_ring_bytes") == 2 * SMALL_RING
        assert value("fastdeploy:zmq:msg_send_total") == 60

        workers[0].tell(5)
        assert workers[0].hear() == "put"
        eventually(lambda: value("fastdeploy:zmq:msg_send_total") == 65, "the others count on")
        # Closed, a producer has no ring; its counts, down to the last moment, stay.
        workers[0].tell(7)
        assert workers[0].hear() == "put"
        workers[0].tell(0)
        assert workers[0].join() == 0
        assert value("shmq_ring_bytes") == SMALL_RING
        assert value("fastdeploy:zmq:msg_send_total") == 72
        # The same by the name of the process, for servers that are told of a death.
        workers[1].kill()
        mark_process_dead(workers[1].pid, directory)  # type: ignore[no-untyped-call]
        assert not value("shmq_ring_bytes")
        assert value("fastdeploy:zmq:msg_send_total") == 72
        eventually(lambda: value("fastdeploy:zmq:msg_recv_total") == 72, "all messages taken are counted")
        engine.tell("end")
        assert engine.join() == 0
    assert value("fastdeploy:zmq:msg_recv_total") == value("fastdeploy:zmq:latency_count") == 72
    assert value("fastdeploy:zmq:msg_bytes_recv_total") == value("fastdeploy:zmq:msg_bytes_send_total")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_that_end_at_once_and_forked_ones_count_what_is_theirs_and_nothing_twice(
    place: Place, value: Value, method: str
) -> None:
    # So that the directory is not removed by one who ends while another begins.
    place.consumer()
    with Child(lead, place, method, method="spawn") as server:
        assert server.hear() == [0, 0, 0]
        eventually(
            lambda: value("fastdeploy:zmq:msg_send_total") == 45, "the server's own and the workers' are counted"
        )
        # Written a moment later.
        eventually(lambda: value("fastdeploy:zmq:msg_bytes_send_total") == 450, "and their bytes")
        server.tell("end")
        assert server.join() == 0
    assert value("fastdeploy:zmq:msg_send_total") == 45
    assert value("shmq_doorbells_saved_total") == 45
