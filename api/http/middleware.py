"""Around every request: its id, a place among those that are answered, a line in the access log, and the counts."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http import metrics
from api.http.errors import HttpError
from api.http.gate import Gate

logger = logging.getLogger("api")
access_log = logging.getLogger("api.access")

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_COUNTED = "/v1/"
"""What has to pass the gate. Health and metrics are answered however many requests there are."""


class _Exchange:
    """What is seen of a request and its answer on their way."""

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._request_id = request_id
        self.status = 0
        self.bytes_in = self.bytes_out = 0
        self.gone = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.bytes_in += len(message.get("body", b""))
        elif not self.status:
            self.gone = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._request_id.encode())]
        else:
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)


class Requests:
    """The outermost layer. ``scope["state"]["request_id"]`` is the id: the client's X-Request-Id, or a new one."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        exchange = _Exchange(receive, send, request_id)
        counted = scope["path"].startswith(_COUNTED)
        try:
            if counted:
                self._gate.enter()
                metrics.IN_FLIGHT.set(self._gate.in_flight)
            try:
                await self._app(scope, exchange.receive, exchange.send)
            finally:
                if counted:
                    self._gate.leave()
                    metrics.IN_FLIGHT.set(self._gate.in_flight)
        except HttpError as error:
            await error.response(request_id)(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            # The server ends, and has waited for as long as it may.
            if exchange.status:
                raise
            ending = HttpError(
                503, "server_ending", "this server ends, and the request has no answer yet; send it again"
            )
            await ending.response(request_id)(scope, exchange.receive, exchange.send)
        except Exception:
            logger.exception("request %s failed", request_id)
            if not exchange.status:
                fault = HttpError(500, "internal_error", "this is a fault of the server; see its log")
                await fault.response(request_id)(scope, exchange.receive, exchange.send)
            else:
                # The answer has begun: cutting it off is all that is left to say.
                raise
        finally:
            self._tell(scope, exchange, request_id, time.perf_counter() - begun)

    def _tell(self, scope: Scope, exchange: _Exchange, request_id: str, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        # 499, as nginx has it: the client was gone before there was an answer.
        status = 499 if exchange.gone and not exchange.status else exchange.status or 500
        metrics.REQUESTS.labels(scope["method"], route, status).inc()
        metrics.SECONDS.labels(route).observe(seconds)
        metrics.BYTES.labels("in").inc(exchange.bytes_in)
        metrics.BYTES.labels("out").inc(exchange.bytes_out)
        client: Any = scope.get("client") or ("-", 0)
        access_log.info(
            '%s %s:%s "%s %s" %d in=%d out=%d ms=%.1f',
            request_id,
            client[0],
            client[1],
            scope["method"],
            # As it came, percent-encoded: it can't begin a line of its own.
            scope["raw_path"].decode("latin-1"),
            status,
            exchange.bytes_in,
            exchange.bytes_out,
            seconds * 1e3,
        )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _ID.fullmatch(text):
                return str(text)
    return secrets.token_hex(8)
