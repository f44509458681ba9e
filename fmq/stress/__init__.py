"""The stress test of the queue, ``shmq stress``: real processes, real deaths, every message checked from end to end.

``run(plan, view)`` of ``fmq.stress.supervisor`` is the program; ``PRESETS`` has plans to begin with.
"""

from fmq.stress.plan import PRESETS, Plan, PlanError, Sizes

__all__ = ["PRESETS", "Plan", "PlanError", "Sizes"]
