"""What workers have seen, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.table import Table


@dataclass(slots=True)
class Report:
    """What one worker has seen. Times in seconds; ``latencies`` from before the put until the answer was taken.

    ``wrong`` answers differ from what numpy finds, ``failed`` ones are errors, ``repeated`` ones came a second time,
    from an engine that did again what its predecessor had done.
    """

    requests: int = 0
    answered: int = 0
    wrong: int = 0
    failed: int = 0
    repeated: int = 0
    array_bytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Requests without an answer."""
        return self.requests - self.answered

    @property
    def good(self) -> bool:
        """Whether every request was answered, and rightly."""
        return self.requests > 0 and not (self.lost or self.wrong or self.failed)

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


def table(reports: Sequence[Report], title: str | None = None) -> Table:
    """One row for each worker, and one for all of them if there are several.

    ``copied``: how many bytes the transport copied for each byte that it delivered.
    """
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    result.add_column("worker")
    for name in ("requests", "MB", "GB/s", "p50 ms", "p99 ms", "copied", "unanswered"):
        result.add_column(name, justify="right")
    for number, report in enumerate(reports, 1):
        result.add_row(str(number), *_cells(report))
    if len(reports) > 1:
        total = merge(reports)
        result.add_section()
        result.add_row("all", *_cells(total), style="bold")
    return result


def merge(reports: Sequence[Report]) -> Report:
    """All reports as one; they ran side by side, so its time is that of the longest."""
    return Report(
        requests=sum(report.requests for report in reports),
        answered=sum(report.answered for report in reports),
        wrong=sum(report.wrong for report in reports),
        failed=sum(report.failed for report in reports),
        repeated=sum(report.repeated for report in reports),
        array_bytes=sum(report.array_bytes for report in reports),
        copied_bytes=sum(report.copied_bytes for report in reports),
        seconds=max((report.seconds for report in reports), default=0.0),
        latencies=[latency for report in reports for latency in report.latencies],
    )


def _cells(report: Report) -> list[str]:
    p50, p99 = np.percentile(report.latencies, [50, 99]) * 1e3 if report.latencies else (np.nan, np.nan)
    return [
        f"{report.requests:,}",
        f"{report.array_bytes / 1e6:,.0f}",
        f"{report.array_bytes / 1e9 / report.seconds if report.seconds else 0:.2f}",
        f"{p50:.1f}",
        f"{p99:.1f}",
        f"{report.copied_bytes / report.array_bytes if report.array_bytes else 0:.2f} x",
        f"{report.lost:,}",
    ]
