"""What the status page shows: the engines' boards, the workers, and the queues' counts as Prometheus has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from api.engines import EngineView
from api.http.gate import Gate
from api.http.metrics import registry
from api.http.settings import Settings

_QUEUE_SAMPLES = {
    "shmq_ring_bytes": "ring_bytes",
    "shmq_ring_used_bytes": "ring_used_bytes",
    "shmq_redeliveries_total": "redeliveries",
    "shmq_spilled_bytes_total": "spilled_bytes",
    "shmq_copied_bytes_total": "copied_bytes",
}
_ADDRESS_SAMPLES = {
    "fastdeploy:zmq:msg_send_total": "put",
    "fastdeploy:zmq:msg_bytes_send_total": "put_bytes",
    "fastdeploy:zmq:msg_recv_total": "taken",
}


def status(engines: Sequence[EngineView], gate: Gate, settings: Settings) -> dict[str, Any]:
    """All of it, for JSON. Counts only grow; whoever wants rates takes two and subtracts."""
    queues: dict[str, dict[str, float]] = {}
    http: dict[str, float] = {}
    for family in registry(engines).collect():
        for sample in family.samples:
            if sample.name in _QUEUE_SAMPLES:
                _add(queues, sample.labels["queue"], _QUEUE_SAMPLES[sample.name], sample.value)
            elif sample.name in _ADDRESS_SAMPLES:
                queue = sample.labels["address"].rpartition("/")[2].removesuffix(".sock")
                _add(queues, queue, _ADDRESS_SAMPLES[sample.name], sample.value)
            elif sample.name == "shmq_http_requests_total" and sample.labels["route"].startswith("/v1/"):
                status_class = f"{sample.labels['status'][0]}xx"
                http[status_class] = http.get(status_class, 0) + sample.value
            elif sample.name == "shmq_http_body_bytes_total":
                http["bytes_" + sample.labels["direction"]] = sample.value
    workers = gate.workers()
    ours = {engine.queue for engine in engines}
    return {
        "time": time.time(),
        "model": settings.model,
        "engines": [engine.describe() for engine in engines],
        "queues": [
            {"queue": queue, "replies": queue not in ours, **queues[queue]}
            for queue in sorted(queues, key=lambda name: (name not in ours, name))
            if queue in ours or queues[queue].get("ring_bytes")
        ],
        "workers": [{"pid": pid, "in_flight": workers[pid]} for pid in sorted(workers)],
        "max_concurrency": settings.max_concurrency,
        "http": http,
    }


def _add(queues: dict[str, dict[str, float]], queue: str, name: str, value: float) -> None:
    row = queues.setdefault(queue, {})
    row[name] = row.get(name, 0) + value
