"""POST /v1/tasks: the body is the task, in whatever form it comes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from api.http import arrays, images
from api.http.bodies import Bytes, Loans, receive
from api.http.errors import HttpError, bad, not_json, too_large
from api.http.multipart import Part, receive_form
from api.http.settings import Settings

CONTENT_TYPES = (
    "application/json",
    "multipart/form-data",
    "application/x-npy",
    "application/x-npz",
    "application/x-safetensors",
    "application/octet-stream",
    "image/*",
)


async def read_task(request: Request, loans: Loans, settings: Settings) -> Any:
    """The task that a request asks for.

    JSON is the task itself. An npy is {"array"}, a picture {"image"}, other bytes {"data"}; an npz or safetensors file
    is its arrays by name; a form its fields by name (a list where one occurs more than once): text as str, a part of
    any of the types above as that. Raises HttpError, with the place of the error.
    """
    kind = _media_type(request.headers.get("content-type", "application/json"))
    if kind == "application/json":
        return decode_json(await receive(request, loans, settings.max_json))
    if kind == "multipart/form-data":
        return await _form(await receive_form(request, loans, settings.max_body), loans, settings)
    if kind not in CONTENT_TYPES and not kind.startswith("image/"):
        raise HttpError(
            415, "unsupported_media_type", f"a body of type {kind!r} is not taken; send {', '.join(CONTENT_TYPES)}"
        )
    body = await receive(request, loans, settings.max_body)
    value = await _binary(kind, body, loans, settings, "$")
    return value if isinstance(value, dict) else {_NAMES.get(kind, "image"): value}


_NAMES = {"application/x-npy": "array", "application/octet-stream": "data"}
_SUFFIXES = {
    ".npy": "application/x-npy",
    ".npz": "application/x-npz",
    ".safetensors": "application/x-safetensors",
    ".json": "application/json",
    ".txt": "text/plain",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
}


def decode_json(body: Bytes, kind: Any = Any) -> Any:
    """A body of JSON. Raises HttpError with the place of what is wrong."""
    try:
        return msgspec.json.decode(body.data, type=kind)
    except msgspec.DecodeError as error:
        raise not_json(error) from None
    except UnicodeDecodeError as error:
        raise bad(f"the body is no UTF-8: {error}", "$") from None
    except RecursionError:
        raise bad("the body is nested too deeply", "$") from None


async def _binary(kind: str, body: Bytes, loans: Loans, settings: Settings, place: str) -> Any:
    if kind == "application/x-npy":
        return await arrays.npy(body, loans, place)
    if kind == "application/x-npz":
        return await arrays.npz(body, loans, settings.max_body, place)
    if kind == "application/x-safetensors":
        return await arrays.safetensors(body, loans, place)
    if kind.startswith("image/"):
        return await images.decode_image(body, loans, settings.max_pixels, place)
    return body


async def _form(parts: list[Part], loans: Loans, settings: Settings) -> dict[str, Any]:
    fields: dict[str, list[Any]] = {}
    for part in parts:
        fields.setdefault(part.name, []).append(await _field(part, loans, settings))
    return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}


async def _field(part: Part, loans: Loans, settings: Settings) -> Any:
    kind = _media_type(part.content_type)
    if kind in ("", "application/octet-stream") and part.filename is not None:
        suffix = part.filename[part.filename.rfind(".") :].lower()
        kind = _SUFFIXES.get(suffix, "application/octet-stream")
    if kind in ("application/json", "text/plain") and part.body.nbytes > settings.max_json:
        raise too_large(f"it has {part.body.nbytes:,} bytes, and this server takes {settings.max_json:,}", part.place)
    if kind == "application/json":
        try:
            return decode_json(part.body)
        except HttpError as error:
            inside = (error.place or "$").removeprefix("$")
            raise bad(error.message, part.place + inside) from None
    if kind == "text/plain":
        try:
            return part.body.tobytes().decode()
        except UnicodeDecodeError as error:
            raise bad(f"the text is no UTF-8: {error}", part.place) from None
    return await _binary(kind, part.body, loans, settings, part.place)


def _media_type(header: str) -> str:
    return header.partition(";")[0].strip().lower()
