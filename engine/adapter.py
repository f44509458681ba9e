"""A way into the engine for programs that have ZeroMQ and nothing of ours: three plain TCP sockets.

    requests  PULL    {"request_id", "task", "choices"?, "timeout"?}   or   {"request_id", "abort": true}
    results   ROUTER  a DEALER or REQ sends its request_id, once, and gets all outputs of it, in lists
    control   ROUTER  {"command", "arguments"?}   ->   {"value"} or {"failure"}

Each message is one frame (after the empty one that REQ sends, and DEALER should), in JSON, or in msgpack where it does
not begin with "{". Answers come in the encoding of the question. Nothing is unpickled. Outputs that come before anybody
has asked for them are kept, the newest of them. Unlike in a queue, what this engine holds dies with it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import zmq

from engine.errors import AdapterError
from engine.replies import Settle
from fmq.calls import MAX_CHOICES, Abort, Call, Control, Events, Failure, FailureKind, Output, Request, described
from fmq.doorbell import Nudge
from fmq.plain import to_json, to_msgpack

logger = logging.getLogger("engine")

_KEPT_REQUESTS = 10_000
"""Of so many requests the outputs are kept for those who have not asked yet, and who asks is remembered."""
_HIGH_WATER = 1000
_LINGER_MS = 1000
_LOOK_MS = 200
_WARN_SECONDS = 1.0


class Submit(Protocol):
    """What the adapter does with a call."""

    def __call__(self, call: Call, address: str) -> None: ...


class _Incoming(msgspec.Struct):
    request_id: str
    task: Any = None
    choices: int = 1
    timeout: float | None = None
    abort: bool = False


class _Command(msgspec.Struct):
    command: str
    arguments: dict[str, Any] = {}


class _Encoding(NamedTuple):
    """One of two ways to write a message."""

    name: str
    encode: Callable[[Any], bytes]


_JSON = _Encoding("json", to_json)
_MSGPACK = _Encoding("msgpack", to_msgpack)


@dataclass(slots=True)
class _Asked:
    """Of one request: who wants its outputs, and those that came before anybody did."""

    encoding: _Encoding
    identity: bytes | None = None
    early: list[bytes] | None = None
    unfinished: int = 1


class Adapter:
    """The three sockets, bound at once, and one thread that owns them from ``start`` on. A Sink.

    Ports are TCP ports, 0 for any that is free (see the attributes). Whoever can reach them can use the engine; bind
    to another ``host`` than this one with care. Raises AdapterError if a port can't be had.
    """

    def __init__(
        self, *, requests_port: int = 0, results_port: int = 0, control_port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PULL)
        self._results = self._context.socket(zmq.ROUTER)
        self._control = self._context.socket(zmq.ROUTER)
        ports = []
        try:
            for socket, port in (
                (self._requests, requests_port),
                (self._results, results_port),
                (self._control, control_port),
            ):
                socket.set_hwm(_HIGH_WATER)
                socket.setsockopt(zmq.LINGER, _LINGER_MS)
                socket.bind(f"tcp://{host}:{port or '*'}")
                ports.append(int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))
        except (zmq.ZMQError, TypeError, ValueError) as error:
            self._context.destroy(linger=0)
            raise AdapterError(
                f"the adapter can't bind to tcp://{host}:{port}: {error}; name a port that is free, and an address of "
                "this host"
            ) from error
        self.requests_port, self.results_port, self.control_port = ports
        self._nudge = Nudge()
        self._outgoing: deque[tuple[str, Events]] = deque()
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._paused = threading.Event()
        self._closing = threading.Event()
        self._warned = 0.0
        self._thread: threading.Thread | None = None
        self.errors = 0
        """Frames that were none of what is taken here."""

    def start(self, submit: Submit) -> None:
        """Begin to take frames."""
        self._thread = threading.Thread(target=self._run, args=(submit,), name="engine-adapter", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Take no more requests. What was taken is answered still."""
        self._paused.set()
        self._nudge.set()

    def send(self, address: str, events: Events, settle: Settle) -> None:
        """As Sink's. What is sent here does not survive the engine."""
        self._outgoing.append((address, events))
        self._nudge.set()
        settle()

    def turn(self) -> list[str]:
        """As Sink's. Nobody is known to be gone."""
        return []

    def close(self) -> None:
        """Send what is left, and close the sockets. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._nudge.set()
            if self._thread is not None:
                self._thread.join()
            else:
                self._close_sockets()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self, submit: Submit) -> None:
        poller = zmq.Poller()
        poller.register(self._nudge.fileno(), zmq.POLLIN)
        poller.register(self._results, zmq.POLLIN)
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._requests, zmq.POLLIN)
        taking = True
        try:
            while not (self._closing.is_set() and not self._outgoing):
                if taking and self._paused.is_set():
                    taking = False
                    poller.unregister(self._requests)
                ready = dict(poller.poll(_LOOK_MS))
                self._nudge.clear()
                if self._results in ready:
                    self._guard(self._take_registration, self._results.recv_multipart(), submit)
                if self._control in ready:
                    self._guard(self._take_command, self._control.recv_multipart(), submit)
                if taking and self._requests in ready:
                    self._guard(self._take_request, self._requests.recv_multipart(), submit)
                while self._outgoing:
                    self._send(*self._outgoing.popleft())
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._context.destroy(linger=_LINGER_MS)
        self._nudge.close()

    def _guard(self, take: Callable[[list[bytes], Submit], None], frames: list[bytes], submit: Submit) -> None:
        """Whoever can connect can send anything: it is counted, told once a second, and passed over."""
        try:
            take(frames, submit)
        except Exception as error:
            # Of any kind: nothing that comes may take this thread down.
            self.errors += 1
            if time.monotonic() - self._warned > _WARN_SECONDS:
                self._warned = time.monotonic()
                logger.error("adapter: a message was passed over, %d in all: %s", self.errors, error)

    def _take_request(self, frames: list[bytes], submit: Submit) -> None:
        encoding, incoming = _decode(_body(frames), _Incoming)
        address = incoming.request_id
        if incoming.abort:
            submit(Abort(address, address), address)
            return
        # One that asks for too many, or none, is answered with one failure.
        choices = incoming.choices if 1 <= incoming.choices <= MAX_CHOICES else 1
        self._remember(address, encoding).unfinished = choices
        deadline = 0
        if incoming.timeout is not None:
            if not 0 < incoming.timeout < 1e9:
                raise ValueError(f"a timeout is a number of seconds above 0; that of {address} is {incoming.timeout}")
            deadline = time.monotonic_ns() + int(incoming.timeout * 1e9)
        submit(Request(address, address, incoming.task, incoming.choices, deadline), address)

    def _take_registration(self, frames: list[bytes], submit: Submit) -> None:
        address = _body(frames[1:]).decode()
        asked = self._remember(address, None)
        asked.identity = frames[0]
        early, asked.early = asked.early, None
        for body in early or ():
            self._results_to(frames[0], body)
        if asked.unfinished <= 0:
            self._asked.pop(address)

    def _take_command(self, frames: list[bytes], submit: Submit) -> None:
        encoding, command = _decode(_body(frames[1:]), _Command)
        address = f"{encoding.name} {frames[0].hex()}"
        submit(Control(address, address, command.command, command.arguments), address)

    def _remember(self, address: str, encoding: _Encoding | None) -> _Asked:
        asked = self._asked.get(address)
        if asked is None:
            asked = self._asked[address] = _Asked(encoding or _JSON)
            if len(self._asked) > _KEPT_REQUESTS:
                self._asked.popitem(last=False)
        elif encoding is not None:
            asked.encoding = encoding
        return asked

    def _send(self, address: str, events: Events) -> None:
        for answer in events.answers:
            name, _, identity = address.partition(" ")
            encode = to_json if name == "json" else to_msgpack
            said = {"value": answer.value}
            if answer.failure is not None:
                said = {"failure": msgspec.structs.asdict(answer.failure)}
            with contextlib.suppress(zmq.ZMQError):
                self._control.send_multipart([bytes.fromhex(identity), b"", _encode(encode, said)], zmq.NOBLOCK)
        if events.outputs:
            asked = self._remember(address, None)
            body = _encode_outputs(asked.encoding.encode, events.outputs)
            asked.unfinished -= sum(output.finished for output in events.outputs)
            if asked.identity is None:
                asked.early = [*(asked.early or ()), body]
            else:
                self._results_to(asked.identity, body)
                if asked.unfinished <= 0:
                    self._asked.pop(address, None)

    def _results_to(self, identity: bytes, body: bytes) -> None:
        # Who is gone, or takes nothing, loses what it had asked for; it can't hold up the others.
        with contextlib.suppress(zmq.ZMQError):
            self._results.send_multipart([identity, b"", body], zmq.NOBLOCK)


def _body(frames: list[bytes]) -> bytes:
    if len(frames) == 2 and not frames[0]:
        return frames[1]
    if len(frames) != 1:
        raise ValueError(f"a message has one frame, or an empty one before it; this one has {len(frames)} frames")
    return frames[0]


def _decode(body: bytes, kind: type[Any]) -> tuple[_Encoding, Any]:
    if body[:1] == b"{":
        return _JSON, msgspec.json.decode(body, type=kind)
    return _MSGPACK, msgspec.msgpack.decode(body, type=kind)


_UNENCODABLE = (NotImplementedError, TypeError, ValueError, OverflowError, RecursionError)


def _encode(encode: Callable[[Any], bytes], answer: Any) -> bytes:
    try:
        return encode(answer)
    except _UNENCODABLE as error:
        return encode({"failure": msgspec.structs.asdict(_unsendable(error))})


def _encode_outputs(encode: Callable[[Any], bytes], outputs: list[Output]) -> bytes:
    try:
        return encode([described(output) for output in outputs])
    except _UNENCODABLE:
        return encode([described(_sendable(encode, output)) for output in outputs])


def _sendable(encode: Callable[[Any], bytes], output: Output) -> Output:
    try:
        encode(output.value)
    except _UNENCODABLE as error:
        return msgspec.structs.replace(output, value=None, finished=True, failure=_unsendable(error))
    return output


def _unsendable(error: Exception) -> Failure:
    logger.error("adapter: a result can't be sent: %s", error)
    return Failure(FailureKind.HANDLER, f"its result has no plain form: {error}")
