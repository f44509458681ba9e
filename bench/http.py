"""The suite ``http``: requests through the HTTP server, over this transport and over a pickle through ZeroMQ."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from bench.measure import RunFailedError

LINKS = ("fmq", "pickle")
KINDS = {"1 KiB prompt": ("prompt", 16), "14.5 MB image": ("image", 4)}
"""What is sent, and over how many connections at a time."""

_START_SECONDS = 60.0


@contextmanager
def servers() -> Iterator[dict[str, int]]:
    """One server for each link, idle until it is asked: their ports."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fmqb", dir="/tmp"))
        environment = {**os.environ, "FMQ_NAMESPACE": f"bench-http-{os.getpid()}", "FMQ_RUNTIME_DIR": directory}
        ports = {}
        for link in LINKS:
            engine = _start(stack, environment, "engine", link, f"b-{link}")
            assert engine.stdout is not None
            if not engine.stdout.readline():
                raise RunFailedError(f"the engine of {link} did not start")
            ports[link] = free_port()
            api = _start(stack, environment, "api", link, f"b-{link}", str(ports[link]))
            _wait(api, ports[link])
        yield ports


def lap(port: int, kind: str, connections: int, seconds: float) -> tuple[float, list[float]]:
    """Requests a second, and the seconds that each took. Raises RunFailedError."""
    command = [sys.executable, "-m", "bench.http_link", "load", kind, str(port), str(seconds), str(connections)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + _START_SECONDS, check=False)
    if done.returncode:
        raise RunFailedError(f"the clients failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    said = json.loads(done.stdout)
    return said["rate"], said["latencies"]


def p99_ms(latencies: list[float]) -> float:
    """The 99th percentile, in milliseconds."""
    return float(np.percentile(latencies, 99) * 1e3)


def _start(stack: ExitStack, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.http_link", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=_START_SECONDS)


def _wait(api: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            if api.poll() is not None or time.monotonic() > deadline:
                raise RunFailedError("the HTTP server did not start") from None
            time.sleep(0.1)


def free_port() -> int:
    """A TCP port of the loopback that nobody has now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
