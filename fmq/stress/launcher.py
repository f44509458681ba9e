"""The process that forks the workers: it has imported all they need, holds nothing of the queue, and has one thread.

A new worker so costs a fork (some 10 ms) and no imports. It is the workers' parent, and whoever sends them signals: a
pid can't be another process's before its parent has heard of its end. When the supervisor is gone, it kills the workers
and removes what is left of the run. ``python -m fmq.stress.launcher`` is started by ``LauncherClient``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import fmq
from fmq.stress.plan import Plan
from shmq.segment import names, unlink

Key: TypeAlias = "tuple[str, int]"
"""role and slot of a worker"""

READY = "ready"
SPAWN, SIGNAL, LEAVE = "spawn", "signal", "leave"
SPAWNED, ENDED = "spawned", "ended"

_START_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class LauncherGoneError(Exception):
    """The launcher has died."""


class LauncherClient:
    """The supervisor's end: starts the launcher, orders forks and signals, and hears of ends."""

    def __init__(self, plan: Plan, place: Any, board_fd: int, notes_fd: int) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(fmq.__file__).parent.parent), *sys.path])}
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(board_fd), str(notes_fd)]
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
        """End the launcher, and with it what still runs. Idempotent."""
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


class Launcher:
    """The loop of the launcher."""

    def __init__(self, connection: Connection, board_fd: int, notes_fd: int) -> None:
        from fmq.stress.journal import Board
        from fmq.stress.load import Content
        from fmq.stress.notes import NoteWriter

        self._connection = connection
        self._plan, self._place = connection.recv()
        self._board = Board(board_fd, self._plan.producers, self._plan.consumers)
        self._notes = NoteWriter(notes_fd)
        self._content = Content(self._plan)
        self._pids: dict[int, Key] = {}
        self._workers: dict[Key, int] = {}
        self._told_to_leave = False
        self._wakeups, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve until the supervisor closes the connection, or dies."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup)
        gc.collect()
        gc.freeze()
        try:
            self._connection.send((READY,))
            while True:
                wait([self._connection, self._wakeups])
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeups, 4096)
                self._reap()
                while self._connection.poll():
                    self._obey(*self._connection.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._kill_all()
            if not self._told_to_leave:
                remove_all(self._place)

    def _obey(self, order: str, key: Key, number: int = 0) -> None:
        if order == SPAWN:
            self._spawn(key)
        elif order == LEAVE:
            self._told_to_leave = True
        elif (pid := self._workers.get(key)) is not None:
            os.kill(pid, number)

    def _spawn(self, key: Key) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(self._child(key))
        self._pids[pid] = key
        self._workers[key] = pid
        self._connection.send((SPAWNED, key, pid))

    def _child(self, key: Key) -> int:
        from fmq.stress.worker import ROLES, live

        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._connection.close()
        os.close(self._wakeups)
        os.close(self._wakeup)
        role, slot = key
        worker = ROLES[role](self._plan, self._place, self._content, self._board, self._notes, slot)
        return live(worker, self._place)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # Others are children that workers forked, and left to us.
            key = self._pids.pop(pid, None)
            if key is not None:
                del self._workers[key]
                self._connection.send((ENDED, key, status))

    def _kill_all(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        while True:
            try:
                os.wait()
            except ChildProcessError:
                return


def remove_all(place: Any) -> None:
    """Remove every segment and file of a run."""
    for name in segments_of(place.namespace):
        unlink(name)
    shutil.rmtree(place.directory, ignore_errors=True)


def segments_of(namespace: str) -> list[str]:
    """The segments of a namespace, finished or not."""
    return names(f"shmq:{namespace}:") + names(f"making-shmq:{namespace}:")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


if __name__ == "__main__":
    # Imported here under its own name, so that what is pickled means the same on both ends.
    from fmq.stress import launcher, worker

    assert worker.ROLES
    arguments = [int(argument) for argument in sys.argv[1:]]
    launcher.Launcher(Connection(arguments[0]), *arguments[1:]).run()
