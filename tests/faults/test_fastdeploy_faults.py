"""The faults of FastDeploy's own queue and of the changes that use it: each of them, shown to be absent here.

The numbers are those of docs/fastdeploy.md, "Faults that are not here".
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from examples.fastdeploy.engine_client import EngineClient
from examples.fastdeploy.engine_service import EngineService
from examples.fastdeploy.upstream import EngineError
from fmq import (
    FMQ,
    AsyncProducer,
    ClosedError,
    CodecRefusedError,
    Config,
    ConfigError,
    DecodeError,
    Descriptor,
    Endpoint,
    EndpointManager,
    FMQFactory,
    PeerUnavailableError,
    Queue,
    QueueFullError,
    QueueInUseError,
    SegmentError,
    SocketOptions,
)
from fmq.config import parse
from fmq.fastdeploy import Message, sync
from fmq.outgoing import Outgoing
from shmq.segment import DIRECTORY, names
from tests.faces import RING, Settings, segments, settings_fixture
from tests.queues import DEADLINE_S, Child, Place, eventually, lies_in, place_fixture, soon

__all__ = ["place_fixture", "settings_fixture"]

PATIENCE = DEADLINE_S * 1000
ROOT = Path(__file__).parents[2]


def got(message: Message | None) -> Message:
    """The message, which has to be there."""
    assert message is not None
    return message


async def fill(producer: Queue, data: Any) -> None:
    """Put until it raises."""
    while True:
        await producer.put(data)


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        cwd=ROOT,
    )


# -- 1, 2: settings ---------------------------------------------------------------------------------------------------


def test_01_settings_of_the_environment_take_effect_and_nested_ones_are_not_left_as_dicts(
    settings: Settings, place: Place
) -> None:
    settings(endpoints={"q_a2e": {"protocol": "ipc", "address": f"{place.runtime}/renamed", "ring_size": 1 << 17}})
    producer = sync.FMQFactory.q_a2e_producer()
    assert type(producer.endpoint) is Endpoint
    assert type(EndpointManager.current().socket_config) is SocketOptions
    core = producer.open()._producer.open()
    assert (core.queue, core.namespace, core._writer.size) == ("renamed", place.namespace, 1 << 17)


def test_01_settings_that_are_wrong_are_an_error_and_not_the_defaults(settings: Settings) -> None:
    settings(endpoints={"q_a2e": {"protocol": "ipx", "address": "x"}})
    with pytest.raises(ConfigError, match=r"\$\.endpoints\.q_a2e\.protocol is 'ipx'"):
        FMQFactory.q_a2e_producer()


def test_02_no_default_is_shared_and_everything_imports_on_this_python() -> None:
    assert Config().endpoints is not Config().endpoints
    assert parse("{}").socket_config == SocketOptions()
    result = run_script("from fmq.fastdeploy import *; from fmq.fastdeploy import sync; Config(), SocketOptions()")
    assert result.returncode == 0, result.stderr


# -- 3, 4, 5: the payload ---------------------------------------------------------------------------------------------


def test_03_arrays_within_a_request_go_through_shared_memory_as_bytes_do(settings: Settings) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put({"request_id": "r", "multimodal_inputs": {"images": [np.zeros((100, 588), np.uint8)]}})
        message = got(await consumer.get())
        assert lies_in(message.payload["multimodal_inputs"]["images"][0], producer._producer.open().ring)
        assert message.descriptor is not None
        await producer.put(bytes(100_000))
        assert got(await consumer.get()).descriptor is not None

    asyncio.run(main())


def test_04_no_segment_is_made_for_a_message(settings: Settings, place: Place) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.open()
        made = segments(place)
        assert len(made) == 1
        for _ in range(20):
            await producer.put({"images": np.zeros(200_000, np.uint8)})
            assert segments(place) == made
            got(await consumer.get()).release()

    asyncio.run(main())


def test_05_the_event_loop_goes_on_while_a_large_request_is_put(settings: Settings, monkeypatch: Any) -> None:
    settings(ring_size=1 << 23)
    copying, go_on = threading.Event(), threading.Event()
    copy = Outgoing.copy

    def slow_copy(self: Outgoing) -> None:
        copying.set()
        assert go_on.wait(DEADLINE_S)
        copy(self)

    async def main() -> None:
        producer = await FMQFactory.q_a2e_producer().open()
        monkeypatch.setattr(Outgoing, "copy", slow_copy)
        putting = asyncio.create_task(producer.put({"images": np.zeros(1 << 21, np.uint8)}))
        await soon(copying.is_set, "the copy began")
        # Here the loop runs, in the middle of the copy.
        assert not putting.done()
        go_on.set()
        await putting

    asyncio.run(main())


# -- 6, 7: deaths -----------------------------------------------------------------------------------------------------


def put_and_tell(connection: Connection, ending: str) -> None:
    """Put two messages, and end as told."""
    producer = sync.FMQFactory.q_a2e_producer()
    producer.put(b"x" * 100_000)
    producer.put({"image": np.full(100_000, 7, np.uint8)})
    connection.send("put")
    if ending == "killed":
        connection.recv()


@pytest.mark.parametrize("ending", ["exits", "killed"])
def test_06_what_a_producer_put_before_it_ended_arrives_whole(settings: Settings, ending: str) -> None:
    with Child(put_and_tell, ending) as child:
        assert child.hear() == "put"
        if ending == "killed":
            child.kill()
        else:
            assert child.join() == 0
    consumer = sync.FMQFactory.q_a2e_consumer()
    assert consumer.get() == b"x" * 100_000
    assert (consumer.get()["image"] == 7).all()


def test_06_what_a_dead_consumer_left_does_not_stay(settings: Settings, place: Place) -> None:
    with Child(put_and_tell, "killed") as child:
        child.hear()
        child.kill()
    consumer = sync.FMQFactory.q_a2e_consumer()
    for _ in range(2):
        consumer.get()
    consumer.close()
    assert segments(place) == []


def test_06_a_descriptor_whose_bytes_are_gone_is_an_error_and_not_empty_bytes() -> None:
    descriptor = Descriptor.create(b"bytes")
    os.unlink(f"{DIRECTORY}/{descriptor.shm_name}")
    with pytest.raises(SegmentError, match="there is no segment"):
        descriptor.read_and_unlink()


def test_07_no_resource_tracker_is_started_and_nothing_is_said_at_exit(settings: Settings) -> None:
    result = run_script(
        """
        import asyncio, sys
        from multiprocessing import resource_tracker
        from fmq.fastdeploy import Descriptor, FMQFactory

        async def main():
            producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
            for _ in range(10):
                await producer.put(bytes(100_000))
                (await consumer.get()).release()
            Descriptor.create(b"bytes").read_and_unlink()
            await FMQFactory.destroy()

        asyncio.run(main())
        assert resource_tracker._resource_tracker._pid is None
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# -- 8: names ---------------------------------------------------------------------------------------------------------


