"""The API server's hook: what changes in ``EngineClient``."""

from __future__ import annotations

from copy import copy
from typing import Any

from examples.fastdeploy.upstream import EngineError, RequestStatus
from fmq import PeerUnavailableError, ShmqError

# The import change; it was: from fastdeploy.inter_communicator.fmq_factory import FMQFactory
from fmq.fastdeploy import FMQFactory, Queue


class EngineClient:
    """Sends requests to the engine. One in each API worker process."""

    def __init__(self) -> None:
        self.fmq_a2e_producer: Queue | None = None

    def _get_producer(self) -> Queue:
        if self.fmq_a2e_producer is None:
            self.fmq_a2e_producer = FMQFactory.q_a2e_producer()
        return self.fmq_a2e_producer

    async def add_requests(self, task: dict[str, Any]) -> None:
        """Send a request, once for each of its ``n`` choices. Raises EngineError: 400 or 429 or 503."""
        n = task.get("n", 1)
        for index in range(n):
            choice = copy(task)
            choice["request_id"] = f"{task['request_id']}_{index}"
            await self._send_task(choice)

    async def _send_task(self, task: dict[str, Any]) -> None:
        # What fails is raised: the client gets an answer, instead of waiting for one that never comes.
        try:
            await self._get_producer().put(task)
        except TimeoutError as error:
            # Without an engine that is alive, or with one that has too much to do.
            code = 503 if isinstance(error, PeerUnavailableError) else 429
            raise EngineError(f"the engine does not take the request: {error}", code) from error
        except ShmqError as error:
            raise EngineError(f"the request can't be sent: {error}", 400) from error

    async def abort(self, request_id: str, n: int = 1) -> None:
        """Stop all choices of a request."""
        for index in range(n):
            # Awaited: without, the coroutine would never run.
            await self._send_task({"request_id": f"{request_id}_{index}", "status": RequestStatus.ABORT.value})

    async def close(self) -> None:
        """When the worker shuts down."""
        await FMQFactory.destroy()
