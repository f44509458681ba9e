"""A request while the engine has it, and what comes of it."""

from __future__ import annotations

import time
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
        cancelled: nobody waits for it any more, and what its handler still says of it is dropped. A handler may look.
    """

    request_id: str
    inputs: Any
    choices: int = 1
    deadline_ns: int = 0
    origin: Any = None
    hold: Message | None = None
    cancelled: bool = False
    _steps: dict[int, int] = field(default_factory=dict)
    """The next step of each choice that has begun, -1 of those that are finished."""
    _open: int = field(init=False)

    def __post_init__(self) -> None:
        self._open = self.choices

    def restart(self) -> None:
        """Forget what it was answered: it will be run again from the start."""
        self._steps = {}
        self._open = self.choices

    @property
    def finished(self) -> bool:
        """Whether all its choices were answered to the end."""
        return self._open <= 0

    def is_late(self) -> bool:
        """Whether its deadline is over."""
        return 0 < self.deadline_ns <= time.monotonic_ns()

    def output(self, value: Any, *, choice: int = 0, finished: bool = True) -> Result:
        """The next step of one choice; ``value`` is what goes back, any tree that a queue takes. For handlers.

        Raises ValueError for a choice that there is not, or that is finished.
        """
        if not 0 <= choice < self.choices:
            raise ValueError(f"request {self.request_id} has choices 0 to {self.choices - 1}, and not {choice}")
        step = self._steps.get(choice, 0)
        if step < 0:
            raise ValueError(f"choice {choice} of request {self.request_id} is finished, and takes no more output")
        self._steps[choice] = -1 if finished else step + 1
        self._open -= finished
        return Result(self, Output(self.request_id, choice, step, value, finished), self.finished)

    def fail(self, kind: Kind, message: str) -> list[Result]:
        """Finish every choice that is not finished, with a failure."""
        failure = Failure(kind, message)
        results = []
        for choice in range(self.choices):
            if (step := self._steps.get(choice, 0)) >= 0:
                self._steps[choice] = -1
                self._open -= 1
                output = Output(self.request_id, choice, step, None, True, failure)
                results.append(Result(self, output, self.finished))
        return results


@dataclass(frozen=True, slots=True)
class Result:
    """An output, the task that it is of, and whether it is the last one of it."""

    task: Task
    output: Output
    last: bool
