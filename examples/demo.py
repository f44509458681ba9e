"""One engine and some API workers on this host, real pictures, checked answers: ``python -m examples.demo``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.report import Report, merge, table
from fmq.paths import QueuePath
from shmq.segment import names

QUEUE = "requests"
_PATIENCE = 60.0
"""Seconds that an engine has to start, and everybody to end."""


class Worker:
    """One API worker process, and what it has told so far."""

    def __init__(self, requests: int, window: int, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "examples.load", "--json", "--queue", QUEUE]
        command += ["--requests", str(requests), "--window", str(window)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        self.answered = 0
        self.report: Report | None = None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            said = json.loads(line)
            self.answered = said["answered"]
            if "requests" in said:
                self.report = Report(**said)

    def join(self) -> None:
        """Wait until the process has ended and all that it said was read."""
        self.process.wait(_PATIENCE)
        self._reader.join()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    workers: Annotated[int, typer.Option(help="API worker processes.")] = 2,
    requests: Annotated[int, typer.Option(help="Requests of each worker.")] = 160,
    window: Annotated[int, typer.Option(help="Unanswered requests of each worker, at most.")] = 2,
) -> None:
    """Start an engine and API workers, let them talk, and show what came of it. Exits with 1 if anything was wrong."""
    console = Console()
    namespace = f"demo-{os.getpid()}"
    environment = {**os.environ, "FMQ_NAMESPACE": namespace}
    started = time.monotonic()
    engine = subprocess.Popen(
        [sys.executable, "-m", "engine", "--queue", QUEUE, "--handler", "patch-stats"],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    crew = []
    try:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        ) as progress:
            task = progress.add_task("starting the engine", total=workers * requests)
            assert engine.stdout is not None
            if not engine.stdout.readline():
                raise SystemExit("the engine did not start")
            progress.update(task, description="requests answered")
            crew = [Worker(requests, window, environment) for _ in range(workers)]
            while any(worker.process.poll() is None for worker in crew):
                progress.update(task, completed=sum(worker.answered for worker in crew))
                time.sleep(0.05)
            for worker in crew:
                worker.join()
            progress.update(task, completed=sum(worker.answered for worker in crew))
    finally:
        for process in [engine, *(worker.process for worker in crew)]:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        said = engine.communicate(timeout=_PATIENCE)[0].strip()
    reports = [worker.report for worker in crew if worker.report is not None]
    left = names(QueuePath(QUEUE, namespace).rings.rpartition(f"{QUEUE}:")[0])
    sockets = QueuePath(QUEUE, namespace).directory
    leftover = len(left) + (len(os.listdir(sockets)) if os.path.isdir(sockets) else 0)
    total = merge(reports)
    console.print(said)
    console.print(table(reports, f"{workers} API workers, one engine, {time.monotonic() - started:.1f} s in all"))
    complete = len(reports) == workers and engine.returncode == 0
    console.print(
        f"{total.lost} lost, {total.wrong + total.failed} wrong, {leftover} leaked segments or sockets"
        + ("" if complete else "; a process failed")
    )
    raise SystemExit(0 if complete and total.good and not leftover else 1)


if __name__ == "__main__":
    app()
