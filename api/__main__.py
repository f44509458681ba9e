"""Send requests by hand: ``python -m api``. Every answer is checked against numpy."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from api.errors import ApiError
from api.load import Report, run
from api.report import table
from fmq import ShmqError

_TELL_SECONDS = 0.1


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
            report = run(
                requests, queue=queue, namespace=namespace, window=window, progress=progress, stop=lambda: stopped
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
