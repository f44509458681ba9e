"""The protocol: who may send what, what comes next, when to wait. No socket, no clock, no thread in here.

Theory of operation. The ring is the queue: a message is delivered because it stands in the ring, never because a frame
arrived. Frames only wake. So any frame may be lost, late or doubled, and either side may die between two of them.

::

    producer                                     consumer
       |  Hello  --------------------------------->  |    attach that ring, if not done; space goes to this address
       |  <-------------------------------- Welcome  |    done, or why not
       |  Doorbell  ------------------------------>  |    only if the consumer raised ``asleep``, once for each sleep
       |  <---------------------------------- Space  |    only if the producer raised ``wanted``, once for each wish
       |  Goodbye  ------------------------------->  |    the ring is drained and its name is gone

Rules
    1.  The producer commits, fences, and then loads ``asleep``. The consumer raises ``asleep``, fences, and then looks
        for messages once more before it sleeps. So one of the two sees the other.
    2.  The producer raises ``wanted``, fences, and then tries once more before it waits. The consumer releases, fences,
        and then loads ``wanted``. So one of the two sees the other.
    3.  Each sleep and each wish has a new number. A number that was answered is not answered again, which keeps a
        thousand puts from ringing a thousand bells.
    4.  A consumer finds rings by what says Hello and by looking through the shared-memory directory: a producer that
        died, or that is busy elsewhere, need not say anything for its messages to be found.
    5.  The consumer writes its epoch into each ring that it attaches. A producer that finds another epoch there than
        it last said Hello to, says Hello again: that is how it meets a consumer that was restarted.
    6.  A ring whose owner is dead is adopted (its lock taken), drained, and removed.

Both classes are driven by one thread at a time; the front ends hold a lock around every call.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from fmq import wire
from fmq.encoding import RAW
from fmq.errors import ProtocolError, QueueInUseError
from fmq.message import Message, Source
from shmq import (
    CorruptRecordError,
    Lease,
    Record,
    RingReader,
    RingWriter,
    SegmentLimitError,
    SegmentMissingError,
    ShmqError,
    fence,
)
from shmq.layout import DONE, SET_ASIDE, TAKEN
from shmq.reader import ALL

_WATCHED = 64
"""How many records of each ring, from the tail on, are looked at for messages that are held for long."""


class ProducerProtocol:
    """The producer's side, over the writer of its ring."""

    def __init__(self, writer: RingWriter) -> None:
        self.writer = writer
        self.problem = ""
        """Why the consumer can't read this ring; empty if nothing is known to be wrong."""
        self._greeted = 0
        self._rung = 0
        self._rung_at = 0
        self._wish = 0
        self._waiting = 0

    def hello(self) -> bytes:
        """The frame to begin with."""
        return wire.encode(wire.Hello(wire.VERSION, self.writer.segment.name))

    def receive(self, data: Any) -> None:
        """Take in what the bell received: one frame. Raises ProtocolError for what no consumer sends."""
        frame = wire.decode(data)
        if isinstance(frame, wire.Welcome):
            check_version(frame.version)
            self.problem = frame.problem
        elif not isinstance(frame, wire.Space):
            raise ProtocolError(f"a consumer does not send {type(frame).__name__}")

    def frames(self) -> list[Any]:
        """What the bell is to send: Hello to a consumer that is new, a Doorbell to one that sleeps (rules 1, 3 and 5).

        Between a post and this call there has to be a full fence; dropping the lock is one on most machines.
        """
        writer = self.writer
        frames = []
        epoch = writer.consumer_epoch()
        if epoch != self._greeted:
            self._greeted = epoch
            frames.append(self.hello())
        asleep = writer.asleep()
        # Not for what was announced before: a waiting producer and a sleeping consumer would keep each other awake.
        if asleep and asleep != self._rung and writer.position != self._rung_at:
            self._rung = asleep
            self._rung_at = writer.position
            writer.count_doorbell()
            frames.append(wire.encode(wire.Doorbell(writer.segment.name, writer.position, writer.next_sequence)))
        return frames

    def begin_wait(self) -> None:
        """Count one more waiter for space."""
        self._waiting += 1

    def want_space(self) -> None:
        """Ask to be woken by the next release. Try once more after this, and only then wait (rule 2)."""
        self._wish += 1
        self.writer.want_space(self._wish)

    def end_wait(self) -> None:
        """Count one waiter less; the last one takes the wish back."""
        self._waiting -= 1
        if not self._waiting:
            self.writer.want_space(0)

    def goodbye(self) -> Any:
        """What the bell is to send at the end: that the ring is drained and gone."""
        return wire.encode(wire.Goodbye(self.writer.segment.name))


class Rings(Protocol):
    """Where a consumer finds the rings of its queue. ``fmq.rings`` is the real one."""

    def names(self) -> list[str]:
        """The names of all rings of the queue that are there."""

    def attach(self, name: str, epoch: int) -> RingReader:
        """Attach a ring. Raises a SegmentError for what can't be read as one, SegmentMissingError if it is gone.

        Raises QueueInUseError or SegmentLimitError for what may be read later.
        """

    def remove(self, name: str) -> None:
        """Remove a drained orphan and its spill segments."""


