"""Damaged rings: the kept cases, a few thousand new ones, and proof that the fuzzer finds what it looks for."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from fmq.protocol import ConsumerProtocol
from shmq.reader import RingReader
from shmq.segment import DIRECTORY
from tests.fuzz.cases import Case, Damage, Stage, random_case
from tests.fuzz.fuzzer import fuzz, fuzz_frames, load_corpus, random_cases
from tests.fuzz.rings import SHAPES

FIRST_SEED = 7_000_000


@pytest.fixture(scope="module")
def stage() -> Any:
    stage = Stage()
    yield stage
    stage.close()


@pytest.mark.parametrize("case", load_corpus(), ids=lambda case: case.note[:60])
def test_a_kept_case_comes_to_what_it_came_to(stage: Stage, case: Case) -> None:
    assert stage.run(case).kinds >= set(case.outcome)


def test_the_corpus_knows_every_kind_of_damage() -> None:
    kinds = {kind.partition(":")[0] for case in load_corpus() for kind in case.outcome}
    assert kinds >= {"CorruptRecordError", "DecodeError", "a message"}
    assert len(load_corpus()) > 25


@pytest.mark.parametrize("part", range(4))
def test_thousands_of_damaged_rings_are_read_or_refused(part: int) -> None:
    tally = fuzz(itertools.islice(random_cases(FIRST_SEED + 10_000 * part), 1200))
    assert [str(finding) for finding in tally.findings] == []
    assert tally.cases == 1200
    assert tally.messages > 10_000
    assert tally.errors["CorruptRecordError"] > 100
    assert tally.errors["DecodeError"] > 20


def test_random_frames_are_frames_or_protocol_errors() -> None:
    told = fuzz_frames(1, 100_000)
    assert set(told) == {"Hello", "Welcome", "Doorbell", "Space", "Goodbye", "ProtocolError"}
    assert min(told.values()) > 500


def test_the_same_seed_is_the_same_case() -> None:
    assert random_case(5) == random_case(5)
    assert len({case.shape for case in map(random_case, range(50))}) == len(SHAPES)


# -- it finds what it looks for ---------------------------------------------------------------------------------------


def findings(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., Any]) -> str:
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr("tests.fuzz.fuzzer.BATCH", 30)
    tally = fuzz(itertools.islice(random_cases(FIRST_SEED), 600), first=True)
    return "\n".join(finding.what for finding in tally.findings)


def test_a_reference_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(
        monkeypatch, RingReader, "_check_payload", lambda self, position, record, at, first, nbytes: 4096 + record + 128
    )
    assert "ValueError" in found or "of the whole ring" in found


def test_an_error_that_has_no_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_it(self: RingReader, position: int, what: str) -> Exception:
        return KeyError(what)

    assert "KeyError" in findings(monkeypatch, RingReader, "_corrupt", raise_it)


def test_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(self: ConsumerProtocol, *_: object) -> None:
        time.sleep(60)

    monkeypatch.setattr(ConsumerProtocol, "_leave_out", hang)
    monkeypatch.setattr("tests.fuzz.fuzzer.PATIENCE", 1.0)
    case = Case("trees", [Damage(0, 4096 + 8, "ff")], note="a kind that is none")
    assert "it hung" in str(fuzz([case]).findings[0])


def test_a_crash_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: RingReader, *_: object) -> None:
        os.abort()

    monkeypatch.setattr(RingReader, "_check_payload", crash)
    tally = fuzz([Case("arrays", [], note="whole"), Case("trees", [], note="whole")])
    assert ["died with -6" in str(finding) for finding in tally.findings] == [True]
    assert tally.cases == 2


def test_memory_without_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bytearray] = []
    monkeypatch.setattr(RingReader, "_check_payload", lambda *_: held.append(bytearray(1 << 28)) or 4096)
    assert "MemoryError" in str(fuzz([Case("arrays", [], note="whole")]).findings[0])


def test_a_message_of_another_ring_that_does_not_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out = ConsumerProtocol._leave_out

    def leave_out_all(self: ConsumerProtocol, *arguments: Any) -> None:
        leave_out(self, *arguments)
        for source in list(self._order):
            leave_out(self, source, arguments[1])

    assert "of the whole ring" in findings(monkeypatch, ConsumerProtocol, "_leave_out", leave_out_all)


def test_the_command_shows_one_case_and_leaves_nothing_behind() -> None:
    before = set(os.listdir(DIRECTORY))
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--case", "11"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "findings" in done.stdout
    assert not {name for name in set(os.listdir(DIRECTORY)) - before if name.startswith(("shmq", "fmq"))}
