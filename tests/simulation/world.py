"""The machine under the simulation: processes, their scheduler, and the parts of the kernel that the queue uses.

Each simulated process is a greenlet that runs the real code. Every load and store of shared memory, every lock and
every frame is a step before which the scheduler may let another process go on, make a store visible, deliver, drop or
double a frame, stop a process or kill it. All choices come from one seeded generator, and the only clock is the
world's own, so that a seed always gives the same run.
"""

from __future__ import annotations

import math
import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet
from numpy.typing import NDArray

from fmq import wire
from shmq import layout
from shmq.errors import ForeignSegmentError, SegmentExistsError, SegmentMissingError, ViewsHeldError
from tests.simulation.memory import WORD, Clock, Memory, Processor, Shared, Words

RECHECK = 1000.0
"""Stands for the re-check interval of the front ends: no timeout of a program is as long."""
RECHECK_S = 0.2
"""How long it takes, once it is in force."""
_TICK_NS = 1000
_QUEUED = 16
_MAX_TURNS = 200_000
_IDLE_NS = 4 * 10**9
"""For how long a consumer may be alone before all must be done: it looks for orphans once a second."""


class Killed(BaseException):
    """Raised within a process that is no more, to take down its stack. It can't touch anything that others see."""


class EndOfSchedule(BaseException):
    """Raised within a consumer that waits when there is nothing left to wait for."""


class Broken(AssertionError):  # noqa: N818  (it is what became of a promise)
    """A promise was not kept."""


class Process(Processor):
    """A process: its processor, its stack, and why it does not run."""

    __slots__ = ("deadline", "descriptors", "front", "greenlet", "is_consumer", "name", "over", "stopped", "waits")

    def __init__(self, world: World, name: str, program: Callable[[Process], None], is_consumer: bool) -> None:
        super().__init__(world)
        self.name = name
        self.is_consumer = is_consumer
        self.front: Any = None
        """Its Producer or Consumer, if it has one."""
        self.waits = False
        self.descriptors: Sequence[Bell | Nudge] = ()
        self.deadline = math.inf
        self.stopped = 0
        self.over = False
        self.greenlet = greenlet(world.body(self, program))


class Bell:
    """What both ends of a ZeroMQ connection have: frames that came in, and a descriptor that tells only of a change.

    It becomes readable when a frame comes in to a socket that was found empty before. Any use of the socket takes that
    back, whether the frame was received or not.
    """

    def __init__(self) -> None:
        self.inbox: deque[Any] = deque()
        self.signaled = False
        self._found_empty = True
        self.world = world()

    def arrive(self, frame: Any) -> None:
        """A frame came in."""
        self.inbox.append(frame)
        if self._found_empty:
            self._found_empty = False
            self.signaled = True

    def fileno(self) -> Bell:
        """Itself: what the front ends hand to ``wait_readable``."""
        return self

    def readable(self) -> bool:
        """As of the real one."""
        self.world.step()
        self.signaled = False
        if not self.inbox:
            self._found_empty = True
        return bool(self.inbox)

    def _receive(self) -> Any:
        self.world.step()
        self.signaled = False
        if self.inbox:
            return self.inbox.popleft()
        self._found_empty = True
        return None

    def _sending(self) -> None:
        self.world.step()
        if self.world.random() < 0.5:
            self.signaled = False

    def close(self) -> None:
        """As of the real one."""
        self.world.step()

    def close_descriptor(self) -> None:
        """As of the real one."""


