"""Batches in turn: order, limits, ends and failures of the BatchScheduler."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine.errors import SchedulerError
from engine.scheduling import BatchScheduler
from engine.tasks import Result, Task
from fmq.calls import Output
from tests.queues import DEADLINE_S, eventually

Steps = Iterator[Sequence[Result]]
Run = Callable[[Sequence[Task]], Steps]


class Handler:
    """Does what it is told to, while the gate is open, and remembers its batches and those that came to their end."""

    def __init__(self, run: Run | None = None, *, gate: bool = True) -> None:
        self._run = run or say_inputs
        self.gate = threading.Event()
        if gate:
            self.gate.set()
        self.batches: list[list[str]] = []
        self.ended = 0

    def run(self, tasks: Sequence[Task]) -> Steps:
        self.batches.append([task.request_id for task in tasks])
        try:
            pass_gate(self.gate)
            yield from self._run(tasks)
        finally:
            self.ended += 1


def pass_gate(gate: threading.Event) -> None:
    if not gate.wait(DEADLINE_S):
        raise TimeoutError("the test did not open the gate")


def say_inputs(tasks: Sequence[Task]) -> Steps:
    """One step for all, in which each is answered with its inputs."""
    yield [task.output(task.inputs) for task in tasks]


def fail_if_bad(tasks: Sequence[Task]) -> Steps:
    """As ``say_inputs``; an error if one of them is called "bad"."""
    if any(task.request_id == "bad" for task in tasks):
        raise ValueError("what a bad one")
    yield from say_inputs(tasks)


class Bench:
    """Makes schedulers, and ends them."""

    def __init__(self) -> None:
        self._made: list[tuple[BatchScheduler, Handler]] = []

    def __call__(self, handler: Handler, **options: Any) -> BatchScheduler:
        scheduler = BatchScheduler(handler, **options)
        self._made.append((scheduler, handler))
        return scheduler

    def held(self, handler: Handler, **options: Any) -> tuple[BatchScheduler, Task]:
        """A scheduler whose handler stands before its gate, and has a task, "first"."""
        handler.gate.clear()
        scheduler = self(handler, **options)
        first = Task("first", 0)
        scheduler.put_requests([first])
        eventually(lambda: handler.batches, "the handler has the first task")
        return scheduler, first

    def close(self) -> None:
        for scheduler, handler in self._made:
            handler.gate.set()
            scheduler.close(DEADLINE_S)


@pytest.fixture(name="make")
def make_fixture() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def tasks_of(*names: str) -> list[Task]:
    return [Task(name, f"{name}'s") for name in names]


def next_outputs(scheduler: BatchScheduler) -> list[Output]:
    """What comes out next."""
    return [result.output for result in scheduler.get_results(DEADLINE_S)]


def rest(scheduler: BatchScheduler) -> list[Output]:
    """Let it finish all that it has, and return what comes out until the end."""
    scheduler.close(DEADLINE_S)
    results: list[Result] = []
    with contextlib.suppress(SchedulerError):
        while more := scheduler.get_results(0):
            results += more
    return [result.output for result in results]


def run(scheduler: BatchScheduler, *tasks: Task) -> list[Output]:
    """Put these, and return all that comes of them."""
    scheduler.put_requests(tasks)
    return rest(scheduler)


def values(outputs: Sequence[Output]) -> list[tuple[str, Any]]:
    """Name and value of each, or name and kind of its failure."""
    return [(output.request_id, output.failure.kind if output.failure else output.value) for output in outputs]


# -- order and batches ------------------------------------------------------------------------------------------------


def test_tasks_are_run_and_answered_in_the_order_in_which_they_were_put(make: Bench) -> None:
    handler = Handler()
    scheduler = make(handler, max_batch=1)
    names = [f"r{index}" for index in range(50)]
    scheduler.put_requests(tasks_of(*names[:20]))
    outputs = run(scheduler, *tasks_of(*names[20:]))
    assert handler.batches == [[name] for name in names]
    assert values(outputs) == [(name, f"{name}'s") for name in names]


def test_a_batch_is_all_that_waits_up_to_max_batch(make: Bench) -> None:
    handler = Handler()
    scheduler, _ = make.held(handler, max_batch=3)
    scheduler.put_requests(tasks_of("a", "b", "c", "d"))
    handler.gate.set()
    assert len(run(scheduler, *tasks_of("e", "f", "g"))) == 8
    assert handler.batches == [["first"], ["a", "b", "c"], ["d", "e", "f"], ["g"]]


def test_a_task_alone_does_not_wait_for_others(make: Bench) -> None:
    scheduler = make(Handler(), max_batch=8)
    scheduler.put_requests(tasks_of("a"))
    assert values(next_outputs(scheduler)) == [("a", "a's")]


def test_each_step_comes_out_before_the_handler_takes_the_next(make: Bench) -> None:
    gate = threading.Event()

    def two_steps(tasks: Sequence[Task]) -> Steps:
        yield [task.output(1, finished=False) for task in tasks]
        pass_gate(gate)
        yield [task.output(2) for task in tasks]

    scheduler = make(Handler(two_steps))
    scheduler.put_requests(tasks_of("a"))
    assert next_outputs(scheduler) == [Output("a", 0, 0, 1, False)]
    gate.set()
    assert next_outputs(scheduler) == [Output("a", 0, 1, 2, True)]


def test_a_handler_may_return_its_step_in_a_list(make: Bench) -> None:
    class Plain(Handler):
        def run(self, tasks: Sequence[Task]) -> Any:
            return [tuple(task.output(task.inputs) for task in tasks)]

    assert values(run(make(Plain()), *tasks_of("a", "b"))) == [("a", "a's"), ("b", "b's")]


def test_no_results_within_the_timeout_are_none(make: Bench) -> None:
    handler = Handler()
    scheduler, _ = make.held(handler)
    assert scheduler.get_results(0) == []
    assert scheduler.get_results(0.01) == []
    handler.gate.set()
    assert values(next_outputs(scheduler)) == [("first", 0)]


def test_results_have_the_task_that_was_put_and_say_which_is_its_last(make: Bench) -> None:
    task = Task("a", "x", choices=2)

    def both(tasks: Sequence[Task]) -> Steps:
        yield [tasks[0].output("x", choice=choice) for choice in (1, 0)]

    scheduler = make(Handler(both))
    scheduler.put_requests([task])
    results = scheduler.get_results(DEADLINE_S)
    assert [(result.task is task, result.output.choice, result.last) for result in results] == [
        (True, 1, False),
        (True, 0, True),
    ]


def test_the_load_is_how_many_wait_and_how_many_run(make: Bench) -> None:
    handler = Handler()
    scheduler, _ = make.held(handler, max_batch=2)
    assert scheduler.load() == (0, 1)
    scheduler.put_requests(tasks_of("a", "b", "c"))
    assert scheduler.load() == (3, 1)
    handler.gate.set()
    eventually(lambda: scheduler.load() == (0, 0), "nothing is left to do")


@pytest.mark.parametrize("name", ["max_batch", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None])
def test_a_number_of_tasks_that_is_none_is_refused_and_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} .*; this one is {value!r}"):
        BatchScheduler(Handler(), **{name: value})


# -- too many ---------------------------------------------------------------------------------------------------------


def test_more_than_max_waiting_are_refused_at_once_and_the_others_run(make: Bench) -> None:
    handler = Handler()
    scheduler, _ = make.held(handler, max_waiting=2)
    scheduler.put_requests([*tasks_of("a", "b", "c"), Task("d", None, choices=2)])
    refused = next_outputs(scheduler)
    assert [(output.request_id, output.choice) for output in refused] == [("c", 0), ("d", 0), ("d", 1)]
    assert all(output.failure and output.failure.kind == "refused" for output in refused)
    assert refused[0].failure is not None
    assert "2 requests wait already" in refused[0].failure.message
    handler.gate.set()
    assert values(rest(scheduler)) == [("first", 0), ("a", "a's"), ("b", "b's")]
    assert handler.batches == [["first"], ["a", "b"]]


def test_what_runs_does_not_count_as_waiting(make: Bench) -> None:
    handler = Handler()
    scheduler, _ = make.held(handler, max_waiting=1)
    scheduler.put_requests(tasks_of("a"))
    assert scheduler.load() == (1, 1)
    assert scheduler.get_results(0) == []
    handler.gate.set()
    eventually(lambda: scheduler.load() == (0, 0), "nothing is left to do")
    assert values(run(scheduler, *tasks_of("b"))) == [("first", 0), ("a", "a's"), ("b", "b's")]


# -- aborts and deadlines ---------------------------------------------------------------------------------------------


def test_a_task_that_is_aborted_while_it_waits_fails_at_once_and_is_never_run(make: Bench) -> None:
    handler = Handler()
    scheduler, _ = make.held(handler)
    a, b, c = tasks_of("a", "b", "c")
    scheduler.put_requests([a, b, c])
    scheduler.abort(b)
    assert values(next_outputs(scheduler)) == [("b", "aborted")]
    assert b.finished
    assert scheduler.load() == (2, 1)
    handler.gate.set()
    assert values(rest(scheduler)) == [("first", 0), ("a", "a's"), ("c", "c's")]
    assert handler.batches == [["first"], ["a", "c"]]


def test_a_task_that_is_aborted_while_it_runs_fails_at_once_and_the_rest_of_its_batch_goes_on(make: Bench) -> None:
    gate = threading.Event()

    def two_steps(tasks: Sequence[Task]) -> Steps:
        yield [task.output(1, finished=False) for task in tasks]
        pass_gate(gate)
        yield [task.output(2) for task in tasks if not task.cancelled]

    handler = Handler(two_steps)
    scheduler = make(handler)
    a, b = tasks_of("a", "b")
    scheduler.put_requests([a, b])
    assert values(next_outputs(scheduler)) == [("a", 1), ("b", 1)]
    scheduler.abort(a)
    (aborted,) = next_outputs(scheduler)
    assert aborted.failure is not None
    assert (aborted.step, aborted.finished, aborted.failure.kind) == (1, True, "aborted")
    assert a.cancelled
    gate.set()
    assert rest(scheduler) == [Output("b", 0, 1, 2, True)]
    assert handler.batches == [["a", "b"]]


def test_a_handler_that_goes_on_with_an_aborted_task_is_not_heard(make: Bench) -> None:
    gate = threading.Event()

    def two_steps(tasks: Sequence[Task]) -> Steps:
        yield [tasks[0].output(1, finished=False)]
        pass_gate(gate)
        yield [tasks[0].output(2)]

    scheduler = make(Handler(two_steps))
    (task,) = tasks_of("a")
    scheduler.put_requests([task])
    assert values(next_outputs(scheduler)) == [("a", 1)]
    scheduler.abort(task)
    gate.set()
    assert values(run(scheduler, *tasks_of("b"))) == [("a", "aborted"), ("b", 1), ("b", 2)]


def test_a_task_is_aborted_once(make: Bench) -> None:
    handler = Handler()
    scheduler, _ = make.held(handler)
    (task,) = tasks_of("a")
    scheduler.put_requests([task])
    for _ in range(3):
        scheduler.abort(task)
    handler.gate.set()
    assert values(rest(scheduler)) == [("a", "aborted"), ("first", 0)]


def test_a_task_that_is_finished_can_be_aborted_without_effect(make: Bench) -> None:
    scheduler = make(Handler())
    (task,) = tasks_of("a")
    scheduler.put_requests([task])
    assert values(next_outputs(scheduler)) == [("a", "a's")]
    scheduler.abort(task)
    assert rest(scheduler) == []


def test_a_handler_is_closed_once_all_its_tasks_are_aborted(make: Bench) -> None:
    steps = threading.Semaphore(0)

    def endless(tasks: Sequence[Task]) -> Steps:
        while True:
            yield [task.output(0, finished=False) for task in tasks if not task.cancelled]
            steps.acquire(timeout=DEADLINE_S)

    handler = Handler(endless)
    scheduler = make(handler)
    a, b = tasks_of("a", "b")
    scheduler.put_requests([a, b])
    assert values(next_outputs(scheduler)) == [("a", 0), ("b", 0)]
    scheduler.abort(a)
    steps.release()
    assert values(next_outputs(scheduler)) == [("a", "aborted")]
    assert values(next_outputs(scheduler)) == [("b", 0)]
    assert handler.ended == 0
    scheduler.abort(b)
    steps.release()
    eventually(lambda: handler.ended, "the handler was closed")


def test_a_task_whose_time_is_over_before_it_is_run_fails_alone(make: Bench) -> None:
    handler = Handler()
    late = Task("late", None, choices=2, deadline_ns=1)
    early = Task("early", "in time", deadline_ns=time.monotonic_ns() + 3600 * 10**9)
    outputs = run(make(handler), late, early)
    assert values(outputs) == [("late", "deadline"), ("late", "deadline"), ("early", "in time")]
    assert handler.batches == [["early"]]


def test_a_handler_is_not_called_for_a_batch_in_which_all_are_late(make: Bench) -> None:
    handler = Handler()
    outputs = run(make(handler), Task("a", None, deadline_ns=1), Task("b", None, deadline_ns=1))
    assert values(outputs) == [("a", "deadline"), ("b", "deadline")]
    assert handler.batches == []


def test_a_task_whose_time_is_over_while_it_runs_fails_and_the_others_go_on(make: Bench) -> None:
    def three_steps(tasks: Sequence[Task]) -> Steps:
        for step in range(3):
            yield [task.output(step, finished=step == 2) for task in tasks if not task.cancelled]
            if step == 0:
                tasks[0].deadline_ns = 1
                yield []

    handler = Handler(three_steps)
    outputs = run(make(handler), *tasks_of("late", "other"))
    assert values(outputs) == [("late", 0), ("other", 0), ("late", "deadline"), ("other", 1), ("other", 2)]
    assert handler.batches == [["late", "other"]]


def test_a_handler_is_closed_once_the_time_of_all_its_tasks_is_over(make: Bench) -> None:
    def endless(tasks: Sequence[Task]) -> Steps:
        yield [tasks[0].output(0, finished=False)]
        tasks[0].deadline_ns = 1
        while True:
            yield []

    handler = Handler(endless)
    assert values(run(make(handler), *tasks_of("a"))) == [("a", 0), ("a", "deadline")]
    assert handler.ended == 1


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_batch_that_fails_is_run_again_one_by_one_and_only_the_guilty_one_fails(make: Bench) -> None:
    handler = Handler(fail_if_bad)
    outputs = run(make(handler), *tasks_of("a", "bad", "c"))
    assert handler.batches == [["a", "bad", "c"], ["a"], ["bad"], ["c"]]
    assert values(outputs) == [("a", "a's"), ("bad", "handler"), ("c", "c's")]
    assert outputs[1].failure is not None
    assert outputs[1].failure.message == "ValueError: what a bad one"


def test_the_scheduler_goes_on_after_a_failure(make: Bench) -> None:
    handler = Handler(fail_if_bad)
    scheduler = make(handler)
    for _ in range(3):
        scheduler.put_requests(tasks_of("bad"))
        assert values(next_outputs(scheduler)) == [("bad", "handler")]
    assert values(run(scheduler, *tasks_of("a"))) == [("a", "a's")]
    assert handler.batches == [["bad"]] * 3 + [["a"]]


def test_those_that_were_answered_before_their_batch_failed_are_not_run_again(make: Bench) -> None:
    def one_by_one(tasks: Sequence[Task]) -> Steps:
        for task in tasks:
            yield from fail_if_bad([task])

    handler = Handler(one_by_one)
    outputs = run(make(handler), *tasks_of("a", "bad", "c"))
    assert handler.batches == [["a", "bad", "c"], ["bad"], ["c"]]
    assert values(outputs) == [("a", "a's"), ("bad", "handler"), ("c", "c's")]


def test_what_is_run_again_passes_on_each_step_once(make: Bench) -> None:
    def fail_after_a_step(tasks: Sequence[Task]) -> Steps:
        yield [task.output("begins", finished=False) for task in tasks]
        yield from fail_if_bad(tasks)

    outputs = run(make(Handler(fail_after_a_step)), *tasks_of("a", "bad"))
    assert [(output.request_id, output.step, output.finished) for output in outputs] == [
        ("a", 0, False),
        ("bad", 0, False),
        ("a", 1, True),
        ("bad", 1, True),
    ]
    assert values(outputs)[2:] == [("a", "a's"), ("bad", "handler")]


def test_a_result_of_the_step_that_failed_is_not_lost(make: Bench) -> None:
    def make_all_then_fail(tasks: Sequence[Task]) -> Steps:
        step = []
        for task in tasks:
            if task.request_id == "bad":
                raise ValueError("what a bad one")
            step.append(task.output(f"{task.request_id}'s"))
        yield step

    outputs = run(make(Handler(make_all_then_fail)), *tasks_of("a", "bad", "c"))
    assert sorted(values(outputs)) == [("a", "a's"), ("bad", "handler"), ("c", "c's")]


def test_results_that_were_made_ahead_all_come(make: Bench) -> None:
    def ahead(tasks: Sequence[Task]) -> list[list[Result]]:
        steps: list[list[Result]] = [[], [], []]
        for task in tasks:
            steps[1].append(task.output(1, finished=False))
            steps[2].append(task.output(2))
        return steps

    outputs = run(make(Handler(ahead)), *tasks_of("a", "b"))
    assert values(outputs) == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_all_choices_of_a_task_that_fails_fail(make: Bench) -> None:
    outputs = run(make(Handler(fail_if_bad)), Task("bad", None, choices=3))
    assert [output.choice for output in outputs] == [0, 1, 2]
    assert values(outputs) == [("bad", "handler")] * 3


def test_an_error_before_the_first_step_fails_the_task_as_well(make: Bench) -> None:
    class Broken(Handler):
        def run(self, tasks: Sequence[Task]) -> Any:
            raise LookupError("not even begun")

    (output,) = run(make(Broken()), *tasks_of("a"))
    assert output.failure is not None
    assert (output.failure.kind, output.failure.message) == ("handler", "LookupError: not even begun")


def test_what_a_handler_says_that_is_no_step_fails_the_task(make: Bench) -> None:
    class Silly(Handler):
        def run(self, tasks: Sequence[Task]) -> Any:
            return 7 if tasks[0].request_id == "a" else [["no result"]]

    outputs = run(make(Silly(), max_batch=1), *tasks_of("a", "b"))
    assert values(outputs) == [("a", "handler"), ("b", "handler")]


def test_a_handler_that_ends_without_having_finished_a_task_has_failed_in_what_is_left(make: Bench) -> None:
    def forgetful(tasks: Sequence[Task]) -> Steps:
        yield [tasks[0].output("done")]
        yield [tasks[1].output("one of two", choice=0), tasks[1].output("begun", choice=1, finished=False)]

    handler = Handler(forgetful)
    outputs = run(make(handler), Task("a", None), Task("b", None, choices=2), Task("c", None))
    assert handler.batches == [["a", "b", "c"]]
    assert [(output.choice, output.step) for output in outputs] == [(0, 0), (0, 0), (1, 0), (1, 1), (0, 0)]
    assert values(outputs)[-2:] == [("b", "handler"), ("c", "handler")]
    assert outputs[-1].failure is not None
    assert "without having finished it" in outputs[-1].failure.message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handler_that_takes_its_thread_down_is_a_scheduler_error_after_what_it_said(make: Bench) -> None:
    def exits(tasks: Sequence[Task]) -> Steps:
        yield [task.output(1, finished=False) for task in tasks]
        raise SystemExit

    scheduler = make(Handler(exits))
    scheduler.put_requests(tasks_of("a"))
    assert values(next_outputs(scheduler)) == [("a", 1)]
    for _ in range(2):
        with pytest.raises(SchedulerError, match="thread has ended"):
            scheduler.get_results(DEADLINE_S)
    assert scheduler.load() == (0, 0)


# -- inputs -----------------------------------------------------------------------------------------------------------


def test_a_handler_gets_what_prepare_makes_of_the_inputs_in_its_own_thread(make: Bench) -> None:
    threads: list[int] = []

    def prepare(inputs: str) -> str:
        threads.append(threading.get_ident())
        return inputs.upper()

    def say_thread(tasks: Sequence[Task]) -> Steps:
        threads.append(threading.get_ident())
        yield from say_inputs(tasks)

    outputs = run(make(Handler(say_thread), prepare=prepare), *tasks_of("a", "b"))
    assert values(outputs) == [("a", "A'S"), ("b", "B'S")]
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


def test_inputs_that_can_not_be_prepared_fail_their_task_alone(make: Bench) -> None:
    handler = Handler()
    scheduler = make(handler, prepare=lambda inputs: 12 // inputs)
    outputs = run(scheduler, Task("a", 3), Task("b", 0), Task("c", 4))
    assert sorted(values(outputs)) == [("a", 4), ("b", "handler"), ("c", 3)]
    assert handler.batches == [["a", "c"]]
    (failure,) = (output.failure for output in outputs if output.failure)
    assert failure.message.startswith("ZeroDivisionError: ")


def test_inputs_of_what_is_late_are_not_prepared(make: Bench) -> None:
    prepared: list[Any] = []
    run(make(Handler(), prepare=prepared.append), Task("late", 1, deadline_ns=1), Task("a", 2))
    assert prepared == [2]


def say_nothing(tasks: Sequence[Task]) -> Steps:
    yield [task.output(None) for task in tasks]


class Inputs:
    """What can be seen to be let go."""


@pytest.mark.parametrize("run_task", [say_nothing, fail_if_bad], ids=["finished", "failed"])
@pytest.mark.parametrize("prepare", [None, lambda inputs: [inputs]], ids=["as they are", "prepared"])
def test_inputs_are_let_go_while_their_task_is_kept(make: Bench, run_task: Run, prepare: Any) -> None:
    scheduler = make(Handler(run_task), prepare=prepare)
    inputs = Inputs()
    seen = weakref.ref(inputs)
    task = Task("bad", inputs)
    del inputs
    scheduler.put_requests([task])
    assert len(next_outputs(scheduler)) == 1
    eventually(lambda: seen() is None, "the inputs were let go")
    assert task.inputs is None


def test_inputs_that_can_not_be_prepared_are_let_go_as_well(make: Bench) -> None:
    scheduler = make(Handler(), prepare=len)
    inputs = Inputs()
    seen = weakref.ref(inputs)
    task = Task("a", inputs)
    del inputs
    scheduler.put_requests([task])
    assert values(next_outputs(scheduler)) == [("a", "handler")]
    eventually(lambda: task.inputs is None and seen() is None, "the inputs were let go")


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_finishes_all_that_is_there(make: Bench) -> None:
    handler = Handler()
    scheduler, _ = make.held(handler, max_batch=2)
    scheduler.put_requests(tasks_of("a", "b", "c"))
    closing = threading.Thread(target=scheduler.close, args=(DEADLINE_S,))
    closing.start()
    eventually(lambda: is_refused(scheduler), "it is closing")
    assert scheduler.load()[1] == 1
    handler.gate.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert scheduler.load() == (0, 0)
    assert values(rest(scheduler)) == [("first", 0), ("a", "a's"), ("b", "b's"), ("c", "c's")]


def is_refused(scheduler: BatchScheduler) -> bool:
    """Whether a scheduler whose handler is held takes no more; what it takes is aborted."""
    (probe,) = tasks_of("probe")
    scheduler.put_requests([probe])
    scheduler.abort(probe)
    (output,) = next_outputs(scheduler)
    assert output.failure is not None
    return output.failure.kind == "refused"


def test_what_comes_after_the_end_is_refused(make: Bench) -> None:
    handler = Handler()
    scheduler = make(handler)
    scheduler.close(DEADLINE_S)
    assert values(run(scheduler, *tasks_of("a", "b"))) == [("a", "refused"), ("b", "refused")]
    assert handler.batches == []


def test_what_is_not_finished_within_the_timeout_is_left_without_a_result_and_not_run(make: Bench) -> None:
    handler = Handler()
    scheduler, first = make.held(handler)
    (a,) = tasks_of("a")
    scheduler.put_requests([a])
    scheduler.close(0)
    assert first.cancelled
    assert a.cancelled
    assert not a.finished
    assert scheduler.load()[0] == 0
    handler.gate.set()
    assert rest(scheduler) == []
    assert handler.batches == [["first"]]
    assert handler.ended == 1


def test_results_that_were_not_taken_are_there_after_the_end(make: Bench) -> None:
    scheduler = make(Handler())
    scheduler.put_requests(tasks_of("a"))
    scheduler.close(DEADLINE_S)
    scheduler.close(DEADLINE_S)
    assert values(next_outputs(scheduler)) == [("a", "a's")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_closing_waits_for_nobody_once_the_thread_has_gone_down(make: Bench) -> None:
    def exits(tasks: Sequence[Task]) -> Steps:
        raise SystemExit

    scheduler = make(Handler(exits))
    scheduler.put_requests(tasks_of("a"))
    with pytest.raises(SchedulerError):
        scheduler.get_results(DEADLINE_S)
    scheduler.put_requests(tasks_of("b"))
    closing = threading.Thread(target=scheduler.close, args=(3600,), daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
