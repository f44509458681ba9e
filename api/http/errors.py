"""What an HTTP client is told when something goes wrong: a status, and an error in the form that OpenAI's has."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

from api.errors import (
    AbortedError,
    DeadlineError,
    EngineUnavailableError,
    HandlerError,
    InvalidRequestError,
    RefusedError,
    RequestFailedError,
)
from fmq import EncodeError, PeerUnavailableError, QueueFullError, SegmentSpaceError, ShmqError, TooLargeError

RETRY_AFTER = "1"
"""Seconds, as a header."""


class HttpError(Exception):
    """An answer that is an error. ``place`` is what is at fault in the request, such as ``$.messages[0].content``."""

    def __init__(self, status: int, kind: str, message: str, place: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.place = place

    def body(self, request_id: str) -> dict[str, Any]:
        """For JSON."""
        return {
            "error": {
                "type": self.kind,
                "message": self.message,
                "param": self.place,
                "code": None,
                "request_id": request_id,
            }
        }

    def response(self, request_id: str) -> Response:
        """The whole answer."""
        headers = {"Retry-After": RETRY_AFTER} if self.status in (429, 503) else None
        return Response(msgspec.json.encode(self.body(request_id)), self.status, headers, "application/json")


def bad(message: str, place: str | None = None) -> HttpError:
    """The request is at fault."""
    return HttpError(400, "invalid_request_error", message, place)


def too_large(message: str, place: str | None = None) -> HttpError:
    """The request, or something in it, is over a limit."""
    return HttpError(413, "request_too_large", message, place)


_PLACE = re.compile(r" - at `(\$.*)`$")


def not_json(error: msgspec.DecodeError) -> HttpError:
    """The body is no JSON, or not that which is expected; msgspec's message ends with the place."""
    text = str(error)
    found = _PLACE.search(text)
    return bad(text[: found.start()] if found else text, found[1] if found else "$")


_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (EngineUnavailableError, 503, "engine_unavailable"),
    (RefusedError, 503, "engine_overloaded"),
    (AbortedError, 503, "aborted"),
    (DeadlineError, 504, "deadline_exceeded"),
    (InvalidRequestError, 400, "invalid_request_error"),
    (HandlerError, 500, "handler_error"),
    (QueueFullError, 503, "queue_full"),
    (PeerUnavailableError, 503, "engine_unavailable"),
    (SegmentSpaceError, 503, "shared_memory_full"),
    (TooLargeError, 413, "request_too_large"),
    (EncodeError, 400, "invalid_request_error"),
    (ShmqError, 503, "transport_error"),
)


def http_error(error: Exception) -> HttpError | None:
    """What is said about an error of the client or of the transport; None for one that is nobody's fault but ours."""
    if isinstance(error, HttpError):
        return error
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            message = error.message if isinstance(error, RequestFailedError) else str(error)
            return HttpError(status, name, message)
    return None
