"""The API's side: a client of engines, and the HTTP front end over it."""

from api.client import EngineClient
from api.engines import EngineLink, EngineView
from api.errors import (
    AbortedError,
    ApiError,
    ControlError,
    DeadlineError,
    EngineUnavailableError,
    HandlerError,
    InvalidRequestError,
    PictureError,
    RefusedError,
    RequestFailedError,
    RequestIdError,
)
from api.pictures import ernie_patches, make_request, qwen_patches, sample_pictures

__all__ = [
    "AbortedError",
    "ApiError",
    "ControlError",
    "DeadlineError",
    "EngineClient",
    "EngineLink",
    "EngineUnavailableError",
    "EngineView",
    "HandlerError",
    "InvalidRequestError",
    "PictureError",
    "RefusedError",
    "RequestFailedError",
    "RequestIdError",
    "ernie_patches",
    "make_request",
    "qwen_patches",
    "sample_pictures",
]
