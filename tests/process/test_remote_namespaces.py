"""Two hosts, as two network namespaces with a cable between them that is cut and put back while messages flow."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from fmq import CurveKeys, QueueEmptyError, QueueTimeoutError, RemoteConsumer, RemoteProducer
from tests.queues import DEADLINE_S, Child, eventually

CLONE_NEWNET = 0x40000000
HERE, THERE = "10.203.7.1", "10.203.7.2"
PORT = 5555
ENDPOINT = f"tcp://{THERE}:{PORT}"
NBYTES = 200_000
WINDOW = 16


class Cable:
    """Two namespaces with a veth pair between them; what is done to it, is done with ``ip``."""

    def __init__(self) -> None:
        number = os.getpid()
        self.here, self.there = f"shmq-{number}-a", f"shmq-{number}-b"
        self._names = (self.here, self.there)

    def plug(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
        _ip(*f"-n {self.here} link add eth0 type veth peer name eth0 netns {self.there}".split())
        for name, address in zip(self._names, (HERE, THERE), strict=True):
            _ip(*f"-n {name} addr add {address}/24 dev eth0".split())
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def cut(self) -> None:
        _ip("-n", self.there, "link", "set", "eth0", "down")

    def restore(self) -> None:
        _ip("-n", self.there, "link", "set", "eth0", "up")

    def slow_down(self, rate: str) -> None:
        """Let no more than this through, from here to there."""
        command = f"ip netns exec {self.here} tc qdisc add dev eth0 root tbf rate {rate} burst 64k latency 200ms"
        subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=DEADLINE_S)

    def remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=DEADLINE_S, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(name="cable")
def cable_fixture() -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made with ip, which is not there: install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces can be made by root only")
    cable = Cable()
    try:
        try:
            cable.plug()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
        yield cable
    finally:
        cable.remove()


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts, to another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
    os.close(descriptor)


def produce(connection: Connection, namespace: str, options: dict[str, Any]) -> None:
    """Put numbered messages until told to stop; answer questions meanwhile."""
    enter(namespace)
    producer = RemoteProducer(ENDPOINT, window_messages=WINDOW, **options)
    stop = threading.Event()

    def put() -> None:
        number = 0
        while not stop.is_set():
            try:
                producer.put({"n": number, "x": np.full(NBYTES // 8, number)}, timeout=0.1)
            except QueueTimeoutError:
                continue
            number += 1

    thread = threading.Thread(target=put)
    thread.start()
    while (order := connection.recv()) != "stop":
        answers = {
            "connected": producer.connected,
            "broken": producer._protocol.welcome is None,
            "window": producer.unacknowledged,
        }
        connection.send(answers[order])
    stop.set()
    thread.join()
    producer.flush(timeout=DEADLINE_S)
    producer.close()
    connection.send(producer._protocol.next_sequence)


def put_large(connection: Connection, namespace: str, nbytes: int) -> None:
    """Put one large array, and say when it is done, and how many connections that took."""
    enter(namespace)
    producer = RemoteProducer(ENDPOINT)
    connections = []
    connect = producer._protocol.connect

    def count() -> bytes:
        connections.append(1)
        return connect()

    producer._protocol.connect = count  # type: ignore[method-assign]
    eventually(lambda: producer.connected, "it is connected")
    producer.put({"n": 0, "x": np.zeros(nbytes // 8)})
    ups = [producer.connected for _ in iter(lambda: flushed(producer), True)]
    connection.send((len(connections), all(ups)))
    producer.close()


def flushed(producer: RemoteProducer) -> bool:
    try:
        producer.flush(timeout=0.1)
    except QueueTimeoutError:
        return False
    return True


def consume(connection: Connection, namespace: str, options: dict[str, Any]) -> None:
    """Get and check messages; say how many came when asked, and at the end, all of them with their deliveries."""
    enter(namespace)
    consumer = RemoteConsumer(ENDPOINT, **options)
    connection.send("ready")
    came: list[tuple[int, int]] = []
    asked = ""
    while asked != "stop":
        try:
            with consumer.get(timeout=0.05) as message:
                payload = message.payload
                assert payload["n"] == message.sequence
                assert (payload["x"] == message.sequence).all()
                came.append((message.sequence, message.deliveries))
        except QueueEmptyError:
            pass
        if connection.poll():
            asked = connection.recv()
            connection.send(len(came) if asked == "count" else came)
    consumer.close()


def ask(child: Child, question: str) -> Any:
    child.tell(question)
    return child.hear()


def wait_for_messages(consumer: Child, count: int) -> None:
    before = ask(consumer, "count")
    eventually(lambda: ask(consumer, "count") >= before + count, "messages flow")


@pytest.mark.parametrize("with_keys", [False, True], ids=["open", "curve"])
def test_a_link_that_is_cut_for_seconds_loses_nothing_and_doubles_nothing(cable: Cable, with_keys: bool) -> None:
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if with_keys:
        server = CurveKeys.generate()
        client = CurveKeys.generate(server.public)
        ours, theirs = {"keys": client}, {"keys": server, "clients": [client.public]}
    with Child(consume, cable.there, theirs) as consumer, Child(produce, cable.here, ours) as producer:
        assert consumer.hear() == "ready"
        for _ in range(2):
            wait_for_messages(consumer, 50)
            cable.cut()
            eventually(lambda: ask(producer, "broken"), "TCP gives the connection up")
            assert not ask(producer, "connected")
            stuck = ask(consumer, "count")
            eventually(lambda: ask(producer, "window") == WINDOW, "its window is full")
            assert ask(consumer, "count") == stuck, "nothing comes through"
            cable.restore()
            wait_for_messages(consumer, 50)
        count = ask(producer, "stop")
        assert ask(consumer, "stop") == [(number, 0) for number in range(count)]


def test_a_link_that_flickers_loses_nothing_and_doubles_nothing(cable: Cable) -> None:
    with Child(consume, cable.there, {}) as consumer, Child(produce, cable.here, {}) as producer:
        assert consumer.hear() == "ready"
        for _ in range(10):
            wait_for_messages(consumer, 1)
            cable.cut()
            # TCP holds the connection over a cut as short as this.
            cable.restore()
        count = ask(producer, "stop")
        assert ask(consumer, "stop") == [(number, 0) for number in range(count)]


def test_a_consumer_that_dies_behind_a_cut_link_is_replaced_when_it_is_restored(cable: Cable) -> None:
    with Child(produce, cable.here, {}) as producer:
        with Child(consume, cable.there, {}) as first:
            assert first.hear() == "ready"
            wait_for_messages(first, 50)
            cable.cut()
            eventually(lambda: not ask(producer, "connected"), "the producer notices")
            # The one that is told to stop has released all that it names.
            done = ask(first, "stop")
            first.kill()
        with Child(consume, cable.there, {}) as second:
            assert second.hear() == "ready"
            cable.restore()
            wait_for_messages(second, 50)
            count = ask(producer, "stop")
            again = ask(second, "stop")
    assert [number for number, _ in done] == list(range(len(done)))
    numbers = [number for number, _ in again]
    assert numbers == list(range(numbers[0], count)), "in order, without a gap"
    assert numbers[0] <= len(done), "nothing is lost"
    assert all(deliveries == 1 for number, deliveries in again if number < len(done)), "what came before is marked"


def test_a_large_array_on_a_slow_link_does_not_break_its_connection_off(cable: Cable) -> None:
    # 7 s on the way: longer than any sign of life may stay away.
    try:
        cable.slow_down("12mbit")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a slow link can't be made here: {error}")
    with (
        Child(consume, cable.there, {}) as consumer,
        Child(put_large, cable.here, 10_000_000) as producer,
    ):
        assert consumer.hear() == "ready"
        connections, always_up = producer.hear()
        assert ask(consumer, "stop") == [(0, 0)]
        assert connections <= 1, "the one that was there, and no other"
        assert always_up
