"""What queues and topics have in common: settings, a core that is made when it is needed, an orderly end."""

from __future__ import annotations

import asyncio
import numbers
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from fmq.config import Config, Endpoint, EndpointManager
from fmq.consumer import ConsumerBase
from fmq.errors import ClosedError, ConfigError
from fmq.fastdeploy.remote import remote_consumer, remote_producer
from fmq.producer import ProducerBase
from fmq.topics import PublisherBase, SubscriberBase
from shmq.segment import abandon_in_child

if TYPE_CHECKING:
    from fmq.metrics import QueueMetrics


class Core(Protocol):
    """A producer or a consumer."""

    @property
    def closed(self) -> bool:
        """Whether it can't be used any more."""

    def give_up(self) -> None:
        """Close without waiting; what is not done is left to the next consumer."""


P = TypeVar("P", bound=ProducerBase)
C = TypeVar("C", bound=ConsumerBase)
Pub = TypeVar("Pub", bound=PublisherBase)
Sub = TypeVar("Sub", bound=SubscriberBase)
K = TypeVar("K", bound=Core)
T = TypeVar("T")


class Context:
    """What the queues and topics of one FMQ share: the settings, and their end."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = EndpointManager.current() if config is None else config
        self._components: weakref.WeakSet[Component] = weakref.WeakSet()

    def add(self, component: Component) -> None:
        """Let a component end with this context."""
        self._components.add(component)

    def components(self) -> list[Component]:
        """What was made with this context and is still there."""
        return list(self._components)


class Lazy(Generic[K]):
    """Makes a producer or consumer when it is first needed, and another one in a forked child. Any thread may use it.

    ``what`` names it in errors.
    """

    def __init__(self, what: str, make: Callable[[], K]) -> None:
        self._what = what
        self._make = make
        self._lock = threading.Lock()
        self._core: K | None = None
        self._closed = False
        abandon_in_child(self)

    @property
    def core(self) -> K | None:
        """It, if it was made and is not closed."""
        core = self._core
        return None if core is None or core.closed else core

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or is not to be made any more."""
        core = self._core
        return self._closed if core is None else core.closed

    def open(self) -> K:
        """It; made now, if it was not. Raises ClosedError, and what making it raises."""
        core = self._core
        if core is None:
            with self._lock:
                if self._closed:
                    raise ClosedError(f"{self._what} was closed; make another one")
                core = self._core
                if core is None:
                    core = self._core = self._make()
        return core

    async def opened(self) -> K:
        """As ``open``; a ring is made in a thread, for that takes as long as zeroing its memory does."""
        core = self._core
        return await asyncio.to_thread(self.open) if core is None else core

    def shut(self) -> K | None:
        """Refuse to make it from now on. Returns it if there is one to be closed."""
        with self._lock:
            self._closed = self._core is None
        return self.core

    def abandon(self) -> None:
        """In a forked child: leave the parent's to the parent."""
        self._lock = threading.Lock()
        self._core = None


class Socket:
    """What stands where upstream has a ZeroMQ socket: it can be closed, by any thread."""

    __slots__ = ("_core",)

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._core.closed

    def close(self, linger: int | None = None) -> None:
        """Close without waiting, whatever ``linger`` says: what is not done is left to the next consumer. Idempotent.

        Raises ViewsHeldError, and stays open, while arrays of a consumer's messages are alive.
        """
        self._core.give_up()


class Component:
    """Something with a name in a context. ``context`` may also be None, or one of ZeroMQ, which is only kept."""

    def __init__(self, context: Any, name: str) -> None:
        self.context = context
        self.name = name
        self.config = context.config if isinstance(context, Context) else EndpointManager.current()
        self.endpoint: Endpoint = self.config.endpoint(name)
        if isinstance(context, Context):
            context.add(self)

    def close(self) -> Any:
        """Close in order; to be awaited, if the component is for asyncio. Idempotent."""
        raise NotImplementedError


def make_producer(kind: type[P], config: Config, name: str) -> P:
    """The producer of an endpoint."""
    endpoint = config.endpoint(name)
    if endpoint.protocol == "tcp":
        return cast(P, remote_producer(kind, config, name))
    queue, runtime_dir = config.place(name)
    return kind(
        queue,
        namespace=config.namespace,
        ring_size=_set(endpoint.ring_size),
        spill_limit=_set(endpoint.spill_limit),
        codec=_set(endpoint.codec),
        runtime_dir=runtime_dir,
        metrics=_metrics(config),
    )


def make_consumer(kind: type[C], config: Config, name: str) -> C:
    """The consumer of an endpoint."""
    if config.endpoint(name).protocol == "tcp":
        return cast(C, remote_consumer(kind, config, name))
    queue, runtime_dir = config.place(name)
    return kind(
        queue,
        namespace=config.namespace,
        accept=_accepted(config, name),
        runtime_dir=runtime_dir,
        metrics=_metrics(config),
    )


def make_publisher(kind: type[Pub], config: Config, name: str) -> Pub:
    """The publisher of an endpoint."""
    endpoint = config.endpoint(name)
    topic, runtime_dir = _topic_place(config, name)
    return kind(
        topic,
        namespace=config.namespace,
        ring_size=_set(endpoint.ring_size),
        spill_limit=_set(endpoint.spill_limit),
        codec=_set(endpoint.codec),
        policy=_set(endpoint.policy),
        patience=_set(endpoint.patience),
        runtime_dir=runtime_dir,
        metrics=_metrics(config),
    )


def make_subscriber(kind: type[Sub], config: Config, name: str) -> Sub:
    """A subscriber of an endpoint."""
    topic, runtime_dir = _topic_place(config, name)
    return kind(
        topic,
        namespace=config.namespace,
        accept=_accepted(config, name),
        runtime_dir=runtime_dir,
        metrics=_metrics(config),
    )


def _topic_place(config: Config, name: str) -> tuple[str, str]:
    if config.endpoint(name).protocol == "tcp":
        raise ConfigError(f"topic {name}: a topic lies in shared memory, and can't have an endpoint of protocol tcp")
    return config.place(name)


def _accepted(config: Config, name: str) -> tuple[str, ...]:
    return ("msgpack", "pickle") if config.endpoint(name).codec == "pickle" else ("msgpack",)


def _metrics(config: Config) -> QueueMetrics | None:
    if not config.metrics:
        return None
    try:
        from fmq.metrics import QueueMetrics
    except ImportError as error:
        raise ConfigError(
            f"the setting metrics needs prometheus-client (pip install 'shmq[metrics]'): {error}"
        ) from error
    return QueueMetrics()


def _set(value: T | None) -> T:
    assert value is not None
    return value


def seconds_of(timeout: float | None) -> float | None:
    """A timeout of so many milliseconds, in seconds. Raises ValueError or TypeError for what is none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"a timeout is a number of milliseconds, or None for no limit; this one is {timeout!r}")
    if not timeout >= 0:
        raise ValueError(
            f"a timeout is a number of milliseconds from 0 on, or None for no limit; this one is {timeout!r}"
        )
    return timeout / 1000
