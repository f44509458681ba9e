"""Twenty thousand schedules of the whole queue, each step of which may be the last; and proofs that they can fail."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.simulation import schedule, topic_schedule
from tests.simulation.mutations import MUTATIONS, Mutation, catch
from tests.simulation.patches import simulated
from tests.simulation.topic_mutations import TOPIC_MUTATIONS

SCHEDULES = 20_000
PARTS = 40
PROOF = 5000
"""Within how many schedules a mutation has to be caught."""

TOPIC_SCHEDULES = 3000
TOPIC_PARTS = 10
TOPIC_PROOF = 1500


@pytest.fixture(autouse=True)
def machines() -> Iterator[None]:
    with simulated():
        yield


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_a_promise(part: int) -> None:
    total = schedule.Outcome()
    for seed in range(part * SCHEDULES // PARTS, (part + 1) * SCHEDULES // PARTS):
        try:
            total.add(schedule.run(seed))
        except schedule.Failure as failure:
            pytest.fail(str(failure), pytrace=False)
        if seed % 100 == 0:
            gc.collect()
    assert total.kills > 50
    assert total.lost > 50
    assert total.redelivered > 20
    assert total.folds > 50
    assert total.turns > 50
    assert total.weak > 100


@pytest.mark.parametrize("part", range(TOPIC_PARTS))
def test_no_schedule_of_a_topic_breaks_a_promise(part: int) -> None:
    total = schedule.Outcome()
    for seed in range(part * TOPIC_SCHEDULES // TOPIC_PARTS, (part + 1) * TOPIC_SCHEDULES // TOPIC_PARTS):
        try:
            total.add(topic_schedule.run(seed))
        except schedule.Failure as failure:
            pytest.fail(str(failure), pytrace=False)
        if seed % 100 == 0:
            gc.collect()
    assert total.kills > 100
    assert total.readers > 500
    assert total.skips > 20
    assert total.drops > 20
    assert total.lost > 50
    assert total.folds > 50
    assert total.turns > 50
    assert total.weak > 50


def test_a_seed_is_the_same_schedule_every_time_traced_or_not() -> None:
    for seed in range(30):
        outcome = schedule.run(seed)
        assert schedule.run(seed) == outcome
        assert schedule.run(seed, traced=True) == outcome
        outcome = topic_schedule.run(seed)
        assert topic_schedule.run(seed) == outcome
        assert topic_schedule.run(seed, traced=True) == outcome


@pytest.mark.parametrize(
    "mutation", [mutation for mutation in MUTATIONS if not mutation.rare], ids=lambda mutation: mutation.name
)
def test_a_mutation_is_caught(mutation: Mutation) -> None:
    failure, _ = catch(mutation, PROOF)
    assert failure is not None, f"{PROOF} schedules did not notice that {mutation.what}"


@pytest.mark.parametrize("mutation", TOPIC_MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_of_a_topic_is_caught(mutation: Mutation) -> None:
    failure, _ = catch(mutation, TOPIC_PROOF)
    assert failure is not None, f"{TOPIC_PROOF} schedules did not notice that {mutation.what}"


def test_a_failure_says_how_to_replay_it_and_shows_the_last_steps() -> None:
    mutation = next(mutation for mutation in MUTATIONS if mutation.name == "head before the record")
    with mutation.applied():
        failure, _ = catch_traced(mutation)
    assert f"--seed {failure.seed} --focus {failure.focus} --replay" in str(failure)
    assert len(failure.trace) == schedule.TRACED
    assert any("  load  " in line or "  store " in line for line in failure.trace)


def catch_traced(mutation: Mutation) -> tuple[schedule.Failure, int]:
    """The first failure of the mutated code, with its trace."""
    for count, seed in enumerate(mutation.seeds(), 1):
        try:
            schedule.run(seed, traced=True)
        except schedule.Failure as failure:
            return failure.with_traceback(None), count
    raise AssertionError
