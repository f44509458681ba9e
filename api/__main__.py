"""Serve HTTP: ``python -m api``. Ends in order on SIGTERM and SIGINT."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from typing import Annotated

import msgspec
import typer

from api.client import PATIENCE
from api.http.settings import ENVIRONMENT, MIB, Settings
from api.wards import Ward, look_after
from fmq import QueueNameError
from fmq.paths import QueuePath

_BACKLOG = 2048

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    host: Annotated[str, typer.Option(help="The address to serve at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The TCP port; 0: any that is free.")] = 8000,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 1,
    engine: Annotated[list[str] | None, typer.Option(help="An engine's queue; may be given again.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Default: $FMQ_NAMESPACE, or 'default'.")] = None,
    model: Annotated[str, typer.Option(help="The name that clients know the engine by.")] = "shmq-demo",
    ring_mib: Annotated[int, typer.Option(help="Shared memory of each worker for each engine, MiB.")] = 256,
    spill_mib: Annotated[int, typer.Option(help="What it may take besides, for what does not fit, MiB.")] = 4096,
    patience: Annotated[float, typer.Option(help="Seconds that an engine may be gone, before 503.")] = PATIENCE,
    max_concurrency: Annotated[int, typer.Option(help="Requests at a time; one more is answered with 429.")] = 512,
    max_body_mib: Annotated[int, typer.Option(help="The largest body, MiB.")] = 2048,
    request_timeout: Annotated[float, typer.Option(help="Deadline of a request that names none, seconds.")] = 600.0,
    access_log: Annotated[bool, typer.Option(help="A line for each request, on standard output.")] = True,
) -> None:
    """Take requests over HTTP, and have engines answer them."""
    settings = Settings(
        engines=tuple(engine or ("requests",)),
        namespace=namespace,
        model=model,
        ring_size=ring_mib * MIB,
        spill_limit=spill_mib * MIB,
        patience=patience,
        max_concurrency=max_concurrency,
        max_body=max_body_mib * MIB,
        request_timeout=request_timeout,
        access_log=access_log,
    )
    if workers < 1:
        raise typer.BadParameter("there is one worker at least", param_hint="--workers")
    try:
        for queue in settings.engines:
            QueuePath(queue, namespace)
    except QueueNameError as error:
        print(f"api: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    os.environ[ENVIRONMENT] = msgspec.json.encode(settings).decode()
    own = None
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        own = os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="shmq-metrics-")
    try:
        with _listen(host, port) as listening:
            print(
                f"api: serving http://{host}:{listening.getsockname()[1]} with {workers} "
                f"worker{'s' if workers > 1 else ''}, for {', '.join(settings.engines)}; stop with Ctrl-C",
                flush=True,
            )
            fd = listening.fileno()
            command = [sys.executable, "-m", "api.http.worker", str(fd)]
            crew = [Ward(f"api worker {number}", command, pass_fds=[fd]) for number in range(workers)]
            # At the end nobody may be left in the queue of a socket that none accepts from any more.
            look_after([crew], at_end=listening.close)
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _listen(host: str, port: int) -> socket.socket:
    """The socket that all workers accept connections from."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        print(f"api: can't serve at {host}, port {port}: {error}; choose another with --port", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    app()
