"""The parts that the simulation's work is cut into; each runs in a process of its own."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation import schedule, topic_schedule
from tests.simulation.mutations import MUTATIONS, catch
from tests.simulation.patches import simulated
from tests.simulation.topic_mutations import TOPIC_MUTATIONS

ALL_MUTATIONS = (*MUTATIONS, *TOPIC_MUTATIONS)

_PROOF = 20_000
_RARE_PROOF = 100_000
"""After how many schedules a mutation counts as not caught."""


_NOISE = re.compile(r"^Broken: |ring \S+ is damaged at position \d+: ")
"""What need not be said of each mutation."""


@dataclass(slots=True)
class Report:
    """What a worker did: schedules, or one mutation."""

    outcome: schedule.Outcome = field(default_factory=schedule.Outcome)
    failures: list[str] = field(default_factory=list)
    topic: bool = False
    mutation: int = -1
    caught: str = ""
    tries: int = 0


def run_chunk(first: int, count: int, topic: bool) -> Report:
    """Run the schedules of ``count`` seeds, of a queue or a topic; a failure is run again with a trace."""
    report = Report(topic=topic)
    run = runner(topic)
    with simulated():
        for seed in range(first, first + count):
            try:
                report.outcome.add(run(seed))
            except schedule.Failure:
                report.failures.append(_traced(run, seed))
            if seed % 100 == 0:
                gc.collect()
    return report


def runner(topic: bool) -> Callable[..., schedule.Outcome]:
    """What runs the schedule of a seed."""
    return topic_schedule.run if topic else schedule.run


def _traced(run: Callable[..., schedule.Outcome], seed: int) -> str:
    try:
        run(seed, traced=True)
    except schedule.Failure as failure:
        return str(failure)
    return f"seed {seed} failed, and did not fail again with a trace: the simulation is not deterministic"


def prove(index: int) -> Report:
    """Look for a schedule that catches a mutation."""
    mutation = ALL_MUTATIONS[index]
    with simulated():
        failure, tries = catch(mutation, _RARE_PROOF if mutation.rare else _PROOF)
    caught = "" if failure is None else _NOISE.sub("", failure.cause)
    return Report(mutation=index, caught=caught, tries=tries)
