"""Servers that the tests of HTTP start, each in a namespace and directories of its own, and what they may not leave."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

from api import EngineView
from engine.handlers.echo import Echo
from engine.tasks import Result, Task
from fmq.calls import Gauge
from tests.queues import eventually

ROOT = Path(__file__).parents[2]
TOLD = "tests.e2e.servers:Told"
PATIENCE = 60.0
MIB = 1024 * 1024
_SHARED = "/dev/shm"
_OWN_VARIABLES = ("FMQ_", "SHMQ_", "PROMETHEUS_", "XDG_RUNTIME_DIR")
_SERVING = re.compile(r"^api: serving (http://\S+)", re.MULTILINE)


@pytest.fixture(autouse=True, name="shared_memory_is_left_as_it_was")
def shared_memory_fixture() -> None:
    """In place of the one for all tests: a server outlives the test that asks first. Its site checks when it ends."""


class Told:
    """A handler that does what each task says, and else answers as Echo does.

    ``{"fail": message}`` raises ValueError. ``{"hold": path}`` is answered when there is a file of that name, or when
    nobody waits any more. ``{"flow": n}`` is answered in n steps, one each few milliseconds.
    """

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        for task in tasks:
            told = task.inputs if isinstance(task.inputs, dict) else {}
            if "fail" in told:
                raise ValueError(told["fail"])
            if "flow" in told:
                yield from self._flow(task, int(told["flow"]))
            else:
                if "hold" in told:
                    _wait_for(told["hold"], task)
                yield from Echo().run([task])

    def _flow(self, task: Task, steps: int) -> Iterator[Sequence[Result]]:
        for step in range(steps):
            yield [task.output(step, finished=step == steps - 1)]
            time.sleep(0.005)


def _wait_for(path: str, task: Task) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (task.cancelled or os.path.exists(path)):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)


class Process:
    """A command that a test has started, and all that it says."""

    def __init__(self, site: Site, name: str, command: list[str]) -> None:
        self.site = site
        self._log = Path(site.directory, f"{name}-{os.urandom(4).hex()}.log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=site.environment
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What it and its children have said so far."""
        return self._log.read_text(errors="replace")

    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it has not ended after {PATIENCE} s:\n{self.log[-4000:]}")

    def end(self) -> int:
        """SIGTERM, and wait until it has ended."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.wait()

    def children(self) -> list[int]:
        """The processes that it has started and that live."""
        return _children(self.pid)


class Server(Process):
    """What serves HTTP: ``shmq serve`` or ``python -m api``. When it is made, it has said where."""

    def __init__(self, site: Site, name: str, command: list[str]) -> None:
        super().__init__(site, name, command)
        eventually(lambda: _SERVING.search(self.log) or self.ended(), "the server says where it serves", PATIENCE)
        found = _SERVING.search(self.log)
        if found is None:
            pytest.fail(f"the server has ended:\n{self.log}")
        self.url = found[1]
        self.port = int(self.url.rpartition(":")[2])

    def client(self, **options: Any) -> httpx.Client:
        """A client of it; to be closed."""
        return httpx.Client(**{"base_url": self.url, "timeout": PATIENCE, "trust_env": False, **options})

    def get(self, path: str) -> httpx.Response:
        """One GET, over a connection of its own."""
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, **what: Any) -> httpx.Response:
        """One POST, over a connection of its own."""
        with self.client() as client:
            return client.post(path, **what)

    def status(self) -> dict[str, Any]:
        """What /status.json has."""
        answer: dict[str, Any] = self.get("/status.json").json()
        return answer

    def in_flight(self) -> dict[int, int]:
        """The requests that each worker has, by process id."""
        return {worker["pid"]: worker["in_flight"] for worker in self.status()["workers"]}

    def ring_used(self) -> float:
        """Bytes in use of the rings of all workers to the engine."""
        return float(sum(queue.get("ring_used_bytes", 0) for queue in self.status()["queues"] if not queue["replies"]))

    def until_up(self, workers: int) -> None:
        """Wait until so many workers have their rings; each takes requests then, and the rest is up to the engines."""
        eventually(lambda: len(self.site.reply_queues()) >= workers or self.ended(), "all workers are there", PATIENCE)
        eventually(lambda: len(self.in_flight()) >= workers, "the workers see each other", PATIENCE)

    def until_ready(self, workers: int = 1) -> None:
        """Wait until so many workers take requests, and an engine answers them."""
        self.until_up(workers)
        eventually(lambda: self.get("/ready").status_code == 200, "the server is ready", PATIENCE)
        eventually(lambda: self.get("/health").json()["status"] == "ok", "the engines serve", PATIENCE)


class Site:
    """A namespace, a runtime directory and a temporary one, and the processes that were started with them.

    As a context manager it ends them in order, the front ends before the engines; each has to end with exit code 0, and
    nothing may be left of any.
    """

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="shmq-e2e-")
        self.namespace = f"e{os.urandom(6).hex()}"
        self.runtime = os.path.join(self.directory, "run")
        self.temporary = os.path.join(self.directory, "tmp")
        os.mkdir(self.temporary)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)},
            "FMQ_NAMESPACE": self.namespace,
            "FMQ_RUNTIME_DIR": self.runtime,
            "TMPDIR": self.temporary,
        }
        self._started: list[Process] = []

    def serve(self, *arguments: str) -> Server:
        """``shmq serve`` on a free port."""
        return self._server("serve", ["-m", "shmq", "serve", *arguments])

    def api(self, *arguments: str) -> Server:
        """``python -m api`` on a free port."""
        return self._server("api", ["-m", "api", *arguments])

    def engine(self, *arguments: str) -> Process:
        """``python -m engine``; it may not serve yet."""
        engine = Process(self, "engine", [sys.executable, "-m", "engine", *arguments])
        self._started.append(engine)
        return engine

    def _server(self, name: str, words: list[str]) -> Server:
        server = Server(self, name, [sys.executable, *words, "--port", "0"])
        self._started.insert(0, server)
        return server

    def path(self, name: str) -> str:
        """The path of a file that tasks may be told to wait for. It goes with the site."""
        return os.path.join(self.directory, f"{name}-{os.urandom(4).hex()}")

    def word(self, gauge: Gauge, queue: str = "requests") -> int:
        """A word of an engine's board, looked at from here."""
        view = EngineView(queue, self.namespace, self.runtime)
        view.look()
        try:
            return view.word(gauge)
        finally:
            view.close()

    def segments(self) -> list[str]:
        """The names of the segments that are there."""
        return [name for name in os.listdir(_SHARED) if f"shmq:{self.namespace}:" in name]

    def reply_queues(self) -> list[str]:
        """The reply queues that somebody reads, as each worker does."""
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(os.path.join(self.runtime, self.namespace))
            return [name for name in names if name.startswith("reply.") and name.endswith(".sock")]
        return []

    def processes(self) -> list[int]:
        """All processes of this namespace that live, whoever their parent is."""
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and self._is_ours(int(pid))]

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return f"FMQ_NAMESPACE={self.namespace}".encode() in environment
        return False

    def left(self) -> list[str]:
        """What is left of the processes: segments, sockets and locks, temporary files."""
        files = [str(path) for place in (self.runtime, self.temporary) for path in Path(place).rglob("*")]
        return self.segments() + files

    def gc(self) -> str:
        """``shmq gc --discard``, and what it says."""
        words = [sys.executable, "-m", "shmq", "gc", "--namespace", self.namespace, "--discard"]
        done = subprocess.run(
            words, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        return done.stdout

    def end(self) -> None:
        """End what lives, in order, and see that nothing is left."""
        for process in self._started:
            if not process.ended():
                assert process.end() == 0, process.log[-4000:]
        assert self.left() == []

    def __enter__(self) -> Site:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self.end()
        finally:
            self._force()

    def _force(self) -> None:
        """Whatever has gone wrong: nothing of it may trouble the next test."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.process.poll()
        for process in self._started:
            process.process.wait()
        for name in self.segments():
            os.unlink(os.path.join(_SHARED, name))
        shutil.rmtree(self.directory)


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, task.read_text().split())
    return children


def stop(pid: int) -> None:
    """SIGSTOP to a process that a test's server has started, and wait until all its threads stand."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _stands(pid), "the process stands")


def _stands(pid: int) -> bool:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