class ProducerBell(Bell):
    """A DEALER."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.way_out: deque[bytes] = deque()
        self.way_in: deque[bytes] = deque()
        self.address = b""
        self.peer: ConsumerBell | None = None
        self.gone = False
        self.ring: Shared | None = None
        self._spaces = 0
        self.world.producer_bells.append(self)
        self.number = len(self.world.producer_bells)

    def send(self, frame: bytes) -> bool:
        """As of the real one."""
        self._sending()
        if self.world.bound is None and len(self.way_out) >= _QUEUED:
            return False
        self.world.say("send", frame)
        self.way_out.append(frame)
        return True

    def receive(self) -> bytes | None:
        """As of the real one."""
        frame: bytes | None = self._receive()
        return frame

    def check_space(self, frame: bytes) -> None:
        """Each Space has to answer something that was given back; else two idle sides would wake each other."""
        if isinstance(wire.decode(frame), wire.Space):
            self._spaces += 1
            if self.ring is not None and self._spaces > self.ring.released:
                raise Broken(f"{self._spaces} times was a producer told of space, {self.ring.released} times was any")

    def close(self) -> None:
        """As of the real one; what was sent still arrives."""
        super().close()
        self.gone = True


class ConsumerBell(Bell):
    """A ROUTER."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.world.step()
        self.world.bells_bound += 1
        self.number = self.world.bells_bound
        self.world.bound = self

    def send_to(self, address: bytes, frame: bytes) -> None:
        """As of the real one."""
        self._sending()
        self.world.say("send", frame)
        for bell in self.world.producer_bells:
            if bell.address == address and bell.peer is self and not bell.gone:
                bell.check_space(frame)
                bell.way_in.append(frame)

    def receive_from(self) -> tuple[bytes, bytes] | None:
        """As of the real one."""
        frame: tuple[bytes, bytes] | None = self._receive()
        return frame

    def mind_descriptors(self) -> None:
        """There is no limit of descriptors."""

    def close(self) -> None:
        """As of the real one."""
        super().close()
        if self.world.bound is self:
            self.world.bound = None


class Nudge:
    """An eventfd."""

    def __init__(self) -> None:
        self.signaled = False
        self.world = world()

    def fileno(self) -> Nudge:
        """Itself."""
        return self

    def set(self) -> None:
        """As of the real one."""
        self.world.step()
        self.signaled = True

    def clear(self) -> None:
        """As of the real one."""
        self.world.step()
        self.signaled = False

    def close(self) -> None:
        """As of the real one."""


