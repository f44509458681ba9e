"""The protocol over TCP: what is kept, what is sent again, what is passed over. No socket, no clock, no thread in here.

Theory of operation. There is no shared memory to stand in for a queue, so the producer keeps each message in a *window*
until the consumer has said that it is done. A connection may break at any moment, with anything under way on it; the
next one begins with what the two sides tell each other, and goes on from there.

::

    producer                                      consumer
       |  Hello  ---------------------------------->  |    who I am; from now on this address is mine
       |  <--------------------------------- Welcome  |    who I am, what I have of yours, how much I take
       |  Data + blob + buffers  ------------------>  |    one message
       |  <------------------------------------- Ack  |    what is done; also once a second, as a sign of life
       |  Beat  ----------------------------------->  |    once a second, likewise
       |  Goodbye  -------------------------------->  |    my window is empty, forget me

Rules
    1.  A message leaves the window when an Ack says that it is done: the application has released it. That is all that
        an Ack says, so any of them may be lost; the next one says the same and more.
    2.  On one connection messages come in the order of their sequences, for TCP and ZeroMQ keep it. So the consumer
        takes a sequence from ``next`` on, and passes over what is below: it has had that. A sequence that is left out
        is one that the producer has no more: done, or expired.
    3.  A producer says Hello once on each connection, and sends nothing else until it is welcome. Then it goes on at
        ``next``: what came on an earlier connection is not sent twice. A consumer that does not know it (another one,
        or one that was restarted) has a ``next`` that is the oldest in the window, and another ``epoch``. What was sent
        in the epoch before may have been handed out by the one who is gone, so that one delivery more is counted for
        it: too many rather than too few.
    4.  The consumer answers only the address that said Hello last, and passes over what comes from any other. So what
        was still under way on a connection that is given up does no harm.
    5.  The window bounds what a producer keeps. What it sends is bounded by what the consumer said that it takes, too;
        who sends more is not listened to until it says Hello again.
    6.  A consumer knows a limited number of producers. It forgets the one that it has not heard for longest, and only
        if all is done that came from it.

Both classes are driven by one thread at a time; the front ends hold a lock around every call. Times are nanoseconds of
a monotonic clock, and come from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from fmq.encoding import BLOB_LAST
from fmq.errors import ProtocolError

VERSION = 1

MAX_BUFFERS = 4096
"""How many buffers a message may have: each is a frame of its own, which costs 0.3 KiB on the way."""

MAX_CONTROL_BYTES = 65_536
"""No frame but blobs and buffers is longer. An Ack of 1,024 ranges takes 20,000."""

_FORGET_NS = 10_000_000_000
"""How long a producer has to be silent to be forgotten for another one."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
Ranges = list[tuple[Count, Count]]
"""Sequences, as ascending (first, one beyond the last)."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Producer to consumer, the first frame of a connection: its id, and the oldest sequence in its window."""

    version: int
    producer: Annotated[str, msgspec.Meta(max_length=16, pattern="^[0-9a-f]{16}$")]
    first: Count


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Consumer to producer: what it has of this one, and what it takes.

    ``epoch`` names what it knows of this producer: whoever begins to know it has another one. All below ``next`` has
    come, or never will. ``below`` and ``done``: as in Ack. Of one message it takes ``max_message`` bytes, of all that
    are not done ``window_bytes``, and as many as ``window_messages``. ``problem``: why it takes none; else empty.
    """

    version: int
    epoch: Count
    next: Count
    below: Count
    done: Ranges
    max_message: Count
    window_bytes: Count
    window_messages: Count
    problem: str


class Data(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Producer to consumer: the header of a message. The next frame is the blob, each one after it a buffer.

    ``ttl_ns`` is what was left of the time to live when it was sent, 0 for one without end. ``deliveries`` is how many
    consumers had been sent it before.
    """

    sequence: Count
    timestamp_ns: Count
    ttl_ns: Count
    encoding: Count
    deliveries: Count


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Consumer to producer: every sequence below ``below``, and all in ``done``, is done."""

    below: Count
    done: Ranges


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Producer to consumer: a sign of life."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Producer to consumer: all is done, nothing will come any more."""


