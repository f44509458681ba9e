"""``shmq stress``: the options, and what happens around a run."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fmq.stress.launcher import LauncherGoneError
from fmq.stress.plan import (
    ACTIONS,
    POLICIES,
    PRESETS,
    SIZES_HELP,
    TRANSFERS,
    Plan,
    PlanError,
    Sizes,
    parse_bytes,
    parse_chaos,
    parse_hold,
)

EXTRA = ("xxhash", "matplotlib")
GOOD, FAILED, REFUSED = 0, 1, 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def stress(
    preset: Annotated[str, typer.Argument(help=f"One of {', '.join(PRESETS)}.")] = "standard",
    duration: Annotated[str | None, typer.Option(help="Seconds; none: until Ctrl-C.")] = None,
    messages: Annotated[int | None, typer.Option(help="End after so many messages.")] = None,
    seed: Annotated[int | None, typer.Option(help="What sizes, contents, holds and chaos follow from.")] = None,
    producers: Annotated[int | None, typer.Option(help="How many producers.")] = None,
    consumers: Annotated[int | None, typer.Option(help="How many consumers, each with a queue of its own.")] = None,
    readers: Annotated[
        int | None, typer.Option(help="A topic instead of queues: one publisher, and so many readers.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"What the topic does about slow readers: {', '.join(POLICIES)}.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help=f"Payload sizes: {SIZES_HELP}.")] = None,
    rate: Annotated[float | None, typer.Option(help="Messages a second of each producer; without, all it can.")] = None,
    ring: Annotated[str | None, typer.Option(help="Size of each producer's ring, as 64MiB.")] = None,
    transfer: Annotated[str | None, typer.Option(help=f"How arrays get into the ring: {', '.join(TRANSFERS)}.")] = None,
    use_asyncio: Annotated[
        bool | None, typer.Option("--asyncio/--blocking", help="Which producers and consumers.")
    ] = None,
    hold: Annotated[str | None, typer.Option(help="Seconds to hold a message, as 0.01 or 0-0.005.")] = None,
    held: Annotated[int | None, typer.Option(help="How many messages to hold at once, at most.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds after which a message expires.")] = None,
    max_deliveries: Annotated[
        int | None, typer.Option(help="Set a message aside after so many deaths; without, never.")
    ] = None,
    checksums: Annotated[bool | None, typer.Option(help="Check every byte, or only headers and sizes.")] = None,
    chaos: Annotated[str | None, typer.Option(help=f"all, none, or any of {','.join(ACTIONS)}.")] = None,
    chaos_interval: Annotated[float | None, typer.Option(help="Mean seconds between two acts of chaos.")] = None,
    kills: Annotated[int | None, typer.Option(help="End after so many kill -9.")] = None,
    patience: Annotated[float | None, typer.Option(help="Seconds without any progress that count as a hang.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report with its pictures to this file.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines only, as if there were no terminal.")] = False,
    fault: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Move messages between processes, let misfortunes happen, and check every one of them from end to end.

    Ends with 0 if every check held, with 1 if one did not, with 2 if the options can't be meant. Ctrl-C ends it in
    order, with the report so far.
    """
    values: dict[str, Any] = {
        "messages": messages,
        "producers": producers,
        "consumers": consumers,
        "policy": policy,
        "rate": rate,
        "transfer": transfer,
        "asyncio": use_asyncio,
        "held": held,
        "ttl": ttl,
        "max_deliveries": max_deliveries,
        "checksums": checksums,
        "chaos_interval": chaos_interval,
        "kills": kills,
        "patience": patience,
        "fault": fault,
        "seed": secrets.randbelow(1 << 31) if seed is None else seed,
    }
    try:
        plan = _plan(
            preset,
            {name: value for name, value in values.items() if value is not None},
            readers,
            duration,
            {
                "sizes": (sizes, Sizes.parse),
                "ring_size": (ring, parse_bytes),
                "hold": (hold, parse_hold),
                "chaos": (chaos, parse_chaos),
            },
        )
        _check_files(json, html)
        good = _run(plan, json, html, plain)
    except PlanError as error:
        print(f"shmq stress: {error}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    except LauncherGoneError as error:
        print(f"shmq stress: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    raise typer.Exit(GOOD if good else FAILED)


def _plan(
    preset: str, values: dict[str, Any], readers: int | None, duration: str | None, texts: dict[str, Any]
) -> Plan:
    if preset not in PRESETS:
        raise PlanError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    for name, (text, parse) in texts.items():
        if text is not None:
            values[name] = parse(text)
    if duration is not None:
        values["duration"] = _seconds(duration)
    elif "messages" in values or "kills" in values:
        values["duration"] = None
    usual = PRESETS[preset] if readers is None else PRESETS[preset].of_topic(readers)
    return msgspec.structs.replace(usual, **values)


def _seconds(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise PlanError(f"--duration takes seconds, or none; this one is {text!r}") from None


def _check_files(*files: Path | None) -> None:
    """Raise PlanError now, and not after the run, if a report can't be written."""
    for file in files:
        if file is not None:
            _check_file(file)
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise PlanError(f"{' and '.join(missing)} are needed; install them with pip install 'shmq[stress]'")


def _check_file(file: Path) -> None:
    if not file.absolute().parent.is_dir():
        raise PlanError(f"{file} can't be written: there is no directory {file.absolute().parent}")
    was_there = file.exists()
    try:
        file.open("ab").close()
    except OSError as error:
        raise PlanError(f"{file} can't be written: {error.strerror}") from None
    if not was_there:
        file.unlink()


def _run(plan: Plan, json: Path | None, html: Path | None, plain: bool) -> bool:
    # Not above, for `shmq --help` needs none of it.
    from rich.console import Console

    from fmq.stress import live, report, run

    if html is not None:
        # Before the run, which is not to be in vain.
        from fmq.stress.page import to_html

    console = Console(force_terminal=False if plain else None)
    with (live.Panel if console.is_terminal else live.Lines)(console) as view:
        result = run(plan, view)
    report.show(console, result)
    written = True
    if json is not None:
        written &= _write(json, report.to_json(result) + b"\n")
    if html is not None:
        written &= _write(html, to_html(result).encode())
    return result.good and written


def _write(file: Path, content: bytes) -> bool:
    try:
        file.write_bytes(content)
    except OSError as error:
        print(f"shmq stress: {file} can't be written: {error.strerror}", file=sys.stderr)
        return False
    return True
