"""Moving what a dead engine had not answered to another one."""

from __future__ import annotations

import logging
import os
import time

from fmq import Consumer, DecodeError, Message, Producer, QueueEmptyError, QueueInUseError, ShmqError
from fmq.calls import Call, Request

logger = logging.getLogger("api")

_PUT_SECONDS = 10.0
_RING_SIZE = 16 * 1024 * 1024


def move_calls(
    source: str, target: str, *, namespace: str | None = None, runtime_dir: str | os.PathLike[str] | None = None
) -> int | None:
    """Put all that waits in ``source``, of any client, into ``target``. Blocks. Returns how many calls that were.

    For the time it takes this process is the consumer of ``source``: None if somebody else is, be it an engine that
    was restarted, or another client that moves. What is not moved when this process dies, or ``target`` is full, stays;
    what was moved and not acknowledged may be moved twice, which its engine and its client notice.
    """
    try:
        consumer = Consumer(
            source, namespace=namespace, runtime_dir=runtime_dir, type=Call, max_deliveries=None, warn_held=None
        )
    except QueueInUseError:
        return None
    moved = 0
    with consumer:
        producer = Producer(target, namespace=namespace, runtime_dir=runtime_dir, ring_size=_RING_SIZE)
        try:
            while (message := _next(consumer)) is not None:
                _forward(message, producer)
                moved += 1
        except ShmqError as error:
            logger.error("of queue %s not everything could be moved to %s: %s", source, target, error)
        finally:
            # What was put is the engine's to take; the ring is removed when it has.
            producer.close(timeout=0)
    return moved


def _next(consumer: Consumer) -> Message | None:
    while True:
        try:
            return consumer.get(timeout=0)
        except QueueEmptyError:
            return None
        except DecodeError as error:
            logger.error("a call could not be read, and is not moved: %s", error)


def _forward(message: Message, producer: Producer) -> None:
    call = message.payload
    ttl = None
    if isinstance(call, Request) and call.deadline_ns:
        ttl = (call.deadline_ns - time.monotonic_ns()) / 1e9
    try:
        if ttl is None or ttl > 0:
            producer.put(call, timeout=_PUT_SECONDS, ttl=ttl)
    except BaseException:
        # Not released: it goes back into the queue. Its arrays may not outlive the consumer.
        del call
        del message.payload
        raise
    message.release()
