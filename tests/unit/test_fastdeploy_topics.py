"""FastDeploy's Topic, in both forms."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from fmq import FMQ, ClosedError, ConfigError, QueueFullError, QueueInUseError, QueueTimeoutError, SubscribedError
from fmq.fastdeploy import Message, sync
from tests.faces import Settings, segments, settings_fixture
from tests.queues import DEADLINE_S, Place, Run, eventually, place_fixture, runner_fixture, soon

__all__ = ["place_fixture", "runner_fixture", "settings_fixture"]


def test_every_subscriber_gets_everything_by_function_or_coroutine(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        seen: list[Any] = []
        also: list[Any] = []

        async def note(message: Message) -> None:
            await asyncio.sleep(0)
            assert not message.payload["image"].flags.writeable
            also.append((message.msg_id, int(message.payload["image"].sum())))

        first, second, topic = FMQ().topic("news"), FMQ().topic("news"), FMQ().topic("news")
        task = await first.sub(lambda message: seen.append((message.msg_id, int(message.payload["image"].sum()))))
        await second.sub(note)
        for value in range(5):
            assert await topic.pub({"image": np.full(5000, value)}) == value
        await soon(lambda: len(seen) == len(also) == 5, "all arrived")
        assert seen == also == [(value, 5000 * value) for value in range(5)]
        await first.stop_sub()
        assert task.cancelled()
        await FMQ().destroy()

    runner(main())


def test_a_callback_that_fails_is_called_with_the_next_one(
    settings: Settings, runner: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        seen: list[Any] = []

        def fail_first(message: Message) -> None:
            seen.append(message.payload)
            if message.payload == 0:
                raise KeyError("the first")

        topic = FMQ().topic("news")
        await topic.sub(fail_first)
        for value in range(3):
            await topic.pub(value)
        await soon(lambda: seen == [0, 1, 2], "all arrived")
        await topic.close()

    runner(main())
    assert "topic news: the callback failed" in caplog.text


def test_after_stop_sub_nothing_is_called_and_another_callback_may_come(settings: Settings, runner: Run) -> None:
    assert issubclass(SubscribedError, RuntimeError)

    async def main() -> None:
        before: list[Any] = []
        after: list[Any] = []
        topic, publisher = FMQ().topic("news"), FMQ().topic("news")
        await topic.sub(lambda message: before.append(message.payload))
        with pytest.raises(RuntimeError, match="topic news has a callback already"):
            await topic.sub(print)
        await publisher.pub(1)
        await soon(lambda: before == [1], "it arrived")
        await topic.stop_sub()
        await topic.stop_sub()
        await publisher.pub(2)
        await topic.sub(lambda message: after.append(message.payload))
        await soon(lambda: publisher._publisher.open().readers == 1, "it is in again")
        await publisher.pub(3)
        await soon(lambda: after == [3], "the new one is called")
        assert before == [1]

    runner(main())


def test_a_callback_may_stop_its_own_subscription(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        seen: list[Any] = []
        topic, publisher = FMQ().topic("news"), FMQ().topic("news")

        async def once(message: Message) -> None:
            seen.append(message.payload)
            await topic.stop_sub()

        task = await topic.sub(once)
        await publisher.pub(1)
        await asyncio.wait_for(task, DEADLINE_S)
        await publisher.pub(2)
        assert seen == [1]
        assert publisher._publisher.open().readers == 0

    runner(main())


def test_a_topic_has_one_publisher(settings: Settings, runner: Run) -> None:
    async def main() -> None:
        await FMQ().topic("news").pub(1)
        with pytest.raises(QueueInUseError):
            await FMQ().topic("news").pub(2)

    runner(main())


def test_a_slow_subscriber_is_an_error_in_time_or_skipped_as_is_set(settings: Settings) -> None:
    settings(put_timeout=0.05, patience=0.01, endpoints={})

    async def publish(count: int) -> None:
        topic = FMQ().topic("news")
        reader = FMQ().topic("news")
        blocked = asyncio.Event()

        async def hang(_: Message) -> None:
            await blocked.wait()

        await reader.sub(hang)
        for _ in range(count):
            await topic.pub(bytes(100_000))
        await FMQ().destroy()

    with pytest.raises(QueueFullError):
        asyncio.run(publish(100))
    asyncio.run(FMQ().destroy())
    settings(put_timeout=DEADLINE_S, patience=0.01, policy="skip")
    asyncio.run(publish(30))


def test_what_is_closed_leaves_nothing(settings: Settings, place: Place, runner: Run) -> None:
    async def main() -> None:
        topic = FMQ().topic("news")
        await topic.sub(print)
        await topic.pub(None)
        await topic.close()
        await topic.close()
        with pytest.raises(ClosedError):
            await topic.pub(1)

    runner(main())
    assert segments(place) == []
    assert place.files() == []


def test_a_topic_over_tcp_is_refused(settings: Settings) -> None:
    settings(endpoints={"news": {"protocol": "tcp", "address": "localhost:1"}})
    with pytest.raises(ConfigError, match="topic news"):
        asyncio.run(FMQ().topic("news").pub(1))


# -- the synchronous form ---------------------------------------------------------------------------------------------


def test_in_the_synchronous_form_a_thread_calls_back_with_messages(settings: Settings, place: Place) -> None:
    made = sync.FMQ()
    topic, publisher = made.topic("news"), made.topic("news")
    seen: list[Any] = []
    threads: set[int] = set()

    def note(message: Message) -> None:
        threads.add(threading.get_ident())
        seen.append(int(message.payload.sum()))
        if len(seen) == 2:
            raise KeyError("the second")

    topic.sub(note)
    with pytest.raises(RuntimeError):
        topic.sub(note)
    for value in range(4):
        publisher.pub(np.full(5000, value))
    eventually(lambda: len(seen) == 4, "all arrived")
    assert seen == [0, 5000, 10_000, 15_000]
    assert threading.get_ident() not in threads
    topic.stop_sub()
    publisher.pub(np.zeros(5000))
    assert len(seen) == 4
    made.destroy()
    assert segments(place) == []


def test_in_the_synchronous_form_the_first_pub_waits_for_a_subscriber(settings: Settings) -> None:
    settings(put_timeout=0.05)
    with pytest.raises(QueueTimeoutError, match="no more came"):
        sync.FMQ().topic("news").pub(1)
    settings(put_timeout=DEADLINE_S)
    made = sync.FMQ()
    topic, other = made.topic("other"), made.topic("other")
    seen: list[Any] = []
    waiting = threading.Thread(target=topic.pub, args=("first",))
    waiting.start()
    other.sub(lambda message: seen.append(message.payload))
    waiting.join(DEADLINE_S)
    eventually(lambda: seen == ["first"], "it arrived")
    made.destroy()


def test_in_the_synchronous_form_a_callback_may_stop_its_own_subscription(settings: Settings) -> None:
    made = sync.FMQ()
    topic, publisher = made.topic("news"), made.topic("news")
    seen: list[Any] = []

    def once(message: Message) -> None:
        seen.append(message.payload)
        topic.stop_sub()

    topic.sub(once)
    publisher.pub(1)
    eventually(lambda: publisher._publisher.open().readers == 0, "it left")
    publisher.pub(2)
    topic.sub(lambda message: seen.append(message.payload))
    eventually(lambda: publisher._publisher.open().readers == 1, "it is in again")
    publisher.pub(3)
    eventually(lambda: seen == [1, 3], "it arrived")
    made.destroy()
