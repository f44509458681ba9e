"""The engine's hook: what changes in ``EngineService``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any

from examples.fastdeploy.upstream import Request, RequestStatus, Scheduler
from fmq import CorruptRecordError, DecodeError, QueueInUseError, ShmqError

# The import change; it was: from fastdeploy.inter_communicator.fmq_factory import FMQFactory
from fmq.fastdeploy import FMQFactory, Queue

logger = logging.getLogger("examples.fastdeploy")

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


class EngineService:
    """Takes requests in. ``send_error`` answers a request that can't be run; ``adapter`` is the internal adapter's own
    loop, if there is one, and then the queue is not used at all.
    """

    def __init__(
        self, send_error: Callable[[str, str, int], None], adapter: Callable[[EngineService], None] | None = None
    ) -> None:
        self.running = True
        self.scheduler = Scheduler()
        self.fmq_a2e_consumer: Queue | None = None
        self.failure: BaseException | None = None
        self._send_error_response = send_error
        self._adapter = adapter
        self._pause = _FIRST_PAUSE
        self._thread: threading.Thread | None = None

    def start_zmq_service(self) -> None:
        """Start to receive."""
        self.fmq_a2e_consumer = None
        self._thread = threading.Thread(target=self._run_insert_zmq_task_to_scheduler, daemon=True)
        self._thread.start()

    def is_receiving(self) -> bool:
        """Whether the receive loop is alive: something for ``/health`` to ask."""
        return self._thread is not None and self._thread.is_alive()

    def _run_insert_zmq_task_to_scheduler(self) -> None:
        if self._adapter is not None:
            # The adapter's tcp branch stays as it is.
            self._adapter(self)
            return
        try:
            asyncio.run(self._insert_zmq_task_to_scheduler())
        except BaseException as error:
            self.failure = error
            logger.error("Async loop crashed: %s", traceback.format_exc())

    async def _insert_zmq_task_to_scheduler(self) -> None:
        while self.running:
            try:
                if self.fmq_a2e_consumer is None:
                    # Made in this thread, and opened now: another engine with this queue is an error, here.
                    self.fmq_a2e_consumer = await FMQFactory.q_a2e_consumer().open()
                message = await self.fmq_a2e_consumer.get(timeout=100)
                self._pause = _FIRST_PAUSE
            except (DecodeError, CorruptRecordError) as error:
                logger.error("A message can't be had, and is left out: %s", error)
                continue
            except QueueInUseError:
                # Two engines that share a queue by accident. Trying again would hide it.
                raise
            except ShmqError as error:
                if not self.running:
                    return
                await self._recover(error)
                continue
            if message is None:
                continue
            self._insert(message.payload)
            # The scheduler has the arrays; they stay valid for as long as it keeps them.
            del message

    def _insert(self, data: dict[str, Any]) -> None:
        request_id = data.get("request_id", "unknown")
        if data.get("status") == RequestStatus.ABORT.value:
            self.scheduler.abort(request_id)
            return
        try:
            self.scheduler.put_requests([Request.from_dict(data)])
        except ValueError as error:
            self._send_error_response(request_id, str(error), 500)

    async def _recover(self, error: ShmqError) -> None:
        """After an error of the queue: go on after a pause that grows, with a new consumer if this one is closed."""
        logger.error("Receiving failed, and is tried again in %.2f s: %s", self._pause, error)
        if self.fmq_a2e_consumer is not None and self.fmq_a2e_consumer.closed:
            self.fmq_a2e_consumer = None
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _exit_sub_services(self) -> None:
        """At the end. Nothing here may fail, for there is more to be ended after it."""
        self.running = False
        consumer = getattr(self, "fmq_a2e_consumer", None)
        if consumer is not None:
            try:
                socket = getattr(consumer, "socket", None)
                if socket is not None:
                    socket.close()
                    logger.info("FMQ consumer socket closed successfully.")
            except Exception as error:
                logger.error("Error closing fmq_consumer: %s", error)
            finally:
                self.fmq_a2e_consumer = None
        if self._thread is not None:
            self._thread.join(5)
        with contextlib.suppress(ShmqError):
            asyncio.run(FMQFactory.destroy())
