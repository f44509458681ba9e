"""What can go wrong with a queue. Every error of this package is an ``FmqError``, and so a ``ShmqError``."""

from __future__ import annotations

from shmq.errors import ShmqError


class FmqError(ShmqError):
    """The root of all errors of fmq."""


class QueueNameError(FmqError, ValueError):
    """A queue or a namespace can't have that name, or its socket path would be too long."""


class QueueInUseError(FmqError):
    """Another consumer that is alive has the queue. ``pid`` names it, where it is known."""

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class QueueTimeoutError(FmqError, TimeoutError):
    """What was asked for did not come about in the time given."""


class QueueEmptyError(QueueTimeoutError):
    """``get`` found no message in the time given."""


class QueueFullError(QueueTimeoutError):
    """``put`` found no room in the time given, although a consumer is alive: it is slow, stopped, or holds messages."""


class PeerUnavailableError(QueueTimeoutError):
    """``put`` or ``flush`` waited in vain, and no consumer is alive that could have helped."""


class ClosedError(FmqError):
    """The producer, consumer or message was closed or released before."""


class ForkedError(FmqError):
    """A producer or consumer was used in a child of the process that made it."""


class EncodeError(FmqError, TypeError):
    """An object in the message can't be encoded. The error names its path in the tree."""


class DTypeError(EncodeError):
    """An array's dtype can't travel: structured, object, or of variable length."""


class DecodeError(FmqError, ValueError):
    """The bytes of a message are not what the codec writes, or don't fit the type asked for."""


class CodecRefusedError(DecodeError):
    """A message is encoded in a way that its consumer was not told to accept: with pickle, say. It was not decoded."""


class ConfigError(FmqError, ValueError):
    """A setting has a wrong key, type or value. The error names its path."""


class RoleError(FmqError, PermissionError):
    """``put`` on a consumer's queue, or ``get`` on a producer's."""


class OwnerThreadError(FmqError, RuntimeError):
    """What belongs to one thread was used in another."""


class SubscribedError(FmqError, RuntimeError):
    """``sub`` was called on a topic that has a callback already."""


class ProtocolError(FmqError):
    """A peer sent what the protocol does not know: another version of this package, or something else altogether."""
