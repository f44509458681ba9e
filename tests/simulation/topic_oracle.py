"""Which messages of a topic were offered to which reader, and which promises that keeps or breaks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from shmq.layout import OFFERED, SLOTS
from tests.simulation.oracle import Life, Oracle, Put
from tests.simulation.world import Broken, Process

_NUMBERS = 32
"""A reader joins by its epoch times this, plus what differs when it joins again."""


@dataclass(eq=False, slots=True)
class Share:
    """What a reader is offered of one ring. ``marks``: where what was taken back ends, and when a drop did that."""

    slot: int
    epoch: int
    offered: list[Put] = field(default_factory=list)
    number: int = 0
    handed: int = 0
    """How many of those offered it has been handed, those taken back included."""
    marks: dict[int, float] = field(default_factory=dict)
    dropped: bool = False
    """Since the last offer."""
    ready: bool = False
    """It has joined long ago."""


@dataclass(eq=False, slots=True)
class TopicLife(Life):
    """One reader, from its start to its end. ``shares``: for each ring, what it gets of it."""

    shares: dict[str, Share] = field(default_factory=dict)
    ready: bool = False
    """It has joined, and has not begun to leave."""
    told: float = -math.inf
    """When it was told that it had been dropped."""
    to_be_told: int = 0
    """How many times it may be told so yet."""


class TopicOracle(Oracle):
    """Knows all messages of a schedule, and all readers. ``strict``: who has joined has to be seen by the next put."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict = strict
        self.life_of: dict[Process, TopicLife] = {}
        self.skips = 0
        self.drops = 0
        self._shares: dict[tuple[str, int], list[tuple[Share, TopicLife]]] = {}
        self._expected: list[TopicLife] = []
        self._clock = 0

    # -- what happens -------------------------------------------------------------------------------------------------

    def join(self, process: Process, ring: str, slot: int, epoch: int) -> None:
        """A reader has got a slot, and is about to join."""
        life = self.life_of[process]
        share = life.shares[ring.rpartition(":")[2]] = Share(slot, epoch)
        self._shares.setdefault((ring, slot), []).append((share, life))

    def has_joined(self, life: TopicLife) -> None:
        """A reader is there, and reads what is there."""
        life.ready = True
        for share in life.shares.values():
            share.ready = True

    def begin_put(self) -> None:
        """Whoever is ready now has to be offered what is put."""
        self._expected = [life for life in self.lives if isinstance(life, TopicLife) and life.ready]

    def offer(self, ring: str, sequence: int, offers: bytes, joined: bytes) -> None:
        """A message has got its release bytes."""
        self._clock += 1
        name = ring.rpartition(":")[2]
        put = self.rings[name].puts[-1]
        put.sequence = sequence
        found = []
        for slot in range(SLOTS):
            if offers[slot] == OFFERED:
                number = int.from_bytes(joined[8 * slot : 8 * slot + 8], "little")
                share, life = self._find(ring, slot, number)
                found.append(life)
                if share.number and number != share.number:
                    # It joined again: what it had not taken before is taken back.
                    share.marks.setdefault(len(share.offered), -math.inf)
                share.number = number
                share.dropped = False
                share.offered.append(put)
        for life in self._expected if self.strict else ():
            share_of = life.shares.get(name)
            if life.ready and life not in found and share_of is not None and share_of.ready and not share_of.dropped:
                raise Broken(f"reader {life.number} had joined, and message {put.number} was not offered to it")

    def _find(self, ring: str, slot: int, number: int) -> tuple[Share, TopicLife]:
        for share, life in self._shares.get((ring, slot), ()):
            if number // _NUMBERS == share.epoch * _NUMBERS % (1 << 64) // _NUMBERS:
                return share, life
        raise Broken(f"a message is offered to slot {slot}, which nobody joined by the number {number}")

    def begin_skip(self, ring: str, slot: int, joined: bytes, drop: bool) -> float:
        """The publisher begins to take back what a reader has not taken. Returns what ``end_skip`` has to be told."""
        self._clock += 1
        self.skips += not drop
        self.drops += drop
        share, life = self._find(ring, slot, int.from_bytes(joined[8 * slot : 8 * slot + 8], "little"))
        if not drop:
            return -math.inf
        share.dropped = True
        life.to_be_told += 1
        return self._clock

    def end_skip(self, ring: str, slot: int, joined: bytes, when: float) -> None:
        """It has done so."""
        share, _ = self._find(ring, slot, int.from_bytes(joined[8 * slot : 8 * slot + 8], "little"))
        share.marks[len(share.offered)] = when

    def drop_was_told(self, life: TopicLife) -> None:
        """A reader was told that it had been dropped."""
        self._clock += 1
        life.told = self._clock
        life.to_be_told -= 1
        if life.to_be_told < 0:
            raise Broken(f"reader {life.number} was told that it was dropped, and it was not")

    def handed(self, life: Life, message: Any, began: int) -> Put:
        """A reader was handed a message by a call that began at this time. Its arrays are checked by who has them."""
        assert isinstance(life, TopicLife)
        ring = self.rings[message.producer]
        payload = message.payload
        number = int.from_bytes(payload[:4], "little") if type(payload) is bytes else payload[0]
        what = f"message {number} of publisher {ring.producer}"
        if number >= len(ring.puts):
            raise Broken(f"{what} was never put")
        put = ring.puts[number]
        if put.raw is not None and put.raw != payload:
            raise Broken(f"{what} arrived with other content")
        if put.refused:
            raise Broken(f"{what} arrived, although its put had failed")
        if put.latest_end and put.latest_end <= began:
            raise Broken(f"{what} came after its time")
        if message.sequence != put.sequence or message.deliveries:
            raise Broken(f"{what} came as sequence {message.sequence}, and was put as {put.sequence}")
        share = life.shares[message.producer]
        if put in share.offered[: share.handed]:
            raise Broken(f"{what} came to reader {life.number} after later ones, or again")
        if put not in share.offered:
            raise Broken(f"{what} was not for reader {life.number}")
        index = share.offered.index(put)
        self._explain(life, share, index, f"{what} came to reader {life.number}, and")
        share.handed = index + 1
        self.delivered += 1
        return put

    # -- what has to hold ---------------------------------------------------------------------------------------------

    def _explain(self, life: TopicLife, share: Share, end: int, what: str) -> None:
        """Say why what was offered up to ``end`` was not handed out: it was taken back, or its time was over."""
        at = end
        while at > share.handed and share.offered[at - 1].ttl:
            at -= 1
        if at <= share.handed:
            return
        # What is missing ends where something was taken back; what follows that has to be there.
        marks = [mark for mark in share.marks if at <= mark <= end]
        if not marks:
            raise Broken(f"{what} message {share.offered[at - 1].number} before it did not")
        if share.marks[marks[-1]] > life.told:
            raise Broken(f"{what} it was dropped before, and not told so")

    def missing(self, life: TopicLife, *, asleep: bool = False) -> str:
        """What a reader that has nothing to do ought to have been handed; empty if nothing.

        One that is ``asleep`` need not know that it was dropped: the next message wakes it.
        """
        for name, share in life.shares.items():
            if name not in self.rings or (asleep and share.dropped):
                continue
            end = len(share.offered)
            while end and not share.offered[end - 1].returned:
                end -= 1
            try:
                self._explain(
                    life, share, end, f"the last message of publisher {self.rings[name].producer} was put, and"
                )
            except Broken as broken:
                return f"reader {life.number} is not done: {broken}"
        return ""
