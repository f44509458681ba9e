"""What is shown while a run goes on: a panel that changes in a terminal, one line every two seconds elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fmq.stress.gauges import Sample
from fmq.stress.report import duration
from fmq.stress.result import Event
from fmq.stress.supervisor import Run

_EVENTS = 6
_LINE_SECONDS = 2.0


class Lines:
    """Plain lines: for a log, a pipe, CI."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to put back."""

    def show(self, run: Run) -> None:
        """Print a line, if the last one was long enough ago."""
        if run.now < self._next:
            return
        self._next = run.now + _LINE_SECONDS
        figures = ", ".join(f"{name} {value}" for name, value in _figures(run))
        self._print(f"{run.now:7.1f} s  {figures}")

    def tell(self, event: Event) -> None:
        """Print an event."""
        self._print(f"{event.at:7.1f} s  {event.text}")

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class Panel:
    """A few lines that are drawn again and again, with no thread of their own."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._events: deque[Event] = deque(maxlen=_EVENTS)

    def __enter__(self) -> Panel:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, run: Run) -> None:
        """Draw how things stand."""
        self._live.update(self._drawn(run), refresh=True)

    def tell(self, event: Event) -> None:
        """Remember an event for the next drawing."""
        self._events.append(event)

    def _drawn(self, run: Run) -> Group:
        progress = run.progress()
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        if progress is None:
            bar.add_row(run.phase, ProgressBar(total=None, pulse=True), f"{run.now:,.0f} s")
        else:
            done, total = progress
            of = f"{done:,.0f}/{total:,.0f}" if run.plan.messages or run.plan.kills else f"{done:.0f}/{total:.0f} s"
            bar.add_row(run.phase, ProgressBar(total=total, completed=done), of)
        figures = Table.grid(padding=(0, 2))
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column(justify="right", no_wrap=True)
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column(justify="right", no_wrap=True)
        pairs = _figures(run)
        half = (len(pairs) + 1) // 2
        for index in range(half):
            right = pairs[index + half] if index + half < len(pairs) else ("", "")
            figures.add_row(*pairs[index], *right)
        events = [
            Text(f"{event.at:7.1f} s  {event.text}", _style(event), no_wrap=True, overflow="ellipsis")
            for event in self._events
        ]
        return Group(bar, figures, *events)


def _figures(run: Run) -> list[tuple[str, str]]:
    samples = list(run.series.recent)[-4:]
    span = sum(sample.span for sample in samples) or 1.0
    last: Sample = samples[-1]
    figures = [
        ("GB/s", f"{sum(sample.nbytes for sample in samples) / span / 1e9:.3g}"),
        ("messages/s", f"{sum(sample.messages for sample in samples) / span:,.0f}"),
        ("messages", f"{run.verifier.delivered:,}"),
        ("ring fill", f"{last.fill:.0%}"),
        ("p50", duration(last.p50 * 1e9)),
        ("p99", duration(last.p99 * 1e9)),
    ]
    if run.plan.chaos:
        figures += [("kills", f"{run.kills:,}"), ("acts of chaos", f"{sum(run.actions.values()):,}")]
    return figures


def _style(event: Event) -> str:
    return "red" if event.kind.startswith("kill-") else "yellow"
