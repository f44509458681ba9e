"""A queue whose producer is on another host: the same calls over ``tcp://``.

The payload travels as ZeroMQ frames. A large array is not copied on either side: it is sent from where it lies, and
arrives as a read-only view of the frame. So *an array that was put must not change until it is acknowledged*; see
``RemoteProducerBase``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import operator
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from numbers import Real
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
    QueueEmptyError,
    QueueFullError,
    QueueTimeoutError,
)
from fmq.lifetime import close_at_exit, collected
from fmq.message import Message, Source
from fmq.producer import CLOSE_TIMEOUT, TIMEOUT
from fmq.remote_link import ConsumerLink, CurveKeys, ProducerLink, check_key, new_id
from fmq.remote_protocol import MAX_BUFFERS, Incoming, RemoteConsumerProtocol, RemoteProducerProtocol
from fmq.waiting import LoopWaiter, Steps, deadline_of, run, run_async
from shmq import ShmqError, TooLargeError
from shmq.segment import abandon_in_child

logger = logging.getLogger("fmq")

WINDOW_BYTES = 64 * 1024 * 1024
WINDOW_MESSAGES = 1024
MAX_MESSAGE = WINDOW_BYTES
MAX_PRODUCERS = 256

_RECHECK = 0.02
"""Seconds between two looks while waiting, for of several who wait one may take the wake-up of another."""

_SMALL_BYTES = 64 * 1024
"""Buffers below this size are copied when they are put: ZeroMQ would copy them as well, only later."""

_VIEW_BYTES = 4096
"""Buffers below this size are copied when they arrive: a view would keep all of the block that they came in."""

_THREAD_COPY_BYTES = 512 * 1024
"""Copies from this size on leave the event loop for a thread."""

_LONGEST_TTL = 1_000_000_000

Array = NDArray[Any]
T = TypeVar("T")


# -- the producer -----------------------------------------------------------------------------------------------------


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
        _check_count("window_bytes", window_bytes)
        _check_count("window_messages", window_messages)
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
            run(self._drained(), self._descriptors, deadline_of(CLOSE_TIMEOUT), _RECHECK, self._not_flushed)
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
        expires = _expires(ttl)
        parcel = self._parcel(obj)
        sequence = self._put_now(parcel, expires)
        if sequence is not None:
            return sequence
        return run(self._put(parcel, expires), self._descriptors, deadline, _RECHECK, self._expired)

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
        run(self._drained(), self._descriptors, deadline_of(timeout), _RECHECK, self._not_flushed)

    def close(self, *, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Wait up to ``timeout`` seconds until every message is done, and disconnect. Idempotent.

        What is not done by then is lost, unless the consumer has it: the log says how many messages that are, and so
        does ``unacknowledged``. Call ``flush`` before, to have an error.
        """
        deadline = deadline_of(timeout)
        if self._refusal is None:
            try:
                run(self._drained(), self._descriptors, deadline, _RECHECK, self._not_flushed)
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
        expires = _expires(ttl)
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
                await _in_thread(self._shut)

    async def __aenter__(self) -> AsyncRemoteProducer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _drive(self, steps: Steps[T], deadline: float, expired: Callable[[], Exception]) -> T:
        return await run_async(steps, self._waiter, deadline, _RECHECK, expired, self._executor)

    def _executor(self) -> Executor:
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "fmq-copy")
        return self._copier


# -- messages ---------------------------------------------------------------------------------------------------------


