"""A board: a few 64-bit words in shared memory that one process writes and every other may read at any time.

For what is asked often and must be answered by nobody: whether a loop still turns, how much waits. A read is a load,
without a system call, and gives what was stored last, also when the writer hangs or is dead.
"""

from __future__ import annotations

import contextlib
import time

from shmq.errors import SegmentExistsError, SegmentMissingError
from shmq.layout import BOARD_MAGIC, HEADER_BYTES, OWNER_PID
from shmq.segment import Segment, abandon_in_child, is_owned, unlink

_WORD = 8
_MASK = 2**64 - 1
_TRIES = 50
_PAUSE = 0.01


class Board:
    """``count`` unsigned 64-bit words, all 0 at first. One thread at a time may store a word; any may load it."""

    __slots__ = ("__weakref__", "_segment", "_words", "is_owner")

    def __init__(self, segment: Segment, is_owner: bool) -> None:
        self._segment = segment
        first = HEADER_BYTES // _WORD
        self._words = segment.words[first : first + segment.payload_bytes // _WORD]
        self.is_owner = is_owner
        abandon_in_child(self)

    @classmethod
    def create(cls, name: str, count: int) -> Board:
        """Make a board and own it, in place of one whose owner is dead. Raises SegmentExistsError, SegmentError."""
        for _ in range(_TRIES):
            try:
                return cls(Segment.create(name, count * _WORD, magic=BOARD_MAGIC), is_owner=True)
            except SegmentExistsError:
                with contextlib.suppress(SegmentMissingError):
                    if not is_owned(name):
                        unlink(name)
                        continue
                # Its owner may be about to go, or somebody only looks whether it is there.
                time.sleep(_PAUSE)
        raise SegmentExistsError(f"board {name} is another process's, which lives; stop that one, or use other names")

    @classmethod
    def attach(cls, name: str) -> Board:
        """Look at the board of another process. Raises SegmentMissingError if there is none, else a SegmentError."""
        return cls(Segment.attach(name, magic=BOARD_MAGIC), is_owner=False)

    @property
    def name(self) -> str:
        """The name of its segment."""
        return self._segment.name

    @property
    def pid(self) -> int:
        """The process that made it, as that process's PID namespace numbers it."""
        return int(self._segment.words[OWNER_PID])

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value & _MASK

    def is_current(self) -> bool:
        """Whether this is still the board of its name, and its owner lives (stopped or not). A few system calls."""
        try:
            return self.is_owner or (is_owned(self.name) and self._segment.is_linked())
        except SegmentMissingError:
            return False

    def close(self) -> None:
        """Unmap it, and remove it if it is this process's. Idempotent."""
        if not self._segment.memory.closed:
            if self.is_owner and self._segment.is_linked():
                unlink(self.name)
            self._words.release()
            self._segment.close()

    def abandon(self) -> None:
        """In a forked child: it stays the parent's."""
        self.is_owner = False
