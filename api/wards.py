"""Looking after processes: starting them, again if they end, and ending them in order."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from api.parent import end_with

_LOOK_SECONDS = 0.1
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 10.0
_SETTLED_SECONDS = 10.0
"""A process that has lived for so long was started well, and the next pause is the first one again."""
END_SECONDS = 40.0
"""How long processes may take to end."""


class Ward:
    """A process that is looked after. For the main thread.

    It ends with this one, however this one ends, unless it ``outlives`` it: then it has to know by itself when to end.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str] | None = None,
        *,
        pass_fds: Sequence[int] = (),
        outlives: bool = False,
    ) -> None:
        self.name = name
        self._outlives = outlives
        self._pass_fds = pass_fds
        self._command = command
        self._environment = environment
        self._pause = _FIRST_PAUSE
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._due = 0.0

    def start(self) -> None:
        """Start it."""
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            pass_fds=self._pass_fds,
            # Ctrl-C in a terminal is for this process, which ends the others in order.
            start_new_session=True,
            preexec_fn=None if self._outlives else functools.partial(end_with, os.getpid()),
        )

    def look(self) -> None:
        """Start it again if it has ended, and the pause is over."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._due:
                self.start()
        elif (code := self._process.poll()) is not None:
            if now - self._started > _SETTLED_SECONDS:
                self._pause = _FIRST_PAUSE
            print(
                f"supervisor: {self.name} has ended ({_why(code)}); it is started again in {self._pause:g} s",
                flush=True,
            )
            self._process = None
            self._due = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def end(self) -> None:
        """Ask it to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def join(self, deadline: float) -> None:
        """Wait until it has ended; by force after the deadline."""
        if self._process is not None:
            try:
                self._process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"supervisor: {self.name} does not end, and is killed", flush=True)
                self._process.kill()
                self._process.wait()


def _why(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def look_after(groups: Sequence[Sequence[Ward]], at_end: Callable[[], None] = lambda: None) -> None:
    """Run until SIGTERM or SIGINT; then ``at_end``, and end one group after another, the last one first.

    In the main thread.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    wards = [ward for group in groups for ward in group]
    try:
        for ward in wards:
            ward.start()
        while not stop.wait(_LOOK_SECONDS):
            for ward in wards:
                ward.look()
    finally:
        at_end()
        for group in reversed(groups):
            deadline = time.monotonic() + END_SECONDS
            for ward in group:
                ward.end()
            for ward in group:
                ward.join(deadline)
