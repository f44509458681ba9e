"""The synchronous form of FastDeploy's names, without asyncio: ``get`` returns the payload itself.

A Queue belongs to the thread that made it. Each FMQ is of its own, and so is what each call of FMQFactory makes.
"""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from typing import Any, ClassVar

from fmq.config import EndpointManager, Role
from fmq.consumer import Consumer
from fmq.errors import OwnerThreadError, QueueEmptyError
from fmq.fastdeploy.component import Context, Lazy, make_consumer, make_producer, seconds_of
from fmq.fastdeploy.factory import Links
from fmq.fastdeploy.queue import SHM_THRESHOLD, QueueBase
from fmq.producer import Producer
from shmq import ShmqError

GET_TIMEOUT = 1000.0
"""Milliseconds that ``get`` waits."""


class Queue(QueueBase):
    """One side of a queue: many producers, one consumer. See QueueBase.

    Another thread than the one that made it gets OwnerThreadError, a RuntimeError, from ``put`` and ``get``.
    """

    def __init__(self, context: Any, name: str, role: Role | str = Role.PRODUCER) -> None:
        super().__init__(context, name, role)
        self._owner = threading.get_ident()
        self._producer = Lazy(f"this producer of queue {name}", partial(make_producer, Producer, self.config, name))
        self._consumer = Lazy(f"this consumer of queue {name}", partial(make_consumer, Consumer, self.config, name))

    @property
    def _lazy(self) -> Lazy[Any]:
        return self._producer if self.role is Role.PRODUCER else self._consumer

    def open(self) -> Queue:
        """Make what is needed now, so that what is wrong is known now: QueueInUseError, SegmentSpaceError."""
        self._lazy.open()
        return self

    def put(self, data: Any, shm_threshold: int = SHM_THRESHOLD) -> int:
        """As Queue.put of the asynchronous form, and blocks."""
        self._has_to_be(Role.PRODUCER, "put")
        self._has_to_be_owner()
        return self._producer.open().put(data, timeout=self.endpoint.put_timeout)

    def get(self, timeout: float | None = GET_TIMEOUT) -> Any:
        """The payload of the next message; None if there was none within ``timeout`` milliseconds.

        0 does not wait, None waits without limit. The message is acknowledged when the payload's arrays are gone, one
        without arrays at once. A payload None can't be told from no message. Raises as Queue.get of the asynchronous
        form.
        """
        self._has_to_be(Role.CONSUMER, "get")
        self._has_to_be_owner()
        seconds = seconds_of(timeout)
        try:
            held = self._consumer.open().get(timeout=seconds)
        except QueueEmptyError:
            return None
        return held.detach() if self.endpoint.copy else held.payload

    def close(self) -> None:
        """As Queue.close of the asynchronous form, and blocks. Any thread."""
        core = self._lazy.shut()
        if isinstance(core, Producer):
            core.close(timeout=self.config.closing)
        elif core is not None:
            core.close()

    def _has_to_be_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise OwnerThreadError(
                f"queue {self.name} belongs to thread {self._owner}, and this is thread {threading.get_ident()}; make "
                "a Queue in each thread"
            )


class FMQ:
    """Makes queues and topics. Its settings are read when it is made, as those of the asynchronous form."""

    def __init__(self, config_path: str | os.PathLike[str] | None = None) -> None:
        self.context = Context(EndpointManager.load_config(config_path))

    def queue(self, name: str, role: Role | str = Role.PRODUCER) -> Queue:
        """A new object for one side of a queue."""
        return Queue(self.context, name, role)

    def destroy(self) -> None:
        """Close all that was made here; raises the first error that this raised, when the others are closed."""
        _close_all(self.context)


class FMQFactory(Links[Queue]):
    """FastDeploy's queues; each call makes an FMQ of its own."""

    _contexts: ClassVar[weakref.WeakSet[Context] | None] = None

    @classmethod
    def make(cls, name: str, role: Role) -> Queue:
        """One side of a queue."""
        fmq = FMQ()
        if FMQFactory._contexts is None:
            FMQFactory._contexts = weakref.WeakSet()
        FMQFactory._contexts.add(fmq.context)
        return fmq.queue(name, role)

    @classmethod
    def destroy(cls) -> None:
        """Close all queues that were made here and are still there."""
        for context in list(FMQFactory._contexts or ()):
            _close_all(context)


def _close_all(context: Context) -> None:
    errors = []
    for component in context.components():
        try:
            component.close()
        except ShmqError as error:
            errors.append(error)
    if errors:
        raise errors[0]
