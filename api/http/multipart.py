"""A form in parts (multipart/form-data), each received into its own place in one loan of the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from api.http.bodies import SMALL, Bytes, Loans, chunks, content_length
from api.http.errors import HttpError, bad

_MAX_PARTS = 256
_ALIGNMENT = 64
"""Parts begin at addresses that suit every dtype, however they lie in the body."""


@dataclass(slots=True)
class Part:
    """One field of a form. ``place`` says which, for errors."""

    name: str
    place: str
    filename: str | None
    content_type: str
    body: Bytes


@dataclass(slots=True)
class _Open:
    """A part on its way in."""

    start: int
    headers: dict[str, str] = field(default_factory=dict)


class _Receiver:
    """What the parser calls. Parts lie one after another in ``memory``, whatever stood between them."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._target = memory.data
        self._offset = 0
        self._part: _Open | None = None
        self._name = self._value = b""
        self.parts: list[Part] = []
        self.complete = False

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._all,
        }

    def _begin(self) -> None:
        if len(self.parts) == _MAX_PARTS:
            raise bad(f"a form has at most {_MAX_PARTS} parts")
        self._offset += -self._offset % _ALIGNMENT
        self._part = _Open(self._offset)

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        assert self._part is not None
        self._part.headers[self._name.decode("latin-1").lower()] = self._value.decode("latin-1")
        self._name = self._value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._target[self._offset : self._offset + end - start] = memoryview(data)[start:end]
        self._offset += end - start

    def _end(self) -> None:
        part = self._part
        assert part is not None
        kind, options = parse_options_header(part.headers.get("content-disposition", ""))
        if kind != b"form-data" or b"name" not in options:
            raise bad(f"part {len(self.parts)} has no Content-Disposition: form-data with a name")
        name = options[b"name"].decode("utf-8", "replace")
        filename = options[b"filename"].decode("utf-8", "replace") if b"filename" in options else None
        content_type = part.headers.get("content-type", "text/plain" if filename is None else "")
        body = self._memory[part.start : self._offset]
        self.parts.append(Part(name, f"$.{name}", filename, content_type, body))
        self._part = None

    def _all(self) -> None:
        self.complete = True


async def receive_form(request: Request, loans: Loans, limit: int) -> list[Part]:
    """The parts of a form, in the ring if it is not small. Raises HttpError."""
    length = content_length(request, limit)
    if length is None:
        raise HttpError(411, "length_required", "a form needs a Content-Length, to be given room")
    boundary = parse_options_header(request.headers["content-type"])[1].get(b"boundary")
    if not boundary:
        raise bad("the Content-Type of a form names a boundary; this one does not")
    room = length + _MAX_PARTS * _ALIGNMENT
    receiver = _Receiver(await loans.empty(room) if length > SMALL else np.empty(room, np.uint8))
    try:
        callbacks: Any = receiver.callbacks()
        parser = MultipartParser(boundary, callbacks)
        async for chunk in chunks(request, length):
            parser.write(chunk)
        parser.finalize()
    except FormParserError as error:
        raise bad(f"the form can't be read: {error}") from None
    if not receiver.complete:
        raise bad("the form has no end: its last boundary is missing")
    return receiver.parts
