"""The handler that echoes, and how handlers are found by name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.errors import EngineError, HandlerNameError
from engine.handlers import HANDLERS, Echo, PatchStats, load_handler
from engine.tasks import Result, Task
from fmq.calls import CHAT, ChatStep, Output

PICTURE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


class Mine:
    """A handler as somebody else would write it."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def run(self, tasks: Sequence[Task]) -> Iterator[Sequence[Result]]:
        yield [task.output(task.inputs * self.factor) for task in tasks]


class NoHandler:
    """Has no method ``run``."""


def echo(*tasks: Task) -> list[list[Output]]:
    """What Echo says in each step in which it says anything."""
    return [[result.output for result in step] for step in Echo().run(tasks) if step]


def answer(inputs: Any) -> Any:
    """What Echo answers to a request that is no chat."""
    ((output,),) = echo(Task("r1", inputs))
    assert output == Output("r1", 0, 0, output.value, True, None)
    return output.value


def chat(*texts: str | np.ndarray[Any, Any], max_tokens: int | None = None) -> dict[str, Any]:
    """A conversation whose last message has these parts."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": text} if isinstance(text, str) else {"type": "image", "image": text} for text in texts
    ]
    earlier = {"role": "user", "content": [{"type": "text", "text": "not this one"}]}
    return {"kind": CHAT, "messages": [earlier, {"role": "user", "content": parts}], "max_tokens": max_tokens}


def said(inputs: dict[str, Any]) -> list[tuple[str, str | None, int]]:
    """What Echo says to a chat of one choice, a step each; checks that the last step, and no other, finishes it."""
    outputs = [output for (output,) in echo(Task("r1", inputs))]
    assert [output.step for output in outputs] == list(range(len(outputs)))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return [(output.value.text, output.value.reason, output.value.tokens) for output in outputs]


def described(array: np.ndarray[Any, Any], dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "crc32": zlib.crc32(array.tobytes())}


# -- Echo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", ["text", 7, None, 1.5, b"bytes", {"a": [1, {"b": []}]}, {"kind": "other"}])
def test_echo_answers_a_plain_tree_with_itself(inputs: Any) -> None:
    assert answer(inputs) == inputs


def test_echo_answers_an_array_with_its_dtype_shape_and_checksum_wherever_it_lies() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    weights = np.array([1.5, -2], ml_dtypes.bfloat16)
    assert answer({"images": [pixels, {"w": weights}], "pair": (pixels.T, 1)}) == {
        "images": [described(pixels, "uint8", 3, 4), {"w": described(weights, "bfloat16", 2)}],
        "pair": [described(pixels.T, "uint8", 4, 3), 1],
    }


@pytest.mark.parametrize(
    "array", [np.zeros((0, 3), np.float32), np.array(7, np.int64), np.ones((2, 3, 4)), np.array([True, False])]
)
def test_echo_answers_arrays_of_any_shape(array: np.ndarray[Any, Any]) -> None:
    assert answer(array) == described(array, str(array.dtype), *array.shape)


def test_echo_says_another_checksum_for_another_byte() -> None:
    array = np.zeros(1000, np.uint8)
    before = answer(array)
    array[999] = 1
    assert answer(array)["crc32"] != before["crc32"]


def test_echo_answers_a_memoryview_with_its_bytes_and_checksum() -> None:
    assert answer({"blob": memoryview(b"abcdef")}) == {"blob": {"bytes": 6, "crc32": zlib.crc32(b"abcdef")}}


def test_echo_answers_every_choice_of_every_request_in_one_step() -> None:
    (step,) = echo(Task("r1", "a", choices=2), Task("r2", "b"))
    assert [(output.request_id, output.choice, output.value) for output in step] == [
        ("r1", 0, "a"),
        ("r1", 1, "a"),
        ("r2", 0, "b"),
    ]


def test_echo_says_the_last_message_of_a_chat_word_for_word() -> None:
    assert said(chat("What  is\nthis?")) == [("What", None, 1), (" is", None, 1), (" this?", "stop", 1)]


def test_echo_joins_the_parts_of_a_chat_and_says_pictures_in_words() -> None:
    words = [text for text, _, _ in said(chat("see", PICTURE, "there"))]
    assert "".join(words) == f"see [picture of 3x2, crc32 {zlib.crc32(PICTURE.tobytes()):08x}] there"


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (1, [("a", "length", 1)]),
        (2, [("a", None, 1), (" b", "length", 1)]),
        (3, [("a", None, 1), (" b", None, 1), (" c", "stop", 1)]),
        (100, [("a", None, 1), (" b", None, 1), (" c", "stop", 1)]),
    ],
)
def test_echo_says_no_more_words_than_were_asked_for_and_why_it_ends(max_tokens: int, expected: list[Any]) -> None:
    assert said(chat("a b c", max_tokens=max_tokens)) == expected


@pytest.mark.parametrize("inputs", [chat(), chat(""), chat("  \n"), chat("", max_tokens=5)])
def test_echo_ends_a_chat_without_a_word_at_once(inputs: dict[str, Any]) -> None:
    assert said(inputs) == [("", "stop", 0)]


def test_echo_needs_no_max_tokens() -> None:
    inputs = chat("one two")
    del inputs["max_tokens"]
    assert said(inputs) == [("one", None, 1), (" two", "stop", 1)]


def test_echo_says_each_word_once_for_every_choice_of_a_chat() -> None:
    steps = echo(Task("r1", chat("a b"), choices=2))
    assert [[(output.choice, output.step, output.value.text) for output in step] for step in steps] == [
        [(0, 0, "a"), (1, 0, "a")],
        [(0, 1, " b"), (1, 1, " b")],
    ]


def test_echo_runs_chats_of_different_lengths_side_by_side_with_what_is_no_chat() -> None:
    steps = echo(Task("short", chat("a")), Task("long", chat("b c")), Task("plain", 7))
    assert [[(output.request_id, output.value, output.finished) for output in step] for step in steps] == [
        [("plain", 7, True)],
        [("short", ChatStep("a", "stop"), True), ("long", ChatStep("b", None), False)],
        [("long", ChatStep(" c", "stop"), True)],
    ]


def test_echo_says_no_more_to_a_chat_that_was_cancelled_and_goes_on_with_others() -> None:
    gone, here = Task("gone", chat("a b c")), Task("here", chat("d e"))
    heard = []
    for step in Echo().run([gone, here]):
        heard += [(result.task.request_id, result.output.value.text) for result in step]
        gone.cancelled |= bool(step)
    assert heard == [("gone", "a"), ("here", "d"), ("here", " e")]


def test_echo_says_the_same_when_it_is_run_again() -> None:
    task = Task("r1", chat("a", PICTURE, max_tokens=2))
    first = echo(task)
    task.restart()
    assert echo(task) == first


def test_echo_computes_before_its_step_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("engine.handlers.echo.time", SimpleNamespace(sleep=slept.append))
    for expected, handler in (([], Echo()), ([0.25], Echo(step_seconds=0.25))):
        steps = handler.run([Task("r1", 7)])
        assert len(next(steps)) == 1
        assert slept == expected


# -- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("echo", Echo), ("patch-stats", PatchStats)])
def test_handlers_that_are_included_have_names(name: str, kind: type) -> None:
    assert name in HANDLERS
    assert type(load_handler(name)) is kind


def test_any_class_that_can_be_imported_is_a_handler_by_its_module_and_name() -> None:
    handler = load_handler(f"{__name__}:Mine")
    assert type(handler) is Mine
    assert handler.factor == 1


def test_options_are_arguments_by_name() -> None:
    handler = load_handler(f"{__name__}:Mine", {"factor": 3})
    ((result,),) = handler.run([Task("r1", 2)])
    assert result.output.value == 6


@pytest.mark.parametrize("name", ["", "nothing", ":", "module:", ":Name", "engine.handlers.echo"])
def test_a_name_that_is_none_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(HandlerNameError, match="echo, patch-stats") as caught:
        load_handler(name)
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value, EngineError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:Handler", "No module named 'no_such_module'"),
        ("engine.handlers.echo:Missing", "has no attribute 'Missing'"),
    ],
)
def test_a_handler_that_can_not_be_imported_is_named_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(HandlerNameError, match=f"'{name}' can't be imported: .*{reason}"):
        load_handler(name)


@pytest.mark.parametrize("options", [{"nothing": 1}, {"factor": 1, "more": 2}])
def test_options_that_a_handler_does_not_take_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(HandlerNameError, match=r"Mine' can't be made: .*unexpected keyword"):
        load_handler(f"{__name__}:Mine", options)


@pytest.mark.parametrize("attribute", ["NoHandler", "echo"])
def test_what_can_be_made_but_not_run_is_no_handler(attribute: str) -> None:
    with pytest.raises(HandlerNameError, match=r"has no method run\(tasks\)"):
        load_handler(f"{__name__}:{attribute}")


@pytest.mark.parametrize("array", [np.arange(9)[::-2], np.arange(12).reshape(3, 4)[:, ::2], np.empty((0, 3))])
def test_echo_describes_arrays_whatever_their_strides(array: np.ndarray[Any, Any]) -> None:
    ((output,),) = echo(Task("r", {"a": array}))
    crc = zlib.crc32(np.ascontiguousarray(array).tobytes())
    assert output.value == {"a": {"dtype": str(array.dtype), "shape": list(array.shape), "crc32": crc}}


@pytest.mark.parametrize("limit", [0, -1])
def test_echo_says_nothing_where_no_token_is_allowed(limit: int) -> None:
    chat = {"kind": "chat", "messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]}
    ((output,),) = echo(Task("r", chat | {"max_tokens": limit}))
    assert output.value == ChatStep("", "length", 0)
    assert output.finished
