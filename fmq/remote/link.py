"""The sockets of ``tcp://`` endpoints: one thread for each end, the only one that touches them; and the CURVE keys.

Whoever puts, gets or releases changes the protocol's state under ``lock`` and nudges the thread; the thread sends and
receives, and sets ``ready`` when there is news for those who wait.

A link that is cut is noticed by the kernel: TCP gives a connection up when what was sent stays unacknowledged for a few
seconds (ZMQ_TCP_MAXRT, which is TCP_USER_TIMEOUT), and keepalive sees to it that something is always sent. The
heartbeats of ZeroMQ are not used. They wait for a whole frame, so a large array on a slow link would break its own
connection off (libzmq issue 2709).

A connection that was broken off is never used again, as ZeroMQ would: what is left in its socket is thrown away with
it, and the next one begins with a Hello.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

# Before anything is to be closed at exit, so that it ends after that: it sends what is sent without a copy.
import zmq.utils.garbage
from zmq.utils import z85

from fmq.doorbell import Nudge
from fmq.errors import FmqError, ProtocolError, QueueInUseError, QueueNameError
from fmq.remote.protocol import (
    MAX_BUFFERS,
    MAX_CONTROL_BYTES,
    RemoteConsumerProtocol,
    RemoteProducerProtocol,
    RemoteSource,
)

logger = logging.getLogger("fmq")

BEAT_SECONDS = 1.0
"""How often each side gives a sign of life."""
QUIET_SECONDS = 4.0
"""After so long without one, the consumer does not answer."""
_SILENCE_SECONDS = 10.0
"""After so long without one, the connection is replaced: TCP may hold it, but nobody is there."""
_UNACKNOWLEDGED_MS = 4000
"""How long the kernel waits for the other host to confirm what was sent."""
_KEEPALIVE_SECONDS = 1
_CONNECT_MS = 2000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 250
_LINGER_MS = 500
"""How long closing may take for the last Ack or Goodbye."""
_TURN = 64
"""How many messages are received before others have their turn."""

_ZAP = "inproc://zeromq.zap.01"


_MONITOR_EVENT = struct.Struct("=hi")
"""Event and value, as zmq_socket_monitor(3) says. (pyzmq's own reader of it imports zmq.asyncio.)"""


class CurveKeys(msgspec.Struct, frozen=True):
    """The keys of one side, as 40 characters of Z85 each; made by ``CurveKeys.generate()``.

    ``public`` may be known to everyone, ``secret`` to nobody else. A producer needs the public key of its consumer,
    too: ``server``. Raises ValueError for what is no key.
    """

    public: str
    secret: str
    server: str | None = None

    def __post_init__(self) -> None:
        for name in ("public", "secret", "server"):
            if name != "server" or self.server is not None:
                check_key(getattr(self, name), name)

    @classmethod
    def generate(cls, server: str | None = None) -> CurveKeys:
        """New keys; for a producer, with the public key of its consumer."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode(), server)

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, secret=..., server={self.server!r})"


def check_key(key: Any, name: str) -> None:
    """Raise ValueError unless this is a key. Says nothing of what it is: it may be a secret."""
    try:
        good = isinstance(key, str) and len(key) == 40 and len(z85.decode(key.encode("ascii"))) == 32
    except (KeyError, ValueError):
        good = False
    if not good:
        raise ValueError(f"the {name} key is no CURVE key: 40 characters of Z85, as CurveKeys.generate() makes them")


def check_endpoint(endpoint: str) -> None:
    """Raise QueueNameError unless this looks like tcp://host:port."""
    host, colon, port = endpoint[6:].rpartition(":") if isinstance(endpoint, str) else ("", "", "")
    if not str(endpoint).startswith("tcp://") or not host or not colon or not (port == "*" or port.isdecimal()):
        raise QueueNameError(f"{endpoint!r} is no endpoint: write tcp://host:port, or tcp://[address]:port for IPv6")


class Link:
    """What both ends share. ``lock`` is to be held around every use of the protocol."""

    def __init__(self, endpoint: str, keys: CurveKeys | None) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self._keys = keys
        # A finalizer that gives the link up may run in whatever thread holds it.
        self.lock = threading.RLock()
        self.failure: Exception | None = None
        """Why the thread ended before it was told to."""
        self._nudged = False
        self._stop = False
        with contextlib.ExitStack() as undo:
            self._nudge = Nudge()
            undo.callback(self._nudge.close)
            self.ready = Nudge()
            undo.callback(self.ready.close)
            try:
                self._context = zmq.Context()
                undo.callback(self._context.destroy, linger=0)
                self._open()
            except zmq.ZMQError as error:
                raise FmqError(f"a socket for {endpoint} can't be had: {error}; raise the limit (ulimit -n)") from error
            undo.pop_all()
        self._thread = threading.Thread(target=self._work, name="fmq-tcp", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Have the thread look for what is to be sent. Any thread, any finalizer."""
        if not self._nudged:
            self._nudged = True
            self._nudge.set()

    def stop(self) -> None:
        """End the thread, and close its sockets. What it has to say first may take half a second. Idempotent."""
        self._stop = True
        self._nudge.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        try:
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
            made.setsockopt(zmq.TCP_KEEPALIVE, 1)
            made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_SECONDS)
            made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_SECONDS)
            if "[" in self.endpoint:
                made.setsockopt(zmq.IPV6, 1)
            if self._keys is not None:
                made.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
                made.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        except BaseException:
            made.close()
            raise
        return made

    def _open(self) -> None:
        """Make what has to be there at once."""

    def _work(self) -> None:
        try:
            while not self._stop:
                self._turn()
            self._end()
        except Exception as error:
            # The edge of the thread: whatever it was, those who wait have to hear of it.
            logger.exception("%s: the thread that moves its messages failed", self.endpoint)
            self.failure = FmqError(f"{self.endpoint}: the thread that moves its messages failed: {error}")
            self.ready.set()
        finally:
            self._context.destroy()
            self._nudge.close()

    def _turn(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Say the last word."""

    def _wait(self, sockets: Iterable[zmq.Socket[bytes] | None], until: float) -> None:
        poller = zmq.Poller()
        for each in sockets:
            if each is not None:
                poller.register(each, zmq.POLLIN)
        poller.register(self._nudge.fileno(), zmq.POLLIN)
        poller.poll(math.ceil(max(0.0, until - time.monotonic()) * 1000))
        # In this order: whoever nudges from now on is seen the next time.
        self._nudge.clear()
        self._nudged = False


class ProducerLink(Link):
    """The producer's end: a DEALER, another one for each connection."""

    def __init__(self, endpoint: str, keys: CurveKeys | None, protocol: RemoteProducerProtocol) -> None:
        if keys is not None and keys.server is None:
            raise ValueError("a producer needs the public key of its consumer: CurveKeys.generate(server=...)")
        self._protocol = protocol
        self._dealer: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._agreed = False
        self._opened = 0.0
        self._heard = 0.0
        self._beat_at = 0.0
        self._delay = _RECONNECT_MS / 1000
        self.trouble = "nobody answers there: is a consumer running, the address right, the link up?"
        """What is known of why there is no connection."""
        super().__init__(endpoint, keys)

    @property
    def connected(self) -> bool:
        """Whether the consumer answers. The lock is held."""
        welcome = self._protocol.welcome
        return welcome is not None and not welcome.problem and time.monotonic() - self._heard < QUIET_SECONDS

    def _turn(self) -> None:
        now = time.monotonic()
        if self._dealer is None and now >= self._opened + self._delay:
            self._connect(now)
        self._wait((self._dealer, self._monitor), self._beat_at if self._dealer else self._opened + self._delay)
        if self._dealer is None:
            return
        self._receive(self._dealer)
        self._watch()
        now = time.monotonic()
        if self._dealer is not None and now - max(self._heard, self._opened) >= _SILENCE_SECONDS and self._agreed:
            self._disconnect("it was connected, and gave no sign of life for a while: is its process stopped?")
        with self.lock:
            if self._protocol.expire(time.monotonic_ns()):
                self.ready.set()
            messages = self._protocol.frames(time.monotonic_ns())
            beat = self._protocol.beat() if now >= self._beat_at else None
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
        if self._dealer is not None:
            for message in messages:
                self._dealer.send_multipart(message, copy=False)
            if beat is not None:
                self._dealer.send(beat)

    def _open(self) -> None:
        # Here, so that an address that is none is an error at once.
        self._connect(time.monotonic())

    def _connect(self, now: float) -> None:
        self._opened = now
        self._agreed = False
        try:
            dealer = self._socket(zmq.DEALER)
        except zmq.ZMQError as error:
            self.trouble = f"a socket can't be had: {error}; raise the limit (ulimit -n)"
            return
        try:
            # The window is the limit.
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            if self._keys is not None and self._keys.server is not None:
                dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server.encode())
            self._monitor = dealer.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_DISCONNECTED
            )
            dealer.connect(self.endpoint)
        except zmq.ZMQError as error:
            dealer.close()
            raise QueueNameError(f"{self.endpoint} can't be connected to: {error}; write tcp://host:port") from error
        self._dealer = dealer
        with self.lock:
            hello = self._protocol.connect()
        dealer.send(hello)

    def _disconnect(self, trouble: str) -> None:
        self.trouble = trouble
        logger.info("%s: the connection is given up: %s", self.endpoint, trouble)
        with self.lock:
            greeted = self._protocol.welcome is not None and time.monotonic() - self._opened > 1.0
            self._protocol.disconnect()
        self._delay = _RECONNECT_MS / 1000 if greeted else min(2 * self._delay, _RECONNECT_MAX_MS / 1000)
        self._opened = time.monotonic()
        self._close(0)
        # Those who wait may have to be told something else from now on.
        self.ready.set()

    def _close(self, linger: int) -> None:
        if self._dealer is not None:
            self._dealer.disable_monitor()
            self._dealer.close(linger)
            self._dealer = None
        if self._monitor is not None:
            self._monitor.close(0)
            self._monitor = None

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        for _ in range(_TURN):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = time.monotonic()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a consumer does not send {len(frames)} frames at once")
                with self.lock:
                    news = self._protocol.receive(frames[0])
            except ProtocolError as error:
                self._disconnect(f"what answers there is no consumer of this version: {error}")
                return
            if news:
                self.ready.set()
        self._nudge.set()

    def _watch(self) -> None:
        """Take in what became of the connection."""
        while self._monitor is not None:
            try:
                event = _MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])[0]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._agreed = True
            elif event != zmq.EVENT_DISCONNECTED:
                self.trouble = "it refuses the connection: do the keys of both sides belong together (CurveKeys)?"
            elif self._agreed:
                self._disconnect("the connection broke off: has the consumer ended, or is the link cut?")
            elif self._keys is not None:
                self.trouble = "it breaks each connection off: do the keys of both sides belong together (CurveKeys)?"
            else:
                self.trouble = "it breaks each connection off: is it a consumer, and one without keys (CurveKeys)?"

    def _end(self) -> None:
        with self.lock:
            goodbye = self._protocol.goodbye()
        if self._dealer is not None and goodbye is not None:
            self._dealer.send(goodbye)
            self._close(_LINGER_MS)
        else:
            self._close(0)


