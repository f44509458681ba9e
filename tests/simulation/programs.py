"""What the simulated producers and consumers do: a little of everything that users do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmq import Consumer, PeerUnavailableError, Producer, QueueEmptyError, QueueFullError
from tests.simulation.oracle import Life, Oracle, Put, Ring, content
from tests.simulation.patches import QUEUE
from tests.simulation.world import Broken, EndOfSchedule, Killed, Process, World

_REFUSED = (QueueFullError, PeerUnavailableError)


@dataclass(slots=True)
class Traffic:
    """How much of what a schedule sends."""

    ring_size: int
    messages: int
    """How many each producer puts."""
    patient: bool
    """Whether a put waits as long as it takes."""
    large: float
    """How often a message has payloads outside its record."""
    ttl: float
    give_up: float
    """How often a loan is not sent."""
    let_go: float
    """How often a producer lets go of the loans that it has sent."""
    hold: int
    """How many messages the consumer holds at once, at most."""
    naps: float
    """How often either side does nothing for a while."""
    flush: float
    """How often a producer waits until all that it put is done."""
    look: float
    """How often the consumer looks through all of its rings for what was set aside."""
    lose_interest: bool
    """Whether a producer may end without waiting for its messages to be done."""


class ProducerProgram:
    """Puts messages until they are all put, and closes."""

    def __init__(self, world: World, oracle: Oracle, traffic: Traffic, number: int) -> None:
        self._world = world
        self._oracle = oracle
        self._traffic = traffic
        self._number = number
        self._loans: list[tuple[NDArray[Any], bytes]] = []
        """Arrays that were sent or given up, and are still in somebody's hands."""

    def __call__(self, process: Process) -> None:
        """The life of one producer."""
        world, traffic = self._world, self._traffic
        process.front = producer = self._open()
        producer._bell.ring = producer._writer.segment.shared  # type: ignore[attr-defined]
        ring = self._oracle.rings[producer.ring.rpartition(":")[2]] = Ring(self._number)
        for _ in range(traffic.messages):
            self._put_one(producer, ring)
            if world.random() < traffic.let_go:
                self._drop_loans()
            if world.random() < traffic.flush:
                self._flush(producer)
            if world.random() < traffic.naps:
                world.sleep(world.random() * 0.001)
        self._drop_loans()
        self._end(producer)
        vars(producer).clear()
        process.front = None

    def _open(self) -> Producer:
        return Producer(QUEUE, ring_size=self._traffic.ring_size, spill_limit=4 * self._traffic.ring_size)

    def _drop_loans(self) -> None:
        for array, part in self._loans:
            if self._world.read(array) != part:
                raise Broken("a loan was overwritten under the hands of its holder")
        self._loans.clear()

    def _flush(self, producer: Producer) -> None:
        try:
            if self._world.lock_holder is not None:
                producer.flush(timeout=None)
        except PeerUnavailableError:
            if not self._world.kills:
                raise

    def _end(self, producer: Producer) -> None:
        world, traffic = self._world, self._traffic
        if not traffic.lose_interest:
            while world.lock_holder is None:
                # Without a consumer, nobody waits for one: the ring would be left to the next.
                world.sleep(0.001)
            producer.close(timeout=None)
            return
        # From now on nobody may be left to ring for what this ring still holds.
        world.faulty = True
        if world.random() < 0.3:
            producer.give_up()
        else:
            producer.close(timeout=world.random() * 3)

    def _put_one(self, producer: Producer, ring: Ring) -> None:
        world, traffic = self._world, self._traffic
        number = len(ring.puts)
        kind = world.random()
        raw: bytes | None = None
        sizes: list[int] = []
        lend = 0
        if kind < traffic.large:
            most = traffic.ring_size // 2 - traffic.ring_size // 8 - 512
            sizes = [int(most * world.random() * world.random()) for _ in range(1 + (world.random() < 0.3))]
            lend = int(world.random() * 2.2) % (len(sizes) + 1)
            if world.random() < 0.2 and traffic.ring_size > 4096:
                sizes.append(int(world.random() * 60))
        elif kind < traffic.large + 0.2:
            sizes = [int(world.random() * 60) for _ in range(1 + (world.random() < 0.2))]
            if traffic.ring_size == 4096:
                # The record of two would be too long.
                del sizes[1:]
        else:
            most = 60 if world.random() < 0.8 else traffic.ring_size // 4
            raw = number.to_bytes(4, "little") + content(self._number, number, 0, int(world.random() * most))
        parts = [content(self._number, number, part, nbytes) for part, nbytes in enumerate(sizes)]
        put = Put(number, raw, parts)
        timeout = None
        if lend or self._loans or not traffic.patient or world.random() < 0.05:
            # A loan may be in the way of what waits for room: then waiting without end would be our own fault.
            timeout = world.random() * 0.05
        payload: Any = raw
        if raw is None:
            payload = [number]
            for index, part in enumerate(parts):
                if index < lend:
                    try:
                        array = producer.empty(len(part), timeout=timeout)
                    except _REFUSED:
                        return
                    if part:
                        world.write(array, part)
                else:
                    array = np.frombuffer(part, np.uint8)
                payload.append(array)
            if lend and world.random() < traffic.give_up:
                # Given up, perhaps not at once.
                self._loans += [
                    loan for loan in zip(payload[1 : 1 + lend], parts, strict=False) if world.random() < 0.5
                ]
                return
        ttl = None
        if world.random() < traffic.ttl:
            ttl = 1e-6 + world.random() * 0.0003
            put.ttl = True
            put.earliest_end = world.now + int(ttl * 1e9)
        ring.puts.append(put)
        try:
            sequence = producer.put(payload, timeout=timeout, ttl=ttl)
        except _REFUSED:
            put.refused = True
            return
        put.returned = True
        if ttl is not None:
            put.latest_end = world.now + int(ttl * 1e9)
        if put.sequence not in (-1, sequence):
            raise Broken(f"message {number} came as sequence {put.sequence}, and was put as {sequence}")
        put.sequence = sequence
        if lend and world.random() < 0.5:
            self._loans.append((payload[1], parts[0]))


