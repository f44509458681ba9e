"""Runs cases in a child that is watched: a crash, a hang, memory without bound are findings of the case that did it."""

from __future__ import annotations

import faulthandler
import itertools
import logging
import multiprocessing
import random
import resource
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from fmq import ShmqError, wire
from tests.fuzz.cases import Case, Outcome, Stage, random_case
from tests.fuzz.rings import SHAPES, picture

CORPUS = Path(__file__).parent / "corpus"

ROOM = 512 * 1024 * 1024
"""Bytes of address space that a child may take beyond what it has when it begins."""
PATIENCE = 20.0
"""Seconds without a sign of life after which a child is taken to hang."""
BATCH = 200
"""Cases a child runs before the next one takes over: what they leak adds up, and is limited."""


@dataclass(slots=True)
class Finding:
    """A case that did what must not happen, and what that was."""

    case: Case
    what: str

    def __str__(self) -> str:
        return f"{self.case.note}: {self.what.strip().splitlines()[-1]}"


@dataclass(slots=True)
class Tally:
    """What all cases together came to."""

    cases: int = 0
    messages: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Case] = field(default_factory=dict)
    """The first case that came to each kind of outcome."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, case: Case, outcome: Outcome) -> None:
        self.cases += 1
        self.messages += outcome.messages
        self.errors += outcome.errors
        for kind in outcome.kinds:
            self.kinds.setdefault(kind, case)


def load_corpus() -> list[Case]:
    """The cases that are kept, in the order of their names."""
    return [msgspec.json.decode(path.read_bytes(), type=Case) for path in sorted(CORPUS.glob("*.json"))]


def random_cases(seed: int) -> Iterator[Case]:
    """Cases without end."""
    while True:
        yield random_case(seed)
        seed += 1


def fuzz(cases: Iterable[Case], *, seconds: float | None = None, first: bool = False) -> Tally:
    """Run cases, in children, until there are no more, the time is over, or, with ``first``, something was found."""
    for shape in SHAPES:
        # Made before the first fork, so that no child has to.
        picture(shape)
    tally = Tally()
    deadline = None if seconds is None else time.monotonic() + seconds
    remaining = iter(cases)
    while deadline is None or time.monotonic() < deadline:
        batch = list(itertools.islice(remaining, BATCH))
        if not batch or (first and tally.findings):
            break
        _run_batch(batch, tally)
    return tally


def _run_batch(batch: list[Case], tally: Tally) -> None:
    # Made and cleaned here: a child that dies could not.
    stage = Stage()
    while batch:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(theirs, batch, stage), daemon=True)
        child.start()
        theirs.close()
        done = 0
        what = ""
        while done < len(batch):
            try:
                if not ours.poll(PATIENCE):
                    what = f"it hung for {PATIENCE:.0f} s"
                    break
                outcome, what = ours.recv()
            except EOFError:
                child.join()
                what = f"the process died with {child.exitcode}"
                break
            if what:
                break
            tally.add(batch[done], outcome)
            done += 1
        if done < len(batch):
            child.kill()
        child.join()
        ours.close()
        if done < len(batch):
            tally.cases += 1
            tally.findings.append(Finding(batch[done], what))
            done += 1
        stage.clean()
        batch = batch[done:]
    stage.close()


def _work(connection: Connection, batch: list[Case], stage: Stage) -> None:
    faulthandler.enable()
    logging.disable()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for case in batch:
        outcome = Outcome()
        what = ""
        try:
            outcome = stage.run(case)
        except BaseException:
            what = traceback.format_exc()
        connection.send((outcome, what))


# -- frames -----------------------------------------------------------------------------------------------------------


def fuzz_frames(seed: int, count: int) -> Counter[str]:
    """Decode random and damaged frames; anything but a frame or a ProtocolError is raised."""
    chance = random.Random(seed)
    whole = [
        wire.encode(frame)
        for frame in (
            wire.Hello(1, "shmq:a:b:c"),
            wire.Welcome(1, ""),
            wire.Doorbell("shmq:a:b:c", 64, 1),
            wire.Space(7),
            wire.Goodbye("x" * 300),
        )
    ]
    told: Counter[str] = Counter()
    for _ in range(count):
        data = bytearray(chance.choice(whole) if chance.random() < 0.8 else chance.randbytes(chance.randrange(40)))
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data) + 1) :]
        try:
            told[type(wire.decode(bytes(data))).__name__] += 1
        except ShmqError as error:
            told[type(error).__name__] += 1
    return told
