"""One API worker: ``python -m examples.load`` sends real requests to an engine, and checks each answer by numpy."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from api import ApiError, EngineClient, RequestFailedError, make_request, sample_pictures
from examples.patch_check import compare_stats, expected_stats
from examples.report import Report, table
from fmq import ShmqError

ANSWER_TIMEOUT = 60.0
PATIENCE = 60.0
_TELL_SECONDS = 0.1


async def run(
    count: int,
    *,
    queue: str,
    namespace: str | None = None,
    window: int = 4,
    progress: Callable[[Report], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Send ``count`` requests, at most ``window`` of them unanswered at a time, and wait for the answers.

    Waits up to PATIENCE seconds for an engine. Raises ApiError, and what a producer raises.
    """
    kinds = _request_kinds()
    report = Report()
    async with EngineClient(queue, namespace=namespace, patience=PATIENCE) as client:
        await _engine(client)
        begun = time.perf_counter()

        async def work() -> None:
            while report.requests < count and not stop():
                report.requests += 1
                request, expected = next(kinds)
                await _ask(client, request, expected, report)
                report.repeated = client.repeated
                report.array_bytes = sum(link.producer.array_bytes for link in client.links)
                report.copied_bytes = sum(link.producer.copied_bytes for link in client.links)
                report.seconds = time.perf_counter() - begun
                progress(report)

        await asyncio.gather(*(work() for _ in range(window)))
    return report


async def _engine(client: EngineClient) -> None:
    """Wait until one is there: both sides may be started in any order."""
    deadline = time.monotonic() + PATIENCE
    while not any(link.serving for link in client.links):
        if time.monotonic() > deadline:
            client.choose()
        await asyncio.sleep(0.05)


async def _ask(client: EngineClient, request: dict[str, Any], expected: dict[str, Any], report: Report) -> None:
    sent = time.perf_counter()
    request_id = await client.send_task(request, timeout=ANSWER_TIMEOUT)
    try:
        async for output in client.results(request_id):
            report.wrong += not compare_stats(output.value, expected)
    except RequestFailedError as error:
        report.failed += 1
        print(f"api: {error}", file=sys.stderr)
    report.answered += 1
    report.latencies.append(time.perf_counter() - sent)


def _request_kinds() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests over all sample pictures and both kinds of patches, without end, with what the engine has to find."""
    prepared: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
    for kind in ("ernie", "qwen"):
        for picture, prompt in sample_pictures():
            request = make_request(picture, prompt, request_id="sample", kind=kind)
            prepared.append((request, expected_stats(request)))
    while True:
        prepared.rotate(-1)
        yield prepared[0]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    requests: Annotated[int, typer.Option(help="How many requests to send.")] = 200,
    window: Annotated[int, typer.Option(help="How many may be unanswered at a time.")] = 4,
    queue: Annotated[str, typer.Option(help="The engine's queue.")] = "requests",
    namespace: Annotated[str | None, typer.Option(help="Default: $FMQ_NAMESPACE, or 'default'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print progress and result as lines of JSON.")] = False,
) -> None:
    """Cut real pictures into patches, send them with a prompt to an engine, check its answers."""
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    console = Console()
    bar = Progress(
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, disable=as_json
    )
    task = bar.add_task("", total=requests)
    told = 0.0

    def progress(report: Report) -> None:
        nonlocal told
        if as_json:
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                print(json.dumps({"answered": report.answered}), flush=True)
        else:
            bar.update(task, completed=report.answered)

    try:
        with bar:
            report = asyncio.run(
                run(requests, queue=queue, namespace=namespace, window=window, progress=progress, stop=lambda: stopped)
            )
    except (ApiError, ShmqError) as error:
        print(f"api: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if as_json:
        print(json.dumps(report.as_dict()), flush=True)
    else:
        console.print(table([report]))
        console.print(f"{report.lost} lost, {report.wrong + report.failed} wrong")
    raise SystemExit(0 if report.good else 1)


if __name__ == "__main__":
    app()
