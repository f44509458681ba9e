"""What a worker has to know, handed down from the command line to every worker process in one variable."""

from __future__ import annotations

import os
import secrets

import msgspec

from api.client import PATIENCE, SPILL_LIMIT

ENVIRONMENT = "SHMQ_API_SETTINGS"

MIB = 1024 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the HTTP front end. Sizes are bytes, times seconds.

    Attributes
        engines: the queues of the engines, all alike; requests are spread over them by load.
        namespace: of their queues; None for ``$FMQ_NAMESPACE``, else "default".
        model: the name under which /v1/models and /v1/chat/completions have the engine.
        ring_size, spill_limit: shared memory of each worker for each engine: now, and more if needed.
        patience: how long an engine that was there may be gone before requests are answered with 503.
        max_concurrency: requests at a time in all workers; one more is answered with 429.
        max_body: the largest body; a larger one is answered with 413.
        max_json: the largest body of JSON, which has to be decoded in private memory.
        max_pixels: the largest picture.
        put_timeout: how long a request may wait for room in the ring before it is answered with 503.
        request_timeout: the deadline of a request that names none.
        access_log: whether there is a line for each request.
        group: what the workers of one server have in common: how they find each other.
    """

    engines: tuple[str, ...] = ("requests",)
    namespace: str | None = None
    model: str = "shmq-demo"
    ring_size: int = 256 * MIB
    spill_limit: int = SPILL_LIMIT
    patience: float = PATIENCE
    max_concurrency: int = 512
    max_body: int = 2048 * MIB
    max_json: int = 64 * MIB
    max_pixels: int = 128 * 1024 * 1024
    put_timeout: float = 5.0
    request_timeout: float = 600.0
    access_log: bool = True
    group: str = msgspec.field(default_factory=lambda: secrets.token_hex(4))

    @classmethod
    def from_environment(cls) -> Settings:
        """Those of ``$SHMQ_API_SETTINGS``, JSON, or all defaults. Raises msgspec.ValidationError."""
        return msgspec.json.decode(os.environ.get(ENVIRONMENT, "{}"), type=cls)
