"""Receiving a body into the ring: chunk by chunk into a loan, so that it is never whole in private memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from api.engines import EngineLink
from api.http.errors import HttpError, bad, too_large

IDLE_SECONDS = 30.0
SMALL = 64 * 1024
"""A body up to this size is not worth a loan."""

Bytes = NDArray[np.uint8]


class Loans:
    """Room in the ring of the engine that a request goes to. What is not sent gives its space back by itself."""

    def __init__(self, link: EngineLink, timeout: float) -> None:
        self.link = link
        self._producer = link.producer
        self._timeout = timeout

    async def empty(self, shape: int | tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any]:
        """As AsyncProducer.empty: waits for room, and raises QueueFullError, PeerUnavailableError, TooLargeError."""
        return await self._producer.empty(shape, dtype, timeout=self._timeout)


def content_length(request: Request, limit: int) -> int | None:
    """How long the body is; None if its sender does not say. Raises HttpError over the limit."""
    text = request.headers.get("content-length")
    if text is None:
        return None
    length = int(text)
    if length > limit:
        raise too_large(f"the body has {length:,} bytes, and this server takes {limit:,}")
    return length


async def chunks(request: Request, length: int) -> AsyncIterator[bytes]:
    """The body in pieces, ``length`` bytes in all. Raises ClientDisconnect if it ends before."""
    received = 0
    async for chunk in _patiently(request.stream()):
        received += len(chunk)
        if received > length:
            raise bad(f"the body goes on after the {length:,} bytes that its Content-Length names")
        if chunk:
            yield chunk
    if received < length:
        raise bad(f"the body ends after {received:,} bytes, and its Content-Length names {length:,}")


async def _patiently(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same. Raises HttpError 408 if nothing comes for IDLE_SECONDS: who stands still may keep no room in a ring."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    seen, expired = loop.time(), False
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer, expired
        left = seen + IDLE_SECONDS - loop.time()
        if left <= 0:
            expired = True
            task.cancel()
        else:
            timer = loop.call_later(left, look)

    # One timer for the whole body: one for each chunk would cost more than the chunk.
    timer = loop.call_later(IDLE_SECONDS, look)
    try:
        async for chunk in stream:
            yield chunk
            seen = loop.time()
    except asyncio.CancelledError:
        if not expired:
            raise
        raise HttpError(408, "request_timeout", f"of the body nothing has come for {IDLE_SECONDS:.0f} s") from None
    finally:
        timer.cancel()


async def receive(request: Request, loans: Loans, limit: int) -> Bytes:
    """The whole body: uint8 [n], in the ring if it is not small.

    A body without a Content-Length is taken if it is small; else the error is 411.
    """
    length = content_length(request, limit)
    if length is None:
        return await _receive_unannounced(request, min(limit, SMALL))
    body = await loans.empty(length) if length > SMALL else np.empty(length, np.uint8)
    target = body.data
    offset = 0
    async for chunk in chunks(request, length):
        target[offset : offset + len(chunk)] = chunk
        offset += len(chunk)
    return body


async def _receive_unannounced(request: Request, limit: int) -> Bytes:
    parts: list[bytes] = []
    received = 0
    async for chunk in _patiently(request.stream()):
        parts.append(chunk)
        received += len(chunk)
        if received > limit:
            raise HttpError(
                411, "length_required", f"a body of more than {limit:,} bytes needs a Content-Length, to be given room"
            )
    return np.frombuffer(b"".join(parts), np.uint8)
