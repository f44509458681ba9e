"""A request while the engine has it, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fmq import Message
from fmq.calls import Failure, Kind, Output


@dataclass(eq=False, slots=True)
class Task:
    """A request on its way through the engine. Its receiver makes it, its scheduler runs it, its handler answers it.

    Attributes
        request_id: what its sender calls it; two senders may use the same.
        inputs: what was sent: arrays are read-only views of the ring, or tensors where the scheduler makes them.
        choices: how many independent results are asked for, from ``choice`` 0 on.
        deadline_ns: when its time is over, by the monotonic clock; 0 for never.
        origin: where its results go. The receiver's.
        hold: the message that it came in, which the receiver releases once its last result was sent; None for none.
        on_work: what the receiver does when work on it begins, and when it has ended.
        suspect: an engine died while it was at work on this; it is to be run alone.
        cancelled: nobody waits for it any more, and what its handler still says of it is dropped. A handler may look.
    """

    request_id: str
    inputs: Any
    choices: int = 1
    deadline_ns: int = 0
    origin: Any = None
    hold: Message | None = None
    on_work: Callable[[Task, bool], None] | None = None
    suspect: bool = False
    cancelled: bool = False
    _made: dict[int, int] = field(default_factory=dict)
    """The next step of each choice that its handler has begun, -1 of those that it has finished."""
    _delivered: dict[int, int] = field(default_factory=dict)
    """The same of what was passed on."""
    _open: int = field(init=False)

    def __post_init__(self) -> None:
        self._open = self.choices

    @property
    def finished(self) -> bool:
        """Whether all its choices were answered to the end, and that passed on."""
        return self._open <= 0

    def is_late(self) -> bool:
        """Whether its deadline is over."""
        return 0 < self.deadline_ns <= time.monotonic_ns()

    def output(self, value: Any, *, choice: int = 0, finished: bool = True) -> Result:
        """The next step of one choice; ``value`` is what goes back, any tree that a queue takes. For handlers.

        Raises ValueError for a choice that there is not, or that was finished by this.
        """
        if not 0 <= choice < self.choices:
            raise ValueError(f"request {self.request_id} has choices 0 to {self.choices - 1}, and not {choice}")
        step = self._made.get(choice, 0)
        if step < 0:
            raise ValueError(f"choice {choice} of request {self.request_id} is finished, and takes no more output")
        self._made[choice] = -1 if finished else step + 1
        return Result(self, Output(self.request_id, choice, step, value, finished))

    # -- for schedulers -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Work on it begins: if the engine dies before it ends, this request may be to blame."""
        if self.on_work is not None:
            self.on_work(self, True)

    def end(self) -> None:
        """Work on it has ended, whatever came of it."""
        if self.on_work is not None:
            self.on_work(self, False)

    def restart(self) -> None:
        """It will be run again from the start. What was passed on already is not passed on again."""
        self._made = {}

    def deliver(self, result: Result) -> bool:
        """Whether a result is to be passed on: not if nobody waits, or it was before. Sets ``result.last``."""
        output = result.output
        delivered = self._delivered.get(output.choice, 0)
        if self.cancelled or delivered < 0 or output.step < delivered:
            return False
        self._count(result)
        return True

    def fail(self, kind: Kind, message: str) -> list[Result]:
        """Finish every choice that is not finished, with a failure: results to be passed on."""
        failure = Failure(kind, message)
        results = []
        for choice in range(self.choices):
            if (step := self._delivered.get(choice, 0)) >= 0:
                result = Result(self, Output(self.request_id, choice, step, None, True, failure))
                self._count(result)
                results.append(result)
        return results

    def _count(self, result: Result) -> None:
        output = result.output
        self._delivered[output.choice] = -1 if output.finished else output.step + 1
        self._open -= output.finished
        result.last = self.finished


@dataclass(eq=False, slots=True)
class Result:
    """An output, the task that it is of, and whether it is the last one of it."""

    task: Task
    output: Output
    last: bool = False
