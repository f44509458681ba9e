"""Stand-ins for the classes of FastDeploy around the two hooks, with their names and just enough of their work."""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import Any


class EngineError(Exception):
    """What an API worker answers a client with."""

    def __init__(self, message: str, error_code: int = 400) -> None:
        super().__init__(message)
        self.error_code = error_code


class RequestStatus(enum.Enum):
    """Where a request is."""

    WAITING = 0
    RUNNING = 1
    ABORT = 4


class Request:
    """One choice of a request, as the engine has it."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], multimodal_inputs: dict[str, Any] | None) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.multimodal_inputs = multimodal_inputs

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Request:
        """A request from what came over the link. Raises ValueError for what is none."""
        if "prompt_token_ids" not in data:
            raise ValueError("prompt_token_ids is missing")
        return cls(data["request_id"], data["prompt_token_ids"], data.get("multimodal_inputs"))


class Scheduler:
    """Keeps requests until somebody runs them. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waiting: deque[Request] = deque()
        self.aborted: set[str] = set()

    def put_requests(self, requests: list[Request]) -> None:
        """Take requests in."""
        with self._lock:
            self.waiting.extend(requests)

    def get_request(self) -> Request | None:
        """The next one that was not aborted."""
        with self._lock:
            while self.waiting:
                request = self.waiting.popleft()
                if request.request_id not in self.aborted:
                    return request
            return None

    def abort(self, request_id: str) -> None:
        """Never run this one."""
        with self._lock:
            self.aborted.add(request_id)
