"""What the simulated publishers and readers of a topic do: what producers and consumers do, and come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from fmq import Consumer, Producer, Publisher, QueueTimeoutError, ReaderDroppedError, Subscriber
from tests.simulation.oracle import Life, Ring
from tests.simulation.patches import QUEUE
from tests.simulation.programs import ConsumerProgram, ProducerProgram, Traffic
from tests.simulation.topic_oracle import TopicLife, TopicOracle
from tests.simulation.topic_world import TopicWorld
from tests.simulation.world import Broken, EndOfSchedule, Process

_LOOKS = 3000


@dataclass(slots=True)
class TopicTraffic(Traffic):
    """``policy`` is the publisher's."""

    policy: str = "block"
    meet: float = 0.0
    """How often a publisher waits for a reader before it puts."""
    leave: float = 0.0
    """How often a reader leaves, in order, instead of doing something else."""


class PublisherProgram(ProducerProgram):
    """Puts messages until they are all put, sees that all of the ring is free again, and closes."""

    _traffic: TopicTraffic

    def __init__(self, world: TopicWorld, oracle: TopicOracle, traffic: TopicTraffic, number: int) -> None:
        super().__init__(world, oracle, traffic, number)
        self._topic_world = world
        self._topic_oracle = oracle

    def _open(self) -> Producer:
        traffic = self._traffic
        return Publisher(
            QUEUE,
            ring_size=traffic.ring_size,
            spill_limit=4 * traffic.ring_size,
            policy=traffic.policy,
            patience=0 if traffic.policy == "block" else self._topic_world.patience,
        )

    def _put_one(self, producer: Producer, ring: Ring) -> None:
        world = self._topic_world
        if isinstance(producer, Publisher) and world.random() < self._traffic.meet:
            with contextlib.suppress(QueueTimeoutError):
                # Without end only where readers stay.
                stay = not (world.faulty or world.plan.kills or self._traffic.leave)
                producer.wait_for_readers(1, timeout=None if stay else world.random() * 0.01)
        self._topic_oracle.begin_put()
        super()._put_one(producer, ring)

    def _flush(self, producer: Producer) -> None:
        producer.flush(timeout=None)

    def _end(self, producer: Producer) -> None:
        world, traffic = self._world, self._traffic
        if traffic.lose_interest:
            world.force_recheck()
            super()._end(producer)
            return
        producer.flush(timeout=None)
        writer = producer._writer
        for _ in range(_LOOKS):
            writer.free_dead()  # type: ignore[attr-defined]
            writer.reclaim()
            if not writer._chain:
                break
            world.sleep(0.001)
        else:
            raise Broken(f"{len(writer._chain)} records of publisher {self._number} are never free again")
        producer.close(timeout=None)


class SubscriberProgram(ConsumerProgram):
    """Gets messages until it likes to leave, or all is over. ``left`` is told when it has left."""

    _traffic: TopicTraffic

    def __init__(self, world: TopicWorld, oracle: TopicOracle, traffic: TopicTraffic, left: Callable[[], None]) -> None:
        super().__init__(world, oracle, traffic)
        self._topic_oracle = oracle
        self._topic_life = TopicLife(len(oracle.lives) - 1)
        self._life = oracle.lives[-1] = self._topic_life
        self._left = left
        self._leaves = False

    def __call__(self, process: Process) -> None:
        """The life of one reader."""
        self._topic_oracle.life_of[process] = self._topic_life
        super().__call__(process)
        if self._leaves:
            self._left()

    def _open(self) -> Consumer:
        subscriber = Subscriber(QUEUE, warn_held=None)
        self._topic_oracle.has_joined(self._topic_life)
        return subscriber

    def _act(self, consumer: Consumer, life: Life) -> None:
        if not self._world.killing and self._world.random() < self._traffic.leave:
            self._leaves = True
            raise EndOfSchedule
        super()._act(consumer, life)

    def _get(self, consumer: Consumer, life: Life) -> None:
        try:
            super()._get(consumer, life)
        except ReaderDroppedError:
            self._topic_oracle.drop_was_told(self._topic_life)

    def _end(self, consumer: Consumer) -> None:
        self._topic_life.ready = False
        if not self._leaves and (missing := self._topic_oracle.missing(self._topic_life)):
            raise Broken(missing)
        if self._leaves and self._world.random() < 0.5:
            # What has no views need not be given back.
            self._held = [held for held in self._held if held.views]
        super()._end(consumer)
