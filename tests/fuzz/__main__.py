"""``python -m tests.fuzz``: damage rings at random, for as long as one likes, and see what a consumer makes of them."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.fuzz.cases import random_case
from tests.fuzz.fuzzer import Tally, fuzz, fuzz_frames, load_corpus, random_cases

FRAMES = 200_000


def main() -> int:
    """Returns 1 if anything was found that must not happen."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to go on (default 120)")
    parser.add_argument("--seed", type=int, help="the first seed (default: from the clock)")
    parser.add_argument("--case", type=int, metavar="SEED", help="run the case of this seed only, and show it")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="write the first case of each kind there")
    options = parser.parse_args()
    console = Console()
    if options.case is not None:
        case = random_case(options.case)
        console.print(case)
        tally = fuzz([case])
    else:
        seed = time.time_ns() // 1000 if options.seed is None else options.seed
        console.print(f"cases from seed {seed} on, for {options.seconds:g} s, after {len(load_corpus())} of the corpus")
        fuzz_frames(seed, FRAMES)
        tally = fuzz(load_corpus())
        more = fuzz(random_cases(seed), seconds=options.seconds)
        tally = _sum(tally, more)
    show(console, tally)
    if options.keep is not None:
        keep(tally, options.keep)
    return int(bool(tally.findings))


def _sum(first: Tally, second: Tally) -> Tally:
    first.cases += second.cases
    first.messages += second.messages
    first.errors += second.errors
    first.kinds = second.kinds | first.kinds
    first.findings += second.findings
    return first


def show(console: Console, tally: Tally) -> None:
    """Print what was run, and each finding with the command that repeats it."""
    table = Table(title=f"{tally.cases:,} damaged rings", title_justify="left")
    table.add_column("what came of it")
    table.add_column("times", justify="right")
    table.add_row("messages read", f"{tally.messages:,}")
    for name, count in tally.errors.most_common():
        table.add_row(name, f"{count:,}")
    table.add_row("findings", f"{len(tally.findings):,}", style="red" if tally.findings else "green")
    console.print(table)
    for finding in tally.findings:
        console.print(finding.what, markup=False, highlight=False)
        if finding.case.note.startswith("seed "):
            console.print(f"repeat it: python -m tests.fuzz --case {finding.case.note.removeprefix('seed ')}")


def keep(tally: Tally, directory: Path) -> None:
    """Write the first case of each kind of outcome, for the corpus."""
    for kind, case in tally.kinds.items():
        name = re.sub(r"[^a-z]+", "-", kind.lower()).strip("-")[:70]
        kept = msgspec.structs.replace(case, note=kind, outcome=[kind])
        (directory / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
