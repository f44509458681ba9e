"""What is counted for Prometheus, under which names, and that it is counted once."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fmq import (
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    DecodeError,
    EncodeError,
    PeerUnavailableError,
    Producer,
    QueueEmptyError,
    QueueFullError,
    QueueTimeoutError,
    TooLargeError,
)
from fmq.meters import Tally
from fmq.metrics import QueueMetrics, ZMQMetricsStats
from fmq.paths import TopicPath
from fmq.protocol import ConsumerProtocol
from shmq import RingReader
from tests.conftest import Ring
from tests.queues import DEADLINE_S, Place, eventually, fill, is_empty, place_fixture, run_to_end

__all__ = ["place_fixture"]

FASTDEPLOY = {
    "fastdeploy:zmq:msg_send_total",
    "fastdeploy:zmq:msg_send_failed_total",
    "fastdeploy:zmq:msg_bytes_send_total",
    "fastdeploy:zmq:msg_recv_total",
    "fastdeploy:zmq:msg_bytes_recv_total",
}
BUCKETS = ["0.001", "0.01", "0.02", "0.05", "0.1", "0.25", "0.5", "1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0"]
BUCKETS += ["200.0", "500.0", "1000.0", "+Inf"]
COUNTERS = {
    "shmq_spills_total",
    "shmq_spilled_bytes_total",
    "shmq_redeliveries_total",
    "shmq_expired_total",
    "shmq_set_aside_total",
    "shmq_skipped_total",
    "shmq_doorbells_sent_total",
    "shmq_doorbells_saved_total",
    "shmq_copied_bytes_total",
    "shmq_copy_seconds_total",
}
KIB = 1024


class Meter:
    """Metrics in a registry of their own, and what they show of one queue."""

    def __init__(self, place: Place) -> None:
        self.registry = CollectorRegistry()
        self.metrics = QueueMetrics(self.registry)
        self._address = {"address": place.path.endpoint}
        self._queue = {"queue": place.queue, "namespace": place.namespace}

    def zmq(self, name: str, **labels: str) -> float | None:
        """A sample of FastDeploy's; None if there is none of that very name."""
        return self.registry.get_sample_value(f"fastdeploy:zmq:{name}", self._address | labels)

    def own(self, name: str, **labels: str) -> float | None:
        """A sample of the queue's own."""
        return self.registry.get_sample_value(f"shmq_{name}", self._queue | labels)

    @property
    def sent(self) -> tuple[float | None, ...]:
        return self.zmq("msg_send_total"), self.zmq("msg_send_failed_total"), self.zmq("msg_bytes_send_total")

    @property
    def received(self) -> tuple[float | None, ...]:
        return self.zmq("msg_recv_total"), self.zmq("msg_bytes_recv_total"), self.zmq("latency_count")


@pytest.fixture(name="meter")
def meter_fixture(place: Place) -> Meter:
    return Meter(place)


def take(consumer: Consumer) -> None:
    consumer.get(timeout=DEADLINE_S).release()


# -- names ------------------------------------------------------------------------------------------------------------


def test_the_six_of_fastdeploy_have_its_names_types_label_and_buckets(place: Place, meter: Meter) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    producer.put(b"x")
    take(consumer)
    families = {
        family.name: family for family in text_string_to_metric_families(generate_latest(meter.registry).decode())
    }
    samples = {sample.name: sample for family in families.values() for sample in family.samples}
    assert samples.keys() >= FASTDEPLOY
    for name in FASTDEPLOY:
        assert families[name.removesuffix("_total")].type == "counter"
        assert samples[name].labels == {"address": f"ipc://{place.path.socket}"}
    latency = families["fastdeploy:zmq:latency"]
    assert latency.type == "histogram"
    assert [sample.labels["le"] for sample in latency.samples if sample.name.endswith("_bucket")] == BUCKETS
    assert {name for sample in latency.samples for name in sample.labels} == {"address", "le"}
    created = {
        sample.name.removesuffix("_created") + "_total" for sample in samples.values() if "zmq:msg" in sample.name
    }
    assert {name for name in samples if name.startswith("fastdeploy:zmq:msg")} <= FASTDEPLOY | {
        name.removesuffix("_total") + "_created" for name in created
    }


