"""Death at any moment: producers and the consumer of one queue, killed at random under load, and the books afterwards.

Every process keeps a journal in a file, which a kill does not take back: a producer of each ``put`` that returned, the
consumer of each message before it gives it back, and once more after. From the journals it is known what has to have
arrived, and what may arrive twice.

Of the time from a restart to the first redelivered message nothing is left out: it runs from the moment before the
process is started, so that starting Python and importing fmq is in it.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bench.loads import pattern
from bench.measure import Place, RunFailedError
from fmq import Consumer, Message, Producer, QueueEmptyError

QUEUE = "deaths"
RING_SIZE = 4 * 1024 * 1024
PRODUCERS = 2
PATIENCE = 60.0
_POOL = 1024 * 1024
_LARGEST = 64 * 1024
_HOLD = 16
_HANDED, _DAMAGED, _RELEASED = 1, 2, 3
_ENTRY = struct.Struct("@4Q")
"""what happened, producer's life, number, how often it was delivered before (of a release: 0)"""

Work: TypeAlias = "Callable[[Place, int], None]"
"""What a process does, in its place and in which life."""


@dataclass(slots=True)
class Books:
    """What the journals say. All but ``put``, ``delivered`` and ``redelivered`` should be 0."""

    put: int = 0
    delivered: int = 0
    redelivered: int = 0
    lost: int = 0
    out_of_order: int = 0
    again_after_release: int = 0
    unmarked: int = 0
    damaged: int = 0
    left_over: int = 0


# -- the processes ----------------------------------------------------------------------------------------------------


def _content(pool: np.ndarray[Any, Any], life: int, number: int) -> np.ndarray[Any, Any]:
    chance = life * 7919 + number * 104_729
    return pool[chance % (_POOL - _LARGEST) :][: chance * 31 % _LARGEST]


def produce(place: Place, life: int) -> None:
    """Put numbered arrays until told to stop, and write down how many puts have returned."""
    pool = pattern(_POOL)
    producer = Producer(QUEUE, namespace=place.namespace, runtime_dir=place.directory, ring_size=RING_SIZE)
    with open(_journal(place, f"producer.{life}"), "wb", buffering=0) as journal:
        number = 0
        while not _stopped(place):
            producer.put({"life": life, "n": number, "a": _content(pool, life, number)}, timeout=PATIENCE)
            number += 1
            os.pwrite(journal.fileno(), number.to_bytes(8, "little"), 0)
    producer.close(timeout=PATIENCE)


def consume(place: Place, life: int) -> None:
    """Take, check, hold and release in any order, until told to stop and nothing comes."""
    pool = pattern(_POOL)
    chance = random.Random(life)
    held: list[Message] = []
    with (
        open(_journal(place, f"consumer.{life}"), "ab", buffering=0) as journal,
        Consumer(QUEUE, namespace=place.namespace, runtime_dir=place.directory, max_deliveries=None) as consumer,
    ):

        def release(message: Message) -> None:
            entry = _ENTRY.pack(_RELEASED, message.payload["life"], message.payload["n"], 0)
            message.release()
            journal.write(entry)

        while True:
            try:
                message = consumer.get(timeout=0.2)
            except QueueEmptyError:
                while held:
                    release(held.pop())
                if _stopped(place):
                    return
                continue
            producer, number, array = message.payload["life"], message.payload["n"], message.payload["a"]
            what = _HANDED if np.array_equal(array, _content(pool, producer, number)) else _DAMAGED
            del array
            journal.write(_ENTRY.pack(what, producer, number, message.deliveries))
            held.append(message)
            del message
            while len(held) > chance.randrange(_HOLD):
                release(held.pop(chance.randrange(len(held))))


def _journal(place: Place, name: str) -> str:
    return os.path.join(place.directory, f"journal.{name}")


def _stopped(place: Place) -> bool:
    return os.path.exists(_journal(place, "stop"))


# -- the storm --------------------------------------------------------------------------------------------------------


