"""What a run shows."""

from __future__ import annotations

import msgspec

from fmq.stress.gauges import Histogram, Sample
from fmq.stress.plan import Plan
from fmq.stress.verify import Account, Finding


class Event(msgspec.Struct, frozen=True):
    """Something that happened ``at`` so many seconds after the start; ``kind`` is an action's name, or "remark"."""

    at: float
    kind: str
    text: str


class Result(msgspec.Struct):
    """What a run showed. ``findings`` are the checks that did not hold, the first one first.

    ``total`` is the sum of ``producers`` or, in a topic, of ``readers``.
    """

    plan: Plan
    seconds: float
    findings: list[Finding]
    found: dict[str, int]
    producers: list[Account]
    readers: list[Account]
    total: Account
    latencies: Histogram
    recovery: Histogram
    samples: list[Sample]
    events: list[Event]
    actions: dict[str, int]
    lives: dict[str, int]
    interrupted: bool
    cut_short: bool

    @property
    def good(self) -> bool:
        """Whether every check held."""
        return not self.findings