@dataclass(eq=False, slots=True)
class Held:
    """A message in the consumer's hands; without ``message`` only views of it."""

    put: Put
    message: Any
    views: list[NDArray[Any]] = field(default_factory=list)


class ConsumerProgram:
    """Gets messages for ever, looks at them, and gives them back in every way and order there is."""

    def __init__(self, world: World, oracle: Oracle, traffic: Traffic) -> None:
        self._world = world
        self._oracle = oracle
        self._traffic = traffic
        self._held: list[Held] = []
        self._kept: list[Held] = []
        self._life = Life(len(oracle.lives))
        oracle.lives.append(self._life)

    def __call__(self, process: Process) -> None:
        """The life of one consumer."""
        life = self._life
        process.front = consumer = self._open()
        consumer._may_spin = self._world.random() < 0.3
        try:
            while True:
                self._act(consumer, life)
        except EndOfSchedule:
            life.getting = 0
        self._end(consumer)
        vars(consumer).clear()
        process.front = None

    def _open(self) -> Consumer:
        return Consumer(QUEUE, max_deliveries=None, warn_held=None)

    def _end(self, consumer: Consumer) -> None:
        while self._held:
            self._give_back(0)
        while self._kept:
            self._drop_views(0)
        if consumer._protocol._refused:
            raise Broken(f"a ring was left out: {consumer._protocol._refused}")
        consumer.close()

    def _act(self, consumer: Consumer, life: Life) -> None:
        world, traffic = self._world, self._traffic
        if world.killing:
            # It died within a finalizer, where no exception comes out.
            raise Killed
        choice = world.random()
        full = len(self._held) >= traffic.hold
        if self._held and (full or choice < 0.3):
            self._give_back(int(world.random() * len(self._held)))
        elif self._kept and choice < 0.4:
            self._drop_views(int(world.random() * len(self._kept)))
        elif self._held and choice < 0.5:
            self._check(self._held[int(world.random() * len(self._held))])
        elif choice < 0.5 + traffic.naps:
            world.sleep(world.random() * 0.001)
        elif world.random() < traffic.look:
            # As set_aside() does, and the search for what is held for long; only they would be silent about damage.
            for source in consumer._protocol._order:
                source.reader.records()
        else:
            self._get(consumer, life)

    def _get(self, consumer: Consumer, life: Life) -> None:
        world = self._world
        timeout = None
        if self._held or self._kept or world.random() < 0.1:
            timeout = world.random() * 0.0005 if world.random() < 0.7 else 0
        limit = 1 if world.random() < 0.7 else 1 + int(world.random() * self._traffic.hold)
        began = world.now
        life.getting = limit
        try:
            messages = [consumer.get(timeout=timeout)] if limit == 1 else consumer.get_many(limit, timeout=timeout)
        except QueueEmptyError:
            life.getting = 0
            if self._held:
                self._give_back(int(world.random() * len(self._held)))
            elif self._kept:
                self._drop_views(0)
            return
        life.getting = 0
        for message in messages:
            put = self._oracle.handed(life, message, began)
            views = message.payload[1:] if put.raw is None else []
            self._held.append(Held(put, message, views))
        for held in self._held[-len(messages) :]:
            self._check(held)

    def _check(self, held: Held) -> None:
        put = held.put
        if len(held.views) != len(put.parts):
            raise Broken(f"message {put.number} arrived with {len(held.views)} arrays of {len(put.parts)}")
        for view, part in zip(held.views, put.parts, strict=True):
            if self._world.read(view) != part:
                raise Broken(f"an array of message {put.number} has other content")

    def _give_back(self, index: int) -> None:
        world = self._world
        held = self._held.pop(index)
        self._check(held)
        put, message = held.put, held.message
        held.message = None
        choice = world.random()
        if choice < 0.15:
            detached = message.payload if put.raw is not None else message.payload[:1]
            held.views.clear()
            put.giving_back = True
            copy = message.detach()
            put.done = True
            if put.raw is None and ([array.tobytes() for array in copy[1:]] != put.parts or copy[:1] != detached):
                raise Broken(f"message {put.number} was detached with other content")
        elif choice < 0.6:
            if not (held.views and world.random() < 0.4):
                held.views.clear()
            put.giving_back = True
            message.release()
            put.done = True
        else:
            # Dropped. While its views are kept, it is not done.
            keep = held.views and world.random() < 0.4
            if not keep:
                put.giving_back = True
                held.views.clear()
            leased = message._lease is not None
            del message
            put.done = not leased and not world.killing
        if held.views:
            self._kept.append(held)

    def _drop_views(self, index: int) -> None:
        held = self._kept.pop(index)
        self._check(held)
        held.put.giving_back = True
