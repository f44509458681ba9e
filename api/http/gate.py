"""How many requests all workers of a server have at a time, counted in shared memory."""

from __future__ import annotations

import contextlib
import os
import time

from api.http.errors import HttpError
from api.http.settings import Settings
from fmq.paths import QueuePath
from shmq import Board, ShmqError, collect
from shmq.segment import names

_IN_FLIGHT = 0
_LOOK_SECONDS = 0.25


class Gate:
    """Lets in ``max_concurrency`` requests, of all workers together. For one event loop.

    Each worker counts its own on its own board, and adds up what it sees of the others: two that let somebody in at the
    same moment may let in one too many, and nobody waits for a lock.
    """

    def __init__(self, settings: Settings) -> None:
        namespace = QueuePath("http", settings.namespace).namespace
        self._prefix = f"shmq:{namespace}:%http-{settings.group}:"
        self._limit = settings.max_concurrency
        self._board = Board.create(f"{self._prefix}{os.getpid()}", 1)
        self._others: dict[str, Board] = {}
        self._looked = 0.0

    @property
    def in_flight(self) -> int:
        """Requests of this worker."""
        return self._board[_IN_FLIGHT]

    def workers(self) -> dict[int, int]:
        """The requests that each worker has, by process id."""
        self._look()
        counts = {board.pid: board[_IN_FLIGHT] for board in self._others.values()}
        return {os.getpid(): self.in_flight, **counts}

    def enter(self) -> None:
        """Let one in. Raises HttpError 429 if there are too many."""
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()
        present = self._board[_IN_FLIGHT] + sum(board[_IN_FLIGHT] for board in self._others.values())
        if present >= self._limit:
            raise HttpError(
                429, "rate_limit_exceeded", f"{present} requests are being answered, the most there may be; try again"
            )
        self._board[_IN_FLIGHT] += 1

    def leave(self) -> None:
        """One is answered."""
        self._board[_IN_FLIGHT] -= 1

    def _look(self) -> None:
        """See which workers have come and gone."""
        self._looked = time.monotonic()
        for name, board in list(self._others.items()):
            if not board.is_current():
                self._others.pop(name).close()
        for name in names(self._prefix):
            if name not in self._others and name != self._board.name:
                with contextlib.suppress(ShmqError):
                    board = Board.attach(name)
                    if board.is_current():
                        self._others[name] = board
                    else:
                        board.close()
                        # Of a worker that was killed.
                        collect(name)

    def close(self) -> None:
        """Count nobody any more. Idempotent."""
        for board in self._others.values():
            board.close()
        self._others.clear()
        self._board.close()
