"""The report in words and numbers: lines for a pipe, tables for a terminal, and everything as JSON."""

from __future__ import annotations

import os
import platform
from collections import Counter
from datetime import datetime, timezone
from typing import Any

import msgspec
import numpy as np
import zmq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fmq.stress.gauges import Histogram
from fmq.stress.plan import bytes_text
from fmq.stress.result import Result
from fmq.stress.verify import Account, checks_of

PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)
_QUEUE = {
    "put": "put",
    "in doubt": "doubtful",
    "delivered": "delivered",
    "expired": "expired",
    "set aside": "set_aside",
    "lost": "lost",
    "redelivered": "redelivered",
    "GB": "nbytes",
}
"""The columns of the books, and what of an account stands there."""
_TOPIC = {
    "put": "put",
    "in doubt": "doubtful",
    "delivered": "delivered",
    "expired": "expired",
    "skipped": "skipped",
    "lost": "lost",
    "GB": "nbytes",
}


def show(console: Console, result: Result) -> None:
    """Print the verdict, the books, the checks, and how to repeat a run that failed."""
    console.print()
    for line in headlines(result):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)
    console.print()
    if console.is_terminal:
        _show_tables(console, result)
    else:
        _show_lines(console, result)
    console.print()
    for line in verdict(result):
        console.print(Text(line, "" if result.good else "red"), soft_wrap=True)


def headlines(result: Result) -> list[str]:
    """What ran, how fast it was, and what befell it."""
    plan, total = result.plan, result.total
    seconds = max(result.seconds, 1e-9)
    ends = [_count(plan.producers, plan.words("producer")), _count(plan.takers, plan.words("consumer"))]
    if plan.readers:
        ends.append(f"policy {plan.policy}")
    together = ", all readers together," if plan.readers else ""
    lines = [
        f"{plan.preset}, seed {plan.seed}: {', '.join(ends)}, payloads {plan.sizes}, "
        f"rings of {bytes_text(plan.ring_size)}, {plan.transfer}, {'asyncio' if plan.asyncio else 'blocking'}, "
        f"checksums {'on' if plan.checksums else 'off'}",
        f"{_count(total.delivered, 'message')} and {total.nbytes / 1e9:,.2f} GB{together} in {seconds:.1f} s: "
        f"{total.nbytes / seconds / 1e9:.3g} GB/s, {total.delivered / seconds:,.0f} messages/s",
        f"latency, put begun to message taken: {percentiles(result.latencies)}",
    ]
    if result.actions:
        counts = ", ".join(f"{count} {action}" for action, count in sorted(result.actions.items()))
        lines.append(f"chaos: {counts}")
        lives = [_count(count, f"{noun} process", f"{noun} processes") for noun, count in result.lives.items()]
        lines.append(f"lives: {', '.join(lives)}")
    if result.recovery.total():
        lines.append(f"consumer restarted to first redelivered message: {percentiles(result.recovery)}")
    if result.cut_short:
        lines.append("stopped at once: what was on its way, and what was left, could not be judged")
    elif result.interrupted:
        lines.append("stopped before its end, in order: all of this is about what ran until then")
    return lines


def verdict(result: Result) -> list[str]:
    """The last lines: what held, or what did not first and how to repeat it."""
    total = result.total
    left = result.found["segments"] + result.found["files"]
    wrong = result.found["content"] + result.found["views"]
    balance = (
        f"{result.found['lost'] and total.lost} lost, {result.found['order']} out of order, "
        f"{result.found['twice']} twice, {wrong} damaged, {left} segments or files left"
    )
    if result.good:
        return [f"{balance}. Every check held."]
    first = result.findings[0]
    others = sum(result.found.values()) - 1
    return [
        f"{balance}.",
        f"FAILED: {checks_of(result.plan)[first.check]} ({first.check}), at {first.at:.2f} s",
        *(f"  {line}" for line in first.text.splitlines()),
        *([f"  and {others} more: {_counted(result)}"] if others else []),
        f"seed {result.plan.seed}; to repeat it: {result.plan.command()}",
    ]


def percentiles(histogram: Histogram) -> str:
    """The usual percentiles and the largest value of a histogram of nanoseconds."""
    parts = [f"p{percent:g} {duration(histogram.percentile(percent))}" for percent in PERCENTILES[:4]]
    return ", ".join([*parts, f"max {duration(histogram.largest)}"])


