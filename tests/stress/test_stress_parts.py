"""The parts, without processes: plans, contents, journals, histograms, and above all the verifier."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from fmq.stress.chaos import Chaos, Misfortune
from fmq.stress.gauges import Histogram, Sample, Series, thinned
from fmq.stress.journal import (
    ASIDE,
    DELIVERED,
    DROPPED,
    ENTRIES,
    ENTRY_TYPE,
    REDELIVERED,
    RELEASED,
    Board,
    Cell,
    Entries,
)
from fmq.stress.load import BLOB_BYTES, HEADER, KINDS, MAGIC, Content, WrongContentError, open_payload
from fmq.stress.notes import NoteReader, NoteWriter, Remark, Violation
from fmq.stress.plan import KIB, MIB, PRESETS, Plan, Sizes, exact_bytes, parse_bytes, parse_chaos
from fmq.stress.verify import WINDOW, Life, Verifier
from shmq import layout

# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1", 1), ("64KiB", 64 * KIB), ("1.5 MiB", 3 * MIB // 2), ("2g", 2 << 30), ("10b", 10)]
)
def test_bytes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert parse_bytes(exact_bytes(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["4KiB", "1KiB-1MiB", "log:256-16MiB", "64-1234567", "vision"])
def test_sizes_are_written_as_they_are_read(text: str) -> None:
    assert str(Sizes.parse(text)) == text


@pytest.mark.parametrize("text", ["4KiB", "1KiB-1MiB", "log:1KiB-16MiB", "vision"])
def test_sizes_stay_within_their_bounds_and_follow_their_distribution(text: str) -> None:
    sizes = Sizes.parse(text)
    drawn = sizes.draw(np.random.default_rng(1), 2000)
    assert sizes.low <= drawn.min() <= drawn.max() <= sizes.high
    middle = {"fixed": 4 * KIB, "uniform": (KIB + MIB) / 2, "log": (KIB * 16 * MIB) ** 0.5, "vision": 12 * KIB}[
        sizes.kind
    ]
    assert 0.8 * middle < np.median(drawn) < 1.25 * middle
    if sizes.kind == "vision":
        assert np.mean(drawn < 16 * KIB) == pytest.approx(0.62, abs=0.01)
        assert drawn.max() > 250 * MIB


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "sizes": Sizes("fixed", 1234567, 1234567),
            "ring_size": 7_654_321,
            "duration": None,
            "messages": 5,
            "asyncio": True,
            "checksums": False,
        },
        {"chaos": parse_chaos("kill"), "kills": 7, "hold": (0.0, 0.25), "ttl": 0.5, "max_deliveries": 3, "rate": 1 / 3},
    ],
)
@pytest.mark.parametrize("readers", [0, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_command_of_a_plan_makes_the_same_plan(
    preset: str, readers: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = PRESETS[preset]
    if readers:
        usual = usual.of_topic(readers)
        changes = {name: value for name, value in changes.items() if name != "max_deliveries"}
    plan = msgspec.structs.replace(usual, seed=9, **changes)
    made: list[Plan] = []
    monkeypatch.setattr("fmq.stress.command._run", lambda plan, *_: made.append(plan) or True)
    from fmq.stress.command import app

    program, command, *arguments = plan.command().split()
    assert (program, command) == ("shmq", "stress")
    app(arguments, standalone_mode=False)
    assert made == [plan]


def test_what_is_needed_only_by_a_run_is_not_imported_for_help() -> None:
    for module, heavy in (("shmq.__main__", "fmq"), ("fmq.stress.command", "matplotlib"), ("fmq.stress", "xxhash")):
        script = f"import sys, {module}; sys.exit({heavy!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0, module


# -- content ----------------------------------------------------------------------------------------------------------

PLAN = Plan(seed=4, sizes=Sizes("log", 100, 64 * KIB))


@pytest.fixture(scope="module", name="content")
def content_fixture() -> Content:
    return Content(PLAN)


def message(content: Content, producer: int, number: int) -> Any:
    kind = content.kind(producer, number)
    return content.payload(kind, HEADER.pack(MAGIC, producer, 0, number, 1), content.array(kind))


def test_content_follows_from_seed_producer_and_number_alone(content: Content) -> None:
    again = Content(PLAN)
    other = Content(msgspec.structs.replace(PLAN, seed=5))
    for number in range(50):
        producer, _, found, _, body = open_payload(message(again, 1, number))
        assert (producer, found) == (1, number)
        content.check(1, number, body)
        with pytest.raises(WrongContentError):
            other.check(1, number, body)
        if content.kind(1, number) != content.kind(0, number):
            with pytest.raises(WrongContentError):
                content.check(0, number, body)


def test_messages_come_in_many_kinds_as_blobs_and_as_arrays(content: Content) -> None:
    kinds = {content.kind(0, number) for number in range(20 * KINDS)}
    assert len(kinds) == KINDS
    payloads = [message(content, 0, number) for number in range(200)]
    assert {type(payload) for payload in payloads} == {bytes, dict}
    assert all(len(payload) < BLOB_BYTES + HEADER.size for payload in payloads if isinstance(payload, bytes))


def test_huge_messages_come_in_fewer_kinds_so_that_a_run_begins_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmq.stress.load._KINDS_BYTES", 100 * MIB)
    plan = Plan(seed=4, sizes=Sizes.parse("1MiB"))
    content = Content(plan)
    assert len({content.kind(0, number) for number in range(10_000)}) == 100
    content.check(0, 7, open_payload(message(content, 0, 7))[4])


@pytest.mark.parametrize("at", [0, -1])
def test_one_bit_that_differs_is_noticed_and_its_place_is_told(content: Content, at: int) -> None:
    body = np.frombuffer(open_payload(message(content, 0, 3))[4], np.uint8).copy()
    body[at] ^= 1
    with pytest.raises(WrongContentError, match=rf"1 bytes differ, from byte {range(len(body))[at]:,} to"):
        content.check(0, 3, body.data)


@pytest.mark.parametrize("payload", [b"short", {"h": bytes(HEADER.size), "x": np.zeros(3)}, {"x": 1}, None])
def test_a_stranger_is_no_message_of_the_run(payload: Any) -> None:
    with pytest.raises(WrongContentError):
        open_payload(payload)


# -- journals and notes -----------------------------------------------------------------------------------------------


@pytest.fixture(name="board")
def board_fixture() -> Iterator[Board]:
    fd = os.memfd_create("test")
    os.truncate(fd, Board.nbytes(2, 2))
    yield Board(fd, 2, 2)
    os.close(fd)


def test_a_journal_gives_what_was_written_in_order_past_its_end(board: Board) -> None:
    writer, reader = board.writer(1), board.reader(1)
    written = 0
    for count in (3, ENTRIES - 5, 10, ENTRIES):
        for number in range(written, written + count):
            writer.add(DELIVERED, REDELIVERED, 1, 2, number, 3, 4, 5)
        taken = reader.take()
        assert taken["number"].tolist() == list(range(written, written + count))
        assert taken[0].tolist()[:4] == (DELIVERED, REDELIVERED, 1, 2)
        written += count
    assert len(reader.take()) == 0


def test_cells_do_not_overlap(board: Board) -> None:
    cells = [board.cell(role, slot) for role in ("producer", "consumer") for slot in range(2)]
    for value, cell in enumerate(cells):
        for word in range(64):
            cell[word] = value
    assert [cell[Cell.TAIL] for cell in cells] == [0, 1, 2, 3]
    cells[1].clear()
    assert [cell[Cell.BEGUN] for cell in cells] == [0, 0, 2, 3]


def test_notes_arrive_as_they_were_written_and_long_ones_shortened() -> None:
    readable, writable = os.pipe()
    reader, writer = NoteReader(readable), NoteWriter(writable)
    assert reader.take() == []
    writer.violation("order", "a\nb")
    writer.remark("x" * 10_000)
    first, second = reader.take()
    assert first == Violation("order", "a\nb")
    assert isinstance(second, Remark)
    assert second.text.startswith("... x")
    assert len(second.text) < 2000
    os.close(readable)
    os.close(writable)


# -- what is measured -------------------------------------------------------------------------------------------------


def test_a_histogram_knows_its_percentiles_to_a_64th() -> None:
    values = np.random.default_rng(2).lognormal(12, 3, 50_000).astype(np.uint64)
    histogram = Histogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    assert histogram.total() == len(values)
    for percent in (1, 50, 90, 99, 99.9, 100):
        exact = np.sort(values)[int(np.ceil(len(values) * percent / 100)) - 1]
        assert exact <= histogram.percentile(percent) <= exact * (1 + 1 / 64) + 1
    assert sum(count for *_, count in histogram.buckets()) == len(values)


def test_a_series_of_any_length_keeps_its_sums_in_bounded_memory() -> None:
    series = Series()
    for index in range(20_001):
        series.add(Sample(index / 4, 0.25, 1, 10, index % 100 / 100, 0.1, 0.2, 5, 1, 2, 3, 4))
    samples = series.all()
    assert len(samples) < 1300
    assert sum(sample.messages for sample in samples) == 20_001
    assert sum(sample.nbytes for sample in samples) == 200_010
    assert max(sample.fill for sample in samples) == 0.99
    assert [sample.at for sample in samples] == sorted(sample.at for sample in samples)


@pytest.mark.parametrize("count", [0, 1, 240, 241, 5000])
def test_samples_for_a_picture_are_few_and_keep_their_sums(count: int) -> None:
    samples = [Sample(number / 4, 0.25, number, 10, 0.5, 0.1, 0.2, 5, 1, 2, 3, 4) for number in range(count)]
    few = thinned(samples, 240)
    assert len(few) <= 240
    assert sum(one.messages for one in few) == sum(one.messages for one in samples)
    assert sum(one.span for one in few) == sum(one.span for one in samples)


def test_chaos_follows_from_the_seed_and_keeps_its_pace() -> None:
    def acts(seed: int) -> list[Misfortune]:
        chaos = Chaos(msgspec.structs.replace(PRESETS["chaos"], seed=seed, chaos_interval=0.5), 0.0)
        return [act for tick in range(10_000) if (act := chaos.due(tick / 50)) is not None]

    assert acts(1) == acts(1) != acts(2)
    assert 300 < len(acts(1)) < 500
    assert {act.action for act in acts(1)} == set(PRESETS["chaos"].chaos)


# -- the verifier -----------------------------------------------------------------------------------------------------


def entry(number: int, *, again: bool = False, kind: int = DELIVERED, life: int = 0) -> tuple[int, ...]:
    return kind, REDELIVERED if again else 0, 0, life, number, 10, 2_000_000, 1_000_000


def entries(*rows: tuple[int, ...]) -> Entries:
    return np.array(list(rows), ENTRY_TYPE)


class Judge:
    """A verifier with one life of one producer, and consumers that come one after another."""

    def __init__(self, *, ttl: float | None = None) -> None:
        self.verifier = Verifier(Plan(producers=1, ttl=ttl))
        self.life: Life = self.verifier.begin(0, 0, 0, [0])
        self.life.ring = 77
        self.verifier.consumer_begins(0, 1_000_000)

    def read(self, *rows: tuple[int, ...]) -> None:
        self.verifier.read(0, entries(*rows))

    def another_consumer(self) -> None:
        self.verifier.deaths += 1
        self.verifier.consumer_begins(0, 1_500_000)

    def settle(self, returned: int, begun: int | None = None) -> list[str]:
        """End the life; the names of the checks that failed, without what only a ring can say."""
        self.life.returned, self.life.begun = returned, returned if begun is None else begun
        self.verifier.settle(self.life)
        return [finding.check for finding in self.verifier.findings if "without a ring" not in finding.text]


def delivered(*numbers: int) -> list[tuple[int, ...]]:
    return [entry(number) for number in numbers]


def released(*numbers: int) -> list[tuple[int, ...]]:
    return [entry(number, kind=RELEASED) for number in numbers]


def test_what_is_in_order_and_complete_is_good_however_it_is_cut() -> None:
    judge = Judge()
    rows = [row for number in range(20) for row in (*delivered(number), *released(number))]
    for start in range(0, len(rows), 7):
        judge.read(*rows[start : start + 7])
    assert judge.settle(20) == []
    total = judge.verifier.total()
    assert (total.put, total.delivered, total.nbytes, total.balances()) == (20, 20, 200, True)
    assert judge.verifier.latencies.total() == 20


def cases() -> dict[str, tuple[Callable[[Judge], None], list[str]]]:
    def one_is_missing(judge: Judge) -> None:
        judge.read(*delivered(0, 1, 3, 4))

    def the_last_is_missing(judge: Judge) -> None:
        judge.read(*delivered(0, 1, 2, 3))

    def two_change_places(judge: Judge) -> None:
        judge.read(*delivered(0, 2, 1, 3, 4))

    def two_change_places_between_readings(judge: Judge) -> None:
        judge.read(*delivered(0, 2))
        judge.read(*delivered(1, 3, 4))

    def one_comes_twice(judge: Judge) -> None:
        judge.read(*delivered(0, 1, 1, 2, 3, 4))

    def one_comes_twice_marked_to_the_same_consumer(judge: Judge) -> None:
        judge.read(*delivered(0, 1, 2), entry(1, again=True), *delivered(3, 4))

    def one_comes_again_unmarked(judge: Judge) -> None:
        judge.read(*delivered(0, 1))
        judge.another_consumer()
        judge.read(*delivered(1, 2, 3, 4))

    def one_comes_again_though_released(judge: Judge) -> None:
        judge.read(*delivered(0, 1), *released(0, 1))
        judge.another_consumer()
        judge.read(entry(1, again=True), *delivered(2, 3, 4))

    def more_than_was_begun(judge: Judge) -> None:
        judge.read(*delivered(0, 1, 2, 3, 4, 5))

    return {
        "one is missing": (one_is_missing, ["lost"]),
        "the last is missing": (the_last_is_missing, ["lost"]),
        "two change places": (two_change_places, ["order"]),
        "two change places, between readings": (two_change_places_between_readings, ["order"]),
        "one comes twice": (one_comes_twice, ["twice"]),
        "one comes twice, marked, to the same consumer": (one_comes_twice_marked_to_the_same_consumer, ["twice"]),
        "one comes again, unmarked": (one_comes_again_unmarked, ["twice"]),
        "one comes again, though released": (one_comes_again_though_released, ["twice"]),
        "more than was begun": (more_than_was_begun, ["books", "books"]),
    }


@pytest.mark.parametrize("case", cases())
def test_what_must_not_happen_is_named(case: str) -> None:
    act, expected = cases()[case]
    judge = Judge()
    act(judge)
    assert judge.settle(5) == expected


def test_what_was_not_released_may_come_again_marked_and_counts_once() -> None:
    judge = Judge()
    judge.read(*delivered(0, 1, 2, 3), *released(2, 0))
    judge.another_consumer()
    judge.read(entry(1, again=True), entry(3, again=True), entry(4, again=True), *delivered(5))
    assert judge.settle(6) == []
    total = judge.verifier.total()
    assert (total.delivered, total.redelivered) == (6, 3)
    assert judge.verifier.recovery.total() == 1
    assert judge.verifier.recovery.largest == 500_000


def test_a_put_during_which_the_producer_was_killed_may_arrive_or_not() -> None:
    for arrives in (False, True):
        judge = Judge()
        judge.read(*delivered(*range(5 + arrives)))
        assert judge.settle(5, begun=6) == []
        assert judge.verifier.total().doubtful == arrives


def test_what_expires_is_counted_and_not_lost() -> None:
    judge = Judge(ttl=1.0)
    judge.read(*delivered(0, 3, 4))
    assert judge.settle(7) == []
    total = judge.verifier.total()
    assert (total.delivered, total.expired, total.balances()) == (3, 4, True)


def test_what_is_set_aside_is_counted_whether_it_was_seen_before_or_not() -> None:
    judge = Judge()
    judge.read(*delivered(0, 1))
    judge.another_consumer()
    aside = [(ASIDE, 0, 0, 0, sequence, 77, 0, 0) for sequence in (1, 2, 1)]
    judge.read(*aside, *delivered(3))
    assert judge.settle(4) == []
    total = judge.verifier.total()
    assert (total.delivered, total.set_aside, total.balances()) == (2, 2, True)


def test_a_long_stream_needs_no_more_memory_than_a_short_one() -> None:
    judge = Judge()
    numbers = np.arange(2 * WINDOW, dtype=np.uint64)
    rows = np.zeros(len(numbers), ENTRY_TYPE)
    rows["kind"], rows["number"] = DELIVERED, numbers
    backs = rows.copy()
    backs["kind"] = RELEASED
    judge.verifier.read(0, rows)
    judge.verifier.read(0, backs)
    judge.another_consumer()
    # So long ago that nothing is remembered of it: it must have been released.
    judge.read(entry(5, again=True))
    assert judge.settle(2 * WINDOW) == ["twice"]
    assert judge.life.streams[0].states.nbytes == WINDOW


# -- the verifier of a topic ------------------------------------------------------------------------------------------


class Counters:
    """The header of a ring, as far as the verifier looks at it."""

    def __init__(self, **words: int) -> None:
        self._words = {getattr(layout, name): value for name, value in words.items()}

    def __getitem__(self, word: int) -> int:
        return self._words.get(word, 0)

    def close(self) -> None:
        """Nothing to close."""


class TopicJudge:
    """A verifier with one life of a publisher, which has put messages 0 to 9, and two readers."""

    def __init__(self, policy: str = "block") -> None:
        self.verifier = Verifier(msgspec.structs.replace(PRESETS["quick"].of_topic(2), policy=policy))
        for reader in (0, 1):
            self.verifier.consumer_begins(reader, 1)
        self.life = self.verifier.begin(0, 0, 0, [0, 1])

    def read(self, reader: int, *rows: tuple[int, ...]) -> None:
        self.verifier.read(reader, entries(*rows))

    def another_reader(self, reader: int, returned: int) -> None:
        self.life.returned = self.life.begun = returned
        self.verifier.consumer_leaves(reader)
        self.verifier.consumer_begins(reader, 2)

    def joined(self, reader: int, begun: int) -> None:
        self.life.begun = begun
        self.verifier.joined(self.life, reader)

    def settle(self, *, skipped: int = 0, killed: bool = False) -> list[str]:
        """End the life; the names of the checks that failed."""
        self.life.returned = self.life.begun = 10
        self.life.killed = killed
        gauge: Any = Counters(NEXT_SEQUENCE=10, SKIPPED_COUNT=skipped)
        self.life.gauge = gauge
        self.verifier.settle(self.life)
        self.verifier.close_books()
        return [finding.check for finding in self.verifier.findings]


DROP = (DROPPED, 0, 0, 0, 0, 0, 0, 0)


def test_every_reader_has_books_of_its_own_that_begin_with_its_first_message() -> None:
    judge = TopicJudge()
    judge.joined(0, 0)
    judge.read(0, *delivered(*range(10)))
    judge.read(1, *delivered(*range(4, 10)))
    assert judge.settle() == []
    first, second = judge.verifier.readers
    assert (first.put, first.delivered, second.put, second.delivered) == (10, 10, 6, 6)
    assert (judge.verifier.producers[0].put, judge.verifier.total().put) == (10, 16)


def test_a_reader_that_comes_again_begins_anew_and_owes_nothing_between() -> None:
    judge = TopicJudge()
    judge.read(0, *delivered(*range(10)))
    judge.read(1, *delivered(0, 1, 2))
    judge.another_reader(1, 5)
    judge.read(1, *delivered(7, 8, 9))
    assert judge.settle() == []
    assert judge.verifier.readers[1].put == judge.verifier.readers[1].delivered == 6


def test_a_put_that_was_given_up_is_not_owed_to_who_joined_during_it() -> None:
    judge = TopicJudge()
    judge.joined(0, 11)
    assert judge.settle() == []


def topic_cases() -> dict[str, tuple[str, Callable[[TopicJudge], None], int, list[str]]]:
    def a_gap(judge: TopicJudge) -> None:
        judge.joined(0, 0)
        judge.joined(1, 0)
        judge.read(0, *delivered(0, 1, 4, 5, 6, 7, 8, 9))
        judge.read(1, *delivered(*range(10)))

    def a_gap_that_was_told(judge: TopicJudge) -> None:
        judge.read(0, *delivered(0, 1), DROP, *delivered(4, 5, 6, 7, 8, 9))

    def two_gaps_and_one_was_told(judge: TopicJudge) -> None:
        judge.read(0, *delivered(0, 1), DROP, *delivered(4, 6, 7, 8, 9))

    def the_end_is_missing(judge: TopicJudge) -> None:
        judge.read(0, *delivered(0, 1, 2))

    def the_end_is_missing_to_one_that_was_killed(judge: TopicJudge) -> None:
        judge.read(0, *delivered(0, 1, 2))
        judge.verifier.consumer_leaves(0)

    def the_first_is_missing_to_one_that_had_joined(judge: TopicJudge) -> None:
        judge.joined(0, 3)
        judge.read(0, *delivered(*range(4, 10)))

    def one_had_joined_and_got_an_earlier_one_still(judge: TopicJudge) -> None:
        judge.joined(0, 3)
        judge.read(0, *delivered(*range(2, 10)))

    def one_is_older_than_the_reader(judge: TopicJudge) -> None:
        judge.another_reader(0, 5)
        judge.read(0, *delivered(*range(4, 10)))

    def one_comes_twice(judge: TopicJudge) -> None:
        judge.read(0, *delivered(*range(10)), entry(9))

    def one_is_marked_as_redelivered(judge: TopicJudge) -> None:
        judge.read(0, *delivered(*range(9)), entry(9, again=True))

    return {
        "a gap": ("block", a_gap, 0, ["lost"]),
        "a gap that was skipped": ("skip", a_gap, 2, []),
        "a gap and no more than a part was skipped": ("skip", a_gap, 1, ["books"]),
        "more was skipped than is missing": ("skip", a_gap, 3, ["books"]),
        "something was skipped, and the policy is to block": (
            "block",
            the_end_is_missing_to_one_that_was_killed,
            1,
            ["books"],
        ),
        "a gap that was told": ("drop", a_gap_that_was_told, 2, []),
        "a gap that was not told": ("drop", a_gap, 2, ["lost"]),
        "two gaps, and one was told": ("drop", two_gaps_and_one_was_told, 3, ["lost"]),
        "told, and the policy is to block": ("block", a_gap_that_was_told, 0, ["lost", "lost"]),
        "the end is missing": ("block", the_end_is_missing, 0, ["lost"]),
        "the end is missing to one that was killed": ("block", the_end_is_missing_to_one_that_was_killed, 0, []),
        "the first is missing to one that had joined": (
            "block",
            the_first_is_missing_to_one_that_had_joined,
            0,
            ["lost"],
        ),
        "one had joined and got an earlier one still": ("block", one_had_joined_and_got_an_earlier_one_still, 0, []),
        "one is older than the reader": ("block", one_is_older_than_the_reader, 0, ["twice"]),
        "one comes twice": ("block", one_comes_twice, 0, ["twice"]),
        "one is marked as redelivered": ("block", one_is_marked_as_redelivered, 0, ["books"]),
    }


@pytest.mark.parametrize("case", topic_cases())
def test_what_must_not_happen_to_a_reader_is_named(case: str) -> None:
    policy, act, skipped, expected = topic_cases()[case]
    judge = TopicJudge(policy)
    act(judge)
    assert judge.settle(skipped=skipped) == expected


def test_what_a_publisher_that_was_killed_had_not_counted_yet_is_no_error() -> None:
    judge = TopicJudge("skip")
    judge.read(0, *delivered(0, 1, 4, 5, 9))
    assert judge.settle(skipped=2, killed=True) == []


def test_a_reader_that_was_dropped_is_waited_for_until_it_was_told() -> None:
    judge = TopicJudge("drop")
    judge.joined(0, 0)
    judge.read(0, *delivered(0, 1))
    judge.life.returned = 10
    assert not judge.verifier.may_settle(judge.life)
    judge.read(0, DROP)
    assert judge.verifier.may_settle(judge.life)
    assert judge.settle() == []
    assert judge.verifier.readers[0].skipped == 8