class ConsumerLink(Link):
    """The consumer's end: a ROUTER, bound, and who may connect. ``endpoint`` has the real port."""

    def __init__(
        self,
        endpoint: str,
        keys: CurveKeys | None,
        clients: frozenset[str] | None,
        protocol: RemoteConsumerProtocol,
    ) -> None:
        self._protocol = protocol
        self._clients = clients
        self._finished: deque[tuple[RemoteSource, int]] = deque()
        self.dropped: set[object] = set()
        """What has to live until the last array of a message that was dropped is gone."""
        self._beat_at = 0.0
        self._misfits = 0
        """Messages since the last beat that were none of fmq's."""
        self._router: zmq.Socket[bytes]
        self._gate: zmq.Socket[bytes] | None = None
        super().__init__(endpoint, keys)

    def finish(self, source: RemoteSource, sequence: int) -> None:
        """Have a message acknowledged. Any thread, any finalizer."""
        self._finished.append((source, sequence))
        self.nudge()

    def abandon(self) -> None:
        """In a forked child: close its copies of the sockets at this port, which would keep the port taken."""
        port = int(self.endpoint.rpartition(":")[2])
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                found = socket.socket(fileno=int(name))
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                    found.close()
                else:
                    found.detach()

    def _open(self) -> None:
        if self._keys is not None and self._clients is not None:
            # Before the ROUTER: nobody is to slip in.
            self._gate = self._context.socket(zmq.REP)
            self._gate.setsockopt(zmq.LINGER, 0)
            self._gate.bind(_ZAP)
        self._router = router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, max(self._protocol.max_message, MAX_CONTROL_BYTES))
        if self._keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.ZAP_DOMAIN, b"fmq")
        try:
            router.bind(self.endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise QueueInUseError(f"{self.endpoint}: another process listens there; has it a consumer?") from error
            raise QueueNameError(
                f"{self.endpoint} can't be listened at: {error}; give an address of this host, or * for all of them"
            ) from error
        self.endpoint = bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _turn(self) -> None:
        self._wait((self._router, self._gate), self._beat_at)
        if self._gate is not None:
            self._let_in(self._gate)
        self._receive()
        now = time.monotonic()
        everybody = now >= self._beat_at
        if everybody:
            self._beat_at = now + BEAT_SECONDS
            if self._misfits > 1:
                logger.warning("%s: %d more messages were passed over", self.endpoint, self._misfits - 1)
            self._misfits = 0
        self._acknowledge(everybody)

    def _receive(self) -> None:
        for _ in range(_TURN):
            try:
                address, frames = self._message()
            except zmq.Again:
                return
            try:
                with self.lock:
                    answer = self._protocol.receive(address, frames, time.monotonic_ns())
                    news = len(self._protocol) > 0
            except ProtocolError as error:
                # One a beat: whoever can connect must not be able to fill the log.
                self._misfits += 1
                if self._misfits == 1:
                    logger.warning("%s: a message is passed over: %s", self.endpoint, error)
                continue
            if answer is not None:
                self._send(address, answer)
            if news:
                self.ready.set()
        self._nudge.set()

    def _message(self) -> tuple[bytes, list[memoryview]]:
        """The next message: who sent it, and its frames, of which more than may be are not kept."""
        frame = self._router.recv(zmq.NOBLOCK, copy=False)
        address = frame.bytes
        frames: list[memoryview] = []
        while frame.more:
            frame = self._router.recv(copy=False)
            if len(frames) <= 2 + MAX_BUFFERS:
                frames.append(frame.buffer)
        return address, frames

    def _acknowledge(self, everybody: bool) -> None:
        with self.lock:
            while self._finished:
                self._protocol.finish(*self._finished.popleft())
            acks = self._protocol.acks(everybody)
        for address, frame in acks:
            self._send(address, frame)

    def _send(self, address: bytes, frame: bytes) -> None:
        # One that is gone, or does not read, misses it.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._router.send_multipart([address, frame], zmq.NOBLOCK)

    def _let_in(self, gate: zmq.Socket[bytes]) -> None:
        """Answer who asks to be let in, by ZAP (RFC 27)."""
        while True:
            try:
                request = gate.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            _, number, _, address, _, mechanism, *credentials = request
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and len(credentials) == 1 else ""
            good = self._clients is not None and key in self._clients
            if not good:
                logger.warning(
                    "%s: %s is not let in, for its key %s is not among the clients", self.endpoint, address, key
                )
            status = (b"200", b"OK") if good else (b"400", b"this key is not let in")
            gate.send_multipart([b"1.0", number, *status, key.encode() if good else b"", b""])

    def _end(self) -> None:
        self._acknowledge(True)
        self._router.close(_LINGER_MS)


def new_id() -> str:
    """An id for a producer: 16 hexadecimal digits."""
    return os.urandom(8).hex()
