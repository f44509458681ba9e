"""One case: a shape, what is damaged in it and when; and what the consumer makes of it."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from fmq import Consumer, Message, QueueEmptyError, ShmqError
from shmq import collect, layout
from shmq.layout import HEADER_BYTES, RECORD_BYTES
from shmq.segment import DIRECTORY, names
from tests.fuzz.rings import RING, SHAPES, Picture, picture
from tests.queues import Place, address_of

MOST_MESSAGES = 2000
"""No picture holds so many; a consumer that gets more goes round in circles."""
MOST_SECONDS = 5.0

_INTERESTING = [0, 1, 63, 64, 128, 4096, RING, RING - 64, 1 << 31, 1 << 32, (1 << 54) - 64, 1 << 63, (1 << 64) - 1]
_VARIABLE = re.compile(r"""[0-9][0-9,.]*|b?'[^']*'|b?"[^"]*\"""")
"""What differs from case to case in the text of an error."""

_HEADER = [
    *range(layout.HEAD * 8, layout.WANTED * 8 + 8),
    *range(layout.EPOCH * 8, layout.ASLEEP * 8 + 8),
    *range(56),
]


class Damage(msgspec.Struct, array_like=True, frozen=True):
    """Bytes that are written over a file: the ring (0) or the spill segment of that number. ``cut``: at its end."""

    file: int
    place: int
    data: str
    cut: bool = False


class Case(msgspec.Struct, frozen=True):
    """``after``: how many messages are taken, and held, before the damage is done; -1: it is done before all."""

    shape: str
    damage: list[Damage]
    after: int = -1
    note: str = ""
    outcome: list[str] = []


class FindingError(Exception):
    """Something that must not happen, whatever the bytes are."""


@dataclass(slots=True)
class Outcome:
    """What a consumer made of a case: messages by number, errors by type, and the kinds of their texts."""

    messages: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    kinds: set[str] = field(default_factory=set)

    def add(self, error: ShmqError) -> None:
        self.errors[type(error).__name__] += 1
        text = _VARIABLE.sub("N", re.sub(r"shmq:\S+|\(.*", "", str(error).partition("Its unread")[0]))
        self.kinds.add(f"{type(error).__name__}: {text[:80]}")


def random_case(seed: int) -> Case:
    """The case of this seed."""
    chance = random.Random(seed)
    shape = chance.choice(list(SHAPES))
    whole = picture(shape)
    damage = [_random_damage(chance, whole) for _ in range(chance.choice([1, 1, 1, 2, 3, 8]))]
    return Case(shape, damage, chance.choice([-1, -1, 0, 1, 3, 8]), f"seed {seed}")


def _random_damage(chance: random.Random, whole: Picture) -> Damage:
    file = chance.choice([0, 0, 0, *whole.spills])
    data = whole.spills[file] if file else whole.ring
    kind = chance.randrange(10)
    if kind == 0:
        # Anywhere at all.
        place = chance.randrange(len(data))
    elif file or kind == 1:
        place = chance.choice(_HEADER)
    else:
        record = HEADER_BYTES + chance.choice(whole.records)
        place = record + (chance.randrange(72) if kind < 7 else RECORD_BYTES + chance.randrange(200))
    how = chance.randrange(8)
    if how < 3:
        return Damage(file, place, bytes([data[place] ^ 1 << chance.randrange(8)]).hex())
    if how == 3:
        return Damage(file, place, chance.randbytes(chance.choice([1, 2, 4, 8])).hex())
    place &= -8
    if how == 4:
        value = chance.choice(_INTERESTING)
        return Damage(file, place, value.to_bytes(8, "little").hex())
    if how == 5:
        # A word near to what it was.
        near = int.from_bytes(data[place : place + 8], "little") + chance.choice([-64, -1, 1, 64, 1 << 10, 1 << 16])
        return Damage(file, place, (near & (1 << 64) - 1).to_bytes(8, "little").hex())
    if how == 6:
        # Something else of the same file: another record's header, say.
        other = HEADER_BYTES + chance.choice(whole.records) if not file else chance.randrange(len(data) - 200)
        return Damage(file, place, data[other : other + chance.choice([8, 64, 128])].hex())
    if chance.random() < 0.1:
        return Damage(file, chance.randrange(len(data)), "", cut=True)
    return Damage(file, place, bytes(chance.choice([8, 64, 500])).hex())


# -- running ----------------------------------------------------------------------------------------------------------