class _Held:
    """A message that was handed out, as its RemoteMessage knows it: where to acknowledge, and what it was made of."""

    __slots__ = ("_dropped", "_incoming", "_link", "_references", "decode", "producer", "sequence")

    def __init__(self, link: ConsumerLink, incoming: Incoming, decode: Callable[[int, bytes, list[Any]], Any]) -> None:
        self._link = link
        self._incoming: Incoming | None = incoming
        self._references: list[weakref.ref[Array]] = []
        self._dropped = False
        self.decode = decode
        self.producer = incoming.source.producer
        self.sequence = incoming.sequence

    def open(self) -> Any:
        """The payload; its arrays look into the frames, and are watched."""
        incoming = self._incoming
        assert incoming is not None
        views = [_view(buffer) for buffer in incoming.buffers]
        self._references = [weakref.ref(view, self._gone) for view in views]
        return self.decode(incoming.encoding, bytes(incoming.blob), views)

    def copy(self) -> Any:
        """The payload once more, its arrays private and writable. None if it was given back before."""
        incoming = self._incoming
        if incoming is None:
            return None
        views = [np.array(_view(buffer)) for buffer in incoming.buffers]
        return self.decode(incoming.encoding, bytes(incoming.blob), views)

    def finish(self) -> None:
        """Acknowledge it, and let go of the frames. Any thread, any finalizer; idempotent."""
        incoming, self._incoming = self._incoming, None
        self._references = []
        self._link.dropped.discard(self)
        if incoming is not None:
            self._link.finish(incoming.source, incoming.sequence)

    def drop(self) -> None:
        """Its RemoteMessage is gone: it is done when its arrays are gone, too."""
        # Nobody else refers to this any more, and the references, with what they call, would go with it.
        self._link.dropped.add(self)
        self._dropped = True
        self._gone()

    def _gone(self, _: object = None) -> None:
        # One array after another, on any thread: whoever comes last sees that the others are gone.
        if self._dropped and all(reference() is None for reference in self._references):
            self.finish()


class RemoteMessage(Message):
    """A message from another host. Its arrays are read-only views of the frames that it came in.

    As Message, but that its arrays stay valid whatever becomes of the consumer, and that ``deliveries`` may be more
    than it was handed out: it counts the consumers that it had been sent to. ``producer`` is the id of a
    RemoteProducer.
    """

    @property
    def _held(self) -> _Held:
        return cast(_Held, self._source)

    def detach(self) -> Any:
        """Copy the payload out of the frames, acknowledge the message, return the copy (``payload`` from now on).

        The arrays of the copy are private and writable. Raises ClosedError after release.
        """
        if self._offset < 0:
            return self.payload
        self.payload = self._held.copy()
        offset, self._offset = self._offset, -1
        self._give_back(offset)
        return self.payload

    def _give_back(self, offset: int) -> None:
        self._held.finish()

    def __del__(self) -> None:
        if self._offset >= 0:
            self._held.drop()


def _view(buffer: memoryview) -> NDArray[np.uint8]:
    """A read-only array over a frame."""
    if buffer.nbytes < _VIEW_BYTES:
        view = np.empty(buffer.nbytes, np.uint8)
        view.data[:] = buffer
    else:
        view = np.frombuffer(buffer, np.uint8)
    view.setflags(write=False)
    return view


# -- the consumer -----------------------------------------------------------------------------------------------------