class Lock:
    """A ``threading.Lock``. Each process has but one thread; dropping a lock is a fence where the model says so."""

    def __init__(self) -> None:
        self._world = world()
        self._taken = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of the real one."""
        if self._taken:
            if blocking:
                raise Broken("a thread waits for a lock that it holds")
            return False
        self._taken = True
        return True

    def release(self) -> None:
        """As of the real one."""
        current = self._world.current
        if current is not None and current.buffer and not self._world.weak:
            current.flush()
        self._taken = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class Segment:
    """Stands for ``shmq.Segment``; the lock is held by the object, as by its descriptor."""

    def __init__(self, shared: Shared) -> None:
        self._world = world()
        process = self._world.process()
        self.name = shared.name
        self.shared = shared
        self.size = len(shared.raw)
        self.memory = Memory(self._world, process, shared)
        self.words = Words(self._world, process, shared)
        self._process = process
        self._is_open = True

    @classmethod
    def create(cls, name: str, payload_bytes: int, *, magic: int = layout.RING_MAGIC, ring_id: bytes = b"") -> Segment:
        """As of the real one."""
        machine = world()
        machine.step()
        if name in machine.segments:
            raise SegmentExistsError(name)
        shared = machine.add_segment(name, layout.HEADER_BYTES + payload_bytes)
        words = shared.words
        words[layout.MAGIC] = magic
        words[layout.RING_SIZE] = payload_bytes
        shared.raw[layout.RING_ID_BYTE : layout.RING_ID_BYTE + 16] = ring_id
        segment = cls(shared)
        shared.owner = segment
        return segment

    @classmethod
    def attach(cls, name: str, *, magic: int = layout.RING_MAGIC) -> Segment:
        """As of the real one."""
        machine = world()
        machine.step()
        shared = machine.segments.get(name)
        if shared is None:
            raise SegmentMissingError(f"there is no segment {name}")
        if shared.words[layout.MAGIC] == layout.TOPIC_MAGIC != magic:
            raise ForeignSegmentError(f"segment {name} is a topic's")
        if shared.words[layout.MAGIC] != magic:
            raise Broken(f"segment {name} was attached as another kind")
        return cls(shared)

    @property
    def ring_id(self) -> bytes:
        """As of the real one."""
        return bytes(self.shared.raw[layout.RING_ID_BYTE : layout.RING_ID_BYTE + 16])

    @property
    def payload_bytes(self) -> int:
        """As of the real one."""
        return self.shared.words[layout.RING_SIZE]

    @property
    def process(self) -> Process:
        """Who has it mapped."""
        return self._process

    @property
    def is_open(self) -> bool:
        """Whether it has its descriptor, and so its locks."""
        return self._is_open

    def claim(self, slot: int = 0) -> bool:
        """As of the real one."""
        return self._world.claim(self, slot)

    def unclaim(self, slot: int) -> None:
        """As of the real one."""
        self._world.unclaim(self, slot)

    def has_readers(self) -> bool:
        """As of the real one."""
        return self._world.has_readers(self)

    def adopt(self) -> bool:
        """As of the real one."""
        self._world.step()
        if self._is_open and self.shared.owner in (None, self):
            self.shared.owner = self
            # Who gets a lock of the kernel's sees all that was stored by whoever had it.
            self._process.fence()
            return True
        return False

    def is_linked(self) -> bool:
        """As of the real one."""
        self._world.step()
        return self._is_open and self.shared.linked

    def close(self) -> None:
        """As of the real one."""
        if not self.memory.closed:
            if self._world.has_views(self):
                raise ViewsHeldError(f"segment {self.name} can't be unmapped")
            self.retire()

    def retire(self) -> None:
        """As of the real one."""
        self._world.step()
        self.drop_lock()
        self.memory.close()
        self.words.close()

    def drop_lock(self) -> None:
        """As of the real one."""
        self._world.unclaim_all(self)
        self._is_open = False
        if self.shared.owner is self:
            self.shared.owner = None

    def abandon(self) -> None:
        """As of the real one."""
        self.drop_lock()


class QueueLock:
    """Stands for ``fmq.paths.QueueLock``."""

    def __init__(self, path: object) -> None:
        self._world = world()

    def acquire(self) -> None:
        """As of the real one."""
        self._world.step()
        if self._world.lock_holder is not None:
            raise Broken("two consumers of one queue")
        self._world.lock_holder = self._world.process()

    def release(self) -> None:
        """As of the real one."""
        self._world.step()
        self._world.lock_holder = None


class Time:
    """Stands for the module ``time``. To ask for the time takes time, so that who waits for it gets there."""

    def monotonic(self) -> float:
        """As of the real one."""
        return self.monotonic_ns() / 1e9

    def monotonic_ns(self) -> int:
        """As of the real one."""
        machine = world()
        machine.step()
        machine.now += 5 * _TICK_NS
        return machine.now

    def time(self) -> float:
        """As of the real one."""
        return self.time_ns() / 1e9

    def time_ns(self) -> int:
        """As of the real one."""
        machine = world()
        machine.now += _TICK_NS
        return machine.now


@dataclass(slots=True)
class Plan:
    """What is to happen in a schedule, besides the programs."""

    quanta: tuple[int, ...]
    """How many steps a process may take at once; drawn from these."""
    unrest: float
    """How often something happens between two such turns: a store becomes visible, a frame arrives."""
    kills: list[tuple[int, bool]] = field(default_factory=list)
    """(after how many steps, whether the consumer or else a producer)"""
    lose: float = 0.0
    """How often a frame is dropped."""
    double: float = 0.0
    stop: float = 0.0
    """How often a process is stopped for a while."""
    ambush: float = 0.0
    """See ``Clock``."""
    freeze: float = 0.0
    """How often it is stopped when some of its stores are visible and others are not, and stay so."""
    last_frames_of_the_dead: bool = False
    """Whether frames that nobody received yet wait for the next consumer."""


class World(Clock):
    """One machine with one queue, for the length of a schedule."""

    def __init__(self, rng: random.Random, weak: bool, plan: Plan) -> None:
        super().__init__(rng, weak)
        self.rng = rng
        self.plan = plan
        self.ambush = plan.ambush
        self.now = 10**18
        self.steps = 0
        self.kills = 0
        self.lost = 0
        self.faulty = bool(plan.lose)
        """Whether the re-check is in force: from the first fault on."""
        self.killing = False
        self.current: Process | None = None
        self.processes: list[Process] = []
        self.segments: dict[str, Shared] = {}
        self.all_segments: list[Shared] = []
        self.producer_bells: list[ProducerBell] = []
        self.bound: ConsumerBell | None = None
        self.bells_bound = 0
        self.lock_holder: Process | None = None
        self.failure: BaseException | None = None
        self.started: deque[tuple[int, Process]] = deque()
        """Processes that start later: (turn, process)."""
        self.on_kill: Callable[[Process], None] = _nothing
        self.has_work: Callable[[], str] = str
        """What a consumer that sleeps ought to do; empty if nothing."""
        self.idle_ns = _IDLE_NS
        self._hub = getcurrent()
        self._turns = 0
        self._alone_since = 0
        self._favourite = 0

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A step that is no load or store."""
        self.left -= 1
        if self.left < 0:
            self.pause()

    def pause(self) -> None:
        """Let the scheduler choose who goes on."""
        if self.killing:
            raise Killed
        if self.current is not None:
            self._hub.switch()

    def lie_in_wait(self) -> None:
        """See ``Clock``."""
        process = self.current
        if process is not None and not self.killing:
            for _ in range(int(self.random() * 4)):
                if process.buffer:
                    process.show_one()
            process.stopped = self._turns + int(self.random() * self.random() * 400)
            self.left = 0

    def process(self) -> Process:
        """The process that runs."""
        assert self.current is not None
        return self.current

    def body(self, process: Process, program: Callable[[Process], None]) -> Callable[[], None]:
        """What the process's greenlet runs."""

        def run() -> None:
            try:
                program(process)
            except Killed:
                pass
            except BaseException as error:
                self.fail(error)
            process.over = True

        return run

    def fail(self, error: BaseException) -> None:
        """Remember the first thing that went wrong."""
        if self.failure is None and not self.killing:
            self.failure = error

    def wait_readable(self, descriptors: Sequence[Bell | Nudge], timeout: float) -> None:
        """Stands for ``fmq.doorbell.wait_readable``."""
        process = self.process()
        process.waits = True
        process.descriptors = descriptors
        process.deadline = math.inf if timeout >= RECHECK else self.now + max(0.0, timeout) * 1e9
        if timeout >= RECHECK and (self.faulty or self.must_recheck(process)):
            process.deadline = self.now + RECHECK_S * 1e9
        self.say("wait", "")
        self._hub.switch()

    def must_recheck(self, process: Process) -> bool:
        """Whether a process that begins to wait can't be woken, by nobody's fault."""
        return False

    def sleep(self, seconds: float) -> None:
        """Let the running process do nothing for a while."""
        process = self.process()
        process.waits = True
        process.descriptors = ()
        process.deadline = self.now + seconds * 1e9
        self._hub.switch()

    # -- the scheduler ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all processes to their ends. What goes wrong is raised."""
        random_ = self.random
        plan = self.plan
        quanta = plan.quanta
        try:
            while self.failure is None:
                self._turns += 1
                self.now += _TICK_NS
                if self._turns > _MAX_TURNS:
                    raise Broken("the processes keep each other busy for ever")
                while self.started and self.started[0][0] <= self._turns:
                    self._start()
                if plan.kills and self.steps >= plan.kills[0][0]:
                    self._kill_one(plan.kills.pop(0)[1])
                if random_() < plan.unrest:
                    self._unrest()
                ready = [process for process in self.processes if self._is_ready(process)]
                if not ready:
                    if self._advance():
                        continue
                    break
                if random_() < 0.03:
                    self._favourite = int(random_() * 8)
                process = ready[self._favourite % len(ready) if random_() < 0.6 else int(random_() * len(ready))]
                self._resume(process, quanta[int(random_() * len(quanta))])
            if self.failure is not None:
                raise self.failure
        finally:
            for process in self.processes:
                self._take_down(process)
            self.current = None

    def _resume(self, process: Process, steps: int, error: type[BaseException] | None = None) -> None:
        self.left = steps
        self.current = process
        if error is None:
            process.greenlet.switch()
        else:
            process.greenlet.throw(error)
        self.current = None
        self.steps += steps - max(self.left, 0) + 1
        if process.over:
            self._alone_since = self.now
            process.flush()
            self.processes.remove(process)

    def _is_ready(self, process: Process) -> bool:
        if process.stopped > self._turns:
            return False
        if process.waits:
            if process.deadline > self.now and not any(descriptor.signaled for descriptor in process.descriptors):
                return False
            process.waits = False
        return True

    def start_later(self, process: Process, turns: int) -> None:
        """Let a process begin after so many turns of the scheduler."""
        self.started.append((self._turns + turns, process))
        self.started = deque(sorted(self.started, key=lambda start: start[0]))

    def _start(self) -> None:
        self._alone_since = self.now
        process = self.started.popleft()[1]
        process.floor = self.visible
        self.processes.append(process)

    def _unrest(self) -> None:
        random_ = self.random
        plan = self.plan
        if random_() < plan.stop and self.processes:
            self.processes[int(random_() * len(self.processes))].stopped = self._turns + int(random_() * 300)
        for process in self.processes:
            if process.buffer and process.stopped <= self._turns and random_() < 0.6:
                process.show_one()
                if random_() < plan.freeze:
                    # Others have time to look at what is half done.
                    process.stopped = self._turns + int(random_() * 100)
        for bell in self.producer_bells:
            if (bell.way_out or bell.way_in) and random_() < 0.4:
                self._deliver(bell)

    def _deliver(self, bell: ProducerBell) -> bool:
        done = False
        if bell.way_out and self.bound is not None:
            if bell.peer is not self.bound:
                bell.peer = self.bound
                bell.address = b"%d.%d" % (bell.number, self.bound.number)
                bell.way_in.clear()
            frame = bell.way_out.popleft()
            for _ in range(self._copies()):
                self.bound.arrive((bell.address, frame))
            done = True
        if bell.way_in:
            frame = bell.way_in.popleft()
            for _ in range(self._copies()):
                bell.arrive(frame)
            done = True
        return done

    def _copies(self) -> int:
        plan = self.plan
        if plan.lose and self.random() < plan.lose:
            self.lost += 1
            if self.trace is not None:
                self.trace.append("            a frame is lost")
            return 0
        return 2 if plan.double and self.random() < plan.double else 1

    def _advance(self) -> bool:
        """Nobody can run: let something happen that makes somebody. False if all is over."""
        for process in self.processes:
            process.flush()
        delivered = [self._deliver(bell) for bell in self.producer_bells]
        if any(delivered):
            return True
        stopped = [process.stopped for process in self.processes if process.stopped > self._turns]
        if stopped:
            self._turns = min(stopped)
            return True
        if self.started:
            self._start()
            return True
        waiting = [process for process in self.processes if process.deadline < math.inf]
        consumers = [process for process in self.processes if process.is_consumer]
        if consumers and self._listen(consumers) and not self.faulty and (work := self.has_work()):
            raise Broken(f"a wake-up was lost: everybody sleeps, and {work}")
        alone = bool(consumers) and len(self.processes) == len(consumers)
        if alone and (not waiting or self.now - self._alone_since > self.idle_ns):
            consumers[0].waits = False
            self._resume(consumers[0], 100, EndOfSchedule)
            return True
        if waiting:
            self.now = int(min(process.deadline for process in waiting)) + 1
            return True
        if self.processes:
            names = ", ".join(process.name for process in self.processes)
            raise Broken(f"a wake-up was lost: {names} would sleep for ever")
        return False

    def _listen(self, consumers: list[Process]) -> bool:
        """Whether those who ought to do something would hear of it."""
        return bool(consumers[0].descriptors)

    def end(self) -> None:
        """Let go of all processes, so that nothing of them is left for the garbage collector."""
        self.failure = None
        self.processes.clear()
        self.started.clear()
        self.on_kill = _nothing
        self.has_work = str

    # -- death --------------------------------------------------------------------------------------------------------

    def force_recheck(self) -> None:
        """From now on who is not woken looks by itself."""
        self.faulty = True
        for other in self.processes:
            if other.waits and other.descriptors and other.deadline == math.inf:
                other.deadline = self.now + RECHECK_S * 1e9

    def _kill_one(self, is_consumer: bool) -> None:
        victims = [process for process in self.processes if process.is_consumer == is_consumer]
        if victims:
            self.kill(victims[int(self.random() * len(victims))])

    def kill(self, process: Process) -> None:
        """Let a process die between two of its steps. Its stores become visible before its locks are dropped."""
        self.kills += 1
        self._alone_since = self.now
        self.force_recheck()
        if self.trace is not None:
            self.trace.append(f"{process.name:10}  dies")
        process.flush()
        bell = vars(process.front).get("_bell") if process.front is not None else None
        self._take_down(process)
        self.processes.remove(process)
        if self.lock_holder is process:
            self.lock_holder = None
        for shared in self.all_segments:
            if isinstance(shared.owner, Segment) and shared.owner.process is process:
                shared.owner = None
        self._cut_off(process, bell)
        self.on_kill(process)

    def _cut_off(self, process: Process, bell: Any) -> None:
        """What becomes of the frames, and of the locks of reader slots, of a process that died."""
        if process.is_consumer:
            self.bound = None
            for bell in self.producer_bells:
                bell.way_in.clear()
                if not self.plan.last_frames_of_the_dead:
                    bell.way_out.clear()
        elif bell is not None:
            bell.gone = True

    def _take_down(self, process: Process) -> None:
        if process.greenlet:
            self.killing = True
            self.left = -1
            self.current = process
            _let_go(process.front)
            process.greenlet.throw(Killed)
            self.killing = False
            self.current = None
        process.over = True
        if process.front is not None:
            vars(process.front).clear()
            process.front = None

    # -- the kernel ---------------------------------------------------------------------------------------------------

    def add_segment(self, name: str, nbytes: int) -> Shared:
        """Make a segment."""
        shared = Shared(name, len(self.all_segments), nbytes)
        shared.address = _address(np.frombuffer(shared.raw, np.uint8))
        self.segments[name] = shared
        self.all_segments.append(shared)
        return shared

    def unlink(self, name: str) -> bool:
        """Stands for ``shmq.segment.unlink``."""
        self.step()
        shared = self.segments.pop(name, None)
        if shared is None:
            return False
        self.say("unlink", name)
        shared.linked = False
        return True

    def names(self, prefix: str) -> list[str]:
        """Stands for ``shmq.segment.names``."""
        self.step()
        return sorted(name for name in self.segments if name.startswith(prefix))

    def is_owned(self, name: str) -> bool:
        """Stands for ``shmq.segment.is_owned``."""
        self.step()
        shared = self.segments.get(name)
        if shared is None:
            raise SegmentMissingError(f"there is no segment {name}")
        return shared.owner is not None

    def size_of(self, name: str) -> int:
        """Stands for ``shmq.segment.size_of``."""
        shared = self.segments.get(name)
        return 0 if shared is None else len(shared.raw)

    def consumer_is_alive(self, path: object) -> bool:
        """Stands for ``fmq.paths.consumer_is_alive``."""
        self.step()
        return self.lock_holder is not None

    def claim(self, segment: Segment, slot: int) -> bool:
        """See ``Segment``. The queue's lock sees to it that nobody else is there."""
        return segment.is_open

    def unclaim(self, segment: Segment, slot: int) -> None:
        """See ``Segment``."""

    def unclaim_all(self, segment: Segment) -> None:
        """Drop the reader slots of a descriptor that is closed."""

    def has_readers(self, segment: Segment) -> bool:
        """See ``Segment``."""
        raise NotImplementedError

    def has_views(self, segment: Segment) -> bool:
        """Whether arrays look into a segment that its process wants to unmap; told by who hands them out."""
        return False

    # -- arrays over segments -----------------------------------------------------------------------------------------

    def _find(self, array: NDArray[Any]) -> tuple[Shared, int]:
        address = _address(array)
        for shared in self.all_segments:
            if shared.address <= address < shared.address + len(shared.raw):
                return shared, address - shared.address
        raise Broken("an array lies in no segment")

    def read(self, array: NDArray[Any]) -> bytes:
        """The bytes of an array in shared memory, as the running process loads them."""
        if array.nbytes == 0:
            return b""
        shared, at = self._find(array)
        return Memory(self, self.process(), shared).load_bytes(at, at + array.nbytes)

    def write(self, array: NDArray[Any], data: bytes) -> None:
        """Store into an array in shared memory."""
        if data:
            shared, at = self._find(array)
            Memory(self, self.process(), shared).store_bytes(at, data)

    # -- what is told -------------------------------------------------------------------------------------------------

    def say(self, what: str, value: Any) -> None:
        """Add something other than a load or store to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.current.name if self.current else '':10}  {what:6}{value}")

    def note(self, what: str, shared: Shared, at: int, value: Any) -> None:
        """Add a load or store to the trace."""
        if self.trace is not None:
            name = self.current.name if self.current else ""
            self.trace.append(f"{name:10}  {what:6}{place_of(shared, at)} {_shown(value)}")


_NAMED = {"HEAD", "NEXT_SEQUENCE", "TAIL", "WANTED", "EPOCH", "CONSUMER_PID", "ASLEEP", "SPILLS", "SPILLED_BYTES"} | {
    "STALLS", "HIGH_WATER", "TURNS", "FOLDS", "DOORBELLS", "REDELIVERED_COUNT", "EXPIRED_COUNT", "SET_ASIDE_COUNT"
}  # fmt: skip
_WORDS = {value: name.lower().replace("_", " ") for name, value in vars(layout).items() if name in _NAMED}
for _name in ("JOINED", "SLOT_ASLEEP", "SKIP_TO", "CLAIM", "SLOT_PID"):
    _WORDS |= {getattr(layout, _name) + slot: f"{_name.lower()} {slot}" for slot in range(layout.SLOTS)}
_FIELDS = ("position", "descriptor", "sequence", "body", "timestamp", "expires", "extra", "deliveries", "release")


def place_of(shared: Shared, at: int) -> str:
    """The name of a place in a segment."""
    where = shared.name.rpartition(":")[2][:4]
    if at < layout.HEADER_BYTES:
        return f"{where} {_WORDS.get(at // WORD, f'header byte {at}')}"
    offset = at - layout.HEADER_BYTES
    record = at // layout.ALIGN * layout.ALIGN
    for start in (record, record - layout.ALIGN):
        if start in shared.records and at - start < len(_FIELDS) * WORD:
            return f"{where} record {start - layout.HEADER_BYTES} {_FIELDS[(at - start) // WORD]}"
    return f"{where} byte {offset}"


def _shown(value: Any) -> str:
    if not isinstance(value, bytes):
        return str(value)
    if len(value) in (layout.RECORD.size, layout.NEW_RECORD.size):
        words = struct.unpack(f"@{len(value) // WORD}Q", value)
        return ", ".join(f"{name} {word}" for name, word in zip(_FIELDS, words, strict=False))
    return f"{len(value)} bytes {value[:12].hex()}"


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _nothing(*_: object) -> None:
    """Nobody wants to know."""


def _let_go(front: Any) -> None:
    """What a dead consumer's messages do in their finalizers must not reach the ring."""
    protocol = vars(front).get("_protocol") if front is not None else None
    if hasattr(protocol, "abandon"):
        protocol.abandon()


_worlds: list[World] = []


def world() -> World:
    """The world that runs."""
    return _worlds[-1]


def enter(machine: World | None) -> None:
    """Make this the world that runs."""
    _worlds[:] = [] if machine is None else [machine]
