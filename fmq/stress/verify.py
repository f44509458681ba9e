"""Whether every message did what was promised, from the journals alone: read as a stream, in bounded memory.

A *life* of a producer puts numbers that rise by one into one ring. A *stream* is what a consumer gets of it: in a queue
one consumer after another, in a topic one life of one reader. What has to hold in a queue:

- One consumer is handed the numbers of a stream in rising order, old ones that come again included.
- A number that nobody was handed before is the next one of its stream. What is passed over has expired or was set
  aside; else it is lost, or comes later and so out of order.
- A number that somebody was handed before is marked as redelivered, and had not been released.
- When a life is over (its producer has ended and its ring is gone), all that ``put`` had returned for was delivered,
  and nothing that no ``put`` had begun.

In a topic, for every reader:

- Its first number is none that had been put before its process began, and at the latest the one that was put first
  after it was seen to have joined.
- From there on every number comes, once, in order, up to the end of the ring or of the reader. What is passed over was
  skipped, and the ring counts the same; or the reader was told that it was dropped; else it is lost, as above.

Whether the content is right, and a view unchanged, the consumers find out themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from fmq.stress.gauges import Histogram, RingGauge
from fmq.stress.journal import ASIDE, DELIVERED, DROPPED, REDELIVERED, RELEASED, Entries
from fmq.stress.plan import Plan
from shmq import layout

CHECKS = {
    "content": "every message arrived with the bytes it was put with",
    "views": "no view changed while it was held",
    "order": "messages of a producer came in the order of their puts",
    "lost": "nothing lost: every put that returned was delivered",
    "twice": "nothing twice, save marked redeliveries of what was not released",
    "books": "the books balance",
    "hang": "nobody hung",
    "processes": "all processes ended in order, or by our own hand",
    "segments": "no segment left in /dev/shm",
    "files": "no socket or lock file left",
    "descriptors": "no file descriptor left open",
    "memory": "no private memory lost",
}
"""What is checked, by name, in the order of the report."""

_TOPIC_CHECKS = {
    "order": "messages came to every reader in the order of their puts",
    "lost": "nothing lost: from its first message to its last every reader got all that it was offered",
    "twice": "nothing twice, and nothing that was put before a reader joined",
}
"""What is said otherwise of a topic."""

WINDOW = 1 << 18
"""How far behind the newest one a message of a stream may be and not be released: more than workers ever allow."""

_OUT, _BACK = 1, 2


def checks_of(plan: Plan) -> dict[str, str]:
    """What is checked in a run, by name."""
    texts = CHECKS | _TOPIC_CHECKS if plan.readers else dict(CHECKS)
    if plan.policy == "skip":
        texts["lost"] += ", save what was skipped, as often as its ring says"
    elif plan.policy == "drop":
        texts["lost"] += ", save where it was told that it was dropped"
    return texts


class Finding(msgspec.Struct, frozen=True):
    """A check that did not hold: which, what was found, and when (seconds since the start)."""

    check: str
    text: str
    at: float


class Account(msgspec.Struct):
    """The books of one producer, or of one reader of a topic, or of all.

    ``put``: puts that returned; for a reader, from its first message to its last. ``doubtful``: puts during which the
    producer was killed, and that are in the ring nevertheless. ``delivered``: messages, each counted once. ``skipped``:
    what a topic's policy took back, or did not offer to a reader that was dropped. ``redelivered``: how often one came
    again. ``again_in_rings``: the same by the counters of the rings. ``refused``: attempts that found no room.
    """

    put: int = 0
    doubtful: int = 0
    delivered: int = 0
    expired: int = 0
    set_aside: int = 0
    skipped: int = 0
    lost: int = 0
    redelivered: int = 0
    again_in_rings: int = 0
    refused: int = 0
    nbytes: int = 0
    spills: int = 0
    stalls: int = 0
    doorbells: int = 0

    def add(self, other: Account) -> None:
        """Add another account to this one."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def balances(self) -> bool:
        """Whether all that went in came out."""
        return self.put + self.doubtful == self.delivered + self.expired + self.set_aside + self.skipped + self.lost


