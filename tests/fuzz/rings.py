"""Rings to be damaged: pictures of real ones, with records of every kind in every state.

A picture is the bytes of a ring's segment and of its spill segments. Put back into the shared-memory directory it is an
orphan, which a consumer adopts like any other.
"""

from __future__ import annotations

import datetime
import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fmq import Consumer, Message, Producer
from shmq import collect
from shmq.layout import HEADER_BYTES, RELEASE_BYTE, RETURNED, SET_ASIDE
from shmq.segment import DIRECTORY, names
from tests.queues import Place

RING = 64 * 1024


@dataclass(frozen=True, slots=True)
class Picture:
    """The bytes of a ring, those of its spill segments by number, and where in the ring its records begin."""

    ring: bytes
    spills: dict[int, bytes]
    records: list[int]


def _trees(producer: Producer, _: Consumer) -> list[Message]:
    """Small messages: everything that msgpack and the codec's extensions know."""
    producer.put_many(
        [
            b"raw",
            b"",
            {"a": 1, "b": [1.5, None, True, "text" * 20], "c": (1, (2, 3))},
            [-(2**70), 2**64, {"deep": [[[[{"er": 1}]]]]}],
            datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc),
            {b"bytes": b"key", "mem": memoryview(b"memory"), "array": bytearray(b"array")},
            np.float32(1.5),
            {"s": np.array("text"), "d": np.datetime64("2026-12-01"), "z": complex(1, 2).real},
            {str(index): index for index in range(100)},
        ]
    )
    return []


def _arrays(producer: Producer, _: Consumer) -> list[Message]:
    """Arrays of many dtypes and shapes, in the record and in payloads of their own, loans and slices of loans."""
    for dtype in ("u1", "<f4", ">i8", "?", "c16", "<U3", "V7", "M8[ns]", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        producer.put({"x": np.zeros((3, 4), dtype), "n": [np.ones((2, 0, 5), np.int16), np.array(7, np.uint8)]})
    large = np.arange(700, dtype=np.float64)
    producer.put({"large": large, "again": large, "view": large[::2], "text": "x" * 300})
    loan = producer.empty((4, 500), np.int16)
    loan[:] = 3
    producer.put({"loan": loan})
    producer.put([loan[1], loan[2:]])
    return []


def _turned(producer: Producer, consumer: Consumer) -> list[Message]:
    """A chain with jumps of both kinds: the ring was full, and turned and folded around what was held."""
    held = []
    for number in range(400):
        producer.put({"n": number, "a": np.full(number * 37 % 2500, number % 256, np.uint8)})
        message = consumer.get(timeout=1)
        if number % 60 == 7:
            held.append(message)
        del message
    producer.put_many([{"n": number} for number in range(30)])
    return held


def _spilled(producer: Producer, _: Consumer) -> list[Message]:
    """Payloads in spill segments."""
    for number in range(3):
        producer.put({"a": np.full(40_000, number, np.uint8), "b": np.full(50, number), "n": number})
    producer.put(b"after")
    return []


def _states(producer: Producer, consumer: Consumer) -> list[Message]:
    """Messages pending, taken, returned, done, set aside, free, expired and not yet."""
    for number in range(6):
        producer.put({"n": number, "a": np.full(300, number)})
    held = consumer.get_many()
    memory = producer._writer.segment.memory
    memory[HEADER_BYTES + held[1]._offset + RELEASE_BYTE] = RETURNED
    memory[HEADER_BYTES + held[2]._offset + RELEASE_BYTE] = SET_ASIDE
    views = held[3].payload["a"]
    held[3].release()
    held[4].release()
    held.append(views)  # type: ignore[arg-type]
    producer.put(b"short-lived", ttl=1e-9)
    producer.put(b"long-lived", ttl=1e9)
    producer.put_many([{"n": number, "a": np.full(300, number)} for number in range(3)])
    return held


SHAPES: dict[str, Callable[[Producer, Consumer], list[Message]]] = {
    "trees": _trees,
    "arrays": _arrays,
    "turned": _turned,
    "spilled": _spilled,
    "states": _states,
}


@functools.cache
def picture(shape: str) -> Picture:
    """The picture of a ring of this shape; made once a process."""
    place = Place()
    with Producer(place.queue, ring_size=RING, spill_limit=1 << 20, **place.where) as producer:
        consumer = Consumer(place.queue, **place.where)
        held: list[Any] = SHAPES[shape](producer, consumer)
        path = os.path.join(DIRECTORY, producer.ring)
        with open(path, "rb") as file:
            ring = file.read()
        spills = {}
        for name in names(f"{producer.ring}."):
            with open(os.path.join(DIRECTORY, name), "rb") as file:
                spills[int(name.rpartition(".")[2])] = file.read()
        records = [entry[0] for entry in producer._writer._chain]
        held.clear()
        gc.collect()
        consumer.close()
        producer.close(timeout=0)
    collect(place.path.rings, discard=True)
    os.rmdir(place.directory)
    return Picture(ring, spills, records)
