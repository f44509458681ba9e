"""Engines in processes of their own, which the tests of processes start, stop and kill, and their clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from api import EngineClient, EngineView
from engine import BatchScheduler, Engine, Handler
from engine.handlers.echo import Echo
from fmq import Consumer
from fmq.calls import REPLY_PREFIX, Gauge
from fmq.paths import QueuePath, consumer_is_alive
from shmq import collect
from shmq.segment import names
from tests.queues import DEADLINE_S, Place, eventually

ROOT = Path(__file__).parents[2]
HANDLERS = "tests.process.handlers"
RING_SIZE = 1024 * 1024

T = TypeVar("T")


class EngineProcess:
    """``python -m engine`` for a queue of a test's place. When it is made, it serves, or has ended.

    ``arguments`` are those of its handler; ``options`` the command's, ``max_batch=1`` for ``--max-batch 1``.
    """

    def __init__(
        self,
        place: Place,
        *,
        queue: str | None = None,
        handler: str = "echo",
        arguments: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.place = place
        self.queue = queue or place.queue
        command = [sys.executable, "-m", "engine", "--queue", self.queue, "--handler", handler]
        for name, value in (arguments or {}).items():
            command += ["--option", f"{name}={json.dumps(value)}"]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        self._log = Path(place.directory, f"engine-{os.urandom(4).hex()}.log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"FMQ_NAMESPACE": place.namespace, "FMQ_RUNTIME_DIR": place.runtime},
            )
        try:
            eventually(lambda: "engine: serving" in self.log or self.ended, "the engine served, or ended")
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """All that it has said so far, on both its streams."""
        return self._log.read_text()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def view(self) -> EngineView:
        """What is to be seen of it from outside, not looked at yet; to be closed."""
        return EngineView(self.queue, **self.place.where)

    def word(self, gauge: Gauge) -> int:
        """A word of its board now, 0 without one."""
        view = self.view
        view.look()
        word = view.word(gauge)
        view.close()
        return word

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.wait()

    def terminate(self) -> None:
        """Tell it to end in order."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        """Tell it to end in order, wait until it has, and return its exit code."""
        self.terminate()
        return self.wait()

    def pause(self) -> None:
        """SIGSTOP, and wait until all its threads have come to a stop."""
        self.process.send_signal(signal.SIGSTOP)
        eventually(self._is_paused, "the engine came to a stop")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _is_paused(self) -> bool:
        threads = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)


StartEngine = Callable[..., EngineProcess]


@pytest.fixture(name="start_engine")
def start_engine_fixture(place: Place) -> Iterator[StartEngine]:
    """Starts engines of the test's place, as EngineProcess does. Those that run yet at the end are ended in order.

    What engines leave that end in order is found by the place, and fails the test; only after kills it is removed.
    """
    started: list[EngineProcess] = []

    def start(**options: Any) -> EngineProcess:
        engine = EngineProcess(place, **options)
        started.append(engine)
        return engine

    yield start
    try:
        for engine in started:
            if not engine.ended:
                engine.go_on()
                engine.terminate()
        for engine in started:
            engine.wait()
    finally:
        for engine in started:
            engine.kill()
    if any(engine.process.returncode == -signal.SIGKILL for engine in started):
        clean_up(place)


@contextmanager
def engine_here(place: Place, handler: Handler | None = None, **options: Any) -> Iterator[Engine]:
    """An engine in this process, which starts sooner: for what needs no kill. Echo by default, ``options`` the rest."""
    with Engine(place.queue, BatchScheduler(handler or Echo(), **options), **place.where) as engine:
        yield engine


def clean_up(place: Place) -> None:
    """Remove what processes that were killed have left in a place."""
    for lock in Path(place.path.directory).glob("*.lock"):
        if not consumer_is_alive(QueuePath(lock.stem, **place.where)):
            Consumer(lock.stem, **place.where).close()
    collect(segments_of(place), discard=True)


def segments_of(place: Place) -> str:
    """What the names of all segments of a place begin with."""
    return f"shmq:{place.namespace}:"


def reply_rings(place: Place) -> list[str]:
    """The names of the rings to clients."""
    return names(segments_of(place) + REPLY_PREFIX)


# -- clients ----------------------------------------------------------------------------------------------------------


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, with a deadline."""
    return asyncio.run(asyncio.wait_for(coroutine, 2 * DEADLINE_S))


def client_of(place: Place, *queues: str, **options: Any) -> EngineClient:
    """A client of a place's engine, or of those of several queues; to be used as ``async with``."""
    return EngineClient(queues or place.queue, **{"ring_size": RING_SIZE, **place.where, **options})


async def send(client: EngineClient, tasks: Iterable[Any], **options: Any) -> list[str]:
    """Send tasks, and return their request ids."""
    return [await client.send_task(task, **options) for task in tasks]


async def values(client: EngineClient, request_id: str) -> list[Any]:
    """The values of all outputs of a request."""
    return [output.value async for output in client.results(request_id)]


async def answers(client: EngineClient, request_ids: Iterable[str]) -> list[Any]:
    """The one value of each request."""
    return [value for request_id in request_ids for value in await values(client, request_id)]


def chat(words: int, text: str = "word") -> dict[str, Any]:
    """A chat that echo answers with so many words, one a step."""
    content = [{"type": "text", "text": " ".join(f"{text}{number}" for number in range(words))}]
    return {"kind": "chat", "messages": [{"role": "user", "content": content}], "max_tokens": None}


def said(task: dict[str, Any]) -> str:
    """What a chat has to be answered with."""
    return str(task["messages"][-1]["content"][0]["text"])
