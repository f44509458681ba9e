"""The frames that producer and consumer exchange, in msgpack: an array that begins with the kind.

An empty frame is what a DEALER socket with PROBE_ROUTER sends by itself when it has been connected.
"""

from __future__ import annotations

import msgspec

from fmq.errors import ProtocolError

VERSION = 1


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Consumer to producer: who is there. ``epoch`` tells one life of the consumer from the next."""

    version: int
    epoch: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Producer to consumer: the name of the segment that holds its ring."""

    version: int
    ring: str


class Doorbell(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Producer to consumer: records up to this position, messages up to this sequence are ready."""

    position: int
    sequence: int


class Space(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Consumer to producer: something was released since you asked (``number``)."""

    number: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Producer to consumer: the ring is drained and its name is gone."""

    ring: str


Frame = Welcome | Hello | Doorbell | Space | Goodbye

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """The bytes of a frame."""
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """The frame that these bytes hold. Raises ProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a frame of {len(data)} bytes is none of fmq's: {error}") from None
