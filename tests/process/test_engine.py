"""The engine in a process of its own: what it answers, what it survives, and how it ends."""

from __future__ import annotations

import asyncio
import re
import signal
import zlib
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from api import ControlError, EngineView, HandlerError, InvalidRequestError, RefusedError
from engine.handlers.echo import Echo
from fmq import Consumer, Producer
from fmq.calls import Gauge, Request
from shmq.segment import names
from tests.process.engines import (
    HANDLERS,
    EngineProcess,
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
from tests.process.handlers import POISON, Forgetful, Zeros
from tests.queues import Child, Place, eventually, place_fixture, soon

__all__ = ["place_fixture", "start_engine_fixture"]


# -- answers ----------------------------------------------------------------------------------------------------------


def test_every_client_gets_the_answers_to_its_own_requests(place: Place, start_engine: StartEngine) -> None:
    engine = start_engine()
    array = np.arange(100_000, dtype=np.int32)

    async def main() -> None:
        async with client_of(place) as client, client_of(place) as other:
            for who in (client, other):
                assert await who.send_task(["of", id(who), array], request_id="the same") == "the same"
            description = {"dtype": "int32", "shape": [100_000], "crc32": zlib.crc32(array)}
            for who in (client, other):
                assert await values(who, "the same") == [["of", id(who), description]]
            assert await client.control("ping") == "pong"

    run(main())
    assert engine.stop() == 0
    assert "2 requests served, 0 failed" in engine.log


def test_a_chat_is_answered_word_for_word_and_choice_by_choice(place: Place) -> None:
    task = chat(7)

    async def main() -> None:
        async with client_of(place) as client:
            outputs = [output async for output in client.results(await client.send_task(task, choices=3))]
            for choice in range(3):
                mine = [output for output in outputs if output.choice == choice]
                assert [output.step for output in mine] == list(range(7))
                assert [output.finished for output in mine] == [False] * 6 + [True]
                assert "".join(output.value[0] for output in mine) == said(task)

    with engine_here(place):
        run(main())


def test_a_result_that_is_larger_than_the_ring_for_results_arrives(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            large, small = await answers(client, await send(client, [20_000_000, 20]))
            assert (large.shape, small.shape) == ((20_000_000,), (20,))
            assert not large.any()

    with engine_here(place, Zeros()):
        run(main())


# -- what is refused, and what fails ----------------------------------------------------------------------------------


NO_CALLS: list[Any] = [
    {"not": "a call"},
    b"not a call",
    ["request", 1],
    {"type": "request", "request_id": 5},
    {"a": np.zeros(5000)},
]


def test_what_is_no_call_is_logged_and_counted_and_stops_nothing(place: Place, start_engine: StartEngine) -> None:
    engine = start_engine()
    producer = place.producer()
    producer.put_many(NO_CALLS)
    eventually(lambda: engine.word(Gauge.RECEIVE_ERRORS) == len(NO_CALLS), "all were counted")
    assert engine.log.count("a call could not be received") == len(NO_CALLS)

    async def main() -> None:
        async with client_of(place) as client:
            status = await client.control("status")
            assert (status["receive_errors"], status["received"], status["state"]) == (len(NO_CALLS), 0, "serving")
            assert await answers(client, await send(client, ["the next one"])) == ["the next one"]

    run(main())
    producer.flush()


def test_a_request_that_can_t_be_answered_stops_nothing_and_leaves_nothing(place: Place) -> None:
    producer = place.producer()
    nowhere = ["../elsewhere", "", "reply.of-nobody"]
    producer.put_many([Request(request_id, reply_to, "lost") for request_id in ("r1", "r2") for reply_to in nowhere])

    async def main() -> None:
        async with client_of(place) as client:
            assert await answers(client, await send(client, ["found"])) == ["found"]

    with engine_here(place) as engine:
        producer.flush()
        run(main())
        eventually(lambda: reply_rings(place) == [], "the answers that nobody reads are gone")
        assert engine.status()["finished"] == 7


def test_a_request_whose_handler_fails_fails_alone(place: Place, start_engine: StartEngine) -> None:
    engine = start_engine(handler=f"{HANDLERS}:Fussy")

    async def main() -> None:
        async with client_of(place) as client:
            engine.pause()
            # In one batch, or two.
            good = await send(client, range(4))
            bad = await client.send_task(POISON)
            good += await send(client, range(4, 8))
            engine.go_on()
            assert await answers(client, good) == list(range(8))
            with pytest.raises(HandlerError, match="ValueError: this is poison"):
                await values(client, bad)

    run(main())
    assert "its requests are run one by one" in engine.log
    assert engine.stop() == 0
    assert "9 requests served, 1 failed" in engine.log


def test_a_request_that_its_handler_never_finishes_fails(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            good, bad = await send(client, ["one", POISON])
            assert await values(client, good) == ["one"]
            with pytest.raises(HandlerError, match="ended without having finished it"):
                await values(client, bad)

    with engine_here(place, Forgetful()):
        run(main())


def test_a_result_that_can_t_be_encoded_is_the_failure_of_its_request_alone(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(handler=f"{HANDLERS}:Unsendable")

    async def main() -> None:
        async with client_of(place) as client:
            engine.pause()
            before, bad, after = await send(client, ["before", POISON, "after"])
            engine.go_on()
            assert await answers(client, [before, after]) == ["before", "after"]
            with pytest.raises(HandlerError, match="its result can't be sent"):
                await values(client, bad)
            assert await answers(client, await send(client, ["later"])) == ["later"]

    run(main())


def test_a_command_that_there_is_not_is_answered_with_those_that_there_are(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            with pytest.raises(ControlError, match="there is no command 'fly'; this engine has ping, status"):
                await client.control("fly")
            with pytest.raises(ControlError, match="ping: TypeError"):
                await client.control("ping", {"how": "often"})
            assert await client.control("ping") == "pong"

    with engine_here(place):
        run(main())


def test_too_many_choices_are_refused(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            request_id = await client.send_task("task", choices=1025)
            with pytest.raises(InvalidRequestError, match="1 to 1024 choices; this one asks for 1025"):
                await values(client, request_id)
            assert await values(client, await client.send_task("task", choices=1024)) == ["task"] * 1024

    with engine_here(place):
        run(main())


def test_requests_beyond_those_that_may_wait_are_refused_and_the_others_answered(place: Place) -> None:
    async def main() -> None:
        async with client_of(place) as client:
            outcomes: list[Any] = []
            for request_id in await send(client, range(12)):
                try:
                    outcomes += await values(client, request_id)
                except RefusedError:
                    outcomes.append("refused")
            # One runs and two wait, at least: the others came all at once.
            answered = [outcome for outcome in outcomes if outcome != "refused"]
            assert 2 <= len(answered) < 12
            assert all(outcomes[number] == number for number in answered)

    with engine_here(place, Echo(0.2), max_waiting=2, max_batch=1):
        run(main())


# -- ends -------------------------------------------------------------------------------------------------------------


def served(log: str) -> int:
    """How many requests an engine says it has served; none of them may have failed."""
    found = re.search(r"engine: (\d+) requests served, 0 failed", log)
    assert found is not None, log
    return int(found[1])


def test_an_engine_that_is_told_to_end_under_load_finishes_what_it_took_and_the_next_one_does_the_rest(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(max_batch=4, arguments={"step_seconds": 0.01})

    async def main() -> None:
        async with client_of(place) as client:
            sent: list[str] = []
            told = False
            while not engine.ended:
                if client.unanswered < 32:
                    sent.append(await client.send_task(len(sent)))
                elif len(sent) > 100 and not told:
                    told = True
                    engine.terminate()
                else:
                    await asyncio.sleep(0.001)
            assert engine.wait() == 0
            assert "left to the next engine" not in engine.log
            second = await asyncio.to_thread(start_engine)
            assert await answers(client, sent) == list(range(len(sent)))
            # Nobody did anything twice.
            assert client.repeated == client.strays == 0
        assert second.stop() == 0
        assert served(engine.log) + served(second.log) == len(sent)

    run(main())
    assert names(segments_of(place)) == []
    assert place.files() == []


def test_what_is_not_finished_in_time_is_handed_over_and_answered_by_the_next_engine(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(max_batch=1, drain=0.2, arguments={"step_seconds": 1.0})

    async def main() -> None:
        async with client_of(place) as client:
            # One that the engine holds views of when it ends, and small ones.
            sent = await send(client, [[number, np.zeros(100_000 if number < 2 else 10)] for number in range(12)])
            await soon(lambda: engine.word(Gauge.RECEIVED) == 12, "all were taken")
            assert await asyncio.to_thread(engine.stop) == 0
            assert "requests are not finished; they are left to the next engine" in engine.log
            assert "; the rest is left to the next engine" in engine.log
            second = await asyncio.to_thread(start_engine)
            assert [number for number, _ in await answers(client, sent)] == list(range(12))
        assert second.stop() == 0

    run(main())
    assert names(segments_of(place)) == []
    assert place.files() == []


def test_what_is_left_of_clients_that_are_gone_goes_with_the_next_engine(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(max_batch=1, drain=0.1, arguments={"step_seconds": 0.2})

    async def main() -> None:
        async with client_of(place) as client:
            sent = await send(client, range(20))
            assert await values(client, sent[0]) == [0]
            assert await asyncio.to_thread(engine.stop) == 0

    run(main())
    assert names(segments_of(place)) != []
    second = start_engine()
    eventually(lambda: names(segments_of(place) + place.queue) == reply_rings(place) == [], "nothing was left")
    assert second.stop() == 0
    assert names(segments_of(place)) == []
    assert place.files() == []


def test_an_engine_whose_handler_is_gone_ends_and_its_requests_are_the_next_one_s(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(handler=f"{HANDLERS}:Leaving")

    async def main() -> None:
        async with client_of(place) as client:
            sent = await send(client, [1, POISON, 2])
            assert await asyncio.to_thread(engine.wait) == 1
            assert "the handler's thread has ended" in engine.log
            await asyncio.to_thread(start_engine)
            assert await answers(client, sent) == [1, POISON, 2]

    run(main())


# -- what dies --------------------------------------------------------------------------------------------------------


def ask(connection: Connection, place: Place) -> None:
    """Send more than there is time for, say when the first is answered, and wait to be killed."""

    async def main() -> None:
        async with client_of(place) as client:
            sent = await send(client, [[number, np.zeros(2000)] for number in range(40)])
            await values(client, sent[0])
            connection.send("answered")
            await asyncio.to_thread(connection.recv)

    asyncio.run(main())


def test_the_requests_of_a_client_that_is_killed_are_aborted_and_its_rings_removed_while_the_engine_lives_on(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(max_batch=1, arguments={"step_seconds": 0.2})
    with Child(ask, place) as child:
        assert child.hear() == "answered"
        assert len(reply_rings(place)) == 1
        child.kill()
    eventually(lambda: sum(map(engine.word, (Gauge.FINISHED, Gauge.FAILED))) == 40, "nothing waits any more")
    assert engine.word(Gauge.FAILED) > 0
    assert engine.word(Gauge.RECEIVE_ERRORS) == 0
    eventually(lambda: engine.word(Gauge.WAITING) + engine.word(Gauge.RUNNING) == 0, "it has nothing to do any more")
    eventually(lambda: len(names(segments_of(place))) == 1, "the board alone was left")

    async def main() -> None:
        async with client_of(place) as client:
            assert await answers(client, await send(client, ["of another client"])) == ["of another client"]

    run(main())
    assert engine.stop() == 0
    assert names(segments_of(place)) == []
    assert place.files() == []


def test_a_request_that_kills_its_engine_is_answered_with_a_failure_after_three_deaths(
    place: Place, start_engine: StartEngine
) -> None:
    first = start_engine(handler=f"{HANDLERS}:Deadly")

    async def main() -> None:
        async with client_of(place) as client:
            assert await answers(client, await send(client, ["before"])) == ["before"]
            bad = await client.send_task(POISON)
            assert await asyncio.to_thread(first.wait) == -signal.SIGKILL
            for _ in range(2):
                engine = await asyncio.to_thread(start_engine, handler=f"{HANDLERS}:Deadly")
                assert await asyncio.to_thread(engine.wait) == -signal.SIGKILL
            last = await asyncio.to_thread(start_engine, handler=f"{HANDLERS}:Deadly")
            with pytest.raises(HandlerError, match="3 engines died while they were at work on it"):
                await values(client, bad)
            assert await answers(client, await send(client, ["after"])) == ["after"]
            # It is not kept for anybody.
            await client.links[0].producer.flush()
        assert last.stop() == 0

    run(main())
    assert names(segments_of(place)) == []
    assert place.files() == []


def test_a_request_that_kills_its_engine_takes_no_other_with_it(place: Place, start_engine: StartEngine) -> None:
    engine = start_engine(handler=f"{HANDLERS}:Deadly")

    async def main() -> None:
        async with client_of(place) as client:
            engine.pause()
            before = await send(client, range(5))
            bad = await client.send_task(POISON)
            after = await send(client, range(5, 20))
            engine.go_on()
            assert await asyncio.to_thread(engine.wait) == -signal.SIGKILL
            for _ in range(2):
                again = await asyncio.to_thread(start_engine, handler=f"{HANDLERS}:Deadly")
                assert await asyncio.to_thread(again.wait) == -signal.SIGKILL
            await asyncio.to_thread(start_engine, handler=f"{HANDLERS}:Deadly")
            assert await answers(client, before + after) == list(range(20))
            with pytest.raises(HandlerError, match="3 engines died while they were at work on it"):
                await values(client, bad)

    run(main())


def test_requests_that_waited_in_three_engines_that_were_killed_are_answered_by_the_fourth(
    place: Place, start_engine: StartEngine
) -> None:
    slow: dict[str, Any] = {"max_batch": 1, "arguments": {"step_seconds": 0.2}}

    async def main(engine: EngineProcess) -> None:
        async with client_of(place) as client:
            sent = await send(client, range(20))
            for _ in range(3):
                before = client.unanswered
                await soon(lambda before=before: client.unanswered < before, "one more was answered")
                engine.kill()
                engine = await asyncio.to_thread(start_engine, **slow)
            assert await answers(client, sent) == list(range(20))

    run(main(start_engine(**slow)))


def test_what_is_no_call_is_given_back_at_once(place: Place, start_engine: StartEngine) -> None:
    engine = start_engine()
    producer = place.producer()
    producer.put(b"not a call")
    eventually(lambda: engine.word(Gauge.RECEIVE_ERRORS) == 1, "it was counted")
    producer.flush(timeout=20)


def test_an_engine_that_gets_much_that_is_no_call_is_not_taken_for_dead(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine()
    producer = place.producer()
    producer.put_many([{"not": "a call"}] * 12)
    states = set()

    def counted() -> bool:
        view.look()
        states.add(view.state)
        return view.word(Gauge.RECEIVE_ERRORS) == 12

    with closing(engine.view) as view:
        eventually(counted, "all were counted")
    assert states == {"serving"}


def test_a_client_that_is_killed_leaves_no_socket_or_lock_once_its_engine_has_noticed(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine(max_batch=1, arguments={"step_seconds": 0.2})
    with Child(ask, place) as child:
        assert child.hear() == "answered"
        child.kill()
    eventually(lambda: len(names(segments_of(place))) == 1, "the board alone was left")
    assert engine.stop() == 0
    assert place.files() == []


def test_a_request_that_names_another_queue_for_its_replies_does_it_no_harm(
    place: Place, start_engine: StartEngine
) -> None:
    engine = start_engine()
    with Producer("somebody", **place.where) as other:
        other.put("kept for somebody")
        with place.producer() as producer:
            producer.put(Request("r", "somebody", "not for them"))
            producer.flush()
        assert engine.word(Gauge.FINISHED) == 1
        assert engine.stop() == 0
        with Consumer("somebody", **place.where) as consumer:
            assert [message.detach() for message in consumer.get_many()] == ["kept for somebody"]


def test_who_looks_sees_whether_an_engine_turns_stands_or_is_gone(place: Place, start_engine: StartEngine) -> None:
    def state() -> str:
        view.look()
        return view.state

    with closing(EngineView(place.queue, **place.where)) as view:
        assert state() == "absent"
        engine = start_engine()
        assert state() == "serving"
        assert (view.alive, view.pid) == (True, engine.pid)
        engine.pause()
        eventually(lambda: state() == "stale", "it stood")
        assert (view.alive, view.serving, view.pid) == (True, False, engine.pid)
        engine.go_on()
        eventually(lambda: state() == "serving", "it turned again")
        engine.kill()
        assert state() == "absent"
        assert (view.alive, view.pid, view.load) == (False, None, 0)
        second = start_engine()
        assert state() == "serving"
        assert view.pid == second.pid
        assert second.stop() == 0
        assert state() == "absent"
    assert names(segments_of(place)) == []
    assert place.files() == []