class Stage:
    """A place in the shared-memory directory and a runtime directory, used for one case after another."""

    def __init__(self) -> None:
        # In memory: a disk would take longer for the directories of a queue than all the rest does.
        self.place = Place(DIRECTORY)
        self._healthy: dict[str, list[str]] = {}

    def run(self, case: Case) -> Outcome:
        """Run one case beside a whole ring of the same shape. Raises FindingError, or whatever else came up."""
        expected = self._healthy.get(case.shape)
        if expected is None:
            expected = self._healthy[case.shape] = self._read_whole(case.shape)
        outcome = Outcome()
        damaged, whole = self._names("damaged"), self._names("whole")
        self._write(case.shape, whole)
        self._write(case.shape, damaged)
        if case.after < 0:
            self._damage(case, damaged)
        begun = time.monotonic()
        arrived: list[str] = []
        consumer = Consumer(self.place.queue, **self.place.where)
        try:
            self._read(consumer, case, outcome, arrived)
            consumer.close()
            collect(self.place.path.rings)
            collect(self.place.path.rings, discard=True)
        finally:
            del consumer
            self.clean()
        if arrived != expected:
            raise FindingError(f"of the whole ring {len(arrived)} messages came right, of {len(expected)}")
        if time.monotonic() - begun > MOST_SECONDS:
            raise FindingError(f"the case took {time.monotonic() - begun:.1f} s")
        return outcome

    def _read(self, consumer: Consumer, case: Case, outcome: Outcome, arrived: list[str]) -> None:
        """Take, look at and give back all there is; of the whole ring ``arrived`` gets the digests."""
        held = []
        for _ in range(max(case.after, 0)):
            message = self._take(consumer, outcome)
            if message is not None:
                self._note(message, arrived)
                held.append(message)
            del message
        if case.after >= 0:
            self._damage(case, self._names("damaged"))
        for number, message in enumerate(held):
            _give_back(message, number, outcome)
        held.clear()
        for number in range(MOST_MESSAGES + 1):
            before = outcome.errors.total()
            message = self._take(consumer, outcome)
            if message is not None:
                _look_at(message, outcome)
                self._note(message, arrived)
                _give_back(message, number, outcome)
            elif before == outcome.errors.total():
                break
            del message
        else:
            raise FindingError(f"more than {MOST_MESSAGES} messages")
        for aside in consumer.set_aside():
            try:
                _touch(aside.read(), outcome)
            except ShmqError as error:
                outcome.add(error)
            aside.discard()

    def _note(self, message: Message, arrived: list[str]) -> None:
        if message.producer == "whole":
            arrived.append(digest(message))

    def close(self) -> None:
        self.clean()
        shutil.rmtree(self.place.directory)

    def _names(self, ending: str) -> str:
        return self.place.path.rings + ending

    def _read_whole(self, shape: str) -> list[str]:
        self._write(shape, self._names("whole"))
        consumer = Consumer(self.place.queue, **self.place.where)
        outcome = Outcome()
        read: list[str] = []
        self._read(consumer, Case(shape, []), outcome, read)
        consumer.close()
        self.clean()
        if outcome.errors or not read:
            raise FindingError(f"a whole ring of shape {shape} could not be read: {outcome}")
        return read

    @staticmethod
    def _take(consumer: Consumer, outcome: Outcome) -> Message | None:
        try:
            message = consumer.get(timeout=0)
        except QueueEmptyError:
            return None
        except ShmqError as error:
            outcome.add(error)
            return None
        outcome.messages += 1
        return message

    @staticmethod
    def _write(shape: str, name: str) -> None:
        whole = picture(shape)
        for number, data in [(0, whole.ring), *whole.spills.items()]:
            path = os.path.join(DIRECTORY, f"{name}.{number}" if number else name)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)

    @staticmethod
    def _damage(case: Case, name: str) -> None:
        for damage in case.damage:
            path = os.path.join(DIRECTORY, f"{name}.{damage.file}" if damage.file else name)
            if not os.path.exists(path):
                continue
            if damage.cut:
                if case.after < 0:
                    # Of a mapped file it is the kernel's SIGBUS, which nothing here can prevent.
                    os.truncate(path, damage.place)
                continue
            with open(path, "r+b") as file:
                file.seek(damage.place)
                file.write(bytes.fromhex(damage.data)[: max(0, os.path.getsize(path) - damage.place)])

    def clean(self) -> None:
        """Remove what a case left, however it ended."""
        for name in names(self.place.path.rings):
            os.unlink(os.path.join(DIRECTORY, name))
        shutil.rmtree(self.place.runtime, ignore_errors=True)


def _give_back(message: Message, index: int, outcome: Outcome) -> None:
    if index % 4 == 1:
        try:
            _touch(message.detach(), outcome)
        except ShmqError as error:
            outcome.add(error)
    message.release()


def _look_at(message: Message, outcome: Outcome) -> None:
    """Read every byte that was handed out, and see that it lies in a segment or in memory of this process's own."""
    arrays = list(_arrays(message.payload))
    _touch(message.payload, outcome)
    views = [array for array in arrays if array.base is not None and array.nbytes]
    if not views or message._lease is None:
        return
    reader = message._source.reader
    segments = [np.frombuffer(segment.memory, np.uint8) for segment in (reader.segment, *reader._spills.values())]
    ranges = [(address_of(segment), address_of(segment) + segment.nbytes) for segment in segments]
    for array in views:
        start = address_of(array)
        if not any(low <= start and start + array.nbytes <= high for low, high in ranges):
            raise FindingError(f"an array of {array.nbytes} bytes lies outside the segments")


def _touch(payload: Any, outcome: Outcome) -> None:
    for array in _arrays(payload):
        array.tobytes()
    outcome.kinds.add("a message")


def _arrays(tree: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _arrays(key)
            yield from _arrays(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _arrays(value)


def digest(message: Message) -> str:
    """What tells one message from every other: its number and all of its content."""
    content = hashlib.sha1(repr(message.sequence).encode())
    _digest(message.payload, content)
    return content.hexdigest()


def _digest(tree: Any, content: Any) -> None:
    content.update(type(tree).__name__.encode())
    if isinstance(tree, np.ndarray):
        content.update(f"{tree.dtype}{tree.shape}".encode())
        content.update(tree.tobytes())
    elif isinstance(tree, dict):
        for key, value in tree.items():
            _digest(key, content)
            _digest(value, content)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _digest(value, content)
    elif isinstance(tree, memoryview):
        content.update(tree.tobytes())
    else:
        content.update(repr(tree).encode())
