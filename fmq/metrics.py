"""Prometheus metrics: FastDeploy's six of its ZeroMQ links, and the queue's own.

::

    metrics = QueueMetrics()                          # in the registry that prometheus_client has anyway
    producer = Producer("requests", metrics=metrics)

How it works. Producers and consumers count in plain numbers (``fmq.meters``). ``flush`` adds what is new to the metrics
of prometheus_client, and does so at every scrape of the registry; so a scrape is never stale. In prometheus'
multiprocess mode the scrape is another process's, which reads what this one has written to a file: there a thread
flushes every FLUSH_SECONDS, and that is how much a kill -9 may leave uncounted.

Needs prometheus-client (``pip install 'shmq[metrics]'``); ``import fmq`` does not import this module.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from typing import TypeAlias

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.registry import Collector

from fmq.lifetime import Closable
from fmq.meters import (
    LATENCY_MS,
    METERED,
    WAIT_SECONDS,
    ConsumerMeter,
    MeteredConsumerProtocol,
    ProducerMeter,
    Reading,
)
from fmq.paths import QueuePath
from fmq.protocol import ConsumerProtocol
from shmq import RingWriter
from shmq.segment import abandon_in_child, no_fork

FLUSH_SECONDS = 0.5
"""How often the values of multiprocess mode are written. Costs 0.1 % of a core."""

_COUNTERS = {
    "send": ("fastdeploy:zmq:msg_send_total", "Messages that were to be put, those that failed included"),
    "send_failed": ("fastdeploy:zmq:msg_send_failed_total", "Messages that could not be put"),
    "bytes_send": ("fastdeploy:zmq:msg_bytes_send_total", "Bytes put, those in shared memory included"),
    "recv": ("fastdeploy:zmq:msg_recv_total", "Messages taken"),
    "bytes_recv": ("fastdeploy:zmq:msg_bytes_recv_total", "Bytes taken, those in shared memory included"),
    "spills": ("shmq_spills_total", "Payloads that went to a spill segment instead of the ring"),
    "spilled_bytes": ("shmq_spilled_bytes_total", "Bytes that went to spill segments"),
    "redeliveries": ("shmq_redeliveries_total", "Messages delivered again, after a consumer was gone"),
    "expired": ("shmq_expired_total", "Messages not delivered because their time to live was over"),
    "set_aside": ("shmq_set_aside_total", "Messages set aside because too many consumers died with them"),
    "skipped": ("shmq_skipped_total", "Messages taken back from readers of a topic that were too slow"),
    "doorbells_sent": ("shmq_doorbells_sent_total", "ZeroMQ messages sent to wake the consumer"),
    "doorbells_saved": ("shmq_doorbells_saved_total", "Messages put without one, for the consumer was awake"),
    "copied_bytes": ("shmq_copied_bytes_total", "Bytes of arrays copied into shared memory; the others were loans"),
    "copy_seconds": ("shmq_copy_seconds_total", "Seconds spent copying large arrays into shared memory"),
}
_HISTOGRAMS = {
    "latency": ("fastdeploy:zmq:latency", "Milliseconds from the put of a message until it was taken", LATENCY_MS),
    "wait": ("shmq_put_wait_seconds", "Seconds that puts waited for room, of those that had to", WAIT_SECONDS),
}
_GAUGES = {
    "ring": ("shmq_ring_bytes", "Bytes of the rings of this queue"),
    "used": ("shmq_ring_used_bytes", "Bytes of them that are in use"),
}
_BY_ADDRESS = {"send", "send_failed", "bytes_send", "recv", "bytes_recv", "latency"}
"""What has the label ``address``, as FastDeploy has it; the others have ``queue`` and ``namespace``."""

_Meter: TypeAlias = ProducerMeter | ConsumerMeter


@dataclasses.dataclass(slots=True)
class ZMQMetricsStats:
    """What to add to FastDeploy's six metrics, with its names: see ``record_zmq_stats``. ``zmq_latency`` in seconds."""

    msg_send_total: int = 0
    msg_send_failed_total: int = 0
    msg_bytes_send_total: int = 0
    msg_recv_total: int = 0
    msg_bytes_recv_total: int = 0
    zmq_latency: float = 0.0


