"""How the payload of a MESSAGE is encoded: one byte in its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fmq.errors import DecodeError

MSGPACK = 0
"""What ``fmq.codec`` writes."""
RAW = 1
"""The blob is the payload, a bytes object."""
BLOB_LAST = 0x80
"""Added to the others: the blob was too long for the record and is the last of the buffers."""


def decode(encoding: int, blob: bytes, views: list[Any], msgpack: Callable[[bytes, list[Any]], Any]) -> Any:
    """The payload of a message. Raises DecodeError for an encoding that is not known here, or from ``msgpack``."""
    if encoding & BLOB_LAST:
        if not views:
            raise DecodeError("a message without a buffer says that its blob is the last one")
        blob = views.pop().tobytes()
    kind = encoding & ~BLOB_LAST
    if kind == MSGPACK:
        return msgpack(blob, views)
    if kind == RAW:
        return blob
    raise DecodeError(
        f"the message has encoding {kind}, which this version does not know; use the same version in all processes"
    )
