"""The two drivers of steps: a thread and an event loop."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fmq.doorbell import Nudge, wait_readable
from fmq.waiting import LoopWaiter, Steps, deadline_of, run, run_async
from tests.queues import Run, eventually, runner_fixture, soon  # noqa: F401


@pytest.fixture
def nudge() -> Iterator[Nudge]:
    nudge = Nudge()
    yield nudge
    nudge.close()


class ExpiredError(Exception):
    pass


class Script:
    """Steps that do what they are told, and remember whether they were closed."""

    def __init__(self, *steps: Callable[[], None] | None, result: str = "result") -> None:
        self.steps = steps
        self.result = result
        self.taken = 0
        self.closed = 0

    def __call__(self) -> Steps[str]:
        try:
            for step in self.steps:
                self.taken += 1
                yield step
            return self.result
        finally:
            self.closed += 1


def test_no_timeout_is_no_deadline() -> None:
    assert deadline_of(None) == math.inf


def test_a_deadline_is_a_timeout_from_now() -> None:
    before = time.monotonic()
    assert before + 5 <= deadline_of(5) <= time.monotonic() + 5


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf])
def test_a_timeout_that_is_none_is_refused_and_named(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"this one is {timeout!r}"):
        deadline_of(timeout)


# -- in a thread ------------------------------------------------------------------------------------------------------


def test_steps_that_need_no_wait_give_their_result_at_once() -> None:
    script = Script()
    assert run(script(), [], 0, 1, ExpiredError) == "result"
    assert script.closed == 1


def test_work_is_done_where_the_steps_are_driven_and_after_the_deadline_too() -> None:
    threads: list[int] = []
    script = Script(*[lambda: threads.append(threading.get_ident())] * 3)
    assert run(script(), [], 0, 1, ExpiredError) == "result"
    assert threads == [threading.get_ident()] * 3


def test_steps_that_still_wait_at_the_deadline_are_closed_and_the_error_raised(nudge: Nudge) -> None:
    script = Script(*[None] * 1000)
    with pytest.raises(ExpiredError):
        run(script(), [nudge.fileno()], deadline_of(0), 1, ExpiredError)
    assert (script.taken, script.closed) == (1, 1)
    script = Script(*[None] * 1000)
    with pytest.raises(ExpiredError):
        run(script(), [nudge.fileno()], deadline_of(0.02), 0.005, ExpiredError)
    assert script.closed == 1
    assert 2 < script.taken < 50


def test_a_wait_ends_when_a_descriptor_becomes_readable(nudge: Nudge) -> None:
    script = Script(None, nudge.clear, None)
    nudge.set()
    timer = threading.Timer(0.01, nudge.set)
    timer.start()
    assert run(script(), [nudge.fileno()], math.inf, 3600, ExpiredError) == "result"
    timer.join()


def test_a_wait_is_never_longer_than_the_recheck(nudge: Nudge) -> None:
    assert run(Script(None, None, None)(), [nudge.fileno()], math.inf, 0.001, ExpiredError) == "result"


def test_an_error_of_a_step_closes_the_steps_and_comes_through() -> None:
    def fail() -> None:
        raise KeyError("work")

    script = Script(fail, None)
    with pytest.raises(KeyError, match="work"):
        run(script(), [], math.inf, 1, ExpiredError)
    assert (script.taken, script.closed) == (1, 1)


def test_a_nudge_that_was_closed_can_still_be_set() -> None:
    nudge = Nudge()
    nudge.close()
    nudge.close()
    nudge.set()


def test_nudges_add_up_to_one_and_are_taken_together(nudge: Nudge) -> None:
    for _ in range(5):
        nudge.set()
    wait_readable([nudge.fileno()], 3600)
    nudge.clear()
    nudge.clear()
    before = time.monotonic()
    wait_readable([nudge.fileno()], 0.01)
    assert time.monotonic() - before > 0.005


# -- in an event loop -------------------------------------------------------------------------------------------------


def test_in_a_loop_steps_give_their_result(runner: Run, nudge: Nudge) -> None:
    async def main() -> None:
        waiter = LoopWaiter([nudge.fileno()])
        script = Script(None, None)
        assert await run_async(script(), waiter, math.inf, 0.001, ExpiredError) == "result"
        assert script.closed == 1
        assert not asyncio.get_running_loop().remove_reader(nudge.fileno())

    runner(main())


def test_in_a_loop_the_deadline_closes_the_steps_and_raises(runner: Run, nudge: Nudge) -> None:
    async def main() -> None:
        waiter = LoopWaiter([nudge.fileno()])
        for timeout in (0, 0.02):
            script = Script(*[None] * 1000)
            with pytest.raises(ExpiredError):
                await run_async(script(), waiter, deadline_of(timeout), 0.005, ExpiredError)
            assert script.closed == 1

    runner(main())


def test_in_a_loop_work_without_an_executor_is_done_in_place(runner: Run) -> None:
    threads: list[int] = []
    script = Script(lambda: threads.append(threading.get_ident()))
    assert runner(run_async(script(), LoopWaiter([]), math.inf, 1, ExpiredError)) == "result"
    assert threads == [threading.get_ident()]


def test_in_a_loop_long_work_leaves_for_the_executor(runner: Run) -> None:
    threads: list[int] = []
    script = Script(lambda: threads.append(threading.get_ident()))
    with ThreadPoolExecutor(1) as pool:
        assert runner(run_async(script(), LoopWaiter([]), math.inf, 1, ExpiredError, lambda: pool)) == "result"
    assert threads[0] != threading.get_ident()


def test_in_a_loop_an_error_in_the_executor_closes_the_steps_and_comes_through(runner: Run) -> None:
    def fail() -> None:
        raise KeyError("work")

    script = Script(fail)
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError, match="work"):
        runner(run_async(script(), LoopWaiter([]), math.inf, 1, ExpiredError, lambda: pool))
    assert script.closed == 1


def test_cancelling_a_wait_closes_the_steps_at_once(runner: Run, nudge: Nudge) -> None:
    async def main() -> None:
        waiter = LoopWaiter([nudge.fileno()])
        script = Script(None)
        task = asyncio.create_task(run_async(script(), waiter, math.inf, 3600, ExpiredError))
        await soon(lambda: script.taken, "the steps began")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert script.closed == 1
        assert not asyncio.get_running_loop().remove_reader(nudge.fileno())

    runner(main())


def test_cancelling_during_a_copy_closes_the_steps_when_the_copy_is_over_and_not_before(runner: Run) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert go_on.wait(20)

    script = Script(copy, None)

    async def main() -> None:
        task = asyncio.create_task(run_async(script(), LoopWaiter([]), math.inf, 1, ExpiredError, lambda: pool))
        await soon(begun.is_set, "the copy began")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert script.closed == 0
        go_on.set()
        await soon(lambda: script.closed, "the steps were closed")

    with ThreadPoolExecutor(1) as pool:
        runner(main())
    assert script.taken == 1


def test_a_loop_that_ends_during_a_copy_closes_the_steps_without_a_word(
    runner: Run, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert go_on.wait(20)

    script = Script(copy, None)

    async def main() -> None:
        asyncio.create_task(run_async(script(), LoopWaiter([]), math.inf, 1, ExpiredError, lambda: pool))  # noqa: RUF006
        await soon(begun.is_set, "the copy began")

    with ThreadPoolExecutor(1) as pool:
        runner(main())
        assert script.closed == 0
        go_on.set()
        eventually(lambda: script.closed, "the steps were closed")
    assert [record.getMessage() for record in caplog.records] == []


def test_all_tasks_that_wait_are_woken_by_one_descriptor(runner: Run) -> None:
    read, write = os.pipe()

    async def main() -> None:
        waiter = LoopWaiter([read])
        tasks = [asyncio.create_task(waiter.wait(3600)) for _ in range(5)]
        await asyncio.sleep(0.005)
        os.write(write, b"x")
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert not asyncio.get_running_loop().remove_reader(read)

    try:
        runner(main())
    finally:
        os.close(read)
        os.close(write)


def test_a_waiter_serves_one_loop_after_another_though_the_first_ended_in_the_middle(runner: Run, nudge: Nudge) -> None:
    waiter = LoopWaiter([nudge.fileno()])

    async def leave() -> None:
        asyncio.create_task(waiter.wait(3600))  # noqa: RUF006
        await asyncio.sleep(0)

    async def stay() -> None:
        asyncio.get_running_loop().call_later(0.005, nudge.set)
        await asyncio.wait_for(waiter.wait(3600), 20)

    for _ in range(3):
        runner(leave())
        runner(stay())
        nudge.clear()


def test_a_loop_that_was_never_closed_does_not_keep_the_next_one_from_waking(nudge: Nudge) -> None:
    waiter = LoopWaiter([nudge.fileno()])
    left = asyncio.new_event_loop()
    task = left.create_task(waiter.wait(3600))
    left.run_until_complete(asyncio.sleep(0))

    async def stay() -> None:
        asyncio.get_running_loop().call_later(0.005, nudge.set)
        await asyncio.wait_for(waiter.wait(3600), 20)

    asyncio.run(stay())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        left.run_until_complete(task)
    left.close()


def test_tasks_of_loops_in_several_threads_are_all_woken_by_one_descriptor() -> None:
    read, write = os.pipe()
    waiter = LoopWaiter([read])
    waiting = threading.Barrier(5)

    async def stay() -> None:
        task = asyncio.create_task(waiter.wait(3600))
        await asyncio.sleep(0)
        await asyncio.to_thread(waiting.wait, 20)
        await asyncio.wait_for(task, 20)

    try:
        with ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(asyncio.run, stay()) for _ in range(4)]
            waiting.wait(20)
            os.write(write, b"x")
            for task in tasks:
                task.result(20)
    finally:
        os.close(read)
        os.close(write)


def test_what_is_to_be_done_when_idle_is_done_once_when_no_loop_waits_any_more(nudge: Nudge) -> None:
    waiter = LoopWaiter([nudge.fileno()])
    waiting = threading.Barrier(4)
    idle: list[int] = []

    async def stay() -> None:
        task = asyncio.create_task(waiter.wait(3600))
        await asyncio.sleep(0)
        await asyncio.to_thread(waiting.wait, 20)
        await asyncio.wait_for(task, 20)

    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(asyncio.run, stay()) for _ in range(3)]
        waiting.wait(20)
        waiter.close(lambda: idle.append(1))
        for task in tasks:
            task.result(20)
    assert idle == [1]


def test_a_timeout_that_is_no_number_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"number of seconds, or None.*'soon'"):
        deadline_of("soon")  # type: ignore[arg-type]
