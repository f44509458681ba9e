"""The machine under a topic: a publisher that binds, readers that connect, and the locks of reader slots."""

from __future__ import annotations

import random
from typing import Any

import shmq
from fmq import wire
from fmq.errors import ProtocolError
from tests.simulation.topic_oracle import TopicOracle
from tests.simulation.world import Broken, ConsumerBell, Plan, Process, ProducerBell, Segment, World, world


class PublisherBell(ConsumerBell):
    """A ROUTER with the methods of a producer's."""

    def send(self, frames: list[tuple[bytes, bytes]]) -> None:
        """As of the real one."""
        for address, frame in frames:
            self.send_to(address, frame)

    def receive(self) -> tuple[bytes, bytes] | None:
        """As of the real one; the world notes whose address the publisher knows now."""
        received = self.receive_from()
        if received is not None:
            _topic_world().introduce(*received)
        return received


class SubscriberBell(ProducerBell):
    """A DEALER with the methods of a consumer's."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.process = self.world.process()

    def send_to(self, address: bytes, frame: bytes) -> None:
        """As of the real one."""
        self.send(frame)

    def receive_from(self) -> tuple[bytes, bytes] | None:
        """As of the real one."""
        frame = self.receive()
        return None if frame is None else (b"", frame)

    def mind_descriptors(self) -> None:
        """There is no limit of descriptors."""


class TopicWriter(shmq.TopicWriter):
    """The real one; the oracle is told to whom a message is offered, and from whom what is taken back."""

    def _offer(self, start: int) -> None:
        super()._offer(start)
        _topic_world().oracle.offer(self.segment.name, self._sequence, self._offers, self._joined)

    def skip(self, slot: int, *, drop: bool = False) -> int:
        """As of the real one."""
        oracle = _topic_world().oracle
        when = oracle.begin_skip(self.segment.name, slot, self._joined, drop)
        skipped = super().skip(slot, drop=drop)
        oracle.end_skip(self.segment.name, slot, self._joined, when)
        return skipped


class TopicReader(shmq.TopicReader):
    """The real one; the oracle is told who joins."""

    def __init__(self, segment: Any, slot: int, *, epoch: int) -> None:
        machine = _topic_world()
        machine.oracle.join(machine.process(), segment.name, slot, epoch)
        super().__init__(segment, slot, epoch=epoch)


class TopicWorld(World):
    """One machine with one topic. ``is_consumer`` says of a process that it is a reader; those run without end."""

    def __init__(self, rng: random.Random, weak: bool, plan: Plan, oracle: TopicOracle, patience: float) -> None:
        super().__init__(rng, weak, plan)
        self.oracle = oracle
        self.patience = patience
        """For how long, in seconds, a put waits at once; infinite where nothing is done about slow readers."""
        self.idle_ns = 5 * 10**8
        self._known: set[tuple[Process, str]] = set()

    # -- frames -------------------------------------------------------------------------------------------------------

    def introduce(self, address: bytes, data: bytes) -> None:
        """The publisher has received a frame."""
        try:
            frame = wire.decode(data)
        except ProtocolError:
            return
        if isinstance(frame, wire.Join) and frame.slot >= 0:
            # Whether the publisher heeds it or not.
            for bell in self.producer_bells:
                if bell.address == address and isinstance(bell, SubscriberBell):
                    self._known.add((bell.process, frame.ring))

    def must_recheck(self, process: Process) -> bool:
        """A reader whose address the publisher has not read can't be rung, nor one that has not found the ring."""
        if not process.is_consumer:
            return self.patience < 1
        rings = [name for name, shared in self.segments.items() if shared.owner is not None]
        return not rings or any((process, ring) not in self._known for ring in rings if "." not in ring)

    def _listen(self, consumers: list[Process]) -> bool:
        return True

    def _cut_off(self, process: Process, bell: Any) -> None:
        for shared in self.all_segments:
            for slot, segment in list(shared.slots.items()):
                if segment.process is process:
                    del shared.slots[slot]
        if not process.is_consumer:
            self.bound = None
            for other in self.producer_bells:
                other.way_in.clear()
                if not self.plan.last_frames_of_the_dead:
                    other.way_out.clear()
        for other in self.producer_bells:
            if isinstance(other, SubscriberBell) and other.process is process:
                other.gone = True

    # -- the locks of reader slots ------------------------------------------------------------------------------------

    def claim(self, segment: Segment, slot: int) -> bool:
        """As of the real one."""
        self.step()
        if not segment.is_open:
            raise Broken("a reader slot is claimed through a descriptor that is closed")
        if segment.shared.slots.get(slot, segment) is not segment:
            return False
        segment.shared.slots[slot] = segment
        # Who gets a lock of the kernel's sees all that was stored by whoever had it.
        segment.process.fence()
        return True

    def unclaim(self, segment: Segment, slot: int) -> None:
        """As of the real one."""
        self.step()
        segment.process.fence()
        if segment.shared.slots.get(slot) is segment:
            del segment.shared.slots[slot]

    def unclaim_all(self, segment: Segment) -> None:
        """As the kernel does when a descriptor is closed."""
        segment.process.flush()
        slots = segment.shared.slots
        for slot in [slot for slot, holder in slots.items() if holder is segment]:
            del slots[slot]

    def has_readers(self, segment: Segment) -> bool:
        """As of the real one."""
        self.step()
        return any(holder is not segment for holder in segment.shared.slots.values())


def _topic_world() -> TopicWorld:
    machine = world()
    assert isinstance(machine, TopicWorld)
    return machine
