"""The run: starts workers, lets misfortunes happen, reads the journals, ends everything in order, and judges.

It goes through phases: *load* (until the time, the messages or the kills are over, a check fails, or somebody asks for
the end), *draining* (producers have put their last message; every stream is read to its end), *closing* (consumers
leave). Then what is left of the run is looked for, and removed whatever it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from fmq.errors import QueueNameError
from fmq.stress.chaos import Chaos, Misfortune
from fmq.stress.gauges import Histogram, RingGauge, Sample, Series, descriptors, private_memory
from fmq.stress.journal import Board, Cell, JournalReader
from fmq.stress.launcher import (
    ENDED,
    SPAWNED,
    Key,
    Launcher,
)
from fmq.stress.notes import NoteReader, Violation
from fmq.stress.place import Place, remove_all, segments_of
from fmq.stress.plan import Plan, PlanError, bytes_text
from fmq.stress.result import Event, Result
from fmq.stress.verify import CHECKS, Life, Verifier
from fmq.stress.worker import FORK, FULL, HOLD, SLOW
from shmq.segment import MAKING, free_bytes, size_of

_TICK = 0.02
_SAMPLE_SECONDS = 0.25
_WARM_SECONDS = 1.5
_JUDGED_SECONDS = 4.0
_MEMORY_LIMIT = 16 * 1024 * 1024
"""What a worker's private memory may grow by, after its first ``_WARM_SECONDS``, if it lived ``_JUDGED_SECONDS``."""
_STACK_SECONDS = 0.5
_MOST_EVENTS = 20_000
_ORDERS = {"slow-consumer": SLOW, "hold-views": HOLD, "fork-producer": FORK, "fork-consumer": FORK, "full-shm": FULL}


class View(Protocol):
    """Who watches a run."""

    def show(self, run: Run) -> None:
        """Called at every sample."""

    def tell(self, event: Event) -> None:
        """Called with every event."""


class Unwatched:
    """A view that shows nothing."""

    def show(self, run: Run) -> None:
        """Nothing to show."""

    def tell(self, event: Event) -> None:
        """Nothing to tell."""


class Worker:
    """A worker, as the supervisor sees it: a slot, whose process may be another one after each life."""

    def __init__(self, key: Key, cell: Cell, noun: str) -> None:
        self.key = key
        self.noun = noun
        self.role, self.slot = key
        self.cell = cell
        self.life = 0
        self.pid = 0
        self.alive = False
        self.killed = False
        self.retired = False
        self.continue_at = 0.0
        self.started = 0.0
        self.memory: tuple[int, int] = 0, 0
        """Private memory when warm, and now."""
        self.descriptors = 0

    def __str__(self) -> str:
        return f"{self.noun} {self.slot}"


