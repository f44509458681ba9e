"""The engine: takes calls from a queue, hands requests to a scheduler, and its results back to whoever asked.

Two threads of its own: one receives, one sends results; the scheduler has what it needs besides. The receiving thread
stores a heartbeat on the engine's board in every turn, so that anybody can see whether it turns, whatever state the
process is in.

A request's message is released when its last result stands in the reply queue. So an engine that dies leaves all that
it had not answered to the next one, and a client sees a slower answer, not an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.adapter import Adapter
from engine.errors import SchedulerError
from engine.replies import Replies, Sink, discard_lost_replies
from engine.scheduling import Scheduler
from engine.tasks import Result, Task
from fmq import (
    ClosedError,
    Consumer,
    DecodeError,
    Message,
    QueueEmptyError,
    QueueInUseError,
    SetAside,
    ShmqError,
    ViewsHeldError,
)
from fmq.calls import (
    MAX_CHOICES,
    Abort,
    Answer,
    Call,
    Control,
    Events,
    Failure,
    FailureKind,
    Gauge,
    Output,
    Request,
    State,
    board_name,
)
from fmq.paths import QueuePath
from shmq import Board, collect

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics

logger = logging.getLogger("engine")

Command = Callable[..., Any]
"""A control command: called with the arguments by name, in a thread of its own; what it returns is the answer."""

DRAIN_SECONDS = 30.0
_BEAT_SECONDS = 0.2
"""A turn of the receive loop takes no longer while nothing comes."""
_RESULT_SECONDS = 0.1
_BACKLOG_SECONDS = 0.01
_FIRST_BACK_OFF = 0.01
_LONGEST_BACK_OFF = 0.2
"""Shorter than what a receive loop is taken for dead for."""
_MOST_DEATHS = 3
"""A request that so many engines died with is answered with a failure."""
_TAKE_OVER_SECONDS = 10.0
"""How long the queue may be in the hands of somebody who moves a dead engine's requests."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from, and its results go."""

    sink: Sink
    address: str


@dataclass(slots=True)
class _Parcel:
    """What one step has for one client."""

    outputs: list[Output] = field(default_factory=list)
    done: list[Task] = field(default_factory=list)