class ConsumerProtocol:
    """The consumer's side, over the readers of all rings of its queue.

    ``decode`` makes a payload of (encoding, blob, views); ``released`` is what a message calls when it was given back
    and somebody should ``reap``; ``report`` is told what was found and left out: a foreign file, a damaged ring;
    ``set_aside`` of a message that too many consumers died with; ``turn``, between the turns of the rings, says how
    many messages the next one may deliver, and may take the occasion to receive frames.
    """

    def __init__(
        self,
        rings: Rings,
        epoch: int,
        decode: Callable[[int, bytes, list[Any]], Any],
        released: Callable[[], None],
        report: Callable[[Exception], None],
        set_aside: Callable[[Source, Record], None],
        turn: Callable[[], int],
    ) -> None:
        self._rings = rings
        self._epoch = epoch
        self._decode = decode
        self._released = released
        self._report = report
        self._set_aside = set_aside
        self._next_turn = turn
        self._sources: dict[str, Source] = {}
        self._order: deque[Source] = deque()
        self._refused: dict[str, str] = {}
        self.postponed: dict[str, ShmqError] = {}
        """Rings that could not be attached when they were looked for last, and may be the next time."""
        self._current: Source | None = None
        self._turn = 0
        self._sleeps = epoch

    # -- frames -------------------------------------------------------------------------------------------------------

    def receive(self, address: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        """Take in one frame from ``address``; returns (address, frame) pairs to send. Raises ProtocolError."""
        frame = wire.decode(data)
        if isinstance(frame, wire.Goodbye):
            self.tidy()
            return []
        if not isinstance(frame, wire.Hello | wire.Doorbell):
            raise ProtocolError(f"a producer does not send {type(frame).__name__}")
        if frame.ring not in self._sources:
            self.discover()
        source = self._sources.get(frame.ring)
        if source is not None:
            source.address = address
        if isinstance(frame, wire.Hello):
            problem = ""
            if source is None:
                problem = self._refused.get(frame.ring) or str(self.postponed.get(frame.ring, "it is not there"))
            return [(address, wire.encode(wire.Welcome(wire.VERSION, problem)))]
        return []

    def spaces(self) -> list[tuple[bytes, bytes]]:
        """The frames that wake producers which wait for space and have got some (rule 2)."""
        fence.full()
        frames = []
        for source in self._order:
            number = source.reader.wanted()
            if number and source.address is not None:
                source.reader.answered(number)
                frames.append((source.address, wire.encode(wire.Space(number))))
        return frames

    # -- messages -----------------------------------------------------------------------------------------------------

    def take(self) -> Message | None:
        """The next message of any ring, each in turn; None if there is none now.

        Raises CorruptRecordError (the ring or the message is left out from then on) or DecodeError (the message is
        done: it would fail again); either way the next call goes on with what is whole.
        """
        source = self._current
        if source is not None and self._turn:
            self._turn -= 1
            message = self._take_from(source)
            if message is not None:
                return message
        turn = self._next_turn()
        order = self._order
        for _ in range(len(order)):
            order.rotate(-1)
            self._current = order[0]
            self._turn = turn
            message = self._take_from(self._current)
            if message is not None:
                return message
        self._turn = 0
        return None

    def _take_from(self, source: Source) -> Message | None:
        reader = source.reader
        if reader.dropped:
            reader.reap()
        try:
            taken = reader.take()
        except CorruptRecordError as error:
            self._leave_out(source, error)
            raise
        if taken is None:
            return None
        offset, sequence, encoding, buffers, blob, timestamp, deliveries = taken
        if buffers == 0 and encoding == RAW:
            return Message(blob, sequence, timestamp, deliveries, source, offset, None)
        lease: Lease | None = None
        try:
            if not buffers:
                payload = self._decode(encoding, blob, [])
            else:
                views = reader.views(offset, len(blob), buffers)
                lease = reader.lease(offset, views)
                payload = self._decode(encoding, blob, views)
        except Exception:
            if lease is None:
                reader.free(offset)
            else:
                reader.finish(lease)
            raise
        except BaseException:
            # Ctrl-C: no fault of the message.
            reader.put_back(offset, deliveries)
            raise
        return Message(payload, sequence, timestamp, deliveries, source, offset, lease)

    def is_suspect(self, message: Message) -> bool:
        """Whether a consumer died that had this message, which was just taken: it may be the one to blame."""
        reader = message._source.reader
        return message.deliveries > 0 and not reader.closed and reader.deaths(message._offset) > 0

    def put_back(self, message: Message) -> None:
        """Undo the last ``take``, which gave this message: the next one gives it."""
        offset, message._offset = message._offset, -1
        message._source.reader.put_back(offset, message.deliveries)

    def has_more(self) -> bool:
        """Whether a ring has something to look at."""
        return any(source.reader.has_more() for source in self._order)

    def reap(self) -> None:
        """Settle the messages and views that are gone."""
        for source in self._order:
            source.reader.reap()

    # -- sleeping -----------------------------------------------------------------------------------------------------

    def fall_asleep(self) -> bool:
        """Ask every producer to ring. True if the consumer may sleep now, False if there is something to take."""
        self._sleeps += 1
        for source in self._order:
            source.reader.sleep(self._sleeps)
        fence.full()
        return not self.has_more()

    def wake_up(self) -> None:
        """Say that no bell is needed any more."""
        for source in self._order:
            source.reader.sleep(0)

    # -- rings --------------------------------------------------------------------------------------------------------

    def discover(self) -> None:
        """Attach the rings of the queue that are not attached yet."""
        known, self.postponed = self.postponed, {}
        try:
            names = self._rings.names()
        except SegmentLimitError as error:
            self._postpone("", error, known)
            return
        for name in names:
            if name in self._sources or name in self._refused:
                continue
            try:
                reader = self._rings.attach(name, self._epoch)
            except SegmentMissingError:
                continue
            except (QueueInUseError, SegmentLimitError) as error:
                self._postpone(name, error, known)
                continue
            except ShmqError as error:
                self._refused[name] = str(error)
                self._report(error)
                continue
            source = Source(reader, self._released, self._decode)
            reader.on_set_aside = functools.partial(self._set_aside, source)
            self._sources[name] = source
            self._order.append(source)

    def _postpone(self, name: str, error: ShmqError, known: dict[str, ShmqError]) -> None:
        # Without the traceback, whose frames would keep alive what is in them.
        self.postponed[name] = error.with_traceback(None)
        if name not in known:
            self._report(error)

    def tidy(self) -> None:
        """Adopt the rings whose owners are gone, and remove those of them that are drained (rule 6)."""
        for source in list(self._order):
            reader = source.reader
            reader.reap()
            reader.tidy()
            if not source.orphan:
                source.orphan = reader.segment.adopt()
            if not reader.has_more():
                self._remove_if_drained(source)

    def _remove_if_drained(self, source: Source) -> None:
        if not source.orphan:
            return
        try:
            if source.reader.pending():
                return
        except CorruptRecordError as error:
            self._report(error)
            self._leave_out(source, error)
            return
        self._rings.remove(source.reader.name)
        self._forget(source)

    def _leave_out(self, source: Source, error: Exception) -> None:
        """Read a damaged ring no further; its file stays for whoever wants to look at it."""
        self._refused[source.reader.name] = str(error)
        self._forget(source)

    def _forget(self, source: Source) -> None:
        self._order.remove(source)
        self._turn = 0
        del self._sources[source.reader.name]
        source.reader.retire()

    def held(self) -> list[str]:
        """What is still looked into: a line for each ring with views that are alive."""
        lines = []
        for source in self._order:
            source.reader.reap()
            if leases := source.reader.held():
                lines.append(f"{len(leases)} messages of producer {source.producer}")
        return lines

    def long_held(self, now: float, seconds: float) -> list[tuple[Source, Record, float]]:
        """The messages that were held for ``seconds`` since somebody asked, each once: (source, record, age).

        Only among the oldest of each ring, which are those that stand in the way.
        """
        found = []
        for source in self._order:
            watched = source.watched
            source.watched = {}
            for record in _records(source, _WATCHED):
                if record.state in (TAKEN, DONE):
                    since = watched.get(record.position, now)
                    if now - since >= seconds:
                        found.append((source, record, now - since))
                        since = math.inf
                    source.watched[record.position] = since
        return found

    def set_aside(self) -> list[tuple[Source, Record]]:
        """What is set aside in any ring."""
        return [(source, record) for source in self._order for record in _records(source) if record.state == SET_ASIDE]

    def abandon(self) -> None:
        """Give nothing back any more: what is held is the next consumer's."""
        for source in self._order:
            source.reader.abandon()

    def close(self, *, hand_back: bool) -> list[tuple[bytes, bytes]]:
        """Let go of all rings; what was not released is the next consumer's. Raises ViewsHeldError while views live.

        ``hand_back``: it is not to be held against those messages, as it would be if the consumer had died. Returns
        (address, frame) pairs to send.
        """
        self.tidy()
        for source in list(self._order):
            self._remove_if_drained(source)
        for source in list(self._order):
            source.reader.close(hand_back=hand_back)
            self._turn = 0
            self._order.remove(source)
            del self._sources[source.reader.name]
        return []


def _records(source: Source, most: int = ALL) -> list[Record]:
    """The first messages of a ring, as far as it can be read: damage is for ``take`` to find."""
    try:
        return source.reader.records(most)
    except CorruptRecordError:
        return []


def check_version(version: int) -> None:
    if version != wire.VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of the protocol, and this process {wire.VERSION}; run the same version "
            "of shmq in all processes of a queue"
        )
