"""Whether every message did what was promised, from the journals alone: read as a stream, in bounded memory.

A *stream* is what one life of one producer puts, into one ring: numbers that rise by one. What has to hold:

- One consumer is handed the numbers of a stream in rising order, old ones that come again included.
- A number that nobody was handed before is the next one of its stream. What is passed over has expired or was set
  aside; else it is lost, or comes later and so out of order.
- A number that somebody was handed before is marked as redelivered, and had not been released.
- When a stream is over (its producer has ended and its ring is gone), all that ``put`` had returned for was delivered,
  and nothing that no ``put`` had begun.

Whether the content is right, and a view unchanged, the consumers find out themselves.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from fmq.stress.gauges import Histogram, RingGauge
from fmq.stress.journal import ASIDE, DELIVERED, REDELIVERED, RELEASED, Entries
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

WINDOW = 1 << 18
"""How far behind the newest one a message of a stream may be and not be released: more than workers ever allow."""

_OUT, _BACK = 1, 2


class Finding(msgspec.Struct, frozen=True):
    """A check that did not hold: which, what was found, and when (seconds since the start)."""

    check: str
    text: str
    at: float


class Account(msgspec.Struct):
    """The books of one producer, or of all.

    ``put``: puts that returned. ``doubtful``: puts during which the producer was killed, and that are in the ring
    nevertheless. ``delivered``: messages, each counted once. ``redelivered``: how often one came again.
    ``again_in_rings``: the same by the counters of the rings. ``refused``: attempts that found no room.
    """

    put: int = 0
    doubtful: int = 0
    delivered: int = 0
    expired: int = 0
    set_aside: int = 0
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
        return self.put + self.doubtful == self.delivered + self.expired + self.set_aside + self.lost


class Stream:
    """What is known of one life of one producer."""

    def __init__(self, producer: int, life: int, first: int, consumer: int) -> None:
        self.producer = producer
        self.life = life
        self.first = first
        self.consumer = consumer
        self.next = first
        """The number that is due."""
        self.last = -1
        """The last number that this life of the consumer was handed."""
        self.states: NDArray[np.uint8] = np.zeros(WINDOW, np.uint8)
        self.missing: set[int] = set()
        self.aside: set[int] = set()
        self.account = Account()
        self.gauge: RingGauge | None = None
        self.ring = 0
        self.ended = False
        self.killed = False
        self.gone = False
        """Whether the ring was seen to be gone; the journals are read once more after that."""
        self.begun = self.returned = first

    def __str__(self) -> str:
        return f"producer {self.producer} (life {self.life}, ring {self.ring:016x})"


class Verifier:
    """Reads journals, keeps the books, and remembers what was wrong."""

    def __init__(self, producers: int, *, may_expire: bool) -> None:
        self.findings: list[Finding] = []
        self.found: dict[str, int] = {}
        """How often each check failed."""
        self.accounts = [Account() for _ in range(producers)]
        self.latencies = Histogram()
        self.recent = Histogram()
        self.recovery = Histogram()
        """From the start of a consumer to its first redelivered message, in nanoseconds."""
        self.delivered = 0
        self.nbytes = 0
        self.streams: dict[tuple[int, int], Stream] = {}
        self.deaths = 0
        """How many consumers ended, in whatever way: what each had taken last may be counted by its ring alone."""
        self.now = 0.0
        self._may_expire = may_expire
        self._awaiting: dict[int, int] = {}

    def fail(self, check: str, text: str) -> None:
        """Remember that a check did not hold."""
        self.found[check] = self.found.get(check, 0) + 1
        if self.found[check] <= 10:
            self.findings.append(Finding(check, text, self.now))

    # -- lives --------------------------------------------------------------------------------------------------------

    def begin(self, producer: int, life: int, first: int, consumer: int) -> Stream:
        """A life of a producer begins."""
        stream = self.streams[producer, life] = Stream(producer, life, first, consumer)
        return stream

    def consumer_begins(self, consumer: int, at: int) -> None:
        """A life of a consumer begins, at this monotonic time (ns)."""
        self._awaiting[consumer] = at
        for stream in self.streams.values():
            if stream.consumer == consumer:
                stream.last = -1

    # -- journals -----------------------------------------------------------------------------------------------------

    def read(self, consumer: int, entries: Entries) -> None:
        """Take in what one life of a consumer has written."""
        asides = entries[entries["kind"] == ASIDE]
        for producer, sequence, ring in zip(asides["producer"], asides["number"], asides["nbytes"], strict=True):
            self._set_aside(int(producer), int(sequence), int(ring))
        for kind in (DELIVERED, RELEASED):
            # Nothing is handed twice to one life of a consumer, so releases may be looked at after all deliveries.
            chosen = entries[entries["kind"] == kind]
            keys = chosen["producer"].astype(np.int64) << 32 | chosen["life"]
            for key in np.unique(keys):
                stream = self.streams.get((int(key) >> 32, int(key) & 0xFFFFFFFF))
                part = chosen[keys == key]
                if stream is None:
                    if kind == DELIVERED:
                        self.fail(
                            "twice",
                            f"message {part['number'][0]} of producer {key >> 32} came again, though its ring was done",
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

    def _deliver(self, stream: Stream, part: Entries) -> None:
        numbers = part["number"].astype(np.int64)
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
            self.fail("twice", f"message {number} of {stream} was delivered twice to one consumer")

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
        for number in due.tolist():
            if number in stream.aside:
                continue
            if self._may_expire:
                stream.account.expired += 1
            else:
                stream.missing.add(number)

    def _set_aside(self, producer: int, sequence: int, ring: int) -> None:
        for stream in self.streams.values():
            if stream.producer == producer and stream.ring == ring:
                number = stream.first + sequence
                if number not in stream.aside:
                    stream.aside.add(number)
                    stream.account.set_aside += 1
                    if number < stream.next:
                        # Those whom it was handed to are dead.
                        stream.account.delivered -= 1

    # -- the end of a stream ------------------------------------------------------------------------------------------

    def missing(self) -> int:
        """How many messages are overdue: later ones of their streams have come."""
        return sum(len(stream.missing) for stream in self.streams.values())

    def settle(self, stream: Stream) -> None:
        """A stream is over: its ring is gone, and the journals were read after that."""
        account = stream.account
        account.put = stream.returned - stream.first
        account.doubtful = max(0, min(stream.begun, stream.next) - stream.returned)
        if stream.next < stream.returned:
            self._gaps(stream, np.array([stream.returned]))
        if stream.missing:
            account.lost = len(stream.missing)
            first = min(stream.missing)
            self.fail(
                "lost",
                f"{account.lost} messages of {stream} never came, the first is {first}; their puts had returned",
            )
        if stream.next > stream.begun:
            self.fail("books", f"message {stream.next - 1} of {stream} was delivered, and no put of it had begun")
        if (gauge := stream.gauge) is not None:
            self._read_counters(stream, gauge)
            gauge.close()
        elif stream.next > stream.first:
            self.fail("books", f"{stream} delivered without a ring")
        if not account.balances():
            self.fail("books", f"the account of {stream} does not balance: {account}")
        self.accounts[stream.producer].add(account)
        del self.streams[stream.producer, stream.life]

    def _read_counters(self, stream: Stream, gauge: RingGauge) -> None:
        account = stream.account
        account.again_in_rings = gauge[layout.REDELIVERED_COUNT]
        account.spills, account.stalls = gauge[layout.SPILLS], gauge[layout.STALLS]
        account.doorbells = gauge[layout.DOORBELLS]
        # Of what was handed to a consumer that died, and never released, some may have expired before it came again.
        out = int(np.count_nonzero(stream.states == _OUT))
        counted = [
            ("expired", account.expired, gauge[layout.EXPIRED_COUNT], out),
            ("set aside", account.set_aside, gauge[layout.SET_ASIDE_COUNT], self.deaths),
        ]
        if not stream.killed:
            counted.append(("put", account.put, gauge[layout.NEXT_SEQUENCE], 0))
        for name, ours, theirs, slack in counted:
            if not 0 <= theirs - ours <= slack:
                self.fail("books", f"{stream}: {ours} messages {name} by the journals, {theirs} by the ring's counter")

    def total(self) -> Account:
        """The books of all producers."""
        total = Account()
        for account in self.accounts:
            total.add(account)
        return total

    def close_books(self) -> None:
        """The last look: what the rings counted as redelivered against what the consumers saw."""
        total = self.total()
        unseen = total.again_in_rings - total.redelivered
        if not 0 <= unseen <= self.deaths * max(1, len(self.accounts)):
            self.fail(
                "books",
                f"{total.redelivered} redelivered by the journals and {total.again_in_rings} by the rings: the "
                f"{self.deaths} ends of consumers can't explain the difference",
            )
