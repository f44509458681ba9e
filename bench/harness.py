"""The stress test as a load: what it reaches with its journals, headers and checksums, while nothing goes wrong."""

from __future__ import annotations

from bench.measure import RunFailedError
from fmq.stress import Plan, Sizes, run

WARM_SECONDS = 1.0
"""What is left out at the beginning: the pages of the rings are touched for the first time."""


def stress_rate(nbytes: int, ring_size: int, seconds: float, *, checksums: bool) -> float:
    """Bytes a second from one producer to one consumer, copied in. Raises RunFailedError if a check did not hold."""
    result = run(
        Plan(
            duration=WARM_SECONDS + seconds,
            producers=1,
            sizes=Sizes("fixed", nbytes, nbytes),
            ring_size=ring_size,
            transfer="copy",
            hold=(0.0, 0.0),
            checksums=checksums,
        )
    )
    if not result.good:
        raise RunFailedError(f"the stress test found something: {result.findings[0].text}")
    samples = [sample for sample in result.samples if sample.at - sample.span >= WARM_SECONDS]
    return sum(sample.nbytes for sample in samples) / sum(sample.span for sample in samples)
