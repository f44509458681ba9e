"""The consumer of a run, and the reader of a topic."""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable
from typing import Any

from fmq import (
    AsyncConsumer,
    AsyncSubscriber,
    Consumer,
    CorruptRecordError,
    DecodeError,
    Message,
    QueueEmptyError,
    ReaderDroppedError,
    SetAside,
    Subscriber,
)
from fmq.stress.faults import Saboteur
from fmq.stress.fronts import BlockingConsumer, ConsumerFront, drive
from fmq.stress.journal import ASIDE, DELIVERED, DROPPED, REDELIVERED, RELEASED, Board, Cell
from fmq.stress.load import Content, WrongContentError, open_payload
from fmq.stress.notes import NoteWriter
from fmq.stress.place import Place
from fmq.stress.plan import Plan
from fmq.stress.worker import HOLD, SLOW, Worker

_GET_TIMEOUT = 0.1
_SLOW_SECONDS = 0.01
_WINDOW = 1 << 16
"""How far a held message may be behind the newest one of its consumer, in messages (see ``verify.WINDOW``)."""


class ConsumerWorker(Worker):
    """Takes messages, checks them, holds some, checks those again, and gives all back."""

    role = "consumer"

    def __init__(self, plan: Plan, place: Place, content: Content, board: Board, notes: NoteWriter, slot: int) -> None:
        super().__init__(plan, place, content, board, notes, slot)
        self._journal = board.writer(slot)
        self._saboteur = Saboteur(plan.fault, place.namespace, place.runtime) if plan.fault and slot == 0 else None
        self._add: Callable[..., None] = (
            self._journal.add if self._saboteur is None else self._saboteur.journal(self._journal.add)
        )
        self._held: list[tuple[int, int, Message, Any, int, int, int]] = []
        self._count = 0
        self._slow_until = self._hold_until = 0
        self._consumer: ConsumerFront

    async def work(self) -> None:
        self._consumer = self._open()
        for aside in self._consumer.set_aside():
            self._put_aside(aside)
        held = self._held
        while not self.ending():
            self.hear()
            if self._children:
                self.reap()
            timeout = _GET_TIMEOUT
            if held:
                now = time.monotonic_ns()
                while held and (held[0][0] <= now or self._count - held[0][1] > _WINDOW):
                    self._give_back(heapq.heappop(held))
                if held:
                    timeout = min(timeout, max(0.0, (held[0][0] - now) / 1e9))
                if len(held) >= self.plan.held:
                    await self.pause(timeout)
                    continue
            try:
                message = await self._consumer.get(timeout=timeout)
            except QueueEmptyError:
                continue
            except ReaderDroppedError:
                self._add(DROPPED, 0, 0, 0, 0, 0, time.monotonic_ns(), 0)
                continue
            except (CorruptRecordError, DecodeError) as error:
                self.notes.violation("content", f"get raised {type(error).__name__}: {error}")
                continue
            self._deliver(message)
            del message
            if self._slow_until:
                await self._be_slow()
        await self._leave()

    def _open(self) -> ConsumerFront:
        options = self._options() | {"max_deliveries": self.plan.max_deliveries, "on_set_aside": self._put_aside}
        if self.plan.asyncio:
            return AsyncConsumer(**options)
        return BlockingConsumer(Consumer(**options))

    def _options(self) -> dict[str, Any]:
        return {
            self.place.kind: self.place.queue(self.slot),
            "namespace": self.place.namespace,
            "runtime_dir": self.place.runtime,
        }

    def _deliver(self, message: Message) -> None:
        taken = time.monotonic_ns()
        try:
            producer, life, number, begun, body = open_payload(message.payload)
        except WrongContentError as error:
            self.notes.violation("content", f"message {message.sequence} of ring {message.producer}: {error}")
            message.release()
            return
        flags = REDELIVERED if message.redelivered else 0
        self._count += 1
        self._add(DELIVERED, flags, producer, life, number, body.nbytes, taken, max(0, taken - begun))
        hold = self.content.hold(self.content.kind(producer, number))
        if self._hold_until > taken:
            hold = self._hold_until - taken
        if self._saboteur is not None:
            hold = self._saboteur.before(message, body, hold)
        self._check("content", "arrived wrong", producer, number, body)
        if hold:
            heapq.heappush(self._held, (taken + hold, self._count, message, body, producer, life, number))
            if self._saboteur is not None:
                self._saboteur.after(message, body)
            return
        del body
        message.release()
        self._add(RELEASED, 0, producer, life, number, 0, taken, 0)

    def _give_back(self, item: tuple[int, int, Message, Any, int, int, int]) -> None:
        _, _, message, body, producer, life, number = item
        self._check("views", "changed while it was held", producer, number, body)
        del item, body
        message.release()
        self._add(RELEASED, 0, producer, life, number, 0, time.monotonic_ns(), 0)

    def _check(self, check: str, what: str, producer: int, number: int, body: Any) -> None:
        try:
            self.content.check(producer, number, body)
        except WrongContentError as error:
            who = self.plan.words("producer")
            self.notes.violation(check, f"message {number} of {who} {producer} {what} at {self}: {error}")

    def _put_aside(self, aside: SetAside) -> None:
        producer, _, number, _, body = open_payload(aside.read())
        self._check("content", "was set aside wrong", producer, number, body)
        self._add(ASIDE, 0, producer, 0, aside.sequence, int(aside.producer, 16), time.monotonic_ns(), 0)
        aside.discard()

    async def _be_slow(self) -> None:
        if time.monotonic_ns() < self._slow_until:
            await self.pause(_SLOW_SECONDS)
        else:
            self._slow_until = 0

    async def _leave(self) -> None:
        kept = []
        while self._held:
            item = heapq.heappop(self._held)
            if self.cell[Cell.STOP] or type(item[2].payload) is not bytes:
                self._give_back(item)
            else:
                # Has no views, so closing hands it to the next consumer.
                kept.append(item[2])
            del item
        await self._consumer.close()
        if self._saboteur is not None:
            self._saboteur.leave()
        self.reap(block=True)

    def obey(self, order: int, until: int) -> None:
        if order == SLOW:
            self._slow_until = until
        elif order == HOLD:
            self._hold_until = until

    def use_in_child(self) -> None:
        # What the child drops is still the parent's.
        self._held.clear()
        gc.collect()
        drive(self._consumer.get(timeout=0))


class ReaderWorker(ConsumerWorker):
    """Does the same with those of a topic."""

    def _open(self) -> ConsumerFront:
        options = self._options()
        return AsyncSubscriber(**options) if self.plan.asyncio else BlockingConsumer(Subscriber(**options))
