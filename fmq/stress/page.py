"""The report as one HTML page that needs nothing else: text, tables, and pictures drawn by matplotlib as inline SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from fmq.stress.gauges import Histogram, Sample, thinned
from fmq.stress.plan import MIB
from fmq.stress.report import columns, duration, headlines, machine, rows, states, verdict
from fmq.stress.result import Result

INK, GRID = "#1f2733", "#e3e7ec"
BLUE, ORANGE, GREEN, PURPLE = "#2563a8", "#d9772b", "#2f8f6b", "#7a56a8"
ACTS = {
    "kill": ("#c8322b", "kill -9"),
    "stop": ("#e0a100", "SIGSTOP"),
    "restart": ("#2f8f6b", "SIGTERM and restart"),
    "full": ("#7a56a8", "full /dev/shm"),
    "slow": ("#6b7785", "slow consumer"),
    "hold": ("#1b9ab3", "views held"),
    "fork": ("#a0522d", "fork"),
}
"""Colour and name of each kind of chaos."""
_WIDTH, _HEIGHT = 10.0, 3.1
_MOST_POINTS = 240
"""Of a curve with another one over it."""
_FEWEST_SAMPLES = 3
"""With less a run was too short for pictures of its course, which would be empty."""
_HEADROOM = 1.35
"""Room above a curve for the marks of chaos."""
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shmq",
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2733; background: #f5f7f9; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 10px; }
section { background: #fff; border: 1px solid #e3e7ec; border-radius: 8px; padding: 16px 20px; margin-top: 18px; }
.verdict { border-left: 6px solid #2f8f6b; } .verdict.bad { border-left-color: #c8322b; }
.verdict strong { font-size: 17px; } .verdict pre { white-space: pre-wrap; margin: 8px 0 0; font-size: 13px; }
p { margin: 4px 0; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid #e3e7ec; } th { font-weight: 600; }
th:first-child, td:first-child, table.checks td { text-align: left; } tr.all td { font-weight: 600; }
.held { color: #2f8f6b; font-weight: 600; white-space: nowrap; }
.failed { color: #c8322b; font-weight: 600; white-space: nowrap; }
svg { width: 100%; height: auto; display: block; } .note { color: #5a6572; font-size: 13px; }
code { font-size: 13px; background: #f0f3f6; padding: 2px 5px; border-radius: 4px; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
"""


def to_html(result: Result) -> str:
    """The whole page."""
    plan = result.plan
    with mpl.rc_context(_STYLE):
        pictures = [
            ("Throughput", "What was delivered, averaged over each moment of sampling.", _throughput),
            (
                "Latency",
                plan.words("From the beginning of a put to the moment a consumer has the message."),
                _latency,
            ),
            ("Ring fill", "Of the fullest ring: from its oldest record in use to its end. Full means wait.", _fill),
            (
                "Nothing piles up",
                "Of the worker of each role that has the most; segments of all rings together.",
                _resources,
            ),
        ]
        if len(result.samples) < _FEWEST_SAMPLES:
            pictures = [picture for picture in pictures if picture[2] is _latency]
        sections = "".join(
            f"<section><h2>{title}</h2>{_svg(draw, result)}<p class='note'>{note}</p></section>"
            for title, note, draw in pictures
        )
    said = verdict(result)
    facts = "".join(f"<p>{html.escape(line)}</p>" for line in headlines(result))
    where = ", ".join(f"{name} {value}" for name, value in machine().items())
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>shmq stress {html.escape(plan.preset)}</title><style>{_CSS}</style></head><body><main>"
        f"<h1>shmq stress: {html.escape(plan.preset)}</h1><p class='note'>{html.escape(where)}</p>"
        f"<section class='verdict{'' if result.good else ' bad'}'>"
        f"<strong>{'Every check held' if result.good else 'A check failed'}</strong>"
        f"<pre>{html.escape(chr(10).join(said))}</pre></section>"
        f"<section><h2>The run</h2>{facts}<p>To repeat it: <code>{html.escape(plan.command())}</code></p></section>"
        f"{sections}"
        f"<section><h2>Books</h2><div class='scroll'>{_books(result)}</div>"
        f"<p class='note'>{_explained(result)}</p></section>"
        f"<section><h2>Checks</h2>{_checks(result)}</section></main></body></html>\n"
    )


def _explained(result: Result) -> str:
    """What the books mean."""
    doubt = result.plan.words(
        "In doubt: puts during which the producer was killed, and that stand in the ring nevertheless."
    )
    if not result.readers:
        return f"put + in doubt = delivered + expired + set aside + lost. {doubt}"
    skipped = "Skipped: what the policy took back, or did not offer to a reader that was dropped."
    if result.plan.policy == "block":
        skipped = ""
    return (
        "For each reader put + in doubt = delivered + expired + skipped + lost, where put counts from its first "
        f"message to its last, over all its lives. {skipped} {doubt}"
    )


