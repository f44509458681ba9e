"""The parts that the simulation's work is cut into; each runs in a process of its own."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, field

from tests.simulation import schedule
from tests.simulation.mutations import MUTATIONS, catch
from tests.simulation.patches import simulated

_PROOF = 20_000
"""After how many schedules a mutation counts as not caught."""


_NOISE = re.compile(r"^Broken: |ring \S+ is damaged at position \d+: ")
"""What need not be said of each mutation."""


@dataclass(slots=True)
class Report:
    """What a worker did: schedules, or one mutation."""

    outcome: schedule.Outcome = field(default_factory=schedule.Outcome)
    failures: list[str] = field(default_factory=list)
    mutation: int = -1
    caught: str = ""
    tries: int = 0


def run_chunk(first: int, count: int) -> Report:
    """Run the schedules of ``count`` seeds; a failure is run again with a trace."""
    report = Report()
    with simulated():
        for seed in range(first, first + count):
            try:
                report.outcome.add(schedule.run(seed))
            except schedule.Failure:
                report.failures.append(_traced(seed, None))
            if seed % 100 == 0:
                gc.collect()
    return report


def _traced(seed: int, focus: str | None) -> str:
    try:
        schedule.run(seed, focus=focus, traced=True)
    except schedule.Failure as failure:
        return str(failure)
    return f"seed {seed} failed, and did not fail again with a trace: the simulation is not deterministic"


def prove(index: int) -> Report:
    """Look for a schedule that catches a mutation."""
    with simulated():
        failure, tries = catch(MUTATIONS[index], _PROOF)
    caught = "" if failure is None else _NOISE.sub("", failure.cause)
    return Report(mutation=index, caught=caught, tries=tries)
