"""Where a run has its queues, and how all of it is removed."""

from __future__ import annotations

import os
import shutil

import msgspec

from fmq.paths import QueuePath, TopicPath
from shmq.segment import names, unlink


class Place(msgspec.Struct, frozen=True):
    """Where the queues of a run are, or its topic."""

    namespace: str
    directory: str
    is_topic: bool

    @property
    def runtime(self) -> str:
        """The runtime directory of the queues."""
        return os.path.join(self.directory, "run")

    @property
    def kind(self) -> str:
        """What the name of ``queue`` is the name of."""
        return "topic" if self.is_topic else "queue"

    def queue(self, consumer: int) -> str:
        """The name of the queue of a consumer, or of the topic."""
        return "t0" if self.is_topic else f"q{consumer}"

    def path(self, consumer: int) -> QueuePath:
        """Where that is. Raises QueueNameError if the directory is too long a path for a socket."""
        kind = TopicPath if self.is_topic else QueuePath
        return kind(self.queue(consumer), self.namespace, self.runtime)

    def stacks(self, role: str, slot: int) -> str:
        """The file for the stacks of a worker that hangs."""
        return os.path.join(self.directory, f"{role}{slot}.stacks")


def remove_all(place: Place) -> None:
    """Remove every segment and file of a run."""
    for name in segments_of(place.namespace):
        unlink(name)
    shutil.rmtree(place.directory, ignore_errors=True)


def segments_of(namespace: str) -> list[str]:
    """The segments of a namespace, finished or not."""
    return names(f"shmq:{namespace}:") + names(f"making-shmq:{namespace}:")
