"""What workers tell the supervisor in words: one JSON line in a pipe, written at once or not at all."""

from __future__ import annotations

import logging
import os
from typing import TypeAlias

import msgspec

_LINE_BYTES = 4000
"""A pipe takes up to 4,096 bytes at once (PIPE_BUF), whoever else writes to it and whatever kills the writer."""
_TEXT = 1500


class Violation(msgspec.Struct, frozen=True, tag=True):
    """A check did not hold. ``check`` is its name (``fmq.stress.verify.CHECKS``)."""

    check: str
    text: str


class Remark(msgspec.Struct, frozen=True, tag=True):
    """Something happened that belongs among the events."""

    text: str


Note: TypeAlias = Violation | Remark


class NoteWriter:
    """The workers' end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._encode = msgspec.json.Encoder().encode

    def violation(self, check: str, text: str) -> None:
        """Report that a check did not hold."""
        self._write(Violation(check, _short(text)))

    def remark(self, text: str) -> None:
        """Report something for the record."""
        self._write(Remark(_short(text)))

    def _write(self, note: Note) -> None:
        line = self._encode(note) + b"\n"
        if len(line) <= _LINE_BYTES:
            os.write(self._fd, line)


class NoteHandler(logging.Handler):
    """Makes remarks of what the queue logs, so that it comes between the events and not across what is shown."""

    def __init__(self, notes: NoteWriter, who: str) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes
        self._who = who

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger."""
        self._notes.remark(f"{self._who}: {self.format(record)}")


class NoteReader:
    """The supervisor's end; does not wait."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""
        self._decode = msgspec.json.Decoder(Note).decode

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._fd

    def take(self) -> list[Note]:
        """The notes that came."""
        try:
            self._rest += os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [self._decode(line) for line in lines]


def _short(text: str) -> str:
    """The end of a text, where a traceback says what it was."""
    return text if len(text) <= _TEXT else "... " + text[-_TEXT:]
