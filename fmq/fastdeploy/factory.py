"""FMQ, from which queues and topics are made, and FMQFactory, which knows the names of FastDeploy's four queues."""

from __future__ import annotations

import os
from typing import ClassVar, Generic, TypeVar

from fmq.config import EndpointManager, Role
from fmq.errors import ConfigError
from fmq.fastdeploy.component import Context
from fmq.fastdeploy.queue import Queue
from fmq.fastdeploy.topic import Topic
from shmq import ShmqError
from shmq.segment import abandon_in_child, no_fork

Q = TypeVar("Q")


class FMQ:
    """Makes queues and topics. There is one in a process, and a forked child has its own.

    The settings are read when the first one is made: from the JSON file ``config_path`` if it is given, else from
    ``$FMQ_CONFIG_JSON``. Raises ConfigError for settings that are wrong, or if there is one with another file already.
    """

    _instance: ClassVar[FMQ | None] = None
    context: Context
    _config_path: str | None

    def __new__(cls, config_path: str | os.PathLike[str] | None = None) -> FMQ:
        """The one of this process; made now, if there is none."""
        path = None if config_path is None else os.path.abspath(config_path)
        with no_fork:
            if FMQ._instance is None:
                made = super().__new__(cls)
                made.context = Context(EndpointManager.load_config(path))
                made._config_path = path
                abandon_in_child(made)
                FMQ._instance = made
            elif path not in (None, FMQ._instance._config_path):
                raise ConfigError(
                    f"the FMQ of this process has its settings from {FMQ._instance._config_path or 'the environment'}, "
                    f"not from {path}; destroy() it first"
                )
            return FMQ._instance

    def queue(self, name: str, role: Role | str = Role.PRODUCER) -> Queue:
        """A new object for one side of a queue."""
        return Queue(self.context, name, role)

    def topic(self, name: str) -> Topic:
        """A new object for a topic."""
        return Topic(self.context, name)

    async def destroy(self) -> None:
        """Close all queues and topics that were made here; the next FMQ reads the settings anew.

        Raises the first error that closing them raised, when the others are closed.
        """
        errors = []
        for component in self.context.components():
            try:
                await component.close()
            except ShmqError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self.abandon()

    def abandon(self) -> None:
        """Be the one of this process no longer. A forked child calls it."""
        if FMQ._instance is self:
            FMQ._instance = None


class Links(Generic[Q]):
    """The queues between API server, engine and workers: a for API, e for engine, w for worker."""

    @classmethod
    def make(cls, name: str, role: Role) -> Q:
        """One side of a queue."""
        raise NotImplementedError

    @classmethod
    def q_a2e_producer(cls) -> Q:
        """What the API server puts requests into."""
        return cls.make("q_a2e", Role.PRODUCER)

    @classmethod
    def q_a2e_consumer(cls) -> Q:
        """Where the engine gets requests."""
        return cls.make("q_a2e", Role.CONSUMER)

    @classmethod
    def q_e2w_producer(cls) -> Q:
        """What the engine puts tasks into."""
        return cls.make("q_e2w", Role.PRODUCER)

    @classmethod
    def q_e2w_consumer(cls) -> Q:
        """Where a worker gets tasks."""
        return cls.make("q_e2w", Role.CONSUMER)

    @classmethod
    def q_w2e_producer(cls, name: str | None = None) -> Q:
        """What a worker puts results into; with a name, the queue ``q_w2e_<name>``."""
        return cls.make(_w2e(name), Role.PRODUCER)

    @classmethod
    def q_w2e_consumer(cls, name: str | None = None) -> Q:
        """Where the engine gets results; with a name, the queue ``q_w2e_<name>``."""
        return cls.make(_w2e(name), Role.CONSUMER)

    @classmethod
    def q_e2a_producer(cls) -> Q:
        """What the engine puts answers into."""
        return cls.make("q_e2a", Role.PRODUCER)

    @classmethod
    def q_e2a_consumer(cls) -> Q:
        """Where the API server gets answers."""
        return cls.make("q_e2a", Role.CONSUMER)


def _w2e(name: str | None) -> str:
    return "q_w2e" if name is None else f"q_w2e_{name}"


class FMQFactory(Links[Queue]):
    """FastDeploy's queues, of this process's FMQ, which is made when the first of them is."""

    @classmethod
    def make(cls, name: str, role: Role) -> Queue:
        """One side of a queue."""
        return FMQ().queue(name, role)

    @classmethod
    async def destroy(cls) -> None:
        """As FMQ.destroy."""
        if FMQ._instance is not None:
            await FMQ._instance.destroy()
