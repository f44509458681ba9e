"""Serve requests: ``python -m engine``. Ends in order on SIGTERM, SIGINT, or after ``--requests``."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer

from engine.adapter import Adapter
from engine.engine import DRAIN_SECONDS, Engine
from engine.errors import EngineError
from engine.handlers.named import HANDLERS, load_handler
from engine.scheduling import BatchScheduler
from engine.tensors import load_paddle, to_paddle
from fmq import ShmqError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LOOK = 0.1


@app.command()
def run(
    queue: Annotated[str, typer.Option(help="The queue that requests come from.")] = "requests",
    namespace: Annotated[str | None, typer.Option(help="Default: $FMQ_NAMESPACE, or 'default'.")] = None,
    handler: Annotated[str, typer.Option(help=f"{', '.join(HANDLERS)}, or module:class of your own.")] = "echo",
    option: Annotated[list[str] | None, typer.Option(help="An argument of the handler, NAME=VALUE (JSON).")] = None,
    max_batch: Annotated[int, typer.Option(help="Requests that run together, at most.")] = 8,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused.")] = 4096,
    drain: Annotated[float, typer.Option(help="Seconds to finish what was taken, at the end.")] = DRAIN_SECONDS,
    requests: Annotated[int, typer.Option(help="Stop after so many requests; 0: never.")] = 0,
    adapter_ports: Annotated[
        str | None, typer.Option(help="Also serve plain ZeroMQ over TCP: REQUESTS,RESULTS,CONTROL ports.")
    ] = None,
    adapter_host: Annotated[str, typer.Option(help="The address of this host that they are bound to.")] = "127.0.0.1",
    until_closed: Annotated[
        int | None,
        typer.Option(help="End when nobody has the other end of this pipe, a descriptor, any more."),
    ] = None,
    adapter_only: Annotated[bool, typer.Option("--adapter-only", help="Serve those instead of the queue.")] = False,
) -> None:
    """Take requests from a queue, run them in batches, and answer whoever asked."""
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    try:
        made = load_handler(handler, _options(option or []))
        takes_tensors = getattr(made, "takes_tensors", False)
        if takes_tensors:
            # Before our own handlers of signals: importing Paddle would replace them.
            load_paddle()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        if until_closed is not None:
            threading.Thread(target=_wait_for_end, args=(until_closed, stop), daemon=True).start()
        adapter = _adapter(adapter_ports, adapter_host, adapter_only)
        scheduler = BatchScheduler(
            made, max_batch=max_batch, max_waiting=max_waiting, prepare=to_paddle if takes_tensors else None
        )
        engine = Engine(
            queue,
            scheduler,
            namespace=namespace,
            adapter=adapter,
            serve_queue=not adapter_only,
            metrics=_metrics(),
        )
    except (EngineError, ShmqError, ValueError) as error:
        print(f"engine: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    engine.start()
    where = f"queue {queue}" if not adapter_only else "the adapter"
    print(f"engine: serving {where} with {handler}; stop with Ctrl-C", flush=True)
    if adapter is not None:
        ports = f"{adapter.requests_port}, {adapter.results_port}, {adapter.control_port}"
        print(f"engine: serving plain ZeroMQ at {adapter_host}, ports {ports} (requests, results, control)", flush=True)
    while not (stop.is_set() or engine.wait(_LOOK) or 0 < requests <= _done(engine)):
        pass
    complete = engine.stop(drain)
    status = engine.status()
    print(
        f"engine: {status['finished'] + status['failed']} requests served, {status['failed']} failed"
        + ("" if complete else "; the rest is left to the next engine"),
        flush=True,
    )
    if engine.failed or not complete:
        # A handler that does not end would hold up the interpreter's own end.
        sys.stdout.flush()
        os._exit(1 if engine.failed else 0)


def _wait_for_end(fd: int, stop: threading.Event) -> None:
    while os.read(fd, 1024):
        pass
    stop.set()


def _done(engine: Engine) -> int:
    status = engine.status()
    return int(status["finished"] + status["failed"])


def _options(pairs: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise EngineError(f"a handler's option is NAME=VALUE; this one is {pair!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _adapter(ports: str | None, host: str, only: bool) -> Adapter | None:
    if ports is None:
        if only:
            raise EngineError("--adapter-only needs --adapter-ports")
        return None
    try:
        requests, results, control = (int(port) for port in ports.split(","))
    except ValueError:
        raise EngineError(f"--adapter-ports are three numbers, as in 8200,8201,8202; this is {ports!r}") from None
    return Adapter(requests_port=requests, results_port=results, control_port=control, host=host)


def _metrics() -> Any:
    """Counted only where somebody collects it."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return None
    from fmq.metrics import QueueMetrics

    return QueueMetrics()


if __name__ == "__main__":
    app()
