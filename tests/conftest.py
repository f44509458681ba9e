"""What every test shares: names of its own, rings of its own, and a look at /dev/shm afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import hypothesis
import pytest

from shmq import RingReader, RingWriter, Segment, segment

# A run that fails by chance says little; `make fuzz` and `make simulate` are for new cases.
hypothesis.settings.register_profile("the same each time", derandomize=True)
hypothesis.settings.load_profile("the same each time")

# A shell that starts the tests in its background has SIGINT ignored, in every process of theirs as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

MINE = f"shmq-test-{os.getpid()}-"
Ring = tuple[RingWriter, RingReader]

_DEADLINE_S = 3.0


def _family(pid: int) -> Iterator[int]:
    """A process, its parent, its parent's parent, and so on."""
    while pid > 1:
        yield pid
        with open(f"/proc/{pid}/stat") as stat:
            pid = int(stat.read().rpartition(")")[2].split()[1])


def _are_others_testing() -> bool:
    """Whether another run of pytest is at work on this host, whose processes come and go as well."""
    mine = set(_family(os.getpid()))
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/cmdline", "rb") as command:
            if b"pytest" in command.read() and int(pid) not in mine and os.getpid() not in _family(int(pid)):
                return True
    return False


def _is_ours(name: str) -> bool:
    """Whether a segment was left by this process, by a child of it, or by a process that is gone."""
    if MINE in name:
        return True
    try:
        with open(os.path.join(segment.DIRECTORY, name), "rb") as file:
            owner = int.from_bytes(file.read(56)[48:], "little")
    except FileNotFoundError:
        return False
    try:
        return os.getpid() in _family(owner)
    except (FileNotFoundError, ProcessLookupError):
        return not _are_others_testing()


def _segments() -> set[str]:
    return {name for name in os.listdir(segment.DIRECTORY) if name.removeprefix(segment.MAKING).startswith("shmq")}


@pytest.fixture(autouse=True)
def shared_memory_is_left_as_it_was() -> Iterator[None]:
    before = _segments()
    yield
    deadline = time.monotonic() + _DEADLINE_S
    while left := {name for name in _segments() - before if _is_ours(name)}:
        if time.monotonic() > deadline:
            for name in left:
                if MINE in name:
                    os.unlink(os.path.join(segment.DIRECTORY, name))
            pytest.fail(f"the test left segments behind in {segment.DIRECTORY}: {sorted(left)}")
        time.sleep(0.01)


@pytest.fixture
def make_name() -> Callable[[], str]:
    """Makes names that no other segment has."""
    return lambda: MINE + os.urandom(8).hex()


@pytest.fixture
def make_ring(make_name: Callable[[], str]) -> Iterator[Callable[..., Ring]]:
    """Makes a ring with its writer and its reader; all of it is removed when the test is over."""
    made: list[Ring] = []

    def make(size: int = 64 * 1024, *, spill_limit: int = 16 * 1024 * 1024, lap: int = 1024 * 1024) -> Ring:
        owned = Segment.create(make_name(), size, ring_id=os.urandom(16))
        writer = RingWriter(owned, spill_limit=spill_limit, lap=lap)
        ring = writer, RingReader(Segment.attach(owned.name), epoch=1)
        made.append(ring)
        return ring

    yield make
    for writer, reader in made:
        reader.retire()
        writer.close(remove=True)
