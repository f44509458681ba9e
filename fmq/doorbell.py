"""The sockets that carry the frames, and the wake-up between threads. No call waits: who waits, polls ``fileno``.

A ZeroMQ socket's descriptor is edge-triggered: after it was readable once, ``receive`` has to be called until it
returns None, and after a ``send`` ``readable`` has to be asked, before one may wait for the descriptor again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
from collections.abc import Sequence

import zmq

from fmq.errors import FmqError

logger = logging.getLogger("fmq")

_LINGER_MS = 100
"""How long closing may take for a Goodbye that is still on its way."""
_RECONNECT_MS = 50
_QUEUED = 16
"""How many frames of a producer may wait for a consumer to come; more would say nothing new."""
_SPARE_DESCRIPTORS = 32
"""With fewer left, nobody is let in: libzmq 4.3.5 aborts the process if it can't accept (ipc_listener.cpp:297)."""


class _Bell:
    def __init__(self, kind: int) -> None:
        try:
            self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        except zmq.ZMQError as error:
            raise FmqError(f"a doorbell's socket can't be made: {error}; raise the limit (ulimit -n)") from error
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            # A copy: ZeroMQ closes its own as soon as the socket is closed, be it polled or not.
            self._fd = os.dup(int(self._socket.getsockopt(zmq.FD)))
        except OSError as error:
            self._socket.close(linger=0)
            raise FmqError(f"a doorbell's descriptor can't be had: {error}; raise the limit (ulimit -n)") from error

    def fileno(self) -> int:
        """The descriptor to poll for reading; it stays open until ``close_descriptor``."""
        return self._fd

    def close_descriptor(self) -> None:
        """Close what ``fileno`` gave, when nobody polls it any more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def readable(self) -> bool:
        """Whether a frame has come in."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        """Close the socket; what is still to be sent may take 0.1 s in the background. Idempotent."""
        self._socket.close()


class ProducerBell(_Bell):
    """The producer's end: a DEALER. What it sends before anybody is there waits for the first who comes."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.connect(endpoint)

    def send(self, frame: bytes) -> bool:
        """Send a frame; False if too many wait already for somebody to come."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next frame, or None."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None


class SubscriberBell(ProducerBell):
    """A reader's end of a topic: a DEALER as well, with the methods of a consumer's. All frames go to the publisher."""

    def send_to(self, address: bytes, frame: bytes) -> None:
        """Send a frame, if it can be sent."""
        self.send(frame)

    def receive_from(self) -> tuple[bytes, bytes] | None:
        """The next (b"", frame), or None."""
        frame = self.receive()
        return None if frame is None else (b"", frame)

    def mind_descriptors(self) -> None:
        """Nothing: who connects can do without."""


class ConsumerBell(_Bell):
    """The consumer's end: a ROUTER, bound. Whoever binds has to hold the queue's lock: a stale socket is replaced."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._endpoint = endpoint
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self.close_descriptor()
            raise FmqError(f"the doorbell socket {endpoint} can't be bound: {error}") from error
        self._listens = True

    def mind_descriptors(self) -> None:
        """Let nobody in while this process has hardly a descriptor left. To be called now and then.

        Who is connected stays so; who is not tries again until it succeeds, and its messages are found all the same.
        """
        left = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _open_descriptors()
        if self._listens and left < _SPARE_DESCRIPTORS:
            logger.warning(
                "%s lets no producer in: this process has %d descriptors left; raise the limit (ulimit -n)",
                self._endpoint,
                left,
            )
            self._socket.unbind(self._endpoint)
            self._listens = False
        elif not self._listens and left >= 2 * _SPARE_DESCRIPTORS:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.bind(self._endpoint)
                self._listens = True

    def send_to(self, address: bytes, frame: bytes) -> None:
        """Send a frame to one producer; one that is gone, or does not read, misses it."""
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._socket.send_multipart([address, frame], zmq.NOBLOCK)

    def receive_from(self) -> tuple[bytes, bytes] | None:
        """The next (address, frame), or None. Messages of another shape are passed over."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(parts) == 2:
                return parts[0], parts[1]


class PublisherBell(ConsumerBell):
    """A publisher's end: bound as a consumer's, with the methods of a producer's. Frames come and go with addresses."""

    def send(self, frames: list[tuple[bytes, bytes]]) -> None:
        """Send each of (address, frame), if it can be sent."""
        for address, frame in frames:
            self.send_to(address, frame)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (address, frame), or None."""
        return self.receive_from()


class Nudge:
    """Wakes a thread of this process that polls ``fileno``. ``set`` may be called by any thread, in any finalizer."""

    def __init__(self) -> None:
        try:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise FmqError(f"a descriptor for wake-ups can't be had: {error}; raise the limit (ulimit -n)") from error

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._fd

    def set(self) -> None:
        """Wake whoever waits, or the next who will."""
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Take the wake-ups that have come."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open_descriptors() -> int:
    # The size of the directory is their number from Linux 6.2 on, and 0 before.
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    # No descriptor left to look with, or no /proc: then it is not known that there is room.
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def wait_readable(descriptors: Sequence[int], timeout: float) -> None:
    """Block until one of the descriptors is readable, or for ``timeout`` seconds."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(max(0.0, timeout) * 1000)