def test_08_a_second_consumer_of_a_name_is_refused_and_the_first_goes_on(settings: Settings) -> None:
    first, second = sync.FMQFactory.q_a2e_consumer().open(), sync.FMQFactory.q_a2e_consumer()
    with pytest.raises(QueueInUseError, match=f"process {os.getpid()}"):
        second.get()
    producer = sync.FMQFactory.q_a2e_producer()
    producer.put("for the first")
    assert first.get() == "for the first"


# -- 9, 10, 11: backpressure and ends ---------------------------------------------------------------------------------


def test_09_without_a_consumer_put_returns_and_a_full_ring_is_an_error_in_time(settings: Settings) -> None:
    settings(put_timeout=0.05)

    async def main() -> None:
        producer = FMQFactory.q_a2e_producer()
        assert await producer.put("kept for whoever comes") == 0
        with pytest.raises(PeerUnavailableError, match="no consumer is alive"):
            await asyncio.wait_for(fill(producer, bytes(100_000)), DEADLINE_S)

    asyncio.run(main())


def test_09_one_put_that_waits_does_not_keep_the_others_from_failing_in_time(settings: Settings) -> None:
    settings(put_timeout=0.1)

    async def main() -> None:
        producer = FMQFactory.q_a2e_producer()
        with pytest.raises(PeerUnavailableError):
            await fill(producer, bytes(100_000))
        begun = time.monotonic()
        results = await asyncio.gather(*(producer.put(bytes(100_000)) for _ in range(50)), return_exceptions=True)
        assert all(isinstance(result, PeerUnavailableError) for result in results)
        # One after another, each behind a lock, they would take 5 s.
        assert time.monotonic() - begun < 2.5

    asyncio.run(main())


