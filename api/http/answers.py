"""Asking the engine, and answering: as one JSON document or as server-sent events, for as long as somebody listens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.client import EngineClient
from api.http.errors import HttpError, http_error
from fmq.calls import Output
from fmq.plain import to_json

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone. The body was read to its end."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. Raises ClientGoneError, after ``work`` was cancelled, if the client goes before."""
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGoneError
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


class Asked:
    """A request that an engine has. Left before its end, as by a client that goes, it is aborted."""

    def __init__(self, client: EngineClient, engine_id: str) -> None:
        self._client = client
        self._engine_id = engine_id
        self._complete = False

    async def outputs(self) -> AsyncIterator[Output]:
        """As EngineClient.results."""
        async for output in self._client.results(self._engine_id):
            yield output
        self._complete = True

    def leave(self) -> None:
        """Nobody reads on. Does not wait: it is called while everything is cancelled."""
        if not self._complete:
            self._client.abort_soon(self._engine_id)


async def answer_once(request: Request, asked: Asked, render: Callable[[list[Output]], Any]) -> Response:
    """All outputs, made into one document by ``render``."""

    async def collect() -> list[Output]:
        return [output async for output in asked.outputs()]

    try:
        outputs = await while_connected(request.receive, collect())
    finally:
        asked.leave()
    document = render(outputs)
    # Large ones are large because of arrays, whose base64 would hold up everybody else.
    if sum(getattr(output.value, "nbytes", 0) for output in outputs) > 1024 * 1024:
        return Response(await asyncio.to_thread(to_json, document), media_type="application/json")
    return Response(to_json(document), media_type="application/json")


class EventStream(Response):
    """Server-sent events: each item of what ``render`` makes of an output is one. An error is the last event."""

    media_type = "text/event-stream"

    def __init__(
        self, request_id: str, asked: Asked, render: Callable[[AsyncIterator[Output]], AsyncIterator[Any]]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request_id = request_id
        self._asked = asked
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        with contextlib.suppress(ClientGoneError):
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await while_connected(receive, self._stream(send))
            except asyncio.CancelledError:
                told = HttpError(503, "server_ending", "this server ends, and there is more to say; ask again")
                body = b"data: " + to_json(told.body(self._request_id)) + b"\n\n" + DONE
                await send({"type": "http.response.body", "body": body, "more_body": False})
            finally:
                self._asked.leave()

    async def _stream(self, send: Callable[[Any], Awaitable[None]]) -> None:
        async def say(event: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": more})

        try:
            async for item in self._render(self._asked.outputs()):
                await say(b"data: " + to_json(item) + b"\n\n")
        except Exception as error:
            told = http_error(error)
            if told is None:
                raise
            await say(b"data: " + to_json(told.body(self._request_id)) + b"\n\n")
        await say(DONE, more=False)
