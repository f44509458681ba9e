"""The stress test of queues and topics, ``shmq stress``: real processes, real deaths, every message checked.

To run it from Python::

    from fmq.stress import PRESETS, run

    result = run(PRESETS["quick"])
    assert result.good, result.findings
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fmq.stress.plan import PRESETS, Plan, PlanError, Sizes

if TYPE_CHECKING:
    from fmq.stress.result import Result
    from fmq.stress.supervisor import View

__all__ = ["PRESETS", "Plan", "PlanError", "Sizes", "run"]


def run(plan: Plan, view: View | None = None) -> Result:
    """Run a plan to its end, in processes of its own, and return what it showed. ``view`` is told as it goes on.

    In the main thread SIGINT and SIGTERM end the run in order meanwhile. Raises PlanError if this host can't run the
    plan, ModuleNotFoundError without the extra ``stress``.
    """
    # Not above: whoever reads a plan needs none of it.
    from fmq.stress.supervisor import Run, Unwatched

    return Run(plan, view or Unwatched()).run()
