"""The engines as a client sees them: whether each is there, how much it has to do, and which one to choose."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from api.errors import EngineUnavailableError
from fmq import AsyncProducer, ShmqError
from fmq.calls import Gauge, State, board_name
from fmq.paths import QueuePath
from shmq import Board

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics

STALE_SECONDS = 1.0
"""A receive loop that has not turned for so long is taken to be dead, whatever its process does."""


COUNTS = tuple(gauge for gauge in Gauge if gauge not in (Gauge.HEARTBEAT_NS, Gauge.STATE))


class EngineView:
    """What can be seen of an engine from outside, by its board alone: no message is sent for it."""

    def __init__(self, queue: str, namespace: str | None = None, runtime_dir: str | os.PathLike[str] | None = None):
        self.path = QueuePath(queue, namespace, runtime_dir)
        self.queue = queue
        self.alive = False
        """Whether its process lived at the last look, stopped or not."""
        self.seen = -math.inf
        """When its process was last seen alive, by the monotonic clock; -inf for never."""
        self._board: Board | None = None

    def look(self) -> None:
        """Look whether the engine lives, or another one in its place. A few system calls."""
        if self._board is not None and not self._board.is_current():
            self._board.close()
            self._board = None
        if self._board is None:
            with contextlib.suppress(ShmqError):
                board = Board.attach(board_name(self.path))
                if board.is_current():
                    self._board = board
                else:
                    board.close()
        self.alive = self._board is not None
        if self.alive:
            self.seen = time.monotonic()

    def word(self, gauge: Gauge) -> int:
        """A word of its board; 0 without one."""
        return 0 if self._board is None else self._board[gauge]

    @property
    def pid(self) -> int | None:
        """Its process, while it lives."""
        return None if self._board is None else self._board.pid

    @property
    def state(self) -> str:
        """``absent``, ``starting``, ``serving``, ``stopping``, ``failed``, or ``stale`` if its receive loop stands."""
        if self._board is None:
            return "absent"
        state = State(self._board[Gauge.STATE])
        if state is State.SERVING and self.heartbeat_age > STALE_SECONDS:
            return "stale"
        return state.name.lower()

    @property
    def serving(self) -> bool:
        """Whether its receive loop turns, and takes requests."""
        return self.state == "serving"

    @property
    def heartbeat_age(self) -> float:
        """Seconds since its receive loop began a turn; infinite without an engine."""
        beat = self.word(Gauge.HEARTBEAT_NS)
        return (time.monotonic_ns() - beat) / 1e9 if beat else math.inf

    @property
    def load(self) -> int:
        """Requests that wait or run there, of all clients."""
        return self.word(Gauge.WAITING) + self.word(Gauge.RUNNING)

    def describe(self) -> dict[str, object]:
        """All of it, for JSON."""
        age = self.heartbeat_age
        return {
            "queue": self.queue,
            "state": self.state,
            "pid": self.pid,
            "heartbeat_age": None if math.isinf(age) else round(age, 3),
            **{
                gauge.name.lower(): self.word(gauge)
                for gauge in Gauge
                if gauge not in (Gauge.HEARTBEAT_NS, Gauge.STATE)
            },
        }

    def close(self) -> None:
        """Unmap its board. Idempotent."""
        board, self._board = self._board, None
        self.alive = False
        if board is not None:
            board.close()


class EngineLink(EngineView):
    """An engine, and this client's ring to it. ``unanswered`` counts the client's own requests there."""

    def __init__(
        self,
        queue: str,
        namespace: str | None = None,
        *,
        ring_size: int,
        spill_limit: int,
        runtime_dir: str | os.PathLike[str] | None = None,
        metrics: QueueMetrics | None = None,
    ) -> None:
        super().__init__(queue, namespace, runtime_dir)
        self.producer = AsyncProducer(
            queue,
            namespace=namespace,
            ring_size=ring_size,
            spill_limit=spill_limit,
            runtime_dir=runtime_dir,
            metrics=metrics,
        )
        self.unanswered = 0

    @property
    def burden(self) -> int:
        """Requests that are there or on their way."""
        # Its board does not count yet what it has not taken, and it tells of the other clients.
        return max(self.load, self.unanswered)


def choose(links: Iterable[EngineLink], patience: float) -> EngineLink:
    """The engine to send to: the least busy of those that serve, else one that lives, else one that may come back.

    One that was alive within ``patience`` seconds is expected to be restarted, and what is put for it is kept. Raises
    EngineUnavailableError, which says of each engine what is the matter.
    """
    now = time.monotonic()
    links = list(links)
    for fit in (
        [link for link in links if link.serving],
        [link for link in links if link.alive and link.state != "failed"],
        [link for link in links if now - link.seen <= patience],
    ):
        if fit:
            return min(fit, key=lambda link: link.burden)
    told = "; ".join(
        f"{link.path} in {link.path.namespace}: "
        + ("no engine was ever there" if math.isinf(link.seen) else f"its engine is gone for {now - link.seen:.0f} s")
        for link in links
    )
    raise EngineUnavailableError(f"no engine can take a request ({told}); start one: python -m engine")
