"""What clients and engines say to each other over queues. Both sides import this, and never one another.

An engine is the consumer of a queue of *calls*: requests, aborts and control commands. Each client is the consumer of a
queue of *events*, which it names in every call: there the engine puts, once a step for each client, what has become of
all its calls. Beside the queue lies a board (``shmq.Board``), which tells without asking whether the engine's receive
loop turns, and how much it has to do.

Delivery is at least once: an engine that died leaves its calls to the next one, which answers them from the first step
on. So every output carries its step, and a client passes over the ones that it has.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Literal

import msgspec

from fmq.paths import QueuePath

REPLY_PREFIX = "reply."
"""What the names of reply queues begin with. Each is made for one client, and no other ever reads it."""


MAX_CHOICES = 1024
"""Results that one request may ask for."""

Kind = Literal["handler", "deadline", "aborted", "refused", "invalid"]


class FailureKind:
    """Why a request failed: what a client may treat differently."""

    HANDLER: Final = "handler"
    """Its handler raised an error, or ended without having finished it."""
    DEADLINE: Final = "deadline"
    """Its time was over before it was finished."""
    ABORTED: Final = "aborted"
    REFUSED: Final = "refused"
    """The engine has too much to do. Nothing was done; it may be sent again."""
    INVALID: Final = "invalid"
    """What was asked for is none of what this engine does."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why there is no result, for programs and for people."""

    kind: Kind
    message: str


class Request(msgspec.Struct, frozen=True, tag="request"):
    """A task for the engine: any tree with arrays, stored once however many choices are asked for.

    ``deadline_ns`` is of this host's monotonic clock, 0 for none.
    """

    request_id: str
    reply_to: str
    task: Any
    choices: int = 1
    deadline_ns: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody waits for this request any more: what is not finished of it fails as ABORTED."""

    request_id: str
    reply_to: str


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A command to the engine itself, with arguments by name."""

    control_id: str
    reply_to: str
    command: str
    arguments: dict[str, Any] = {}


Call = Request | Abort | Control
"""The type of a consumer of calls."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One step of one choice of a request. ``step`` counts from 0; the last is ``finished``, and perhaps a failure."""

    request_id: str
    choice: int
    step: int
    value: Any
    finished: bool = True
    failure: Failure | None = None


def described(output: Output) -> dict[str, Any]:
    """An output by the names of its fields, for JSON and the like; its value stays what it is."""
    return {**msgspec.structs.asdict(output), "failure": output.failure and msgspec.structs.asdict(output.failure)}


CHAT = "chat"
"""The ``kind`` of a task that is a conversation. Its other keys: ``messages``, a list of {"role", "content"}, whose
content is a list of parts {"type": "text", "text"} or {"type": "image", "image": uint8 [height, width, 3]}; and
``max_tokens``, or None. Its outputs are ChatSteps."""


class ChatStep(msgspec.Struct, frozen=True, array_like=True):
    """The next piece of an answer to a chat, of so many tokens; ``reason`` is why it ends with this one, or None."""

    text: str
    reason: str | None = None
    tokens: int = 1


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a control command returned."""

    control_id: str
    value: Any
    failure: Failure | None = None


class Events(msgspec.Struct, frozen=True):
    """All that an engine has to tell one client after one step."""

    outputs: list[Output] = []
    answers: list[Answer] = []


class State(enum.IntEnum):
    """What an engine's receive loop is about."""

    STARTING = 0
    SERVING = 1
    STOPPING = 2
    FAILED = 3


class Gauge(enum.IntEnum):
    """The words of an engine's board."""

    HEARTBEAT_NS = 0
    """When the receive loop began its last turn, by the monotonic clock."""
    STATE = 1
    RECEIVED = 2
    FINISHED = 3
    FAILED = 4
    WAITING = 5
    RUNNING = 6
    RECEIVE_ERRORS = 7


def board_name(path: QueuePath) -> str:
    """The name of the board of the engine that serves a queue of calls."""
    return f"shmq:{path.namespace}:%{path.queue}:board"
