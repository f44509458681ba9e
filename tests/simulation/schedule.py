"""One schedule: made of a seed, run, and judged."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmq import layout
from tests.simulation.oracle import Oracle
from tests.simulation.patches import configure
from tests.simulation.programs import ConsumerProgram, ProducerProgram, Traffic
from tests.simulation.world import Broken, Plan, Process, World, enter

TRACED = 40
"""How many of its last steps a failure is shown with."""

QUANTA = (
    (0, 0, 1, 1, 2, 3, 5, 8),
    (0, 1, 2, 5, 10, 20, 40, 80),
    (3, 10, 30, 60, 100, 200),
    (0, 0, 0, 1, 60, 150, 400),
)


@dataclass(slots=True)
class Outcome:
    """What happened in one schedule, or in many."""

    schedules: int = 0
    weak: int = 0
    steps: int = 0
    messages: int = 0
    redelivered: int = 0
    kills: int = 0
    lost: int = 0
    turns: int = 0
    folds: int = 0
    spills: int = 0
    readers: int = 0
    skips: int = 0
    drops: int = 0

    def add(self, other: Outcome) -> None:
        """Count another outcome in."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Failure(Exception):  # noqa: N818  (it is the outcome of a schedule)
    """A schedule broke a promise. ``trace``: its last steps, if it was run with a trace."""

    def __init__(self, seed: int, focus: str, cause: str, where: str, trace: list[str], option: str = "") -> None:
        super().__init__(seed, focus, cause, where, trace, option)
        self.option = option
        self.seed = seed
        self.focus = focus
        self.cause = cause
        self.where = where
        self.trace = trace

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.cause}",
            f"replay with: python -m tests.simulation --seed {self.seed} --focus {self.focus} --replay{self.option}",
            *self.trace,
            *self.where.splitlines(),
        ]
        return "\n".join(lines)


def is_weak(seed: int) -> bool:
    """Whether a seed's schedule runs in the weak memory model."""
    return seed % 3 == 2


FOCUSES: dict[str, dict[str, Any]] = {
    "all": {},
    "wakes": {
        "deadly": False,
        "losing": False,
        "stop": 0.0,
        "ambush": 0.04,
        "flush": 0.9,
        "hold": 1,
        "naps": 0.0,
        "large": 0.3,
    },
    "small": {
        "deadly": False,
        "losing": False,
        "stop": 0.0,
        "ambush": 0.06,
        "flush": 0.0,
        "hold": 1,
        "naps": 0.4,
        "large": 0.0,
        "producers": 1,
    },
    "folds": {
        "ring_size": 4096,
        "lap": 1024,
        "losing": False,
        "ambush": 0.05,
        "hold": 8,
        "look": 0.5,
        "flush": 0.0,
        "large": 0.3,
        "naps": 0.0,
    },
    "lag": {
        "ring_size": 4096,
        "lap": 1024,
        "losing": False,
        "deadly": False,
        "hold": 1,
        "flush": 0.0,
        "naps": 0.0,
        "large": 0.6,
        "ambush": 0.06,
        "give_up": 0.7,
        "messages": 20,
        "producers": 1,
        "quanta": (0, 0, 0, 1, 60, 150, 400),
    },
}
"""What is fixed in schedules that look at one thing more closely."""


def focus_of(seed: int) -> str:
    """Each seed has its focus; most have none."""
    return ("all", "all", "wakes", "all", "folds", "all", "small")[seed % 7]


