"""How a figure is taken: children that do the work, laps that take turns, medians with their spread.

A *team* is the one or two processes that move messages in one way: a receiver and a sender, or a copier alone. All
children are started with the spawn method. A child makes its *side* (``bench.peers``) and then waits for orders; an
order is a number of messages.

What is timed. Each lap begins with an untimed warm-up, and both children report that it is over. Then the receiver is
sent into its loop, and after it the sender. The time of the lap runs from the moment before the sender makes its first
message to the moment after the receiver has checked the last one and given it back. So all the work of both sides is in
it, and nothing of it was done in advance. Both moments are read from CLOCK_MONOTONIC, which all processes of a host
share. Starting processes, making the source of the messages, and connecting are not in it.

Teams that are compared take turns, lap by lap (A B C A B C ...), in one run; a ratio is formed within each turn. So
what disturbs the machine for longer than a turn disturbs both sides of a ratio. That is not enough where a contest is
between two cores and one: a turn in which processes that are not ours took more than ``DISTURBED`` of a core is taken
again, and is left out of the figures, whatever it showed. If the machine does not get quiet, all turns count.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

from shmq.segment import names, unlink

GRACE = 30.0
"""Seconds that a child may take to start and make its side, or to close it."""


DISTURBED = 0.2
"""Cores that others may keep busy during a lap. The clock that tells has ticks of 10 ms: 0.02 of a lap of 0.5 s."""

QUIET_TURNS = 3
"""How many undisturbed turns are enough to leave the disturbed ones out."""

_BETWEEN_LAPS = 0.1
"""About so many seconds are between two laps."""

PATIENCE = 60.0
"""Seconds that a side waits for the other one, at most: a child whose partner is gone ends, even without its parent."""


class RunFailedError(Exception):
    """A child failed, took too long, or left something behind."""


# -- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def ratios(values: Sequence[float], others: Sequence[float]) -> Spread:
    """The spread of ``values[i] / others[i]``: of two contestants, turn by turn."""
    return Spread.of([value / other for value, other in zip(values, others, strict=True)])


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used so far, the interrupts included."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, *interrupts = map(int, file.readline().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


# -- where children meet ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A runtime directory and a prefix for the names of segments that no other team has."""

    directory: str
    namespace: str

    def endpoint(self, name: str) -> str:
        """The address of a ZeroMQ socket in this place."""
        return f"ipc://{self.directory}/{name}"

    @property
    def segments(self) -> str:
        """What the names of segments that a peer makes by itself begin with."""
        return f"{self.namespace}."

    def leftovers(self) -> list[str]:
        """The segments that are still there."""
        return names(f"shmq:{self.namespace}:") + names(self.segments)


@contextlib.contextmanager
def new_place() -> Iterator[Place]:
    """A place that is gone afterwards. Raises RunFailedError if segments were left in it, and removes them."""
    directory = tempfile.mkdtemp(prefix="fmqb")
    place = Place(directory, os.path.basename(directory))
    try:
        yield place
        if left := place.leftovers():
            raise RunFailedError(f"segments were left behind: {', '.join(left)}")
    finally:
        for name in place.leftovers():
            unlink(name)
        shutil.rmtree(directory, ignore_errors=True)


# -- children ---------------------------------------------------------------------------------------------------------


class Side(Protocol):
    """One end of a way to move messages. Made, used and closed in one child."""

    def run(self, first: int, count: int) -> list[float]:
        """Move the messages from number ``first`` on; returns what was measured on the way, if anything was."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one child says of one order: when it began and ended (CLOCK_MONOTONIC) and its CPU time, in seconds."""

    begin: float
    end: float
    cpu: float
    samples: list[float]


@dataclass(frozen=True, slots=True)
class Lap:
    """One order, done by all children of a team: seconds, CPU seconds of each child, all samples.

    ``others`` is the number of cores that processes other than the children kept busy meanwhile.
    """

    count: int
    seconds: float
    cpu: list[float]
    samples: list[float]
    others: float

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.count / self.seconds


def _child(connection: Connection, make: Callable[[], Side]) -> None:
    # A terminal sends this to all of them; the parent is the one to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        side = make()
    except Exception:
        connection.send(traceback.format_exc())
        return
    try:
        connection.send(None)
        first = 0
        while count := connection.recv():
            cpu = time.process_time()
            begin = time.perf_counter()
            samples = side.run(first, count)
            end = time.perf_counter()
            connection.send(Report(begin, end, time.process_time() - cpu, samples))
            first += count
        side.close()
        connection.send(None)
    except EOFError:
        # The parent is gone.
        side.close()
    except Exception:
        # Whatever it was, the parent has to hear of it, and fails the run.
        connection.send(traceback.format_exc())


