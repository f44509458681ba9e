"""Who runs requests, and when: the ``Scheduler`` that an engine hands them to, and one that runs batches in turn."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, Protocol

from engine.errors import RequestError, SchedulerError, TensorError
from engine.tasks import Result, Task
from fmq.calls import FailureKind, Kind

logger = logging.getLogger("engine")


class Handler(Protocol):
    """What the engine is there for. A plain class with this one method, called in one thread."""

    def run(self, tasks: Sequence[Task]) -> Iterable[Sequence[Result]]:
        """Answer a batch, step by step: each item is what one step has for any of the tasks, made by ``task.output``.

        An exception fails the task that it is about, as INVALID if it is a RequestError: with several in the batch,
        each that is not finished is run again by itself. Whoever waits ignores the steps that it has, so they should
        come out the same.
        """
        ...


class Scheduler(Protocol):
    """Takes requests, and gives results some time later. Every method may be called from any thread."""

    def put_requests(self, tasks: Sequence[Task]) -> None:
        """Take these. Never waits: what can't be taken has a failure as its result."""
        ...

    def get_results(self, timeout: float) -> list[Result]:
        """What has come out since the last call, in order; waits up to ``timeout`` seconds for some, else []."""
        ...

    def abort(self, task: Task) -> None:
        """Finish this one now, as ABORTED, wherever it is."""
        ...

    def load(self) -> tuple[int, int]:
        """How many tasks wait, and how many run."""
        ...

    def close(self, timeout: float) -> None:
        """Take no more, and wait up to ``timeout`` seconds until all that was taken is finished."""
        ...


class BatchScheduler:
    """Runs tasks first in, first out, in one thread, as batches of all that wait, up to ``max_batch``.

    ``prepare`` makes of a task's inputs what the handler takes (``to_paddle``, say), in the same thread; if it raises,
    that task alone fails. When more than ``max_waiting`` tasks wait, further ones are refused.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        max_batch: int = 8,
        max_waiting: int = 4096,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("max_waiting", max_waiting)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is a number of tasks from 1 on; this one is {value!r}")
        self._handler = handler
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._prepare = prepare
        self._changed = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._running: list[Task] = []
        self._results: list[Result] = []
        self._closed = False
        self._dead = False
        self._thread = threading.Thread(target=self._work, name="engine-handler", daemon=True)
        self._thread.start()

    def put_requests(self, tasks: Sequence[Task]) -> None:
        """As Scheduler's."""
        with self._changed:
            for task in tasks:
                if self._closed:
                    self._results += task.fail(FailureKind.REFUSED, "the engine ends; send it to another one")
                elif len(self._waiting) >= self._max_waiting:
                    self._results += task.fail(
                        FailureKind.REFUSED, f"{self._max_waiting} requests wait already; send it again later"
                    )
                else:
                    self._waiting.append(task)
            self._changed.notify_all()

    def get_results(self, timeout: float) -> list[Result]:
        """As Scheduler's. Raises SchedulerError once the handler has taken its thread down."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._dead, timeout)
            results, self._results = self._results, []
            if self._dead and not results:
                raise SchedulerError("the handler's thread has ended; see its error in the log, and restart the engine")
            return results

    def abort(self, task: Task) -> None:
        """As Scheduler's. One that runs is not interrupted: what its handler still says of it is dropped."""
        with self._changed:
            self._cancel(task, FailureKind.ABORTED, "it was aborted")
            if task in self._waiting:
                self._waiting.remove(task)

    def load(self) -> tuple[int, int]:
        """As Scheduler's."""
        with self._changed:
            return len(self._waiting), len(self._running)

    def close(self, timeout: float) -> None:
        """As Scheduler's. What is not finished by then stays so: it has no result, and is not run any more."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._dead or not (self._waiting or self._running), timeout)
            for task in (*self._waiting, *self._running):
                task.cancelled = True
            self._waiting.clear()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    # -- in the handler's thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while batch := self._next_batch():
                for task in batch:
                    task.begin()
                ready = [task for task in batch if self._is_ready(task)]
                if ready:
                    self._run(ready)
                for task in batch:
                    task.inputs = None
                    task.end()
                # Nothing here may keep the last ones alive while nothing comes.
                del batch, ready, task
        finally:
            with self._changed:
                self._dead = True
                self._running = []
                self._changed.notify_all()

    def _next_batch(self) -> list[Task]:
        """Tasks to run; waits for some. [] at the end."""
        with self._changed:
            self._running = []
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closed)
            waiting = self._waiting
            while waiting and len(self._running) < self._max_batch:
                if self._running and (waiting[0].suspect or self._running[0].suspect):
                    # Alone, so that it is known who is to blame if this engine dies, too.
                    break
                self._running.append(waiting.popleft())
            return list(self._running)

    def _is_ready(self, task: Task) -> bool:
        if self._is_over(task):
            return False
        if self._prepare is not None:
            try:
                task.inputs = self._prepare(task.inputs)
            except Exception as error:
                self._fail(task, error)
                return False
        return True

    def _is_over(self, task: Task) -> bool:
        """Whether nobody waits for a task, or not any longer."""
        if not task.cancelled and task.is_late():
            with self._changed:
                self._cancel(task, FailureKind.DEADLINE, "its time is over")
        return task.cancelled

    def _run(self, tasks: list[Task]) -> None:
        try:
            with closing(_iterate(self._handler, tasks)) as steps:
                for step in steps:
                    with self._changed:
                        self._results += [result for result in step if result.task.deliver(result)]
                        self._changed.notify_all()
                    over = [self._is_over(task) or task.finished for task in tasks]
                    if all(over):
                        break
        except Exception as error:
            if len(tasks) > 1:
                logger.warning("a batch of %d failed (%r); its requests are run one by one", len(tasks), error)
                for task in tasks:
                    if not (task.finished or self._is_over(task)):
                        task.restart()
                        self._run([task])
            elif not tasks[0].finished:
                self._fail(tasks[0], error)
            return
        for task in tasks:
            if not (task.cancelled or task.finished):
                with self._changed:
                    self._cancel(task, FailureKind.HANDLER, "its handler ended without having finished it")

    def _fail(self, task: Task, error: Exception) -> None:
        with self._changed:
            if isinstance(error, RequestError | TensorError):
                logger.info("request %s is refused: %s", task.request_id, error)
                self._cancel(task, FailureKind.INVALID, str(error))
            else:
                logger.error("request %s failed", task.request_id, exc_info=error)
                self._cancel(task, FailureKind.HANDLER, f"{type(error).__name__}: {error}")

    def _cancel(self, task: Task, kind: Kind, message: str) -> None:
        """Finish a task with a failure; what its handler may still say of it is dropped. The lock is held."""
        if not task.cancelled:
            task.cancelled = True
            self._results += task.fail(kind, message)
            self._changed.notify_all()


def _iterate(handler: Handler, tasks: Sequence[Task]) -> Any:
    """The handler's steps as a generator, so that it can be closed whatever it returned."""
    yield from handler.run(tasks)
