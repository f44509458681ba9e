"""Serve requests by hand: ``python -m engine``. Ends in order on SIGTERM, SIGINT, or after ``--requests``."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Annotated

import typer

from engine.patch_stats import patch_stats
from engine.serve import Replies, Served, serve
from engine.tensors import load_paddle
from fmq import Consumer, ShmqError
from shmq import collect

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    queue: Annotated[str, typer.Option(help="The queue that requests come from.")] = "requests",
    namespace: Annotated[str | None, typer.Option(help="Default: $FMQ_NAMESPACE, or 'default'.")] = None,
    requests: Annotated[int, typer.Option(help="Stop after so many requests; 0: never.")] = 0,
) -> None:
    """Take requests from a queue, map their arrays into Paddle tensors, compute patch statistics, answer."""
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s", stream=sys.stderr)
    # Before our own handlers: importing Paddle would replace them.
    load_paddle()
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    served = Served()
    replies = Replies(namespace)
    try:
        with Consumer(queue, namespace=namespace) as consumer:
            # An engine that was killed leaves the rings of its answers, whose queues may be gone with their processes.
            collect(f"shmq:{consumer.namespace}:")
            print(f"engine: serving queue {queue}; stop with Ctrl-C", flush=True)
            serve(
                consumer,
                patch_stats,
                replies,
                stop=lambda: stopped or 0 < requests <= served.requests,
                served=served,
            )
    except ShmqError as error:
        print(f"engine: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        replies.close()
    print(
        f"engine: {served.requests} requests served, {served.failed} failed, {served.lost_answers} answers not taken",
        flush=True,
    )


if __name__ == "__main__":
    app()
