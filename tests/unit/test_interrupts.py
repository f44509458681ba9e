"""An exception between any two steps (Ctrl-C raises one) leaves writer and reader as they should be."""

from __future__ import annotations

import contextlib
import linecache
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

from fmq import QueueEmptyError
from shmq import Payload, RingReader, reader, writer
from shmq.layout import FREE
from tests.conftest import Ring
from tests.queues import Place, drain, is_empty, place_fixture

__all__ = ["place_fixture"]

MakeRing = Callable[..., Ring]
REPAIRS = {"_repair", "_trace", "_gap_end", "let_go"}


@contextmanager
def interrupt(step: int, where: ModuleType) -> Iterator[None]:
    """Raise KeyboardInterrupt at the ``step``-th line that a module's code executes from here on.

    Not where a function only returns what it has: there the interpreter looks for no signal.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != where.__file__ or frame.f_code.co_name in REPAIRS:
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()
        if event == "line" and not (source[0] == "return" and len(source) == 2 and source[1].isidentifier()):
            lines += 1
            if lines == step:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def repr_of(action: object) -> str:
    return type(action).__name__


def copy(index: int, target: np.ndarray[Any, Any]) -> None:
    target[:] = index + 1


class Life:
    """A ring in use, with what was announced in it."""

    def __init__(self, make_ring: MakeRing) -> None:
        self.writer, self.reader = make_ring(64 * 1024, lap=4096)
        self.sent: list[bytes] = []
        self.payload: Payload | None = None

    def begin(self) -> None:
        for number in range(20):
            self.post(b"%d" % number * 200)

    def post(self, blob: bytes) -> None:
        assert self.writer.post(blob, 0, 0) is not None
        self.sent.append(blob)

    def read_all(self) -> None:
        """Everything that was announced comes, whole, in order and without a gap."""
        sequences = []
        while (taken := self.reader.take()) is not None:
            sequences.append(taken[1])
            assert taken[4] == self.sent[taken[1]]
            assert taken[6] == 0
            views = self.reader.views(taken[0], len(taken[4]), taken[3])
            for view in views:
                assert np.all(view == view[:1])
            del views
            self.reader.free(taken[0])
        if sequences:
            assert sequences == list(range(sequences[0], len(self.sent)))
        assert self.writer.next_sequence == len(self.sent)
        self.writer.reclaim()

    def go_on(self) -> None:
        """Use the ring for a few laps more, and find all of it free at the end."""
        for number in range(300):
            payload = self.writer.reserve(number)
            assert payload is not None
            self.writer.target(payload)[:] = 7
            assert self.writer.post_with(b"after", 0, 0, 0, [(payload, 0, number)], copy) is not None
            self.sent.append(b"after")
            self.writer.let_go(payload)
            if number % 20 == 0:
                self.read_all()
        self.read_all()
        assert not self.writer._chain
        assert sum(end - start for start, end in self.writer._gaps(self.writer._offset)) == self.writer.size


class Action:
    """Something to be interrupted, between ``prepare`` and ``clean_up``, which are not. ``blob`` is what it posts."""

    blob = b"acted"

    def prepare(self, life: Life) -> None:
        """Nothing, by default."""

    def act(self, life: Life) -> None:
        life.writer.post(self.blob, 0, 0)

    def clean_up(self, life: Life) -> None:
        """Nothing, by default."""


class AtATurn(Action):
    def prepare(self, life: Life) -> None:
        life.read_all()
        life.writer._turn_at = 0


class Reserve(Action):
    payload: Payload | None = None

    def act(self, life: Life) -> None:
        self.payload = life.writer.reserve(1000)

    def clean_up(self, life: Life) -> None:
        if self.payload is not None:
            life.writer.let_go(self.payload)
        self.payload = None


class WithBuffers(Reserve):
    def prepare(self, life: Life) -> None:
        self.payload = life.writer.reserve(1000)
        assert self.payload is not None
        life.writer.target(self.payload)[:] = 5

    def act(self, life: Life) -> None:
        assert self.payload is not None
        life.writer.post_with(self.blob, 0, 0, 0, [(self.payload, 0, 1000), 50], copy)


class WhenFull(Action):
    """Every third message is held, the oldest too, so that there is room after a fold only."""

    blob = b"y" * 3900

    def prepare(self, life: Life) -> None:
        life.read_all()
        while life.writer.post(self.blob, 0, 0) is not None:
            life.sent.append(self.blob)
        held = [taken[0] for taken in iter(life.reader.take, None)]
        self.rest = held[::3]
        for offset in set(held) - set(self.rest):
            life.reader.free(offset)

    def clean_up(self, life: Life) -> None:
        for offset in self.rest:
            life.reader.free(offset)


@pytest.mark.parametrize("action", [Action(), AtATurn(), Reserve(), WithBuffers(), WhenFull()], ids=repr_of)
def test_a_writer_that_is_interrupted_anywhere_goes_on(make_ring: MakeRing, action: Action) -> None:
    life = Life(make_ring)
    step = 0
    interrupted = True
    while interrupted and step < 2000:
        step += 1
        life.begin()
        action.prepare(life)
        interrupted = False
        try:
            with interrupt(step, writer):
                action.act(life)
        except KeyboardInterrupt:
            interrupted = True
        if life.writer.next_sequence > len(life.sent):
            # Whether it was announced before the exception came, only the ring can say.
            life.sent.append(action.blob)
        action.clean_up(life)
        life.read_all()
        life.go_on()
    assert step > 10
    assert life.writer.segment.words[writer.FOLDS] > 0 or not isinstance(action, WhenFull)


def test_a_reader_that_is_interrupted_anywhere_passes_over_nothing(make_ring: MakeRing) -> None:
    life = Life(make_ring)
    step = 0
    interrupted = True
    while interrupted:
        step += 1
        first = len(life.sent)
        life.begin()
        interrupted = False
        got: list[tuple[int, int]] = []
        try:
            with interrupt(step, reader):
                for _ in range(3):
                    taken = life.reader.take()
                    assert taken is not None
                    got.append((taken[0], taken[1]))
        except KeyboardInterrupt:
            interrupted = True
        # The very message at which it happened may have been marked as handed out; it comes all the same.
        got += [(taken[0], taken[1]) for taken in iter(life.reader.take, None)]
        assert [sequence for _, sequence in got] == list(range(first, first + 20))
        for offset, _ in got:
            life.reader.free(offset)
    assert step > 30


def test_what_is_put_back_comes_again(make_ring: MakeRing) -> None:
    life = Life(make_ring)
    life.begin()
    for taken in list(iter(life.reader.take, None))[::-1]:
        life.reader.put_back(taken[0], taken[6])
    life.read_all()
    assert not life.writer._chain


def test_a_payload_that_was_given_back_can_t_be_sent(make_ring: MakeRing) -> None:
    ring, _ = make_ring()
    payload = ring.reserve(100)
    assert isinstance(payload, Payload)
    ring.let_go(payload)
    with pytest.raises(ValueError, match="given back"):
        ring.post_with(b"", 0, 0, 0, [(payload, 0, 100)], copy)
    assert ring.next_sequence == 0


def test_a_payload_is_lent_once_at_a_time(make_ring: MakeRing) -> None:
    ring, _ = make_ring()
    payload = ring.reserve(100)
    assert payload is not None
    loan = ring.lend(payload)
    with pytest.raises(ValueError, match="lent already"):
        ring.lend(payload)
    del loan
    ring.reclaim()
    assert not ring._chain


@pytest.mark.parametrize("state", [6, 77, 255])
def test_a_release_byte_that_can_t_be_is_a_message_to_deliver_again(make_ring: MakeRing, state: int) -> None:
    ring, first = make_ring()
    ring.post(b"damaged", 0, 0)
    ring.post(b"whole", 0, 0)
    first.segment.memory[writer.HEADER_BYTES + writer.RELEASE_BYTE] = state
    words = first.segment.words
    words[writer.HEADER_BYTES // 8 + reader.DELIVERIES_WORD] = (1 << 64) - 1
    taken = list(iter(first.take, None))
    assert [each[4] for each in taken] == [b"damaged", b"whole"]
    for each in taken:
        first.free(each[0])
    assert {record.state for record in RingReader(first.segment, epoch=2, peek=True).records()} == {FREE}


def test_a_process_that_is_interrupted_thousands_of_times_goes_on(place: Place) -> None:
    """Real signals, at any moment of put, get and release: nothing hangs, is lost, doubled or out of order."""
    producer, consumer = place.producer(), place.consumer()
    main = threading.get_ident()
    over = threading.Event()
    chance = random.Random(1)
    armed = False

    def raise_once(*_: object) -> None:
        # Only where it is caught: one that comes while another is handled would end the whole test run.
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def interrupt_again_and_again() -> None:
        while not over.wait(chance.uniform(0.0002, 0.003)):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, raise_once)
    thread = threading.Thread(target=interrupt_again_and_again)
    thread.start()
    array = np.arange(500)
    interrupted = 0
    newest = -1
    message = None
    begun = time.monotonic()
    # On a busy machine it takes longer.
    while (now := time.monotonic()) < begun + 3 or (interrupted <= 200 and now < begun + 60):
        try:
            armed = True
            producer.put({"a": array}, timeout=5)
            producer.put(b"x" * 100, timeout=5)
            with contextlib.suppress(QueueEmptyError):
                while True:
                    message = consumer.get(timeout=0)
                    assert message.sequence > newest
                    newest = message.sequence
                    message.release()
                    message = None
            armed = False
        except KeyboardInterrupt:
            interrupted += 1
    over.set()
    thread.join()
    signal.signal(signal.SIGINT, before)
    message = None
    drain(consumer)
    assert interrupted > 200
    producer.flush(timeout=5)
    assert is_empty(producer)