def duration(nanoseconds: float) -> str:
    """A time as people read it."""
    for unit, factor in (("us", 1e3), ("ms", 1e6), ("s", 1e9)):
        if nanoseconds < 999.5 * factor or unit == "s":
            return f"{nanoseconds / factor:.3g} {unit}"
    raise AssertionError


def columns(result: Result) -> list[str]:
    """The heads of the books."""
    return list(_columns(result))


def rows(result: Result) -> list[tuple[str, list[str]]]:
    """The books: a row for each producer, of a topic for the publisher and each reader, and one for all."""
    parts = [
        (f"{result.plan.words(noun)} {slot}", account)
        for noun, accounts in (("producer", result.producers), ("consumer", result.readers))
        for slot, account in enumerate(accounts)
    ]
    named = [(name, _figures(account, _columns(result))) for name, account in [*parts, ("all", result.total)]]
    if result.readers:
        # What became of it stands in the rows of the readers.
        publisher = named[0][1]
        publisher[2:] = [""] * len(publisher[2:])
    return named


def _columns(result: Result) -> dict[str, str]:
    return _TOPIC if result.plan.readers else _QUEUE


def states(result: Result) -> list[tuple[str, str, str]]:
    """For every check: its name, what it says, and whether it held."""
    return [
        (check, text, f"FAILED, {count:,} times" if (count := result.found[check]) else "held")
        for check, text in checks_of(result.plan).items()
    ]


def to_json(result: Result) -> bytes:
    """Everything, with the histograms as buckets of (from ns, to ns, count)."""
    document = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "command": result.plan.command(),
        "good": result.good,
        "plan": {**msgspec.to_builtins(result.plan), "sizes": str(result.plan.sizes)},
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "cut_short": result.cut_short,
        "throughput": {
            "messages_per_second": result.total.delivered / max(result.seconds, 1e-9),
            "bytes_per_second": result.total.nbytes / max(result.seconds, 1e-9),
        },
        "checks": [
            {"name": check, "text": text, "held": not result.found[check], "failures": result.found[check]}
            for check, text in checks_of(result.plan).items()
        ],
        "findings": result.findings,
        "books": {
            "producers": result.producers,
            "readers": result.readers,
            "all": result.total,
            "balanced": result.total.balances(),
        },
        "latency": _histogram(result.latencies),
        "recovery": _histogram(result.recovery),
        "actions": result.actions,
        "lives": result.lives,
        "events": result.events,
        "samples": result.samples,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyzmq": zmq.pyzmq_version(),
        "libzmq": zmq.zmq_version(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip().lower() in {"model name", "cpu model"}:
                return value.strip()
    return platform.machine()


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {
        "count": histogram.total(),
        "max_ns": histogram.largest,
        "percentiles_ns": {f"{percent:g}": histogram.percentile(percent) for percent in PERCENTILES},
        "buckets": histogram.buckets(),
    }


def _figures(account: Account, fields: dict[str, str]) -> list[str]:
    return [
        f"{account.nbytes / 1e9:,.2f}" if field == "nbytes" else f"{getattr(account, field):,}"
        for field in fields.values()
    ]


def _show_tables(console: Console, result: Result) -> None:
    table = Table(title="books", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("" if result.readers else "producer")
    for column in columns(result):
        table.add_column(column.replace(" ", "\n"), justify="right", vertical="bottom")
    for name, figures in rows(result):
        table.add_row(name.removeprefix("producer "), *figures, style="bold" if name == "all" else "")
    console.print(table)
    console.print()
    table = Table(title="checks", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.show_header = False
    for check, text, state in states(result):
        table.add_row(Text(state, "green" if state == "held" else "red"), check, Text(text, "dim"))
    console.print(table)


def _show_lines(console: Console, result: Result) -> None:
    for name, figures in rows(result):
        said = ", ".join(
            f"{figure} {column}" for column, figure in zip(columns(result), figures, strict=True) if figure
        )
        console.print(f"books of {name}: {said}", highlight=False, soft_wrap=True)
    for check, text, state in states(result):
        console.print(f"check {check}: {state} ({text})", highlight=False, soft_wrap=True)


def _counted(result: Result) -> str:
    counts = Counter(result.found)
    counts[result.findings[0].check] -= 1
    return ", ".join(f"{count} {check}" for check, count in counts.items() if count)


def _count(number: int, name: str, plural: str = "") -> str:
    return f"{number:,} {name if number == 1 else plural or name + 's'}"
