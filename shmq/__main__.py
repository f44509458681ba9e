"""The command line: ``shmq`` or ``python -m shmq``."""

from __future__ import annotations

from typing import Annotated

import typer

from shmq.orphans import PREFIX, collect

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _shmq() -> None:
    """Looks after the shared-memory rings of this host."""


@app.command()
def gc(
    namespace: Annotated[str | None, typer.Option(help="Only the rings of this namespace.")] = None,
    discard: Annotated[bool, typer.Option(help="Also remove orphaned rings with messages not yet delivered.")] = False,
) -> None:
    """Remove what dead processes left, in /dev/shm and of sockets, and say what and why. What is alive is not touched.

    Sockets and locks are looked for where $FMQ_RUNTIME_DIR says, as queues do.
    """
    # Sockets and locks are the queue's: one of the two places that import upwards, and only for those who ask.
    from fmq.paths import collect_files

    findings = collect(PREFIX if namespace is None else f"{PREFIX}{namespace}:", discard=discard)
    findings += collect_files(namespace)
    if not findings:
        print("Nothing is left over.")
        return
    for finding in findings:
        print(f"{'removed' if finding.removed else 'kept':8}{finding.nbytes / 2**20:9,.1f} MiB  {finding.name}")
        print(f"{'':22}{finding.reason}")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def stress(context: typer.Context) -> None:
    """Stress-test queues or a topic: real processes, real deaths, every message checked (--help says more)."""
    from fmq.stress.command import app as program

    program(context.args, prog_name="shmq stress")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(context: typer.Context) -> None:
    """Serve requests over HTTP, with engines behind it, on this host (--help says more)."""
    from api.serve import app as program

    program(context.args, prog_name="shmq serve")


def main() -> None:
    """The entry point of the ``shmq`` command."""
    app()


if __name__ == "__main__":
    main()
