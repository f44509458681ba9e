"""What can go wrong on the API side. Every error of this package is an ``ApiError``."""

from __future__ import annotations

from fmq.calls import Failure, FailureKind


class ApiError(Exception):
    """The root of all errors of api."""


class PictureError(ApiError, ValueError):
    """A picture can't be cut into patches."""


class EngineUnavailableError(ApiError):
    """No engine is there that could take a request, or answer it."""


class RequestIdError(ApiError, ValueError):
    """A request id is in use, or was never sent."""


class ControlError(ApiError):
    """An engine could not do what a control command asked for."""


class RequestFailedError(ApiError):
    """A request ends without a result. ``request_id`` says which one."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(f"request {request_id}: {message}")
        self.request_id = request_id
        self.message = message


class HandlerError(RequestFailedError):
    """Its handler in the engine raised an error."""


class DeadlineError(RequestFailedError):
    """Its time was over."""


class AbortedError(RequestFailedError):
    """It was aborted."""


class RefusedError(RequestFailedError):
    """The engine has too much to do. It may be sent again."""


class InvalidRequestError(RequestFailedError):
    """The engine does not do what it asks for."""


_BY_KIND = {
    FailureKind.HANDLER: HandlerError,
    FailureKind.DEADLINE: DeadlineError,
    FailureKind.ABORTED: AbortedError,
    FailureKind.REFUSED: RefusedError,
    FailureKind.INVALID: InvalidRequestError,
}


def failure_of(request_id: str, failure: Failure) -> RequestFailedError:
    """The exception for what an engine said."""
    return _BY_KIND[failure.kind](request_id, failure.message)
