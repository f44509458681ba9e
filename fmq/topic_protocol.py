"""The protocol of a topic: what publisher and readers say to each other. As ``fmq.protocol``, which it builds on.

::

    publisher                                    reader
       |  <------------------------------------ Join  |    by which slot it reads which ring; none of this one yet?
       |  Hello  ---------------------------------->  |    then it has to look for that
       |  Doorbell  ------------------------------->  |    only if the reader raised ``asleep``, once for each sleep
       |  <----------------------------------- Space  |    only if the publisher raised ``wanted``, once for each wish;
       |                                              |    and when the reader leaves
       |  Goodbye  -------------------------------->  |    the ring is drained and its name is gone

The publisher binds, since there is one; a reader finds its ring as a consumer does, by looking (rule 4 there), and gets
its slot from the kernel. So here, too, a frame only wakes, and tells where to.
"""

from __future__ import annotations

from typing import Any

from fmq import wire
from fmq.errors import ProtocolError
from fmq.protocol import ConsumerProtocol, ProducerProtocol, check_version
from shmq import TopicReader, TopicWriter, fence
from shmq.layout import SLOTS


class PublisherProtocol(ProducerProtocol):
    """The publisher's side. What it sends are lists of (address, frame)."""

    writer: TopicWriter

    def __init__(self, writer: TopicWriter) -> None:
        super().__init__(writer)
        self._addresses: dict[int, bytes] = {}
        self._numbers: dict[int, int] = {}
        self._rings: dict[int, tuple[int, int]] = {}
        self._answers: list[tuple[bytes, bytes]] = []

    def receive(self, data: Any) -> None:
        """Take in one (address, frame). Raises ProtocolError for what no reader sends."""
        address, frame = data[0], wire.decode(data[1])
        if isinstance(frame, wire.Join):
            check_version(frame.version)
            if frame.ring != self.writer.segment.name:
                self._answers.append((address, self.hello()))
            elif 0 <= frame.slot < SLOTS:
                fence.observe()
                # Else it is late, from a reader that is gone: the one that has the slot now lives elsewhere.
                if self.writer.has_joined(frame.slot, frame.number):
                    self._addresses[frame.slot] = address
                    self._numbers[frame.slot] = frame.number
                    # Whatever was rung there was for another.
                    self._rings.pop(frame.slot, None)
            else:
                raise ProtocolError(f"a topic has {SLOTS} reader slots, and none of number {frame.slot}")
        elif not isinstance(frame, wire.Space):
            raise ProtocolError(f"a reader does not send {type(frame).__name__}")

    def met(self) -> int:
        """How many readers there are that can be woken: that joined, and whose Join has come."""
        writer = self.writer
        return sum(writer.has_joined(slot, self._numbers.get(slot, -1)) for slot in writer.readers())

    def frames(self) -> list[Any]:
        """What the bell is to send now: Hello to readers that have no ring, a Doorbell to those that sleep."""
        writer = self.writer
        frames, self._answers = self._answers, []
        position = writer.position
        for slot, address in self._addresses.items():
            asleep = writer.slot_asleep(slot)
            rung, rung_at = self._rings.get(slot, (0, 0))
            # Not for what was announced before: a waiting publisher and a sleeping reader would keep each other awake.
            if asleep and asleep != rung and position != rung_at:
                self._rings[slot] = asleep, position
                writer.count_doorbell()
                doorbell = wire.Doorbell(writer.segment.name, position, writer.next_sequence)
                frames.append((address, wire.encode(doorbell)))
        return [frames] if frames else []

    def goodbye(self) -> Any:
        """What the bell is to send at the end: that the ring is drained and gone, to all."""
        frame = super().goodbye()
        return [(address, frame) for address in self._addresses.values()]


class SubscriberProtocol(ConsumerProtocol):
    """The side of a reader, over the rings of the topic: that of its publisher, and those of publishers before."""

    def receive(self, address: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        """Take in one frame; returns (address, frame) pairs to send. Raises ProtocolError."""
        frame = wire.decode(data)
        if isinstance(frame, wire.Goodbye):
            self.tidy()
        elif isinstance(frame, wire.Hello):
            check_version(frame.version)
            self.discover()
        elif not isinstance(frame, wire.Doorbell):
            raise ProtocolError(f"a publisher does not send {type(frame).__name__}")
        return self._joins()

    def spaces(self) -> list[tuple[bytes, bytes]]:
        """The frames for publishers: what they have to know of this reader, and that there is space."""
        return self._joins() + super().spaces()

    def has_publisher(self) -> bool:
        """Whether a ring is attached of whose publisher nothing is known but that it lives."""
        return not all(source.orphan for source in self._order)

    def close(self, *, hand_back: bool) -> list[tuple[bytes, bytes]]:
        """As ConsumerProtocol.close. A publisher that waits for space learns that this reader is in the way no more."""
        super().close(hand_back=hand_back)
        return [(b"", wire.encode(wire.Space(0)))]

    def join(self) -> bytes:
        """The frame to begin with."""
        return wire.encode(wire.Join(wire.VERSION, "", -1, 0))

    def _joins(self) -> list[tuple[bytes, bytes]]:
        frames = []
        for source in self._order:
            reader = source.reader
            if source.address is None and isinstance(reader, TopicReader):
                source.address = b""
                join = wire.Join(wire.VERSION, reader.name, reader.slot, reader.number)
                frames.append((b"", wire.encode(join)))
        if frames:
            # Who hears of a reader has to see that it joined.
            fence.full()
        return frames
