from __future__ import annotations

import itertools
import json
import os
import struct
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from bench import __main__ as command
from bench import ours, peers, report
from bench.deaths import read_books, storm
from bench.loads import Arrays, Blobs, Load, Requests, WrongContentError
from bench.measure import Lap, RunFailedError, Spread, Team, new_place, quiet, ratios, take_turns
from bench.suites import KIB, MIB, SUITES, Figure, Plan, Result, measure
from shmq.segment import DIRECTORY

TINY = Plan(rounds=2, seconds=0.01, sizes=(64 * KIB,), loan=256 * KIB, idle_seconds=0.2, messages=1000, deadline=20.0)


# -- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [([3.0], 3.0, 3.0, 3.0), ([9.0, 1.0, 2.0], 2.0, 1.0, 9.0), ([4.0, 1.0, 2.0, 100.0], 3.0, 1.0, 100.0)],
)
def test_a_spread_is_the_median_with_the_lowest_and_the_highest(
    values: list[float], median: float, low: float, high: float
) -> None:
    assert Spread.of(values) == Spread(median, low, high)


def test_a_ratio_is_formed_within_each_turn_and_not_of_the_medians() -> None:
    # The second turn was disturbed, for both alike.
    assert ratios([8.0, 2.0, 8.0], [4.0, 1.0, 4.0]) == Spread(2.0, 2.0, 2.0)


def test_a_ratio_needs_a_partner_for_every_lap() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("median", "at_least", "at_most", "verdict"),
    [
        (0.9, 0.9, None, "reached"),
        (0.89, 0.9, None, "missed"),
        (2.0, None, 2.0, "reached"),
        (2.1, None, 2.0, "missed"),
        (1.0, None, None, ""),
    ],
)
def test_the_median_decides_whether_a_goal_is_reached(
    median: float, at_least: float | None, at_most: float | None, verdict: str
) -> None:
    figure = Figure("n", Spread(median, 0.0, 100.0), "x", at_least, at_most)
    assert report.verdict(figure) == verdict


def test_a_turn_is_quiet_if_others_left_the_machine_alone_in_all_of_its_laps() -> None:
    calm, noisy = (Lap(1, 1.0, [], [], others) for others in (0.05, 0.9))
    assert quiet([[calm, calm], [calm, noisy], [noisy, calm]]) == [[calm, calm]]


@pytest.mark.parametrize(
    ("others", "counting", "disturbed"),
    [
        ([0.0, 0.0, 0.0], 3, 0),
        ([0.0, 0.9, 0.0, 0.0], 3, 1),
        ([0.9, 0.9, 0.0, 0.9, 0.0, 0.0], 3, 3),
    ],
)
def test_a_disturbed_turn_is_taken_again_unless_it_never_gets_quiet(
    others: list[float], counting: int, disturbed: int
) -> None:
    course = take_turns([cast("Team", Scripted(others))], rounds=3, seconds=1.0, warmup=10, patience=9.0)[0]
    assert (len(course.laps), len(course.disturbed)) == (counting, disturbed)
    assert all(lap.others == 0.0 for lap in course.laps)


def test_a_machine_that_never_gets_quiet_is_given_up_and_all_turns_count() -> None:
    course = take_turns([cast("Team", Scripted(itertools.repeat(0.9)))], rounds=3, seconds=0.0, warmup=10)[0]
    assert len(course.laps) >= 3
    assert course.disturbed == []


class Scripted:
    """A team whose laps are known beforehand; ``others`` of each measured one."""

    name = "scripted"

    def __init__(self, others: Iterable[float]) -> None:
        self._others = iter(others)

    def wait_until_ready(self) -> None:
        """It is."""

    def run(self, count: int) -> Lap:
        """A lap at 100 messages a second."""
        return Lap(count, count / 100, [], [], 0.0 if count == 10 else next(self._others))


# -- content ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [partial(Arrays, 64 * KIB), partial(Blobs, 64, KIB), partial(Requests, 120)])
def test_a_load_knows_its_messages_and_no_others(load: Callable[[], Load]) -> None:
    sender, receiver = load(), load()
    for number in range(130):
        receiver.check(number, sender.make(number))
    with pytest.raises(WrongContentError):
        receiver.check(131, sender.make(130))


def test_an_array_with_one_foreign_page_is_noticed() -> None:
    sender, receiver = Arrays(64 * KIB), Arrays(64 * KIB)
    sender.source[7 * 4096 : 8 * 4096] += 1
    with pytest.raises(WrongContentError, match="differs"):
        receiver.check(0, sender.make(0))


