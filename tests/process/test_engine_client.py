"""The client of engines: what comes of its requests when engines stand, die, come back, or never come."""

from __future__ import annotations

import asyncio
import contextlib
from multiprocessing.connection import Connection

import numpy as np
import pytest

from api import AbortedError, ControlError, DeadlineError, EngineClient, EngineUnavailableError, RequestIdError
from engine import Engine
from engine.handlers.echo import Echo
from fmq import ClosedError, PeerUnavailableError, QueueFullError
from fmq.calls import Gauge
from shmq.segment import names
from tests.process.engines import (
    StartEngine,
    answers,
    chat,
    client_of,
    engine_here,
    reply_rings,
    run,
    said,
    segments_of,
    send,
    start_engine_fixture,
    values,
)
from tests.queues import Child, Place, eventually, place_fixture, soon

__all__ = ["place_fixture", "start_engine_fixture"]

SMALL = {"ring_size": 64 * 1024, "spill_limit": 0}


async def fill(client: EngineClient, error: type[Exception]) -> list[str]:
    """Send until the ring is full, and sending raises this error; returns the request ids."""
    sent: list[str] = []
    while True:
        try:
            sent.append(await client.send_task(["x" * 4000, len(sent)], put_timeout=0.05))
        except error:
            return sent


async def numbers(client: EngineClient, sent: list[str]) -> list[int]:
    """What ``fill`` has counted."""
    return [number for _, number in await answers(client, sent)]


# -- results ----------------------------------------------------------------------------------------------------------