class QueueMetrics:
    """Metrics for any number of producers and consumers: hand it to their constructors as ``metrics``.

    ``registry`` is prometheus_client's own by default. All QueueMetrics of one registry are one. Any thread, and any
    process: in a forked child the metrics go on, without the parent's producers and consumers. Raises ValueError if
    the registry has metrics of these names from somebody else.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._exporter = _exporter_of(REGISTRY if registry is None else registry)

    def flush(self) -> None:
        """Write what was counted so far. Only of use in multiprocess mode, before ``os._exit``."""
        self._exporter.flush()

    def record_zmq_stats(self, stats: ZMQMetricsStats, address: str = "unknown") -> None:
        """Add to FastDeploy's metrics of ``address``: the sink that its ZeroMQ code calls. A latency of 0 is none."""
        self._exporter.record(stats, address)

    # For the constructors of producers and consumers, which must not import what needs prometheus_client.

    def producer_meter(
        self, owner: Closable, path: QueuePath, writer: RingWriter, lock: threading.Lock
    ) -> ProducerMeter:
        """What a producer counts with, under its lock."""
        meter = ProducerMeter(path, writer)
        self._exporter.attach(_Attached(owner, meter, lock))
        return meter

    def consumer_protocol(
        self, path: QueuePath, kind: type[ConsumerProtocol]
    ) -> Callable[..., MeteredConsumerProtocol]:
        """Makes a protocol of this kind that counts, with the same arguments; to be attached."""
        return functools.partial(METERED[kind], path)

    def attach(self, owner: Closable, protocol: ConsumerProtocol, lock: threading.Lock) -> None:
        """Read from now on what a consumer counts under its lock."""
        assert isinstance(protocol, MeteredConsumerProtocol)
        self._exporter.attach(_Attached(owner, protocol.meter, lock))


def forget_dead_processes(path: str | None = None) -> None:
    """Forget the rings of processes that are gone, in multiprocess mode: to be called before each scrape.

    ``path`` is by default $PROMETHEUS_MULTIPROC_DIR. For servers without a hook for the death of a worker, and deaths
    without a word; where there is one, prometheus_client's ``mark_process_dead(pid)`` does the same for one process.
    What dead processes have counted stays.
    """
    path = path or os.environ["PROMETHEUS_MULTIPROC_DIR"]
    found = glob.glob(os.path.join(glob.escape(path), "gauge_live*_*.db"))
    pids = {os.path.basename(file).removesuffix(".db").rpartition("_")[2] for file in found}
    for pid in pids:
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            mark_process_dead(int(pid), path)  # type: ignore[no-untyped-call]


class _Histogram(Histogram):
    """A Histogram to which whole buckets can be added: one ``observe`` a message would cost 1 us."""

    def add(self, counts: Iterable[int], total: float) -> None:
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(total)


class _Attached:
    """A meter, and how much of it was added to the metrics already."""

    def __init__(self, owner: Closable, meter: _Meter, lock: threading.Lock) -> None:
        self.owner = weakref.ref(owner)
        self.meter = meter
        self.lock = lock
        self.counts: dict[str, float] = {}
        self.tallies: dict[str, tuple[list[int], float]] = {}
        self._is_gone = False

    def read(self) -> tuple[Reading, bool]:
        """The reading, and whether it is the last one: the owner was closed, or is gone."""
        # Kept alive while its lock is held: its finalizer would want the lock, on this very thread perhaps.
        owner = self.owner()
        # Once more after it was found to be gone: another thread may be about to finalize it.
        last = self._is_gone if owner is None else owner.closed
        self._is_gone = owner is None
        with self.lock:
            return self.meter.reading(), last