class Storm:
    """Two producers and a consumer, each of which is replaced as soon as it was killed."""

    def __init__(self, place: Place, seed: int = 0) -> None:
        self._place = place
        self._chance = random.Random(seed)
        self._lives: dict[Work, int] = {produce: 0, consume: 0}
        self._processes = [self._start(produce) for _ in range(PRODUCERS)] + [self._start(consume)]

    def _start(self, work: Work) -> tuple[Work, BaseProcess]:
        life = self._lives[work] = self._lives[work] + 1
        # Forked, from a process that has imported all and made nothing: so many starts would take long otherwise.
        process = get_context("fork").Process(target=work, args=(self._place, life), daemon=True)
        process.start()
        return work, process

    def kill(self, times: int) -> Counter[str]:
        """Kill ``times`` processes at random moments; returns how many of each kind."""
        killed: Counter[str] = Counter()
        for _ in range(times):
            time.sleep(self._chance.uniform(0.001, 0.05))
            index = self._chance.choice([*range(PRODUCERS), PRODUCERS, PRODUCERS])
            work, process = self._processes[index]
            if process.exitcode is not None:
                raise RunFailedError(f"{work.__name__} ended by itself with {process.exitcode}")
            process.kill()
            process.join()
            killed[work.__name__] += 1
            self._processes[index] = self._start(work)
        return killed

    def end(self) -> None:
        """Let all end in order. Raises RunFailedError if one does not."""
        Path(_journal(self._place, "stop")).touch()
        for work, process in self._processes:
            process.join(2 * PATIENCE)
            if process.exitcode != 0:
                raise RunFailedError(f"{work.__name__} ended with {process.exitcode}")

    def close(self) -> None:
        """Leave no process."""
        for _, process in self._processes:
            process.kill()
            process.join()


def read_books(place: Place) -> Books:
    """Add up what the journals say."""
    books = Books()
    returned = {}
    for path in Path(place.directory).glob("journal.producer.*"):
        returned[int(path.suffix[1:])] = int.from_bytes(path.read_bytes(), "little")
    books.put = sum(returned.values())
    handed: dict[int, set[int]] = defaultdict(set)
    released: dict[int, set[int]] = defaultdict(set)
    newest: dict[int, int] = defaultdict(lambda: -1)
    for path in sorted(Path(place.directory).glob("journal.consumer.*"), key=lambda path: int(path.suffix[1:])):
        last: dict[int, int] = defaultdict(lambda: -1)
        data = path.read_bytes()
        for what, life, number, deliveries in _ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]):
            if what == _RELEASED:
                released[life].add(number)
                continue
            books.delivered += 1
            books.damaged += what == _DAMAGED
            books.redelivered += deliveries > 0
            books.out_of_order += number <= last[life] or (deliveries == 0 and number <= newest[life])
            books.again_after_release += number in released[life]
            books.unmarked += number in handed[life] and deliveries == 0
            last[life] = number
            newest[life] = max(newest[life], number)
            handed[life].add(number)
    books.lost = sum(len(set(range(count)) - handed[life]) for life, count in returned.items())
    return books


# -- restarts ---------------------------------------------------------------------------------------------------------


def first_redelivery_ms(place: Place, times: int) -> list[float]:
    """Kill a consumer that holds a message, start another, and take the time until it has that message; in ms.

    The processes are new ones, not forks.
    """
    taken = []
    with Producer(QUEUE, namespace=place.namespace, runtime_dir=place.directory, ring_size=RING_SIZE) as producer:
        producer.put({"a": np.arange(1000)})
        for index in range(times + 1):
            begun = time.monotonic_ns()
            process = subprocess.Popen(
                [sys.executable, "-c", _TAKER, place.namespace, place.directory], stdout=subprocess.PIPE, text=True
            )
            try:
                assert process.stdout is not None
                at, deliveries = process.stdout.readline().split()
            finally:
                process.send_signal(signal.SIGKILL)
                process.communicate()
            if int(deliveries) != index:
                raise RunFailedError(f"delivery {index} was marked as {deliveries}")
            if index:
                taken.append((int(at) - begun) / 1e6)
        with Consumer(QUEUE, namespace=place.namespace, runtime_dir=place.directory, max_deliveries=None) as consumer:
            consumer.get(timeout=PATIENCE).release()
    return taken


_TAKER = f"""
import sys, time, fmq
consumer = fmq.Consumer({QUEUE!r}, namespace=sys.argv[1], runtime_dir=sys.argv[2], max_deliveries=None)
message = consumer.get(timeout={PATIENCE})
print(time.monotonic_ns(), message.deliveries, flush=True)
sys.stdin.read()
time.sleep({PATIENCE})
"""


def storm(place: Place, kills: int) -> tuple[Books, Counter[str]]:
    """A storm from its beginning to its end, and its books."""
    raging = Storm(place)
    try:
        killed = raging.kill(kills)
        raging.end()
    finally:
        raging.close()
    books = read_books(place)
    for path in Path(place.directory).glob("journal.*"):
        path.unlink()
    # What is left of the queue: segments, sockets, locks, directories.
    books.left_over = len(place.leftovers()) + len(os.listdir(place.directory))
    return books, killed