def test_10_memory_is_bounded_by_the_ring_and_its_limit(settings: Settings, place: Place) -> None:
    settings(put_timeout=0.01, spill_limit=0)

    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await consumer.open()
        with pytest.raises(QueueFullError):
            await fill(producer, bytes(100_000))

    asyncio.run(main())
    assert len(segments(place)) == 1
    assert os.path.getsize(f"{DIRECTORY}/{segments(place)[0]}") < RING + (1 << 16)


def test_11_destroy_ends_in_time_with_messages_pending_and_closes_all_and_leaves_no_socket(
    settings: Settings, place: Place
) -> None:
    settings(close_timeout=0.05)

    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        other = FMQFactory.q_e2a_producer()
        await consumer.open()
        await producer.put("pending")
        await other.put("pending, without a consumer")
        await asyncio.wait_for(FMQFactory.destroy(), DEADLINE_S)
        assert producer.closed
        assert consumer.closed
        assert other.closed

    asyncio.run(main())
    assert place.files() == []
    consumer = sync.FMQFactory.q_a2e_consumer()
    assert consumer.get() == "pending"
    consumer.close()


# -- 12, 13, 14: the two hooks ----------------------------------------------------------------------------------------


def test_12_an_error_of_put_is_raised_and_becomes_the_client_s_answer(settings: Settings) -> None:
    with pytest.raises(EngineError, match="can't be sent"):
        asyncio.run(EngineClient().add_requests({"request_id": "r", "lock": threading.Lock()}))


def test_13_an_abort_is_awaited_and_arrives(settings: Settings) -> None:
    async def main() -> None:
        await EngineClient().abort("r", n=2)
        consumer = FMQFactory.q_a2e_consumer()
        for index in range(2):
            assert got(await consumer.get(timeout=0)).payload["request_id"] == f"r_{index}"

    asyncio.run(main())


def test_14_after_an_error_the_engine_goes_on_with_a_new_consumer_and_no_hot_loop(
    settings: Settings, monkeypatch: Any
) -> None:
    service = EngineService(lambda *_: None)
    service.start_zmq_service()
    first = eventually(lambda: service.fmq_a2e_consumer, "the loop began")
    calls: list[float] = []

    async def fail(self: Queue, timeout: float | None = None) -> None:
        calls.append(time.monotonic())
        raise ClosedError("it fails each time")

    with monkeypatch.context() as patch:
        patch.setattr(Queue, "get", fail)
        eventually(lambda: len(calls) >= 4, "it tried again")
    pauses = np.diff(calls)
    assert pauses.min() > 0.04
    assert pauses[-1] > pauses[0]
    first.socket.close()
    asyncio.run(EngineClient().add_requests({"request_id": "r", "prompt_token_ids": [1]}))
    eventually(lambda: service.scheduler.waiting, "it receives again")
    service._exit_sub_services()


# -- 16: get ----------------------------------------------------------------------------------------------------------


def test_15_both_sides_are_counted_with_the_bytes_in_shared_memory(settings: Settings) -> None:
    settings(metrics=True)

    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put({"images": np.zeros(300_000, np.uint8)})
        got(await consumer.get(timeout=5000)).release()

    asyncio.run(main())
    address = {"address": next(iter(exported("fastdeploy:zmq:msg_recv_total")))}
    for name in ("send", "recv"):
        assert REGISTRY.get_sample_value(f"fastdeploy:zmq:msg_{name}_total", address) == 1
        assert 300_000 < (REGISTRY.get_sample_value(f"fastdeploy:zmq:msg_bytes_{name}_total", address) or 0) < 301_000
    assert REGISTRY.get_sample_value("fastdeploy:zmq:latency_count", address) == 1


def exported(name: str) -> set[str]:
    """The addresses of a metric's samples that are not 0."""
    samples = [sample for family in REGISTRY.collect() for sample in family.samples if sample.name == name]
    return {sample.labels["address"] for sample in samples if sample.value}


def test_16_a_timeout_of_zero_does_not_wait(settings: Settings) -> None:
    async def main() -> None:
        consumer = await FMQFactory.q_a2e_consumer().open()
        assert await asyncio.wait_for(consumer.get(timeout=0), DEADLINE_S) is None

    asyncio.run(main())


