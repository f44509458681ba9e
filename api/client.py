"""Sending tasks to engines, and having their results: the producer's side of a server.

Each client has a ring to each engine, where it puts its calls, and one reply queue, where the engines put what has
become of them. One task takes from that and sorts by request; another looks after the engines ten times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import numbers
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from api.engines import EngineLink, choose
from api.errors import (
    AbortedError,
    ApiError,
    ControlError,
    DeadlineError,
    EngineUnavailableError,
    RequestFailedError,
    RequestIdError,
    failure_of,
)
from api.mover import move_calls
from fmq import AsyncConsumer, ClosedError, Message, ShmqError
from fmq.calls import REPLY_PREFIX, Abort, Answer, Control, Events, Output, Request
from fmq.paths import QueuePath
from shmq import collect

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics

logger = logging.getLogger("api")

T = TypeVar("T")

RING_SIZE = 128 * 1024 * 1024
SPILL_LIMIT = 4 * 1024 * 1024 * 1024
PATIENCE = 30.0
PUT_SECONDS = 5.0
CONTROL_SECONDS = 10.0

_LOOK_SECONDS = 0.1
_MOVE_SECONDS = 2.0
"""How long an engine may be gone before its requests are moved to another one; it may be back sooner."""
_LATE_SECONDS = 0.5
"""How long after its deadline the engine's own word on a request is waited for."""
_KEPT = 10_000
"""Requests that are finished, and whose results nobody has asked for yet, are kept, the newest of them."""
_LONGEST_SECONDS = 1_000_000_000


@dataclass(slots=True)
class _Pending:
    """A request, from before it is put until its results were read."""

    link: EngineLink
    choices: int
    deadline: float
    outputs: deque[Output] = field(default_factory=deque)
    steps: dict[int, float] = field(default_factory=dict)
    """The next step of each choice that has begun; infinite once it is finished."""
    error: RequestFailedError | EngineUnavailableError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    unfinished: int = 0
    sent: bool = False
    moved: bool = False

    @property
    def finished(self) -> bool:
        return self.unfinished <= 0 or self.error is not None


