"""AsyncProducer and AsyncConsumer, in the event loops of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from fmq import (
    AsyncConsumer,
    AsyncProducer,
    ClosedError,
    EncodeError,
    PeerUnavailableError,
    QueueEmptyError,
    QueueFullError,
    QueueTimeoutError,
    TooLargeError,
    ViewsHeldError,
    codec,
)
from tests.queues import (
    DEADLINE_S,
    Place,
    Run,
    drain,
    is_empty,
    lies_in,
    place_fixture,  # noqa: F401
    runner_fixture,  # noqa: F401
    soon,
)

ARRAY = np.arange(3000, dtype=np.int16)
MIB = 1024 * 1024


async def fill(producer: AsyncProducer, obj: Any = bytes(4000)) -> int:
    count = 0
    while True:
        try:
            await producer.put(obj, timeout=0)
        except (QueueFullError, PeerUnavailableError):
            return count
        count += 1


async def settle(consumer: AsyncConsumer) -> None:
    with pytest.raises(QueueEmptyError):
        await consumer.get(timeout=0)


async def take_all(consumer: AsyncConsumer) -> list[Any]:
    """Take and release everything, and return the payloads."""
    payloads = []
    while True:
        try:
            with await consumer.get(timeout=0) as message:
                payloads.append(message.payload)
        except QueueEmptyError:
            return payloads


# -- as the blocking ones ---------------------------------------------------------------------------------------------


def test_what_was_put_comes_out_as_it_was(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(ring_size=MIB), place.async_consumer()
        for payload in (b"", b"x" * 9000, "text", {"n": 1}, bytes(2_000_000)):
            await producer.put(payload)
            with await consumer.get(timeout=0) as message:
                assert message.payload == payload
        for array in (ARRAY, ARRAY[::2], np.arange(100_000), np.arange(400_000), np.empty(0)):
            await producer.put({"a": array})
            with await consumer.get(timeout=0) as message:
                assert (message.payload["a"] == array).all()
                assert not message.payload["a"].flags.writeable
            del message
        await settle(consumer)
        assert is_empty(producer)
        await producer.flush(timeout=0)

    runner(main())


def test_many_are_put_and_got_in_order(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        assert await producer.put_many(range(20)) == list(range(20))
        first = await consumer.get_many(7, timeout=0)
        rest = await consumer.get_many(timeout=0)
        assert [message.payload for message in first + rest] == list(range(20))
        with pytest.raises(QueueEmptyError):
            await consumer.get_many(timeout=0.01)

    runner(main())


def test_blocking_and_awaiting_ends_understand_each_other(place: Place, runner: Run) -> None:
    producer, consumer = place.producer(), place.async_consumer()

    async def get() -> None:
        producer.put(b"to the loop")
        assert (await consumer.get(timeout=DEADLINE_S)).payload == b"to the loop"
        await consumer.close()

    runner(get())
    asyncing, blocking = place.async_producer(), place.consumer()

    async def put() -> None:
        await asyncing.put(b"from the loop")
        await asyncing.close(timeout=0)

    runner(put())
    assert blocking.get(timeout=DEADLINE_S).payload == b"from the loop"


def test_loans_are_put_without_a_copy(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        loan = await producer.empty((100, 10), np.int16)
        loan[:] = 7
        body = await producer.reserve(5000)
        body[:] = bytes(range(250)) * 20
        nothing = await producer.empty(0)
        await producer.put({"loan": loan, "part": loan[3:5], "body": body, "nothing": nothing})
        assert producer.copied_bytes == 0
        assert not loan.flags.writeable
        with await consumer.get(timeout=0) as message:
            payload = message.payload
            assert lies_in(payload["loan"], producer.ring)
            assert (payload["loan"] == 7).all()
            assert payload["part"].shape == (2, 10)
            assert payload["body"] == bytes(range(250)) * 20
        del payload, message, loan, body
        await settle(consumer)
        assert is_empty(producer)

    runner(main())


def test_iteration_ends_when_the_consumer_is_closed(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        await producer.put_many(range(5))
        got: list[int] = []

        async def read() -> None:
            async for message in consumer:
                with message:
                    got.append(message.payload)

        task = asyncio.create_task(read())
        await producer.flush(timeout=DEADLINE_S)
        await consumer.close()
        await asyncio.wait_for(task, DEADLINE_S)
        assert got == list(range(5))

    runner(main())


def test_leaving_the_with_block_closes(place: Place, runner: Run) -> None:
    async def main() -> None:
        async with place.async_producer() as producer, place.async_consumer() as consumer:
            await producer.put(b"x")
            (await consumer.get(timeout=0)).release()
        for act in (
            producer.put(b"x"),
            producer.put({"a": ARRAY}),
            producer.put(np.arange(500_000)),
            producer.empty(10),
            producer.flush(),
            consumer.get(timeout=0),
            consumer.get_many(),
        ):
            with pytest.raises(ClosedError):
                await act
        await producer.close()
        await consumer.close()

    runner(main())
    assert place.segments() == []
    assert place.files() == []


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_what_can_not_be_had_in_time_is_the_error_that_says_why(place: Place, runner: Run, timeout: float) -> None:
    async def main() -> None:
        producer = place.async_producer()
        await fill(producer)
        begun = time.monotonic()
        for act in (producer.put(bytes(4000), timeout=timeout), producer.empty(20_000, timeout=timeout)):
            with pytest.raises(PeerUnavailableError):
                await act
        with pytest.raises(PeerUnavailableError):
            await producer.flush(timeout=timeout)
        consumer = place.async_consumer()
        for act in (producer.put({"a": ARRAY}, timeout=timeout), producer.reserve(20_000, timeout=timeout)):
            with pytest.raises(QueueFullError):
                await act
        with pytest.raises(QueueTimeoutError, match="not yet done"):
            await producer.flush(timeout=timeout)
        await take_all(consumer)
        with pytest.raises(QueueEmptyError):
            await consumer.get(timeout=timeout)
        assert 6 * timeout <= time.monotonic() - begun < 6 * timeout + 10

    runner(main())


@pytest.mark.parametrize("timeout", [-1, math.nan])
def test_a_wait_for_less_than_nothing_is_refused(place: Place, runner: Run, timeout: float) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        with pytest.raises(ValueError, match=repr(timeout)):
            await consumer.get(timeout=timeout)
        count = await fill(producer)
        for act in (producer.put(bytes(4000), timeout=timeout), producer.flush(timeout=timeout)):
            with pytest.raises(ValueError, match=repr(timeout)):
                await act
        assert len(await take_all(consumer)) == count

    runner(main())


def test_what_cannot_be_put_leaves_the_producer_usable(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(spill_limit=100_000), place.async_consumer()
        for _ in range(20):
            with pytest.raises(EncodeError):
                await producer.put({"a": ARRAY, "b": object()}, timeout=0)
            with pytest.raises(TooLargeError):
                await producer.put([ARRAY, np.zeros(100_001, np.uint8)], timeout=0)
        assert is_empty(producer)
        await producer.put(b"x")
        assert (await consumer.get(timeout=0)).payload == b"x"

    runner(main())


def test_a_long_copy_that_fails_is_an_error_of_put_and_leaves_nothing(
    place: Place, runner: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: object, target: object) -> None:
        raise MemoryError("no copy")

    async def main() -> None:
        producer, consumer = place.async_producer(ring_size=4 * MIB), place.async_consumer()
        with monkeypatch.context() as patch:
            patch.setattr("fmq.codec.copy_buffer", fail)
            with pytest.raises(MemoryError, match="no copy"):
                await producer.put([ARRAY, np.zeros(MIB, np.uint8)])
        assert is_empty(producer)
        await producer.put(np.ones(MIB, np.uint8))
        assert (await consumer.get(timeout=0)).payload.all()

    runner(main())


def test_a_consumer_does_not_close_over_live_views(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        await producer.put({"a": ARRAY})
        message = await consumer.get(timeout=0)
        with pytest.raises(ViewsHeldError):
            await consumer.close()
        assert (message.payload["a"] == ARRAY).all()
        message.release()
        del message
        await consumer.close()

    runner(main())


# -- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recheck", [0.05, 3600], ids=["with re-checks", "by wake-ups alone"])
def test_one_who_waits_is_woken_by_the_other(
    place: Place, runner: Run, monkeypatch: pytest.MonkeyPatch, recheck: float
) -> None:
    monkeypatch.setattr("fmq.consumer._RECHECK", recheck)
    monkeypatch.setattr("fmq.producer.RECHECK", recheck)

    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        for index in range(50):
            task = asyncio.create_task(consumer.get(timeout=DEADLINE_S))
            await soon(producer._asleep, "the consumer fell asleep")
            await producer.put(index)
            with await task as message:
                assert message.payload == index
            count = await fill(producer)
            waiting = asyncio.create_task(producer.put(b"last" * 1000, timeout=DEADLINE_S))
            await soon(lambda: producer._protocol._waiting, "the put waits")
            await take_all(consumer)
            assert await waiting == 2 * index + sum(counts) + count + 1
            counts.append(count)
            await take_all(consumer)

    counts: list[int] = []
    runner(main())


def test_closing_wakes_everybody_who_waits(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        gets = [asyncio.create_task(consumer.get()) for _ in range(3)]
        await soon(producer._asleep, "the consumer fell asleep")
        await asyncio.sleep(0.001)
        await consumer.close()
        for task in gets:
            with pytest.raises(ClosedError):
                await asyncio.wait_for(task, DEADLINE_S)
        await fill(producer)
        puts = [asyncio.create_task(producer.put(bytes(4000), timeout=None)) for _ in range(3)]
        await asyncio.sleep(0.001)
        await producer.close(timeout=0)
        for put in puts:
            with pytest.raises(ClosedError):
                await asyncio.wait_for(put, DEADLINE_S)

    runner(main())


CLOSE_AT_ONCE = """
import asyncio, sys, uvloop
from fmq import AsyncConsumer, AsyncProducer, ClosedError, PeerUnavailableError

