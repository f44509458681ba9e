"""Get messages from producers on other hosts."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fmq import encoding
from fmq.errors import (
    ClosedError,
    ForkedError,
    QueueEmptyError,
)
from fmq.lifetime import close_at_exit, collected
from fmq.message import Message, Source
from fmq.remote.common import RECHECK, WINDOW_BYTES, WINDOW_MESSAGES, check_count, in_thread
from fmq.remote.link import ConsumerLink, CurveKeys, check_key
from fmq.remote.protocol import Incoming, RemoteConsumerProtocol
from fmq.waiting import LoopWaiter, Steps, deadline_of, run, run_async
from shmq import ShmqError
from shmq.segment import abandon_in_child

logger = logging.getLogger("fmq")

MAX_MESSAGE = WINDOW_BYTES
MAX_PRODUCERS = 256

_VIEW_BYTES = 4096
"""Buffers below this size are copied when they arrive: a view would keep all of the block that they came in."""

Array = NDArray[Any]


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
        check_count("max_message", max_message)
        check_count("window_messages", window_messages)
        check_count("max_producers", max_producers)
        window = max(WINDOW_BYTES, max_message) if window_bytes is None else window_bytes
        check_count("window_bytes", window)
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
            return run(self._wait(), self._descriptors, deadline, RECHECK, self._empty)
        finally:
            self._turn.release()

    def get_many(self, limit: int = 1024, *, timeout: float | None = None) -> list[RemoteMessage]:
        """All messages that are there, one at least, ``limit`` at most. Waits and raises as ``get`` for the first."""
        check_count("limit", limit)
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
        return await run_async(self._wait(), self._waiter, deadline, RECHECK, self._empty)

    async def get_many(self, limit: int = 1024, *, timeout: float | None = None) -> list[RemoteMessage]:
        """As RemoteConsumer.get_many."""
        check_count("limit", limit)
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
        await in_thread(self._shut)

    async def __aenter__(self) -> AsyncRemoteConsumer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
