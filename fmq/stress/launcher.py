"""The supervisor's end of ``fmq.stress.forkserver``: orders forks and signals, and hears of ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import fmq
from fmq.stress.place import Place
from fmq.stress.plan import Plan

Key: TypeAlias = "tuple[str, int]"
"""role and slot of a worker"""

READY = "ready"
SPAWN, SIGNAL, LEAVE = "spawn", "signal", "leave"
SPAWNED, ENDED = "spawned", "ended"

_START_SECONDS = 60.0


class LauncherGoneError(Exception):
    """The fork server has died."""


class Launcher:
    """Starts the fork server, and talks to it."""

    def __init__(self, plan: Plan, place: Place, board_fd: int, notes_fd: int) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(fmq.__file__).parent.parent), *sys.path])}
        command = [sys.executable, "-m", "fmq.stress.forkserver", str(theirs.fileno()), str(board_fd), str(notes_fd)]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno(), board_fd, notes_fd],
            env=environment,
            stdin=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for the supervisor alone.
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send((plan, place))

    def wait_until_ready(self) -> None:
        """Wait for the imports, and for the content of the messages. Raises LauncherGoneError."""
        if not self._connection.poll(_START_SECONDS) or self._receive() != (READY,):
            raise LauncherGoneError("the process that starts the workers did not become ready")

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._connection.fileno()

    def spawn(self, key: Key) -> None:
        """Fork a worker."""
        self._send((SPAWN, key))

    def signal(self, key: Key, number: int) -> None:
        """Send a signal to a worker, if it lives."""
        self._send((SIGNAL, key, number))

    def take(self) -> list[tuple[Any, ...]]:
        """What was told: ("spawned", key, pid) and ("ended", key, wait status). Raises LauncherGoneError."""
        told = []
        while self._connection.poll():
            told.append(self._receive())
        return told

    def close(self) -> None:
        """End the fork server, and with it what still runs. Idempotent."""
        with contextlib.suppress(LauncherGoneError, OSError):
            self._send((LEAVE, ("", 0)))
        self._connection.close()
        self.process.wait()

    def _send(self, what: Any) -> None:
        try:
            self._connection.send(what)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise LauncherGoneError("the process that starts the workers is gone") from error

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise LauncherGoneError("the process that starts the workers is gone") from error