class EngineClient:
    """A client of one engine or several equal ones (data parallel). For one event loop; not across a fork.

    ``engines`` are the names of their queues. ``ring_size`` and ``spill_limit`` are bytes of shared memory for each
    engine. ``patience`` is how many seconds an engine may be gone before its requests fail; until then it is expected
    back, and what it had is kept for it. Use it as ``async with``, or ``start`` and ``close`` it. Raises as the
    constructors of producers and consumers do.
    """

    def __init__(
        self,
        engines: str | Sequence[str] = "requests",
        *,
        namespace: str | None = None,
        runtime_dir: str | os.PathLike[str] | None = None,
        ring_size: int = RING_SIZE,
        spill_limit: int = SPILL_LIMIT,
        patience: float = PATIENCE,
        metrics: QueueMetrics | None = None,
    ) -> None:
        queues = [engines] if isinstance(engines, str) else list(engines)
        if not queues or len(set(queues)) != len(queues):
            raise ValueError(f"a client needs the queue of one engine or several different ones; these are {queues!r}")
        self._runtime_dir = runtime_dir
        self.patience = _seconds("patience", patience)
        reply = f"{REPLY_PREFIX}{os.getpid()}.{secrets.token_hex(6)}"
        self._path = QueuePath(reply, namespace, runtime_dir)
        self.links: list[EngineLink] = []
        self._replies: AsyncConsumer | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._undo)
            for queue in queues:
                link = EngineLink(
                    queue,
                    namespace,
                    ring_size=ring_size,
                    spill_limit=spill_limit,
                    runtime_dir=runtime_dir,
                    metrics=metrics,
                )
                self.links.append(link)
            self._replies = AsyncConsumer(
                reply,
                namespace=namespace,
                runtime_dir=runtime_dir,
                type=Events,
                warn_held=None,
                metrics=metrics,
                # The event loop has other things to do.
                spin=False,
            )
            undo.pop_all()
        self._pending: dict[str, _Pending] = {}
        self._unread: OrderedDict[str, None] = OrderedDict()
        self._controls: dict[str, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._aborts: set[asyncio.Task[None]] = set()
        self._closed = False
        self.strays = 0
        """Outputs of requests that are none of this client's any more."""
        self.repeated = 0
        """Outputs that had come before: of an engine that did again what its predecessor had done."""

    def _undo(self) -> None:
        for link in self.links:
            link.producer.give_up()
            link.close()
        if self._replies is not None:
            self._replies.give_up()

    # -- beginning and end --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to take replies, and to look after the engines."""
        for link in self.links:
            link.look()
        self._tasks = [
            asyncio.create_task(self._dispatch(), name="engine-client-dispatch"),
            asyncio.create_task(self._watch(), name="engine-client-watch"),
        ]

    async def close(self, *, timeout: float = 2.0) -> None:
        """Abort what is not finished, and let go; waits up to ``timeout`` seconds for the engines. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for request_id, pending in list(self._pending.items()):
            if not pending.finished:
                await self._tell_abort(request_id, pending)
                self._fail(pending, AbortedError(request_id, "the client was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._aborts, return_exceptions=True)
        for future in self._controls.values():
            future.cancel()
        for link in self.links:
            link.close()
        await asyncio.gather(*(link.producer.close(timeout=timeout) for link in self.links))
        if self._replies is not None:
            await self._replies.close()
            # Of engines that are gone. One that lives sees that nobody reads this any more.
            collect(self._path.rings, discard=True)

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def unanswered(self) -> int:
        """Requests of this client that are not finished."""
        return sum(link.unanswered for link in self.links)

    def choose(self) -> EngineLink:
        """The engine for the next request; to receive arrays into its ring: ``await link.producer.empty(...)``.

        Raises EngineUnavailableError.
        """
        return choose(self.links, self.patience)

    async def send_task(
        self,
        task: Any,
        *,
        request_id: str | None = None,
        choices: int = 1,
        timeout: float | None = None,
        put_timeout: float = PUT_SECONDS,
        engine: EngineLink | None = None,
    ) -> str:
        """Send a task; when this returns, it will be answered. Returns its request id, a new one by default.

        ``task``: any tree with arrays that a producer takes, stored once for all ``choices``. ``timeout`` is the
        request's deadline in seconds from now: it is not begun after that, and ends with DeadlineError. Waits up to
        ``put_timeout`` seconds for room in the ring. Raises EngineUnavailableError, RequestIdError if the id is in use,
        and what ``AsyncProducer.put`` raises; then nothing was sent.
        """
        if self._closed:
            raise ClosedError("this EngineClient was closed; make another one")
        if not isinstance(choices, int) or choices < 1:
            raise ValueError(f"choices is a number from 1 on; this one is {choices!r}")
        now = time.monotonic()
        deadline = math.inf if timeout is None else now + _seconds("timeout", timeout)
        link = engine or self.choose()
        if request_id is None:
            request_id = f"{self._path.queue.removeprefix(REPLY_PREFIX)}-{next(self._numbers)}"
        elif request_id in self._pending:
            raise RequestIdError(f"request {request_id} was sent already; choose another id")
        # Before the put: results may come before it returns.
        pending = _Pending(link, choices, deadline, unfinished=choices)
        self._pending[request_id] = pending
        link.unanswered += 1
        deadline_ns = 0 if timeout is None else int(deadline * 1e9)
        call = Request(request_id, self._path.queue, task, choices, deadline_ns)
        try:
            await link.producer.put(call, timeout=put_timeout, ttl=timeout)
        except BaseException:
            self._drop(request_id)
            raise
        pending.sent = True
        return request_id

    async def results(self, request_id: str) -> AsyncIterator[Output]:
        """The outputs of a request, as they come, each step of each choice once; what came before the call as well.

        Ends when every choice is finished. Raises RequestFailedError (HandlerError, DeadlineError, AbortedError,
        RefusedError, InvalidRequestError) or EngineUnavailableError when there will be no more, and RequestIdError for
        an id that was not sent, or whose results were read. Who stops reading before the end may read on, or ``abort``.
        """
        pending = self._pending.get(request_id)
        if pending is None:
            raise RequestIdError(f"request {request_id} was not sent by this client, or its results were read")
        while True:
            while pending.outputs:
                output = pending.outputs.popleft()
                if output.failure is not None:
                    self._drop(request_id)
                    raise failure_of(request_id, output.failure)
                yield output
            if pending.finished:
                self._drop(request_id)
                if pending.error is not None:
                    raise pending.error
                return
            pending.news.clear()
            await pending.news.wait()

    async def abort(self, request_id: str) -> None:
        """Nobody waits for a request any more: tell its engine, and end its results with AbortedError. Idempotent."""
        pending = self._pending.get(request_id)
        if pending is not None:
            if not pending.finished:
                self._fail(pending, AbortedError(request_id, "it was aborted"))
                await self._tell_abort(request_id, pending)
            self._keep(request_id)

    def abort_soon(self, request_id: str) -> None:
        """As ``abort``, without waiting, and nobody will read its results: for who is being cancelled himself."""

        async def abort() -> None:
            await self.abort(request_id)
            self._drop(request_id)

        task = asyncio.get_running_loop().create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def control(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        engine: str | None = None,
        timeout: float = CONTROL_SECONDS,
    ) -> Any:
        """Have an engine do something to itself, and return its answer. ``engine``: its queue, if there are several.

        Raises ControlError for what it can't do, or has not done in ``timeout`` seconds; EngineUnavailableError; what
        ``AsyncProducer.put`` raises; ValueError for a queue that is none of this client's.
        """
        link = self.choose() if engine is None else self._link(engine)
        control_id = f"control-{next(self._numbers)}"
        future = self._controls[control_id] = asyncio.get_running_loop().create_future()
        call = Control(control_id, self._path.queue, command, arguments or {})
        try:
            await link.producer.put(call, timeout=min(PUT_SECONDS, timeout), ttl=_seconds("timeout", timeout))
            answer: Answer = await _within(timeout, future)
        except _TooLongError:
            raise ControlError(
                f"{command}: engine {link.queue} has not answered for {timeout} s; it is {link.state}"
            ) from None
        finally:
            self._controls.pop(control_id, None)
        if answer.failure is not None:
            raise ControlError(f"{command}: {answer.failure.message}")
        return answer.value

    def _link(self, queue: str) -> EngineLink:
        for link in self.links:
            if link.queue == queue:
                return link
        raise ValueError(
            f"{queue!r} is no engine of this client; it has {', '.join(link.queue for link in self.links)}"
        )

    # -- what comes back ----------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        assert self._replies is not None
        while True:
            try:
                message = await self._replies.get()
            except ClosedError:
                return
            except ShmqError as error:
                logger.error("replies could not be read: %s", error)
                continue
            self._sort(message)
            del message

    def _sort(self, message: Message) -> None:
        # A copy, if there are arrays in it: results may be read late, and the engine needs its ring.
        events: Events = message.detach()
        for answer in events.answers:
            future = self._controls.get(answer.control_id)
            if future is not None and not future.done():
                future.set_result(answer)
        for output in events.outputs:
            pending = self._pending.get(output.request_id)
            if pending is None:
                self.strays += 1
            elif output.step < pending.steps.get(output.choice, 0):
                self.repeated += 1
            elif not pending.finished:
                pending.steps[output.choice] = math.inf if output.finished else output.step + 1
                pending.outputs.append(output)
                pending.unfinished -= output.finished
                pending.news.set()
                if pending.finished:
                    self._settled(pending)
                    self._keep(output.request_id)

    def _settled(self, pending: _Pending) -> None:
        """It is finished: its engine has nothing to do with it any more."""
        pending.link.unanswered -= 1

    def _fail(self, pending: _Pending, error: RequestFailedError | EngineUnavailableError) -> None:
        if not pending.finished:
            pending.error = error
            self._settled(pending)
            pending.news.set()

    def _keep(self, request_id: str) -> None:
        """Of a finished request the outputs are kept until somebody reads them, or there are too many."""
        self._unread[request_id] = None
        while len(self._unread) > _KEPT:
            self._drop(next(iter(self._unread)))

    def _drop(self, request_id: str) -> None:
        self._unread.pop(request_id, None)
        pending = self._pending.pop(request_id, None)
        if pending is not None and not pending.finished:
            self._settled(pending)

    async def _tell_abort(self, request_id: str, pending: _Pending) -> None:
        """To all engines if it may have been moved. Nothing is lost if one can't be told: its results go nowhere."""
        links = self.links if pending.moved or not pending.link.alive else [pending.link]
        for link in links:
            with contextlib.suppress(ShmqError):
                await link.producer.put(Abort(request_id, self._path.queue), timeout=0)

    # -- looking after the engines ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                for link in self.links:
                    link.look()
                await self._end_what_is_late()
                self._end_what_is_lost()
                await self._move_what_is_stranded()
            except (ShmqError, ApiError, OSError):
                logger.exception("looking after the engines failed; it is tried again")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _end_what_is_late(self) -> None:
        now = time.monotonic() - _LATE_SECONDS
        for request_id, pending in list(self._pending.items()):
            if pending.deadline < now and not pending.finished:
                self._fail(pending, DeadlineError(request_id, "its time is over, and the engine has said nothing"))
                self._keep(request_id)
                await self._tell_abort(request_id, pending)

    def _end_what_is_lost(self) -> None:
        now = time.monotonic()
        if any(link.alive or now - link.seen <= self.patience for link in self.links):
            return
        for request_id, pending in list(self._pending.items()):
            if not pending.finished:
                message = f"its engine is gone, and no other has come for {self.patience:.0f} s"
                self._fail(pending, EngineUnavailableError(f"request {request_id}: {message}"))
                self._keep(request_id)

    async def _move_what_is_stranded(self) -> None:
        now = time.monotonic()
        targets = [link for link in self.links if link.serving]
        for link in self.links:
            stranded = link.unanswered and not link.alive and now - link.seen > _MOVE_SECONDS
            if not (stranded and targets):
                continue
            target = min(targets, key=lambda link: link.burden)
            moved = await asyncio.to_thread(
                move_calls, link.queue, target.queue, namespace=link.path.namespace, runtime_dir=self._runtime_dir
            )
            if moved is None:
                continue
            if moved:
                logger.warning(
                    "%d calls of engine %s, which is gone, were moved to %s", moved, link.queue, target.queue
                )
            for pending in self._pending.values():
                # One that waits for room is put into the old queue afterwards: the next look moves it.
                if pending.link is link and pending.sent and not pending.finished:
                    pending.moved = True
                    pending.link = target
                    link.unanswered -= 1
                    target.unanswered += 1


class _TooLongError(Exception):
    """A future had no result in time. Not TimeoutError, which the errors of a queue are as well."""


async def _within(timeout: float, future: asyncio.Future[T]) -> T:
    done, _ = await asyncio.wait([future], timeout=timeout)
    if not done:
        raise _TooLongError
    return future.result()


def _seconds(name: str, value: float) -> float:
    if not isinstance(value, numbers.Real) or not 0 < value < _LONGEST_SECONDS:
        raise ValueError(f"{name} is a number of seconds above 0; this one is {value!r}")
    return float(value)
