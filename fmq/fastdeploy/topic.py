"""FastDeploy's Topic: what one publishes, all subscribers get; for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from fmq.errors import ClosedError, DecodeError, QueueTimeoutError, SubscribedError
from fmq.fastdeploy.component import Component, Lazy, make_publisher, make_subscriber
from fmq.fastdeploy.message import Message
from fmq.topics import AsyncPublisher, AsyncSubscriber
from shmq import CorruptRecordError, ShmqError, ViewsHeldError
from shmq.errors import ReaderDroppedError
from shmq.layout import SLOTS

logger = logging.getLogger("fmq")

_JOIN_SECONDS = 0.25
"""How long the first ``pub`` waits for subscribers that were there before it. Each looks for a ring every 0.05 s."""


class TopicBase(Component):
    """What both forms of a Topic share: one publisher in all, up to 64 subscribers, which get what comes after them.

    Nothing is made or locked before the first ``pub`` or ``sub``. What a subscriber is too slow for is a matter of the
    settings ``policy`` and ``patience``.
    """

    _publisher: Lazy[Any]
    _subscriber: Lazy[Any]

    def give_up(self) -> None:
        """Close without waiting. Any thread; idempotent. Raises ViewsHeldError while arrays of messages are alive."""
        for lazy in (self._subscriber, self._publisher):
            core = lazy.shut()
            if core is not None:
                core.give_up()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def _subscribed(self) -> SubscribedError:
        return SubscribedError(f"topic {self.name} has a callback already; stop_sub() first, or make another Topic")

    def _ends(self, error: ShmqError) -> bool:
        """Whether an error is the end of receiving, and not of one message; logs it unless the topic was closed."""
        if not isinstance(error, ClosedError):
            logger.error("topic %s: %s", self.name, str(error))
        return not isinstance(error, DecodeError | CorruptRecordError | ReaderDroppedError)

    def _failed(self) -> None:
        # As text: a record of the error itself would keep its traceback, and the arrays in it.
        logger.error("topic %s: the callback failed, and is called again:\n%s", self.name, traceback.format_exc())


class Topic(TopicBase):
    """What one publishes, all subscribers get: read-only, where it lies. See TopicBase."""

    def __init__(self, context: Any, name: str) -> None:
        super().__init__(context, name)
        self._publisher = Lazy(
            f"this publisher of topic {name}", partial(make_publisher, AsyncPublisher, self.config, name)
        )
        self._begin()

    def _begin(self) -> None:
        self._subscriber = Lazy(
            f"this subscriber of topic {self.name}", partial(make_subscriber, AsyncSubscriber, self.config, self.name)
        )
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def pub(self, data: Any) -> int:
        """Put something for all subscribers that there are.

        The first time, this takes 0.25 s, within which all that were there before get in, however many they are.
        Waits for room up to the setting ``put_timeout``. Raises QueueFullError, QueueInUseError if the topic has
        another publisher, EncodeError, TooLargeError, SegmentSpaceError, ClosedError; then nothing was put.
        """
        is_first = self._publisher.core is None
        publisher = await self._publisher.opened()
        if is_first:
            with contextlib.suppress(QueueTimeoutError):
                await publisher.wait_for_readers(SLOTS, timeout=_JOIN_SECONDS)
        return int(await publisher.put(data, timeout=self.endpoint.put_timeout))

    async def sub(self, callback: Callable[[Message], object]) -> asyncio.Task[None]:
        """Call ``callback``, a function or a coroutine function, with every Message from now on.

        What it raises is logged, and it is called with the next one. Returns the task that does it, once the topic is
        subscribed to; ``stop_sub`` ends it. Raises SubscribedError, a RuntimeError, if there is a callback already.
        """
        if self._task is not None and not self._task.done():
            raise self._subscribed()
        subscriber = await self._subscriber.opened()
        self._stopping = False
        self._task = asyncio.create_task(self._receive(subscriber, callback))
        return self._task

    async def stop_sub(self) -> None:
        """Call the callback no more, not even for what was published already. The callback may call this, too.

        Raises ViewsHeldError while arrays of messages are alive; to be called again then.
        """
        task, subscriber = self._task, self._subscriber.core
        self._stopping = True
        if task is not None and not task.done():
            if task is asyncio.current_task():
                # Which goes on from here, and ends when the callback has.
                return
            await _cancelled(task)
        if subscriber is not None:
            await subscriber.close()
        self._begin()

    async def close(self) -> None:
        """Stop the callback, and close the publisher as a Queue's producer."""
        await self.stop_sub()
        publisher = self._publisher.shut()
        if publisher is not None:
            await publisher.close(timeout=self.config.closing)

    async def _receive(self, subscriber: AsyncSubscriber, callback: Callable[[Message], object]) -> None:
        while True:
            try:
                held = await subscriber.get()
            except ShmqError as error:
                if self._ends(error):
                    return
                continue
            message = Message.holding(held, copy=bool(self.endpoint.copy))
            del held
            await self._call(callback, message)
            del message
            if self._stopping:
                self._task = None
                with contextlib.suppress(ViewsHeldError):
                    await self.stop_sub()
                return

    async def _call(self, callback: Callable[[Message], object], message: Message) -> None:
        try:
            result = callback(message)
            if inspect.isawaitable(result):
                await result
        except Exception:
            self._failed()


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task, and wait for that if it is of this event loop."""
    loop = task.get_loop()
    if loop is asyncio.get_running_loop():
        task.cancel()
        await asyncio.wait([task])
    elif not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
