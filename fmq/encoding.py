"""How the payload of a MESSAGE is encoded: one byte in its record, and a name for whoever chooses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, Final

from fmq import codec, pickling
from fmq.errors import CodecRefusedError, DecodeError

MSGPACK = 0
"""What ``fmq.codec`` writes."""
RAW = 1
"""The blob is the payload, a bytes object."""
PICKLE = 2
"""What ``fmq.pickling`` writes. Reading it runs what the producer chose."""
BLOB_LAST = 0x80
"""Added to the others: the blob was too long for the record and is the last of the buffers."""

Decode = Callable[[bytes, list[Any]], Any]

_ENCODERS: Final = MappingProxyType({"msgpack": (MSGPACK, codec.encode), "pickle": (PICKLE, pickling.encode)})


def encoder(name: str) -> tuple[int, Callable[[Any], codec.Encoded]]:
    """The encoding with this name, and what encodes into it. Raises ValueError for a name that is none."""
    if not isinstance(name, str) or name not in _ENCODERS:
        raise ValueError(f"there is no codec {name!r}; choose one of {_listed(_ENCODERS)}")
    return _ENCODERS[name]


def decoder(accept: Iterable[str], type: Any) -> Callable[[int, bytes, list[Any]], Any]:
    """What makes payloads of (encoding, blob, views), of the codecs in ``accept`` only. ``type`` is for msgpack.

    What it returns raises CodecRefusedError for a message of another codec, and never looks into it; else DecodeError.
    Raises ValueError for a name that is none, for none at all, and for a ``type`` together with pickle, which nobody
    would check.
    """
    names = (accept,) if isinstance(accept, str) else tuple(accept)
    for name in names:
        encoder(name)
    if not names:
        raise ValueError(f"a consumer has to accept a codec; name at least one of {_listed(_ENCODERS)}")
    if type is not Any and "pickle" in names:
        raise ValueError("pickled messages are not converted to a type; leave out type=, or 'pickle' from accept=")
    msgpack = codec.Decoder(type).decode if "msgpack" in names else _refuse("msgpack", names)
    pickled = pickling.decode if "pickle" in names else _refuse("pickle", names)
    return lambda encoding, blob, views: decode(encoding, blob, views, msgpack, pickled)


def _refuse(name: str, accepted: tuple[str, ...]) -> Decode:
    wish = f"accept={(*accepted, name)!r}"
    trust = (
        ", if everyone who can write to this queue may run code in this process: that is what unpickling means"
        if name == "pickle"
        else ""
    )

    def refuse(blob: bytes, views: list[Any]) -> Any:
        raise CodecRefusedError(
            f"the message is encoded with {name}, and this consumer accepts only {_listed(accepted)}; put it with "
            f"another codec, or make the consumer with {wish}{trust}"
        )

    return refuse


_refuse_pickle = _refuse("pickle", ("msgpack",))


def decode(encoding: int, blob: bytes, views: list[Any], msgpack: Decode, pickled: Decode = _refuse_pickle) -> Any:
    """The payload of a message, by ``msgpack(blob, views)`` or ``pickled(blob, views)``, or what these raise.

    Raises DecodeError for an encoding that is not known here.
    """
    if encoding & BLOB_LAST:
        if not views:
            raise DecodeError("a message without a buffer says that its blob is the last one")
        blob = views.pop().tobytes()
    kind = encoding & ~BLOB_LAST
    if kind == MSGPACK:
        return msgpack(blob, views)
    if kind == RAW:
        return blob
    if kind == PICKLE:
        return pickled(blob, views)
    raise DecodeError(
        f"the message has encoding {kind}, which this version does not know; use the same version in all processes"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