_encode = msgspec.msgpack.Encoder().encode
_from_producer = msgspec.msgpack.Decoder(Hello | Data | Beat | Goodbye)
_from_consumer = msgspec.msgpack.Decoder(Welcome | Ack)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    if len(data) > MAX_CONTROL_BYTES:
        raise ProtocolError(f"a frame of {len(data):,} bytes is none of fmq's: they have at most {MAX_CONTROL_BYTES:,}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame of {len(data)} bytes is none of fmq's: {error}") from None


# -- the producer -----------------------------------------------------------------------------------------------------


class Outgoing(msgspec.Struct, eq=False):
    """A message in the window. ``expires`` in nanoseconds of the monotonic clock, 0 for never."""

    sequence: int
    timestamp_ns: int
    expires: int
    encoding: int
    blob: bytes
    buffers: Sequence[Any]
    nbytes: int
    deliveries: int = 0
    sent: bool = False
    """In this epoch: the consumer has it, or may have it."""


class RemoteProducerProtocol:
    """The producer's side: its window. ``producer`` is its id."""

    def __init__(self, producer: str, window_bytes: int, window_messages: int) -> None:
        self.producer = producer
        self.window_bytes = window_bytes
        self.window_messages = window_messages
        self.next_sequence = 0
        self.nbytes = 0
        """Bytes in the window."""
        self.welcome: Welcome | None = None
        """What the consumer of this connection said; None until it has."""
        self._epoch = -1
        self._window: dict[int, Outgoing] = {}
        self._unsent: deque[Outgoing] = deque()
        self._sent_bytes = 0
        self._sent_messages = 0

    def __len__(self) -> int:
        """How many messages are in the window."""
        return len(self._window)

    @property
    def problem(self) -> str:
        """Why the consumer takes nothing, or not the next message; empty if nothing is known to be wrong."""
        welcome = self.welcome
        if welcome is None:
            return ""
        if not welcome.problem and self._unsent and self._unsent[0].nbytes > welcome.max_message:
            entry = self._unsent[0]
            return (
                f"message {entry.sequence} has {entry.nbytes:,} bytes, and it takes at most {welcome.max_message:,} "
                "(its max_message)"
            )
        return welcome.problem

    def oldest(self) -> Outgoing | None:
        """The message that has waited for longest; None if there is none."""
        return next(iter(self._window.values()), None)

    # -- messages -----------------------------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Whether a message of so many bytes can be put now."""
        return len(self._window) < self.window_messages and self.nbytes + nbytes <= self.window_bytes

    def put(
        self, encoding: int, blob: bytes, buffers: Sequence[Any], nbytes: int, timestamp_ns: int, expires: int
    ) -> int:
        """Put a message, for which there is room, into the window; returns its sequence."""
        sequence = self.next_sequence
        entry = Outgoing(sequence, timestamp_ns, expires, encoding, blob, buffers, nbytes)
        self._window[sequence] = entry
        self._unsent.append(entry)
        self.nbytes += nbytes
        self.next_sequence = sequence + 1
        return sequence

    def expire(self, now: int) -> bool:
        """Drop what is past its time to live, unless this consumer has it. True if that was something."""
        expired = [entry for entry in self._unsent if entry.expires and entry.expires <= now]
        if expired:
            for entry in expired:
                self._drop(entry)
            self._unsent = deque(entry for entry in self._unsent if entry.sequence in self._window)
        return bool(expired)

    def _drop(self, entry: Outgoing) -> None:
        del self._window[entry.sequence]
        self.nbytes -= entry.nbytes

    # -- the connection -----------------------------------------------------------------------------------------------

    def connect(self) -> bytes:
        """Begin a new connection; returns the frame to begin it with."""
        self.disconnect()
        oldest = self.oldest()
        return _encode(Hello(VERSION, self.producer, self.next_sequence if oldest is None else oldest.sequence))

    def disconnect(self) -> None:
        """Note that the connection is gone: all in the window is to be sent again, if the next consumer lacks it."""
        self.welcome = None
        self._unsent = deque(self._window.values())
        self._sent_bytes = self._sent_messages = 0

    def receive(self, data: bytes) -> bool:
        """Take in one frame. True if that made room, or problems. Raises ProtocolError for what no consumer sends."""
        frame = _decode(_from_consumer, data)
        if isinstance(frame, Ack):
            if self.welcome is None:
                raise ProtocolError("an Ack came before the Welcome")
            return self._acknowledge(frame.below, frame.done)
        if frame.version != VERSION and not frame.problem:
            raise ProtocolError(f"the peer speaks version {frame.version}, and this is version {VERSION}")
        if self.welcome is not None:
            raise ProtocolError("a second Welcome came")
        if frame.next > self.next_sequence:
            raise ProtocolError(f"the peer wants message {frame.next}, and there are {self.next_sequence}")
        if not frame.problem:
            self._acknowledge(frame.below, frame.done)
        self.welcome = frame
        if not frame.problem:
            self._begin(frame)
        return True

    def _begin(self, welcome: Welcome) -> None:
        unsent = []
        for entry in self._window.values():
            if entry.sequence < welcome.next:
                # It has this one, from an earlier connection.
                entry.sent = True
                self._count(entry)
            else:
                if entry.sent and welcome.epoch != self._epoch:
                    entry.deliveries += 1
                entry.sent = False
                unsent.append(entry)
        self._unsent = deque(unsent)
        self._epoch = welcome.epoch

    def _count(self, entry: Outgoing) -> None:
        self._sent_bytes += entry.nbytes
        self._sent_messages += 1

    def _acknowledge(self, below: int, done: Ranges) -> bool:
        if below > self.next_sequence:
            raise ProtocolError(f"an Ack is for message {below - 1}, and there are {self.next_sequence}")
        found = []
        for sequence in self._window:
            if sequence >= below:
                break
            found.append(sequence)
        for first, end in done:
            # By what is in the window: the range itself may be as long as it likes.
            if end - first > len(self._window):
                found += [sequence for sequence in self._window if first <= sequence < end]
            else:
                found += [sequence for sequence in range(first, end) if sequence in self._window]
        for sequence in found:
            entry = self._window.get(sequence)
            if entry is not None:
                if self.welcome is not None and entry.sent:
                    self._sent_bytes -= entry.nbytes
                    self._sent_messages -= 1
                self._drop(entry)
        if found and self._unsent and self._unsent[0].sequence not in self._window:
            self._unsent = deque(entry for entry in self._unsent if entry.sequence in self._window)
        return bool(found)

    def frames(self, now: int) -> list[list[Any]]:
        """The messages that are to be sent now, each as its frames (rules 3 and 5)."""
        welcome = self.welcome
        if welcome is None or welcome.problem or not self._unsent:
            return []
        messages = []
        while self._unsent:
            entry = self._unsent[0]
            if entry.expires and entry.expires <= now:
                self._drop(entry)
            elif (
                entry.nbytes > welcome.max_message
                or self._sent_messages >= welcome.window_messages
                or self._sent_bytes + entry.nbytes > welcome.window_bytes
            ):
                break
            else:
                entry.sent = True
                self._count(entry)
                ttl = max(1, entry.expires - now) if entry.expires else 0
                header = Data(entry.sequence, entry.timestamp_ns, ttl, entry.encoding, entry.deliveries)
                messages.append([_encode(header), entry.blob, *entry.buffers])
            self._unsent.popleft()
        return messages

    def beat(self) -> bytes | None:
        """The sign of life to send once a second; None while nobody wants to hear it."""
        return _encode(Beat()) if self.welcome is not None else None

    def goodbye(self) -> bytes | None:
        """The frame to end with; None if nobody wants to hear it, or the window is not empty."""
        return _encode(Goodbye()) if self.welcome is not None and not self._window else None


