"""The other ways to move messages. Each is a sender and a receiver with the interface ``measure.Side``.

Loops are written out in every ``run``, so that no contestant pays for a call that another one is spared. No wait is
without a limit: a side whose partner is gone fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from bench.loads import MakeLoad
from bench.measure import PATIENCE, Place
from shmq.segment import DIRECTORY

SEGMENTS_AHEAD = 4
"""How many segments the sender of one segment a message may have under way."""

# -- ZeroMQ alone -----------------------------------------------------------------------------------------------------


class ZmqSender:
    """PUSH over ipc, default options; the payload is bytes."""

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        _limit_waiting(self._socket)
        self._socket.connect(place.endpoint("z"))

    def run(self, first: int, count: int) -> list[float]:
        """Send the messages."""
        make, send = self._load.make, self._socket.send
        for number in range(first, first + count):
            send(make(number))
        return []

    def close(self) -> None:
        """Close socket and context."""
        self._context.destroy()


class ZmqReceiver:
    """PULL over ipc, default options."""

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        _limit_waiting(self._socket)
        self._socket.bind(place.endpoint("z"))

    def run(self, first: int, count: int) -> list[float]:
        """Receive the messages and check them."""
        check, receive = self._load.check, self._socket.recv
        for number in range(first, first + count):
            check(number, receive())
        return []

    def close(self) -> None:
        """Close socket and context."""
        self._context.destroy()


class TcpSender:
    """PUSH over tcp; the payload is the array in a dict, sent without a copy. ``ahead`` messages may be under way."""

    def __init__(self, load: MakeLoad, port: int, ahead: int) -> None:
        self._load = load()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        _limit_waiting(self._socket)
        self._socket.setsockopt(zmq.SNDHWM, max(1, ahead // 2))
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def run(self, first: int, count: int) -> list[float]:
        """Send the messages."""
        make, send = self._load.make, self._socket.send
        for number in range(first, first + count):
            send(make(number)["x"], copy=False)
        return []

    def close(self) -> None:
        """Close socket and context."""
        self._context.destroy()


class TcpReceiver:
    """PULL over tcp; what arrives is looked at in its frame."""

    def __init__(self, load: MakeLoad, port: int, ahead: int) -> None:
        self._load = load()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        _limit_waiting(self._socket)
        self._socket.setsockopt(zmq.RCVHWM, max(1, ahead // 2))
        self._socket.bind(f"tcp://127.0.0.1:{port}")

    def run(self, first: int, count: int) -> list[float]:
        """Receive the messages and check them."""
        check, receive = self._load.check, self._socket.recv
        for number in range(first, first + count):
            check(number, {"x": np.frombuffer(receive(copy=False).buffer, np.uint8)})
        return []

    def close(self) -> None:
        """Close socket and context."""
        self._context.destroy()


class AsyncPickleSender:
    """zmq.asyncio PUSH over ipc, default options; the payload is pickled with protocol 5."""

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._loop = asyncio.new_event_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUSH)
        _limit_waiting(self._socket)
        self._socket.connect(place.endpoint("z"))

    def run(self, first: int, count: int) -> list[float]:
        """Pickle and send the messages."""
        self._loop.run_until_complete(self._run(first, count))
        return []

    async def _run(self, first: int, count: int) -> None:
        make, send, dumps = self._load.make, self._socket.send, pickle.dumps
        for number in range(first, first + count):
            await send(dumps(make(number), 5))

    def close(self) -> None:
        """Close socket, context and event loop."""
        self._context.destroy()
        self._loop.close()


class AsyncPickleReceiver:
    """zmq.asyncio PULL over ipc, default options; the payload is unpickled."""

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._loop = asyncio.new_event_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        _limit_waiting(self._socket)
        self._socket.bind(place.endpoint("z"))

    def run(self, first: int, count: int) -> list[float]:
        """Receive, unpickle and check the messages."""
        self._loop.run_until_complete(self._run(first, count))
        return []

    async def _run(self, first: int, count: int) -> None:
        check, receive, loads = self._load.check, self._socket.recv, pickle.loads
        for number in range(first, first + count):
            check(number, loads(await receive()))

    def close(self) -> None:
        """Close socket, context and event loop."""
        self._context.destroy()
        self._loop.close()


class FanSender:
    """PUSH over ipc to each reader, without a copy; the payload is pickled once, with protocol 5."""

    def __init__(self, place: Place, load: MakeLoad, readers: int) -> None:
        self._load = load()
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUSH) for _ in range(readers)]
        for number, socket in enumerate(self._sockets):
            socket.setsockopt(zmq.SNDHWM, 2)
            _limit_waiting(socket)
            socket.connect(place.endpoint(f"z{number}"))

    def run(self, first: int, count: int) -> list[float]:
        """Pickle the messages and send each to all."""
        for number in range(first, first + count):
            pickled = pickle.dumps(self._load.make(number), 5)
            for socket in self._sockets:
                socket.send(pickled, copy=False)
        return []

    def close(self) -> None:
        """Close sockets and context."""
        self._context.destroy()


class FanReceiver:
    """PULL over ipc, without a copy; the payload is unpickled."""

    def __init__(self, place: Place, load: MakeLoad, number: int) -> None:
        self._load = load()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 2)
        _limit_waiting(self._socket)
        self._socket.bind(place.endpoint(f"z{number}"))

    def run(self, first: int, count: int) -> list[float]:
        """Receive, unpickle and check the messages."""
        for number in range(first, first + count):
            self._load.check(number, pickle.loads(self._socket.recv(copy=False).buffer))
        return []

    def close(self) -> None:
        """Close socket and context."""
        self._context.destroy()


def _limit_waiting(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
    socket.setsockopt(zmq.LINGER, 0)


# -- one segment a message --------------------------------------------------------------------------------------------


class SegmentSender:
    """A new segment for each message, its name over PUSH; at most SEGMENTS_AHEAD that were not yet read."""

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._prefix = place.segments
        self._context = zmq.Context()
        self._names = self._context.socket(zmq.PUSH)
        self._read = self._context.socket(zmq.PULL)
        for socket, name in (self._names, "n"), (self._read, "r"):
            _limit_waiting(socket)
            socket.connect(place.endpoint(name))
        self._ahead = 0

    def run(self, first: int, count: int) -> list[float]:
        """Create, copy in, send the name, close."""
        for number in range(first, first + count):
            array = self._load.make(number)["x"]
            while self._ahead == SEGMENTS_AHEAD:
                self._read.recv()
                self._ahead -= 1
            segment = SharedMemory(f"{self._prefix}{number}", create=True, size=array.nbytes)
            np.copyto(np.ndarray(array.shape, array.dtype, segment.buf), array)
            self._names.send_pyobj((segment.name, array.nbytes))
            segment.close()
            self._ahead += 1
        return []

    def close(self) -> None:
        """Close sockets and context."""
        self._context.destroy()


class SegmentReceiver:
    """Attaches the segment of each message, copies it out, closes and unlinks it."""

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._context = zmq.Context()
        self._names = self._context.socket(zmq.PULL)
        self._read = self._context.socket(zmq.PUSH)
        for socket, name in (self._names, "n"), (self._read, "r"):
            _limit_waiting(socket)
            socket.bind(place.endpoint(name))

    def run(self, first: int, count: int) -> list[float]:
        """Copy out and check."""
        for number in range(first, first + count):
            name, nbytes = self._names.recv_pyobj()
            segment = SharedMemory(name)
            data = np.ndarray(nbytes, np.uint8, segment.buf).tobytes()
            segment.close()
            segment.unlink()
            self._read.send(b"")
            self._load.check(number, {"x": np.frombuffer(data, np.uint8)})
        return []

    def close(self) -> None:
        """Close sockets and context."""
        self._context.destroy()


# -- the limit --------------------------------------------------------------------------------------------------------


class Copier:
    """One copy of each array into shared memory that was touched before, and nothing else: no message, no reader.

    With ``room`` for several arrays the copies march through all of it; with room for one they stay in the cache.
    """

    def __init__(self, load: MakeLoad, room: int) -> None:
        self._load = load()
        array = self._load.make(0)["x"]
        room = max(room, array.nbytes)
        with tempfile.TemporaryFile(dir=DIRECTORY) as file:
            file.truncate(room)
            memory = np.frombuffer(mmap.mmap(file.fileno(), room), np.uint8)
        memory.fill(1)
        self._targets: list[NDArray[np.uint8]] = [
            memory[start : start + array.nbytes] for start in range(0, room - array.nbytes + 1, array.nbytes)
        ]

    def run(self, first: int, count: int) -> list[float]:
        """Copy."""
        make, copy, targets = self._load.make, np.copyto, self._targets
        for number in range(first, first + count):
            copy(targets[number % len(targets)], make(number)["x"])
        return []

    def close(self) -> None:
        """Drop the mapping."""
        self._targets = []


class BareSender:
    """One copy into one of two places, and a count that says so: a handover with no queue and no kernel in between.

    Both sides spin on a word of the other one, which no queue should do; with a core for each it is the quickest there
    can be. What it loses against ``Copier`` is the price of a reader on another core.
    """

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._memory = _Handover(place, self._load.make(0)["x"].nbytes)

    def run(self, first: int, count: int) -> list[float]:
        """Wait until a place is free, copy, count."""
        make, memory = self._load.make, self._memory
        for number in range(first, first + count):
            memory.wait_for(_READ, number - 1)
            np.copyto(memory.places[number % 2], make(number)["x"])
            memory.words[_WRITTEN] = number + 1
        return []

    def close(self) -> None:
        """Remove the file."""
        self._memory.close()


class BareReceiver:
    """Looks at what ``BareSender`` put into the two places."""

    def __init__(self, place: Place, load: MakeLoad, nbytes: int) -> None:
        self._load = load()
        self._memory = _Handover(place, nbytes)

    def run(self, first: int, count: int) -> list[float]:
        """Wait until a place is written, check, count."""
        check, memory = self._load.check, self._memory
        for number in range(first, first + count):
            memory.wait_for(_WRITTEN, number + 1)
            check(number, {"x": memory.places[number % 2]})
            memory.words[_READ] = number + 1
        return []

    def close(self) -> None:
        """Remove the file."""
        self._memory.close()


_WRITTEN = 0
_READ = 64
"""Where the two counts lie, in words of eight bytes: not in one cache line."""
_SPINS = 10_000
"""Looks at a count, 0.05 us each, before the core is offered to others."""


class _Handover:
    """A file of the place's directory, mapped by both sides: two counts and two places.

    Python stores and loads aligned words whole; their order is that of x86, elsewhere this would need fences.
    """

    def __init__(self, place: Place, nbytes: int) -> None:
        with open(f"{DIRECTORY}/{place.segments}bare", "a+b") as file:
            file.truncate(4096 + 2 * nbytes)
            memory = np.frombuffer(mmap.mmap(file.fileno(), 4096 + 2 * nbytes), np.uint8)
        self._path = file.name
        self.words = memory[:4096].view(np.uint64).data
        self.places = [memory[start : start + nbytes] for start in (4096, 4096 + nbytes)]

    def wait_for(self, word: int, least: int) -> None:
        """Spin until a count is at least so much."""
        words = self.words
        spins = 0
        limit = time.monotonic() + PATIENCE
        while words[word] < least:
            spins += 1
            if spins > _SPINS:
                # The other side may have no core to run on.
                os.sched_yield()
                if time.monotonic() > limit:
                    raise TimeoutError("the other side is gone")

    def close(self) -> None:
        """Remove the file, whoever comes first."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
