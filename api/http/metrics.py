"""What the front end counts for Prometheus, beside what its queues count (``fmq.metrics``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from api.engines import EngineView
from fmq.calls import Gauge as EngineGauge
from fmq.metrics import forget_dead_processes

REQUESTS = Counter("shmq_http_requests_total", "Requests answered", ["method", "route", "status"])
SECONDS = Histogram(
    "shmq_http_request_seconds",
    "From the head of a request to the end of its answer",
    ["route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
LOOP_LAG = Histogram(
    "shmq_http_loop_lag_seconds",
    "By how much a worker's event loop is late, sampled",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
)
BYTES = Counter("shmq_http_body_bytes_total", "Bytes of bodies", ["direction"])
IN_FLIGHT = Gauge("shmq_http_requests_in_flight", "Requests being answered", multiprocess_mode="livesum")


class EngineCollector(Collector):
    """The boards of the engines, read when they are asked for."""

    def __init__(self, engines: Sequence[EngineView]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """As prometheus_client has it."""
        up = GaugeMetricFamily("shmq_engine_up", "1 if the engine's receive loop turns", labels=["queue"])
        held = GaugeMetricFamily("shmq_engine_requests", "Requests that the engine has", labels=["queue", "state"])
        done = CounterMetricFamily("shmq_engine_requests", "Requests that it ended", labels=["queue", "outcome"])
        errors = CounterMetricFamily("shmq_engine_receive_errors", "Calls that it could not read", labels=["queue"])
        for engine in self._engines:
            engine.look()
            up.add_metric([engine.queue], float(engine.serving))
            held.add_metric([engine.queue, "waiting"], engine.word(EngineGauge.WAITING))
            held.add_metric([engine.queue, "running"], engine.word(EngineGauge.RUNNING))
            done.add_metric([engine.queue, "finished"], engine.word(EngineGauge.FINISHED))
            done.add_metric([engine.queue, "failed"], engine.word(EngineGauge.FAILED))
            errors.add_metric([engine.queue], engine.word(EngineGauge.RECEIVE_ERRORS))
        return [up, held, done, errors]


def registry(engines: Sequence[EngineView]) -> CollectorRegistry:
    """What a scrape has: of all processes in multiprocess mode, else of this one; and the engines."""
    made = CollectorRegistry()
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        forget_dead_processes()
        MultiProcessCollector(made)  # type: ignore[no-untyped-call]
    else:
        made.register(REGISTRY)
    made.register(EngineCollector(engines))
    return made


def exposition(engines: Sequence[EngineView]) -> bytes:
    """The answer to GET /metrics."""
    return generate_latest(registry(engines))
