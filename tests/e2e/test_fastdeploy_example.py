"""The example of FastDeploy's two hooks: whole, and each hook where something goes wrong."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.fastdeploy.engine_client import EngineClient
from examples.fastdeploy.engine_service import EngineService
from examples.fastdeploy.upstream import EngineError
from fmq import AsyncProducer, FMQFactory, QueueInUseError
from tests.faces import RING, Settings, segments, settings_fixture
from tests.queues import DEADLINE_S, Place, eventually, place_fixture

__all__ = ["place_fixture", "settings_fixture"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def errors() -> list[tuple[str, str, int]]:
    return []


@pytest.fixture
def service(settings: Settings, errors: list[tuple[str, str, int]]) -> Any:
    service = EngineService(lambda *error: errors.append(error))
    yield service
    service.scheduler.waiting.clear()
    service._exit_sub_services()


def test_the_example_runs_and_leaves_nothing() -> None:
    environment = {**os.environ, "FMQ_NAMESPACE": f"e2e-{os.getpid()}"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.fastdeploy"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "API: 6 requests sent, and one aborted" in result.stdout
    assert [line for line in result.stdout.splitlines() if line.startswith("engine")] == [
        "engine: nonsense_0: 500, prompt_token_ids is missing",
        "engine: text_0: 3 tokens",
        "engine: text_1: 3 tokens",
        "engine: picture_0: 2 tokens, a picture of 762,048 bytes with mean 127.5",
        "engine: last_0: 1 tokens",
    ]
    assert [name for name in os.listdir("/dev/shm") if f":e2e-{os.getpid()}:" in name] == []


# -- the API server's hook --------------------------------------------------------------------------------------------


def test_without_an_engine_a_client_gets_an_error_when_the_ring_is_full(settings: Settings) -> None:
    settings(put_timeout=0.02)
    client = EngineClient()

    async def send() -> None:
        while True:
            await client.add_requests({"request_id": "r", "prompt_token_ids": np.zeros(20_000)})

    with pytest.raises(EngineError, match="no consumer is alive") as raised:
        asyncio.run(send())
    assert raised.value.error_code == 503


def test_with_an_engine_that_is_too_busy_a_client_is_told_to_come_again(settings: Settings) -> None:
    settings(put_timeout=0.02)
    client, engine = EngineClient(), FMQFactory.q_a2e_consumer()

    async def send() -> None:
        await engine.open()
        while True:
            await client.add_requests({"request_id": "r", "prompt_token_ids": np.zeros(20_000)})

    with pytest.raises(EngineError) as raised:
        asyncio.run(send())
    assert raised.value.error_code == 429


def test_a_request_that_can_not_be_sent_is_the_client_s_error(settings: Settings) -> None:
    with pytest.raises(EngineError, match=r"\$\.callback") as raised:
        asyncio.run(EngineClient().add_requests({"request_id": "r", "callback": lambda: None}))
    assert raised.value.error_code == 400


# -- the engine's hook ------------------------------------------------------------------------------------------------


def test_requests_and_aborts_reach_the_scheduler_in_order(service: EngineService) -> None:
    client = EngineClient()

    async def send() -> None:
        await client.add_requests({"request_id": "a", "prompt_token_ids": [1], "n": 2})
        await client.abort("a", n=2)
        await client.add_requests({"request_id": "b", "prompt_token_ids": [2]})

    service.start_zmq_service()
    asyncio.run(send())
    eventually(lambda: len(service.scheduler.waiting) == 3, "all requests arrived")
    request = service.scheduler.get_request()
    assert request is not None
    assert request.request_id == "b_0"
    assert service.scheduler.aborted == {"a_0", "a_1"}


def test_a_request_that_is_none_is_answered_and_the_next_one_taken(
    service: EngineService, errors: list[tuple[str, str, int]]
) -> None:
    client = EngineClient()

    async def send() -> None:
        await client.add_requests({"request_id": "bad"})
        await client.add_requests({"request_id": "good", "prompt_token_ids": [2]})

    service.start_zmq_service()
    asyncio.run(send())
    eventually(lambda: service.scheduler.waiting, "the good one arrived")
    assert errors == [("bad_0", "prompt_token_ids is missing", 500)]


def test_a_message_that_can_not_be_had_does_not_stop_the_loop(service: EngineService, place: Place) -> None:
    async def send() -> None:
        producer = AsyncProducer("q_a2e", codec="pickle", ring_size=RING, **place.where)
        await producer.put(Vanishing())
        await EngineClient().add_requests({"request_id": "good", "prompt_token_ids": [2]})
        await producer.flush(timeout=DEADLINE_S)
        await producer.close()

    service.start_zmq_service()
    asyncio.run(send())
    eventually(lambda: service.scheduler.waiting, "the good one arrived")
    assert service.is_receiving()


class Vanishing:
    """What can be pickled and not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.path.join, ()