async def fill(producer):
    while True:
        try:
            await producer.put(bytes(4000), timeout=0)
        except PeerUnavailableError:
            return

async def main(end, queue, namespace, runtime_dir):
    if end == "get":
        thing = AsyncConsumer(queue, namespace=namespace, runtime_dir=runtime_dir)
        task = asyncio.create_task(thing.get())
    else:
        thing = AsyncProducer(queue, namespace=namespace, runtime_dir=runtime_dir, ring_size=65536)
        await fill(thing)
        task = asyncio.create_task(thing.put(bytes(4000), timeout=None))
    await asyncio.sleep(0)
    await thing.close()
    try:
        await task
    except ClosedError:
        print("closed")

make_loop = uvloop.new_event_loop if sys.argv[1] == "uvloop" else asyncio.new_event_loop
make_loop().run_until_complete(main(*sys.argv[2:]))
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("end", ["get", "put"])
def test_closing_just_when_somebody_begins_to_wait_does_not_end_the_process(place: Place, loop: str, end: str) -> None:
    # In a process of its own, since it may take that along.
    command = [sys.executable, "-c", CLOSE_AT_ONCE, loop, end, place.queue, place.namespace, place.runtime]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    # Takes over and removes what it left.
    drain(place.consumer())
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


def test_many_tasks_put_into_a_full_ring_and_every_message_arrives_once(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()

        async def put(task: int) -> None:
            for index in range(10):
                await producer.put({"task": task, "n": index, "a": ARRAY[: (task * 31 + index) % 900]}, timeout=None)

        tasks = [asyncio.create_task(put(task)) for task in range(50)]
        got = defaultdict(list)
        for sequence in range(500):
            with await consumer.get(timeout=DEADLINE_S) as message:
                assert message.sequence == sequence
                payload = message.payload
                assert (payload["a"] == ARRAY[: (payload["task"] * 31 + payload["n"]) % 900]).all()
                got[payload["task"]].append(payload["n"])
            del message, payload
        await asyncio.gather(*tasks)
        assert got == {task: list(range(10)) for task in range(50)}
        await settle(consumer)
        assert is_empty(producer)

    runner(main())


def test_many_tasks_get_every_message_once(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        got: list[int] = []

        async def get() -> None:
            while True:
                with await consumer.get() as message:
                    got.append(message.payload)

        tasks = [asyncio.create_task(get()) for _ in range(10)]
        for index in range(500):
            await producer.put(index)
            if index % 10 == 0:
                await asyncio.sleep(0)
        await soon(lambda: len(got) == 500, "all were got")
        assert sorted(got) == list(range(500))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    runner(main())


def test_one_object_serves_one_event_loop_after_another(place: Place, runner: Run) -> None:
    producer, consumer = place.async_producer(ring_size=4 * MIB), place.async_consumer()

    async def turn(index: int) -> None:
        waiting = asyncio.create_task(consumer.get(timeout=DEADLINE_S))
        await asyncio.sleep(0)
        await producer.put({"n": index, "a": np.full(MIB, index, np.uint8)})
        with await waiting as message:
            assert message.payload["n"] == index
            assert (message.payload["a"] == index).all()

    async def leave() -> None:
        for what in (consumer.get(), producer.flush(timeout=None)):
            asyncio.create_task(what)  # noqa: RUF006
        await asyncio.sleep(0.001)

    for index in range(10):
        runner(turn(index))
        runner(leave())
    gc.collect()

    async def end() -> None:
        await settle(consumer)
        await producer.close()
        await consumer.close()

    runner(end())
    assert place.segments() == []


def test_the_event_loop_goes_on_while_a_large_array_is_put(place: Place, runner: Run) -> None:
    producer, consumer = place.async_producer(ring_size=256 * MIB), place.async_consumer()
    array = np.ones(64 * MIB, np.uint8)

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticker = asyncio.create_task(tick())
        # Of several, for the copy may have the only core that others leave.
        for _ in range(20):
            before = ticks
            await producer.put(array)
            if ticks - before > 5:
                break
            message = await consumer.get(timeout=0)
            assert message.payload.size == array.size
            message.release()
            del message
        else:
            pytest.fail("the event loop stood still while arrays were copied")
        ticker.cancel()

    runner(main())


@pytest.mark.parametrize("who", ["get", "get get", "put", "flush", "put put flush", "get put", "get put flush"])
def test_waiting_uses_hardly_any_processor_time(place: Place, runner: Run, who: str) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(spill_limit=0), place.async_consumer()
        await fill(producer)
        held = await consumer.get_many(10_000, timeout=0)
        waits = {
            "get": lambda: consumer.get(timeout=0.5),
            "put": lambda: producer.put(bytes(4000), timeout=0.5),
            "flush": lambda: producer.flush(timeout=0.5),
        }
        begun, used = time.monotonic(), time.process_time()
        for result in await asyncio.gather(*[waits[name]() for name in who.split()], return_exceptions=True):
            assert isinstance(result, QueueTimeoutError)
        assert time.process_time() - used < 0.05 * len(who.split()) * (time.monotonic() - begun)
        for message in held:
            message.release()

    runner(main())


# -- cancelling -------------------------------------------------------------------------------------------------------


async def cancelled(task: asyncio.Task[Any]) -> Any:
    """Cancel a task, and return what it gave nevertheless, or None."""
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


@pytest.mark.parametrize("seed", range(3))
def test_getters_cancelled_at_any_moment_lose_and_double_nothing(place: Place, runner: Run, seed: int) -> None:
    chance = random.Random(seed)
    total = 400

    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        got: list[int] = []

        def keep(message: Any) -> None:
            if message is not None:
                with message:
                    got.append(message.payload["n"])

        async def put() -> None:
            for index in range(total):
                await producer.put({"n": index, "a": ARRAY[: index % 700]}, timeout=None)
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.001)

        putting = asyncio.create_task(put())
        deadline = time.monotonic() + DEADLINE_S
        while len(got) < total and time.monotonic() < deadline:
            match chance.randrange(3):
                case 0:
                    task = asyncio.create_task(consumer.get())
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                    keep(await cancelled(task))
                case 1:
                    try:
                        keep(await asyncio.wait_for(consumer.get(), chance.random() * 0.001))
                    except asyncio.TimeoutError:
                        continue
                case 2:
                    tasks = [asyncio.create_task(consumer.get(timeout=0.001)) for _ in range(3)]
                    await asyncio.sleep(chance.random() * 0.001)
                    for task in tasks:
                        try:
                            keep(await cancelled(task))
                        except QueueEmptyError:
                            continue
        await putting
        # Of those who wait at once, any may be the first to be served.
        assert sorted(got) == list(range(total))
        assert max(abs(number - index) for index, number in enumerate(got)) < 3
        await settle(consumer)
        assert is_empty(producer)

    runner(main())


@pytest.mark.parametrize(
    "payload", [bytes(500), bytes(4000), {"a": ARRAY}, {"a": ARRAY, "b": np.arange(20_000)}], ids=len
)
def test_puts_cancelled_while_they_wait_for_space_leave_nothing_behind(place: Place, runner: Run, payload: Any) -> None:
    chance = random.Random(0)

    async def main() -> None:
        producer, consumer = place.async_producer(spill_limit=500_000), place.async_consumer()
        for _ in range(10):
            put = await fill(producer, payload)
            tasks = [asyncio.create_task(producer.put(payload, timeout=None)) for _ in range(5)]
            loans = [asyncio.create_task(producer.empty(9000, timeout=None)) for _ in range(2)]
            await asyncio.sleep(0)
            held = await consumer.get_many(10_000, timeout=0)
            for message in held:
                if chance.random() < 0.3:
                    message.release()
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            put += sum([await cancelled(task) is not None for task in tasks])
            for task in loans:
                await cancelled(task)
            del loans, task
            for message in held:
                message.release()
            got = len(held)
            del held, message
            got += len(await take_all(consumer))
            assert got == put
            gc.collect()
            await settle(consumer)
            assert is_empty(producer)
            assert producer._protocol._waiting == 0

    runner(main())


@pytest.mark.parametrize("seed", range(2))
def test_puts_cancelled_during_a_long_copy_are_put_wholly_or_not_at_all(place: Place, runner: Run, seed: int) -> None:
    chance = random.Random(seed)
    size = 16 * MIB

    async def main() -> None:
        producer, consumer = place.async_producer(ring_size=128 * MIB), place.async_consumer()
        whole = []
        for index in range(40):
            array = np.full(size, index, np.uint8)
            task = asyncio.create_task(producer.put({"n": index, "a": array}, timeout=None))
            await asyncio.sleep(chance.random() * 0.008)
            if await cancelled(task) is not None:
                whole.append(index)
            while True:
                try:
                    message = await consumer.get(timeout=0)
                except QueueEmptyError:
                    break
                assert message.payload["n"] == whole.pop(0)
                assert (message.payload["a"] == message.payload["n"]).all()
                message.release()
                del message
            assert whole == []
        await soon(lambda: is_empty(producer), "the last copy was over")

    runner(main())


def test_the_space_of_a_cancelled_copy_is_not_given_to_others_before_the_copy_is_over(
    place: Place, runner: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    copy_buffer = codec.copy_buffer

    def slow(source: Any, target: Any) -> None:
        if source.nbytes == MIB:
            begun.set()
            assert go_on.wait(DEADLINE_S)
        copy_buffer(source, target)

    monkeypatch.setattr("fmq.codec.copy_buffer", slow)

    async def main() -> None:
        producer, consumer = place.async_producer(ring_size=4 * MIB), place.async_consumer()
        task = asyncio.create_task(producer.put(np.zeros(MIB, np.uint8)))
        await soon(begun.is_set, "the copy began")
        assert await cancelled(task) is None
        others = []
        for index in range(20):
            try:
                await producer.put(np.full(200_000, index, np.uint8), timeout=0)
            except QueueFullError:
                break
            others.append(index)
        assert len(others) > 3
        go_on.set()
        messages = await consumer.get_many(timeout=0)
        assert [message.payload[0] for message in messages] == others
        assert all((message.payload == message.payload[0]).all() for message in messages)
        del messages
        await settle(consumer)
        await soon(lambda: is_empty(producer), "all space is back")

    runner(main())


def test_a_loop_that_ends_during_a_long_copy_leaves_nothing_and_says_nothing(
    place: Place, runner: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    producer, consumer = place.async_producer(ring_size=256 * MIB), place.async_consumer()
    array = np.ones(64 * MIB, np.uint8)

    async def leave() -> None:
        asyncio.create_task(producer.put(array))  # noqa: RUF006
        await asyncio.sleep(0.001)

    async def check() -> None:
        for payload in await take_all(consumer):
            assert payload.all()
        await soon(lambda: is_empty(producer), "the copy was given up")

    for _ in range(3):
        runner(leave())
    gc.collect()
    runner(check())
    assert caplog.text == ""


def test_cancelled_getters_leave_the_consumer_awake(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        for _ in range(20):
            task = asyncio.create_task(consumer.get())
            await soon(producer._asleep, "the consumer fell asleep")
            assert await cancelled(task) is None
            assert not producer._asleep()

    runner(main())


def test_a_flush_or_close_that_was_cancelled_can_be_tried_again(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        await producer.put(b"x")
        for end in (producer.flush, producer.close):
            task = asyncio.create_task(end(timeout=None))
            await asyncio.sleep(0.001)
            assert not task.done()
            await cancelled(task)
        await producer.put(b"y")
        await take_all(consumer)
        await producer.flush()
        await producer.close()

    runner(main())
    assert place.segments() == []


def test_nobody_else_in_the_loop_is_kept_waiting_by_a_close(place: Place, runner: Run) -> None:
    async def main() -> None:
        producer, consumer = place.async_producer(), place.async_consumer()
        await producer.put(b"x")
        closing = asyncio.create_task(producer.close(timeout=DEADLINE_S))
        await asyncio.sleep(0.001)
        assert not closing.done()
        assert await take_all(consumer) == [b"x"]
        await closing

    runner(main())
    assert place.segments() == []