class Run:
    """One run, from start to verdict. Used once."""

    def __init__(self, plan: Plan, view: View) -> None:
        self.plan = plan
        self.phase = "starting"
        self.events: list[Event] = []
        self.actions: dict[str, int] = {}
        self.series = Series()
        self.verifier = Verifier(plan)
        self.interrupts = 0
        self._view = view
        self._board_fd = os.memfd_create("shmq-stress", os.MFD_CLOEXEC)
        os.truncate(self._board_fd, Board.nbytes(plan.producers, plan.takers))
        self._board = Board(self._board_fd, plan.producers, plan.takers)
        self._journals: list[JournalReader] = [self._board.reader(slot) for slot in range(plan.takers)]
        self._producers = self._make_workers("producer", plan.producers)
        self._consumers = self._make_workers("consumer", plan.takers)
        self._workers = {worker.key: worker for worker in [*self._producers, *self._consumers]}
        self._began = time.monotonic()
        self._sampled = self._progressed = 0.0
        self._counted = 0, 0
        self._hurry = False

    def _make_workers(self, role: str, count: int) -> list[Worker]:
        noun = self.plan.words(role)
        return [Worker((role, slot), self._board.cell(role, slot), noun) for slot in range(count)]

    # -- what a view may ask ------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began

    @property
    def kills(self) -> int:
        """How many workers were killed."""
        return sum(count for action, count in self.actions.items() if action.startswith("kill-"))

    @property
    def cut_short(self) -> bool:
        """Whether somebody wanted it to end at once: then workers were killed, and what is left says nothing."""
        return self.interrupts > 1

    def progress(self) -> tuple[float, float] | None:
        """How much is done of how much: messages, kills or seconds; None if there is no end."""
        plan = self.plan
        if plan.messages is not None:
            return sum(worker.cell[Cell.RETURNED] for worker in self._producers), plan.messages
        if plan.kills is not None:
            return self.kills, plan.kills
        return None if plan.duration is None else (min(self.now, plan.duration), plan.duration)

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """All of it. Raises PlanError if the host can't run it, and LauncherGoneError."""
        plan = self.plan
        if (need := plan.producers * plan.ring_size) > (free := free_bytes()):
            raise PlanError(
                f"{plan.producers} rings of {bytes_text(plan.ring_size)} need {bytes_text(need)} of /dev/shm, and "
                f"{bytes_text(free)} are free; choose a smaller --ring or fewer --producers"
            )
        directory = tempfile.mkdtemp(prefix="shmq-stress-")
        self._place = Place(os.path.basename(directory), directory, plan.readers > 0)
        with contextlib.ExitStack() as stack:
            stack.callback(remove_all, self._place)
            stack.callback(os.close, self._board_fd)
            stack.callback(self._close_gauges)
            try:
                self._place.path(plan.consumers - 1)
            except QueueNameError:
                raise PlanError(
                    f"{directory} is too long for the path of a socket; set TMPDIR to a shorter directory"
                ) from None
            notes, their_notes = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, notes)
            stack.callback(os.close, their_notes)
            self._notes = NoteReader(notes)
            self._launcher = Launcher(plan, self._place, self._board_fd, their_notes)
            stack.callback(self._launcher.close)
            with self._interruptible():
                self._launcher.wait_until_ready()
                self._load()
                self._drain()
                self._close()
            seconds = self.now
            self._launcher.close()
            self._read_notes()
            if not self.cut_short:
                self._look_for_leftovers()
                self.verifier.close_books()
            return self._result(seconds)

    def _close_gauges(self) -> None:
        for life in self.verifier.lives.values():
            if life.gauge is not None:
                life.gauge.close()

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for the end; a second one for a quick end. Only where this is the main thread."""

        def ask(_: int, __: FrameType | None) -> None:
            self.interrupts += 1
            self._hurry = self.interrupts > 1

        before = {}
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _load(self) -> None:
        self._began = time.monotonic()
        self.phase = "load"
        for worker in [*self._consumers, *self._producers]:
            self._spawn(worker)
        chaos = Chaos(self.plan, self.now)
        while not self._is_over():
            self._turn(respawn=True)
            while (misfortune := chaos.due(self.now)) is not None and not self._is_over():
                self._befall(misfortune)
            self._watch_for_hang()
        self.phase = "draining"
        for worker in self._workers.values():
            self._continue(worker)
        for worker in self._producers:
            worker.retired = True
            worker.cell[Cell.STOP] = 1

    def _is_over(self) -> bool:
        plan = self.plan
        return bool(
            self.interrupts
            or self.verifier.findings
            or self.verifier.missing()
            or (plan.duration is not None and self.now >= plan.duration)
            or (plan.kills is not None and self.kills >= plan.kills)
            or all(worker.retired for worker in self._producers)
        )

    def _drain(self) -> None:
        self._wait_for(
            lambda: not any(worker.alive for worker in self._producers) and not self.verifier.lives,
            self.plan.words("the producers did not end, or their rings were not read to the end"),
        )

    def _close(self) -> None:
        self.phase = "closing"
        for worker in self._consumers:
            worker.cell[Cell.STOP] = 1
        self._wait_for(
            lambda: not any(worker.alive for worker in self._consumers), self.plan.words("the consumers did not end")
        )
        for life in [] if self.cut_short else list(self.verifier.lives.values()):
            # Named before: what is missing is counted all the same.
            self.verifier.settle(life)

    def _wait_for(self, condition: Callable[[], bool], complaint: str) -> None:
        """Go on until the condition holds; nothing moves for as long as patience lasts: name who hangs, and kill."""
        state, since = self._state(), time.monotonic()
        while not condition():
            self._turn(respawn=self.phase == "draining")
            now, seen = time.monotonic(), self._state()
            if seen != state:
                state, since = seen, now
            if self._hurry or now - since > self.plan.patience:
                if not self._hurry:
                    self._report_hang(complaint)
                for worker in self._workers.values():
                    if worker.alive and (worker.role == "producer" or self.phase == "closing"):
                        worker.killed = worker.retired = True
                        self._launcher.signal(worker.key, signal.SIGKILL)
                self._hurry = True
                deadline = now + 5.0
                while any(w.killed and w.alive for w in self._workers.values()) and time.monotonic() < deadline:
                    self._turn(respawn=False)
                return

    def _state(self) -> Any:
        return (
            self.verifier.delivered,
            self.verifier.total().redelivered,
            len(self.verifier.lives),
            [(worker.life, worker.alive) for worker in self._workers.values()],
        )

    def _turn(self, *, respawn: bool) -> None:
        """Wait a moment, take in what happened, and see to the workers."""
        wait([self._launcher.fileno(), self._notes.fileno()], _TICK)
        self.verifier.now = self.now
        gone = [life for life in self.verifier.lives.values() if life.gone]
        for slot in range(self.plan.takers):
            self._read_journal(slot)
        for life in gone:
            if self.verifier.may_settle(life):
                self.verifier.settle(life)
        self._read_notes()
        for kind, key, value in self._launcher.take():
            worker = self._workers[key]
            if kind == SPAWNED:
                worker.pid = value
            elif kind == ENDED:
                self._bury(worker, value)
        self._open_rings()
        now = self.now
        for worker in self._workers.values():
            if worker.continue_at and now >= worker.continue_at:
                self._continue(worker)
            if respawn and not worker.alive and not worker.retired:
                self._spawn(worker)
        if now - self._sampled >= _SAMPLE_SECONDS:
            self._sample(now)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _spawn(self, worker: Worker) -> None:
        cell, verifier = worker.cell, self.verifier
        begun, journal = cell[Cell.BEGUN], cell[Cell.TAIL]
        cell.clear()
        cell[Cell.LIFE] = worker.life
        if worker.role == "producer":
            last = self._last_number(worker.slot)
            cell[Cell.FIRST] = cell[Cell.BEGUN] = cell[Cell.RETURNED] = begun
            cell[Cell.LAST] = last
            if begun >= last:
                worker.retired = True
                return
            consumers = range(self.plan.readers) if self.plan.readers else [worker.slot % self.plan.consumers]
            verifier.begin(worker.slot, worker.life, begun, consumers)
        else:
            cell[Cell.HEAD] = cell[Cell.TAIL] = journal
            verifier.consumer_begins(worker.slot, time.monotonic_ns())
        worker.alive, worker.killed, worker.pid = True, False, 0
        worker.started = self.now
        worker.memory = 0, 0
        worker.life += 1
        self._launcher.spawn(worker.key)

    def _last_number(self, slot: int) -> int:
        if self.plan.messages is None:
            return (1 << 63) - 1
        share, rest = divmod(self.plan.messages, self.plan.producers)
        return share + (slot < rest)

    def _bury(self, worker: Worker, status: int) -> None:
        """A worker has ended: read what it left, and judge how it ended."""
        worker.alive = False
        worker.continue_at = 0.0
        if worker.role == "consumer":
            self._read_journal(worker.slot)
            self.verifier.deaths += 1
        else:
            life = self.verifier.lives[worker.slot, worker.life - 1]
            self._read_cell(worker, life)
            if life.ring and life.gauge is None:
                self._open_ring(life)
            life.ended, life.killed = True, worker.killed
        code = os.waitstatus_to_exitcode(status)
        if not (code == 0 or (code == -signal.SIGKILL and worker.killed)):
            self.verifier.fail("processes", f"{worker} (process {worker.pid}) ended with {_ending(code)}")
        first, last = worker.memory
        if first and self.now - worker.started >= _JUDGED_SECONDS and last - first > _MEMORY_LIMIT:
            self.verifier.fail(
                "memory", f"the private memory of {worker} grew from {bytes_text(first)} to {bytes_text(last)}"
            )

    def _continue(self, worker: Worker) -> None:
        if worker.continue_at:
            worker.continue_at = 0.0
            self._launcher.signal(worker.key, signal.SIGCONT)

    def _befall(self, misfortune: Misfortune) -> None:
        worker = self._workers[misfortune.role, misfortune.slot]
        action, seconds, name = misfortune.action, misfortune.seconds, self.plan.words(misfortune.action)
        if (
            not worker.alive
            or not worker.pid
            or worker.killed
            or (worker.continue_at and not action.startswith("kill"))
        ):
            return
        if action in ("kill-consumer", "restart-consumer"):
            self.verifier.consumer_leaves(worker.slot)
        said = f"{worker}, life {worker.life - 1}"
        if action.startswith("kill-"):
            worker.killed = True
            self._launcher.signal(worker.key, signal.SIGKILL)
            said = f"kill -9 {said}"
        elif action.startswith("stop-"):
            worker.continue_at = self.now + seconds
            self._launcher.signal(worker.key, signal.SIGSTOP)
            said = f"SIGSTOP {said}, for {seconds:.2f} s"
        elif action.startswith("restart-"):
            self._launcher.signal(worker.key, signal.SIGTERM)
            said = f"SIGTERM {said}"
        else:
            cell = worker.cell
            cell[Cell.ORDER], cell[Cell.ORDER_NS] = _ORDERS[action], round(seconds * 1e9)
            cell[Cell.ORDERS] += 1
            said = f"{name.removesuffix(f'-{worker.noun}')} {said}, for {seconds:.2f} s"
        self.actions[name] = self.actions.get(name, 0) + 1
        self._note_event(name, said)

    # -- rings and journals -------------------------------------------------------------------------------------------

    def _read_cell(self, worker: Worker, life: Life) -> None:
        # In this order: RETURNED never passes BEGUN.
        life.returned = worker.cell[Cell.RETURNED]
        life.begun = worker.cell[Cell.BEGUN]
        life.ring = worker.cell[Cell.RING]
        life.refused = worker.cell[Cell.REFUSED]

    def _open_rings(self) -> None:
        for life in self.verifier.lives.values():
            if not life.ended:
                worker = self._producers[life.producer]
                joined = self._joined(life)
                self._read_cell(worker, life)
                for slot in joined:
                    self.verifier.joined(life, slot)
                if life.ring and life.gauge is None:
                    self._open_ring(life)
                elif life.gauge is not None:
                    # At the second look: who had joined at the first one is known by now.
                    worker.cell[Cell.SEEN] = 1
            elif not life.gone:
                life.gone = life.gauge is None or not life.gauge.is_linked()

    def _joined(self, life: Life) -> list[int]:
        """Which readers of a topic have joined; nobody if that is known already."""
        if life.gauge is None or all(stream.entered or stream.latest is not None for stream in life.streams.values()):
            return []
        pids = life.gauge.readers()
        return [worker.slot for worker in self._consumers if worker.pid in pids]

    def _open_ring(self, life: Life) -> None:
        path = self._place.path(life.producer % self.plan.consumers)
        with contextlib.suppress(FileNotFoundError):
            life.gauge = RingGauge(f"{path.rings}{life.ring:016x}")

    def _read_journal(self, slot: int) -> None:
        if len(entries := self._journals[slot].take()):
            self.verifier.read(slot, entries)

    def _read_notes(self) -> None:
        for note in self._notes.take():
            if isinstance(note, Violation):
                self.verifier.fail(note.check, note.text)
            else:
                self._note_event("remark", note.text)

    # -- watching -----------------------------------------------------------------------------------------------------

    def _note_event(self, kind: str, text: str) -> None:
        event = Event(self.now, kind, text)
        if len(self.events) < _MOST_EVENTS:
            self.events.append(event)
        self._view.tell(event)

    def _sample(self, now: float) -> None:
        verifier = self.verifier
        span, self._sampled = now - self._sampled, now
        messages, nbytes = verifier.delivered - self._counted[0], verifier.nbytes - self._counted[1]
        self._counted = verifier.delivered, verifier.nbytes
        if messages:
            self._progressed = now
        most = {"producer": [0, 0], "consumer": [0, 0]}
        for worker in self._workers.values():
            if worker.alive and worker.pid:
                memory, count = private_memory(worker.pid), descriptors(worker.pid)
                if memory:
                    warm = worker.memory[0] or (memory if now - worker.started >= _WARM_SECONDS else 0)
                    worker.memory = warm, memory
                most[worker.role] = [max(pair) for pair in zip(most[worker.role], (memory, count), strict=True)]
        fills = [life.gauge.fill() for life in verifier.lives.values() if life.gauge is not None]
        self.series.add(
            Sample(
                at=now,
                span=span,
                messages=messages,
                nbytes=nbytes,
                fill=max(fills, default=0.0),
                p50=verifier.recent.percentile(50) / 1e9,
                p99=verifier.recent.percentile(99) / 1e9,
                shm=sum(size_of(name) for name in segments_of(self._place.namespace)),
                producer_memory=most["producer"][0],
                consumer_memory=most["consumer"][0],
                producer_descriptors=most["producer"][1],
                consumer_descriptors=most["consumer"][1],
            )
        )
        verifier.recent = Histogram()
        self._view.show(self)

    def _watch_for_hang(self) -> None:
        if self.now - self._progressed > self.plan.patience:
            self._report_hang("nothing was delivered")

    def _report_hang(self, complaint: str) -> None:
        for worker in self._workers.values():
            if worker.alive:
                self._launcher.signal(worker.key, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            wait([self._launcher.fileno()], _TICK)
        lines = [f"{complaint} for {self.plan.patience:g} s"]
        for worker in self._workers.values():
            state = "alive" if worker.alive else "ended"
            lines.append(f"{worker}, {state}, begun {worker.cell[Cell.BEGUN]}, returned {worker.cell[Cell.RETURNED]}")
            with contextlib.suppress(FileNotFoundError):
                lines += Path(self._place.stacks(*worker.key)).read_text().splitlines()[:30]
        for life in self.verifier.lives.values():
            lines += [f"not over: {stream}, due is message {stream.next}" for stream in life.streams.values()]
        self.verifier.fail("hang", "\n".join(lines))

    # -- the verdict --------------------------------------------------------------------------------------------------

    def _look_for_leftovers(self) -> None:
        for name in segments_of(self._place.namespace):
            if name.startswith(MAKING) and self.kills:
                # Whoever was killed while it made a segment left it to the next process that starts.
                continue
            self.verifier.fail("segments", f"segment {name} of {size_of(name):,} bytes was left in /dev/shm")
        left = {os.path.join(parent, file) for parent, _, files in os.walk(self._place.runtime) for file in files}
        if self.plan.readers and self._producers[0].killed:
            # No publisher came after the one that was killed last, and removed them.
            left -= {self._place.path(0).socket, self._place.path(0).lock}
        for file in sorted(left):
            self.verifier.fail("files", f"file {file} was left")
        shutil.rmtree(self._place.runtime, ignore_errors=True)

    def _result(self, seconds: float) -> Result:
        verifier = self.verifier
        return Result(
            plan=self.plan,
            seconds=seconds,
            findings=verifier.findings,
            found={check: verifier.found.get(check, 0) for check in CHECKS},
            producers=verifier.producers,
            readers=verifier.readers,
            total=verifier.total(),
            latencies=verifier.latencies,
            recovery=verifier.recovery,
            samples=self.series.all(),
            events=self.events,
            actions=self.actions,
            lives={
                workers[0].noun: sum(worker.life for worker in workers)
                for workers in (self._producers, self._consumers)
            },
            interrupted=self.interrupts > 0,
            cut_short=self.cut_short,
        )


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