def test_a_consumer_that_was_closed_under_the_loop_is_replaced(service: EngineService) -> None:
    service.start_zmq_service()
    first = eventually(lambda: service.fmq_a2e_consumer, "the loop began")
    first.socket.close()
    eventually(lambda: service.fmq_a2e_consumer not in (None, first), "there is another consumer")
    asyncio.run(EngineClient().add_requests({"request_id": "a", "prompt_token_ids": [1]}))
    eventually(lambda: service.scheduler.waiting, "it receives")


def test_a_second_engine_stops_with_an_error_and_is_known_to_be_deaf(service: EngineService) -> None:
    service.start_zmq_service()
    eventually(lambda: service.fmq_a2e_consumer, "the first has the queue")
    second = EngineService(lambda *_: None)
    second.start_zmq_service()
    eventually(lambda: second.failure, "the second stopped")
    assert isinstance(second.failure, QueueInUseError)
    eventually(lambda: not second.is_receiving(), "its thread ended")
    assert service.is_receiving()


def test_the_adapter_s_branch_never_touches_the_queue(place: Place, settings: Settings) -> None:
    seen: list[EngineService] = []
    service = EngineService(lambda *_: None, adapter=seen.append)
    service.start_zmq_service()
    eventually(lambda: seen == [service], "the adapter ran")
    assert service.fmq_a2e_consumer is None
    service._exit_sub_services()
    assert not os.path.exists(place.runtime)


def test_the_exit_closes_the_socket_while_the_loop_waits_and_leaves_nothing(
    place: Place, service: EngineService, caplog: pytest.LogCaptureFixture
) -> None:
    service.start_zmq_service()
    consumer = eventually(lambda: service.fmq_a2e_consumer, "the loop began")
    with caplog.at_level("INFO"):
        service._exit_sub_services()
    assert "FMQ consumer socket closed successfully." in caplog.messages
    assert consumer.closed
    assert service.fmq_a2e_consumer is None
    assert not service.is_receiving()
    assert service.failure is None
    assert segments(place) == []
    assert place.files() == []


def _failing() -> None:
    raise RuntimeError("it can't be closed")


@pytest.mark.parametrize(
    ("consumer", "said"),
    [
        ("missing", ""),
        (None, ""),
        (SimpleNamespace(), ""),
        (SimpleNamespace(socket=None), ""),
        (SimpleNamespace(socket=SimpleNamespace(close=lambda: None)), "FMQ consumer socket closed successfully."),
        (SimpleNamespace(socket=SimpleNamespace(close=_failing)), "Error closing fmq_consumer: it can't be closed"),
    ],
    ids=["no attribute", "None", "no socket", "socket None", "closes", "fails"],
)
def test_the_exit_bears_whatever_there_is(
    service: EngineService, consumer: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    if consumer == "missing":
        del service.fmq_a2e_consumer
    else:
        service.fmq_a2e_consumer = consumer
    with caplog.at_level("INFO"):
        service._exit_sub_services()
    assert [message for message in caplog.messages if "FMQ" in message or "fmq" in message] == [said] * bool(said)
    assert getattr(service, "fmq_a2e_consumer", None) is None


def test_a_queue_that_was_never_used_has_no_socket_to_close(service: EngineService) -> None:
    service.fmq_a2e_consumer = FMQFactory.q_a2e_consumer()
    service._exit_sub_services()
    assert service.fmq_a2e_consumer is None