# -- children ---------------------------------------------------------------------------------------------------------


class Stuck:
    """A side that does what its name says, as its text says."""

    def __init__(self, how: str) -> None:
        self._how = how

    def run(self, first: int, count: int) -> list[float]:
        if self._how == "raises":
            raise WrongContentError("message 7 differs")
        if self._how == "dies":
            os._exit(3)
        if self._how == "hangs":
            time.sleep(60)
        return []

    def close(self) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "message 7 differs"), ("dies", "died"), ("hangs", "longer than its 0.5 seconds")],
)
def test_a_child_that_fails_dies_or_hangs_fails_the_run_and_leaves_no_process(how: str, message: str) -> None:
    team = Team("t", [partial(Stuck, "waits"), partial(Stuck, how)], deadline=0.5)
    pids = team.pids
    with pytest.raises(RunFailedError, match=message):
        team.run(1)
    team.kill()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_segment_that_is_left_behind_fails_the_run_and_is_removed() -> None:
    context = new_place()
    place = context.__enter__()
    path = Path(DIRECTORY, place.segments + "7")
    path.write_bytes(b"x")
    with pytest.raises(RunFailedError, match="left behind"):
        context.__exit__(None, None, None)
    assert not path.exists()
    assert not os.path.exists(place.directory)


# -- contestants ------------------------------------------------------------------------------------------------------

ARRAYS = partial(Arrays, 64 * KIB)
REQUESTS = partial(Requests, 120)


@pytest.mark.parametrize(
    ("receiver", "sender"),
    [
        ((ours.FmqReceiver, ARRAYS), (ours.FmqSender, ARRAYS, MIB)),
        ((ours.AsyncFmqReceiver, REQUESTS), (ours.AsyncFmqSender, REQUESTS, MIB)),
        ((ours.LoanReceiver,), (ours.LoanSender, 64 * KIB, MIB)),
        ((ours.IdleReceiver, REQUESTS, 0.02), (ours.IdleSender, REQUESTS, MIB, 0.02)),
        ((ours.AsyncIdleReceiver, REQUESTS, 0.02), (ours.IdleSender, REQUESTS, MIB, 0.02)),
        ((peers.ZmqReceiver, partial(Blobs, 64, KIB)), (peers.ZmqSender, partial(Blobs, 64, KIB))),
        ((peers.AsyncPickleReceiver, REQUESTS), (peers.AsyncPickleSender, REQUESTS)),
        ((peers.SegmentReceiver, ARRAYS), (peers.SegmentSender, ARRAYS)),
        ((peers.BareReceiver, ARRAYS, 64 * KIB), (peers.BareSender, ARRAYS)),
    ],
    ids=lambda side: side[0].__name__,
)
def test_every_contestant_moves_its_messages_and_leaves_nothing_behind(
    receiver: tuple[Any, ...], sender: tuple[Any, ...]
) -> None:
    with new_place() as place, ThreadPoolExecutor(2) as pool:
        sides = [side(place, *arguments) for side, *arguments in (receiver, sender)]
        for first, count in ((0, 20), (20, 5)):
            for running in [pool.submit(side.run, first, count) for side in sides]:
                running.result(timeout=20)
        for side in reversed(sides):
            side.close()


@pytest.mark.parametrize("room", [0, 200 * KIB])
def test_the_limit_is_a_copy_of_the_same_source(room: int) -> None:
    copier = peers.Copier(ARRAYS, room)
    assert copier.run(0, 7) == []
    copier.close()


# -- deaths -----------------------------------------------------------------------------------------------------------

HANDED, DAMAGED, RELEASED = 1, 2, 3
Entry = tuple[int, int, int, int]