def test_16_no_message_and_an_error_are_told_apart(settings: Settings, place: Place) -> None:
    async def main() -> None:
        consumer = FMQFactory.q_a2e_consumer()
        assert await consumer.get(timeout=1) is None
        broken = AsyncProducer("q_a2e", codec="pickle", ring_size=RING, **place.where)
        await broken.put(Broken())
        with pytest.raises(DecodeError):
            await consumer.get(timeout=PATIENCE)
        await broken.close()
        await consumer.close()
        with pytest.raises(ClosedError):
            await consumer.get(timeout=1)

    asyncio.run(main())


class Broken:
    """What can be pickled and not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.path.join, ()


def test_16_ids_are_without_a_gap_and_times_are_those_of_the_put(settings: Settings) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        before = time.time()
        for _ in range(20):
            await producer.put("x")
        after = time.time()
        messages = [got(await consumer.get()) for _ in range(20)]
        assert [message.msg_id for message in messages] == list(range(20))
        assert all(before <= message.timestamp <= after for message in messages)

    asyncio.run(main())


# -- 17: threads and forks --------------------------------------------------------------------------------------------


def test_17_a_consumer_is_closed_by_another_thread_while_its_own_waits(settings: Settings) -> None:
    consumer = FMQFactory.q_a2e_consumer()
    ended: list[str] = []

    def receive() -> None:
        try:
            asyncio.run(consumer.get())
        except ClosedError as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=receive)
    thread.start()
    socket = eventually(lambda: consumer.socket, "it was opened")
    socket.close()
    thread.join(DEADLINE_S)
    assert ended == ["ClosedError"]


def fmq_of_child(connection: Connection) -> None:
    """Tell whether this process has an FMQ, and use its own."""
    connection.send(FMQ._instance is None)
    asyncio.run(FMQFactory.q_e2a_producer().put(os.getpid()))
    asyncio.run(FMQFactory.destroy())


def test_17_nothing_is_made_at_import_and_a_forked_child_has_an_fmq_of_its_own(settings: Settings) -> None:
    result = run_script("import fmq.fastdeploy, zmq; assert fmq.FMQ._instance is zmq.Context._instance is None")
    assert result.returncode == 0, result.stderr
    consumer = FMQFactory.q_e2a_consumer()
    with Child(fmq_of_child) as child:
        assert child.hear() is True
        assert got(asyncio.run(consumer.get(timeout=PATIENCE))).payload == child.pid
        gc.collect()
        assert child.join() == 0


# -- 18: pickle -------------------------------------------------------------------------------------------------------


def test_18_nobody_but_this_user_gets_at_a_queue(settings: Settings, place: Place) -> None:
    producer, consumer = sync.FMQFactory.q_a2e_producer().open(), sync.FMQFactory.q_a2e_consumer().open()
    assert producer.socket is not None
    assert consumer.socket is not None
    for directory in (place.runtime, os.path.dirname(place.path.socket)):
        assert os.stat(directory).st_mode & 0o077 == 0
    for name in names(f"shmq:{place.namespace}:"):
        assert os.stat(f"{DIRECTORY}/{name}").st_mode & 0o077 == 0


def test_18_where_pickle_is_turned_off_a_pickle_is_refused_and_not_run(
    settings: Settings, place: Place, tmp_path: Path
) -> None:
    settings(codec="msgpack")
    ran = tmp_path / "ran"

    async def main() -> None:
        hostile = AsyncProducer("q_a2e", codec="pickle", ring_size=RING, **place.where)
        await hostile.put(Hostile(str(ran)))
        consumer = FMQFactory.q_a2e_consumer()
        with pytest.raises(CodecRefusedError):
            await consumer.get(timeout=PATIENCE)
        await hostile.close()

    asyncio.run(main())
    assert not ran.exists()


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


# -- 19: one bad message ----------------------------------------------------------------------------------------------


def test_19_a_message_that_fails_takes_none_of_the_later_ones_along(settings: Settings, place: Place) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_e2a_producer(), FMQFactory.q_e2a_consumer()
        for index in range(10):
            await producer.put(Broken() if index % 3 == 0 else index)
        found: list[Any] = []
        for _ in range(10):
            try:
                found.append(got(await consumer.get(timeout=PATIENCE)).payload)
            except DecodeError:
                found.append("failed")
        assert found == ["failed" if index % 3 == 0 else index for index in range(10)]

    asyncio.run(main())
