"""Get messages from a queue: ``Consumer`` blocks, ``AsyncConsumer`` awaits; everything else they share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import numbers
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fmq import encoding
from fmq.doorbell import ConsumerBell, Nudge, SubscriberBell
from fmq.errors import ClosedError, ForkedError, ProtocolError, QueueEmptyError, QueueInUseError
from fmq.lifetime import close_at_exit, collected
from fmq.message import Message, SetAside, Source
from fmq.paths import QueueLock, QueuePath
from fmq.protocol import ConsumerProtocol
from fmq.rings import QueueRings
from fmq.waiting import LoopWaiter, Steps, deadline_of, run, run_async
from shmq import Mappings, Record, ShmqError, ViewsHeldError, collect
from shmq.segment import abandon_in_child

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics

logger = logging.getLogger("fmq")

_RECHECK = 0.05
"""Seconds between two looks into the rings while asleep, should a doorbell be lost. Costs 0.1 % of a core."""

_TIDY_SECONDS = 1.0
"""How often to look for rings that came without a word, and for owners that died."""

_SPIN_SECONDS = 500e-6
"""How long to look into the rings, at most, before going to sleep, while messages come quickly.

To be woken takes some 50 us, and costs the producer as much for the doorbell. The consumer looks for twice as long as
the last wait took, and not at all if that was longer than this.
"""

_HEAR_SECONDS = 0.01
"""How often to hear producers while there is always something to take."""

_QUICK_TURN = 0.002
_LONGEST_TURN = 64
"""Seconds that the turn of a ring should take, and how many messages it may deliver at most."""

_CLAIM_TRIES = 20
_CLAIM_PAUSE = 0.01

_NUMBERS = (float, int)


class ConsumerBase:
    """What both consumers share. Every method may be called from any thread; in a forked child it raises ForkedError.

    A queue has one consumer at a time: QueueInUseError, with the pid of the other, if there is one that lives (stopped
    or not). With ``type`` (a msgspec.Struct, say) payloads are checked and converted while they are decoded, and what
    does not fit raises DecodeError from ``get``. What was put before is delivered, whether its producer lives or not.

    ``accept`` names the codecs that are decoded; for a message of another one ``get`` raises CodecRefusedError. With
    "pickle" in it, everyone who can write to the queue can run code in this process, and there can be no ``type``; what
    runs while a message is unpickled must not use this consumer, whose lock is held.

    A message with which ``max_deliveries`` consumers died (None: any number) is set aside: not delivered any more, kept
    in its ring, logged, and told once to ``on_set_aside``, on whatever thread gets messages. A message that is held for
    ``warn_held`` seconds (None: never) is logged, once. ``metrics`` counts what is taken.

    ``spin``: whether ``get`` may look into the rings for up to half a millisecond before it sleeps, while messages come
    quickly. The shortest way where the process has nothing else to do; not for one whose other work needs the core.

    ``mappings`` is told of the segments that the consumer maps and unmaps, with its lock held (engine.placement pins
    them for a GPU).
    """

    _noun = "consumer"
    _protocol_class = ConsumerProtocol
    _may_spin: bool
    _on_set_aside: Callable[[SetAside], None] | None = None

    def __init__(
        self,
        queue: str,
        *,
        namespace: str | None = None,
        type: Any = Any,
        accept: Iterable[str] = ("msgpack",),
        max_deliveries: int | None = 3,
        on_set_aside: Callable[[SetAside], None] | None = None,
        warn_held: float | None = 60.0,
        runtime_dir: str | os.PathLike[str] | None = None,
        metrics: QueueMetrics | None = None,
        spin: bool = True,
        mappings: Mappings | None = None,
    ) -> None:
        _check_limits(max_deliveries, warn_held)
        path = QueuePath(queue, namespace, runtime_dir)
        self._queue_lock = QueueLock(path)
        self._on_set_aside = on_set_aside
        rings = QueueRings(path, max_deliveries or 0, mappings)
        self._begin(path, rings, encoding.decoder(accept, type), warn_held, metrics)
        self._may_spin = self._may_spin and spin

    def _begin(
        self,
        path: QueuePath,
        rings: QueueRings,
        decode: Callable[[int, bytes, list[Any]], Any],
        warn_held: float | None,
        metrics: QueueMetrics | None,
    ) -> None:
        self._path = path
        path.make_directory()
        with contextlib.ExitStack() as undo:
            undo.callback(path.tidy)
            self._nudge = Nudge()
            undo.callback(self._nudge.close)
            self._bell = self._connect(undo)
            undo.pop_all()
        kind = self._protocol_class if metrics is None else metrics.consumer_protocol(path, self._protocol_class)
        self._protocol = kind(
            rings,
            time.time_ns(),
            decode,
            self._released,
            self._report,
            self._note_set_aside,
            self._next_turn,
        )
        self._news: deque[SetAside] = deque()
        self._warn_held = math.inf if warn_held is None else warn_held
        self._turn_began = self._heard = time.monotonic()
        self._turn_length = 1
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._refusal: Exception | None = None
        self._take_one = self._protocol.take
        self._descriptors = [self._bell.fileno(), self._nudge.fileno()]
        self._waiter = LoopWaiter(self._descriptors)
        self._tidied = time.monotonic()
        self._last_wait = _SPIN_SECONDS
        self._may_spin = len(os.sched_getaffinity(0)) > 1
        abandon_in_child(self)
        close_at_exit(self)
        try:
            for finding in collect(self._path.rings):
                if finding.removed:
                    logger.info("%s: removed %s: %s", self._path, finding.name, finding.reason)
            self._discover_first()
        except BaseException:
            self._shut()
            raise
        if metrics is not None:
            metrics.attach(self, self._protocol, self._lock)

    def _connect(self, undo: contextlib.ExitStack) -> ConsumerBell | SubscriberBell:
        """Become the one consumer, and hear producers. What ``undo`` is told is undone if that fails."""
        self._queue_lock.acquire()
        undo.callback(self._queue_lock.release)
        return ConsumerBell(self._path.endpoint)

    def _disconnect(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path.socket)
        self._queue_lock.release()

    def _discover_first(self) -> None:
        """Attach the rings that are there. Raises QueueInUseError if one of them has another consumer."""
        for _ in range(_CLAIM_TRIES):
            self._protocol.discover()
            in_use = [error for error in self._protocol.postponed.values() if isinstance(error, QueueInUseError)]
            if not in_use:
                return
            # The kernel may be about to take down the consumer before.
            time.sleep(_CLAIM_PAUSE)
        raise in_use[0]

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self._path.queue

    @property
    def namespace(self) -> str:
        """The namespace that the queue is in."""
        return self._path.namespace

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is a forked child's copy."""
        return self._refusal is not None

    def __repr__(self) -> str:
        state = "open" if self._refusal is None else "closed"
        return f"<{type(self).__name__} of {self._path!s}, {state}>"

    # -- at once ------------------------------------------------------------------------------------------------------

    def _take(self) -> Message | None:
        with self._lock:
            message = self._take_one()
        if self._news:
            self._tell()
        return message

    def _note_set_aside(self, source: Source, record: Record) -> None:
        self._news.append(SetAside(source, record, self._lock))

    def _tell(self) -> None:
        """Tell of what was set aside; without the lock, for the callback may call anything."""
        while self._news:
            with contextlib.suppress(IndexError):
                aside = self._news.popleft()
                logger.error(
                    "%s: message %d of producer %s is set aside, for too many consumers died with it (handed out %d "
                    "times); Consumer.set_aside() has it for inspection",
                    self._path,
                    aside.sequence,
                    aside.producer,
                    aside.deliveries,
                )
                if self._on_set_aside is not None:
                    try:
                        self._on_set_aside(aside)
                    except Exception:
                        logger.exception("%s: on_set_aside failed", self.queue)

    def _next_turn(self) -> int:
        """Between two turns of the rings: hear producers who came while there was always something to take.

        A turn is as long as lets this happen every few milliseconds, and at most _LONGEST_TURN messages.
        """
        now = time.monotonic()
        took = now - self._turn_began
        self._turn_began = now
        if took < _QUICK_TURN:
            self._turn_length = min(2 * self._turn_length, _LONGEST_TURN)
        elif took > 4 * _QUICK_TURN:
            self._turn_length = 1
        if now - self._heard >= _HEAR_SECONDS:
            self._heard = now
            if self._hear():
                # That may have used up the edge that a sleeping thread waits for.
                self._nudge.set()
            self._tidy()
        return self._turn_length

    def _take_many(self, first: Message, limit: int) -> list[Message]:
        messages = [first]
        with self._lock:
            if self._refusal is None and self._protocol.is_suspect(first):
                # Alone, so that it is known who is to blame if this consumer dies, too.
                return messages
            try:
                while len(messages) < limit and (message := self._take_one()) is not None:
                    if self._protocol.is_suspect(message):
                        self._protocol.put_back(message)
                        break
                    messages.append(message)
            except ShmqError as error:
                # Not now: it would take along what was taken already.
                if self._refusal is None:
                    self._defer(error)
        self._tell()
        return messages

    def _defer(self, error: Exception) -> None:
        # Its frames have the messages before it; and when it was raised, nothing of it may be left in a cycle.
        error = error.with_traceback(None)

        def take() -> Message | None:
            nonlocal error
            self._take_one = self._protocol.take
            try:
                raise error
            finally:
                del error

        self._take_one = take

    def _released(self) -> None:
        """A message was given back, on any thread: settle it and wake who waits for its space."""
        if self._lock.acquire(blocking=False):
            try:
                if self._refusal is None:
                    self._protocol.reap()
                    self._wake_producers()
            finally:
                self._lock.release()
        else:
            # Whoever has the lock may be this very thread, interrupted by a finalizer.
            self._nudge.set()

    def _wake_producers(self) -> None:
        frames = self._protocol.spaces()
        for address, frame in frames:
            self._bell.send_to(address, frame)
        if frames and self._bell.readable():
            # Sending may have used up the edge that a sleeping thread waits for.
            self._nudge.set()

    def _pump(self) -> None:
        """Take in what producers sent, and that somebody nudged."""
        self._nudge.clear()
        self._hear()

    def _hear(self) -> bool:
        """Take in what producers sent. False if that was nothing."""
        heard = False
        while self._bell.readable() and (received := self._bell.receive_from()) is not None:
            heard = True
            address, data = received
            try:
                for frame in self._protocol.receive(address, data):
                    self._bell.send_to(*frame)
            except ProtocolError as error:
                logger.warning("%s: a frame was passed over: %s", self._path, error)
        return heard

    def _report(self, error: Exception) -> None:
        # As text: a record of the error itself would keep its traceback, and the frames in it.
        logger.warning("%s: a ring is left out: %s", self._path, str(error))

    def set_aside(self) -> list[SetAside]:
        """The messages that are kept because too many consumers died with them, to be read or discarded."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self._protocol.discover()
            return [SetAside(source, record, self._lock) for source, record in self._protocol.set_aside()]

    # -- in steps -----------------------------------------------------------------------------------------------------

    def _wait(self) -> Steps[Message]:
        asleep = False
        try:
            while True:
                with self._lock:
                    if self._refusal is not None:
                        raise self._refusal
                    self._pump()
                    self._protocol.reap()
                    self._tidy()
                    message = self._protocol.take()
                    if message is None:
                        asleep = True
                        may_sleep = self._protocol.fall_asleep()
                        self._wake_producers()
                self._tell()
                if message is not None:
                    return message
                if may_sleep:
                    yield None
        finally:
            if asleep:
                with self._lock:
                    if self._refusal is None:
                        self._protocol.wake_up()

    def _tidy(self) -> None:
        now = time.monotonic()
        if now - self._tidied >= _TIDY_SECONDS:
            self._tidied = now
            self._bell.mind_descriptors()
            self._protocol.discover()
            self._protocol.tidy()
            for source, record, age in self._protocol.long_held(now, self._warn_held):
                logger.warning(
                    "%s: message %d of producer %s has been held for %.0f s, and its space in the ring with it; "
                    "release() it, or detach() what is to be kept for long",
                    self._path,
                    record.sequence,
                    source.producer,
                    age,
                )

    def _look_around(self) -> Message | None:
        """Look once more, for rings too: that of a new producer may be there before its Hello is."""
        with self._lock:
            if self._refusal is None:
                self._protocol.discover()
        return self._take()

    def _spin_until(self, deadline: float, now: float) -> float:
        """Until when to look for a message before going to sleep: a little longer, if the last one came quickly."""
        if self._may_spin and self._last_wait < _SPIN_SECONDS:
            return min(deadline, now + max(50e-6, min(2 * self._last_wait, _SPIN_SECONDS)))
        return now

    def _take_if_any(self) -> Message | None:
        with self._lock:
            if self._refusal is None and not self._protocol.has_more():
                return None
        return self._take()

    def _empty(self) -> Exception:
        return QueueEmptyError(f"{self._path} in namespace {self.namespace} had no message in the time given")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _shut(self, hand_back: bool = True) -> None:
        """Let go of everything. ``hand_back``: the messages are not to blame for this end."""
        with self._lock:
            if self._refusal is not None:
                return
            if held := self._protocol.held():
                raise ViewsHeldError(
                    f"the {self._noun} of {self._path} can't be closed: arrays look into {', '.join(held)}; drop "
                    "them, or detach() the messages, and close again"
                )
            self._pump()
            for frame in self._protocol.close(hand_back=hand_back):
                self._bell.send_to(*frame)
            self._refuse(ClosedError(f"this {self._noun} of {self._path} was closed; make another one"))
            self._bell.close()
            self._waiter.close(self._close_descriptors)
            self._disconnect()
        self._path.tidy()
        self._tell()

    def _leave(self, kind: type[BaseException] | None) -> None:
        """Close at the end of a ``with`` block. An Exception there may be a message's fault, and counts as a death."""
        try:
            self._shut(hand_back=kind is None or not issubclass(kind, Exception))
        except ViewsHeldError as error:
            if kind is None:
                raise
            # Not instead of the other exception, whose traceback may hold the arrays; and as text, for the record of
            # the error itself would keep that traceback.
            logger.warning("%s", str(error))

    def _close_descriptors(self) -> None:
        self._nudge.close()
        self._bell.close_descriptor()

    def give_up(self) -> None:
        """Close now; what was not released is the next consumer's. Raises ViewsHeldError while arrays are alive."""
        self._shut()

    def end(self) -> None:
        """At the end of the process: as ``give_up``, or, while arrays are alive, stop acknowledging.

        What dies with the interpreter was not released. The lock is kept until the process is gone.
        """
        try:
            self._shut(hand_back=False)
        except ViewsHeldError:
            with self._lock:
                self._protocol.abandon()
                self._refuse(ClosedError(f"this {self._noun} of {self._path} ended with its process"))

    def __del__(self) -> None:
        if hasattr(self, "_refusal"):
            collected(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a consumer can't be copied, nor sent to another process; close it, and make one there")

    def abandon(self) -> None:
        """In a forked child: refuse every further use. Called by the fork itself."""
        self._refuse(ForkedError(f"this {self._noun} of {self._path} is the parent process's; the child can't use it"))
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def _refuse(self, refusal: Exception) -> None:
        def take() -> Message | None:
            raise refusal

        self._refusal = refusal
        self._take_one = take


class Consumer(ConsumerBase):
    """Gets messages from a queue, and blocks where it has to wait. How it is made: see ConsumerBase."""

    def get(self, *, timeout: float | None = None) -> Message:
        """The next message. Waits up to ``timeout`` seconds (0: not at all, None: without limit).

        Raises QueueEmptyError, ClosedError, and for a message that can't be had CorruptRecordError or DecodeError; such
        a message is done, and the next call gives the one after it.
        """
        if timeout is not None and (type(timeout) not in _NUMBERS or not timeout >= 0):
            deadline_of(timeout)
        # As in _take, whose call would cost 0.1 us.
        with self._lock:
            message = self._take_one()
        if self._news:
            self._tell()
        if message is not None:
            return message
        deadline = deadline_of(timeout)
        begun = time.monotonic()
        until = self._spin_until(deadline, begun)
        while (now := time.monotonic()) < until:
            message = self._take_if_any()
            if message is not None:
                self._last_wait = now - begun
                return message
        if not self._turn.acquire(timeout=-1 if timeout is None else max(0.0, deadline - time.monotonic())):
            raise self._empty()
        try:
            return run(self._wait(), self._descriptors, deadline, _RECHECK, self._empty)
        except QueueEmptyError:
            message = self._look_around()
            if message is None:
                raise
            return message
        finally:
            self._last_wait = time.monotonic() - begun
            self._turn.release()

    def get_many(self, limit: int = 1024, *, timeout: float | None = None) -> list[Message]:
        """All messages that are there, one at least, ``limit`` at most. Waits and raises as ``get`` for the first.

        A message with which a consumer died comes alone: if it is to blame, no other is set aside with it.
        """
        _check_limit(limit)
        return self._take_many(self.get(timeout=timeout), limit)

    def __iter__(self) -> Iterator[Message]:
        """Messages without end; stops when the consumer is closed."""
        return self

    def __next__(self) -> Message:
        try:
            return self.get()
        except ClosedError:
            raise StopIteration from None

    def close(self) -> None:
        """Give up the queue; what was not released is the next consumer's, and not held against it. Idempotent.

        Raises ViewsHeldError, and stays open, while arrays of messages are alive: their memory would be used again
        under them.
        """
        self._shut()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind)


