"""Pictures in the bodies of requests: decoded in a thread, their pixels put into the ring."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from api.http.arrays import MemoryFile
from api.http.bodies import Bytes, Loans
from api.http.errors import bad, too_large

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URI = re.compile(r"data:image/[a-zA-Z0-9.+-]+;base64,")
_PIECE = 1024 * 1024
"""Characters decoded at a time: a millisecond, in which nothing else can run."""


async def decode_image(body: Bytes, loans: Loans, max_pixels: int, place: str = "$") -> NDArray[np.uint8]:
    """The pixels of a picture (PNG, JPEG, WebP, GIF, BMP; its first frame): uint8 [height, width, 3], in the ring.

    Raises HttpError for what is no picture, or has too many pixels.
    """
    try:
        image = Image.open(io.BufferedReader(MemoryFile(body)), formats=_FORMATS)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise bad(f"this is no picture that can be read ({', '.join(_FORMATS)}): {error}", place) from None
    width, height = image.size
    if width * height > max_pixels:
        raise too_large(f"a picture of {width:,} x {height:,} pixels; this server takes {max_pixels:,} of them", place)
    pixels = await loans.empty((height, width, 3))
    await asyncio.to_thread(_decode, image, pixels, place)
    return pixels


def _decode(image: Any, pixels: NDArray[np.uint8], place: str) -> None:
    try:
        with image:
            rgb = image.convert("RGB")
    except Exception as error:
        # Each format's decoder has errors of its own, and none of them is more than a damaged picture.
        raise bad(f"the picture is damaged: {error}", place) from None
    np.copyto(pixels, np.asarray(rgb))


async def decode_data_uri(uri: str, loans: Loans, max_pixels: int, place: str) -> NDArray[np.uint8]:
    """The pixels of a picture in a data URI. Nothing is ever fetched: other URLs are an HttpError."""
    found = _DATA_URI.match(uri)
    if found is None:
        raise bad(
            f"a picture comes as data:image/...;base64,...; this server fetches nothing, and this is {uri[:40]!r}",
            place,
        )
    data = await asyncio.to_thread(_from_base64, uri, found.end(), place)
    return await decode_image(data, loans, max_pixels, place)


def _from_base64(uri: str, start: int, place: str) -> Bytes:
    data = bytearray()
    try:
        for first in range(start, len(uri), _PIECE):
            data += base64.b64decode(uri[first : first + _PIECE], validate=True)
    except binascii.Error as error:
        raise bad(f"the data of the picture is no base64: {error}", place) from None
    return np.frombuffer(data, np.uint8)