def _books(result: Result) -> str:
    head = "".join(f"<th>{column}</th>" for column in ("", *columns(result)))
    body = "".join(
        f"<tr class='{'all' if name == 'all' else ''}'><td>{name}</td>"
        + "".join(f"<td>{figure}</td>" for figure in figures)
        + "</tr>"
        for name, figures in rows(result)
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _checks(result: Result) -> str:
    body = "".join(
        f"<tr><td class='{'held' if state == 'held' else 'failed'}'>{state}</td><td>{check}</td><td>{text}</td></tr>"
        for check, text, state in states(result)
    )
    return f"<table class='checks'>{body}</table>"


def _svg(draw: Callable[[Result], Figure], result: Result) -> str:
    out = io.StringIO()
    draw(result).savefig(out, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    text = out.getvalue()
    # Without the prolog, which names a document on the network; and no two pictures of a page may share an id.
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{draw.__name__}-", text[text.index("<svg") :])


def _figure(rows_: int = 1, columns: int = 1, height: float = _HEIGHT, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows_, columns, **options)


def _middles(samples: list[Sample]) -> list[float]:
    """Where in time a sample's span lies."""
    return [sample.at - sample.span / 2 for sample in samples]


def _throughput(result: Result) -> Figure:
    figure, axes = _figure(height=3.4)
    samples = thinned(result.samples, _MOST_POINTS)
    at, rate = _middles(samples), [sample.nbytes / sample.span / 1e9 for sample in samples]
    axes.fill_between(at, rate, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(at, rate, color=BLUE, linewidth=1.4)
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0, top=max(rate, default=0.0) * _HEADROOM or 1.0)
    _time_axis(axes, result)
    other = axes.twinx()
    counts = [sample.messages / sample.span for sample in samples]
    other.plot(at, counts, color=ORANGE, linewidth=1.0, alpha=0.9)
    other.set_ylabel("messages/s", color=ORANGE)
    other.set_ylim(bottom=0, top=max(counts, default=0.0) * _HEADROOM or 1.0)
    other.grid(visible=False)
    other.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _mark(axes, result)
    return figure


def _mark(axes: Axes, result: Result) -> None:
    """A tick along the upper edge for each act of chaos, a row for each kind."""
    events = result.events
    kinds = [kind for kind in ACTS if any(event.kind.startswith(kind) for event in events)]
    for row, kind in enumerate(kinds):
        at = [event.at for event in events if event.kind.startswith(kind)]
        colour, name = ACTS[kind]
        axes.plot(
            at,
            np.full(len(at), 0.985 - 0.024 * row),
            linestyle="none",
            marker="|",
            markersize=6,
            markeredgewidth=1.3,
            color=colour,
            label=f"{result.plan.words(name)} ({len(at):,})",
            transform=axes.get_xaxis_transform(),
        )
    if kinds:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=min(7, len(kinds)), fontsize=9, handlelength=0.8
        )


def _latency(result: Result) -> Figure:
    figure, (left, right) = _figure(1, 2, height=3.6)
    histogram = result.latencies
    buckets = histogram.buckets()
    if not buckets:
        return figure
    edges = np.geomspace(max(buckets[0][0], 1.0), buckets[-1][1], 60)
    counts, _ = np.histogram(
        [(low * high) ** 0.5 or 1.0 for low, high, _ in buckets], edges, weights=[b[2] for b in buckets]
    )
    left.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=BLUE, linewidth=0)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_ylim(bottom=0.7)
    left.set_xlabel("latency")
    left.set_ylabel("messages")
    left.set_title("how many messages took how long", fontsize=10, loc="left")
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    left.xaxis.set_minor_formatter(NullFormatter())
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _by_percentile(right, histogram)
    return figure


def _by_percentile(axes: Axes, histogram: Histogram) -> None:
    """As HdrHistogram draws it: the rarer, the further to the right, a decade of rarity each step."""
    nines = int(np.clip(np.floor(np.log10(max(histogram.total(), 10))), 1, 6))
    positions = np.linspace(0, nines, 200)
    values = [histogram.percentile(100 * (1 - 10.0**-position)) for position in positions]
    axes.plot(positions, values, color=BLUE, linewidth=1.6)
    axes.set_yscale("log")
    axes.set_xlim(0, nines)
    axes.set_xticks(range(nines + 1), [f"{100 * (1 - 10.0**-nine):.10g}" for nine in range(nines + 1)])
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel("percentile, %")
    axes.set_title("latency by percentile", fontsize=10, loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _fill(result: Result) -> Figure:
    figure, axes = _figure()
    at, fill = _middles(result.samples), [100 * sample.fill for sample in result.samples]
    axes.fill_between(at, fill, color=GREEN, alpha=0.18, linewidth=0)
    axes.plot(at, fill, color=GREEN, linewidth=1.2)
    axes.set_ylim(0, 103)
    axes.set_ylabel("% of the ring")
    _time_axis(axes, result)
    return figure


def _resources(result: Result) -> Figure:
    figure, (memory, counts, shm) = _figure(1, 3, height=2.9)
    samples = [sample for sample in result.samples if sample.producer_memory and sample.consumer_memory]
    at = [sample.at for sample in samples]
    puts, takes = result.plan.words("producer"), result.plan.words("consumer")
    memory.plot(at, [sample.producer_memory / MIB for sample in samples], color=BLUE, linewidth=1.2, label=puts)
    memory.plot(at, [sample.consumer_memory / MIB for sample in samples], color=ORANGE, linewidth=1.2, label=takes)
    memory.set_title("private memory, MiB", fontsize=10, loc="left")
    counts.plot(at, [sample.producer_descriptors for sample in samples], color=BLUE, linewidth=1.2, label=puts)
    counts.plot(at, [sample.consumer_descriptors for sample in samples], color=ORANGE, linewidth=1.2, label=takes)
    counts.set_title("file descriptors", fontsize=10, loc="left")
    counts.yaxis.set_major_locator(MaxNLocator(integer=True))
    shm.plot(at, [sample.shm / MIB for sample in samples], color=PURPLE, linewidth=1.2)
    shm.set_title("segments in /dev/shm, MiB", fontsize=10, loc="left")
    for axes in (memory, counts, shm):
        _time_axis(axes, result, ticks=4)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    for axes in (memory, counts):
        axes.legend(loc="lower right", fontsize=9)
    return figure


def _time_axis(axes: Axes, result: Result, ticks: int = 8) -> None:
    axes.set_xlim(0, max(result.seconds, 0.1))
    axes.set_xlabel("seconds")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