@pytest.mark.parametrize(
    ("lives", "wrong"),
    [
        ([[(HANDED, 1, 0, 0), (RELEASED, 1, 0, 0), (HANDED, 1, 1, 0)], [(HANDED, 1, 1, 1), (HANDED, 1, 2, 0)]], ""),
        ([[(HANDED, 1, 0, 0), (HANDED, 1, 2, 0)]], "lost"),
        ([[(HANDED, 1, 0, 0), (HANDED, 1, 2, 0), (HANDED, 1, 1, 0)]], "out_of_order"),
        ([[(HANDED, 1, 0, 0), (HANDED, 1, 1, 0), (HANDED, 1, 1, 1), (HANDED, 1, 2, 0)]], "out_of_order"),
        (
            [[(HANDED, 1, 0, 0), (HANDED, 1, 1, 0), (HANDED, 1, 2, 0), (RELEASED, 1, 2, 0)], [(HANDED, 1, 2, 1)]],
            "again_after_release",
        ),
        ([[(HANDED, 1, 0, 0), (HANDED, 1, 1, 0), (DAMAGED, 1, 2, 0)]], "damaged"),
        ([[(HANDED, 1, 0, 1), (HANDED, 1, 1, 1), (HANDED, 1, 2, 1)], [(HANDED, 1, 2, 0)]], "unmarked"),
    ],
)
def test_the_books_find_what_is_wrong(lives: list[list[Entry]], wrong: str) -> None:
    with new_place() as place:
        Path(place.directory, "journal.producer.1").write_bytes((3).to_bytes(8, "little"))
        for number, entries in enumerate(lives, 1):
            data = b"".join(struct.pack("@4Q", *entry) for entry in entries)
            # The last entry of a killed process may be half written.
            Path(place.directory, f"journal.consumer.{number}").write_bytes(data + b"half")
        books = asdict(read_books(place))
    assert books.pop("put") == 3
    assert books.pop("delivered") >= 2
    del books["redelivered"]
    assert books[wrong] == 1 if wrong else not any(books.values())


def test_a_short_storm_loses_nothing() -> None:
    with new_place() as place:
        books, killed = storm(place, 25)
    assert killed["produce"] + killed["consume"] == 25
    assert books.put > 100
    assert books.delivered >= books.put
    assert [books.lost, books.out_of_order, books.again_after_release, books.unmarked, books.damaged] == [0] * 5
    assert books.left_over == 0


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Two suites, as small as they get."""
    return {name: measure(name, TINY) for name in ("throughput", "memory")}


def test_a_suite_runs_from_end_to_end(results: dict[str, Result]) -> None:
    for name, result in results.items():
        assert result.figures, name
        assert any(figure.reached is not None for figure in result.figures), name
        for figure in result.figures:
            assert figure.value.low <= figure.value.median <= figure.value.high, figure


def test_the_json_says_what_was_measured_and_where(results: dict[str, Result]) -> None:
    document = json.loads(report.to_json(results, TINY))
    assert set(document["suites"]) == {"throughput", "memory"}
    assert document["date"]
    assert document["plan"]["rounds"] == 2
    assert set(document["machine"]) >= {"python", "numpy", "pyzmq", "cpu", "cores"}
    ratio = next(f for f in document["suites"]["throughput"]["figures"] if f["name"].endswith("fmq / limit"))
    assert (ratio["value"]["median"] >= 0.9) is ratio["reached"]
    assert len(document["suites"]["memory"]["data"]["kib_consumer_producer"]) == 100
    assert len(document["suites"]["throughput"]["data"]["0.0625 MiB"]["fmq"]["laps"]) >= 2


def test_lines_are_printed_where_there_is_no_terminal_and_tables_where_there_is(results: dict[str, Result]) -> None:
    for terminal in (False, True):
        console = Console(force_terminal=terminal, width=120, record=True)
        for name, result in results.items():
            report.show(console, name, result)
        text = console.export_text()
        assert text.count("reached") + text.count("missed") == sum(
            figure.reached is not None for result in results.values() for figure in result.figures
        )
        assert ("throughput: 0.0625 MiB, fmq / limit:" in text) is not terminal


def test_the_command_writes_the_json_and_ends_with_zero_whatever_was_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: dict[str, Result]
) -> None:
    missed = Figure("it all", Spread(99.0, 99.0, 99.0), "%", at_most=1.0)
    monkeypatch.setitem(SUITES, "idle", lambda plan: Result([missed]))
    assert command.main(["--quick", "--json", str(tmp_path / "b.json"), "idle"]) == 0
    assert json.loads((tmp_path / "b.json").read_bytes())["suites"]["idle"]["figures"][0]["reached"] is False


def test_the_command_ends_with_one_if_a_run_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(plan: Plan) -> Result:
        raise RunFailedError("idle: a child died")

    monkeypatch.setitem(SUITES, "idle", fail)
    assert command.main(["idle"]) == 1
    assert "a child died" in capsys.readouterr().err


def test_a_suite_that_does_not_exist_is_refused_with_the_names_of_those_that_do() -> None:
    with pytest.raises(SystemExit) as refusal:
        command.main(["throughputs"])
    assert refusal.value.code == 2


def test_the_quick_plan_measures_the_same_with_less() -> None:
    quick, full = Plan.quick(), Plan()
    assert (quick.sizes, quick.loan, quick.idle_seconds) == (full.sizes, full.loan, full.idle_seconds)
    assert quick.rounds < full.rounds
    assert quick.messages < full.messages