def test_the_queues_own_have_its_name_and_namespace_as_labels(place: Place, meter: Meter) -> None:
    place.producer(metrics=meter.metrics)
    place.consumer(metrics=meter.metrics)
    families = {
        family.name: family for family in text_string_to_metric_families(generate_latest(meter.registry).decode())
    }
    ours = {name: family for name, family in families.items() if name.startswith("shmq_")}
    labels = {"queue": place.queue, "namespace": place.namespace}
    samples = [sample for family in ours.values() for sample in family.samples]
    assert all({name: sample.labels[name] for name in labels} == labels for sample in samples)
    names = {sample.name for sample in samples if not sample.name.endswith("_created")}
    wait = {f"shmq_put_wait_seconds_{part}" for part in ("bucket", "count", "sum")}
    assert names == COUNTERS | wait | {"shmq_ring_bytes", "shmq_ring_used_bytes"}
    assert [ours[name].type for name in ("shmq_ring_bytes", "shmq_put_wait_seconds")] == ["gauge", "histogram"]


def test_all_metrics_of_a_registry_are_one_and_names_of_others_are_refused(place: Place, meter: Meter) -> None:
    place.producer(metrics=meter.metrics).put(b"x")
    place.consumer(metrics=QueueMetrics(meter.registry)).get(timeout=DEADLINE_S).release()
    assert (meter.zmq("msg_send_total"), meter.zmq("msg_recv_total")) == (1, 1)
    taken = CollectorRegistry()
    Counter("fastdeploy:zmq:msg_send_total", "somebody else's", ["address"], registry=taken)
    with pytest.raises(ValueError, match="fastdeploy:zmq:msg_send"):
        QueueMetrics(taken)


# -- without metrics --------------------------------------------------------------------------------------------------


