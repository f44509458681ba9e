"""Put messages for a consumer on another host."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fmq import codec, encoding
from fmq.encoding import RAW
from fmq.errors import (
    ClosedError,
    DTypeError,
    ForkedError,
    PeerUnavailableError,
    QueueFullError,
    QueueTimeoutError,
)
from fmq.lifetime import close_at_exit, collected
from fmq.producer import CLOSE_TIMEOUT, TIMEOUT, expires_at
from fmq.remote.common import RECHECK, WINDOW_BYTES, WINDOW_MESSAGES, check_count, in_thread
from fmq.remote.link import CurveKeys, ProducerLink, new_id
from fmq.remote.protocol import MAX_BUFFERS, RemoteProducerProtocol
from fmq.waiting import LoopWaiter, Steps, deadline_of, run, run_async
from shmq import ShmqError, TooLargeError
from shmq.segment import abandon_in_child

logger = logging.getLogger("fmq")

_SMALL_BYTES = 64 * 1024
"""Buffers below this size are copied when they are put: ZeroMQ would copy them as well, only later."""

_THREAD_COPY_BYTES = 512 * 1024
"""Copies from this size on leave the event loop for a thread."""

Array = NDArray[Any]
T = TypeVar("T")


class _Parcel:
    """What was encoded, and which of its buffers are still to be copied."""

    __slots__ = ("blob", "buffers", "encoding", "long_copy_bytes", "nbytes", "sources")

    def __init__(self, encoding: int, blob: bytes, sources: list[Array], must_copy: Callable[[Array], bool]) -> None:
        if len(sources) > MAX_BUFFERS:
            raise TooLargeError(
                f"a message with {len(sources):,} arrays is too much, for each is a frame of its own; there may be "
                f"{MAX_BUFFERS:,}: stack them into fewer"
            )
        self.encoding = encoding
        self.blob = blob
        self.sources = sources
        self.nbytes = len(blob)
        self.long_copy_bytes = 0
        self.buffers: list[Array | None] = []
        for array in sources:
            self.nbytes += array.nbytes
            if array.flags.c_contiguous and array.nbytes >= _SMALL_BYTES and not must_copy(array):
                self.buffers.append(array.reshape(-1).view(np.uint8))
            else:
                self.buffers.append(None)
                if array.nbytes >= _SMALL_BYTES:
                    self.long_copy_bytes += array.nbytes

    def copy(self) -> None:
        """Copy what is to be copied. Needs no lock."""
        for index, array in enumerate(self.sources):
            if self.buffers[index] is None:
                target = np.empty(array.nbytes, np.uint8)
                codec.copy_buffer(array, target)
                self.buffers[index] = target


class RemoteProducerBase:
    """What both producers share. Every method may be called from any thread; in a forked child it raises ForkedError.

    ``endpoint`` is that of a consumer, tcp://host:port, which need not be there yet. What was put and is not released
    by the consumer stays in a window of ``window_bytes`` and ``window_messages`` *in this process*: it outlives every
    connection and every consumer, but not this process. ``codec`` as for Producer; ``keys`` (with ``server``) for a
    consumer that has keys.

    Arrays of 64 KiB or more are sent from where they lie, perhaps more than once: they must not change until they are
    acknowledged (``flush`` waits for that). With ``copy=True`` each is copied when it is put, and may be used again at
    once. Raises QueueNameError, FmqError, and ValueError for a codec or keys that are none.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        codec: str = "msgpack",
        window_bytes: int = WINDOW_BYTES,
        window_messages: int = WINDOW_MESSAGES,
        copy: bool = False,
        keys: CurveKeys | None = None,
    ) -> None:
        self._encoding, self._encode_tree = encoding.encoder(codec)
        check_count("window_bytes", window_bytes)
        check_count("window_messages", window_messages)
        self._copy = bool(copy)
        self._refusal: Exception | None = None
        self._loans: dict[int, weakref.ref[Array]] = {}
        self._protocol = RemoteProducerProtocol(new_id(), window_bytes, window_messages)
        self._link = ProducerLink(endpoint, keys, self._protocol)
        self._lock = self._link.lock
        self._descriptors = [self._link.ready.fileno()]
        self._waiter = LoopWaiter(self._descriptors)
        self._copier: ThreadPoolExecutor | None = None
        abandon_in_child(self)
        close_at_exit(self)

    @property
    def endpoint(self) -> str:
        """Where it connects to."""
        return self._link.endpoint

    @property
    def producer(self) -> str:
        """Its id, as its messages have it: 16 hexadecimal digits."""
        return self._protocol.producer

    @property
    def connected(self) -> bool:
        """Whether a consumer answers, and takes messages."""
        with self._lock:
            return self._refusal is None and self._link.connected

    @property
    def unacknowledged(self) -> int:
        """How many messages were put and are not done."""
        with self._lock:
            return len(self._protocol)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is a forked child's copy."""
        return self._refusal is not None

    def __repr__(self) -> str:
        state = "open" if self._refusal is None else "closed"
        return f"<{type(self).__name__} to {self.endpoint}, {state}>"

    # -- at once ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._link.failure is not None:
            raise self._link.failure

    def _parcel(self, obj: Any) -> _Parcel:
        if type(obj) is bytes:
            return _Parcel(RAW, obj, [], self._must_copy)
        blob, buffers = self._encode_tree(obj)
        return _Parcel(self._encoding, blob, buffers, self._must_copy)

    def _must_copy(self, array: Array) -> bool:
        return self._copy and self._loan_of(array) is None

    def _post(self, parcel: _Parcel, expires: int) -> int | None:
        """Put it into the window; None if there is no room. The lock is held."""
        protocol, nbytes = self._protocol, parcel.nbytes
        if nbytes > protocol.window_bytes:
            raise TooLargeError(
                f"a message of {nbytes:,} bytes is too much for a window of {protocol.window_bytes:,}; raise "
                "window_bytes, and max_message of the consumer"
            )
        welcome = protocol.welcome
        if welcome is not None and not welcome.problem and nbytes > welcome.max_message:
            raise TooLargeError(
                f"a message of {nbytes:,} bytes is too much for the consumer at {self.endpoint}, which takes "
                f"{welcome.max_message:,}; raise its max_message"
            )
        if not protocol.has_room(nbytes) and not (protocol.expire(time.monotonic_ns()) and protocol.has_room(nbytes)):
            return None
        buffers = cast("list[Array]", parcel.buffers)
        sequence = protocol.put(parcel.encoding, parcel.blob, buffers, nbytes, time.time_ns(), expires)
        if self._loans:
            self._freeze(parcel.sources)
        self._link.nudge()
        return sequence

    def _put_now(self, parcel: _Parcel, expires: int) -> int | None:
        parcel.copy()
        with self._lock:
            self._check()
            return self._post(parcel, expires)

    def _lend(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        with self._lock:
            self._check()
        dtype = np.dtype(dtype)
        if dtype.hasobject or dtype.names is not None:
            raise DTypeError(f"an array of dtype {dtype} can't be lent; use a plain numeric dtype")
        sizes = (shape,) if isinstance(shape, SupportsIndex) else shape
        shape = tuple(operator.index(size) for size in sizes)
        if any(size < 0 for size in shape):
            raise ValueError(f"an array can't have shape {shape}")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._protocol.window_bytes:
            raise TooLargeError(
                f"an array of {nbytes:,} bytes is too much for a window of {self._protocol.window_bytes:,}; raise "
                "window_bytes"
            )
        root = np.empty(nbytes, np.uint8)
        loans, key = self._loans, id(root)
        loans[key] = weakref.ref(root, lambda _: loans.pop(key, None))
        return root.view(dtype).reshape(shape)

    def _loan_of(self, array: Any) -> Array | None:
        """The loan that an array is a view of, if it is one."""
        while array is not None and self._loans:
            loan = self._loans.get(id(array))
            if loan is not None and loan() is array:
                return cast(Array, array)
            array = getattr(array, "base", None) if not isinstance(array, memoryview) else array.obj
        return None

    def _freeze(self, arrays: list[Array]) -> None:
        for array in arrays:
            root = self._loan_of(array)
            if root is not None:
                array.setflags(write=False)
                root.setflags(write=False)

    # -- in steps -----------------------------------------------------------------------------------------------------

    def _put(self, parcel: _Parcel, expires: int) -> Steps[int]:
        if parcel.long_copy_bytes >= _THREAD_COPY_BYTES:
            yield parcel.copy
        else:
            parcel.copy()
        return (yield from self._until(lambda: self._post(parcel, expires)))

    def _drained(self) -> Steps[bool]:
        def attempt() -> bool | None:
            if len(self._protocol):
                self._protocol.expire(time.monotonic_ns())
            return None if len(self._protocol) else True

        return (yield from self._until(attempt))

    def _until(self, attempt: Callable[[], T | None]) -> Steps[T]:
        """Call ``attempt``, under the lock, until it gives something other than None; wait for news in between."""
        while True:
            with self._lock:
                self._check()
                self._link.ready.clear()
                result = attempt()
            if result is not None:
                return result
            yield None

    def _absent(self) -> str:
        """Why nothing is acknowledged, if the consumer is to blame for all of it; else empty. The lock is held."""
        welcome = self._protocol.welcome
        if problem := self._protocol.problem:
            return f"the consumer can't take more: {problem}"
        if self._link.connected:
            return ""
        if welcome is not None:
            return "the peer does not answer any more: is it stopped, or the link cut?"
        return f"the peer does not answer: {self._link.trouble}"

    def _expired(self) -> Exception:
        with self._lock:
            protocol = self._protocol
            full = (
                f"{self.endpoint}: the window of {protocol.window_messages:,} messages and {protocol.window_bytes:,} "
            )
            full += "bytes is full"
            absent = self._absent()
            oldest = protocol.oldest()
            count = len(protocol)
        if absent:
            return PeerUnavailableError(f"{full}, and {absent} (what was put before is kept in this process)")
        told = ""
        if oldest is not None:
            age = max(0.0, time.time() - oldest.timestamp_ns / 1e9)
            state = "was sent" if oldest.sent else "was not sent yet"
            told = f", the oldest, message {oldest.sequence}, put {age:.1f} s ago, {state}"
        return QueueFullError(
            f"{full}; the consumer has {count} messages still to finish{told}. Wait longer, release messages sooner "
            "(detach() those to keep), or raise window_bytes and window_messages here and at the consumer"
        )

    def _not_flushed(self) -> Exception:
        with self._lock:
            absent = self._absent()
            unfinished = f"{self.endpoint}: {len(self._protocol)} messages are not yet done, and "
        if absent:
            return PeerUnavailableError(f"{unfinished}{absent} (they are kept in this process)")
        return QueueTimeoutError(f"{unfinished}the time is over; the consumer is slow, or holds them")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        with self._lock:
            if self._refusal is not None:
                return
            self._refusal = ClosedError(f"this producer to {self.endpoint} was closed; make another one")
            unfinished = len(self._protocol)
            absent = self._absent()
        if unfinished:
            logger.error(
                "%s: %d messages were not acknowledged before the producer was closed, and are lost unless the "
                "consumer has them%s%s",
                self.endpoint,
                unfinished,
                ": " if absent else "",
                absent,
            )
        self._link.stop()
        self._waiter.close(self._link.ready.close)
        if self._copier is not None:
            self._copier.shutdown(wait=False)

    def give_up(self) -> None:
        """Close without waiting; what is not acknowledged is lost."""
        self._shut()

    def end(self) -> None:
        """At the end of the process: as ``close``, for what is in the window ends with it."""
        # What is left then, the log says.
        with contextlib.suppress(ShmqError):
            run(self._drained(), self._descriptors, deadline_of(CLOSE_TIMEOUT), RECHECK, self._not_flushed)
        self._shut()

    def __del__(self) -> None:
        if hasattr(self, "_waiter"):
            collected(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a producer can't be copied, nor sent to another process; make one there, to the same endpoint")

    def abandon(self) -> None:
        """In a forked child: refuse every further use. Called by the fork itself."""
        self._link.lock = self._lock = threading.RLock()
        self._refusal = ForkedError(
            f"this producer to {self.endpoint} is the parent process's; make another one in the child"
        )


class RemoteProducer(RemoteProducerBase):
    """Puts messages into a queue on another host, and blocks where it has to wait. See RemoteProducerBase."""

    def put(self, obj: Any, *, timeout: float | None = TIMEOUT, ttl: float | None = None) -> int:
        """Put a message into the window, from where it is sent until it is acknowledged. Returns its sequence.

        Waits up to ``timeout`` seconds for room (0: not at all, None: without limit). A message that was not taken
        within ``ttl`` seconds, not counting the time on the network, is not delivered any more. Raises QueueFullError,
        PeerUnavailableError, EncodeError, TooLargeError, ClosedError; then nothing was put.
        """
        deadline = deadline_of(timeout)
        expires = 0 if ttl is None else expires_at(ttl)
        parcel = self._parcel(obj)
        sequence = self._put_now(parcel, expires)
        if sequence is not None:
            return sequence
        return run(self._put(parcel, expires), self._descriptors, deadline, RECHECK, self._expired)

    def put_many(self, objs: Iterable[Any], *, timeout: float | None = TIMEOUT, ttl: float | None = None) -> list[int]:
        """Put messages one after another, and return their sequences. ``timeout`` is for each.

        When it raises, as ``put`` does, the messages before the one that failed have been put.
        """
        return [self.put(obj, timeout=timeout, ttl=ttl) for obj in objs]

    def empty(
        self, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, timeout: float | None = TIMEOUT
    ) -> Array:
        """A writable array, of ordinary memory, that is never copied here. Putting it makes it read-only.

        Fill it, put it (alone, as part of a tree, or contiguous parts of it), and write to it no more. Does not wait.
        """
        deadline_of(timeout)
        return self._lend(shape, dtype)

    def reserve(self, nbytes: int, *, timeout: float | None = TIMEOUT) -> memoryview:
        """The same as ``empty`` for bytes: a writable memoryview, to receive into; arrives as a memoryview."""
        return self.empty(nbytes, np.uint8, timeout=timeout).data

    def flush(self, *, timeout: float | None = TIMEOUT) -> None:
        """Wait until every message is done. Raises QueueTimeoutError, PeerUnavailableError if the peer is not there."""
        run(self._drained(), self._descriptors, deadline_of(timeout), RECHECK, self._not_flushed)

    def close(self, *, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Wait up to ``timeout`` seconds until every message is done, and disconnect. Idempotent.

        What is not done by then is lost, unless the consumer has it: the log says how many messages that are, and so
        does ``unacknowledged``. Call ``flush`` before, to have an error.
        """
        deadline = deadline_of(timeout)
        if self._refusal is None:
            try:
                run(self._drained(), self._descriptors, deadline, RECHECK, self._not_flushed)
            except QueueTimeoutError:
                # The log says it.
                pass
            finally:
                self._shut()

    def __enter__(self) -> RemoteProducer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncRemoteProducer(RemoteProducerBase):
    """Puts messages into a queue on another host, and awaits where it has to wait. Long copies go to a thread.

    Works in one event loop after another. Cancelling any call loses nothing: a message is put wholly or not at all. For
    the rest see RemoteProducer, whose methods these are.
    """

    async def put(self, obj: Any, *, timeout: float | None = TIMEOUT, ttl: float | None = None) -> int:
        """As RemoteProducer.put."""
        deadline = deadline_of(timeout)
        expires = 0 if ttl is None else expires_at(ttl)
        parcel = self._parcel(obj)
        sequence = self._put_now(parcel, expires) if parcel.long_copy_bytes < _THREAD_COPY_BYTES else None
        return await self._drive(self._put(parcel, expires), deadline, self._expired) if sequence is None else sequence

    async def put_many(
        self, objs: Iterable[Any], *, timeout: float | None = TIMEOUT, ttl: float | None = None
    ) -> list[int]:
        """As RemoteProducer.put_many."""
        return [await self.put(obj, timeout=timeout, ttl=ttl) for obj in objs]

    async def empty(
        self, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, timeout: float | None = TIMEOUT
    ) -> Array:
        """As RemoteProducer.empty."""
        deadline_of(timeout)
        return self._lend(shape, dtype)

    async def reserve(self, nbytes: int, *, timeout: float | None = TIMEOUT) -> memoryview:
        """As RemoteProducer.reserve."""
        return (await self.empty(nbytes, np.uint8, timeout=timeout)).data

    async def flush(self, *, timeout: float | None = TIMEOUT) -> None:
        """As RemoteProducer.flush."""
        await self._drive(self._drained(), deadline_of(timeout), self._not_flushed)

    async def close(self, *, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """As RemoteProducer.close."""
        deadline = deadline_of(timeout)
        if self._refusal is None:
            try:
                await self._drive(self._drained(), deadline, self._not_flushed)
            except QueueTimeoutError:
                # The log says it.
                pass
            finally:
                await in_thread(self._shut)

    async def __aenter__(self) -> AsyncRemoteProducer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _drive(self, steps: Steps[T], deadline: float, expired: Callable[[], Exception]) -> T:
        return await run_async(steps, self._waiter, deadline, RECHECK, expired, self._executor)

    def _executor(self) -> Executor:
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "fmq-copy")
        return self._copier
