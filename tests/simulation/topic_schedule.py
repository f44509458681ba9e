"""One schedule of a topic: made of a seed, run, and judged."""

from __future__ import annotations

import math
import random
from typing import Any

from shmq import collect, layout
from tests.simulation.patches import configure
from tests.simulation.schedule import QUANTA, Outcome, count_rings, is_weak, judge
from tests.simulation.topic_oracle import TopicLife, TopicOracle
from tests.simulation.topic_programs import PublisherProgram, SubscriberProgram, TopicTraffic
from tests.simulation.topic_world import TopicWorld
from tests.simulation.world import Plan, Process

OPTION = " --topic"
_MOST_READERS = 12
"""How many may come in a schedule, one after another."""

FOCUSES: dict[str, dict[str, Any]] = {
    "all": {},
    "wakes": {
        "deadly": False,
        "losing": False,
        "stop": 0.0,
        "ambush": 0.04,
        "hold": 1,
        "naps": 0.0,
        "policy": "block",
        "leave": 0.0,
        "flush": 0.3,
    },
    "joins": {
        "deadly": True,
        "losing": False,
        "reach": 1000,
        "kills": 8,
        "leave": 0.15,
        "ambush": 0.05,
        "readers": 3,
        "hold": 3,
        "lose_interest": 0.0,
    },
    "skips": {
        "losing": False,
        "ring_size": 4096,
        "lap": 1024,
        "policy": "skip",
        "patience": 0.0,
        "ambush": 0.06,
        "hold": 3,
        "messages": 20,
        "ttl": 0.0,
        "lose_interest": 0.0,
    },
    "drops": {
        "losing": False,
        "ring_size": 4096,
        "lap": 1024,
        "policy": "drop",
        "patience": 0.0,
        "ambush": 0.06,
        "hold": 3,
        "messages": 20,
        "leave": 0.05,
        "lose_interest": 0.0,
    },
}
"""What is fixed in schedules that look at one thing more closely."""


def focus_of(seed: int) -> str:
    """Each seed has its focus; half of them have none."""
    return ("all", "joins", "all", "skips", "all", "drops", "wakes", "all")[seed % 8]


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
    configure(weak=weak, lap=lap, tidy_seconds=choose("tidy", (0.1, 0.001, 0.0001)))
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
        count = choose("kills", (1, 2, 4))
        plan.kills = sorted((rng.randrange(reach), rng.random() < 0.8) for _ in range(count))
    policy = choose("policy", ("block", "skip", "drop"))
    patience = choose("patience", (0.0, 0.0, 0.0005, 0.1))
    readers = choose("readers", (1, 2, 2, 3, 4))
    traffic = TopicTraffic(
        ring_size=ring_size,
        messages=choose("messages", (4, 8, 12, 20)),
        patient=rng.random() < 0.8,
        large=choose("large", (0.0, 0.3, 0.7)),
        ttl=choose("ttl", (0.0, 0.0, 0.0, 0.3)),
        give_up=choose("give_up", (0.15,)),
        let_go=choose("let_go", (0.05, 0.3)),
        hold=choose("hold", (1, 3, 8)),
        naps=choose("naps", (0.0, 0.05, 0.3)),
        flush=choose("flush", (0.0, 0.0, 0.3)),
        look=choose("look", (0.0, 0.0, 0.3)),
        lose_interest=rng.random() < fixed.get("lose_interest", 0.3) and (deadly or losing),
        policy=policy,
        meet=choose("meet", (0.0, 0.1, 0.5)),
        leave=choose("leave", (0.0, 0.0, 0.02, 0.1)),
    )
    oracle = TopicOracle(strict=not weak)
    world = TopicWorld(rng, weak, plan, oracle, math.inf if policy == "block" else patience)
    if traced:
        world.trace = []
    cast = _Cast(world, oracle, traffic, readers, publishers=choose("publishers", (1, 1, 2)))
    judge(world, seed, focus, cast.start, cast.check, OPTION)
    outcome = Outcome(1, int(weak), world.steps, oracle.delivered, 0, world.kills, world.lost)
    outcome.readers, outcome.skips, outcome.drops = len(oracle.lives), oracle.skips, oracle.drops
    count_rings(world, layout.TOPIC_MAGIC, outcome)
    return outcome


def _sweep(process: Process) -> None:
    collect()


class _Cast:
    """Who takes part, who comes late, and who comes after those that are gone."""

    def __init__(
        self, world: TopicWorld, oracle: TopicOracle, traffic: TopicTraffic, readers: int, publishers: int
    ) -> None:
        self._world = world
        self._oracle = oracle
        self._traffic = traffic
        self._readers = readers
        self._publishers = publishers
        self._published = 0

    def start(self) -> None:
        """Let all begin, in any order."""
        world = self._world
        world.on_kill = self._replace
        world.has_work = self._has_work
        cast = [self._reader() for _ in range(self._readers)]
        cast.insert(int(world.random() * (len(cast) + 1)), self._publisher())
        for process in cast:
            if world.random() < 0.5:
                world.processes.append(process)
            else:
                world.start_later(process, 1 + int(world.random() * world.random() * 400))

    def check(self, now: int) -> None:
        """What the last ones to die left behind is there to be collected, and nothing else."""
        if self._world.kills:
            self._world.plan.kills.clear()
            self._world.processes.append(Process(self._world, "sweeper", _sweep, is_consumer=False))
            self._world.run()

    def _publisher(self) -> Process:
        program = PublisherProgram(self._world, self._oracle, self._traffic, self._published)
        self._published += 1

        def publish(process: Process) -> None:
            program(process)
            if self._published < self._publishers:
                self._world.start_later(self._publisher(), int(self._world.random() * 100))

        return Process(self._world, f"publisher{self._published - 1}", publish, is_consumer=False)

    def _reader(self) -> Process:
        program = SubscriberProgram(self._world, self._oracle, self._traffic, self._another)
        return Process(self._world, f"reader{len(self._oracle.lives) - 1}", program, is_consumer=True)

    def _another(self) -> None:
        world = self._world
        if len(self._oracle.lives) < _MOST_READERS and world.random() < 0.8:
            world.start_later(self._reader(), int(world.random() * world.random() * 200))

    def _replace(self, dead: Process) -> None:
        world = self._world
        if dead.is_consumer:
            life = self._oracle.life_of.get(dead)
            if life is not None:
                life.over, life.ready = True, False
            self._another()
        elif self._published < 3 and world.random() < 0.7:
            world.start_later(self._publisher(), int(world.random() * 100))

    def _has_work(self) -> str:
        for process in self._world.processes:
            if process.is_consumer and process.descriptors and process.deadline == math.inf:
                life: TopicLife = self._oracle.life_of[process]
                if missing := self._oracle.missing(life, asleep=True):
                    return missing
        return ""
