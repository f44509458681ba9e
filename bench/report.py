"""How the figures are shown: tables on a terminal, lines elsewhere, JSON on request."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.suites import Figure, Result
from fmq.stress.report import machine


def show(console: Console, suite: str, result: Result) -> None:
    """Print the figures of one suite."""
    if console.is_terminal:
        table = Table(title=suite, title_justify="left", caption=circumstances(result), caption_justify="left")
        table.add_column("figure")
        table.add_column("median (lowest to highest)", justify="right")
        table.add_column("goal", justify="right")
        table.add_column("")
        for figure in result.figures:
            style = {True: "green", False: "red", None: ""}[figure.reached]
            table.add_row(figure.name, measured(figure), goal(figure), Text(verdict(figure), style))
        console.print(table)
        return
    for figure in result.figures:
        parts = [f"{suite}: {figure.name}:", measured(figure), goal(figure), verdict(figure)]
        console.print(" ".join(part for part in parts if part), soft_wrap=True, highlight=False)
    console.print(f"{suite}: {circumstances(result)}", soft_wrap=True, highlight=False)


def circumstances(result: Result) -> str:
    """How long it took, and how far to trust it."""
    text = f"{result.seconds:.0f} s"
    if result.turns:
        text += f"; {result.turns} turns, and {result.disturbed} left out because other processes used the machine"
    if result.noisy:
        text += f"; {result.noisy} of those that count are disturbed, too, for it did not get quiet"
    return text


def measured(figure: Figure) -> str:
    """The median with its unit, and the spread if there was more than one measurement."""
    value = figure.value
    text = f"{_number(value.median)} {figure.unit}"
    return text if value.low == value.high else f"{text} ({_number(value.low)} to {_number(value.high)})"


def goal(figure: Figure) -> str:
    """The goal in words; empty if there is none."""
    if figure.at_least is not None:
        return f"at least {_number(figure.at_least)} {figure.unit}"
    return "" if figure.at_most is None else f"at most {_number(figure.at_most)} {figure.unit}"


def verdict(figure: Figure) -> str:
    """reached, missed, or empty."""
    return {True: "reached", False: "missed", None: ""}[figure.reached]


def to_json(results: dict[str, Result], plan: Any) -> bytes:
    """Everything that was measured, and where."""
    document = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "plan": plan,
        "suites": {
            name: {
                "figures": [{**msgspec.to_builtins(figure), "reached": figure.reached} for figure in result.figures],
                "data": result.data,
                "turns": {"counted": result.turns, "left_out": result.disturbed, "counted_but_noisy": result.noisy},
                "seconds": result.seconds,
            }
            for name, result in results.items()
        },
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
