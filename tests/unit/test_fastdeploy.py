"""FastDeploy's names: what they give, refuse, and leave behind, within one process."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmq
from fmq import (
    FMQ,
    ClosedError,
    CodecRefusedError,
    Config,
    ConfigError,
    CurveKeys,
    DecodeError,
    Descriptor,
    EncodeError,
    EndpointManager,
    EndpointType,
    FMQFactory,
    OwnerThreadError,
    PeerUnavailableError,
    Queue,
    QueueFullError,
    QueueInUseError,
    Role,
    RoleError,
    SegmentError,
    ViewsHeldError,
)
from fmq.fastdeploy import Context, Message, sync
from shmq import SegmentMissingError
from shmq.segment import DIRECTORY
from tests.faces import RING, Settings, segments, settings_fixture
from tests.queues import DEADLINE_S, Child, Place, Run, eventually, lies_in, place_fixture, runner_fixture

__all__ = ["place_fixture", "runner_fixture", "settings_fixture"]

LINKS = ("q_a2e", "q_e2w", "q_w2e", "q_e2a")
PATIENCE = DEADLINE_S * 1000


class Request:
    """What an API server sends: any class that can be found by import."""

    def __init__(self, name: str, images: Any = None) -> None:
        self.name = name
        self.images = images


# -- names ------------------------------------------------------------------------------------------------------------


def test_the_names_are_those_of_fastdeploy() -> None:
    assert [(role.name, role.value) for role in Role] == [("PRODUCER", "producer"), ("CONSUMER", "consumer")]
    assert [(kind.name, kind.value) for kind in EndpointType] == [("QUEUE", "queue"), ("TOPIC", "topic")]
    for name in ("FMQ", "FMQFactory", "Queue", "Descriptor", "Role", "EndpointType", "Endpoint", "Config"):
        assert getattr(fmq, name) is getattr(fmq.fastdeploy, name)
    assert fmq.SocketOptions is fmq.fastdeploy.SocketOptions
    assert fmq.EndpointManager is fmq.fastdeploy.EndpointManager


@pytest.mark.parametrize("factory", [FMQFactory, sync.FMQFactory])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("role", Role)
def test_the_factory_makes_both_sides_of_each_queue(settings: Settings, factory: Any, link: str, role: Role) -> None:
    queue = getattr(factory, f"{link}_{role.value}")()
    assert (queue.name, queue.role, queue.socket) == (link, role, None)
    assert type(queue) is (Queue if factory is FMQFactory else sync.Queue)


@pytest.mark.parametrize("factory", [FMQFactory, sync.FMQFactory])
def test_a_worker_may_have_a_queue_of_its_own_name(settings: Settings, factory: Any) -> None:
    assert factory.q_w2e_producer("rank0").name == "q_w2e_rank0"
    assert factory.q_w2e_consumer(name="rank0").name == "q_w2e_rank0"


def test_there_is_one_fmq_in_a_process_and_its_queues_share_a_context(settings: Settings) -> None:
    assert FMQ() is FMQ()
    assert FMQFactory.q_a2e_producer().context is FMQFactory.q_e2a_consumer().context is FMQ().context
    assert FMQFactory.q_a2e_producer() is not FMQFactory.q_a2e_producer()


def test_in_the_synchronous_form_every_fmq_is_of_its_own(settings: Settings) -> None:
    assert sync.FMQ() is not sync.FMQ()
    assert sync.FMQFactory.q_a2e_producer().context is not sync.FMQFactory.q_a2e_producer().context


def test_after_destroy_the_next_fmq_reads_the_settings_anew(settings: Settings, runner: Run) -> None:
    first = FMQ()
    settings(put_timeout=1.25)
    assert FMQ().context.config.put_timeout == 30
    runner(first.destroy())
    assert FMQ() is not first
    assert FMQ().context.config.put_timeout == 1.25


def test_settings_that_are_wrong_are_an_error_each_time_until_they_are_right(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(ring_sise=1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"\$\.ring_sise"):
            FMQFactory.q_a2e_producer()
    settings()
    FMQFactory.q_a2e_producer()


def test_an_fmq_takes_its_settings_from_a_file_and_a_second_file_is_refused(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"put_timeout": 4}')
    made = FMQ(tmp_path / "one.json")
    assert made.context.config.put_timeout == 4
    assert FMQ() is made is FMQ(tmp_path / "one.json")
    with pytest.raises(ConfigError, match=r"has its settings from .*one\.json, not from .*two\.json"):
        FMQ(tmp_path / "two.json")


def test_a_queue_can_be_made_by_itself_with_any_context(settings: Settings) -> None:
    assert Queue(None, "q").config == EndpointManager.current()
    assert Queue(object(), "q", Role.CONSUMER).role is Role.CONSUMER
    assert Queue(Context(Config(put_timeout=5.0)), "q", "consumer").endpoint.put_timeout == 5
    with pytest.raises(ValueError, match="listener"):
        Queue(None, "q", "listener")


# -- put and get ------------------------------------------------------------------------------------------------------


def test_what_is_put_is_what_is_got(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        images = np.arange(30_000, dtype=np.uint16).reshape(100, 300)
        before = time.time()
        for expected, data in enumerate([{"a": 1}, Request("r1", images), b"x" * 100_000, None, {1, 2}]):
            assert await producer.put(data) == expected
            message = await consumer.get(timeout=PATIENCE)
            assert message is not None
            assert message.msg_id == expected
            assert before <= message.timestamp <= time.time()
            assert not message.redelivered
            if isinstance(data, Request):
                assert type(message.payload) is Request
                assert (message.payload.images == images).all()
            else:
                assert message.payload == data

    runner(main())


def test_the_descriptor_says_what_lies_in_shared_memory_beside_the_record(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put({"image": np.zeros(10_000, np.uint8), "ids": np.zeros(100)})
        await producer.put("small")
        large, small = await consumer.get(), await consumer.get()
        assert large is not None
        assert small is not None
        assert large.descriptor == Descriptor(producer._producer.open().ring, 10_800)
        with pytest.raises(SegmentError, match="is the ring of a queue"):
            large.descriptor.read_and_unlink()
        assert (large.payload["image"] == 0).all()
        assert small.descriptor is None

    runner(main())


@pytest.mark.parametrize("copied", [False, True])
def test_copy_decides_whether_a_payload_lies_in_the_ring(settings: Settings, runner: Run, copied: bool) -> None:
    settings(copy=copied)

    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put({"image": np.arange(10_000)})
        message = await consumer.get()
        assert message is not None
        image = message.payload["image"]
        assert lies_in(image, producer._producer.open().ring) is not copied
        assert image.flags.writeable is copied
        assert message.descriptor is not None
        assert message.descriptor.size == 80_000

    runner(main())


def test_arrays_stay_valid_however_long_they_are_kept_and_however_much_follows(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put(np.full(100_000, 7, np.uint8))
        message = await consumer.get()
        assert message is not None
        kept = message.payload
        del message
        for value in range(50):
            await producer.put(np.full(100_000, value, np.uint8))
            passing = await consumer.get()
            assert passing is not None
            assert (passing.payload == value).all()
        assert (kept == 7).all()
        del kept, passing

    runner(main())


def test_a_message_can_be_released_detached_and_left(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        for value in range(3):
            await producer.put(np.full(5000, value, np.uint8))
        first, second, third = [await consumer.get() for _ in range(3)]
        assert first is not None
        assert second is not None
        assert third is not None
        first.release()
        first.release()
        with pytest.raises(ClosedError):
            _ = first.payload
        with second:
            private = second.detach()
            assert private is second.payload
            private += 1
        assert (second.payload == 2).all()
        with third as entered:
            assert entered is third
        with pytest.raises(ClosedError):
            _ = third.payload
        assert producer._producer.open()._writer.unfinished() == 0

    runner(main())


@pytest.mark.parametrize("timeout", [0, 0.0, 1, 20.5])
def test_none_means_that_no_message_came_in_time(settings: Settings, runner: Run, timeout: float) -> None:
    async def main() -> None:
        consumer = FMQFactory.q_a2e_consumer()
        await consumer.open()
        assert await asyncio.wait_for(consumer.get(timeout=timeout), DEADLINE_S) is None

    runner(main())


def test_without_a_timeout_get_waits_for_what_comes(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await consumer.open()
        waiting = asyncio.create_task(consumer.get())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await producer.put("at last")
        message = await asyncio.wait_for(waiting, DEADLINE_S)
        assert message is not None
        assert message.payload == "at last"

    runner(main())


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_a_timeout_that_is_none_is_refused(
    settings: Settings, runner: Run, timeout: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"number of milliseconds"):
        runner(FMQFactory.q_a2e_consumer().get(timeout=timeout))
    with pytest.raises(error, match=r"number of milliseconds"):
        sync.FMQFactory.q_a2e_consumer().get(timeout=timeout)


def test_the_wrong_role_is_a_permission_error_and_makes_nothing(place: Place, settings: Settings, runner: Run) -> None:
    assert issubclass(RoleError, PermissionError)
    producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
    with pytest.raises(PermissionError, match="get is for the consumer of queue q_a2e, and this is its producer"):
        runner(producer.get())
    with pytest.raises(PermissionError, match="put is for the producer of queue q_a2e, and this is its consumer"):
        runner(consumer.put(1))
    with pytest.raises(PermissionError):
        sync.FMQFactory.q_a2e_consumer().put(1)
    with pytest.raises(PermissionError):
        sync.FMQFactory.q_a2e_producer().get()
    assert segments(place) == []
    assert producer.socket is consumer.socket is None


def test_what_can_not_be_encoded_is_an_error_and_the_next_put_goes_on(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        with pytest.raises(EncodeError, match=r"\$\.callback"):
            await producer.put({"callback": lambda: None})
        assert await producer.put("next") == 0
        message = await consumer.get()
        assert message is not None
        assert message.payload == "next"

    runner(main())


def test_with_msgpack_nothing_is_unpickled(place: Place, settings: Settings, runner: Run) -> None:
    settings(codec="msgpack")

    async def main() -> None:
        with pytest.raises(EncodeError):
            await FMQFactory.q_a2e_producer().put({1, 2})
        pickled = fmq.AsyncProducer("q_a2e", codec="pickle", ring_size=RING, **place.where)
        await pickled.put({1, 2})
        await pickled.put(b"bytes")
        consumer = FMQFactory.q_a2e_consumer()
        with pytest.raises(CodecRefusedError):
            await consumer.get()
        message = await consumer.get()
        assert message is not None
        assert message.payload == b"bytes"
        del message
        await pickled.close()

    runner(main())


def test_a_queue_is_the_same_queue_for_the_core(place: Place, settings: Settings) -> None:
    producer = sync.FMQFactory.q_a2e_producer()
    producer.put({"from": "face"})
    with fmq.Consumer("q_a2e", accept="pickle", **place.where) as consumer, consumer.get() as message:
        assert message.payload == {"from": "face"}
    producer.close()


def test_two_names_with_one_address_are_one_queue(place: Place, settings: Settings) -> None:
    address = {"protocol": "ipc", "address": f"{place.runtime}/shared"}
    settings(endpoints={"here": address, "there": address})
    made = sync.FMQ()
    producer, consumer = made.queue("here"), made.queue("there", "consumer")
    producer.put(1)
    assert consumer.get() == 1
    made.destroy()


def test_a_directory_that_all_may_write_to_will_do(place: Place, settings: Settings) -> None:
    settings(ipc_root="/dev/shm")
    made = sync.FMQ()
    producer, consumer = made.queue("q"), made.queue("q", "consumer")
    producer.put(1)
    assert consumer.get() == 1
    made.destroy()
    assert not os.path.exists(f"{DIRECTORY}/fmq-{os.getuid()}/{place.namespace}")


async def fill(producer: Queue) -> None:
    """Put until it raises."""
    while True:
        await producer.put(bytes(100_000))


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_full_ring_is_an_error_in_the_time_that_is_set(settings: Settings, runner: Run) -> None:
    settings(put_timeout=0.05)

    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        putting = fill(producer)
        with pytest.raises(PeerUnavailableError, match="no consumer is alive"):
            await putting
        await consumer.open()
        with pytest.raises(QueueFullError):
            await producer.put(bytes(100_000))

    runner(main())


def test_a_second_consumer_is_refused_with_the_pid_of_the_first(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        first, second = FMQFactory.q_a2e_consumer(), FMQFactory.q_a2e_consumer()
        await first.open()
        for call in (second.open, second.get):
            with pytest.raises(QueueInUseError, match=f"process {os.getpid()}"):
                await call()
        await first.close()
        assert await second.get(timeout=0) is None

    runner(main())


# -- loops and threads ------------------------------------------------------------------------------------------------


def test_one_queue_serves_many_short_event_loops_of_several_threads_at_once(settings: Settings) -> None:
    producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
    count, threads = 30, 3

    def put(thread: int) -> None:
        for index in range(count):
            asyncio.run(producer.put((thread, index, np.full(3000, index, np.uint8))))

    def get(_: int) -> list[tuple[int, int]]:
        found = []
        for _ in range(count):
            message = asyncio.run(consumer.get(timeout=PATIENCE))
            assert message is not None
            thread, index, array = message.payload
            assert (array == index).all()
            found.append((thread, index))
        return found

    with ThreadPoolExecutor(2 * threads) as pool:
        getting = [pool.submit(get, thread) for thread in range(threads)]
        putting = [pool.submit(put, thread) for thread in range(threads)]
        for task in putting:
            task.result(60)
        found = [pair for task in getting for pair in task.result(60)]
    assert sorted(found) == [(thread, index) for thread in range(threads) for index in range(count)]


def test_a_queue_may_be_closed_by_another_thread_while_one_waits(settings: Settings) -> None:
    consumer = FMQFactory.q_a2e_consumer()

    async def wait() -> None:
        with pytest.raises(ClosedError):
            await consumer.get()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asyncio.run, wait())
        handle = eventually(lambda: consumer.socket, "it was opened")
        handle.close()
        waiting.result(DEADLINE_S)
    assert handle.closed
    assert consumer.socket is None


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_waits_for_the_consumer_and_leaves_nothing(place: Place, settings: Settings, runner: Run) -> None:
    settings(close_timeout=DEADLINE_S)

    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put("last")
        await consumer.open()
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        message = await consumer.get()
        assert message is not None
        message.release()
        await asyncio.wait_for(closing, DEADLINE_S)
        assert segments(place) == []
        await consumer.close()

    runner(main())
    assert place.files() == []


def test_what_was_put_before_the_socket_was_closed_is_delivered(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put("kept")
        assert producer.socket is not None
        producer.socket.close(linger=0)
        message = await consumer.get(timeout=PATIENCE)
        assert message is not None
        assert message.payload == "kept"

    runner(main())


def test_what_is_closed_says_so_and_may_be_closed_again(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        for producer in (FMQFactory.q_a2e_producer(), await FMQFactory.q_a2e_producer().open()):
            assert not producer.closed
            await producer.close()
            await producer.close()
            producer.give_up()
            assert producer.closed
            assert producer.socket is None
            with pytest.raises(ClosedError):
                await producer.put(1)

    runner(main())


def test_a_consumer_with_arrays_in_use_stays_open_until_they_are_gone(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put(np.zeros(5000))
        message = await consumer.get()
        assert message is not None
        array = message.payload
        with pytest.raises(ViewsHeldError):
            await consumer.close()
        assert consumer.socket is not None
        with pytest.raises(ViewsHeldError):
            consumer.socket.close()
        with pytest.raises(ViewsHeldError):
            await FMQ().destroy()
        assert producer.closed
        assert FMQ() is FMQ._instance
        del array
        message.release()
        await FMQ().destroy()
        assert consumer.closed

    runner(main())


def test_destroy_closes_everything_and_may_be_called_with_nothing_there(place: Place, settings: Settings) -> None:
    async def main() -> None:
        await FMQFactory.destroy()
        queues = [getattr(FMQFactory, f"{link}_{role.value}")() for link in LINKS for role in Role]
        for queue in queues:
            await queue.open()
        await FMQFactory.destroy()
        await FMQFactory.destroy()
        assert all(queue.closed for queue in queues)

    asyncio.run(main())
    assert segments(place) == []
    assert place.files() == []


def test_a_queue_that_is_dropped_is_closed_at_once_and_what_it_put_is_delivered(
    settings: Settings, place: Place
) -> None:
    producer = sync.Queue(None, "q_a2e")
    producer.put("kept")
    with pytest.warns(ResourceWarning, match="unclosed <Producer"):
        del producer
    assert len(segments(place)) == 1
    assert sync.FMQFactory.q_a2e_consumer().get() == "kept"


@pytest.mark.filterwarnings("ignore:unclosed <Async:ResourceWarning")
def test_queues_that_nobody_ever_closes_can_be_made_again_by_the_same_name(
    place: Place, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Context, "add", lambda self, component: None)

    async def round_trip(data: Any) -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put(data)
        message = await consumer.get(timeout=1500)
        assert message is not None
        assert message.payload == data

    for data in (b"hello", b"x" * 500_000, {"k": "v"}):
        asyncio.run(round_trip(data))
        gc.collect()
    consumer = sync.Queue(None, "q_a2e", "consumer")
    assert consumer.get(timeout=0) is None
    consumer.close()
    assert segments(place) == []


# -- tcp --------------------------------------------------------------------------------------------------------------


def test_pickles_are_not_taken_over_tcp(settings: Settings) -> None:
    settings(endpoints={"q_a2e": {"protocol": "tcp", "address": "127.0.0.1:1", "codec": "pickle"}})
    if importlib.util.find_spec("fmq.remote") is None:
        pytest.skip("there is no tcp in this version")
    with pytest.raises(ConfigError, match="clients that are known by their keys"):
        sync.FMQFactory.q_a2e_producer().open()


def test_a_queue_over_tcp_has_the_same_face(settings: Settings) -> None:
    if importlib.util.find_spec("fmq.remote") is None:
        pytest.skip("there is no tcp in this version")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings(endpoints={"q_a2e": {"protocol": "tcp", "address": f"127.0.0.1:{port}"}}, close_timeout=DEADLINE_S)

    async def main() -> None:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        assert await consumer.get(timeout=0) is None
        image = np.arange(100_000)
        await producer.put({"image": image})
        image[:] = 0
        message = await consumer.get(timeout=PATIENCE)
        assert message is not None
        assert (message.payload["image"] == np.arange(100_000)).all()
        assert (message.msg_id, message.descriptor) == (0, None)
        message.release()
        await producer.close()
        await consumer.close()

    asyncio.run(main())


def test_keys_in_the_settings_let_pickles_in_over_tcp(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = CurveKeys.generate(), CurveKeys.generate()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

    def endpoint(keys: CurveKeys, **more: Any) -> None:
        curve = {"public": keys.public, "secret": keys.secret, **more}
        tcp = {"protocol": "tcp", "address": address, "codec": "pickle", "curve": curve}
        settings(endpoints={"q_a2e": tcp}, close_timeout=DEADLINE_S)

    endpoint(ours, clients=[theirs.public])
    consumer = sync.FMQ().queue("q_a2e", "consumer").open()
    endpoint(theirs, server=ours.public)
    monkeypatch.setattr(EndpointManager, "config", None)
    producer = sync.FMQ().queue("q_a2e", "producer")
    producer.put(Role.PRODUCER)
    assert consumer.get(timeout=PATIENCE) is Role.PRODUCER
    producer.close()
    consumer.close()


def test_where_there_is_no_tcp_its_endpoints_are_an_error_that_says_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(endpoints={"q_a2e": {"protocol": "tcp", "address": "127.0.0.1:1"}})
    monkeypatch.setitem(sys.modules, "fmq.remote", None)
    with pytest.raises(ConfigError, match="not in this version"):
        sync.FMQFactory.q_a2e_consumer().get()


# -- forks ------------------------------------------------------------------------------------------------------------


def use_in_child(connection: Any, queue: Queue) -> None:
    """Put through a queue that the parent made, and tell whether the FMQ is a new one."""
    inherited = queue.context
    asyncio.run(queue.put(os.getpid()))
    connection.send(FMQ().context is not inherited)
    asyncio.run(queue.close())
    asyncio.run(FMQFactory.destroy())


@pytest.mark.parametrize("used", [False, True])
def test_a_producer_made_before_a_fork_works_on_both_sides_of_it(settings: Settings, used: bool) -> None:
    settings(close_timeout=DEADLINE_S)
    producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
    expected = []
    if used:
        asyncio.run(producer.put("before"))
        expected.append("before")
    with Child(use_in_child, producer) as child:
        assert child.hear() is True
        asyncio.run(producer.put("after"))
        expected += ["after", child.pid]
        found = []
        for _ in expected:
            message = asyncio.run(consumer.get(timeout=PATIENCE))
            assert message is not None
            found.append(message.payload)
            del message
        assert sorted(found, key=str) == sorted(expected, key=str)
        assert child.join() == 0


def consume_in_child(connection: Any, consumer: Queue) -> None:
    """Try to get through a consumer that the parent has."""
    try:
        asyncio.run(consumer.get(timeout=0))
    except QueueInUseError as error:
        connection.send(error.pid)


def test_a_forked_child_can_not_take_the_queue_of_its_parent(settings: Settings) -> None:
    consumer = FMQFactory.q_a2e_consumer()
    asyncio.run(consumer.open())
    with Child(consume_in_child, consumer) as child:
        assert child.hear() == os.getpid()
        assert child.join() == 0
    assert asyncio.run(consumer.get(timeout=0)) is None


# -- the synchronous form ---------------------------------------------------------------------------------------------


def test_the_synchronous_form_gives_payloads(settings: Settings) -> None:
    producer, consumer = sync.FMQFactory.q_a2e_producer(), sync.FMQFactory.q_a2e_consumer()
    assert consumer.get(timeout=0) is None
    assert producer.put({"image": np.arange(5000)}) == 0
    payload = consumer.get()
    assert (payload["image"] == np.arange(5000)).all()
    assert not payload["image"].flags.writeable
    with pytest.raises(ViewsHeldError):
        consumer.close()
    del payload
    consumer.close()
    producer.close()
    with pytest.raises(ClosedError):
        producer.put(1)


def test_the_synchronous_form_waits_a_second_unless_told_otherwise(settings: Settings) -> None:
    consumer = sync.FMQFactory.q_a2e_consumer().open()
    begun = time.monotonic()
    assert consumer.get() is None
    assert time.monotonic() - begun > 0.9


def test_in_the_synchronous_form_copies_are_private(settings: Settings) -> None:
    settings(copy=True)
    producer, consumer = sync.FMQFactory.q_a2e_producer(), sync.FMQFactory.q_a2e_consumer()
    producer.put(np.arange(5000))
    payload = consumer.get()
    payload += 1
    consumer.close()
    producer.close()
    assert payload[0] == 1


def test_in_the_synchronous_form_a_queue_belongs_to_its_thread(settings: Settings) -> None:
    assert issubclass(OwnerThreadError, RuntimeError)
    producer, consumer = sync.FMQFactory.q_a2e_producer(), sync.FMQFactory.q_a2e_consumer()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match=f"belongs to thread {threading.get_ident()}"):
            pool.submit(producer.put, 1).result(DEADLINE_S)
        with pytest.raises(RuntimeError, match=f"belongs to thread {threading.get_ident()}"):
            pool.submit(consumer.get).result(DEADLINE_S)
        consumer.open()
        pool.submit(consumer.close).result(DEADLINE_S)
    assert consumer.closed


# -- Message and Descriptor -------------------------------------------------------------------------------------------


def test_a_message_made_by_hand_has_what_it_was_given() -> None:
    before = time.time()
    message = Message({"a": 1})
    assert (message.payload, message.msg_id, message.descriptor) == ({"a": 1}, None, None)
    assert before <= message.timestamp <= time.time()
    with message:
        assert message.detach() == {"a": 1}
    message.release()
    assert message.payload == {"a": 1}


def test_a_message_is_serialized_with_all_that_it_holds(settings: Settings, runner: Run) -> None:
    async def main() -> bytes:
        producer, consumer = FMQFactory.q_a2e_producer(), FMQFactory.q_a2e_consumer()
        await producer.put(np.arange(5000))
        message = await consumer.get()
        assert message is not None
        return message.serialize()

    data = runner(main())
    gc.collect()
    runner(FMQFactory.destroy())
    message = Message.deserialize(data)
    assert (message.payload == np.arange(5000)).all()
    assert message.msg_id == 0
    assert message.descriptor is not None
    with pytest.raises(DecodeError, match="3 bytes are no message"):
        Message.deserialize(b"abc")


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_a_descriptor_carries_bytes_once(data: bytes) -> None:
    descriptor = Descriptor.create(data)
    assert descriptor.shm_name.startswith("fmq_shm_")
    assert descriptor.size == len(data)
    assert os.path.exists(f"{DIRECTORY}/{descriptor.shm_name}")
    assert Descriptor(descriptor.shm_name, descriptor.size).read_and_unlink() == data
    assert not os.path.exists(f"{DIRECTORY}/{descriptor.shm_name}")
    with pytest.raises(SegmentMissingError):
        descriptor.read_and_unlink()


def test_a_descriptor_that_does_not_fit_its_segment_leaves_it_alone() -> None:
    descriptor = Descriptor.create(b"abc")
    with pytest.raises(SegmentError, match="holds 3 bytes, and its descriptor says 4"):
        Descriptor(descriptor.shm_name, 4).read_and_unlink()
    assert descriptor.read_and_unlink() == b"abc"