# -- the consumer -----------------------------------------------------------------------------------------------------


class Incoming(msgspec.Struct, eq=False):
    """A message that has come. ``expires`` in nanoseconds of the consumer's monotonic clock, 0 for never."""

    source: RemoteSource
    sequence: int
    timestamp_ns: int
    expires: int
    encoding: int
    deliveries: int
    blob: Any
    buffers: list[Any]
    nbytes: int


class RemoteSource:
    """A producer, as the consumer's side knows it."""

    __slots__ = ("address", "changed", "done", "epoch", "heard", "nbytes", "next", "open", "producer")

    def __init__(self, producer: str, epoch: int, first: int) -> None:
        self.producer = producer
        self.epoch = epoch
        self.address: bytes | None = None
        self.next = first
        self.open: dict[int, int] = {}
        """The messages that are not done, ascending, with their bytes."""
        self.done: set[int] = set()
        """The messages that are done while an earlier one is not."""
        self.nbytes = 0
        self.changed = False
        self.heard = 0

    @property
    def below(self) -> int:
        """Everything before this sequence is done."""
        return next(iter(self.open), self.next)

    def ranges(self) -> Ranges:
        """``done``, as an Ack has it."""
        ranges: Ranges = []
        for sequence in sorted(self.done):
            if ranges and ranges[-1][1] == sequence:
                ranges[-1] = (ranges[-1][0], sequence + 1)
            else:
                ranges.append((sequence, sequence + 1))
        return ranges


