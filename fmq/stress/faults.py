"""Faults that the harness commits on purpose, to prove that it finds each and gives it its name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fmq import AsyncPublisher, Message, Publisher
from fmq.stress.journal import DELIVERED
from shmq.layout import FREE
from shmq.segment import Segment

_AT = 100
"""The fault is committed with this message of the consumer (or, where that one is too small, one soon after)."""
_HOLD_NS = {"reuse": 2_000_000, "free": 500_000_000}
"""How long the message is held at least; the second has to be written over meanwhile."""
WITHHELD = 100
"""The message that a reader is not offered."""
_LEAK_BYTES = 64 * 1024
_LEAKS = 1024
_LEAK_AFTER = 2.5
"""Seconds until memory is lost: a worker may take what it needs in the beginning."""


class Saboteur:
    """Commits one fault, in one consumer."""

    def __init__(self, fault: str, namespace: str, runtime: str) -> None:
        self._fault = fault
        self._namespace = namespace
        self._runtime = runtime
        self._count = 0
        self._due = False
        self._kept: list[bytes] = []
        self._began = time.monotonic()

    def journal(self, add: Callable[..., None]) -> Callable[..., None]:
        """Wrap the journal: it tells of a message that was dropped, doubled, or came out of order."""
        late: list[tuple[Any, ...]] = []
        dropped: set[tuple[int, int]] = set()

        def commit(*entry: Any) -> None:
            kind, producer, number = entry[0], entry[2], entry[4]
            if kind == DELIVERED:
                self._count += 1
                self._due = self._due or self._count == _AT
            if kind == DELIVERED and self._due and self._fault in ("drop", "double", "swap"):
                self._due = False
                if self._fault == "drop":
                    dropped.add((producer, number))
                elif self._fault == "double":
                    add(*entry)
                else:
                    late.append(entry)
                    return
            if (producer, number) in dropped:
                return
            if late and not (kind == DELIVERED and producer == late[0][2]):
                late.append(entry)
                return
            add(*entry)
            while late:
                add(*late.pop(0))

        return commit

    def before(self, message: Message, body: Any, hold: int) -> int:
        """Called with a message before it is checked; returns how long to hold it (ns)."""
        if not self._due:
            return hold
        if self._fault == "flip":
            _flip(body)
        elif self._fault in _HOLD_NS:
            # Of a message without arrays the body is a copy.
            return hold if message._lease is None else max(hold, _HOLD_NS[self._fault])
        elif self._fault == "memory":
            if time.monotonic() - self._began > _LEAK_AFTER:
                self._kept.append(os.urandom(_LEAK_BYTES))
            self._due = len(self._kept) < _LEAKS
            return hold
        self._due = False
        return hold

    def after(self, message: Message, body: Any) -> None:
        """Called with a message that is held from now on."""
        if not self._due or message._lease is None:
            return
        if self._fault == "reuse":
            self._due = False
            _flip(body)
        elif self._fault == "free":
            self._due = False
            message._source.reader.free(message._offset)
            message._offset = -1

    def leave(self) -> None:
        """Called when the consumer is closed."""
        if self._fault == "segment":
            Segment.create(f"shmq:{self._namespace}:q0:{'f' * 16}", 65536).close()
        elif self._fault == "file":
            path = os.path.join(self._runtime, "left.sock")
            os.makedirs(self._runtime, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        elif self._fault == "descriptor":
            os.open("/dev/null", os.O_RDONLY)


@contextlib.contextmanager
def withheld(publisher: Publisher | AsyncPublisher) -> Iterator[None]:
    """What is put within is not offered to the reader of the first slot."""
    writer = publisher._writer
    offers = writer._offers
    writer._offers = bytes([FREE]) + offers[1:]
    try:
        yield
    finally:
        writer._offers = offers


def _flip(body: Any) -> None:
    """Change one byte in the middle of a view, although the view is read-only."""
    address = np.frombuffer(body, np.uint8).__array_interface__["data"][0] + body.nbytes // 2
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 0x10