def test_without_metrics_nothing_of_them_is_in_the_way(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    producer.put(b"x")
    message = consumer.get(timeout=DEADLINE_S)
    assert producer._post == producer._writer.post
    assert type(consumer._protocol) is ConsumerProtocol
    assert type(message._source.reader) is RingReader
    message.release()


def test_importing_the_queue_imports_no_prometheus_client() -> None:
    code = "import sys, fmq, engine, api; print('prometheus_client' in sys.modules, 'fmq.meters' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


# -- what is counted --------------------------------------------------------------------------------------------------

PAYLOADS: dict[str, tuple[Callable[[Producer], Any], int]] = {
    "small bytes": (lambda producer: bytes(100), 100),
    "large bytes": (lambda producer: bytes(20_000), 20_000),
    "small array": (lambda producer: np.zeros(1000, np.uint8), 1000),
    "array": (lambda producer: np.zeros(20_000, np.uint8), 20_000),
    "loan": (lambda producer: producer.empty(10_000), 10_000),
    "spill": (lambda producer: np.zeros(200_000, np.uint8), 200_000),
}


@pytest.mark.parametrize("kind", PAYLOADS)
def test_bytes_are_those_in_shared_memory_too_and_the_same_on_both_sides(place: Place, meter: Meter, kind: str) -> None:
    make, nbytes = PAYLOADS[kind]
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    for count in (1, 2):
        producer.put(make(producer))
        take(consumer)
        sent, failed, bytes_sent = meter.sent
        received, bytes_received, timed = meter.received
        assert (sent, failed, received, timed) == (count, 0, count, count)
        assert bytes_sent == bytes_received
        assert bytes_sent is not None
        # Around an array there are some bytes that say what it is.
        assert count * nbytes <= bytes_sent < count * (nbytes + 100)


def test_a_tree_of_plain_values_counts_with_the_bytes_it_is_encoded_to(place: Place, meter: Meter) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    producer.put({"text": "x" * 500})
    take(consumer)
    assert meter.sent[2] == meter.received[1]
    assert 500 < (meter.sent[2] or 0) < 550


def test_asyncio_counts_the_same(place: Place, meter: Meter) -> None:
    async def work() -> None:
        producer: AsyncProducer = place.async_producer(metrics=meter.metrics)
        consumer: AsyncConsumer = place.async_consumer(metrics=meter.metrics)
        await producer.put(b"x" * 100)
        # Its copy leaves the event loop for a thread.
        await producer.put(np.zeros(1024 * KIB, np.uint8))
        with pytest.raises(EncodeError):
            await producer.put({1, 2})
        for _ in range(2):
            (await consumer.get(timeout=DEADLINE_S)).release()
        await producer.close()
        await consumer.close()

    run_to_end(work())
    assert meter.sent[:2] == (3, 1)
    assert meter.received[0] == 2
    assert meter.sent[2] == meter.received[1]
    assert meter.own("copied_bytes_total") == 1024 * KIB


def test_what_could_not_be_put_is_an_attempt_and_a_failure_and_no_bytes(place: Place, meter: Meter) -> None:
    producer = place.producer(metrics=meter.metrics, spill_limit=100_000)
    with pytest.raises(EncodeError):
        producer.put({"a": {1, 2}})
    with pytest.raises(TooLargeError):
        producer.put(np.zeros(200_000, np.uint8))
    with pytest.raises(TooLargeError):
        producer.put([np.zeros(index + 1, np.uint8) for index in range(3000)])
    assert meter.sent == (3, 3, 0)
    count = fill(producer, bytes(4000))
    with pytest.raises((QueueFullError, PeerUnavailableError)):
        producer.put({"a": np.zeros(20_000, np.uint8)}, timeout=0)
    assert meter.sent == (count + 5, 5, count * 4000)


def test_the_latency_is_in_milliseconds_and_each_message_that_is_waited_for_is_timed(
    place: Place, meter: Meter
) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    for pause in (0.0, 0.02, 0.0):
        producer.put(b"x")
        time.sleep(pause)
        take(consumer)
        with pytest.raises(QueueEmptyError):
            consumer.get(timeout=0)
    assert 20 <= (meter.zmq("latency_sum") or 0) < 1000 * DEADLINE_S
    assert meter.zmq("latency_count") == 3
    assert (meter.zmq("latency_bucket", le="10.0") or 0) <= 2


@pytest.mark.parametrize("nbytes", [500, 4000])
def test_a_message_that_waited_for_room_bears_the_time_before(place: Place, nbytes: int) -> None:
    producer, consumer = place.producer(), place.consumer()
    count = fill(producer, bytes(nbytes))
    waiting = threading.Thread(target=producer.put, args=(bytes(nbytes),), kwargs={"timeout": DEADLINE_S})
    waiting.start()
    eventually(lambda: producer._protocol._waiting, "the put waits")
    let_go = time.time_ns()
    for _ in range(count):
        take(consumer)
    waiting.join()
    message = consumer.get(timeout=DEADLINE_S)
    assert message.timestamp_ns < let_go
    message.release()


def test_puts_that_waited_are_counted_with_how_long_and_failures_among_them(place: Place, meter: Meter) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    producer.put(b"x")
    take(consumer)
    producer.flush(timeout=DEADLINE_S)
    producer.put(b"x")
    with pytest.raises(QueueTimeoutError):
        producer.flush(timeout=0.01)
    take(consumer)
    assert meter.own("put_wait_seconds_count") == 0
    count = fill(producer)
    failed = meter.own("put_wait_seconds_count")
    assert failed == 1
    with pytest.raises(QueueFullError):
        producer.put(bytes(4000), timeout=0.03)
    with pytest.raises(QueueFullError):
        producer.empty(20_000, timeout=0.03)
    assert meter.own("put_wait_seconds_count") == 3
    assert 0.06 <= (meter.own("put_wait_seconds_sum") or 0) < DEADLINE_S
    assert (meter.own("put_wait_seconds_bucket", le="0.01") or 0) <= 1
    for _ in range(count):
        take(consumer)


def test_spills_copies_and_the_ring_itself(place: Place, meter: Meter) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    assert (meter.own("ring_bytes"), meter.own("ring_used_bytes")) == (64 * KIB, 0)
    loan = producer.empty(10_000)
    assert 10_000 <= (meter.own("ring_used_bytes") or 0) < 12_000
    producer.put({"loan": loan, "a": np.zeros(9000, np.uint8), "big": np.zeros(200_000, np.uint8)})
    assert (meter.own("spills_total"), meter.own("spilled_bytes_total")) == (1, 200_000)
    assert meter.own("copied_bytes_total") == 209_000
    assert 0 < (meter.own("copy_seconds_total") or 0) < DEADLINE_S
    del loan
    take(consumer)
    eventually(lambda: is_empty(producer), "the ring is empty")
    assert meter.own("ring_used_bytes") == 0


def test_the_rings_of_a_queue_add_up_and_those_that_are_closed_are_gone(place: Place, meter: Meter) -> None:
    producers = [place.producer(metrics=meter.metrics) for _ in range(3)]
    assert meter.own("ring_bytes") == 3 * 64 * KIB
    producers[0].close(timeout=0)
    assert meter.own("ring_bytes") == 2 * 64 * KIB
    producers[1].close(timeout=0)
    producers[2].close(timeout=0)
    assert meter.own("ring_bytes") is None
    assert meter.own("spills_total") == 0


def test_doorbells_are_sent_to_who_sleeps_and_saved_otherwise(place: Place, meter: Meter) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer()
    producer.put_many([b"x"] * 10)
    assert (meter.own("doorbells_sent_total"), meter.own("doorbells_saved_total")) == (0, 10)
    for _ in range(10):
        take(consumer)
    sleeping = threading.Thread(target=take, args=(consumer,))
    sleeping.start()
    eventually(producer._writer.asleep, "the consumer sleeps")
    producer.put(b"x")
    sleeping.join()
    assert (meter.own("doorbells_sent_total"), meter.own("doorbells_saved_total")) == (1, 10)


def test_redelivered_expired_and_set_aside_are_those_that_this_consumer_met(place: Place, meter: Meter) -> None:
    producer = place.producer(metrics=meter.metrics)
    producer.put(b"old")
    first = place.consumer()
    kept = first.get(timeout=DEADLINE_S)
    first.close()
    del kept
    second = place.consumer(metrics=meter.metrics, max_deliveries=1)
    assert meter.own("redeliveries_total") == 0
    take(second)
    assert meter.own("redeliveries_total") == 1
    producer.put(b"late", ttl=1e-9)
    producer.put(b"poison")
    with contextlib.suppress(ValueError), second:
        message = second.get(timeout=DEADLINE_S)
        raise ValueError
    del message
    assert meter.own("expired_total") == 1
    assert meter.received[0] == 2
    third = place.consumer(metrics=meter.metrics, max_deliveries=1)
    producer.put(b"good")
    take(third)
    assert meter.received[0] == 3
    values = [meter.own(f"{name}_total") for name in ("redeliveries", "expired", "set_aside")]
    assert values == [1, 1, 1]
    for aside in third.set_aside():
        aside.discard()


def test_what_can_not_be_decoded_was_received(place: Place, meter: Meter) -> None:
    producer, consumer = place.producer(), place.consumer(type=int, metrics=meter.metrics)
    producer.put("text")
    with pytest.raises(DecodeError):
        consumer.get(timeout=DEADLINE_S)
    assert meter.received[0] == 1


# -- once -------------------------------------------------------------------------------------------------------------


def test_nothing_is_counted_twice(place: Place, meter: Meter) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    producer.put({"a": np.zeros(9000, np.uint8)})
    message = consumer.get(timeout=DEADLINE_S)
    meter.metrics.flush()
    # Decodes once more, to copy.
    message.detach()
    first = meter.sent, meter.received
    meter.metrics.flush()
    assert (meter.sent, meter.received) == first
    assert meter.sent[2] == meter.received[1]
    assert meter.received[0] == 1


@pytest.mark.parametrize("payload", [b"x" * 100, {"n": 1}, {"a": np.zeros(9000, np.uint8)}], ids=repr)
def test_a_message_that_is_put_back_as_batches_do_is_counted_when_it_comes(
    place: Place, meter: Meter, payload: Any
) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    producer.put(payload)
    with consumer._lock:
        message = consumer._protocol.take()
        assert message is not None
        consumer._protocol.put_back(message)
        del message
    assert meter.received == (0, 0, 0)
    take(consumer)
    assert meter.received == (1, meter.sent[2], 1)


def test_what_was_closed_or_dropped_stays_in_the_sums(place: Place, meter: Meter) -> None:
    for count in (1, 2):
        producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
        producer.put(bytes(100))
        take(consumer)
        producer.close()
        consumer.close()
        assert (meter.sent, meter.received) == ((count, 0, 100 * count), (count, 100 * count, count))
    place._made.clear()
    dropped: list[Any] = [make(place.queue, metrics=meter.metrics, **place.where) for make in (Producer, Consumer)]
    dropped[0].put(bytes(50))
    take(dropped[1])
    with pytest.warns(ResourceWarning, match="unclosed"):
        drop(dropped)
    assert (meter.sent, meter.received) == ((3, 0, 250), (3, 250, 3))
    meter.metrics.flush()
    assert meter.metrics._exporter._attached == []


def drop(things: list[Any]) -> None:
    things.clear()
    gc.collect()


def test_what_is_gone_without_a_word_is_read_once_more_and_then_forgotten(
    place: Place, meter: Meter, make_ring: Callable[..., Ring]
) -> None:
    class Owner:
        closed = False

    owner = Owner()
    writer, _ = make_ring()
    counter = meter.metrics.producer_meter(owner, place.path, writer, threading.Lock())  # type: ignore[arg-type]
    counter.post(b"x", 0, 0, 0)
    meter.metrics.flush()
    del owner
    for count in (2, 3):
        # Another thread may be at its finalizer meanwhile, which counts what is done to the end.
        counter.post(b"x", 0, 0, 0)
        assert meter.zmq("msg_send_total") == count
    meter.metrics.flush()
    assert meter.metrics._exporter._attached == []
    assert meter.sent[0] == 3
    assert meter.own("ring_bytes") is None


def test_threads_put_get_and_scrape_at_the_same_time_and_nothing_is_missed(place: Place, meter: Meter) -> None:
    producer = place.producer(metrics=meter.metrics, ring_size=1024 * KIB)
    consumer = place.consumer(metrics=meter.metrics)
    count, threads = 400, 3
    done = threading.Event()

    def put() -> None:
        for index in range(count):
            with contextlib.suppress(EncodeError):
                producer.put({1} if index % 10 == 0 else bytes(index), timeout=DEADLINE_S)

    def scrape() -> None:
        while not done.is_set():
            generate_latest(meter.registry)

    workers = [threading.Thread(target=put) for _ in range(threads)] + [threading.Thread(target=scrape)]
    for worker in workers:
        worker.start()
    for _ in range(threads * count * 9 // 10):
        take(consumer)
    done.set()
    for worker in workers:
        worker.join()
    nbytes = threads * sum(index for index in range(count) if index % 10)
    assert meter.sent == (threads * count, threads * count // 10, nbytes)
    assert meter.received == (threads * count * 9 // 10, nbytes, threads * count * 9 // 10)


def test_a_fork_while_others_scrape_leaves_a_child_that_can_scrape(place: Place, meter: Meter) -> None:
    producer, consumer = place.producer(metrics=meter.metrics), place.consumer(metrics=meter.metrics)
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set():
            # Not the registry's, which has a lock of its own.
            meter.metrics._exporter.collect()

    scraping = threading.Thread(target=scrape)
    scraping.start()
    try:
        for _ in range(20):
            producer.put(b"x")
            take(consumer)
            pid = os.fork()
            if pid == 0:
                meter.metrics._exporter.collect()
                os._exit(0)
            try:
                eventually(lambda child=pid: has_ended(child), "the child ended")  # type: ignore[misc]
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                assert os.waitpid(pid, 0)[1] == 0
    finally:
        done.set()
        scraping.join()
    assert meter.sent[0] == meter.received[0] == 20


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it is still to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# -- FastDeploy's sink ------------------------------------------------------------------------------------------------


def test_recorded_stats_are_added_and_a_latency_of_nothing_is_none(meter: Meter) -> None:
    stats = ZMQMetricsStats(
        msg_send_total=2,
        msg_send_failed_total=1,
        msg_bytes_send_total=10,
        msg_recv_total=3,
        msg_bytes_recv_total=30,
        zmq_latency=0.004,
    )
    meter.metrics.record_zmq_stats(stats, address="ipc:///dev/shm/1.socket")
    meter.metrics.record_zmq_stats(ZMQMetricsStats(msg_recv_total=1), address="ipc:///dev/shm/1.socket")
    meter.metrics.record_zmq_stats(stats)

    def value(name: str, **labels: str) -> float | None:
        return meter.registry.get_sample_value(
            f"fastdeploy:zmq:{name}", {"address": "ipc:///dev/shm/1.socket"} | labels
        )

    assert [value(name) for name in ("msg_send_total", "msg_send_failed_total", "msg_bytes_send_total")] == [2, 1, 10]
    assert [value(name) for name in ("msg_recv_total", "msg_bytes_recv_total")] == [4, 30]
    assert (value("latency_count"), value("latency_sum")) == (1, 4.0)
    assert (value("latency_bucket", le="2.0"), value("latency_bucket", le="5.0")) == (0, 1)
    assert value("msg_send_total", address="unknown") == 2


def test_a_value_on_the_bound_of_a_bucket_is_in_it() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.1):
        tally.add(value)
    tally.add(10.0, 3)
    assert tally.reading() == ([2, 2, 4], pytest.approx(37.1))


# -- topics -----------------------------------------------------------------------------------------------------------


def test_a_topic_is_counted_on_both_sides_apart_from_the_queue_of_its_name(place: Place, meter: Meter) -> None:
    place.producer(metrics=meter.metrics).put(b"of the queue")
    publisher = place.publisher(metrics=meter.metrics, policy="skip", patience=0)
    quick, slow = place.subscriber(metrics=meter.metrics), place.subscriber()
    array = np.zeros(5000, np.uint8)
    for _ in range(50):
        publisher.put(array)
        take(quick)
    publisher.put(b"late", ttl=1e-9)
    with contextlib.suppress(QueueEmptyError):
        quick.get(timeout=0)
    path = TopicPath(place.queue, **place.where)
    topic = {"address": path.endpoint}
    own = {"queue": f"@{place.queue}", "namespace": place.namespace}
    value = meter.registry.get_sample_value
    assert value("fastdeploy:zmq:msg_send_total", topic) == 51
    assert value("fastdeploy:zmq:msg_recv_total", topic) == 50
    assert (value("fastdeploy:zmq:msg_bytes_recv_total", topic) or 0) > 50 * array.nbytes
    assert value("fastdeploy:zmq:latency_count", topic) == 50
    assert value("shmq_expired_total", own) == 1
    assert (value("shmq_skipped_total", own) or 0) > 10
    assert meter.sent[0] == 1
    slow.close()
