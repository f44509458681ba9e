"""One API worker: sends real requests to an engine, takes the answers, and checks each against numpy."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from api.errors import ApiError
from api.patch_check import compare_stats, expected_stats
from api.pictures import make_request, sample_pictures
from fmq import Consumer, Producer, QueueEmptyError

RING_SIZE = 128 * 1024 * 1024
ANSWER_TIMEOUT = 30.0


@dataclass(slots=True)
class Report:
    """What one worker has seen. Times in seconds; ``latencies`` from before the put until the answer was taken.

    ``wrong`` answers differ from what numpy finds, ``failed`` ones are errors, ``repeated`` ones came a second time.
    """

    requests: int = 0
    answered: int = 0
    wrong: int = 0
    failed: int = 0
    repeated: int = 0
    array_bytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Requests without an answer."""
        return self.requests - self.answered

    @property
    def good(self) -> bool:
        """Whether every request was answered, and rightly."""
        return self.requests > 0 and not (self.lost or self.wrong or self.failed)

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


def run(
    count: int,
    *,
    queue: str,
    namespace: str | None = None,
    window: int = 4,
    progress: Callable[[Report], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Send ``count`` requests, at most ``window`` of them unanswered at a time, and wait for the answers.

    Raises ApiError if no answer comes for 30 s; the exceptions of Producer.put and Consumer.get pass through.
    """
    reply_to = f"{queue}.reply.{os.getpid()}"
    kinds = _request_kinds()
    report = Report()
    waiting: dict[str, tuple[float, dict[str, Any]]] = {}
    with (
        Consumer(reply_to, namespace=namespace) as answers,
        Producer(queue, namespace=namespace, ring_size=RING_SIZE) as producer,
    ):
        begun = time.perf_counter()
        while (report.requests < count and not stop()) or waiting:
            while report.requests < count and len(waiting) < window and not stop():
                request, expected = next(kinds)
                request_id = f"{os.getpid()}-{report.requests}"
                waiting[request_id] = (time.perf_counter(), expected)
                producer.put({**request, "request_id": request_id, "reply_to": reply_to})
                report.requests += 1
            _take_answer(answers, waiting, report)
            report.array_bytes, report.copied_bytes = producer.array_bytes, producer.copied_bytes
            report.seconds = time.perf_counter() - begun
            progress(report)
    return report


def _take_answer(answers: Consumer, waiting: dict[str, tuple[float, dict[str, Any]]], report: Report) -> None:
    try:
        with answers.get(timeout=ANSWER_TIMEOUT) as message:
            answer = message.detach()
    except QueueEmptyError:
        raise ApiError(
            f"no answer for {ANSWER_TIMEOUT:.0f} s; {len(waiting)} requests are unanswered. Is an engine running on "
            "this queue and namespace (python -m engine)?"
        ) from None
    if answer["request_id"] not in waiting:
        # Delivery is at least once: an engine that died after it had answered, its successor answers again.
        report.repeated += 1
        return
    sent, expected = waiting.pop(answer["request_id"])
    report.latencies.append(time.perf_counter() - sent)
    report.answered += 1
    if "error" in answer:
        report.failed += 1
    elif not compare_stats(answer["result"], expected):
        report.wrong += 1


def _request_kinds() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests over all sample pictures and both kinds of patches, without end, with what the engine has to find."""
    prepared: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
    for kind in ("ernie", "qwen"):
        for picture, prompt in sample_pictures():
            request = make_request(picture, prompt, request_id="", kind=kind)
            prepared.append((request, expected_stats(request)))
    while True:
        prepared.rotate(-1)
        yield prepared[0]
