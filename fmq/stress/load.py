"""What the messages are: every byte follows from the seed, the producer and the number of the message.

A message is one of up to ``KINDS`` kinds, each a slice of one pool of random bytes; which one, its number says. So
making it costs nothing, and the checksum that it must have is known beforehand. That is xxh3 (package ``xxhash``),
which reads the view alone: 24 GB/s at 1 MiB where a comparison with the pool, which reads both, reached 14.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fmq.stress.plan import Plan

KINDS = 512
_FEWEST_KINDS = 16
_KINDS_BYTES = 16 * 1024**3
"""Fewer kinds, where that many would take longer than a few seconds to make a checksum of."""
HEADER = struct.Struct("<HHIQQ")
"""magic, producer, life, number, when the put began (CLOCK_MONOTONIC, ns)"""
MAGIC = 0x5354
BLOB_BYTES = 4096
"""Payloads below go as one bytes object, which is header and slice; from it on, the slice is an array."""
_STEP = 64
_MASK = (1 << 64) - 1


class WrongContentError(Exception):
    """What arrived is not what was put."""


class Content:
    """All messages of a run. Made once, before the workers are forked, which share the pool."""

    def __init__(self, plan: Plan) -> None:
        generator = np.random.default_rng(plan.seed)
        sizes = plan.sizes.draw(generator, KINDS)
        self._count = KINDS
        if (total := int(sizes.sum())) > _KINDS_BYTES:
            self._count = max(_FEWEST_KINDS, KINDS * _KINDS_BYTES // total)
            sizes = plan.sizes.draw(generator, self._count)
        offsets = generator.permutation(self._count) * _STEP
        self._pool: NDArray[np.uint8] = generator.integers(0, 256, plan.sizes.high + KINDS * _STEP, np.uint8)
        self._pool.setflags(write=False)
        self.nbytes: list[int] = sizes.tolist()
        self._slices = [
            self._pool[start : start + size] for start, size in zip(offsets.tolist(), self.nbytes, strict=True)
        ]
        self._blobs = [part.tobytes() if part.nbytes < BLOB_BYTES else b"" for part in self._slices]
        self._digests = [xxhash.xxh3_64_intdigest(part.data) for part in self._slices] if plan.checksums else []
        low, high = (round(seconds * 1e9) for seconds in plan.hold)
        self._holds: list[int] = generator.integers(low, high, self._count, np.int64, endpoint=True).tolist()
        self._loans: list[bool] = (
            generator.random(self._count) < {"copy": 0.0, "loan": 2.0, "mixed": 0.5}[plan.transfer]
        ).tolist()
        self._seed = plan.seed

    def kind(self, producer: int, number: int) -> int:
        """Which kind this message is."""
        # The finalizer of splitmix64 (Steele, Lea, Flood 2014), over a mixture of the three.
        word = (number * 0x9E3779B97F4A7C15 + producer * 0xD1B54A32D192ED03 + self._seed) & _MASK
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        return (word ^ word >> 27) % self._count

    def array(self, kind: int) -> NDArray[np.uint8] | None:
        """The slice of a kind that goes as an array, or None."""
        return None if self._blobs[kind] else self._slices[kind]

    def is_lent(self, kind: int) -> bool:
        """Whether the array of this kind is to be made in the ring."""
        return self._loans[kind]

    def hold(self, kind: int) -> int:
        """How long to hold a message of this kind, in nanoseconds."""
        return self._holds[kind]

    def payload(self, kind: int, header: bytes, array: NDArray[np.uint8] | None) -> Any:
        """The object to put."""
        return header + self._blobs[kind] if array is None else {"h": header, "x": array}

    def check(self, producer: int, number: int, body: Any) -> None:
        """Raise WrongContentError unless ``body`` (what ``open_payload`` gave) is that of this message."""
        kind = self.kind(producer, number)
        nbytes = body.nbytes
        if nbytes != self.nbytes[kind]:
            raise WrongContentError(f"it has {nbytes:,} bytes, and was put with {self.nbytes[kind]:,}")
        if self._digests and (found := xxhash.xxh3_64_intdigest(body)) != self._digests[kind]:
            raise WrongContentError(
                f"its {nbytes:,} bytes have checksum {found:016x}, and were put with {self._digests[kind]:016x}"
                + self._where(kind, body)
            )

    def _where(self, kind: int, body: Any) -> str:
        differs = np.flatnonzero(np.frombuffer(body, np.uint8) != self._slices[kind])
        if not len(differs):
            return "; a moment later they were right"
        return f"; {len(differs):,} bytes differ, from byte {differs[0]:,} to byte {differs[-1]:,}"


def open_payload(payload: Any) -> tuple[int, int, int, int, Any]:
    """Producer, life, number, time of the put (ns) and body of what arrived. Raises WrongContentError."""
    try:
        if type(payload) is bytes:
            header, body = payload[: HEADER.size], memoryview(payload)[HEADER.size :]
        else:
            header, body = payload["h"], payload["x"].data
        magic, producer, life, number, begun = HEADER.unpack(header)
    except (KeyError, TypeError, AttributeError, struct.error) as error:
        raise WrongContentError(f"it is no message of this run: {error}") from error
    if magic != MAGIC:
        raise WrongContentError(f"it begins with {magic:#06x}, and every message of this run with {MAGIC:#06x}")
    return producer, life, number, begun, body
