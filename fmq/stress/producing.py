"""The producer of a run, and the publisher of a topic."""

from __future__ import annotations

import contextlib
import resource
import time
from typing import Any

import numpy as np

from fmq import (
    AsyncProducer,
    AsyncPublisher,
    PeerUnavailableError,
    Producer,
    Publisher,
    QueueFullError,
    QueueTimeoutError,
    SegmentSpaceError,
)
from fmq.stress.faults import WITHHELD, withheld
from fmq.stress.fronts import BlockingProducer, BlockingPublisher, ProducerFront, PublisherFront, drive
from fmq.stress.journal import Cell
from fmq.stress.load import HEADER, MAGIC
from fmq.stress.worker import FULL, PAUSE, Worker

_PUT_TIMEOUT = 0.25
_PATIENCE = 0.05
"""Seconds after which a publisher does what its policy says; less than a put lasts."""
_MEET_SECONDS = 2.0
"""How long a publisher waits for the readers at most: while they are killed, they may never be all there."""


class ProducerWorker(Worker):
    """Puts the messages from ``FIRST`` on, up to ``LAST`` or until it is told to stop."""

    role = "producer"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._full_until = 0
        self._producer: ProducerFront

    async def work(self) -> None:
        self._producer = self._open()
        await self._meet()
        cell = self.cell
        life = cell[Cell.LIFE]
        cell[Cell.RING] = int(self._producer.ring.rpartition(":")[2], 16)
        while not cell[Cell.SEEN] and not self.ending():
            # The supervisor opens the ring before the first put, so that it can read its counters to the end.
            await self.pause(PAUSE)
        first, last = cell[Cell.FIRST], cell[Cell.LAST]
        interval = 1 / self.plan.rate if self.plan.rate else 0.0
        due = time.monotonic()
        number = first
        while number < last and not self.ending():
            self.hear()
            if self._full_until:
                self._relieve()
            if self._children:
                self.reap()
            if interval:
                due = max(due + interval, time.monotonic() - 1.0)
                if (early := due - time.monotonic()) > 0:
                    await self.pause(early)
            if not await self._put(life, number, number - first):
                break
            number += 1
        self._limit_files(False)
        # In the end every message has to be done; a restart hands over what is not.
        await self._producer.close(timeout=self.plan.patience if cell[Cell.STOP] or number >= last else 1.0)
        self.reap(block=True)

    def _open(self) -> ProducerFront:
        options = self._options()
        if self.plan.asyncio:
            return AsyncProducer(**options)
        return BlockingProducer(Producer(**options))

    def _options(self) -> dict[str, Any]:
        return {
            self.place.kind: self.place.queue(self.slot % self.plan.consumers),
            "namespace": self.place.namespace,
            "runtime_dir": self.place.runtime,
            "ring_size": self.plan.ring_size,
        }

    async def _meet(self) -> None:
        """Wait for who has to be there before the first put."""

    async def _put(self, life: int, number: int, sequence: int) -> bool:
        """Put one message, however long it takes. False if the end came first: then nothing was put."""
        cell, content = self.cell, self.content
        kind = content.kind(self.slot, number)
        source = array = content.array(kind)
        begun = time.monotonic_ns()
        header = HEADER.pack(MAGIC, self.slot, life, number, begun)
        cell[Cell.BEGUN] = number + 1
        while True:
            try:
                if source is not None and content.is_lent(kind) and array is source:
                    array = await self._producer.empty(source.nbytes, timeout=_PUT_TIMEOUT)
                    np.copyto(array, source)
                put = await self._producer.put(
                    content.payload(kind, header, array), timeout=_PUT_TIMEOUT, ttl=self.plan.ttl
                )
                break
            except (QueueFullError, PeerUnavailableError):
                pass
            except SegmentSpaceError:
                await self.pause(10 * PAUSE)
            cell[Cell.REFUSED] += 1
            self.hear()
            if self._full_until:
                self._relieve()
            if self.ending():
                cell[Cell.BEGUN] = number
                return False
        if put != sequence:
            self.notes.violation("order", f"put gave message {number} the sequence {put}, and {sequence} was due")
        cell[Cell.RETURNED] = number + 1
        return True

    def obey(self, order: int, until: int) -> None:
        if order == FULL:
            self._full_until = until
            self._limit_files(True)

    def use_in_child(self) -> None:
        drive(self._producer.put(b"from a child", timeout=0, ttl=None))

    def _relieve(self) -> None:
        if time.monotonic_ns() >= self._full_until:
            self._limit_files(False)

    def _limit_files(self, limited: bool) -> None:
        """For this process, a full /dev/shm: a new segment can't be allocated. The host's own is left alone."""
        if not limited:
            self._full_until = 0
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if limited else hard, hard))


class PublisherWorker(ProducerWorker):
    """Puts them into a topic, when its readers are there."""

    def _open(self) -> ProducerFront:
        options = self._options() | {"policy": self.plan.policy, "patience": _PATIENCE}
        publisher: Publisher | AsyncPublisher
        self._publisher: PublisherFront
        if self.plan.asyncio:
            publisher = self._publisher = AsyncPublisher(**options)
        else:
            publisher = Publisher(**options)
            self._publisher = BlockingPublisher(publisher)
        self._withheld = withheld(publisher)
        return self._publisher

    async def _meet(self) -> None:
        deadline = time.monotonic() + _MEET_SECONDS
        while not self.ending() and time.monotonic() < deadline:
            with contextlib.suppress(QueueTimeoutError):
                await self._publisher.wait_for_readers(self.plan.readers, timeout=_PUT_TIMEOUT)
                return

    async def _put(self, life: int, number: int, sequence: int) -> bool:
        if self.plan.fault == "withhold" and number == WITHHELD:
            with self._withheld:
                return await super()._put(life, number, sequence)
        return await super()._put(life, number, sequence)
