"""``python -m bench [--quick] [--json FILE] [SUITE ...]``: measure the figures and print them beside their goals."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the suites named, or all. Returns 1 if a run failed; a goal that is missed is no failure."""
    # Not above: every child imports this module again, and needs none of it.
    from rich.console import Console

    from bench import report
    from bench.measure import RunFailedError
    from bench.suites import SUITES, Plan, measure

    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure what the queue promises, beside other ways to do the same, and print it beside its goals.",
        epilog="Figures are the medians of interleaved laps, with the lowest and the highest; no test depends on them.",
    )
    parser.add_argument("suite", nargs="*", metavar="SUITE", help=f"any of {', '.join(SUITES)}; all, if none is named")
    parser.add_argument("--quick", action="store_true", help="shorter and fewer laps: a minute, with wide spreads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.suite if name not in SUITES]:
        parser.error(f"there is no suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    plan = Plan.quick() if options.quick else Plan()
    console = Console()
    results = {}
    failed = False
    for name in options.suite or SUITES:
        try:
            results[name] = measure(name, plan)
        except RunFailedError as error:
            failed = True
            print(f"{name}: the run failed: {error}", file=sys.stderr)
        else:
            report.show(console, name, results[name])
    if options.json is not None:
        options.json.write_bytes(report.to_json(results, plan) + b"\n")
    return int(failed)


if __name__ == "__main__":
    # So that children are ended and their segments removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