class _Exporter(Collector):
    """The metrics themselves. A registry knows this one collector, and so every scrape begins with a flush."""

    def __init__(self) -> None:
        self._counters = {
            key: Counter(name, text, _labels(key), registry=None) for key, (name, text) in _COUNTERS.items()
        }
        self._histograms = {
            key: _Histogram(name, text, _labels(key), registry=None, buckets=bounds)
            for key, (name, text, bounds) in _HISTOGRAMS.items()
        }
        self._gauges = {
            key: Gauge(name, text, _labels(key), registry=None, multiprocess_mode="livesum")
            for key, (name, text) in _GAUGES.items()
        }
        self._families = [*self._counters.values(), *self._histograms.values(), *self._gauges.values()]
        self._multiprocess = _is_multiprocess()
        self._attached: list[_Attached] = []
        self._shown: set[tuple[str, ...]] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Whoever flushes has it; taken before the locks of producers and consumers."""
        self._writing = threading.Lock()
        """Whoever is in prometheus_client has it; taken last."""
        # prometheus_client has locks of its own, and one that another thread holds would stay taken in the child.
        os.register_at_fork(
            before=self._writing.acquire, after_in_parent=self._writing.release, after_in_child=self._writing.release
        )
        abandon_in_child(self)

    def attach(self, attached: _Attached) -> None:
        with self._lock:
            self._attached.append(attached)
            if self._multiprocess and self._thread is None:
                stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._flush_now_and_then, args=(stop,), name="shmq-metrics", daemon=True
                )
                self._thread.start()
                # Not atexit, which the children that multiprocessing forks don't come by.
                Finalize(None, self._end, args=(stop,), exitpriority=0)

    def flush(self) -> None:
        with self._lock:
            readings = [(attached, *attached.read()) for attached in self._attached]
            with self._writing:
                levels: dict[tuple[str, ...], dict[str, float]] = {}
                for attached, reading, _ in readings:
                    self._add(attached, reading)
                    if reading.levels:
                        sums = levels.setdefault(_values("ring", attached.meter.path), dict.fromkeys(_GAUGES, 0.0))
                        for key, value in reading.levels.items():
                            sums[key] += value
                self._show(levels)
            self._attached = [attached for attached, _, last in readings if not last]

    def _add(self, attached: _Attached, reading: Reading) -> None:
        """Add what is new since the last reading; a count that was there before appears, if only as 0."""
        path = attached.meter.path
        for key, count in reading.counts.items():
            before = attached.counts.get(key)
            if before is None or count > before:
                self._counters[key].labels(*_values(key, path)).inc(count - (before or 0))
                attached.counts[key] = count
        for key, (counts, total) in reading.tallies.items():
            old_counts, old_total = attached.tallies.get(key, ([0] * len(counts), 0.0))
            if key not in attached.tallies or counts != old_counts:
                new = [count - old for count, old in zip(counts, old_counts, strict=True)]
                self._histograms[key].labels(*_values(key, path)).add(new, total - old_total)
                attached.tallies[key] = counts, total

    def _show(self, levels: dict[tuple[str, ...], dict[str, float]]) -> None:
        for labels in self._shown - levels.keys():
            for gauge in self._gauges.values():
                if self._multiprocess:
                    # Nothing can be taken out of the file; in a sum over processes 0 is nothing.
                    gauge.labels(*labels).set(0)
                else:
                    gauge.remove(*labels)
        self._shown = set(levels)
        for labels, values in levels.items():
            for key, value in values.items():
                self._gauges[key].labels(*labels).set(value)

    def record(self, stats: ZMQMetricsStats, address: str) -> None:
        with self._writing:
            for key, value in (
                ("send", stats.msg_send_total),
                ("send_failed", stats.msg_send_failed_total),
                ("bytes_send", stats.msg_bytes_send_total),
                ("recv", stats.msg_recv_total),
                ("bytes_recv", stats.msg_bytes_recv_total),
            ):
                self._counters[key].labels(address).inc(value)
            if stats.zmq_latency > 0:
                self._histograms["latency"].labels(address).observe(stats.zmq_latency * 1000)

    def describe(self) -> Iterable[Metric]:
        return [metric for family in self._families for metric in family.describe()]

    def collect(self) -> Iterable[Metric]:
        self.flush()
        with self._writing:
            return [metric for family in self._families for metric in family.collect()]

    def abandon(self) -> None:
        """In a forked child: what the parent's producers and consumers count is the parent's."""
        self._lock = threading.Lock()
        self._attached = []
        self._thread = None

    def _flush_now_and_then(self, stop: threading.Event) -> None:
        while not stop.wait(FLUSH_SECONDS):
            self.flush()

    def _end(self, stop: threading.Event) -> None:
        stop.set()
        self.flush()


def _is_multiprocess() -> bool:
    """Whether prometheus_client keeps its values in files for another process to read."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


_exporters: weakref.WeakKeyDictionary[CollectorRegistry, _Exporter] | None = None


def _exporter_of(registry: CollectorRegistry) -> _Exporter:
    """The exporter of a registry; in multiprocess mode that of the process, whose file has each value once."""
    global _exporters
    with no_fork:
        if _exporters is None:
            _exporters = weakref.WeakKeyDictionary()
        exporter = _exporters.get(registry)
        if exporter is None:
            shared = next(iter(_exporters.values()), None) if _is_multiprocess() else None
            exporter = _Exporter() if shared is None else shared
            registry.register(exporter)
            _exporters[registry] = exporter
        return exporter


def _labels(key: str) -> tuple[str, ...]:
    return ("address",) if key in _BY_ADDRESS else ("queue", "namespace")


def _values(key: str, path: QueuePath) -> tuple[str, ...]:
    return (path.endpoint,) if key in _BY_ADDRESS else (path.label, path.namespace)