class Life:
    """What is known of one life of one producer, and of its ring."""

    def __init__(self, producer: int, life: int, first: int, noun: str) -> None:
        self.producer = producer
        self.life = life
        self.first = first
        self.streams: dict[int, Stream] = {}
        """By consumer."""
        self.gauge: RingGauge | None = None
        self.ring = 0
        self.ended = False
        self.killed = False
        self.gone = False
        """Whether the ring was seen to be gone; the journals are read once more after that."""
        self.begun = self.returned = self.next = first
        self.refused = 0
        self.skipped = 0
        self.skipped_last = 0
        """The most that a reader was skipped last: a publisher that was killed while it skipped did not count it."""
        self.all_seen = True
        """Whether every reader was there from the first message to the last, so that all it was skipped is known."""
        self._noun = noun

    def __str__(self) -> str:
        return f"{self._noun} {self.producer} (life {self.life}, ring {self.ring:016x})"


class Stream:
    """What a consumer gets of a life."""

    def __init__(self, life: Life, noun: str, consumer: int, first: int, *, entered: bool) -> None:
        self.life = life
        self.noun = noun
        self.consumer = consumer
        self.entered = entered
        """Whether ``first`` is known. Else nothing before it may come, and what comes first is not after ``latest``."""
        self.latest: int | None = None
        self.first = first
        self.next = first
        """The number that is due."""
        self.last = -1
        """The last number that this life of the consumer was handed."""
        self.states: NDArray[np.uint8] = np.zeros(WINDOW, np.uint8)
        self.missing: set[int] = set()
        self.aside: set[int] = set()
        self.drops = 0
        """How often the reader was told of being dropped, where the gap was not seen yet."""
        self.skipped_last = 0
        self.account = Account()

    def enter(self, number: int) -> None:
        """This number was offered, and is the first one unless an earlier one had to come."""
        self.entered = True
        self.first = self.next = number if self.latest is None else min(number, self.latest)

    def __str__(self) -> str:
        return f"{self.life} to {self.noun} {self.consumer}"


