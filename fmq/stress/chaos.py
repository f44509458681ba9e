"""Which misfortune comes next, when, to whom: all of it drawn from the seed, none of it done here."""

from __future__ import annotations

import msgspec
import numpy as np

from fmq.stress.plan import Plan


class Misfortune(msgspec.Struct, frozen=True):
    """One act of chaos: what, to which worker, and for how many seconds (where it lasts)."""

    action: str
    role: str
    slot: int
    seconds: float


class Chaos:
    """A sequence of misfortunes without end; ``due`` tells whether the next one's time has come."""

    def __init__(self, plan: Plan, start: float) -> None:
        self._plan = plan
        self._generator = np.random.default_rng([plan.seed, 1])
        self._at = start
        self._next = self._draw()

    def due(self, now: float) -> Misfortune | None:
        """The next misfortune, once; None before its time. ``now`` in seconds, as ``start``."""
        if not self._plan.chaos or now < self._at:
            return None
        misfortune, self._next = self._next, self._draw()
        # After a time in which nothing could be done, not all at once.
        self._at = max(self._at, now - self._plan.chaos_interval)
        return misfortune

    def _draw(self) -> Misfortune:
        generator, plan = self._generator, self._plan
        self._at += float(generator.exponential(plan.chaos_interval))
        action = plan.chaos[int(generator.integers(len(plan.chaos)))] if plan.chaos else ""
        role = "producer" if action.endswith("-producer") or action == "full-shm" else "consumer"
        slot = int(generator.integers(plan.producers if role == "producer" else plan.takers))
        return Misfortune(action, role, slot, float(generator.uniform(0.05, 0.8)))
