"""A request on its way through the engine: its steps, its choices, and its end."""

from __future__ import annotations

import time

import pytest

from engine.tasks import Result, Task
from fmq.calls import Failure, FailureKind, Output

FUTURE_NS = time.monotonic_ns() + 3600 * 10**9


def made(task: Task, value: object, *, choice: int = 0, finished: bool = True) -> Result:
    """A result that was made and passed on."""
    result = task.output(value, choice=choice, finished=finished)
    assert task.deliver(result)
    return result


def steps(results: list[Result]) -> list[tuple[int, int, bool]]:
    """Choice, step, and whether it is the last of its task, of each."""
    return [(result.output.choice, result.output.step, result.last) for result in results]


def test_an_output_has_the_name_of_its_request_and_the_value_given() -> None:
    task = Task("r1", "inputs")
    result = task.output({"text": "hello"})
    assert not task.finished
    assert task.deliver(result)
    assert result.task is task
    assert result.output == Output("r1", 0, 0, {"text": "hello"}, True, None)
    assert result.last
    assert task.finished


def test_the_steps_of_a_choice_count_from_0_and_only_the_finished_one_is_the_last() -> None:
    task = Task("r1", None)
    results = [made(task, value, finished=value == "c") for value in "abc"]
    assert steps(results) == [(0, 0, False), (0, 1, False), (0, 2, True)]
    assert [result.output.finished for result in results] == [False, False, True]


def test_each_choice_counts_its_own_steps_and_the_last_to_finish_is_the_last() -> None:
    task = Task("r1", None, choices=3)
    results = [
        made(task, "a", choice=1, finished=False),
        made(task, "b", choice=2),
        made(task, "c", choice=1, finished=False),
        made(task, "d", choice=1),
    ]
    assert not task.finished
    results.append(made(task, "e", choice=0))
    assert steps(results) == [(1, 0, False), (2, 0, False), (1, 1, False), (1, 2, False), (0, 0, True)]
    assert task.finished


@pytest.mark.parametrize("choice", [-1, 2, 100])
def test_a_choice_that_there_is_not_is_refused_and_named(choice: int) -> None:
    task = Task("r1", None, choices=2)
    with pytest.raises(ValueError, match=f"request r1 has choices 0 to 1, and not {choice}"):
        task.output("x", choice=choice)
    assert steps(task.fail(FailureKind.HANDLER, "over")) == [(0, 0, False), (1, 0, True)]


def test_a_choice_that_is_finished_takes_no_more_output_while_others_do() -> None:
    task = Task("r1", None, choices=2)
    made(task, "x", choice=1)
    with pytest.raises(ValueError, match="choice 1 of request r1 is finished"):
        task.output("y", choice=1)
    assert steps([made(task, "z")]) == [(0, 0, True)]


def test_a_failure_finishes_every_choice_that_is_not_finished_each_at_its_own_step() -> None:
    task = Task("r1", None, choices=3)
    made(task, "a", finished=False)
    made(task, "b", finished=False)
    made(task, "c", choice=1)
    results = task.fail(FailureKind.DEADLINE, "its time is over")
    failure = Failure("deadline", "its time is over")
    assert [result.output for result in results] == [
        Output("r1", 0, 2, None, True, failure),
        Output("r1", 2, 0, None, True, failure),
    ]
    assert [result.last for result in results] == [False, True]
    assert task.finished


def test_what_was_made_and_not_passed_on_fails_as_if_it_had_not_been_made() -> None:
    task = Task("r1", None, choices=2)
    task.output("lost", choice=1)
    task.output("lost as well", finished=False)
    assert steps(task.fail(FailureKind.HANDLER, "over")) == [(0, 0, False), (1, 0, True)]


def test_what_has_failed_or_is_finished_does_not_fail_again() -> None:
    failed, finished = Task("r1", None, choices=2), Task("r2", None)
    assert len(failed.fail(FailureKind.ABORTED, "it was aborted")) == 2
    made(finished, "x")
    assert failed.fail(FailureKind.HANDLER, "again") == finished.fail(FailureKind.HANDLER, "late") == []


def test_what_a_handler_says_of_a_task_that_is_over_is_dropped_and_no_error() -> None:
    failed, cancelled = Task("r1", None), Task("r2", None)
    failed.fail(FailureKind.ABORTED, "it was aborted")
    cancelled.cancelled = True
    for task in (failed, cancelled):
        assert not task.deliver(task.output("late", finished=False))
        assert not task.deliver(task.output("later"))
    assert not cancelled.finished


def test_a_task_that_is_restarted_passes_on_what_it_had_not_passed_on_and_nothing_twice() -> None:
    task = Task("r1", None, choices=2)
    made(task, "a", finished=False)
    made(task, "b", choice=1)
    task.output("never passed on")
    task.restart()
    assert not task.finished
    assert not task.deliver(task.output("b", choice=1))
    assert not task.deliver(task.output("a", finished=False))
    assert steps([made(task, "c")]) == [(0, 1, True)]
    assert task.finished


@pytest.mark.parametrize(("deadline_ns", "late"), [(0, False), (1, True), (FUTURE_NS, False)])
def test_a_task_is_late_once_its_deadline_is_over_and_never_without_one(deadline_ns: int, late: bool) -> None:
    assert Task("r1", None, deadline_ns=deadline_ns).is_late() is late


def test_a_deadline_is_over_in_the_nanosecond_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1000)
    assert [Task("r1", None, deadline_ns=deadline).is_late() for deadline in (999, 1000, 1001)] == [True, True, False]


def test_two_tasks_are_equal_only_if_they_are_the_same() -> None:
    one, another = Task("r1", 1), Task("r1", 1)
    assert one != another
    assert [one, another].index(another) == 1
    assert len({one, another}) == 2