class Verifier:
    """Reads journals, keeps the books, and remembers what was wrong."""

    def __init__(self, plan: Plan) -> None:
        self.findings: list[Finding] = []
        self.found: dict[str, int] = {}
        """How often each check failed."""
        self.producers = [Account() for _ in range(plan.producers)]
        self.readers = [Account() for _ in range(plan.readers)]
        """Those of a topic; then the publisher's own says what it put, and no more."""
        self.latencies = Histogram()
        self.recent = Histogram()
        self.recovery = Histogram()
        """From the start of a consumer to its first redelivered message, in nanoseconds."""
        self.delivered = 0
        self.nbytes = 0
        self.lives: dict[tuple[int, int], Life] = {}
        self.deaths = 0
        """How many consumers ended, in whatever way: what each had taken last may be counted by its ring alone."""
        self.now = 0.0
        self._plan = plan
        self._awaiting: dict[int, int] = {}
        self._leaving: set[int] = set()

    def fail(self, check: str, text: str) -> None:
        """Remember that a check did not hold."""
        self.found[check] = self.found.get(check, 0) + 1
        if self.found[check] <= 10:
            self.findings.append(Finding(check, text, self.now))

    # -- lives --------------------------------------------------------------------------------------------------------

    def begin(self, producer: int, number: int, first: int, consumers: Iterable[int]) -> Life:
        """A life of a producer begins, for these consumers."""
        life = self.lives[producer, number] = Life(producer, number, first, self._plan.words("producer"))
        for consumer in consumers:
            life.streams[consumer] = self._stream(life, consumer, first)
        return life

    def consumer_begins(self, consumer: int, at: int) -> None:
        """A life of a consumer begins, at this monotonic time (ns); all that the one before wrote was read."""
        self._awaiting[consumer] = at
        self._leaving.discard(consumer)
        for life in self.lives.values():
            if (stream := life.streams.get(consumer)) is not None:
                stream.last = -1
                if self.readers:
                    self._leave(stream)
                    life.streams[consumer] = self._stream(life, consumer, life.returned)

    def _stream(self, life: Life, consumer: int, first: int) -> Stream:
        return Stream(life, self._plan.words("consumer"), consumer, first, entered=not self.readers)

    def consumer_leaves(self, consumer: int) -> None:
        """A life of a consumer is about to end: it need not get any more."""
        self._leaving.add(consumer)

    def joined(self, life: Life, consumer: int) -> None:
        """A reader was seen to have joined, before ``life.begun`` was looked at."""
        stream = life.streams[consumer]
        if stream.latest is None:
            stream.latest = life.begun

    # -- journals -----------------------------------------------------------------------------------------------------

    def read(self, consumer: int, entries: Entries) -> None:
        """Take in what one life of a consumer has written."""
        asides = entries[entries["kind"] == ASIDE]
        for producer, sequence, ring in zip(asides["producer"], asides["number"], asides["nbytes"], strict=True):
            self._set_aside(int(producer), int(sequence), int(ring))
        if (dropped := int(np.count_nonzero(entries["kind"] == DROPPED))) > 0:
            self._drop(consumer, dropped)
        for kind in (DELIVERED, RELEASED):
            # Nothing is handed twice to one life of a consumer, so releases may be looked at after all deliveries.
            chosen = entries[entries["kind"] == kind]
            keys = chosen["producer"].astype(np.int64) << 32 | chosen["life"]
            for key in np.unique(keys):
                life = self.lives.get((int(key) >> 32, int(key) & 0xFFFFFFFF))
                stream = None if life is None else life.streams.get(consumer)
                part = chosen[keys == key]
                if stream is None:
                    if kind == DELIVERED:
                        self.fail(
                            "twice",
                            f"message {part['number'][0]} of {self._plan.words('producer')} {key >> 32} came again, "
                            "though its ring was done",
                        )
                elif kind == DELIVERED:
                    self._deliver(stream, part)
                else:
                    stream.states[part["number"].astype(np.int64) % WINDOW] = _BACK
        delivered = entries[entries["kind"] == DELIVERED]
        self._clock(consumer, delivered)

    def _clock(self, consumer: int, delivered: Entries) -> None:
        again = (delivered["flags"] & REDELIVERED) != 0
        fresh = delivered["latency"][~again]
        self.latencies.add(fresh)
        self.recent.add(fresh)
        if again.any() and (begun := self._awaiting.pop(consumer, None)) is not None:
            self.recovery.add(delivered["taken"][again][:1] - np.uint64(begun))

    def _drop(self, consumer: int, count: int) -> None:
        if self._plan.policy != "drop":
            self.fail("lost", f"reader {consumer} was dropped, and the policy is {self._plan.policy}")
        # Of which ring it was, it was not told.
        for life in self.lives.values():
            life.streams[consumer].drops += count

    def _deliver(self, stream: Stream, part: Entries) -> None:
        numbers = part["number"].astype(np.int64)
        if not stream.entered:
            if numbers[0] < stream.first:
                self.fail("twice", f"message {numbers[0]} of {stream} had been put before that one was there")
            stream.enter(int(numbers[0]))
        again = (part["flags"] & REDELIVERED) != 0
        highest = np.maximum.accumulate(np.concatenate([[stream.last], numbers[:-1]]))
        if (backwards := numbers <= highest).any():
            self._forwards(stream, part[~backwards], numbers[~backwards], again[~backwards])
            for number in numbers[backwards]:
                self._backwards(stream, int(number))
        else:
            self._forwards(stream, part, numbers, again)

    def _forwards(self, stream: Stream, part: Entries, numbers: NDArray[np.int64], again: NDArray[np.bool_]) -> None:
        if not len(numbers):
            return
        stream.last = int(numbers[-1])
        old = numbers < stream.next
        if old.any():
            self._again(stream, numbers[old], again[old])
        new = numbers[~old]
        if len(new):
            if new[-1] - stream.next + 1 != len(new):
                self._gaps(stream, new)
            stream.states[new % WINDOW] = _OUT
            stream.next = int(new[-1]) + 1
        nbytes = int(part["nbytes"][~old].sum())
        stream.account.delivered += len(new)
        stream.account.nbytes += nbytes
        stream.account.redelivered += int(again.sum())
        self.delivered += len(new)
        self.nbytes += nbytes

    def _backwards(self, stream: Stream, number: int) -> None:
        if number in stream.missing:
            stream.missing.discard(number)
            stream.account.delivered += 1
            self.delivered += 1
            self.fail("order", f"message {number} of {stream} came after message {stream.next - 1}")
        else:
            self.fail("twice", f"message {number} of {stream} was delivered twice to the same process")

    def _again(self, stream: Stream, numbers: NDArray[np.int64], again: NDArray[np.bool_]) -> None:
        for number in numbers[~again]:
            self.fail("twice", f"message {number} of {stream} was delivered twice, and not marked as redelivered")
        back = (numbers < stream.next - WINDOW) | (stream.states[numbers % WINDOW] != _OUT)
        for number in numbers[back]:
            if int(number) in stream.missing:
                self._backwards(stream, int(number))
            else:
                self.fail("twice", f"message {number} of {stream} came again, although it had been released")

    def _gaps(self, stream: Stream, new: NDArray[np.int64]) -> None:
        due = np.setdiff1d(np.arange(stream.next, new[-1]), new)
        if self._may_skip(stream, due):
            stream.account.skipped += len(due)
            stream.skipped_last = len(due)
            return
        for number in due.tolist():
            if number in stream.aside:
                continue
            if self._plan.ttl is not None:
                stream.account.expired += 1
            else:
                stream.missing.add(number)

    def _may_skip(self, stream: Stream, due: NDArray[np.int64]) -> bool:
        if self._plan.policy == "drop":
            gaps = 1 + int(np.count_nonzero(np.diff(due) != 1))
            if gaps > stream.drops:
                return False
            stream.drops -= gaps
            return True
        return self._plan.policy == "skip"

    def _set_aside(self, producer: int, sequence: int, ring: int) -> None:
        for life in self.lives.values():
            if life.producer == producer and life.ring == ring:
                (stream,) = life.streams.values()
                number = stream.first + sequence
                if number not in stream.aside:
                    stream.aside.add(number)
                    stream.account.set_aside += 1
                    if number < stream.next:
                        # Those whom it was handed to are dead.
                        stream.account.delivered -= 1

    # -- the end of a life --------------------------------------------------------------------------------------------

    def missing(self) -> int:
        """How many messages are overdue: later ones of their streams have come."""
        return sum(len(stream.missing) for life in self.lives.values() for stream in life.streams.values())

    def may_settle(self, life: Life) -> bool:
        """Whether nothing more has to come: a reader that was dropped is told so when it asks for a message."""
        return self._plan.policy != "drop" or not any(
            self._is_due(stream) and stream.next < life.returned and not stream.drops and consumer not in self._leaving
            for consumer, stream in life.streams.items()
        )

    def settle(self, life: Life) -> None:
        """A life is over: its ring is gone, and the journals were read after that."""
        for stream in life.streams.values():
            if self.readers and (stream.consumer in self._leaving or not self._is_due(stream)):
                self._leave(stream)
            else:
                self._close(stream)
        last = life.next
        if last > life.begun:
            self.fail("books", f"message {last - 1} of {life} was delivered, and no put of it had begun")
        own = Account(refused=life.refused)
        if self.readers:
            own.put, own.doubtful = life.returned - life.first, _in_doubt(life, life.first, last)
        if life.gauge is not None:
            self._read_counters(life, life.gauge, own)
            life.gauge.close()
        elif last > life.first:
            self.fail("books", f"{life} delivered without a ring")
        self.producers[life.producer].add(own)
        del self.lives[life.producer, life.life]

    def _is_due(self, stream: Stream) -> bool:
        """Whether a consumer has to get all of a life up to its end."""
        if not stream.entered and stream.latest is not None:
            # A put that had begun then may have been given up.
            stream.enter(min(stream.latest, stream.life.begun))
        return stream.entered

    def _close(self, stream: Stream) -> None:
        """A stream was read to the end of its ring."""
        account, life = stream.account, stream.life
        account.put = max(0, life.returned - stream.first)
        account.doubtful = _in_doubt(life, stream.first, stream.next)
        if stream.next < life.returned:
            self._gaps(stream, np.array([life.returned]))
        if stream.first > life.first:
            life.all_seen = False
        self._book(stream)

    def _leave(self, stream: Stream) -> None:
        """A reader has left a stream: what it was offered since its last message is not known."""
        stream.life.all_seen = False
        stream.account.put = stream.next - stream.first
        self._book(stream)

    def _book(self, stream: Stream) -> None:
        account, life = stream.account, stream.life
        if stream.missing:
            account.lost = len(stream.missing)
            first = min(stream.missing)
            self.fail(
                "lost",
                f"{account.lost} messages of {stream} never came, the first is {first}; their puts had returned",
            )
        if not account.balances():
            self.fail("books", f"the account of {stream} does not balance: {account}")
        life.next = max(life.next, stream.next)
        life.skipped += account.skipped
        life.skipped_last = max(life.skipped_last, stream.skipped_last)
        self._balanced(life, stream).add(account)

    def _balanced(self, life: Life, stream: Stream) -> Account:
        return self.readers[stream.consumer] if self.readers else self.producers[life.producer]

    def _read_counters(self, life: Life, gauge: RingGauge, own: Account) -> None:
        own.again_in_rings = gauge[layout.REDELIVERED_COUNT]
        own.spills, own.stalls = gauge[layout.SPILLS], gauge[layout.STALLS]
        own.doorbells = gauge[layout.DOORBELLS]
        counted = []
        if not life.killed:
            counted.append(("put", life.returned - life.first, gauge[layout.NEXT_SEQUENCE], 0))
        if not self.readers:
            (stream,) = life.streams.values()
            # Of what was handed to a consumer that died, and never released, some may have expired before it came
            # again.
            out = int(np.count_nonzero(stream.states == _OUT))
            counted += [
                ("expired", stream.account.expired, gauge[layout.EXPIRED_COUNT], out),
                ("set aside", stream.account.set_aside, gauge[layout.SET_ASIDE_COUNT], self.deaths),
            ]
        elif self._plan.policy != "drop":
            # What a dropped reader was not offered, nobody counts.
            uncounted = life.skipped_last if life.killed else 0
            unseen = uncounted if life.all_seen or self._plan.policy == "block" else layout.INVALID_POSITION
            counted.append(("skipped", life.skipped - uncounted, gauge[layout.SKIPPED_COUNT], unseen))
        for name, ours, theirs, slack in counted:
            if not 0 <= theirs - ours <= slack:
                self.fail("books", f"{life}: {ours} messages {name} by the journals, {theirs} by the ring's counter")

    def total(self) -> Account:
        """The books of all producers; of a topic, of all readers."""
        total = Account()
        for account in self.readers or self.producers:
            total.add(account)
        return total

    def close_books(self) -> None:
        """The last look: what the rings counted as redelivered against what the consumers saw."""
        again, seen = sum(account.again_in_rings for account in self.producers), self.total().redelivered
        if not 0 <= again - seen <= self.deaths * max(1, len(self.producers)):
            self.fail(
                "books",
                f"{seen} redelivered by the journals and {again} by the rings: the {self.deaths} ends of "
                f"{self._plan.words('consumers')} can't explain the difference",
            )


def _in_doubt(life: Life, first: int, following: int) -> int:
    """How many puts did not return, and are in the ring nevertheless."""
    return max(0, min(life.begun, following) - max(life.returned, first))