class Team:
    """The children that move messages in one way. The first side made is ordered first: a receiver, then its sender.

    Use it as a context manager. The children start at once, and the first order waits for them. ``deadline`` is in
    seconds, for each order; when a child fails or exceeds it, all are killed. Raises RunFailedError.
    """

    def __init__(self, name: str, sides: Sequence[Callable[[], Side]], *, deadline: float) -> None:
        self.name = name
        self._deadline = deadline
        self._ready = False
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        try:
            for side in sides:
                connection, theirs = context.Pipe()
                process = context.Process(target=_child, args=(theirs, side), daemon=True)
                self._connections.append(connection)
                process.start()
                self._processes.append(process)
                theirs.close()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, in the order of the sides."""
        return [process.pid or 0 for process in self._processes]

    def wait_until_ready(self) -> None:
        """Wait until every child has made its side."""
        if not self._ready:
            self._answers(GRACE)
            self._ready = True

    def run(self, count: int) -> Lap:
        """Have ``count`` messages moved."""
        self.wait_until_ready()
        begun, busy = time.monotonic(), busy_seconds()
        for connection in self._connections:
            self._order(connection, count)
        reports = [report for report in self._answers(self._deadline) if report is not None]
        cpu = [report.cpu for report in reports]
        others = (busy_seconds() - busy - sum(cpu)) / (time.monotonic() - begun)
        # A side without a partner is both; of several, the last is the sender.
        seconds = max(report.end for report in reports[:-1] or reports) - reports[-1].begin
        samples = [sample for report in reports for sample in report.samples]
        return Lap(count, seconds, cpu, samples, max(0.0, others))

    def close(self) -> None:
        """Let the children end, the sender first. Raises RunFailedError if one can't."""
        self.wait_until_ready()
        for index in reversed(range(len(self._connections))):
            self._order(self._connections[index], 0)
            self._answers(GRACE, [index])
        for process in self._processes:
            process.join(GRACE)
        self.kill()

    def kill(self) -> None:
        """End every child that is still there, at once."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()

    def _order(self, connection: Connection, count: int) -> None:
        try:
            connection.send(count)
        except BrokenPipeError as error:
            raise RunFailedError(f"{self.name}: a child is gone") from error

    def _answers(self, patience: float, of: Sequence[int] | None = None) -> list[Report | None]:
        """One answer of each child (or of some); the first failure of any counts."""
        limit = time.monotonic() + patience
        connections = [self._connections[index] for index in (range(len(self._connections)) if of is None else of)]
        answers: dict[Connection, Report | None] = {}
        while len(answers) < len(connections):
            waiting = [connection for connection in connections if connection not in answers]
            ready = wait(waiting, max(0.0, limit - time.monotonic()))
            if not ready:
                raise RunFailedError(f"{self.name}: a child took longer than its {patience:g} seconds and was killed")
            for connection in waiting:
                if connection in ready:
                    answers[connection] = self._answer(connection)
        return [answers[connection] for connection in connections]

    def _answer(self, connection: Connection) -> Report | None:
        try:
            answer = connection.recv()
        except EOFError as error:
            raise RunFailedError(f"{self.name}: a child died") from error
        if isinstance(answer, str):
            raise RunFailedError(f"{self.name}: a child failed\n{answer}")
        assert answer is None or isinstance(answer, Report)
        return answer

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.kill()


# -- turns ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Course:
    """The laps of one team that count, and those that were disturbed; ``count`` messages make a lap."""

    team: Team
    count: int
    laps: list[Lap] = field(default_factory=list)
    disturbed: list[Lap] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Messages a second, lap by lap."""
        return [lap.rate for lap in self.laps]


def take_turns(
    teams: Sequence[Team], *, rounds: int, seconds: float, warmup: int, patience: float = 1.0
) -> list[Course]:
    """Have each team run ``rounds`` laps of about ``seconds``, in turn. ``warmup`` messages precede each lap.

    Takes more turns if some are disturbed, until ``patience`` times the time that it should take is over.
    """
    for team in teams:
        team.wait_until_ready()
    courses = []
    for team in teams:
        team.run(warmup)
        courses.append(Course(team, max(3, round(team.run(warmup).rate * seconds))))
    turns: list[list[Lap]] = []
    limit = time.monotonic() + patience * rounds * len(teams) * (seconds + _BETWEEN_LAPS)
    while len(turns) < rounds or (len(quiet(turns)) < rounds and time.monotonic() < limit):
        turn = []
        for course in courses:
            course.team.run(warmup)
            turn.append(course.team.run(course.count))
        turns.append(turn)
    counting = quiet(turns)
    if len(counting) < min(rounds, QUIET_TURNS):
        counting = turns
    for turn in turns:
        for course, lap in zip(courses, turn, strict=True):
            (course.laps if turn in counting else course.disturbed).append(lap)
    return courses


def quiet(turns: Sequence[list[Lap]]) -> list[list[Lap]]:
    """The turns in which others left the machine alone."""
    return [turn for turn in turns if max(lap.others for lap in turn) <= DISTURBED]
