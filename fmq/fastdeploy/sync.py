"""The synchronous form of FastDeploy's names, without asyncio: ``get`` returns the payload itself.

A Queue belongs to the thread that made it. Each FMQ is of its own, and so is what each call of FMQFactory makes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from fmq.config import EndpointManager, Role
from fmq.consumer import Consumer
from fmq.errors import OwnerThreadError, QueueEmptyError
from fmq.fastdeploy.component import (
    Context,
    Lazy,
    make_consumer,
    make_producer,
    make_publisher,
    make_subscriber,
    seconds_of,
)
from fmq.fastdeploy.factory import Links
from fmq.fastdeploy.message import Message
from fmq.fastdeploy.queue import SHM_THRESHOLD, QueueBase
from fmq.fastdeploy.topic import TopicBase
from fmq.producer import Producer
from fmq.topics import Publisher, Subscriber
from shmq import ShmqError, ViewsHeldError

GET_TIMEOUT = 1000.0
"""Milliseconds that ``get`` waits."""

_LOOK_SECONDS = 0.1
"""How often the thread of a topic looks whether it is to stop."""


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
        if core is not None:
            if self.role is Role.PRODUCER:
                core.close(timeout=self.config.closing)
            else:
                core.close()

    def _has_to_be_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise OwnerThreadError(
                f"queue {self.name} belongs to thread {self._owner}, and this is thread {threading.get_ident()}; make "
                "a Queue in each thread"
            )


class Topic(TopicBase):
    """What one publishes, all subscribers get: read-only, where it lies. See TopicBase."""

    def __init__(self, context: Any, name: str) -> None:
        super().__init__(context, name)
        self._publisher = Lazy(f"this publisher of topic {name}", partial(make_publisher, Publisher, self.config, name))
        self._met = False
        self._begin()

    def _begin(self) -> None:
        self._subscriber = Lazy(
            f"this subscriber of topic {self.name}", partial(make_subscriber, Subscriber, self.config, self.name)
        )
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def pub(self, data: Any) -> int:
        """Put something for all subscribers that there are; the first time, wait until there is one.

        Waits up to the setting ``put_timeout`` for that, and for room. Raises QueueTimeoutError, QueueFullError,
        QueueInUseError if the topic has another publisher, EncodeError, TooLargeError, SegmentSpaceError, ClosedError.
        """
        publisher = self._publisher.open()
        if not self._met:
            publisher.wait_for_readers(timeout=self.endpoint.put_timeout)
            self._met = True
        return int(publisher.put(data, timeout=self.endpoint.put_timeout))

    def sub(self, callback: Callable[[Message], object]) -> None:
        """Call ``callback`` with every Message from now on, in a thread, until ``stop_sub``. Errors of it are logged.

        Raises SubscribedError, a RuntimeError, if there is a callback already.
        """
        if self._thread is not None:
            if self._thread.is_alive():
                raise self._subscribed()
            self.stop_sub()
        self._stopping = threading.Event()
        work = (self._subscriber.open(), callback, self._stopping)
        self._thread = threading.Thread(target=self._receive, args=work, name=f"fmq-{self.name}", daemon=True)
        self._thread.start()

    def stop_sub(self) -> None:
        """Call the callback no more, not even for what was published already. The callback may call this, too.

        Raises ViewsHeldError while arrays of messages are alive; to be called again then.
        """
        thread, subscriber = self._thread, self._subscriber.core
        self._stopping.set()
        if thread is not None:
            if thread is threading.current_thread():
                # Which goes on from here, and ends when the callback has.
                return
            thread.join()
        if subscriber is not None:
            subscriber.close()
        self._begin()

    def close(self) -> None:
        """Stop the callback, and close the publisher as a Queue's producer."""
        self.stop_sub()
        publisher = self._publisher.shut()
        if publisher is not None:
            publisher.close(timeout=self.config.closing)

    def _receive(
        self, subscriber: Subscriber, callback: Callable[[Message], object], stopping: threading.Event
    ) -> None:
        while not stopping.is_set():
            try:
                held = subscriber.get(timeout=_LOOK_SECONDS)
            except QueueEmptyError:
                continue
            except ShmqError as error:
                if self._ends(error):
                    return
                continue
            message = Message.holding(held, copy=bool(self.endpoint.copy))
            del held
            self._call(callback, message)
            del message
        # Whoever called stop_sub, and is not this thread, closes it again, and is told of arrays that are alive.
        with contextlib.suppress(ViewsHeldError):
            subscriber.close()

    def _call(self, callback: Callable[[Message], object], message: Message) -> None:
        try:
            callback(message)
        except Exception:
            self._failed()


class FMQ:
    """Makes queues and topics. Its settings are read when it is made, as those of the asynchronous form."""

    def __init__(self, config_path: str | os.PathLike[str] | None = None) -> None:
        self.context = Context(EndpointManager.load_config(config_path))

    def queue(self, name: str, role: Role | str = Role.PRODUCER) -> Queue:
        """A new object for one side of a queue."""
        return Queue(self.context, name, role)

    def topic(self, name: str) -> Topic:
        """A new object for a topic."""
        return Topic(self.context, name)

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