class RemoteConsumerProtocol:
    """The consumer's side: what came, from whom, and what of it is done.

    It takes ``max_message`` bytes of one message, ``window_bytes`` of one producer's that are not done,
    ``window_messages`` of them, from ``max_producers``. ``epoch`` is a number that no consumer had before, nor one
    near it; a time in nanoseconds will do.
    """

    def __init__(
        self, epoch: int, max_message: int, window_bytes: int, window_messages: int, max_producers: int
    ) -> None:
        self._epoch = epoch
        self.max_message = max_message
        self.window_bytes = window_bytes
        self.window_messages = window_messages
        self.max_producers = max_producers
        self._sources: dict[str, RemoteSource] = {}
        self._addresses: dict[bytes, RemoteSource] = {}
        self._arrived: deque[Incoming] = deque()

    def __len__(self) -> int:
        """How many messages have come and were not handed out."""
        return len(self._arrived)

    # -- frames -------------------------------------------------------------------------------------------------------

    def receive(self, address: bytes, frames: Sequence[Any], now: int) -> bytes | None:
        """Take in what came from ``address``: buffers of bytes, the first of them a header. Returns what to answer.

        Raises ProtocolError for what no producer sends; such an address is not listened to until it says Hello.
        """
        try:
            return self._receive(address, frames, now)
        except ProtocolError:
            self._forget_address(address)
            raise

    def _receive(self, address: bytes, frames: Sequence[Any], now: int) -> bytes | None:
        if not frames:
            raise ProtocolError("there was no frame but the address")
        frame = _decode(_from_producer, bytes(memoryview(frames[0])[: MAX_CONTROL_BYTES + 1]))
        if isinstance(frame, Hello):
            if len(frames) != 1:
                raise ProtocolError(f"a Hello of {len(frames)} frames came")
            return self._greet(address, frame, now)
        source = self._addresses.get(address)
        if source is None:
            # Of a connection that the producer has given up, or will: rule 4.
            return None
        source.heard = now
        if isinstance(frame, Data):
            self._take_in(source, frame, frames, now)
        elif len(frames) != 1:
            raise ProtocolError(f"a {type(frame).__name__} of {len(frames)} frames came")
        elif isinstance(frame, Goodbye):
            self._forget_address(address)
            if not source.open:
                del self._sources[source.producer]
        return None

    def _greet(self, address: bytes, hello: Hello, now: int) -> bytes:
        if hello.version != VERSION:
            return self._refuse(f"it speaks version {VERSION}, and this producer version {hello.version}")
        if address in self._addresses:
            raise ProtocolError("a second Hello came from the same address")
        source = self._sources.get(hello.producer)
        if source is None:
            if len(self._sources) >= self.max_producers and not self._forget_one(now):
                return self._refuse(f"it has {self.max_producers:,} producers already (its max_producers)")
            self._epoch += 1
            source = self._sources[hello.producer] = RemoteSource(hello.producer, self._epoch, hello.first)
        if source.address is not None:
            del self._addresses[source.address]
        self._addresses[address] = source
        source.address = address
        source.heard = now
        source.changed = False
        return _encode(
            Welcome(
                VERSION,
                source.epoch,
                source.next,
                source.below,
                source.ranges(),
                self.max_message,
                self.window_bytes,
                self.window_messages,
                "",
            )
        )

    @staticmethod
    def _refuse(problem: str) -> bytes:
        return _encode(Welcome(VERSION, 0, 0, 0, [], 0, 0, 0, problem))

    def _take_in(self, source: RemoteSource, data: Data, frames: Sequence[Any], now: int) -> None:
        if not 2 <= len(frames) <= 2 + MAX_BUFFERS:
            raise ProtocolError(f"a message of {len(frames):,} frames came; there are 2 to {2 + MAX_BUFFERS:,}")
        if data.encoding >= BLOB_LAST:
            raise ProtocolError(f"a message with encoding {data.encoding} came")
        if data.sequence < source.next:
            # Had it: rule 2. What is done of it, the next Ack says once more.
            source.changed = True
            return
        nbytes = sum(memoryview(frame).nbytes for frame in frames[1:])
        if nbytes > self.max_message:
            raise ProtocolError(f"a message of {nbytes:,} bytes came; {self.max_message:,} are allowed (max_message)")
        if source.nbytes + nbytes > self.window_bytes or len(source.open) >= self.window_messages:
            raise ProtocolError(
                f"producer {source.producer} sent more than it may: {len(source.open) + 1:,} messages and "
                f"{source.nbytes + nbytes:,} bytes that are not done"
            )
        source.next = data.sequence + 1
        source.open[data.sequence] = nbytes
        source.nbytes += nbytes
        self._arrived.append(
            Incoming(
                source,
                data.sequence,
                data.timestamp_ns,
                now + data.ttl_ns if data.ttl_ns else 0,
                data.encoding,
                data.deliveries,
                frames[1],
                list(frames[2:]),
                nbytes,
            )
        )

    def _forget_address(self, address: bytes) -> None:
        source = self._addresses.pop(address, None)
        if source is not None:
            source.address = None

    def _forget_one(self, now: int) -> bool:
        """Forget the producer that was not heard for longest, if that may be (rule 6)."""
        idle = [source for source in self._sources.values() if not source.open and now - source.heard >= _FORGET_NS]
        if not idle:
            return False
        oldest = min(idle, key=lambda source: source.heard)
        if oldest.address is not None:
            self._forget_address(oldest.address)
        del self._sources[oldest.producer]
        return True

    def acks(self, everybody: bool = False) -> list[tuple[bytes, bytes]]:
        """(address, frame) pairs to send: what is newly done, or, for a sign of life, all that is."""
        frames = []
        for address, source in self._addresses.items():
            if source.changed or everybody:
                source.changed = False
                frames.append((address, _encode(Ack(source.below, source.ranges()))))
        return frames

    # -- messages -----------------------------------------------------------------------------------------------------

    def take(self, now: int) -> Incoming | None:
        """The next message, in the order in which they came; None if there is none. What has expired is done."""
        while self._arrived:
            incoming = self._arrived.popleft()
            if not incoming.expires or incoming.expires > now:
                return incoming
            self.finish(incoming.source, incoming.sequence)
        return None

    def put_back(self, incoming: Incoming) -> None:
        """Undo the last ``take``, which gave this message: the next one gives it."""
        self._arrived.appendleft(incoming)

    def finish(self, source: RemoteSource, sequence: int) -> None:
        """Note that a message is done. Idempotent."""
        nbytes = source.open.pop(sequence, None)
        if nbytes is None:
            return
        source.nbytes -= nbytes
        source.changed = True
        below = source.below
        if sequence >= below:
            source.done.add(sequence)
        elif source.done:
            source.done = {number for number in source.done if number >= below}

    def held(self) -> int:
        """How many messages are not done."""
        return sum(len(source.open) for source in self._sources.values())
