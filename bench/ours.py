"""The queue itself, as a sender and a receiver with the interface ``measure.Side``, and probes of what it promises.

Apart from ``bench.peers``, so that no peer pays for importing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from bench.loads import MakeLoad, WrongContentError, check_stamp, stamp
from bench.measure import PATIENCE, Place
from fmq import (
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    Producer,
    Publisher,
    QueueEmptyError,
    RemoteConsumer,
    RemoteProducer,
    Subscriber,
)

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics


def _metrics() -> QueueMetrics:
    # Not above: the others run without, and pay nothing for it.
    from fmq.metrics import QueueMetrics

    return QueueMetrics()


# -- fmq --------------------------------------------------------------------------------------------------------------


class FmqSender:
    """``Producer.put``, with metrics if so wished."""

    def __init__(self, place: Place, load: MakeLoad, ring_size: int, metrics: bool = False) -> None:
        self._load = load()
        self._producer = Producer(
            "b",
            namespace=place.namespace,
            runtime_dir=place.directory,
            ring_size=ring_size,
            metrics=_metrics() if metrics else None,
        )

    def run(self, first: int, count: int) -> list[float]:
        """Put the messages."""
        make, put = self._load.make, self._producer.put
        for number in range(first, first + count):
            put(make(number))
        return []

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()


class FmqReceiver:
    """``Consumer.get``, a look at the view, ``release``, with metrics if so wished."""

    def __init__(self, place: Place, load: MakeLoad, metrics: bool = False) -> None:
        self._load = load()
        self._consumer = Consumer(
            "b", namespace=place.namespace, runtime_dir=place.directory, metrics=_metrics() if metrics else None
        )

    def run(self, first: int, count: int) -> list[float]:
        """Get the messages and check them where they lie."""
        check, get = self._load.check, self._consumer.get
        for number in range(first, first + count):
            message = get(timeout=PATIENCE)
            check(number, message.payload)
            message.release()
        return []

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


class FmqLoop:
    """Both sides in one thread, BATCH messages put and then got: what they cost, with no other core to wait for."""

    BATCH = 32

    def __init__(self, place: Place, load: MakeLoad, ring_size: int, metrics: bool = False) -> None:
        self._receiver = FmqReceiver(place, load, metrics)
        self._sender = FmqSender(place, load, ring_size, metrics)

    def run(self, first: int, count: int) -> list[float]:
        """Put the messages and get them."""
        for number in range(first, first + count, self.BATCH):
            batch = min(self.BATCH, first + count - number)
            self._sender.run(number, batch)
            self._receiver.run(number, batch)
        return []

    def close(self) -> None:
        """Close both."""
        self._sender.close()
        self._receiver.close()


class RemoteSender:
    """``RemoteProducer.put``, without a copy; ``ahead`` messages may be under way."""

    def __init__(self, load: MakeLoad, port: int, ahead: int) -> None:
        self._load = load()
        self._producer = RemoteProducer(f"tcp://127.0.0.1:{port}", window_messages=ahead, window_bytes=1 << 40)

    def run(self, first: int, count: int) -> list[float]:
        """Put the messages."""
        make, put = self._load.make, self._producer.put
        for number in range(first, first + count):
            put(make(number))
        return []

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()


class RemoteReceiver:
    """``RemoteConsumer.get``, a look at the view, ``release``."""

    def __init__(self, load: MakeLoad, port: int) -> None:
        self._load = load()
        self._consumer = RemoteConsumer(f"tcp://127.0.0.1:{port}")

    def run(self, first: int, count: int) -> list[float]:
        """Get the messages and check them where they lie."""
        check, get = self._load.check, self._consumer.get
        for number in range(first, first + count):
            message = get(timeout=PATIENCE)
            check(number, message.payload)
            message.release()
        return []

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


class AsyncFmqSender:
    """``AsyncProducer.put``."""

    def __init__(self, place: Place, load: MakeLoad, ring_size: int) -> None:
        self._load = load()
        self._loop = asyncio.new_event_loop()
        self._producer = AsyncProducer("b", namespace=place.namespace, runtime_dir=place.directory, ring_size=ring_size)

    def run(self, first: int, count: int) -> list[float]:
        """Put the messages."""
        self._loop.run_until_complete(self._run(first, count))
        return []

    async def _run(self, first: int, count: int) -> None:
        make, put = self._load.make, self._producer.put
        for number in range(first, first + count):
            await put(make(number))

    def close(self) -> None:
        """Close the producer and its event loop."""
        self._loop.run_until_complete(self._producer.close())
        self._loop.close()


class AsyncFmqReceiver:
    """``AsyncConsumer.get``, a look at the view, ``release``."""

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._loop = asyncio.new_event_loop()
        self._consumer = AsyncConsumer("b", namespace=place.namespace, runtime_dir=place.directory)

    def run(self, first: int, count: int) -> list[float]:
        """Get the messages and check them where they lie."""
        self._loop.run_until_complete(self._run(first, count))
        return []

    async def _run(self, first: int, count: int) -> None:
        check, get = self._load.check, self._consumer.get
        for number in range(first, first + count):
            message = await get(timeout=PATIENCE)
            check(number, message.payload)
            message.release()

    def close(self) -> None:
        """Close the consumer and its event loop."""
        self._loop.run_until_complete(self._consumer.close())
        self._loop.close()


class TopicSender:
    """``Publisher.put``, once so many readers are there."""

    def __init__(self, place: Place, load: MakeLoad, ring_size: int, readers: int) -> None:
        self._load = load()
        self._readers = readers
        self._publisher = Publisher("b", namespace=place.namespace, runtime_dir=place.directory, ring_size=ring_size)

    def run(self, first: int, count: int) -> list[float]:
        """Put the messages."""
        self._publisher.wait_for_readers(self._readers, timeout=PATIENCE)
        for number in range(first, first + count):
            self._publisher.put(self._load.make(number))
        return []

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()


class TopicReceiver(FmqReceiver):
    """``Subscriber.get``, a look at the view, ``release``."""

    def __init__(self, place: Place, load: MakeLoad) -> None:
        self._load = load()
        self._consumer = Subscriber("b", namespace=place.namespace, runtime_dir=place.directory)


class EachSender:
    """A queue for each reader: as many ``Producer.put``, and as many copies."""

    def __init__(self, place: Place, load: MakeLoad, ring_size: int, readers: int) -> None:
        self._load = load()
        self._producers = [
            Producer(f"b{number}", namespace=place.namespace, runtime_dir=place.directory, ring_size=ring_size)
            for number in range(readers)
        ]

    def run(self, first: int, count: int) -> list[float]:
        """Put each message into every queue."""
        for number in range(first, first + count):
            message = self._load.make(number)
            for producer in self._producers:
                producer.put(message)
        return []

    def close(self) -> None:
        """Close the producers."""
        for producer in self._producers:
            producer.close()


class EachReceiver(FmqReceiver):
    """The consumer of one of those queues."""

    def __init__(self, place: Place, load: MakeLoad, number: int) -> None:
        self._load = load()
        self._consumer = Consumer(f"b{number}", namespace=place.namespace, runtime_dir=place.directory)


# -- probes of fmq: loans, idleness, a full ring ----------------------------------------------------------------------


class LoanSender:
    """Ping: ``empty``, a stamp at both ends, ``put``. Waits for the answer, a message of another queue."""

    def __init__(self, place: Place, nbytes: int, ring_size: int) -> None:
        self._nbytes = nbytes
        self._producer = Producer("b", namespace=place.namespace, runtime_dir=place.directory, ring_size=ring_size)
        self._answers = Consumer("a", namespace=place.namespace, runtime_dir=place.directory)

    def run(self, first: int, count: int) -> list[float]:
        """Lend, put, wait."""
        for number in range(first, first + count):
            loan = self._producer.empty(self._nbytes)
            stamp(loan, number)
            self._producer.put({"x": loan, "at": time.perf_counter()})
            del loan
            self._answers.get(timeout=PATIENCE).release()
        return []

    def close(self) -> None:
        """Close both queues."""
        self._producer.close()
        self._answers.close()


class LoanReceiver:
    """Pong: ``get``, and a look at the clock as soon as the view is there; then the stamps, ``release``, the answer."""

    def __init__(self, place: Place) -> None:
        self._consumer = Consumer("b", namespace=place.namespace, runtime_dir=place.directory)
        self._answers = Producer("a", namespace=place.namespace, runtime_dir=place.directory, ring_size=1 << 20)

    def run(self, first: int, count: int) -> list[float]:
        """Get, check, answer; returns the seconds from each put to its view."""
        samples = []
        for number in range(first, first + count):
            message = self._consumer.get(timeout=PATIENCE)
            payload = message.payload
            samples.append(time.perf_counter() - payload["at"])
            check_stamp(payload["x"], number)
            del payload
            message.release()
            self._answers.put(b"")
        return samples

    def close(self) -> None:
        """Close both queues."""
        self._answers.close()
        self._consumer.close()


class IdleSender(FmqSender):
    """Puts the messages of the first order, and after that does nothing."""

    def __init__(self, place: Place, load: MakeLoad, ring_size: int, seconds: float) -> None:
        super().__init__(place, load, ring_size)
        self._seconds = seconds

    def run(self, first: int, count: int) -> list[float]:
        """Put, or do nothing for the time given."""
        if first == 0:
            return super().run(first, count)
        time.sleep(self._seconds)
        return []


class IdleReceiver(FmqReceiver):
    """Gets the messages of the first order, and after that waits in ``get`` for one that does not come."""

    def __init__(self, place: Place, load: MakeLoad, seconds: float) -> None:
        super().__init__(place, load)
        self._seconds = seconds

    def run(self, first: int, count: int) -> list[float]:
        """Get, or wait in vain for the time given."""
        if first == 0:
            return super().run(first, count)
        with contextlib.suppress(QueueEmptyError):
            self._consumer.get(timeout=self._seconds)
            raise WrongContentError("there was a message in an idle queue")
        return []


class AsyncIdleReceiver(AsyncFmqReceiver):
    """The same, awaiting."""

    def __init__(self, place: Place, load: MakeLoad, seconds: float) -> None:
        super().__init__(place, load)
        self._seconds = seconds

    def run(self, first: int, count: int) -> list[float]:
        """Get, or wait in vain for the time given."""
        if first == 0:
            return super().run(first, count)
        with contextlib.suppress(QueueEmptyError):
            self._loop.run_until_complete(self._consumer.get(timeout=self._seconds))
            raise WrongContentError("there was a message in an idle queue")
        return []
