"""The process that forks the workers: it has imported all they need, holds nothing of the queue, and has one thread.

A new worker so costs a fork (some 10 ms) and no imports. It is the workers' parent, and whoever sends them signals: a
pid can't be another process's before its parent has heard of its end. When the supervisor is gone, it kills the workers
and removes what is left of the run. Started by ``fmq.stress.launcher`` as ``python -m fmq.stress.forkserver``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from multiprocessing.connection import Connection, wait

from fmq.stress.consuming import ConsumerWorker, ReaderWorker
from fmq.stress.journal import Board
from fmq.stress.launcher import ENDED, LEAVE, READY, SPAWN, SPAWNED, Key
from fmq.stress.load import Content
from fmq.stress.notes import NoteWriter
from fmq.stress.place import Place, remove_all
from fmq.stress.plan import Plan
from fmq.stress.producing import ProducerWorker, PublisherWorker
from fmq.stress.worker import Worker, live

QUEUE: dict[str, type[Worker]] = {"producer": ProducerWorker, "consumer": ConsumerWorker}
TOPIC: dict[str, type[Worker]] = {"producer": PublisherWorker, "consumer": ReaderWorker}

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The loop of the process."""

    def __init__(self, connection: Connection, board_fd: int, notes_fd: int) -> None:
        self._connection = connection
        plan: Plan
        place: Place
        plan, place = connection.recv()
        self._plan, self._place = plan, place
        self._board = Board(board_fd, self._plan.producers, self._plan.takers)
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
        # Until the worker has a handler for it: it would not end in order.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        pid = os.fork()
        if pid == 0:
            os._exit(self._child(key))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        self._pids[pid] = key
        self._workers[key] = pid
        self._connection.send((SPAWNED, key, pid))

    def _child(self, key: Key) -> int:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._connection.close()
        os.close(self._wakeups)
        os.close(self._wakeup)
        role, slot = key
        roles = TOPIC if self._plan.readers else QUEUE
        worker = roles[role](self._plan, self._place, self._content, self._board, self._notes, slot)
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


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    ForkServer(Connection(arguments[0]), *arguments[1:]).run()
