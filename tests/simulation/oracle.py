"""What was put, what became of it, and which promises that keeps or breaks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.world import Broken

_CONTENT = random.Random(20).randbytes(1 << 16)


def content(producer: int, number: int, part: int, nbytes: int) -> bytes:
    """Bytes that no other part of a message has."""
    start = (producer * 15101 + number * 977 + part * 331) % (len(_CONTENT) - nbytes)
    return _CONTENT[start : start + nbytes]


@dataclass(eq=False, slots=True)
class Put:
    """A message from the moment its put begins. ``parts`` are the bytes of its arrays, in order."""

    number: int
    raw: bytes | None
    parts: list[bytes]
    ttl: bool = False
    earliest_end: int = 0
    latest_end: int = 0
    """Nanoseconds of the clock between which its ttl is over; the second is known when put has returned."""
    returned: bool = False
    refused: bool = False
    sequence: int = -1
    lives: list[Life] = field(default_factory=list)
    """The consumers that were handed it."""
    giving_back: bool = False
    """It may be done: somebody began to give it back."""
    done: bool = False


@dataclass(eq=False, slots=True)
class Life:
    """One consumer, from its start to its death. ``last``: for each ring, the last message it was handed."""

    number: int
    getting: int = 0
    """How many messages, at most, a call that was not over when it died may have taken."""
    last: dict[str, int] = field(default_factory=dict)
    over: bool = False


@dataclass(eq=False, slots=True)
class Ring:
    """What one producer put."""

    producer: int
    puts: list[Put] = field(default_factory=list)


class Oracle:
    """Knows all messages of a schedule."""

    def __init__(self) -> None:
        self.rings: dict[str, Ring] = {}
        self.lives: list[Life] = []
        self.redelivered = 0
        self.delivered = 0

    def handed(self, life: Life, message: Any, began: int) -> Put:
        """A consumer was handed a message by a call that began at this time. Its arrays are checked by who has them."""
        ring = self.rings[message.producer]
        payload = message.payload
        number = int.from_bytes(payload[:4], "little") if type(payload) is bytes else payload[0]
        what = f"message {number} of producer {ring.producer}"
        if number >= len(ring.puts):
            raise Broken(f"{what} was never put")
        put = ring.puts[number]
        if put.raw is not None and put.raw != payload:
            raise Broken(f"{what} arrived with other content")
        if put.refused:
            raise Broken(f"{what} arrived, although its put had failed")
        if put.done:
            raise Broken(f"{what} was done, and came again")
        if life in put.lives:
            raise Broken(f"{what} came twice to one consumer")
        last = life.last.get(message.producer, -1)
        if number <= last:
            raise Broken(f"{what} came after message {last}")
        for earlier in ring.puts[last + 1 : number]:
            if not (earlier.done or earlier.refused or earlier.ttl or earlier.giving_back):
                raise Broken(f"{what} came before message {earlier.number}")
        if put.latest_end and put.latest_end <= began:
            raise Broken(f"{what} came after its time")
        if put.sequence < 0:
            put.sequence = message.sequence
        if message.sequence != put.sequence:
            raise Broken(f"{what} came as sequence {message.sequence}, and was put as {put.sequence}")
        unsure = sum(1 for former in self.lives if former.getting and former.over and former not in put.lives)
        if not len(put.lives) <= message.deliveries <= len(put.lives) + unsure:
            raise Broken(
                f"{what} says that it was handed out {message.deliveries} times before; it was {len(put.lives)}, and "
                f"{unsure} consumers died while they took something"
            )
        if message.redelivered != (message.deliveries > 0):
            raise Broken(f"{what} is marked as redelivered wrongly")
        self.delivered += 1
        self.redelivered += message.redelivered
        life.last[message.producer] = number
        put.lives.append(life)
        return put

    def check_all_done(self, now: int) -> None:
        """At the end: every message whose put returned was delivered and done, or its time was over."""
        for ring in self.rings.values():
            for put in ring.puts:
                what = f"message {put.number} of producer {ring.producer}"
                if put.returned and not (put.done or put.giving_back) and not (put.ttl and put.earliest_end <= now):
                    raise Broken(f"{what} was put, and never done")