class Engine:
    """Serves one queue of calls, until ``stop``. Its methods may be called from any thread of its process, save a fork.

    ``scheduler`` runs the requests, and is closed by ``stop``. ``commands`` are control commands by name, besides
    "ping" and "status". ``adapter`` is another way in, beside the queue, or instead of it if ``serve_queue`` is false
    (its name is still the engine's, under which its state can be seen); the engine closes it. ``metrics`` counts the
    messages of its queues. Takes the queue at once, and calls after ``start``; as a context manager it starts, and
    stops with a limit of DRAIN_SECONDS.

    Raises QueueInUseError if another engine serves the queue, QueueNameError, SegmentSpaceError, SegmentError.
    """

    def __init__(
        self,
        queue: str,
        scheduler: Scheduler,
        *,
        namespace: str | None = None,
        runtime_dir: str | os.PathLike[str] | None = None,
        commands: Mapping[str, Command] | None = None,
        adapter: Adapter | None = None,
        serve_queue: bool = True,
        metrics: QueueMetrics | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._commands: dict[str, Command] = {"ping": _ping, "status": self.status, **(commands or {})}
        path = QueuePath(queue, namespace, runtime_dir)
        self._path = path
        self._lock = threading.Lock()
        self._tasks: dict[tuple[Origin, str], Task] = {}
        self._refused: list[Result] = []
        self._answers: list[tuple[Origin, Answer, Message | None]] = []
        self._adapter = adapter
        self._consumer = _consume(path, runtime_dir, self._set_aside, metrics) if serve_queue else None
        try:
            # What an engine that was killed had made, and nobody will look at again.
            collect(f"shmq:{path.namespace}:")
            discard_lost_replies(path.namespace, runtime_dir)
            self._board = Board.create(board_name(path), len(Gauge))
        except BaseException:
            if self._consumer is not None:
                self._consumer.close()
            raise
        self._replies = Replies(path.namespace, runtime_dir=runtime_dir, metrics=metrics)
        self._sinks: list[Sink] = [self._replies] if adapter is None else [self._replies, adapter]
        self._controls = ThreadPoolExecutor(1, "engine-control")
        self._stopping = threading.Event()
        self._drained = threading.Event()
        self._ended = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="engine-receive", daemon=True)
        self._sender = threading.Thread(target=self._send_results, name="engine-results", daemon=True)
        self._stop_lock = threading.Lock()
        self._closed = self._failed = False
        self._last_status: dict[str, Any] = {}

    # -- what others see ----------------------------------------------------------------------------------------------

    @property
    def queue(self) -> str:
        """The queue that it serves."""
        return self._path.queue

    @property
    def namespace(self) -> str:
        """The namespace of its queues."""
        return self._path.namespace

    @property
    def failed(self) -> bool:
        """Whether one of its threads, or its handler's, has ended by an error. Then it does nothing any more."""
        return self._failed

    def status(self) -> dict[str, Any]:
        """What its board says, by lower-case name: ``state``, and counts; at the end, what it said last."""
        if self._closed:
            return self._last_status
        words = {gauge.name.lower(): self._board[gauge] for gauge in Gauge if gauge is not Gauge.HEARTBEAT_NS}
        return {**words, "state": State(words["state"]).name.lower(), "pid": os.getpid()}

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has failed or was stopped; False after ``timeout`` seconds."""
        return self._ended.wait(timeout)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to take calls."""
        self._beat(State.SERVING)
        self._receiver.start()
        self._sender.start()
        if self._adapter is not None:
            adapter = self._adapter
            adapter.start(lambda call, address: self.accept(call, Origin(adapter, address)))

    def stop(self, timeout: float = DRAIN_SECONDS) -> bool:
        """Take no more, finish what was taken within ``timeout`` seconds, and let go of everything. Idempotent.

        What is not finished by then is handed over: the next engine of the queue gets it, and answers it from the
        start. Returns whether there was nothing to hand over.
        """
        with self._stop_lock:
            if self._closed:
                return True
            self._stopping.set()
            if self._adapter is not None:
                self._adapter.pause()
            if not self._failed:
                self._board[Gauge.STATE] = State.STOPPING
            if self._receiver.is_alive():
                self._receiver.join()
            self._scheduler.close(timeout)
            self._drained.set()
            if self._sender.is_alive():
                self._sender.join()
            self._controls.shutdown(wait=False, cancel_futures=True)
            for sink in self._sinks:
                sink.turn()
            left = self._hand_over()
            for sink in self._sinks:
                sink.close()
            self._last_status = self.status()
            self._ended.set()
            self._closed = True
            self._board.close()
        return not left

    def _hand_over(self) -> int:
        # A message that is dropped is acknowledged: they are kept, without their arrays, until the queue is given up.
        with self._lock:
            left = list(self._tasks.values())
            self._tasks.clear()
            holds = [task.hold for task in left if task.hold is not None]
            for task in left:
                task.cancelled = True
                task.inputs = task.hold = None
        for hold in holds:
            with contextlib.suppress(AttributeError):
                del hold.payload
        if left:
            logger.warning("%d requests are not finished; they are left to the next engine", len(left))
        if self._consumer is None:
            return len(left)
        try:
            self._consumer.close()
        except ViewsHeldError as error:
            # Of a handler that is still at work. The queue is this process's until it ends.
            logger.warning("%s", error)
            self._consumer.end()
        return len(left)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- ways in ------------------------------------------------------------------------------------------------------

    def accept(self, call: Call, origin: Origin, hold: Message | None = None) -> None:
        """Take one call. ``hold`` is released, on any thread, when all that came of it was sent."""
        if isinstance(call, Request):
            self._accept_request(call, origin, hold)
        elif isinstance(call, Abort):
            with self._lock:
                task = self._tasks.get((origin, call.request_id))
            if task is not None:
                self._scheduler.abort(task)
            _release(hold)
        elif self._stopping.is_set():
            failure = Failure(FailureKind.REFUSED, "the engine ends")
            with self._lock:
                self._answers.append((origin, Answer(call.control_id, None, failure), hold))
        else:
            self._controls.submit(self._run_command, call, origin, hold)

    def _accept_request(self, call: Request, origin: Origin, hold: Message | None) -> None:
        choices = call.choices if 1 <= call.choices <= MAX_CHOICES else 1
        task = Task(call.request_id, call.task, choices, call.deadline_ns, origin, hold)
        if hold is not None:
            task.suspect = hold.deaths > 0
            task.on_work = self._mark
            # Many are taken, and few are begun: those that only wait are not to blame if this engine dies.
            hold.postpone()
        with self._lock:
            self._board[Gauge.RECEIVED] += 1
            twice = self._tasks.setdefault((origin, call.request_id), task) is not task
        if twice:
            # It was moved here twice. The first one is answered.
            _release(hold)
        elif choices != call.choices:
            message = f"a request has 1 to {MAX_CHOICES} choices; this one asks for {call.choices}"
            self._refuse(task.fail(FailureKind.INVALID, message))
        else:
            try:
                self._scheduler.put_requests([task])
            except Exception as error:
                logger.exception("request %s could not be handed to the scheduler", task.request_id)
                self._refuse(task.fail(FailureKind.HANDLER, f"{type(error).__name__}: {error}"))

    def _mark(self, task: Task, at_work: bool) -> None:
        with self._lock:
            # Unless it was settled meanwhile: then the message may be gone, and another in its place.
            if task.hold is not None:
                (task.hold.begin if at_work else task.hold.postpone)()

    def _refuse(self, results: Iterable[Result]) -> None:
        """Results from elsewhere than the scheduler, for the thread that sends them."""
        with self._lock:
            self._refused += results

    def _run_command(self, call: Control, origin: Origin, hold: Message | None) -> None:
        command = self._commands.get(call.command)
        value, failure = None, None
        if command is None:
            known = ", ".join(sorted(self._commands))
            failure = Failure(FailureKind.INVALID, f"there is no command {call.command!r}; this engine has {known}")
        else:
            try:
                value = command(**call.arguments)
            except Exception as error:
                logger.exception("command %s failed", call.command)
                failure = Failure(FailureKind.HANDLER, f"{type(error).__name__}: {error}")
        with self._lock:
            self._answers.append((origin, Answer(call.control_id, value, failure), hold))

    def _set_aside(self, aside: SetAside) -> None:
        """A request with which too many engines died is answered, and not kept."""
        with contextlib.suppress(ShmqError):
            call = aside.read()
            if isinstance(call, Request):
                task = Task(call.request_id, None, call.choices, 0, Origin(self._replies, call.reply_to))
                message = f"{_MOST_DEATHS} engines died while they were at work on it; it is not run again"
                self._refuse(task.fail(FailureKind.HANDLER, message))
            aside.discard()

    # -- the receiving thread -----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                self._beat()
                if self._consumer is None:
                    self._stopping.wait(_BEAT_SECONDS)
                    continue
                try:
                    message = self._consumer.get(timeout=_BEAT_SECONDS)
                    failures = 0
                    self._take(message)
                    # Nothing here may keep the last one alive while nothing comes.
                    del message
                except QueueEmptyError:
                    failures = 0
                except ClosedError:
                    raise
                except Exception as error:
                    failures += 1
                    self._board[Gauge.RECEIVE_ERRORS] += 1
                    logger.error("a call could not be received: %s", error, exc_info=not isinstance(error, ShmqError))
                    self._stopping.wait(min(_FIRST_BACK_OFF * 2 ** min(failures, 10), _LONGEST_BACK_OFF))
        except BaseException:
            self._fail("the receive loop has ended")
            raise

    def _take(self, message: Message) -> None:
        call = message.payload
        if isinstance(call, Request | Abort | Control):
            self.accept(call, Origin(self._replies, call.reply_to), message)
        else:
            # Bytes: they are not decoded, and so not checked.
            message.release()
            raise DecodeError(f"message {message.sequence} of {message.producer} is no call")

    def _beat(self, state: State | None = None) -> None:
        self._board[Gauge.HEARTBEAT_NS] = time.monotonic_ns()
        self._show_load()
        if state is not None:
            self._board[Gauge.STATE] = state

    def _show_load(self) -> None:
        self._board[Gauge.WAITING], self._board[Gauge.RUNNING] = self._scheduler.load()

    def _fail(self, what: str) -> None:
        logger.critical("%s; this engine does nothing any more, restart it", what, exc_info=True)
        self._failed = True
        self._board[Gauge.STATE] = State.FAILED
        self._stopping.set()
        self._ended.set()

    # -- the sending thread -------------------------------------------------------------------------------------------

    def _send_results(self) -> None:
        try:
            while True:
                last = self._drained.is_set()
                results = self._get_results()
                self._send([*results, *self._take_refused()])
                self._send_answers()
                self._show_load()
                for sink in self._sinks:
                    for address in sink.turn():
                        self._forget(Origin(sink, address))
                if last and not results:
                    return
                del results
        except SchedulerError as error:
            self._fail(str(error))
        except BaseException:
            self._fail("the thread that sends results has ended")
            raise

    def _get_results(self) -> list[Result]:
        try:
            return self._scheduler.get_results(_BACKLOG_SECONDS if self._replies.backlog else _RESULT_SECONDS)
        except SchedulerError:
            if not self._stopping.is_set():
                raise
            # It was closed, and has nothing more.
            self._drained.wait(_RESULT_SECONDS)
            return []

    def _take_refused(self) -> list[Result]:
        with self._lock:
            refused, self._refused = self._refused, []
        return refused

    def _send(self, results: Iterable[Result]) -> None:
        parcels: dict[Origin, _Parcel] = {}
        for result in results:
            task = result.task
            parcel = parcels.get(task.origin)
            if parcel is None:
                parcel = parcels[task.origin] = _Parcel()
            parcel.outputs.append(result.output)
            if result.last:
                parcel.done.append(task)
                self._board[Gauge.FINISHED if result.output.failure is None else Gauge.FAILED] += 1
        for origin, parcel in parcels.items():
            origin.sink.send(origin.address, Events(parcel.outputs), functools.partial(self._settle, parcel.done))

    def _send_answers(self) -> None:
        if self._answers:
            with self._lock:
                answers, self._answers = self._answers, []
            for origin, answer, hold in answers:
                origin.sink.send(origin.address, Events([], [answer]), functools.partial(_release, hold))

    def _settle(self, tasks: list[Task]) -> None:
        for task in tasks:
            with self._lock:
                self._tasks.pop((task.origin, task.request_id), None)
                hold, task.hold = task.hold, None
            task.inputs = None
            _release(hold)

    def _forget(self, origin: Origin) -> None:
        """A client is gone: nobody waits for what it had asked for."""
        with self._lock:
            tasks = [task for task in self._tasks.values() if task.origin == origin]
        for task in tasks:
            self._scheduler.abort(task)


def _consume(
    path: QueuePath,
    runtime_dir: str | os.PathLike[str] | None,
    on_set_aside: Callable[[SetAside], None],
    metrics: QueueMetrics | None,
) -> Consumer:
    """Become the consumer; somebody who only moves a dead engine's requests elsewhere is waited for."""
    deadline = time.monotonic() + _TAKE_OVER_SECONDS
    while True:
        try:
            return Consumer(
                path.queue,
                namespace=path.namespace,
                runtime_dir=runtime_dir,
                type=Call,
                max_deliveries=_MOST_DEATHS,
                on_set_aside=on_set_aside,
                warn_held=None,
                metrics=metrics,
                # The handler needs the interpreter.
                spin=False,
            )
        except QueueInUseError:
            if time.monotonic() > deadline or _has_engine(path):
                raise
            time.sleep(0.05)


def _has_engine(path: QueuePath) -> bool:
    """Whether it is an engine that has the queue."""
    with contextlib.suppress(ShmqError):
        board = Board.attach(board_name(path))
        try:
            return board.is_current()
        finally:
            board.close()
    return False


def _ping() -> str:
    return "pong"


def _release(hold: Message | None) -> None:
    if hold is not None:
        hold.release()
