"""The receive loop: take a request, map it into tensors, hand it to a handler, answer.

A request is a dict with at least ``request_id`` and ``reply_to``, the name of the queue on which the sender waits for
the answer: ``{"request_id", "result"}`` or ``{"request_id", "error"}``. A request that fails is answered with its error
and touches no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.tensors import to_paddle
from fmq import Consumer, FmqError, Message, Producer, QueueEmptyError, ShmqError

logger = logging.getLogger("engine")

REPLY_RING_SIZE = 1024 * 1024
REPLY_TIMEOUT = 5.0
"""Seconds that an answer may wait for room. A sender that does not read its answers must not stop the others."""

_LOOK = 0.2
"""Seconds between two looks at ``stop`` while no request comes."""

Handler = Callable[[Any], Any]
"""Takes a request with its arrays as tensors, returns what is sent back. An exception is the request's error."""


@dataclass(slots=True)
class Served:
    """What a receive loop has done."""

    requests: int = 0
    failed: int = 0
    lost_answers: int = 0


class Replies:
    """The reply queues of the senders, made when first needed. For the one thread of the receive loop."""

    def __init__(self, namespace: str | None) -> None:
        self._namespace = namespace
        self._producers: dict[str, Producer] = {}

    def send(self, queue: str, answer: dict[str, Any]) -> None:
        """Put an answer. Raises FmqError if the sender does not take its answers, or the name is none."""
        producer = self._producers.get(queue)
        if producer is None:
            producer = Producer(queue, namespace=self._namespace, ring_size=REPLY_RING_SIZE)
            self._producers[queue] = producer
        producer.put(answer, timeout=REPLY_TIMEOUT)

    def close(self) -> None:
        """Close all, waiting a moment for answers that are still unread."""
        for producer in self._producers.values():
            producer.close(timeout=1.0)
        self._producers.clear()


def serve(
    consumer: Consumer,
    handler: Handler,
    replies: Replies,
    *,
    place: str = "cpu",
    stop: Callable[[], bool],
    served: Served | None = None,
) -> Served:
    """Serve requests until ``stop()`` is true and none is waiting. Returns (and keeps up to date) the counts."""
    served = served or Served()
    while True:
        try:
            message = consumer.get(timeout=_LOOK)
        except QueueEmptyError:
            if stop():
                return served
            continue
        except ShmqError as error:
            served.failed += 1
            logger.error("a request could not be received: %s", error)
            continue
        with message:
            _answer(message, handler, replies, place, served)
        del message


def _answer(message: Message, handler: Handler, replies: Replies, place: str, served: Served) -> None:
    served.requests += 1
    request = message.payload
    try:
        request_id, reply_to = request["request_id"], request["reply_to"]
    except (TypeError, KeyError, IndexError) as error:
        served.failed += 1
        logger.error("message %d of %s is no request (%r)", message.sequence, message.producer, error)
        return
    answer = {"request_id": request_id}
    try:
        answer["result"] = handler(to_paddle(request, place=place))
    except Exception as error:
        served.failed += 1
        answer["error"] = f"{type(error).__name__}: {error}"
        logger.exception("request %s failed", request_id)
    try:
        replies.send(reply_to, answer)
    except FmqError as error:
        served.lost_answers += 1
        logger.error("the answer to request %s could not be sent: %s", request_id, error)