class RemoteConsumerBase:
    """What both consumers share. Every method may be called from any thread; in a forked child it raises ForkedError.

    Listens at ``endpoint``: tcp://address:port of this host, ``*`` for all of its addresses, port 0 for any that is
    free; the ``endpoint`` of the consumer has the real one. ``type`` and ``accept`` as for Consumer, but that pickle is
    accepted only from ``clients``.

    With ``keys``, only producers that know ``keys.public`` are let in, and all is encrypted; with ``clients``, only
    those whose public key is among them. Without, whoever can reach the port can put messages.

    It takes ``max_message`` bytes of one message; of one producer at most ``window_bytes`` and ``window_messages`` that
    are not released; from ``max_producers`` at a time. Raises QueueInUseError if the port is taken, QueueNameError,
    FmqError, and ValueError for what can't be.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        type: Any = Any,
        accept: Iterable[str] = ("msgpack",),
        keys: CurveKeys | None = None,
        clients: Iterable[str] | None = None,
        max_message: int = MAX_MESSAGE,
        window_bytes: int | None = None,
        window_messages: int = WINDOW_MESSAGES,
        max_producers: int = MAX_PRODUCERS,
    ) -> None:
        accepted = (accept,) if isinstance(accept, str) else tuple(accept)
        self._decode = encoding.decoder(accepted, type)
        if clients is not None and keys is None:
            raise ValueError("without keys= nobody can tell one client from another; give the consumer keys, too")
        allowed = None if clients is None else frozenset(clients)
        for client in allowed or ():
            check_key(client, "client's")
        if "pickle" in accepted and allowed is None:
            raise ValueError(
                "who sends a pickle runs code here, so over TCP it is accepted only from clients that are known: give "
                "keys= and clients=, or leave 'pickle' out of accept="
            )
        _check_count("max_message", max_message)
        _check_count("window_messages", window_messages)
        _check_count("max_producers", max_producers)
        window = max(WINDOW_BYTES, max_message) if window_bytes is None else window_bytes
        _check_count("window_bytes", window)
        if window < max_message:
            raise ValueError(f"a window of {window:,} bytes can't take a message of {max_message:,} (max_message)")
        self._refusal: Exception | None = None
        self._deferred: Exception | None = None
        self._protocol = RemoteConsumerProtocol(
            time.time_ns(),
            max_message=max_message,
            window_bytes=window,
            window_messages=window_messages,
            max_producers=max_producers,
        )
        self._link = ConsumerLink(endpoint, keys, allowed, self._protocol)
        self._lock = self._link.lock
        self._turn = threading.Lock()
        self._descriptors = [self._link.ready.fileno()]
        self._waiter = LoopWaiter(self._descriptors)
        abandon_in_child(self)
        close_at_exit(self)

    @property
    def endpoint(self) -> str:
        """Where it listens, with the real port."""
        return self._link.endpoint

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is a forked child's copy."""
        return self._refusal is not None

    def __repr__(self) -> str:
        state = "open" if self._refusal is None else "closed"
        return f"<{type(self).__name__} at {self.endpoint}, {state}>"

    # -- at once ------------------------------------------------------------------------------------------------------

    def _take(self) -> RemoteMessage | None:
        """The next message, or None. Raises what is wrong with it, which is done then."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            error, self._deferred = self._deferred, None
            if error is not None:
                raise error
            incoming = self._protocol.take(time.monotonic_ns())
            if incoming is None:
                if self._link.failure is not None:
                    raise self._link.failure
                return None
        held = _Held(self._link, incoming, self._decode)
        try:
            payload = held.open()
        except Exception:
            # It would fail again.
            held.finish()
            raise
        except BaseException:
            # Ctrl-C: no fault of the message.
            with self._lock:
                self._protocol.put_back(incoming)
            raise
        return RemoteMessage(
            payload,
            incoming.sequence,
            incoming.timestamp_ns,
            incoming.deliveries,
            cast(Source, held),
            incoming.sequence,
            None,
        )

    def _take_many(self, first: RemoteMessage, limit: int) -> list[RemoteMessage]:
        messages = [first]
        try:
            while len(messages) < limit and (message := self._take()) is not None:
                messages.append(message)
        except ShmqError as error:
            # Not now: it would take along what was taken already.
            if self._refusal is None:
                self._deferred = error
        return messages

    def _wait(self) -> Steps[RemoteMessage]:
        while True:
            with self._lock:
                if self._refusal is None:
                    self._link.ready.clear()
            message = self._take()
            if message is not None:
                return message
            yield None

    def _empty(self) -> Exception:
        return QueueEmptyError(f"{self.endpoint}: there was no message in the time given")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        with self._lock:
            if self._refusal is not None:
                return
            self._refusal = ClosedError(f"this consumer at {self.endpoint} was closed; make another one")
        self._link.stop()
        self._waiter.close(self._link.ready.close)

    def give_up(self) -> None:
        """Close; what was not released is the next consumer's."""
        self._shut()

    def end(self) -> None:
        """At the end of the process: as ``give_up``."""
        self._shut()

    def __del__(self) -> None:
        if hasattr(self, "_waiter"):
            collected(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a consumer can't be copied, nor sent to another process; close it, and make one there")

    def abandon(self) -> None:
        """In a forked child: refuse every further use. Called by the fork itself."""
        self._link.lock = self._lock = threading.RLock()
        self._turn = threading.Lock()
        self._link.abandon()
        self._refusal = ForkedError(f"this consumer at {self.endpoint} is the parent process's; the child can't use it")


class RemoteConsumer(RemoteConsumerBase):
    """Gets messages from other hosts, and blocks where it has to wait. How it is made: see RemoteConsumerBase."""

    def get(self, *, timeout: float | None = None) -> RemoteMessage:
        """The next message. Waits up to ``timeout`` seconds (0: not at all, None: without limit).

        Raises QueueEmptyError, ClosedError, and for a message that can't be decoded DecodeError; such a message is
        done, and the next call gives the one after it.
        """
        deadline = deadline_of(timeout)
        message = self._take()
        if message is not None:
            return message
        if not self._turn.acquire(timeout=-1 if timeout is None else max(0.0, deadline - time.monotonic())):
            raise self._empty()
        try:
            return run(self._wait(), self._descriptors, deadline, _RECHECK, self._empty)
        finally:
            self._turn.release()

    def get_many(self, limit: int = 1024, *, timeout: float | None = None) -> list[RemoteMessage]:
        """All messages that are there, one at least, ``limit`` at most. Waits and raises as ``get`` for the first."""
        _check_count("limit", limit)
        return self._take_many(self.get(timeout=timeout), limit)

    def __iter__(self) -> Iterator[RemoteMessage]:
        """Messages without end; stops when the consumer is closed."""
        return self

    def __next__(self) -> RemoteMessage:
        try:
            return self.get()
        except ClosedError:
            raise StopIteration from None

    def close(self) -> None:
        """Stop listening; what was not released is the next consumer's. Arrays stay valid. Idempotent."""
        self._shut()

    def __enter__(self) -> RemoteConsumer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncRemoteConsumer(RemoteConsumerBase):
    """Gets messages from other hosts, and awaits where it has to wait.

    Works in one event loop after another. Cancelling ``get`` loses nothing: the message stays for the next call. For
    the rest see RemoteConsumer, whose methods these are.
    """

    async def get(self, *, timeout: float | None = None) -> RemoteMessage:
        """As RemoteConsumer.get."""
        deadline = deadline_of(timeout)
        message = self._take()
        if message is not None:
            return message
        return await run_async(self._wait(), self._waiter, deadline, _RECHECK, self._empty)

    async def get_many(self, limit: int = 1024, *, timeout: float | None = None) -> list[RemoteMessage]:
        """As RemoteConsumer.get_many."""
        _check_count("limit", limit)
        return self._take_many(await self.get(timeout=timeout), limit)

    def __aiter__(self) -> AsyncIterator[RemoteMessage]:
        """Messages without end; stops when the consumer is closed."""
        return self

    async def __anext__(self) -> RemoteMessage:
        try:
            return await self.get()
        except ClosedError:
            raise StopAsyncIteration from None

    async def close(self) -> None:
        """As RemoteConsumer.close."""
        await _in_thread(self._shut)

    async def __aenter__(self) -> AsyncRemoteConsumer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _in_thread(work: Callable[[], None]) -> None:
    """Do what may take a moment without holding the event loop up; it is done even if this is cancelled."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, work))


def _expires(ttl: float | None) -> int:
    if ttl is None:
        return 0
    if not isinstance(ttl, Real) or not 0 < ttl <= _LONGEST_TTL:
        raise ValueError(
            f"a ttl is a number of seconds above 0, at most {_LONGEST_TTL:,}, or None for no limit; this one is {ttl!r}"
        )
    return time.monotonic_ns() + max(1, int(ttl * 1e9))


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 62:
        raise ValueError(f"{name} is a number from 1 on; this one is {value!r}")
