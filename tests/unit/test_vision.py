"""The network that tells shapes apart, as a handler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import RequestError, Task, to_paddle

pytest.importorskip("paddle")
pytest.importorskip("PIL")

from engine.handlers.vision import LABELS, Vision
from examples.train_vision import SEED, draw


@pytest.fixture(scope="module", name="handler")
def handler_fixture() -> Vision:
    return Vision()


def pictures(count: int, seed: int = SEED + 2) -> list[tuple[str, np.ndarray[Any, Any]]]:
    random = np.random.default_rng(seed)
    labels = [LABELS[number % len(LABELS)] for number in range(count)]
    return [(label, draw(label, random, int(random.integers(80, 300)))) for label in labels]


def answers(handler: Vision, *tasks: Task) -> list[Any]:
    return [result.output.value for step in handler.run(tasks) for result in step]


def test_it_tells_most_shapes_that_it_has_not_seen_right(handler: Vision) -> None:
    shown = pictures(100)
    task = Task("r", to_paddle({"pictures": [picture for _, picture in shown]}))
    (answer,) = answers(handler, task)
    right = sum(found["label"] == label for found, (label, _) in zip(answer["pictures"], shown, strict=True))
    assert right >= 80
    for found in answer["pictures"]:
        assert found["probability"] == max(found["probabilities"].values())
        assert sum(found["probabilities"].values()) == pytest.approx(1, abs=1e-3)


def test_a_batch_is_answered_as_each_of_its_requests_would_be_alone(handler: Vision) -> None:
    inputs = [to_paddle({"image": picture}) for _, picture in pictures(6)]
    inputs.append(to_paddle({"a": [inputs_picture for _, inputs_picture in pictures(3, seed=1)], "text": "three"}))
    together = answers(handler, *(Task(f"r{number}", each) for number, each in enumerate(inputs)))
    alone = [answers(handler, Task("r", each))[0] for each in inputs]
    assert len(together) == 7
    for left, right in zip(together, alone, strict=True):
        assert [found["label"] for found in left["pictures"]] == [found["label"] for found in right["pictures"]]
        for one, other in zip(left["pictures"], right["pictures"], strict=True):
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-3)


def test_a_chat_is_answered_in_words_one_a_step(handler: Vision) -> None:
    ((_, picture),) = pictures(1)
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": picture}]
    chat = {"kind": "chat", "messages": [{"role": "user", "content": parts}], "max_tokens": None}
    words = answers(handler, Task("r", to_paddle(chat)))
    text = "".join(word.text for word in words)
    assert text.startswith("This is a ")
    assert any(name in text for name in LABELS)
    assert [word.reason for word in words] == [None] * (len(words) - 1) + ["stop"]
    cut = answers(handler, Task("r", to_paddle(chat | {"max_tokens": 2}), choices=2))
    assert [(word.text, word.reason) for word in cut] == [("This", None)] * 2 + [(" is", "length")] * 2


@pytest.mark.parametrize(
    "inputs",
    [
        {"text": "no picture"},
        {"image": np.zeros((28, 28), np.uint8)},
        {"image": np.zeros((28, 28, 4), np.uint8)},
        {"image": np.zeros((28, 28, 3), np.float32)},
        {"image": np.zeros((0, 28, 3), np.uint8)},
        [],
        None,
    ],
)
def test_a_request_without_a_picture_is_the_clients_fault(handler: Vision, inputs: Any) -> None:
    with pytest.raises(RequestError, match="request r has no picture"):
        answers(handler, Task("r", to_paddle(inputs)))
