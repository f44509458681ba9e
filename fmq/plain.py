"""Values as JSON or msgpack for those who know neither numpy nor this codec: other programs, and people."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


def plain(value: Any) -> Any:
    """What msgspec's encoders call for what they don't know: an array as a dict of dtype, shape and data.

    ``data`` holds the bytes in C order: base64 in JSON. Raises NotImplementedError for what is no array nor number.
    """
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {"dtype": str(value.dtype), "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, np.generic) and not isinstance(item := value.item(), np.generic):
        return item
    raise NotImplementedError(f"a {type(value).__name__} has no plain form")


_json = msgspec.json.Encoder(enc_hook=plain)
_msgpack = msgspec.msgpack.Encoder(enc_hook=plain)


def to_json(value: Any) -> bytes:
    """Encode as JSON. Raises NotImplementedError, TypeError, ValueError or RecursionError for what can't be."""
    return _json.encode(value)


def to_msgpack(value: Any) -> bytes:
    """Encode as msgpack. Raises as ``to_json``, and OverflowError for an int of more than 64 bits."""
    return _msgpack.encode(value)
