"""``shmq serve``: engines and the HTTP front end under one supervisor, as one would run them by hand.

A process that ends is started again, after a pause that grows while it keeps ending. SIGTERM and SIGINT end the front
end first, so that nothing new comes, and then the engines. If the supervisor is killed, the rest ends by itself, in
the same order.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Annotated

import typer

from api.wards import Ward, look_after

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    handler: Annotated[str, typer.Option(help="The engines' handler; see python -m engine --help.")] = "echo",
    option: Annotated[list[str] | None, typer.Option(help="An argument of the handler, NAME=VALUE (JSON).")] = None,
    engines: Annotated[int, typer.Option(help="How many engines, all alike.")] = 1,
    max_batch: Annotated[int, typer.Option(help="Requests that run together in an engine, at most.")] = 8,
    namespace: Annotated[str | None, typer.Option(help="Default: $FMQ_NAMESPACE, or 'default'.")] = None,
) -> None:
    """Serve HTTP, with engines behind it, on this host. All other options are those of python -m api (--port, ...)."""
    if engines < 1:
        raise typer.BadParameter("there is one engine at least", param_hint="--engines")
    directory = tempfile.mkdtemp(prefix="shmq-metrics-")
    environment = {"PROMETHEUS_MULTIPROC_DIR": directory, **os.environ}
    if namespace is not None:
        environment["FMQ_NAMESPACE"] = namespace
    queues = ["requests"] if engines == 1 else [f"requests-{number}" for number in range(engines)]
    options = [word for pair in option or () for word in ("--option", pair)]
    told, held = os.pipe()
    crew = []
    for queue in queues:
        command = [sys.executable, "-m", "engine", "--queue", queue, "--handler", handler, *options]
        command += ["--max-batch", str(max_batch), "--until-closed", str(told)]
        # However this process ends: the engines end when the front end has, whose last requests they answer.
        crew.append(Ward(f"engine {queue}", command, environment, pass_fds=[told], outlives=True))
    names = [word for queue in queues for word in ("--engine", queue)]
    front = Ward("api", [sys.executable, "-m", "api", *names, *context.args], environment, pass_fds=[held])
    try:
        look_after([crew, [front]])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