class AsyncConsumer(ConsumerBase):
    """Gets messages from a queue, and awaits where it has to wait.

    Works in one event loop after another. Cancelling ``get`` loses nothing: the message stays in the queue. For the
    rest see Consumer, whose methods these are.
    """

    async def get(self, *, timeout: float | None = None) -> Message:
        """As Consumer.get."""
        deadline = deadline_of(timeout)
        message = self._take()
        if message is not None:
            return message
        begun = time.monotonic()
        until = self._spin_until(deadline, begun)
        while (now := time.monotonic()) < until:
            await asyncio.sleep(0)
            message = self._take_if_any()
            if message is not None:
                self._last_wait = now - begun
                return message
        try:
            return await run_async(self._wait(), self._waiter, deadline, _RECHECK, self._empty)
        except QueueEmptyError:
            message = self._look_around()
            if message is None:
                raise
            return message
        finally:
            self._last_wait = time.monotonic() - begun

    async def get_many(self, limit: int = 1024, *, timeout: float | None = None) -> list[Message]:
        """As Consumer.get_many."""
        _check_limit(limit)
        return self._take_many(await self.get(timeout=timeout), limit)

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages without end; stops when the consumer is closed."""
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.get()
        except ClosedError:
            raise StopAsyncIteration from None

    async def close(self) -> None:
        """As Consumer.close."""
        self._shut()

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind)


def _check_limit(limit: int) -> None:
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"a limit is a number of messages from 1 on; this one is {limit!r}")


def _check_limits(max_deliveries: int | None, warn_held: float | None) -> None:
    if max_deliveries is not None and (not isinstance(max_deliveries, int) or max_deliveries < 1):
        raise ValueError(f"max_deliveries is a number from 1 on, or None for no limit; this one is {max_deliveries!r}")
    if warn_held is not None and (not isinstance(warn_held, numbers.Real) or not warn_held > 0):
        raise ValueError(f"warn_held is a number of seconds above 0, or None for never; this one is {warn_held!r}")
