"""Put messages into a queue: ``Producer`` blocks, ``AsyncProducer`` awaits; everything else they share."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import numbers
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fmq import encoding
from fmq.doorbell import ProducerBell, PublisherBell
from fmq.encoding import RAW
from fmq.errors import (
    ClosedError,
    DTypeError,
    ForkedError,
    PeerUnavailableError,
    ProtocolError,
    QueueFullError,
    QueueTimeoutError,
)
from fmq.lifetime import close_at_exit, collected
from fmq.outgoing import INLINE_BYTES, Loans, Outgoing
from fmq.paths import QueuePath, consumer_is_alive
from fmq.protocol import ProducerProtocol
from fmq.rings import create_ring
from fmq.waiting import LoopWaiter, Steps, deadline_of, run, run_async
from shmq import Payload, RingWriter, SegmentSpaceError, fence
from shmq.fence import LOCK_IS_FENCE
from shmq.layout import DONE, PENDING, RETURNED, SET_ASIDE, TAKEN
from shmq.segment import abandon_in_child

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics

logger = logging.getLogger("fmq")

RING_SIZE = 64 * 1024 * 1024
SPILL_LIMIT = 4 * 1024 * 1024 * 1024
TIMEOUT = 30.0
CLOSE_TIMEOUT = 5.0

RECHECK = 0.02
"""Seconds between two looks for space while waiting, should a wake-up be lost. Costs 0.2 % of a core."""

_SPILL_SECONDS = 0.1
"""How long what would fit the ring waits for room behind messages that are held, before it goes to a spill segment."""

_THREAD_COPY_BYTES = 512 * 1024
"""Copies from this size on leave the event loop for a thread. Below, the copy (0.05 ms) is the quicker of the two."""

_LONGEST_TTL = 1_000_000_000

_STATES = {
    PENDING: "was not taken yet",
    RETURNED: "is not begun",
    TAKEN: "is held",
    DONE: "is done, but arrays of it are alive",
    SET_ASIDE: "is set aside for inspection",
}

_NO_BUFFERS: list[NDArray[Any]] = []

T = TypeVar("T")


class ProducerBase:
    """What both producers share. Every method may be called from any thread; in a forked child it raises ForkedError.

    ``queue`` and ``namespace`` name the queue (the namespace is by default ``$FMQ_NAMESPACE`` or "default");
    ``ring_size`` and ``spill_limit`` are bytes of shared memory, the first allocated now, the second at most, when
    needed. Neither a consumer nor anything else has to be there. ``codec`` is "msgpack", or "pickle" for objects that
    msgpack lacks, which the consumer has to accept. ``metrics`` counts what is put. Raises QueueNameError,
    SegmentSpaceError, SegmentError, and ValueError for a codec that is none.
    """

    _noun = "producer"
    _heirs = "the next consumer"

    def __init__(
        self,
        queue: str,
        *,
        namespace: str | None = None,
        ring_size: int = RING_SIZE,
        spill_limit: int = SPILL_LIMIT,
        codec: str = "msgpack",
        runtime_dir: str | os.PathLike[str] | None = None,
        metrics: QueueMetrics | None = None,
    ) -> None:
        self._begin(QueuePath(queue, namespace, runtime_dir), ring_size, spill_limit, codec, metrics)

    def _begin(
        self, path: QueuePath, ring_size: int, spill_limit: int, codec: str, metrics: QueueMetrics | None
    ) -> None:
        self._encoding, self._encode_tree = encoding.encoder(codec)
        self._path = path
        path.make_directory()
        with contextlib.ExitStack() as undo:
            undo.callback(path.tidy)
            self._writer: RingWriter
            self._bell: ProducerBell | PublisherBell
            self._protocol: ProducerProtocol
            self._connect(undo, ring_size, spill_limit)
            undo.pop_all()
        self._loans = Loans()
        self._inline = min(INLINE_BYTES, self._writer.max_record // 4)
        self._lock = threading.Lock()
        self._refusal: Exception | None = None
        self.array_bytes = 0
        """Bytes of arrays and other large buffers put so far."""
        self.copied_bytes = 0
        """How many of them were copied into the ring; the others were loans."""
        self._stuck_since = math.inf
        self._post: Callable[[bytes, int, int, int], int | None] = self._writer.post
        self._asleep = self._writer.asleep
        self._descriptors = [self._bell.fileno()]
        self._waiter = LoopWaiter(self._descriptors)
        self._copier: ThreadPoolExecutor | None = None
        abandon_in_child(self)
        close_at_exit(self)
        self._outgoing: Callable[..., Outgoing] = Outgoing
        self._meter = None
        if metrics is not None:
            self._meter = metrics.producer_meter(self, self._path, self._writer, self._lock)
            self._post, self._outgoing = self._meter.post, self._meter.outgoing

    def _connect(self, undo: contextlib.ExitStack, ring_size: int, spill_limit: int) -> None:
        """Make the ring, and tell the consumer of it. What ``undo`` is told is undone if that fails."""
        self._writer = create_ring(self._path, ring_size, spill_limit)
        undo.callback(self._writer.close, remove=True)
        self._bell = ProducerBell(self._path.endpoint)
        self._protocol = ProducerProtocol(self._writer)
        self._bell.send(self._protocol.hello())

    def _disconnect(self) -> None:
        """Give up what ``_connect`` got, besides the ring and the doorbell."""

    def _peer_is_alive(self) -> bool:
        """Whether somebody is there who could take messages. The lock is held, or nobody else uses this object."""
        return consumer_is_alive(self._path)

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self._path.queue

    @property
    def namespace(self) -> str:
        """The namespace that the queue is in."""
        return self._path.namespace

    @property
    def ring(self) -> str:
        """The name of the segment that holds this producer's ring."""
        return self._writer.segment.name

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is a forked child's copy."""
        return self._refusal is not None

    def __repr__(self) -> str:
        state = "open" if self._refusal is None else "closed"
        return f"<{type(self).__name__} of {self._path!s}, {state}>"

    # -- at once ------------------------------------------------------------------------------------------------------

    def _encode(self, obj: Any) -> tuple[int, bytes, list[NDArray[Any]]]:
        if type(obj) is bytes:
            return RAW, obj, []
        try:
            blob, buffers = self._encode_tree(obj)
        except BaseException:
            if self._meter is not None:
                self._meter.failed()
            raise
        return self._encoding, blob, buffers

    def _post_small(self, encoding: int, blob: bytes, ttl: float | None) -> int | None:
        """Post a message that is all blob. None if there is no room."""
        # Not acquire and release, 0.08 us less: after Ctrl-C between that and its `try` nobody would ever get the lock.
        with self._lock:
            sequence = self._post(blob, encoding, time.time_ns(), 0 if ttl is None else expires_at(ttl))
        if not LOCK_IS_FENCE:
            fence.full()
        if self._is_asleep():
            self._ring()
        return sequence

    def _is_asleep(self) -> bool:
        try:
            return bool(self._asleep())
        except ValueError:
            # Closed by another thread, and unmapped, since the lock was dropped.
            return False

    def _ring(self) -> None:
        with self._lock:
            if self._refusal is None:
                self._send_frames()

    def _send_frames(self) -> bool:
        """Send what is due. False if that was nothing."""
        if not LOCK_IS_FENCE:
            fence.full()
        frames = self._protocol.frames()
        for frame in frames:
            self._bell.send(frame)
        return bool(frames)

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _pump(self) -> None:
        """Take in what the consumer sent, and send what is due."""
        while True:
            while self._bell.readable() and (data := self._bell.receive()) is not None:
                try:
                    self._protocol.receive(data)
                except ProtocolError as error:
                    logger.warning("%s: a frame was passed over: %s", self._path, error)
            if not self._send_frames():
                return
            # Sending may have used up the edge that we are about to wait for: look once more.

    # -- in steps -----------------------------------------------------------------------------------------------------

    def _start(self, encoding: int, blob: bytes, buffers: list[NDArray[Any]], ttl: float | None) -> Outgoing:
        return self._outgoing(self._writer, self._loans, encoding, blob, buffers, 0 if ttl is None else expires_at(ttl))

    def _put_now(self, outgoing: Outgoing) -> int | None:
        """As ``_put`` if there is room for all of it at once; None if there is not."""
        try:
            with self._lock:
                self._check()
                if not outgoing.place():
                    return None
            outgoing.copy()
            with self._lock:
                self._check()
                sequence = outgoing.post()
        except BaseException:
            self._finish(outgoing)
            raise
        if sequence is not None:
            self._finish(outgoing)
        return sequence

    def _put(self, outgoing: Outgoing) -> Steps[int]:
        try:
            yield from self._make_spills(outgoing.large)
            yield from self._until(lambda: self._or_spill(lambda spill: outgoing.place(spill) or None), for_room=True)
            if outgoing.long_copy_bytes >= _THREAD_COPY_BYTES:
                yield outgoing.copy
            else:
                outgoing.copy()
            return (yield from self._until(outgoing.post, for_room=True))
        finally:
            self._finish(outgoing)

    def _make_spills(self, sizes: list[int]) -> Steps[None]:
        """Make what segments it takes for payloads that the ring can't have, without the lock, and in a thread."""
        with self._lock:
            self._check()
            missing = self._writer.spills_missing(sizes)
        for capacity in missing:
            yield functools.partial(self._make_spill, capacity)

    def _make_spill(self, capacity: int) -> None:
        # Who needs it finds out that there is no room, and says so.
        with contextlib.suppress(SegmentSpaceError):
            spill = self._writer.make_spill(capacity)
            with self._lock:
                self._writer.add_spill(spill)

    def _finish(self, outgoing: Outgoing) -> None:
        with self._lock:
            if self._refusal is None:
                outgoing.finish()
                if outgoing.posted:
                    self.array_bytes += outgoing.array_bytes
                    self.copied_bytes += outgoing.copied_bytes
                self._send_frames()

    def _lend(self, nbytes: int) -> Steps[NDArray[np.uint8]]:
        writer = self._writer

        def reserve(spill: bool) -> Payload | None:
            return writer.reserve(nbytes) or (writer.reserve_spill_if_possible(nbytes) if spill else None)

        yield from self._make_spills([nbytes])
        payload = yield from self._until(lambda: self._or_spill(reserve), for_room=True)
        with self._lock:
            root = self._writer.lend(payload)
            self._loans.add(root, payload)
        return root

    def _or_spill(self, attempt: Callable[[bool], T | None]) -> T | None:
        """``attempt(False)``, or ``attempt(True)`` once the ring has been stuck for a while.

        It is stuck when the consumer has taken all there is and holds what stands in the way: waiting for it to take
        less would be in vain, and it may itself be waiting for more. A consumer that is merely slow is waited for.
        """
        result = attempt(False)
        now = time.monotonic()
        if result is not None or not self._writer.is_held():
            self._stuck_since = math.inf
        elif self._stuck_since == math.inf:
            self._stuck_since = now
        elif now - self._stuck_since >= _SPILL_SECONDS and self._peer_is_alive():
            return attempt(True)
        return result

    def _drained(self) -> Steps[bool]:
        """Wait until every message is done; False as soon as no consumer is alive that could do it."""

        def attempt() -> bool | None:
            # In this order: a consumer that finishes the last message and goes in between has done its work.
            alive = self._peer_is_alive()
            if self._writer.unfinished() == 0:
                return True
            return None if alive else False

        return (yield from self._until(attempt))

    def _until(self, attempt: Callable[[], T | None], *, for_room: bool = False) -> Steps[T]:
        """Call ``attempt``, under the lock, until it gives something other than None; wait for space in between.

        ``for_room``: it is room for a put that is missing. It may be made, and the wait counts as one for it.
        """
        with self._lock:
            self._check()
            result = attempt()
            if result is not None:
                return result
            self._protocol.begin_wait()
        begun = time.monotonic()
        try:
            while True:
                with self._lock:
                    self._check()
                    self._pump()
                    self._protocol.want_space()
                    result = attempt()
                    if result is None and for_room and self._make_way(time.monotonic() - begun):
                        result = attempt()
                if result is not None:
                    return result
                yield None
        finally:
            with self._lock:
                if self._refusal is None:
                    self._protocol.end_wait()
                    if for_room and self._meter is not None:
                        self._meter.waited(time.monotonic() - begun)

    def _make_way(self, waited: float) -> bool:
        """After ``waited`` seconds without room: whether something was done about it. The lock is held."""
        return False

    def _nameless(self) -> str:
        """What is to be said if somebody has removed the ring's name; else empty."""
        with self._lock:
            if self._refusal is not None or self._writer.segment.is_linked():
                return ""
        return (
            f"{self._path} in {self.namespace}: somebody has removed the ring {self.ring} from /dev/shm, "
            "so that no consumer finds it; make another producer and put again what it had not finished "
            "(systemd removes the files of users who log out: RemoveIPC in logind.conf)"
        )

    def _expired(self) -> Exception:
        if nameless := self._nameless():
            return PeerUnavailableError(nameless)
        if not self._peer_is_alive():
            return PeerUnavailableError(
                f"{self._path} in {self.namespace}: the ring of {self._writer.size:,} bytes is full, "
                "and no consumer is alive to empty it; start one (what was put before is kept for it)"
            )
        if self._protocol.problem:
            return PeerUnavailableError(
                f"{self._path} in {self.namespace}: its consumer can't read the ring {self.ring}: "
                f"{self._protocol.problem}"
            )
        with self._lock:
            unfinished = 0 if self._refusal else self._writer.unfinished()
            oldest = None if self._refusal else self._writer.oldest()
        told = ""
        if oldest is not None:
            sequence, timestamp, state = oldest
            age = max(0.0, time.time() - timestamp / 1e9)
            told = f", the oldest, message {sequence}, put {age:.1f} s ago, {_STATES.get(state, 'is damaged')}"
        return QueueFullError(
            f"{self._path} in {self.namespace}: the ring of {self._writer.size:,} bytes is full; "
            f"the consumer has {unfinished} messages still to finish{told}. Wait longer, release messages sooner "
            "(detach() those to keep), or raise ring_size"
        )

    def _not_flushed(self) -> Exception:
        if nameless := self._nameless():
            return PeerUnavailableError(nameless)
        if not self._peer_is_alive():
            return self._no_consumer()
        return QueueTimeoutError(self._unfinished() + "the time is over; the consumer is slow, or holds them")

    def _no_consumer(self) -> Exception:
        return PeerUnavailableError(
            self._unfinished() + "no consumer is alive; start one (what was put is kept for it)"
        )

    def _unfinished(self) -> str:
        with self._lock:
            unfinished = 0 if self._refusal else self._writer.unfinished()
        return f"{self._path} in {self.namespace}: {unfinished} messages are not yet done, and "

    # -- the end ------------------------------------------------------------------------------------------------------

    def _shut(self, drained: bool) -> None:
        nameless = self._nameless()
        with self._lock:
            if self._refusal is not None:
                return
            unfinished = self._writer.unfinished()
            if nameless and unfinished:
                logger.error("%s; %d messages are lost", nameless, unfinished)
            aside = self._writer.set_aside()
            remove = drained and not aside
            if self._meter is not None:
                self._meter.close()
            self._refuse(ClosedError(f"this {self._noun} of {self._path} was closed; make another one"))
            self._writer.close(remove=remove)
            if remove:
                self._bell.send(self._protocol.goodbye())
            else:
                logger.info(
                    "%s: %d messages are left to %s, and %d for inspection", self._path, unfinished, self._heirs, aside
                )
            self._bell.close()
            self._disconnect()
            self._waiter.close(self._bell.close_descriptor)
        self._path.tidy()

    def give_up(self) -> None:
        """Close without waiting: remove the ring if every message is done, else leave it to the next consumer."""
        self._shut(self._refusal is None and self._writer.unfinished() == 0)

    def end(self) -> None:
        """At the end of the process: as ``give_up``."""
        self.give_up()

    def __del__(self) -> None:
        if hasattr(self, "_refusal"):
            collected(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a producer can't be copied, nor sent to another process; make one there, of the same queue")

    def abandon(self) -> None:
        """In a forked child: refuse every further use. Called by the fork itself."""
        self._lock = threading.Lock()
        self._refuse(
            ForkedError(f"this {self._noun} of {self._path} is the parent process's; make another one in the child")
        )

    def _refuse(self, refusal: Exception) -> None:
        def post(*_: object) -> int:
            raise refusal

        self._refusal = refusal
        self._post = post


class Producer(ProducerBase):
    """Puts messages into a queue, and blocks where it has to wait. How it is made: see ProducerBase."""

    def put(self, obj: Any, *, timeout: float | None = TIMEOUT, ttl: float | None = None) -> int:
        """Put a message; when this returns, it will be delivered. Returns its sequence.

        Waits up to ``timeout`` seconds for room (0: not at all, None: without limit). A message that was not taken
        within ``ttl`` seconds is not delivered any more. Raises QueueFullError, PeerUnavailableError, EncodeError,
        TooLargeError, SegmentSpaceError, ClosedError; then nothing was put.
        """
        if timeout is not TIMEOUT:
            deadline_of(timeout)
        encoding, blob, buffers = (RAW, obj, _NO_BUFFERS) if type(obj) is bytes else self._encode(obj)
        if not buffers and len(blob) <= self._inline:
            # As in _post_small, whose call would cost 0.1 us.
            with self._lock:
                sequence = self._post(blob, encoding, time.time_ns(), 0 if ttl is None else expires_at(ttl))
            if not LOCK_IS_FENCE:
                fence.full()
            if self._is_asleep():
                self._ring()
            if sequence is not None:
                return sequence
        outgoing = self._start(encoding, blob, buffers, ttl)
        sequence = self._put_now(outgoing)
        return self._run(self._put(outgoing), timeout) if sequence is None else sequence

    def put_many(self, objs: Iterable[Any], *, timeout: float | None = TIMEOUT, ttl: float | None = None) -> list[int]:
        """Put messages one after another, and return their sequences. ``timeout`` is for each.

        When it raises, as ``put`` does, the messages before the one that failed have been put.
        """
        return [self.put(obj, timeout=timeout, ttl=ttl) for obj in objs]

    def empty(
        self, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, timeout: float | None = TIMEOUT
    ) -> NDArray[Any]:
        """A writable array that already lies in the ring: what is put with it costs no copy.

        Fill it, put it (alone, as part of a tree, or contiguous parts of it), and write to it no more: putting makes it
        read-only. Its space is used again when the messages with it are free *and* the array and all views of it are
        gone. An array that is dropped without having been put gives its space back. Waits and raises as ``put`` does.
        """
        dtype, shape, nbytes = _array_size(shape, dtype)
        if nbytes == 0:
            return np.empty(shape, dtype)
        return self._run(self._lend(nbytes), timeout).view(dtype).reshape(shape)

    def reserve(self, nbytes: int, *, timeout: float | None = TIMEOUT) -> memoryview:
        """The same as ``empty`` for bytes: a writable memoryview, to receive into; arrives as a memoryview."""
        return self.empty(nbytes, np.uint8, timeout=timeout).data

    def flush(self, *, timeout: float | None = TIMEOUT) -> None:
        """Wait until every message is done. Raises QueueTimeoutError, PeerUnavailableError if no consumer is alive."""
        if not run(self._drained(), self._descriptors, deadline_of(timeout), RECHECK, self._not_flushed):
            raise self._no_consumer()

    def close(self, *, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Wait up to ``timeout`` seconds until every message is done, and remove the ring. Idempotent.

        What is not done by then, or has no consumer, is handed over: the ring stays, and the next consumer delivers it.
        """
        if self._refusal is None:
            try:
                drained = run(self._drained(), self._descriptors, deadline_of(timeout), RECHECK, self._not_flushed)
            except QueueTimeoutError:
                drained = False
            self._shut(drained)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, steps: Steps[T], timeout: float | None) -> T:
        return run(steps, self._descriptors, deadline_of(timeout), RECHECK, self._expired)


class AsyncProducer(ProducerBase):
    """Puts messages into a queue, and awaits where it has to wait. Long copies leave the event loop for a thread.

    Works in one event loop after another. Cancelling any call loses nothing: what it had reserved is given back, and a
    message is put wholly or not at all. For the rest see Producer, whose methods these are.
    """

    async def put(self, obj: Any, *, timeout: float | None = TIMEOUT, ttl: float | None = None) -> int:
        """As Producer.put."""
        deadline_of(timeout)
        encoding, blob, buffers = self._encode(obj)
        if not buffers and len(blob) <= self._inline:
            sequence = self._post_small(encoding, blob, ttl)
            if sequence is not None:
                return sequence
        outgoing = self._start(encoding, blob, buffers, ttl)
        sequence = self._put_now(outgoing) if outgoing.long_copy_bytes < _THREAD_COPY_BYTES else None
        return await self._run(self._put(outgoing), timeout) if sequence is None else sequence

    async def put_many(
        self, objs: Iterable[Any], *, timeout: float | None = TIMEOUT, ttl: float | None = None
    ) -> list[int]:
        """As Producer.put_many."""
        return [await self.put(obj, timeout=timeout, ttl=ttl) for obj in objs]

    async def empty(
        self, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, timeout: float | None = TIMEOUT
    ) -> NDArray[Any]:
        """As Producer.empty."""
        dtype, shape, nbytes = _array_size(shape, dtype)
        if nbytes == 0:
            return np.empty(shape, dtype)
        return (await self._run(self._lend(nbytes), timeout)).view(dtype).reshape(shape)

    async def reserve(self, nbytes: int, *, timeout: float | None = TIMEOUT) -> memoryview:
        """As Producer.reserve."""
        return (await self.empty(nbytes, np.uint8, timeout=timeout)).data

    async def flush(self, *, timeout: float | None = TIMEOUT) -> None:
        """As Producer.flush."""
        if not await self._drive(self._drained(), timeout, self._not_flushed):
            raise self._no_consumer()

    async def close(self, *, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """As Producer.close."""
        if self._refusal is None:
            try:
                drained = await self._drive(self._drained(), timeout, self._not_flushed)
            except QueueTimeoutError:
                drained = False
            self._shut(drained)
            if self._copier is not None:
                self._copier.shutdown(wait=False)

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self, steps: Steps[T], timeout: float | None) -> T:
        return await self._drive(steps, timeout, self._expired)

    async def _drive(self, steps: Steps[T], timeout: float | None, expired: Callable[[], Exception]) -> T:
        return await run_async(steps, self._waiter, deadline_of(timeout), RECHECK, expired, self._executor)

    def _executor(self) -> Executor:
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "fmq-copy")
        return self._copier


def expires_at(ttl: float) -> int:
    """The nanoseconds of the monotonic clock at which a time to live in seconds is over. Raises ValueError."""
    if not isinstance(ttl, numbers.Real) or not 0 < ttl <= _LONGEST_TTL:
        raise ValueError(
            f"a ttl is a number of seconds above 0, at most {_LONGEST_TTL:,}, or None for no limit; this one is {ttl!r}"
        )
    return time.monotonic_ns() + max(1, int(ttl * 1e9))


def _array_size(shape: int | tuple[int, ...], dtype: DTypeLike) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    dtype = np.dtype(dtype)
    if dtype.hasobject or dtype.names is not None:
        raise DTypeError(f"an array of dtype {dtype} can't lie in shared memory; use a plain numeric dtype")
    sizes = (shape,) if isinstance(shape, SupportsIndex) else shape
    shape = tuple(operator.index(size) for size in sizes)
    if any(size < 0 for size in shape):
        raise ValueError(f"an array can't have shape {shape}")
    return dtype, shape, math.prod(shape) * dtype.itemsize