def run(seed: int, *, focus: str | None = None, traced: bool = False) -> Outcome:
    """Run the schedule of a seed; the patches have to be in force. Raises Failure."""
    focus = focus or focus_of(seed)
    fixed = FOCUSES[focus]
    rng = random.Random(seed)
    weak = is_weak(seed)

    def choose(name: str, options: tuple[Any, ...]) -> Any:
        chosen = rng.choice(options)
        return fixed.get(name, chosen)

    ring_size = choose("ring_size", (4096, 6144, 8192, 16384))
    lap = choose("lap", (1024, 2048, ring_size))
    configure(weak=weak, lap=lap, tidy_seconds=choose("tidy", (1.0, 0.001, 0.0001)))
    deadly = choose("deadly", (False, True))
    losing = choose("losing", (False, False, False, True))
    plan = Plan(
        quanta=choose("quanta", QUANTA),
        unrest=choose("unrest", (0.1, 0.3, 0.8)),
        stop=choose("stop", (0.0, 0.002, 0.05)),
        freeze=choose("freeze", (0.0, 0.1, 0.5)),
        ambush=choose("ambush", (0.0, 0.01, 0.05)),
        double=choose("double", (0.0, 0.0, 0.2)),
        lose=choose("lose", (0.1, 0.5, 1.0)) if losing else 0.0,
        last_frames_of_the_dead=rng.random() < 0.5,
    )
    if deadly:
        reach = choose("reach", (300, 1000, 3000))
        plan.kills = sorted((rng.randrange(reach), rng.random() < 0.6) for _ in range(rng.randint(1, 4)))
    producers = choose("producers", (1, 1, 2))
    traffic = Traffic(
        ring_size=ring_size,
        messages=choose("messages", (4, 8, 12, 20)) // producers,
        patient=rng.random() < 0.8,
        large=choose("large", (0.0, 0.3, 0.7)),
        ttl=choose("ttl", (0.0, 0.0, 0.0, 0.3)),
        give_up=choose("give_up", (0.15,)),
        let_go=choose("let_go", (0.05, 0.3)),
        hold=choose("hold", (1, 3, 8)),
        naps=choose("naps", (0.0, 0.05, 0.3)),
        flush=choose("flush", (0.0, 0.0, 0.3, 0.9)),
        look=choose("look", (0.0, 0.0, 0.3)),
        lose_interest=(deadly or losing) and rng.random() < 0.5,
    )
    world = World(rng, weak, plan)
    if traced:
        world.trace = []
    oracle = Oracle()
    judge(world, seed, focus, _Cast(world, oracle, traffic, producers).start, oracle.check_all_done)
    outcome = Outcome(1, int(weak), world.steps, oracle.delivered, oracle.redelivered, world.kills, world.lost)
    count_rings(world, layout.RING_MAGIC, outcome)
    return outcome


def judge(
    world: World, seed: int, focus: str, start: Callable[[], None], check: Callable[[int], None], option: str = ""
) -> None:
    """Run a world in which ``start`` lets all begin, and judge with ``check`` what has become of it. Raises Failure."""
    failure = None
    enter(world)
    try:
        start()
        world.run()
        check(world.now)
        if world.segments:
            raise Broken(f"left behind: {', '.join(world.segments)}")
    except Exception as error:
        # Not raised from here: it would keep the frames, and all that lives in them.
        where = "".join(traceback.format_exception(error)[-4:])
        trace = (world.trace or [])[-TRACED:]
        failure = Failure(seed, focus, f"{type(error).__name__}: {error}", where, trace, option)
    finally:
        world.end()
        enter(None)
    if failure is not None:
        raise failure


def count_rings(world: World, magic: int, outcome: Outcome) -> None:
    """Count in what the rings of a kind went through."""
    for shared in world.all_segments:
        if shared.words[layout.MAGIC] == magic:
            outcome.turns += shared.words[layout.TURNS]
            outcome.folds += shared.words[layout.FOLDS]
            outcome.spills += shared.words[layout.SPILLS]


class _Cast:
    """Who takes part, and who comes after the dead."""

    def __init__(self, world: World, oracle: Oracle, traffic: Traffic, producers: int) -> None:
        self._world = world
        self._oracle = oracle
        self._traffic = traffic
        self._producers = producers
        self._lives: dict[str, Any] = {}

    def start(self) -> None:
        """Let all begin, in any order."""
        world = self._world
        world.on_kill = self._replace
        world.has_work = self._has_work
        cast = [self._producer(number) for number in range(self._producers)]
        self._producers = len(cast)
        cast.insert(int(world.random() * (len(cast) + 1)), self._consumer())
        for index, process in enumerate(cast):
            if world.random() < 0.7:
                world.processes.append(process)
            else:
                world.start_later(process, 1 + int(world.random() * 60 * (index + 1)))

    def _producer(self, number: int) -> Process:
        program = ProducerProgram(self._world, self._oracle, self._traffic, number)
        return Process(self._world, f"producer{number}", program, is_consumer=False)

    def _consumer(self) -> Process:
        program = ConsumerProgram(self._world, self._oracle, self._traffic)
        return Process(self._world, "consumer", program, is_consumer=True)

    def _replace(self, dead: Process) -> None:
        world = self._world
        if dead.is_consumer:
            self._oracle.lives[-1].over = True
            world.start_later(self._consumer(), int(world.random() * world.random() * 200))
        elif world.random() < 0.3:
            world.start_later(self._producer(self._producers), int(world.random() * 100))
            self._producers += 1

    def _has_work(self) -> str:
        for ring in self._oracle.rings.values():
            for put in ring.puts:
                if put.returned and not (put.lives or put.ttl):
                    return f"message {put.number} of producer {ring.producer} was not taken"
        return ""
