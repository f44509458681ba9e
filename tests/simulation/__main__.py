"""Run schedules, and prove that deliberate faults are caught: ``python -m tests.simulation --help``."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from rich.console import Console
from rich.table import Table

from tests.simulation import schedule, topic_schedule
from tests.simulation.patches import simulated
from tests.simulation.work import ALL_MUTATIONS, Report, prove, run_chunk, runner

_CHUNK = 250
_SECONDS = 540.0
_COLUMNS = {
    "schedules": "schedules",
    "weak": "of them in the weak memory model",
    "steps": "steps",
    "messages": "messages delivered",
    "redelivered": "of them again, after a death",
    "kills": "processes killed",
    "lost": "frames dropped",
    "turns": "turns of a ring",
    "folds": "folds of a ring",
    "spills": "payloads spilled",
    "readers": "readers of a topic",
    "skips": "of them skipped",
    "drops": "of them dropped",
}


def main() -> int:
    """The exit status: 1 if a schedule failed or a mutation was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, help="how many to run (default: as many as the time allows)")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for how long, mutations included")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", action="store_true", help="run that seed alone, and show its last steps")
    parser.add_argument(
        "--focus",
        choices=sorted({**schedule.FOCUSES, **topic_schedule.FOCUSES}),
        help="with --replay: not the focus of the seed",
    )
    parser.add_argument("--topic", action="store_true", help="with --replay: that seed's schedule of a topic")
    parser.add_argument(
        "--mutation", choices=[mutation.name for mutation in ALL_MUTATIONS], help="with --replay: mutated"
    )
    parser.add_argument(
        "--mutations", action="store_true", help="prove first that every mutation is caught, in up to 20,000 schedules"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes to run in")
    arguments = parser.parse_args()
    console = Console()
    if arguments.replay:
        return _replay(arguments, console)
    deadline = time.monotonic() + arguments.seconds
    reports = []
    context = multiprocessing.get_context("spawn")
    begun = time.monotonic()
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        running: set[Future[Report]] = set()
        jobs = _jobs(arguments, deadline)
        for name, *args in jobs:
            running.add(pool.submit(prove if name == "prove" else run_chunk, *args))
            if len(running) > arguments.workers:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                reports += [future.result() for future in done]
        reports += [future.result() for future in running]
    return _show(reports, time.monotonic() - begun, console)


def _jobs(arguments: argparse.Namespace, deadline: float) -> Iterator[tuple[str, int] | tuple[str, int, int, bool]]:
    if arguments.mutations:
        for index in range(len(ALL_MUTATIONS)):
            yield "prove", index
    seed = arguments.seed
    left = arguments.schedules if arguments.schedules is not None else sys.maxsize
    while left > 0 and time.monotonic() < deadline:
        count = min(left, _CHUNK)
        yield "run", seed, count, False
        yield "run", seed, count, True
        seed += count
        left -= count


def _replay(arguments: argparse.Namespace, console: Console) -> int:
    found = [mutation for mutation in ALL_MUTATIONS if mutation.name == arguments.mutation]
    run = runner(arguments.topic) if not found else found[0].run
    with simulated():
        if found:
            with found[0].applied():
                text = _traced_or_fine(run, arguments.seed, arguments.focus)
        else:
            text = _traced_or_fine(run, arguments.seed, arguments.focus)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(text.startswith("seed"))


def _traced_or_fine(run: Callable[..., schedule.Outcome], seed: int, focus: str | None) -> str:
    try:
        return f"no promise was broken: {run(seed, focus=focus, traced=True)}"
    except schedule.Failure as failure:
        return str(failure)


def _show(reports: list[Report], seconds: float, console: Console) -> int:
    totals = schedule.Outcome(), schedule.Outcome()
    failures: tuple[list[str], list[str]] = [], []
    for report in reports:
        totals[report.topic].add(report.outcome)
        failures[report.topic].extend(report.failures)
    table = Table(title=f"schedules, in {seconds:.0f} s", title_justify="left")
    table.add_column("what was run")
    table.add_column("of a queue", justify="right")
    table.add_column("of a topic", justify="right")
    for name, what in _COLUMNS.items():
        table.add_row(what, *(f"{getattr(total, name):,}" for total in totals))
    table.add_row("failed", *(f"{len(failed):,}" for failed in failures))
    console.print(table)
    escaped = 0
    proofs = sorted((report for report in reports if report.mutation >= 0), key=lambda report: report.mutation)
    if proofs:
        table = Table(title=f"{len(proofs)} deliberate faults", title_justify="left")
        longest = max(len(mutation.name) for mutation in ALL_MUTATIONS)
        table.add_column("fault", width=longest)
        table.add_column("caught as", width=max(20, console.width - longest - 19), no_wrap=True)
        table.add_column("schedules", width=9, justify="right")
        for proof in proofs:
            escaped += not proof.caught
            table.add_row(ALL_MUTATIONS[proof.mutation].name, proof.caught or "NOT CAUGHT", f"{proof.tries:,}")
        console.print(table)
    caught = f"{len(proofs) - escaped} of {len(proofs)} deliberate faults were caught, and " if proofs else ""
    console.print(f"{caught}{sum(map(len, failures))} schedules broke a promise.", highlight=False)
    for failure in itertools.chain(*failures):
        console.print(failure, markup=False, highlight=False, soft_wrap=True)
    return int(any(failures) or bool(escaped))


if __name__ == "__main__":
    sys.exit(main())
