"""The handler that sends back what it was sent, and shows that every byte arrived."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.tasks import Result, Task
from fmq.calls import CHAT, ChatStep


class Echo:
    """Answers a request with itself, in which each array is its dtype, shape and CRC-32; a chat, word for word.

    ``step_seconds`` is slept before each step, as a model would compute.
    """

    def __init__(self, step_seconds: float = 0.0) -> None:
        self._step_seconds = float(step_seconds)

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's: one step for all that are no chats, and one for each word."""
        chats: list[tuple[Task, Iterator[ChatStep]]] = []
        answers: list[Result] = []
        self._compute()
        for task in tasks:
            if isinstance(task.inputs, dict) and task.inputs.get("kind") == CHAT:
                chats.append((task, _words(task.inputs)))
            else:
                value = _describe(task.inputs)
                answers += [task.output(value, choice=choice) for choice in range(task.choices)]
        yield answers
        while chats:
            steps: list[Result] = []
            going_on = []
            for task, words in chats:
                word = next(words)
                if word.reason is None:
                    going_on.append((task, words))
                for choice in range(task.choices):
                    steps.append(task.output(word, choice=choice, finished=word.reason is not None))
            yield steps
            chats = [chat for chat in going_on if not chat[0].cancelled]
            self._compute()

    def _compute(self) -> None:
        if self._step_seconds:
            time.sleep(self._step_seconds)


def _describe(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _describe(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_describe(value) for value in node]
    if isinstance(node, np.ndarray):
        return {"dtype": str(node.dtype), "shape": list(node.shape), "crc32": _crc32(node)}
    if isinstance(node, memoryview):
        return {"bytes": node.nbytes, "crc32": zlib.crc32(node)}
    return node


def _words(chat: dict[str, Any]) -> Iterator[ChatStep]:
    """The last message again, a word a step; a picture is said in words."""
    words: list[str] = []
    for part in chat["messages"][-1]["content"]:
        words += part["text"].split() if part["type"] == "text" else _picture(part["image"])
    limit = chat.get("max_tokens")
    limit = len(words) if limit is None else limit
    if not words or limit < 1:
        yield ChatStep("", "length" if words else "stop", 0)
        return
    for index, word in enumerate(words[:limit]):
        space = " " if index else ""
        reason = None
        if index == limit - 1 or index == len(words) - 1:
            reason = "stop" if len(words) <= limit else "length"
        yield ChatStep(space + word, reason, 1)


def _picture(image: Any) -> Iterable[str]:
    return (f"[picture of {image.shape[1]}x{image.shape[0]},", f"crc32 {_crc32(image):08x}]")


def _crc32(array: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0
