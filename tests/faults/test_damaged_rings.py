"""Whatever a ring holds, its reader answers with a typed error in bounded time, or reads what is there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from shmq import (
    CorruptRecordError,
    ForeignSegmentError,
    LayoutVersionError,
    Payload,
    RingReader,
    RingWriter,
    Segment,
    ShmqError,
    TruncatedSegmentError,
    layout,
)
from shmq.layout import (
    ALIGN,
    COMMITTED,
    DESCRIPTOR_WORD,
    EXTRA_WORD,
    HEAD,
    HEADER_BYTES,
    IN_RECORD,
    IN_RING,
    IN_SPILL,
    JUMP,
    MESSAGE,
    PAYLOAD,
    POSITION_WORD,
    RECORD_BYTES,
    REFERENCE,
    RELEASE_BYTE,
    TAIL,
    descriptor,
    pack_tail,
)

Ring = tuple[RingWriter, RingReader]
MakeRing = Callable[..., Ring]
Bytes = NDArray[np.uint8]

KIB = 1024
SIZE = 64 * KIB
BOUND_S = 5.0
BODY_WORD = 3
HUGE = (1 << 64) - 64
BLOBS = [b"first", b"with a small buffer", b"with a payload", b"with a spill", b"last"]


@dataclass(slots=True)
class Scene:
    """A ring of five messages, none of them read yet, and where in it everything lies."""

    writer: RingWriter
    reader: RingReader
    messages: list[int]
    """The offsets of the messages; the positions are the same."""
    payload: Payload
    spill: Payload

    def word(self, offset: int, word: int) -> int:
        return int(self.writer.segment.words[(HEADER_BYTES + offset) // 8 + word])

    def put(self, offset: int, word: int, value: int) -> None:
        self.writer.segment.words[(HEADER_BYTES + offset) // 8 + word] = value

    def put_header(self, word: int, value: int) -> None:
        self.writer.segment.words[word] = value

    def put_reference(self, message: int, where: int, at: int, first: int, nbytes: int) -> None:
        """Overwrite the only reference of a message."""
        body = HEADER_BYTES + self.messages[message] + RECORD_BYTES
        table = body + layout.align(len(BLOBS[message]), 8)
        self.writer.segment.memory[table : table + REFERENCE.size] = REFERENCE.pack(where, at, first, nbytes)

    def set_descriptor(self, offset: int, kind: int, state: int, length: int) -> None:
        self.put(offset, DESCRIPTOR_WORD, descriptor(kind, state, length))


@pytest.fixture
def scene(make_ring: MakeRing) -> Scene:
    writer, reader = make_ring(SIZE)

    def copy(index: int, target: Bytes) -> None:
        target[:] = 1

    messages = [writer.position]
    assert writer.post(BLOBS[0], 0, 0) is not None
    messages.append(writer.position)
    assert writer.post_with(BLOBS[1], 0, 0, 0, [100], copy) is not None
    payload = writer.reserve(200)
    assert payload is not None
    writer.target(payload)[:] = 2
    messages.append(writer.position)
    assert writer.post_with(BLOBS[2], 0, 0, 0, [(payload, 0, 200)], copy) is not None
    spill = writer.reserve_spill(300)
    assert spill is not None
    writer.target(spill)[:] = 3
    messages.append(writer.position)
    assert writer.post_with(BLOBS[3], 0, 0, 0, [(spill, 0, 300)], copy) is not None
    messages.append(writer.position)
    assert writer.post(BLOBS[4], 0, 0) is not None
    return Scene(writer, reader, messages, payload, spill)


@pytest.fixture
def next_reader() -> Iterator[Callable[[RingReader], RingReader]]:
    started: list[RingReader] = []

    def start(reader: RingReader) -> RingReader:
        reader.retire()
        attached = Segment.attach(reader.name)
        try:
            started.append(RingReader(attached, epoch=2))
        except ShmqError:
            attached.retire()
            raise
        return started[-1]

    yield start
    for reader in started:
        reader.retire()


def read_all(reader: RingReader) -> list[tuple[bytes, list[list[int]]]]:
    """Take every message and look at every byte of its buffers."""
    got = []
    for offset, _, _, count, blob, _, _ in iter(reader.take, None):
        got.append((blob, [view.tolist() for view in reader.views(offset, len(blob), count)]))
        reader.free(offset)
    return got


WHOLE = [
    (BLOBS[0], []),
    (BLOBS[1], [[1] * 100]),
    (BLOBS[2], [[2] * 200]),
    (BLOBS[3], [[3] * 300]),
    (BLOBS[4], []),
]


def assert_usable(make_ring: MakeRing) -> None:
    writer, reader = make_ring(SIZE)
    writer.post(b"all is well", 0, 0)
    assert [blob for blob, _ in read_all(reader)] == [b"all is well"]


def corrupt(read: Callable[[], object], name: str) -> CorruptRecordError:
    """The error that ``read`` raises, which has to come soon and to name the ring."""
    begun = time.monotonic()
    with pytest.raises(CorruptRecordError) as caught:
        read()
    assert time.monotonic() - begun < BOUND_S
    error = caught.value
    assert error.ring == name
    assert name in str(error)
    assert error.position >= 0
    assert f"position {error.position}" in str(error)
    return error


def test_the_scene_is_whole_before_it_is_damaged(scene: Scene) -> None:
    assert read_all(scene.reader) == WHOLE


# -- the chain --------------------------------------------------------------------------------------------------------

CHAIN: dict[str, Callable[[Scene], object]] = {
    "head a little beyond": lambda scene: scene.put_header(HEAD, scene.writer.position + 192),
    "head far beyond": lambda scene: scene.put_header(HEAD, scene.writer.position + (1 << 40)),
    "head at its very end": lambda scene: scene.put_header(HEAD, HUGE),
    "head between two records": lambda scene: scene.put_header(HEAD, scene.writer.position - 64),
    "head at no multiple of 64": lambda scene: scene.put_header(HEAD, scene.writer.position + 1),
    "position too large": lambda scene: scene.put(scene.messages[1], POSITION_WORD, scene.messages[1] + 64),
    "position too small": lambda scene: scene.put(scene.messages[1], POSITION_WORD, scene.messages[1] - 64),
    "position invalid": lambda scene: scene.put(scene.messages[1], POSITION_WORD, layout.INVALID_POSITION),
    "message of no length": lambda scene: scene.set_descriptor(scene.messages[1], MESSAGE, COMMITTED, 0),
    "message shorter than a header": lambda scene: scene.set_descriptor(scene.messages[1], MESSAGE, COMMITTED, 64),
    "message too short": lambda scene: scene.set_descriptor(scene.messages[1], MESSAGE, COMMITTED, 128),
    "message too long": lambda scene: scene.set_descriptor(scene.messages[0], MESSAGE, COMMITTED, 256),
    "message to beyond the head": lambda scene: scene.set_descriptor(scene.messages[4], MESSAGE, COMMITTED, 320),
    "message to beyond the ring": lambda scene: scene.set_descriptor(scene.messages[1], MESSAGE, COMMITTED, SIZE),
    "message of the greatest length": lambda scene: scene.set_descriptor(
        scene.messages[1], MESSAGE, COMMITTED, layout.MAX_LENGTH
    ),
    "message of an odd length": lambda scene: scene.set_descriptor(scene.messages[0], MESSAGE, COMMITTED, 193),
    "message with a huge body": lambda scene: scene.put(scene.messages[1], BODY_WORD, HUGE),
    "message with a body a little too long": lambda scene: scene.put(scene.messages[0], BODY_WORD, 65),
    "message with endless buffers": lambda scene: scene.put(scene.messages[1], EXTRA_WORD, (1 << 64) - 1),
    "message with too many buffers": lambda scene: scene.put(scene.messages[1], EXTRA_WORD, 100 << 8),
    "message that is reserved": lambda scene: scene.set_descriptor(scene.messages[1], MESSAGE, layout.RESERVED, 320),
    "payload of no length": lambda scene: scene.set_descriptor(scene.payload.offset, PAYLOAD, COMMITTED, 0),
    "payload of an odd length": lambda scene: scene.set_descriptor(scene.payload.offset, PAYLOAD, COMMITTED, 385),
    "payload to beyond the head": lambda scene: scene.set_descriptor(scene.payload.offset, PAYLOAD, COMMITTED, 1 << 40),
    "payload too long": lambda scene: scene.set_descriptor(scene.payload.offset, PAYLOAD, COMMITTED, 384 + 64),
    "payload too short": lambda scene: scene.set_descriptor(scene.payload.offset, PAYLOAD, COMMITTED, 384 - 64),
    "kind zero": lambda scene: scene.set_descriptor(scene.messages[1], 0, COMMITTED, 320),
    "kind unknown": lambda scene: scene.set_descriptor(scene.messages[1], 77, COMMITTED, 320),
    "jump of no length": lambda scene: scene.set_descriptor(scene.messages[1], JUMP, COMMITTED, 0),
    "jump to beyond the ring": lambda scene: jump(scene, SIZE),
    "jump to the last 64 bytes": lambda scene: jump(scene, SIZE - ALIGN),
    "jump to far beyond the ring": lambda scene: jump(scene, HUGE),
    "jump to no multiple of 64": lambda scene: jump(scene, 65),
    "jump to itself": lambda scene: jump(scene, scene.messages[1]),
    "jump back": lambda scene: jump(scene, 0),
    "jump to where nothing is": lambda scene: jump(scene, SIZE // 2),
}


def jump(scene: Scene, target: int) -> None:
    scene.set_descriptor(scene.messages[1], JUMP, COMMITTED, scene.payload.offset - scene.messages[1])
    scene.put(scene.messages[1], EXTRA_WORD, target)


@pytest.mark.parametrize("starting", [False, True], ids=["a reader at work", "a reader that starts"])
@pytest.mark.parametrize("damage", CHAIN)
def test_a_damaged_chain_is_a_typed_error_that_names_ring_and_position(
    scene: Scene,
    make_ring: MakeRing,
    next_reader: Callable[[RingReader], RingReader],
    damage: str,
    starting: bool,
) -> None:
    CHAIN[damage](scene)
    reader = next_reader(scene.reader) if starting else scene.reader
    read: list[bytes] = []

    def read_until_it_fails() -> None:
        for taken in iter(reader.take, None):
            read.append(taken[4])

    corrupt(read_until_it_fails, reader.name)
    assert read == BLOBS[: len(read)]
    # It stays an error, and does not become a hang or a skip.
    corrupt(read_until_it_fails, reader.name)
    assert_usable(make_ring)


@pytest.mark.parametrize("head", [0, 192, 64])
def test_a_head_that_went_back_is_a_typed_error(scene: Scene, head: int) -> None:
    assert read_all(scene.reader) == WHOLE
    scene.put_header(HEAD, head)
    corrupt(scene.reader.take, scene.reader.name)


@pytest.mark.parametrize(
    ("position", "offset"),
    [(0, SIZE), (0, SIZE - ALIGN), (0, layout.MAX_RING_SIZE - ALIGN), (64, 0), (192, 4096), (1 << 39, 0)],
)
def test_a_tail_that_points_nowhere_stops_a_reader_that_starts(
    scene: Scene, make_ring: MakeRing, next_reader: Callable[[RingReader], RingReader], position: int, offset: int
) -> None:
    scene.put_header(TAIL, pack_tail(position, offset))
    corrupt(lambda: next_reader(scene.reader), scene.reader.name)
    assert_usable(make_ring)


def test_a_segment_on_which_no_reader_can_start_can_be_closed_at_once(scene: Scene) -> None:
    scene.put_header(TAIL, pack_tail(64, 0))
    attached = Segment.attach(scene.reader.name)
    try:
        RingReader(attached, epoch=2)
    except CorruptRecordError:
        attached.close()
    finally:
        attached.retire()
    assert attached.memory.closed


def test_a_reader_at_work_needs_no_tail(scene: Scene) -> None:
    scene.put_header(TAIL, (1 << 64) - 1)
    assert read_all(scene.reader) == WHOLE


def test_damage_behind_a_long_queue_is_found_soon_too(make_ring: MakeRing) -> None:
    writer, reader = make_ring(1024 * KIB)
    count = 0
    while writer.post(b"x", 0, 0) is not None:
        count += 1
    assert count > 4000
    writer.segment.words[HEAD] = writer.position + 192
    for _ in range(count):
        assert reader.take() is not None
    corrupt(reader.take, reader.name)


def test_counting_a_damaged_ring_ends_as_well(scene: Scene) -> None:
    scene.put(scene.messages[1], DESCRIPTOR_WORD, descriptor(MESSAGE, COMMITTED, 0))
    corrupt(scene.reader.pending, scene.reader.name)


# -- one message ------------------------------------------------------------------------------------------------------

REFERENCES: dict[str, tuple[int, Callable[[Scene], tuple[int, int, int, int]]]] = {
    "kind zero": (2, lambda scene: (scene.payload.offset, scene.payload.position, 0, 200)),
    "kind unknown": (2, lambda scene: (99 << 56 | scene.payload.offset, scene.payload.position, 0, 200)),
    "small buffer too long": (1, lambda scene: (IN_RECORD << 56 | 192, 0, 0, 129)),
    "small buffer of any length": (1, lambda scene: (IN_RECORD << 56 | 192, 0, 0, HUGE)),
    "small buffer behind its record": (1, lambda scene: (IN_RECORD << 56 | 320, 0, 0, 1)),
    "small buffer far away": (1, lambda scene: (IN_RECORD << 56 | ((1 << 56) - 1), 0, 0, 1)),
    "offset beyond the ring": (2, lambda scene: (IN_RING << 56 | SIZE, 0, 0, 200)),
    "offset in the last 64 bytes": (2, lambda scene: (IN_RING << 56 | SIZE - ALIGN, 0, 0, 0)),
    "offset far beyond the ring": (2, lambda scene: (IN_RING << 56 | (1 << 55), 0, 0, 200)),
    "offset of no record": (2, lambda scene: (IN_RING << 56 | 32 * KIB, 0, 0, 200)),
    "offset at no multiple of 64": (2, lambda scene: (IN_RING << 56 | scene.payload.offset + 8, 0, 0, 200)),
    "offset of a message": (2, lambda scene: (IN_RING << 56 | scene.messages[1], scene.messages[1], 0, 1)),
    "position of another time": (2, lambda scene: (IN_RING << 56 | scene.payload.offset, 64, 0, 200)),
    "bytes beyond the payload": (
        2,
        lambda scene: (IN_RING << 56 | scene.payload.offset, scene.payload.position, 1, 200),
    ),
    "first byte far away": (
        2,
        lambda scene: (IN_RING << 56 | scene.payload.offset, scene.payload.position, HUGE, 128),
    ),
    "length without end": (
        2,
        lambda scene: (IN_RING << 56 | scene.payload.offset, scene.payload.position, 0, (1 << 64) - 1),
    ),
    "spill segment that is not there": (3, lambda scene: (IN_SPILL << 56, 12345 << 32 | 1, 0, 300)),
    "spill segment of another use": (3, lambda scene: (IN_SPILL << 56, 1 << 32 | 2, 0, 300)),
    "bytes beyond the spill segment": (3, lambda scene: (IN_SPILL << 56, 1 << 32 | 1, 4000, 300)),
    "first byte far beyond the spill segment": (3, lambda scene: (IN_SPILL << 56, 1 << 32 | 1, HUGE, 300)),
}


@pytest.mark.parametrize("damage", REFERENCES)
def test_a_damaged_reference_is_a_typed_error_of_its_message_alone(
    scene: Scene, make_ring: MakeRing, damage: str
) -> None:
    message, reference = REFERENCES[damage]
    scene.put_reference(message, *reference(scene))
    reader = scene.reader
    for index, blob in enumerate(BLOBS):
        taken = reader.take()
        assert taken is not None
        offset, _, _, count, read, _, _ = taken
        assert read == blob
        if index == message:
            error = corrupt(partial(reader.views, offset, len(read), count), reader.name)
            assert error.position == scene.messages[message]
        else:
            assert [view.tolist() for view in reader.views(offset, len(read), count)] == WHOLE[index][1]
        reader.free(offset)
    assert reader.take() is None
    assert reader.pending() == 0
    assert_usable(make_ring)


PAYLOADS: dict[str, Callable[[Scene], object]] = {
    "not there any more": lambda scene: scene.put(scene.payload.offset, POSITION_WORD, layout.INVALID_POSITION),
    "never committed": lambda scene: scene.set_descriptor(scene.payload.offset, PAYLOAD, layout.RESERVED, 384),
    "aborted": lambda scene: scene.set_descriptor(scene.payload.offset, PAYLOAD, layout.ABORTED, 384),
    "shorter than its body": lambda scene: scene.put(scene.payload.offset, BODY_WORD, 384),
    "with a huge body": lambda scene: scene.put(scene.payload.offset, BODY_WORD, HUGE),
    "with a short body": lambda scene: scene.put(scene.payload.offset, BODY_WORD, 199),
}


@pytest.mark.parametrize("damage", PAYLOADS)
def test_a_damaged_payload_is_a_typed_error(scene: Scene, damage: str) -> None:
    PAYLOADS[damage](scene)
    corrupt(lambda: read_all(scene.reader), scene.reader.name)


def test_a_payload_that_reaches_beyond_the_ring_is_a_typed_error(scene: Scene) -> None:
    for _ in range(3):
        assert scene.reader.take() is not None
    scene.put(scene.payload.offset, BODY_WORD, SIZE)
    scene.set_descriptor(scene.payload.offset, PAYLOAD, COMMITTED, 2 * SIZE)
    scene.put_reference(2, IN_RING << 56 | scene.payload.offset, scene.payload.position, 0, SIZE)
    corrupt(lambda: scene.reader.views(scene.messages[2], len(BLOBS[2]), 1), scene.reader.name)


SPILLS: dict[str, Callable[[Segment], object]] = {
    "the ring's own kind": lambda spill: spill.words.__setitem__(layout.MAGIC, layout.RING_MAGIC),
    "another layout": lambda spill: spill.words.__setitem__(layout.LAYOUT_VERSION, 99),
    "another size": lambda spill: spill.words.__setitem__(layout.RING_SIZE, 1 << 40),
    "another generation": lambda spill: spill.words.__setitem__(layout.GENERATION, 99),
}


@pytest.mark.parametrize("damage", SPILLS)
def test_a_damaged_spill_segment_is_a_typed_error(scene: Scene, damage: str) -> None:
    assert scene.spill.spill is not None
    SPILLS[damage](scene.spill.spill.segment)
    error = corrupt(lambda: read_all(scene.reader), scene.reader.name)
    assert error.position == scene.messages[3]


@pytest.mark.parametrize("length", [SIZE, 1 << 40, layout.MAX_LENGTH])
def test_a_message_that_grows_after_it_was_taken_is_a_typed_error(scene: Scene, length: int) -> None:
    offsets = [taken[0] for taken in iter(scene.reader.take, None)]
    scene.set_descriptor(offsets[1], MESSAGE, COMMITTED, length)
    scene.put_reference(1, IN_RECORD << 56 | 192, 0, 0, length - 192)
    corrupt(lambda: scene.reader.views(offsets[1], len(BLOBS[1]), 1), scene.reader.name)


# -- the header of the segment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value", "error"),
    [
        (layout.MAGIC, 0, ForeignSegmentError),
        (layout.MAGIC, layout.RING_MAGIC ^ 1, ForeignSegmentError),
        (layout.MAGIC, layout.SPILL_MAGIC, ForeignSegmentError),
        (layout.LAYOUT_VERSION, 0, LayoutVersionError),
        (layout.LAYOUT_VERSION, layout.VERSION + 1, LayoutVersionError),
        (layout.LAYOUT_VERSION, (1 << 64) - 1, LayoutVersionError),
        (layout.HEADER_SIZE, 0, LayoutVersionError),
        (layout.HEADER_SIZE, 1 << 40, LayoutVersionError),
        (layout.RING_SIZE, 0, TruncatedSegmentError),
        (layout.RING_SIZE, SIZE + layout.PAGE, TruncatedSegmentError),
        (layout.RING_SIZE, (1 << 64) - 1, TruncatedSegmentError),
    ],
)
def test_a_damaged_identity_is_a_typed_error(
    scene: Scene, make_ring: MakeRing, word: int, value: int, error: type[ShmqError]
) -> None:
    scene.put_header(word, value)
    with pytest.raises(error, match=scene.reader.name):
        Segment.attach(scene.reader.name)
    assert read_all(scene.reader) == WHOLE
    assert_usable(make_ring)


def test_every_single_bit_of_the_identity_is_checked(scene: Scene) -> None:
    for word in (layout.MAGIC, layout.LAYOUT_VERSION, layout.HEADER_SIZE, layout.RING_SIZE):
        for bit in range(64):
            value = scene.writer.segment.words[word]
            scene.put_header(word, value ^ 1 << bit)
            if word == layout.RING_SIZE and layout.align(value ^ 1 << bit, layout.PAGE) == SIZE:
                # Within the same page, so it can't be told from a ring of that size, and is as safe to read.
                Segment.attach(scene.reader.name).close()
            else:
                with pytest.raises((ForeignSegmentError, LayoutVersionError, TruncatedSegmentError)):
                    Segment.attach(scene.reader.name)
            scene.put_header(word, value)
    Segment.attach(scene.reader.name).close()


# -- anything ---------------------------------------------------------------------------------------------------------


class Fuzz:
    """A ring full of everything, damaged again and again in a few places, and restored each time."""

    def __init__(self, writer: RingWriter, seed: int) -> None:
        self.writer = writer
        self.random = random.Random(seed)
        spill = writer.reserve_spill(5000)
        assert spill is not None
        for number in range(40):
            payload = writer.reserve(number * 10)
            assert payload is not None
            writer.target(payload)[:] = number
            if number % 7 == 3:
                writer.let_go(payload)
                continue
            buffers: list[tuple[Payload, int, int] | int] = [(payload, 0, number), number, (spill, number, 100)]
            assert writer.post_with(b"x" * number, 1, 2, 0, buffers[: number % 4], copy) is not None
            writer.let_go(payload)
        memory = writer.segment.memory
        self.pristine = bytes(memory)
        records = [HEADER_BYTES + entry[0] for entry in writer._chain]
        self.places = [
            *(word * 8 + byte for word in (HEAD, TAIL, layout.NEXT_SEQUENCE) for byte in range(8)),
            *(record + byte for record in records for byte in range(RELEASE_BYTE + 1)),
            *(record + RECORD_BYTES + byte for record in records for byte in range(160)),
        ]

    def damage(self) -> None:
        memory = self.writer.segment.memory
        for _ in range(self.random.choice([1, 1, 2, 5])):
            kind = self.random.randrange(4)
            place = self.random.randrange(len(memory)) if kind == 0 else self.random.choice(self.places)
            if kind == 3:
                # A whole word: of another record, or of nothing in particular.
                place &= -8
                value = self.random.choice(
                    [0, 64, HUGE, self.random.getrandbits(64), self.random.randrange(SIZE) & -64]
                )
                memory[place : place + 8] = value.to_bytes(8, "little")
            else:
                memory[place] ^= 1 << self.random.randrange(8)

    def restore(self) -> None:
        self.writer.segment.memory[:] = self.pristine


def copy(index: int, target: Bytes) -> None:
    target[:] = index


def test_a_ring_with_random_damage_is_read_or_refused(make_ring: MakeRing) -> None:
    writer, reader = make_ring(SIZE)
    fuzz = Fuzz(writer, seed=1)
    refused = read = 0
    longest = 0.0
    for _ in range(4000):
        fuzz.damage()
        begun = time.monotonic()
        try:
            attached = Segment.attach(reader.name)
        except ShmqError:
            refused += 1
        else:
            try:
                read_all(RingReader(attached, epoch=2))
                read += 1
            except ShmqError:
                refused += 1
            attached.close()
        longest = max(longest, time.monotonic() - begun)
        fuzz.restore()
    assert refused > 500
    assert read > 500
    assert longest < BOUND_S
    assert len(read_all(RingReader(Segment.attach(reader.name), epoch=3))) > 30


def test_a_reader_at_work_survives_random_damage(make_ring: MakeRing) -> None:
    writer, reader = make_ring(SIZE)
    fuzz = Fuzz(writer, seed=2)
    refused = read = 0
    for _ in range(1500):
        attached = Segment.attach(reader.name)
        running = RingReader(attached, epoch=2)
        try:
            taken = [running.take() for _ in range(fuzz.random.randrange(30))]
            fuzz.damage()
            for each in taken:
                assert each is not None
                running.views(each[0], len(each[4]), each[3])
                running.read(each[0])
            read_all(running)
            running.pending()
            read += 1
        except ShmqError:
            refused += 1
        running.retire()
        fuzz.restore()
    assert refused > 200
    assert read > 200


def test_the_writer_of_a_ring_with_random_damage_goes_on_or_waits(make_ring: MakeRing) -> None:
    writer, _ = make_ring(SIZE)
    fuzz = Fuzz(writer, seed=3)
    for number in range(300):
        fuzz.damage()
        writer.reclaim()
        writer.unfinished()
        payload = writer.reserve(number)
        if payload is not None:
            writer.let_go(payload)
        writer.post(b"more", 0, 0)
    assert writer.next_sequence > 30
