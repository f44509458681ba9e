"""Results on their way to the clients: one producer for each reply queue, and nobody waits for a slow one."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from fmq import (
    ClosedError,
    EncodeError,
    FmqError,
    PeerUnavailableError,
    Producer,
    QueueFullError,
    QueueNameError,
    ShmqError,
    TooLargeError,
)
from fmq.calls import REPLY_PREFIX, Answer, Events, Failure, FailureKind, Output
from fmq.paths import QueuePath, consumer_is_alive, discard_files
from shmq import collect
from shmq.segment import names

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics

logger = logging.getLogger("engine")

RING_SIZE = 4 * 1024 * 1024
PATIENCE = 10.0
"""Seconds that a client may leave its replies untaken while its ring is full, before it is given up."""
_TIDY_SECONDS = 0.5

Settle = Callable[[], None]
"""What is called once events are stored where they survive the engine, or nobody can have them any more."""


class Sink(Protocol):
    """Where results go. For the one thread that sends them; what it can't send at once it keeps for ``turn``."""

    def send(self, address: str, events: Events, settle: Settle) -> None:
        """Send to one client. Never waits, never raises for a client that can't be reached."""
        ...

    def turn(self) -> list[str]:
        """Go on with what could not be sent. Returns the clients that are gone, each once."""
        ...

    def close(self) -> None:
        """Send what can be sent within a moment, and let go."""
        ...


@dataclass(slots=True)
class _Client:
    producer: Producer
    backlog: deque[tuple[Events, Settle]] = field(default_factory=deque)
    stuck_since: float = 0.0


class Replies:
    """The reply queues of the clients, made when first needed. A Sink."""

    def __init__(
        self,
        namespace: str | None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        metrics: QueueMetrics | None = None,
    ) -> None:
        self._namespace = namespace
        self._runtime_dir = runtime_dir
        self._metrics = metrics
        self._clients: dict[str, _Client] = {}
        self._tidied = 0.0
        self.lost = 0
        """Messages with results that nobody took."""

    @property
    def backlog(self) -> bool:
        """Whether something waits for a client to take what it has."""
        return any(client.backlog for client in self._clients.values())

    def send(self, address: str, events: Events, settle: Settle) -> None:
        """As Sink's."""
        client = self._clients.get(address)
        if client is None:
            try:
                if not address.startswith(REPLY_PREFIX):
                    raise QueueNameError(
                        f"{address!r} can't be a client's queue: it does not begin with {REPLY_PREFIX!r}"
                    )
                producer = Producer(
                    address,
                    namespace=self._namespace,
                    runtime_dir=self._runtime_dir,
                    ring_size=RING_SIZE,
                    metrics=self._metrics,
                )
            except ShmqError as error:
                self._lose(address, error, settle)
                return
            client = self._clients[address] = _Client(producer)
        if client.backlog or not self._put(address, client, events, settle):
            client.backlog.append((events, settle))

    def turn(self) -> list[str]:
        """As Sink's."""
        now = time.monotonic()
        for address, client in self._clients.items():
            while client.backlog and self._put(address, client, *client.backlog[0]):
                client.backlog.popleft()
        if now - self._tidied < _TIDY_SECONDS:
            return []
        self._tidied = now
        gone = [address for address, client in self._clients.items() if self._is_gone(address, client, now)]
        for address in gone:
            self._forget(address)
        return gone

    def close(self) -> None:
        """As Sink's. Each client has a second to take what is left."""
        for address in list(self._clients):
            client = self._clients[address]
            self.turn()
            if address in self._clients:
                with contextlib.suppress(FmqError):
                    client.producer.flush(timeout=1.0)
                self._forget(address)

    def _put(self, address: str, client: _Client, events: Events, settle: Settle) -> bool:
        """Whether these events are done with: stored, or impossible."""
        try:
            client.producer.put(events, timeout=0)
        except (QueueFullError, PeerUnavailableError):
            client.stuck_since = client.stuck_since or time.monotonic()
            return False
        except (EncodeError, TooLargeError) as error:
            if len(events.outputs) + len(events.answers) > 1:
                # One by one, to see which it is.
                return self._put_each(address, client, events, settle)
            parts: list[Output | Answer] = [*events.outputs, *events.answers]
            if any(part.failure is not None for part in parts):
                self._lose(address, error, settle)
                return True
            return self._put(address, client, _unsendable(events, error), settle)
        except ShmqError as error:
            self._lose(address, error, settle)
            return True
        client.stuck_since = 0.0
        settle()
        return True

    def _put_each(self, address: str, client: _Client, events: Events, settle: Settle) -> bool:
        parts = [Events([output]) for output in events.outputs] + [Events([], [answer]) for answer in events.answers]
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            if client.backlog or not self._put(address, client, part, settle if last else _nothing):
                client.backlog.append((part, settle if last else _nothing))
        return True

    def _lose(self, address: str, error: Exception, settle: Settle) -> None:
        self.lost += 1
        logger.error("results for %s could not be sent: %s", address, error)
        settle()

    def _is_gone(self, address: str, client: _Client, now: float) -> bool:
        if client.stuck_since and now - client.stuck_since > PATIENCE:
            logger.warning("client %s has taken nothing for %.0f s; it is given up", address, PATIENCE)
            return True
        return not consumer_is_alive(self._path(address))

    def _forget(self, address: str) -> None:
        client = self._clients.pop(address)
        self.lost += len(client.backlog)
        for _, settle in client.backlog:
            settle()
        with contextlib.suppress(ClosedError):
            client.producer.give_up()
        _discard(self._path(address))

    def _path(self, address: str) -> QueuePath:
        return QueuePath(address, self._namespace, self._runtime_dir)


def _unsendable(events: Events, error: Exception) -> Events:
    """The same, of one output or answer, as a failure."""
    failure = Failure(FailureKind.HANDLER, f"its result can't be sent: {error}")
    return Events(
        [msgspec.structs.replace(output, value=None, finished=True, failure=failure) for output in events.outputs],
        [msgspec.structs.replace(answer, value=None, failure=failure) for answer in events.answers],
    )


def _nothing() -> None:
    pass


def discard_lost_replies(namespace: str, runtime_dir: str | os.PathLike[str] | None = None) -> None:
    """Remove the replies of engines that died, to clients that are gone as well. What is alive is not touched."""
    for address in {name.split(":")[2] for name in names(f"shmq:{namespace}:{REPLY_PREFIX}")}:
        _discard(QueuePath(address, namespace, runtime_dir))


def _discard(path: QueuePath) -> None:
    """Nobody else will ever read the queue of a client that is gone: its name was made for that one."""
    if not consumer_is_alive(path):
        collect(path.rings, discard=True)
        discard_files(path)
