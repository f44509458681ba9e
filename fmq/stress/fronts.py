"""Producers and consumers with one face, blocking or asyncio: what is awaited from a blocking one never suspends.

A publisher is a producer here, and a subscriber a consumer.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from fmq import Consumer, Message, Producer, Publisher, SetAside

T = TypeVar("T")


class ProducerFront(Protocol):
    """What of AsyncProducer a worker uses."""

    @property
    def ring(self) -> str: ...
    async def put(self, obj: Any, *, timeout: float | None, ttl: float | None) -> int: ...
    async def empty(self, shape: int, *, timeout: float | None) -> NDArray[Any]: ...
    async def close(self, *, timeout: float | None) -> None: ...


class PublisherFront(ProducerFront, Protocol):
    """What of AsyncPublisher a worker uses."""

    async def wait_for_readers(self, count: int, *, timeout: float | None) -> None: ...


class ConsumerFront(Protocol):
    """What of AsyncConsumer a worker uses."""

    async def get(self, *, timeout: float | None) -> Message: ...
    async def close(self) -> None: ...
    def set_aside(self) -> list[SetAside]: ...


class BlockingProducer:
    """A Producer that can be awaited, and never suspends."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    @property
    def ring(self) -> str:
        return self._producer.ring

    async def put(self, obj: Any, *, timeout: float | None, ttl: float | None) -> int:
        return self._producer.put(obj, timeout=timeout, ttl=ttl)

    async def empty(self, shape: int, *, timeout: float | None) -> NDArray[Any]:
        return self._producer.empty(shape, timeout=timeout)

    async def close(self, *, timeout: float | None) -> None:
        self._producer.close(timeout=timeout)


class BlockingPublisher(BlockingProducer):
    """A Publisher that can be awaited, and never suspends."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher)
        self._publisher = publisher

    async def wait_for_readers(self, count: int, *, timeout: float | None) -> None:
        self._publisher.wait_for_readers(count, timeout=timeout)


class BlockingConsumer:
    """A Consumer that can be awaited, and never suspends."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    async def get(self, *, timeout: float | None) -> Message:
        return self._consumer.get(timeout=timeout)

    async def close(self) -> None:
        self._consumer.close()

    def set_aside(self) -> list[SetAside]:
        return self._consumer.set_aside()


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a blocking front suspended")
