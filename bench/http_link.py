"""The processes of the suite ``http``: the same server over this transport, and over a pickle through ZeroMQ.

    python -m bench.http_link engine LINK NAME       the engine
    python -m bench.http_link api LINK NAME PORT     one worker of the HTTP front end
    python -m bench.http_link load KIND PORT SECONDS CONNECTIONS    the clients; prints a line of JSON

LINK is "fmq" or "pickle". The pickle link is FastDeploy's way: PUSH/PULL over ipc each way, each request one pickle.
Everything else is the same: uvicorn, the application, the body received into an array, the handler.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import uvicorn
import zmq
import zmq.asyncio

from api.http.app import create_app, new_client
from api.http.settings import Settings
from engine import BatchScheduler, Engine, Result, Task
from fmq.calls import Output

IMAGE = (24_708, 588)
"""The patches of the largest picture that ERNIE-4.5-VL takes: 14.5 MB of uint8."""
_PAGE = 4096


class Touch:
    """Looks at one byte of each page of every array, and answers with their sum."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's."""
        yield [task.output(touch(task.inputs)) for task in tasks]


def touch(task: Any) -> int:
    """The sum of one byte of each page of a task's arrays, and of the length of its text."""
    total = 0
    for value in task.values():
        if isinstance(value, np.ndarray):
            total += int(value.reshape(-1).view(np.uint8)[::_PAGE].sum())
        elif isinstance(value, str):
            total += len(value)
    return total


class _Heap:
    """Room in private memory, for an application that asks for some in a ring."""

    async def empty(self, shape: Any, dtype: Any = np.uint8, *, timeout: float | None = None) -> Any:
        return np.empty(shape, dtype)


class PickleLink:
    """What the application knows of an engine."""

    producer = _Heap()
    serving = True
    queue = "pickle"

    def look(self) -> None:
        """It is there."""

    def describe(self) -> dict[str, object]:
        """For /health."""
        return {"queue": self.queue, "state": "serving"}


class PickleClient:
    """Stands in for EngineClient: each task is one pickle through PUSH/PULL, and so is what comes back."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._back = f"{_endpoint(name)}-{os.getpid()}"
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self.links = [PickleLink()]

    async def start(self) -> None:
        """Connect."""
        self._context = zmq.asyncio.Context()
        self._there, self._here = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket in (self._there, self._here):
            socket.set_hwm(0)
        self._there.connect(_endpoint(self._name))
        self._here.bind(self._back)
        self._task = asyncio.create_task(self._dispatch())

    async def close(self) -> None:
        """Disconnect."""
        self._task.cancel()
        self._context.destroy(linger=0)

    async def _dispatch(self) -> None:
        while True:
            for request_id, value in pickle.loads(await self._here.recv()):
                self._answers[request_id].set_result(value)

    def choose(self) -> PickleLink:
        """The one engine."""
        return self.links[0]

    async def send_task(self, task: Any, *, request_id: str, **_: Any) -> str:
        """As EngineClient's."""
        self._answers[request_id] = asyncio.get_running_loop().create_future()
        await self._there.send(pickle.dumps((request_id, self._back, task), pickle.HIGHEST_PROTOCOL), copy=False)
        return request_id

    async def results(self, request_id: str) -> AsyncIterator[Output]:
        """As EngineClient's."""
        value = await self._answers[request_id]
        del self._answers[request_id]
        yield Output(request_id, 0, 0, value)

    def abort_soon(self, request_id: str) -> None:
        """Nobody aborts here."""


def _endpoint(name: str) -> str:
    return f"ipc://{os.environ['FMQ_RUNTIME_DIR']}/{name}"


def _pickle_engine(name: str) -> None:
    context = zmq.Context()
    here = context.socket(zmq.PULL)
    here.set_hwm(0)
    here.bind(_endpoint(name))
    back: dict[str, zmq.Socket[bytes]] = {}
    print("serving", flush=True)
    while True:
        request_id, address, task = pickle.loads(here.recv(copy=False).buffer)
        if address not in back:
            back[address] = context.socket(zmq.PUSH)
            back[address].connect(address)
        back[address].send(pickle.dumps([(request_id, touch(task))]))


def _fmq_engine(name: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Engine(name, BatchScheduler(Touch())):
        print("serving", flush=True)
        stop.wait()


def _api(link: str, name: str, port: int) -> None:
    settings = Settings(engines=(name,), access_log=False)
    make: Any = new_client if link == "fmq" else lambda _: PickleClient(name)
    config = uvicorn.Config(create_app(settings, make), port=port, log_level="warning", access_log=False)
    uvicorn.Server(config).run()


def _request(kind: str) -> bytes:
    if kind == "prompt":
        body, media = json.dumps({"prompt": "x" * 1024}).encode(), "application/json"
    else:
        body, media = np.random.default_rng(1).bytes(IMAGE[0] * IMAGE[1]), "application/octet-stream"
    head = f"POST /v1/tasks HTTP/1.1\r\nHost: bench\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _load(kind: str, port: int, seconds: float, connections: int) -> dict[str, Any]:
    request = _request(kind)
    latencies: list[float] = []
    end = time.monotonic() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < end:
            begun = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            latencies.append(time.perf_counter() - begun)
        writer.close()

    begun = time.monotonic()
    await asyncio.gather(*(client() for _ in range(connections)))
    return {"rate": len(latencies) / (time.monotonic() - begun), "latencies": latencies}


def main(arguments: list[str]) -> None:
    """Be the process that the arguments name."""
    match arguments:
        case ["engine", "fmq", name]:
            _fmq_engine(name)
        case ["engine", "pickle", name]:
            _pickle_engine(name)
        case ["api", link, name, port]:
            _api(link, name, int(port))
        case ["load", kind, port, seconds, connections]:
            print(json.dumps(asyncio.run(_load(kind, int(port), float(seconds), int(connections)))))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