def test_results_that_come_before_anybody_asks_are_kept(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            sent = await send(client, [*range(20), chat(5)])
            await soon(lambda: client.unanswered == 0, "all were answered")
            assert await answers(client, sent[:20]) == list(range(20))
            assert [output.step async for output in client.results(sent[20])] == list(range(5))

    with engine_here(place):
        run(main())


def test_who_stops_reading_may_read_on(place: Place) -> None:
    task = chat(20)

    async def main() -> None:
        async with client_of(place) as client:
            request_id = await client.send_task(task)
            text = ""
            async for output in client.results(request_id):
                text += output.value[0]
                if output.step == 7:
                    break
            assert 0 < len(text) < len(said(task))
            text += "".join([value[0] for value in await values(client, request_id)])
            assert text == said(task)
            with pytest.raises(RequestIdError, match="or its results were read"):
                await values(client, request_id)

    with engine_here(place):
        run(main())


def test_all_choices_of_a_request_share_one_copy_of_its_arrays_and_a_loan_needs_none(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            producer = client.links[0].producer
            array = np.arange(40_000)
            mine = await values(client, await client.send_task({"a": array}, choices=6))
            assert len(mine) == 6
            assert mine.count(mine[0]) == 6
            assert (producer.array_bytes, producer.copied_bytes) == (array.nbytes, array.nbytes)
            loan = await client.choose().producer.empty(array.shape, array.dtype)
            loan[:] = array
            assert await values(client, await client.send_task({"a": loan}, choices=6)) == mine
            assert (producer.array_bytes, producer.copied_bytes) == (2 * array.nbytes, array.nbytes)

    with engine_here(place):
        run(main())


def test_a_request_id_is_in_use_until_its_results_were_read(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            for task in ("first", "second"):
                assert await client.send_task(task, request_id="mine") == "mine"
                with pytest.raises(RequestIdError, match="request mine was sent already"):
                    await client.send_task("another", request_id="mine")
                await soon(lambda: client.unanswered == 0, "it was answered")
                with pytest.raises(RequestIdError, match="request mine was sent already"):
                    await client.send_task("another", request_id="mine")
                assert await values(client, "mine") == [task]
            with pytest.raises(RequestIdError, match="was not sent by this client"):
                await values(client, "never sent")

    with engine_here(place):
        run(main())


def test_a_client_that_was_closed_sends_nothing_and_its_requests_end_as_aborted(place: Place) -> None:
    async def main(engine: Engine) -> None:
        async with client_of(place) as client:
            done, running = await send(client, ["done", chat(1000)])
            reader = asyncio.create_task(values(client, running))
            assert await values(client, done) == ["done"]
        with pytest.raises(AbortedError, match="the client was closed"):
            await reader
        await client.close()
        for again in (client.send_task("late"), client.control("ping")):
            with pytest.raises(ClosedError):
                await again
        await soon(lambda: engine.status()["failed"] == 1, "the engine has aborted what ran")

    with engine_here(place, Echo(0.02), max_batch=1) as engine:
        run(main(engine))


# -- deadlines, aborts, control ---------------------------------------------------------------------------------------


def test_a_request_ends_at_its_deadline_before_it_is_begun_and_in_the_middle(place: Place) -> None:
    async def main(engine: Engine) -> None:
        async with client_of(place) as client:
            running = await client.send_task(chat(1000), timeout=0.6)
            waiting = await client.send_task("never begun", timeout=0.3)
            outputs = client.results(running)
            assert (await anext(outputs)).step == 0
            with pytest.raises(DeadlineError, match="its time is over"):
                _ = [output async for output in outputs]
            with pytest.raises(DeadlineError, match="its time is over"):
                await values(client, waiting)
            # The engine has done with both as well.
            assert await answers(client, await send(client, ["next"], timeout=20)) == ["next"]
            assert engine.status()["failed"] == 2

    with engine_here(place, Echo(0.02), max_batch=1) as engine:
        run(main(engine))


def test_a_request_ends_at_its_deadline_although_its_engine_stands(place: Place, start_engine: StartEngine) -> None:
    engine = start_engine()

    async def main() -> None:
        async with client_of(place) as client:
            engine.pause()
            request_id = await client.send_task("in vain", timeout=0.1)
            with pytest.raises(DeadlineError, match="its time is over, and the engine has said nothing"):
                await values(client, request_id)
            assert client.unanswered == 0
            engine.go_on()
            assert await answers(client, await send(client, ["next"])) == ["next"]
            # What is too late is not even delivered.
            assert engine.word(Gauge.RECEIVED) == 1
            assert client.strays == 0

    run(main())


def test_an_abort_ends_a_request_here_and_in_the_engine(place: Place) -> None:
    async def main(engine: Engine) -> None:
        async with client_of(place) as client:
            running, waiting = await send(client, [chat(1000), chat(1000)])
            async for output in client.results(running):
                assert output.step == 0
                break
            for request_id in (running, waiting):
                await client.abort(request_id)
                await client.abort(request_id)
                with pytest.raises(AbortedError, match="it was aborted"):
                    await values(client, request_id)
                await client.abort(request_id)
            await client.abort("never sent")
            assert client.unanswered == 0
            await soon(lambda: engine.status()["failed"] == 2, "the engine has aborted both")
            assert await answers(client, await send(client, ["next"])) == ["next"]

    with engine_here(place, Echo(0.02), max_batch=1) as engine:
        run(main(engine))


def test_an_abort_does_not_wait_for_an_engine_that_stands_which_heeds_it_later(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(arguments={"step_seconds": 0.1})

    async def main() -> None:
        async with client_of(place) as client:
            engine.pause()
            request_id = await client.send_task(chat(1000))
            await client.abort(request_id)
            with pytest.raises(AbortedError, match="it was aborted"):
                await values(client, request_id)
            engine.go_on()
            await soon(lambda: engine.word(Gauge.FAILED) == 1, "the engine has aborted it")
            # Its word comes to nobody.
            await soon(lambda: client.strays > 0, "the client has passed it over")

    run(main())


def test_a_command_to_an_engine_that_stands_fails_in_time_and_is_not_done_later(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine()

    async def main() -> None:
        async with client_of(place) as client:
            assert await client.control("ping", engine=place.queue) == "pong"
            with pytest.raises(ValueError, match="'another' is no engine of this client"):
                await client.control("ping", engine="another")
            engine.pause()
            await soon(lambda: client.links[0].state == "stale", "it was seen to stand")
            with pytest.raises(ControlError, match=r"ping: engine \w+ has not answered for 0.1 s; it is stale"):
                await client.control("ping", timeout=0.1)
            engine.go_on()
            await soon(lambda: client.links[0].serving, "it was seen to turn")
            assert await client.control("ping") == "pong"

    run(main())


# -- a ring that is full ----------------------------------------------------------------------------------------------


def test_a_ring_that_is_full_refuses_requests_and_takes_them_again_later(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine()

    async def main() -> None:
        async with client_of(place, **SMALL) as client:
            engine.pause()
            sent = await fill(client, QueueFullError)
            assert client.unanswered == len(sent) > 5
            engine.go_on()
            assert await numbers(client, sent) == list(range(len(sent)))
            await client.links[0].producer.flush()
            engine.kill()
            sent = await fill(client, PeerUnavailableError)
            assert client.unanswered == len(sent) > 5
            await asyncio.to_thread(start_engine)
            assert await numbers(client, sent) == list(range(len(sent)))

    run(main())


def test_a_send_that_is_cancelled_while_it_waits_has_sent_nothing(place: Place, start_engine: StartEngine) -> None:
    engine = start_engine()

    async def main() -> None:
        async with client_of(place, **SMALL) as client:
            engine.pause()
            sent = await fill(client, QueueFullError)
            for task in (["x" * 4000, -1], np.zeros(2000)):
                late = asyncio.create_task(client.send_task(task, request_id="late", put_timeout=60))
                await soon(lambda: client.unanswered == len(sent) + 1, "it has begun")
                late.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await late
                assert client.unanswered == len(sent)
                with pytest.raises(RequestIdError, match="was not sent"):
                    await values(client, "late")
            engine.go_on()
            assert await numbers(client, sent) == list(range(len(sent)))
            assert await client.send_task("again", request_id="late") == "late"
            assert await values(client, "late") == ["again"]
            assert engine.word(Gauge.RECEIVED) == len(sent) + 1
            assert client.strays == 0

    run(main())


# -- engines that die -------------------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_under_load_and_restarted_loses_nothing(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(max_batch=2, arguments={"step_seconds": 0.01})
    talk = chat(40)

    async def main() -> None:
        async with client_of(place) as client:
            chats = await send(client, [talk, talk])
            sent = await send(client, ([number, np.full(500, number)] for number in range(20)))
            texts = ["", ""]
            async for output in client.results(chats[0]):
                texts[0] += output.value[0]
                if output.step == 5:
                    break
            engine.kill()
            # What is sent while there is none waits for the next one.
            sent += await send(client, ([number, np.full(500, number)] for number in range(20, 40)))
            await soon(lambda: client.links[0].state == "absent", "its death was seen")
            sent += await send(client, ([number, np.full(500, number)] for number in range(40, 60)))
            await asyncio.to_thread(start_engine, arguments={"step_seconds": 0.01})
            for index, request_id in enumerate(chats):
                texts[index] += "".join([value[0] for value in await values(client, request_id)])
            assert texts == [said(talk)] * 2
            assert client.repeated >= 6
            assert [number for number, _ in await answers(client, sent)] == list(range(60))
            assert (client.unanswered, client.strays) == (0, 0)

    run(main())


def test_without_an_engine_nothing_can_be_sent(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            for asked in (client.send_task("a task"), client.control("ping")):
                with pytest.raises(EngineUnavailableError, match="no engine was ever there"):
                    await asked
            assert client.unanswered == 0

    run(main())


def test_what_waits_for_an_engine_that_is_gone_for_too_long_fails_and_later_requests_do_not(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(arguments={"step_seconds": 60})

    async def main() -> None:
        async with client_of(place, patience=0.5) as client:
            sent = await send(client, range(20))
            engine.kill()
            for request_id in sent:
                with pytest.raises(EngineUnavailableError, match="its engine is gone, and no other has come"):
                    await values(client, request_id)
            assert client.unanswered == 0
            with pytest.raises(EngineUnavailableError, match="its engine is gone for"):
                await client.send_task("late")
            await asyncio.to_thread(start_engine)
            await soon(lambda: client.links[0].serving, "the next engine was seen")
            assert await answers(client, await send(client, ["next"])) == ["next"]
            # The others were answered as well, to nobody.
            await soon(lambda: client.strays == len(sent), "they were passed over")

    run(main())


# -- several engines --------------------------------------------------------------------------------------------------


def test_two_engines_share_the_load_and_what_one_died_with_the_other_does(
    place: Place, start_engine: StartEngine
) -> None:
    queues = f"{place.queue}-1", f"{place.queue}-2"
    slow = {"step_seconds": 0.1}
    first, second = engines = [start_engine(queue=queue, max_batch=1, arguments=slow) for queue in queues]

    async def main() -> None:
        async with client_of(place, *queues) as client:
            for engine in engines:
                engine.pause()
            sent = await send(client, range(20))
            assert [link.unanswered for link in client.links] == [10, 10]
            assert [link.pid for link in client.links] == [first.pid, second.pid]
            for engine in engines:
                engine.go_on()
            await soon(lambda: first.word(Gauge.RECEIVED) == 10, "it has taken its share")
            first.kill()
            assert client.links[0].unanswered > 0
            assert await answers(client, sent) == list(range(20))
            assert [link.state for link in client.links] == ["absent", "serving"]
            assert [link.unanswered for link in client.links] == [0, 0]
            # It is not chosen any more.
            assert await answers(client, await send(client, range(3))) == list(range(3))
            assert client.strays == 0

    run(main())


def test_an_abort_reaches_a_request_that_was_moved(place: Place, start_engine: StartEngine) -> None:
    queues = f"{place.queue}-1", f"{place.queue}-2"
    first, second = (start_engine(queue=queue, arguments={"step_seconds": 0.02}) for queue in queues)

    async def main() -> None:
        async with client_of(place, *queues) as client:
            request_id = await client.send_task(chat(2000), engine=client.links[0])
            first.kill()
            await soon(lambda: second.word(Gauge.RUNNING) == 1, "it was moved")
            await client.abort(request_id)
            with pytest.raises(AbortedError):
                await values(client, request_id)
            await soon(lambda: second.word(Gauge.FAILED) == 1, "the other engine has aborted it")
            assert [link.unanswered for link in client.links] == [0, 0]

    run(main())


# -- a client that dies -----------------------------------------------------------------------------------------------


def work(connection: Connection, place: Place) -> None:
    """Send requests without end, in the ring and in spill segments, read the results, say so, and wait to be killed."""

    async def ask(client: EngineClient, size: int) -> None:
        while True:
            await values(client, await client.send_task({"a": np.zeros(size, np.uint8)}, choices=2))
            connection.send(size)

    async def main() -> None:
        async with client_of(place) as client:
            await asyncio.gather(*(ask(client, size) for size in (10, 9000, 100_000, 700_000, 3_000_000)))

    asyncio.run(main())


def test_what_is_sent_to_an_engine_that_died_while_its_requests_are_moved_is_moved_too(
    place: Place, start_engine: StartEngine
) -> None:
    queues = f"{place.queue}-1", f"{place.queue}-2"
    first, _ = (start_engine(queue=queue) for queue in queues)

    async def main() -> None:
        async with client_of(place, *queues, **SMALL) as client:
            link = client.links[0]
            first.pause()
            sent = []
            with contextlib.suppress(QueueFullError):
                while True:
                    sent.append(await client.send_task(["x" * 4000, len(sent)], engine=link, put_timeout=0.05))
            # It waits for the whole ring, which is there when the last of the others was moved.
            whole = np.zeros(link.producer._writer.max_payload - 64, np.uint8)
            late = asyncio.create_task(client.send_task(whole, engine=link, put_timeout=60))
            await soon(lambda: client.unanswered == len(sent) + 1, "it waits for room")
            first.kill()
            assert await numbers(client, sent) == list(range(len(sent)))
            (answer,) = await answers(client, [await late])
            assert answer["dtype"] == "uint8"

    run(main())


def test_a_client_that_is_killed_under_load_leaves_no_segment_once_its_engine_has_noticed(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine()
    with Child(work, place) as one, Child(work, place) as other:
        for child in (one, other):
            heard = set()
            while len(heard) < 5:
                heard.add(child.hear())
        assert len(reply_rings(place)) == 2
        one.kill()
        other.kill()
    eventually(lambda: len(names(segments_of(place))) == 1, "the board alone was left")
    assert engine.stop() == 0
    assert names(segments_of(place)) == []
    assert place.files() == []
