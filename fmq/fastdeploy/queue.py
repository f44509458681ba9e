"""FastDeploy's Queue: a producer or a consumer of one queue, for asyncio."""

from __future__ import annotations

from functools import partial
from typing import Any

from fmq.config import Role
from fmq.consumer import AsyncConsumer
from fmq.errors import QueueEmptyError, RoleError
from fmq.fastdeploy.component import Component, Lazy, Socket, make_consumer, make_producer, seconds_of
from fmq.fastdeploy.message import Message
from fmq.producer import AsyncProducer

SHM_THRESHOLD = 1024 * 1024


class QueueBase(Component):
    """What both forms of a Queue share. ``role`` says whether it is the producer's side or the consumer's.

    Nothing is made, locked or connected before the first ``put``, ``get`` or ``open``, so that a process may fork in
    between; a child that was forked later makes its own. Closing is for any thread.
    """

    def __init__(self, context: Any, name: str, role: Role | str = Role.PRODUCER) -> None:
        super().__init__(context, name)
        self.role = Role(role)

    @property
    def socket(self) -> Socket | None:
        """What can be closed: None before the first use, and when it is closed."""
        core = self._lazy.core
        return None if core is None else Socket(core)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._lazy.is_closed

    def give_up(self) -> None:
        """Close without waiting: what is not done is left to the next consumer. Any thread; idempotent.

        Raises ViewsHeldError, and stays open, while arrays of a consumer's messages are alive.
        """
        core = self._lazy.shut()
        if core is not None:
            core.give_up()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.role.value}>"

    @property
    def _lazy(self) -> Lazy[Any]:
        raise NotImplementedError

    def _has_to_be(self, role: Role, call: str) -> None:
        if self.role is not role:
            raise RoleError(f"{call} is for the {role.value} of queue {self.name}, and this is its {self.role.value}")


class Queue(QueueBase):
    """One side of a queue: many producers, one consumer. See QueueBase.

    Any number of event loops may use it, one after another or at once, each in its thread.
    """

    def __init__(self, context: Any, name: str, role: Role | str = Role.PRODUCER) -> None:
        super().__init__(context, name, role)
        self._producer = Lazy(
            f"this producer of queue {name}", partial(make_producer, AsyncProducer, self.config, name)
        )
        self._consumer = Lazy(
            f"this consumer of queue {name}", partial(make_consumer, AsyncConsumer, self.config, name)
        )

    @property
    def _lazy(self) -> Lazy[Any]:
        return self._producer if self.role is Role.PRODUCER else self._consumer

    async def open(self) -> Queue:
        """Make what is needed now, so that what is wrong is known now: QueueInUseError, SegmentSpaceError."""
        await self._lazy.opened()
        return self

    async def put(self, data: Any, shm_threshold: int = SHM_THRESHOLD) -> int:
        """Put anything; when this returns, it will be delivered. Returns its ``msg_id``.

        ``shm_threshold`` is without effect: all of a message goes through shared memory, whatever its type and size.

        Waits for room up to the setting ``put_timeout``. Raises QueueFullError, PeerUnavailableError (no consumer is
        alive), EncodeError, TooLargeError, SegmentSpaceError, ClosedError, and RoleError, a PermissionError; then
        nothing was put.
        """
        self._has_to_be(Role.PRODUCER, "put")
        producer = await self._producer.opened()
        return await producer.put(data, timeout=self.endpoint.put_timeout)

    async def get(self, timeout: float | None = None) -> Message | None:
        """The next message; None if there was none within ``timeout`` milliseconds (0: do not wait, None: no limit).

        Raises QueueInUseError if another consumer has the queue, ClosedError, RoleError (a PermissionError), and for a
        message that can't be had DecodeError or CorruptRecordError; such a message is done, and the next call gives the
        one after it.
        """
        self._has_to_be(Role.CONSUMER, "get")
        seconds = seconds_of(timeout)
        consumer = await self._consumer.opened()
        try:
            held = await consumer.get(timeout=seconds)
        except QueueEmptyError:
            return None
        return Message.holding(held, copy=bool(self.endpoint.copy))

    async def close(self) -> None:
        """Close: a producer waits first, up to the setting ``close_timeout``, until what it put is done. Idempotent.

        What is not done by then is left to the next consumer. Raises ViewsHeldError, and stays open, while arrays of a
        consumer's messages are alive.
        """
        core = self._lazy.shut()
        if core is not None:
            await (core.close(timeout=self.config.closing) if self.role is Role.PRODUCER else core.close())
