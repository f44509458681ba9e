"""A small vision network in Paddle, whole: it tells five shapes apart, on a CPU in a few milliseconds.

Four strided convolutions, an average over the picture, one linear layer: 47,000 weights, which
``examples/train_vision.py`` trained on drawn shapes. Small, and in everything else what a large one is: pictures come
as tensors over the ring, a batch is one forward pass, a request may be a chat.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from engine.errors import RequestError
from engine.tasks import Result, Task
from engine.tensors import load_paddle
from fmq.calls import CHAT, ChatStep

LABELS = ("circle", "cross", "ring", "square", "triangle")
SIDE = 64
"""Pixels of a side of what the network sees."""
_CHANNELS = (3, 16, 32, 48, 64)
_WEIGHTS = "vision.npz"


def network() -> Any:
    """The network, untrained: float32 [n, 3, SIDE, SIDE] in 0..1 to float32 [n, len(LABELS)], unnormalised."""
    paddle = load_paddle()
    layers: list[Any] = []
    for channels, more in itertools.pairwise(_CHANNELS):
        layers += [
            paddle.nn.Conv2D(channels, more, 3, stride=2, padding=1),
            paddle.nn.BatchNorm2D(more),
            paddle.nn.ReLU(),
        ]
    layers += [paddle.nn.AdaptiveAvgPool2D(1), paddle.nn.Flatten(), paddle.nn.Linear(_CHANNELS[-1], len(LABELS))]
    return paddle.nn.Sequential(*layers)


def see(pictures: Sequence[Any]) -> Any:
    """Pictures, tensors uint8 [height, width, 3], as the network wants them: float32 [n, 3, SIDE, SIDE]."""
    paddle = load_paddle()
    ready = []
    for picture in pictures:
        pixels = picture.astype("float32").transpose([2, 0, 1]).unsqueeze(0) / 255.0
        ready.append(paddle.nn.functional.interpolate(pixels, size=[SIDE, SIDE], mode="area"))
    return paddle.concat(ready)


class Vision:
    """Answers a request with what each of its pictures shows; a chat, in words. All requests in one forward pass."""

    takes_tensors = True

    def __init__(self) -> None:
        self._paddle = load_paddle()
        self._network = network()
        with files("engine.handlers").joinpath(_WEIGHTS).open("rb") as file, np.load(file) as weights:
            self._network.set_state_dict({name: weights[name].astype(np.float32) for name in weights.files})
        self._network.eval()

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        """As Handler's: one step for all that are no chats, and then a word a step."""
        found = [_pictures(task.inputs) for task in tasks]
        for task, pictures in zip(tasks, found, strict=True):
            if not pictures:
                raise RequestError(f"request {task.request_id} has no picture, a uint8 array [height, width, 3]")
        answers = self._classify([picture for pictures in found for picture in pictures])
        talks: list[tuple[Task, list[ChatStep]]] = []
        step: list[Result] = []
        for task, pictures in zip(tasks, found, strict=True):
            mine, answers = answers[: len(pictures)], answers[len(pictures) :]
            if isinstance(task.inputs, dict) and task.inputs.get("kind") == CHAT:
                talks.append((task, _sentence(mine, task.inputs.get("max_tokens"))))
            else:
                step += [task.output({"pictures": mine}, choice=choice) for choice in range(task.choices)]
        yield step
        for index in range(max((len(words) for _, words in talks), default=0)):
            step = []
            for task, words in talks:
                if index < len(words):
                    last = index == len(words) - 1
                    step += [task.output(words[index], choice=choice, finished=last) for choice in range(task.choices)]
            yield step

    def _classify(self, pictures: Sequence[Any]) -> list[dict[str, Any]]:
        with self._paddle.no_grad():
            scores = self._paddle.nn.functional.softmax(self._network(see(pictures))).numpy()
        return [
            {
                "label": LABELS[int(row.argmax())],
                "probability": round(float(row.max()), 4),
                "probabilities": {label: round(float(score), 4) for label, score in zip(LABELS, row, strict=True)},
            }
            for row in scores
        ]


def _pictures(node: Any) -> list[Any]:
    """Every picture in a tree, in its order."""
    if isinstance(node, dict):
        return [picture for value in node.values() for picture in _pictures(value)]
    if isinstance(node, list | tuple):
        return [picture for value in node for picture in _pictures(value)]
    shape: Sequence[int] = getattr(node, "shape", ())
    is_picture = len(shape) == 3 and shape[2] == 3 and min(shape) > 0 and str(node.dtype).endswith("uint8")
    return [node] if is_picture else []


def _sentence(answers: Sequence[dict[str, Any]], limit: int | None) -> list[ChatStep]:
    said = [f"a {answer['label']} ({answer['probability']:.2f})" for answer in answers]
    words = ("This is " + ", and this is ".join(said) + ".").split()
    taken = words if limit is None else words[: max(1, limit)]
    reason = "stop" if len(taken) == len(words) else "length"
    return [
        ChatStep((" " if index else "") + word, reason if index == len(taken) - 1 else None)
        for index, word in enumerate(taken)
    ]
