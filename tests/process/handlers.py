"""Handlers of engines that are tested: some fail, some kill, some say what can't be sent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

import numpy as np

from engine.tasks import Result, Task

POISON = "poison"


class Fussy:
    """Answers a batch with itself in one step; raises ValueError instead if there is poison in it."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        if any(task.inputs == POISON for task in tasks):
            raise ValueError("this is poison")
        yield [task.output(task.inputs) for task in tasks]


class Deadly:
    """Answers one request a step with itself; poison kills the process."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        for task in tasks:
            if task.inputs == POISON:
                os.kill(os.getpid(), signal.SIGKILL)
            yield [task.output(task.inputs)]


class Leaving:
    """Answers one request a step with itself; poison ends the handler's thread by what is no Exception."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        for task in tasks:
            if task.inputs == POISON:
                raise SystemExit(7)
            yield [task.output(task.inputs)]


class Forgetful:
    """Answers a batch with itself in one step, and forgets poison."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        yield [task.output(task.inputs) for task in tasks if task.inputs != POISON]


class Unsendable:
    """Answers a batch with itself in one step; poison with what no queue takes."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        yield [task.output(object() if task.inputs == POISON else task.inputs) for task in tasks]


class Zeros:
    """Answers a number with as many zero bytes, in an array."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        for task in tasks:
            yield [task.output(np.zeros(task.inputs, np.uint8))]
