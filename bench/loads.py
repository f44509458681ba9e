"""What the messages are: seeded, so that the other side knows what has to come.

Every load makes message ``number`` and checks what arrived as message ``number``: ``make`` in the sender, ``check`` in
the receiver, each over an object of its own. Checking costs the same for every contestant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

SEED = 20240229
PAGE = 4096
_SET = 64
"""How many different small messages there are."""
_CHECK_ALL_OF_EVERY = 64
"""A request is compared as a whole every so many messages, by its number always: that costs more than sending it."""


class WrongContentError(Exception):
    """A message arrived, and is not the one that was sent."""


class Load(Protocol):
    """A series of messages."""

    def make(self, number: int) -> Any:
        """Message ``number``; may be changed by the next call."""

    def check(self, number: int, payload: Any) -> None:
        """Raise WrongContentError unless this is message ``number``."""


MakeLoad: TypeAlias = "Callable[[], Load]"
"""How a child makes a load of its own: picklable, and small."""


def pattern(nbytes: int) -> NDArray[np.uint8]:
    """``nbytes`` random bytes, the same ones each time."""
    return np.random.default_rng(SEED).integers(0, 256, nbytes, np.uint8)


def stamp(array: NDArray[np.uint8], number: int) -> None:
    """Write the number of a message into its first and its last eight bytes."""
    array[:8].view(np.uint64)[0] = array[-8:].view(np.uint64)[0] = number


def check_stamp(array: NDArray[np.uint8], number: int) -> None:
    """Raise WrongContentError unless the array bears this number."""
    found = int(array[:8].view(np.uint64)[0]), int(array[-8:].view(np.uint64)[0])
    if found != (number, number):
        raise WrongContentError(f"message {number} bears the numbers {found}")


class Arrays:
    """``{"x": array}`` of ``nbytes`` bytes. One source array, stamped for each message; one byte a page is read."""

    def __init__(self, nbytes: int) -> None:
        self.source = pattern(nbytes)
        self._expected = self.source[PAGE // 2 :: PAGE].copy()

    def make(self, number: int) -> dict[str, NDArray[np.uint8]]:
        """The source, in a dict."""
        stamp(self.source, number)
        return {"x": self.source}

    def check(self, number: int, payload: Any) -> None:
        """Look at the stamps and at one byte of each page."""
        array = payload["x"]
        check_stamp(array, number)
        if not np.array_equal(array[PAGE // 2 :: PAGE], self._expected):
            raise WrongContentError(f"message {number} differs from what was sent")


class ArraySet:
    """As Arrays, of ``count`` source arrays in turn, for transports that send an array from where it lies."""

    def __init__(self, nbytes: int, count: int) -> None:
        self._loads = [Arrays(nbytes) for _ in range(count)]

    def make(self, number: int) -> dict[str, NDArray[np.uint8]]:
        """A source, in a dict; its turn comes again ``count`` messages later."""
        return self._loads[number % len(self._loads)].make(number)

    def check(self, number: int, payload: Any) -> None:
        """As Arrays."""
        self._loads[0].check(number, payload)


class Blobs:
    """bytes, of sizes spread evenly from ``smallest`` to ``largest``; compared as a whole."""

    def __init__(self, smallest: int, largest: int) -> None:
        sizes = np.linspace(smallest, largest, _SET).astype(int)
        np.random.default_rng(SEED).shuffle(sizes)
        data = pattern(largest + _SET).tobytes()
        self._blobs = [data[start : start + size] for start, size in enumerate(sizes)]

    def make(self, number: int) -> bytes:
        """One of the set."""
        return self._blobs[number % _SET]

    def check(self, number: int, payload: Any) -> None:
        """Compare all of it."""
        if payload != self._blobs[number % _SET]:
            raise WrongContentError(f"message {number} differs from what was sent")


class Requests:
    """A request to a language model, as a dict of about 1 KiB when pickled: a prompt, ``tokens`` of it, settings."""

    def __init__(self, tokens: int) -> None:
        noise = pattern(1024)
        self._request: dict[str, Any] = {
            "request_id": 0,
            "model": "default",
            "prompt": "".join(chr(97 + byte % 26) for byte in noise[: 800 - 3 * tokens]),
            "prompt_token_ids": [int(byte) * 397 for byte in noise[:tokens]],
            "temperature": 0.7,
            "top_p": 0.95,
            "max_tokens": 512,
            "stop": ["</s>"],
            "stream": True,
            "metadata": {"user": "u-1", "priority": 3, "arrival": 1700000000.25},
        }

    def make(self, number: int) -> dict[str, Any]:
        """The request with its number."""
        self._request["request_id"] = number
        return self._request

    def check(self, number: int, payload: Any) -> None:
        """Look at the number, and now and then at everything."""
        if payload["request_id"] != number:
            raise WrongContentError(f"request {number} has the number {payload['request_id']}")
        if number % _CHECK_ALL_OF_EVERY == 0 and payload != self.make(number):
            raise WrongContentError(f"request {number} differs from what was sent")
