"""The frames that producers and consumers exchange, in msgpack: an array that begins with the kind."""

from __future__ import annotations

import msgspec

from fmq.errors import ProtocolError

VERSION = 1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Producer to consumer: the name of the segment that holds its ring."""

    version: int
    ring: str


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Consumer to producer: the ring is attached, or what is wrong with it (``problem``, else empty)."""

    version: int
    problem: str


class Doorbell(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Producer to consumer: in this ring, records up to this position, messages up to this sequence are ready."""

    ring: str
    position: int
    sequence: int


class Space(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Consumer to producer: something was released since you asked (``number``)."""

    number: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Producer to consumer: the ring is drained and its name is gone."""

    ring: str


class Join(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Reader of a topic to its publisher: the ring it reads, by which slot, and the number by which it joined there.

    Without a ring yet these are "", -1 and 0.
    """

    version: int
    ring: str
    slot: int
    number: int


Frame = Hello | Welcome | Doorbell | Space | Goodbye | Join

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
