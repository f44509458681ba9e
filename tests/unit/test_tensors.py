"""Arrays become Paddle tensors over the same memory, and give it back when the last of them dies."""

from __future__ import annotations

import gc
import mmap
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from engine import PlaceError, TensorError, to_paddle
from fmq import ViewsHeldError
from tests.queues import Place, place_fixture  # noqa: F401

paddle = pytest.importorskip("paddle")

DIRECT = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


class Mapping:
    """Arrays over a shared mapping, as a message hands them out: each has a root of its own that tells of its death."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 1 << 16)
        self.gone: list[str] = []
        self._references: list[Any] = []

    def array(self, name: str, values: np.ndarray[Any, Any], offset: int) -> np.ndarray[Any, Any]:
        values = np.ascontiguousarray(values).reshape(values.shape)
        self.memory[offset : offset + values.nbytes] = values.tobytes()
        root = np.frombuffer(memoryview(self.memory).toreadonly(), np.uint8, values.nbytes, offset)
        self._references.append(weakref.ref(root, lambda _: self.gone.append(name)))
        return root.view(values.dtype).reshape(values.shape)


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", DIRECT)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (1,) * 9])
def test_an_array_becomes_a_tensor_at_its_own_address(dtype: str, shape: tuple[int, ...]) -> None:
    values = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5).astype(dtype)
    array = Mapping().array("a", values, 64)
    tensor = to_paddle(array)
    assert tensor.data_ptr() == address(array)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == getattr(paddle, dtype)
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_bfloat16_arrives_as_bfloat16() -> None:
    values = np.array([[1.5, -2.25], [3e38, 0.0]], ml_dtypes.bfloat16)
    array = Mapping().array("a", values, 128)
    tensor = to_paddle(array)
    assert tensor.dtype == paddle.bfloat16
    assert tensor.data_ptr() == address(array)
    np.testing.assert_array_equal(tensor.astype("float32").numpy(), values.astype(np.float32))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_arrives_bit_for_bit(name: str) -> None:
    values = np.array([1.5, -2.0, 0.25, 8.0], getattr(ml_dtypes, name))
    array = Mapping().array("a", values, 192)
    tensor = to_paddle(array)
    assert tensor.dtype == getattr(paddle, name)
    assert tensor.data_ptr() == address(array)
    assert tensor.view("int8").numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("offset", [64, 65, 1])
def test_any_alignment_is_shared(offset: int) -> None:
    array = Mapping().array("a", np.arange(10, dtype=np.float32), offset)
    tensor = to_paddle(array)
    assert tensor.data_ptr() == address(array)
    assert float(tensor.sum()) == 45.0


@pytest.mark.parametrize("shape", [(0,), (3, 0, 4)])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e5m2)])
def test_an_empty_array_becomes_an_empty_tensor(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    tensor = to_paddle(np.empty(shape, dtype))
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == getattr(paddle, dtype.name)


def test_arrays_at_any_depth_are_found_and_the_rest_stays() -> None:
    class Request(msgspec.Struct):
        images: Any
        name: str

    array = np.arange(3)
    tree = {"a": [array, {"b": (array, "text", 5)}], "s": Request(np.ones(2), "n"), "none": None}
    result = to_paddle(tree)
    assert result["a"][0] is result["a"][1]["b"][0]
    assert result["a"][1]["b"][1:] == ("text", 5)
    assert result["s"].name == "n"
    assert result["s"].images.tolist() == [1.0, 1.0]
    assert result["none"] is None
    assert tree["a"][0] is array


def test_the_view_dies_with_the_last_tensor_and_not_before() -> None:
    mapping = Mapping()
    tensor = to_paddle({"x": mapping.array("x", np.arange(100, dtype=np.int64), 0)})["x"]
    part = tensor[10:20]
    shaped = part.reshape([2, 5])
    alias = tensor.detach()
    for name in ("tensor", "part", "alias"):
        assert mapping.gone == [], name
    del tensor, part, alias
    gc.collect()
    assert mapping.gone == []
    assert shaped.tolist() == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    del shaped
    gc.collect()
    assert mapping.gone == ["x"]


def test_two_tensors_over_one_slice_live_apart() -> None:
    mapping = Mapping()
    array = mapping.array("x", np.arange(10, dtype=np.float32), 0)
    first, second = to_paddle(array), to_paddle(array)
    del array, first
    gc.collect()
    assert mapping.gone == []
    assert float(second.sum()) == 45.0
    del second
    gc.collect()
    assert mapping.gone == ["x"]


def test_every_slice_of_one_buffer_has_its_own_content() -> None:
    mapping = Mapping()
    arrays = {
        str(index): mapping.array(str(index), np.full(16, index, np.float32), 64 * index) for index in range(1, 20)
    }
    for name, tensor in to_paddle(arrays).items():
        assert tensor.tolist() == [float(name)] * 16


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(3, np.uint16), "uint16"),
        (np.zeros(3, np.uint32), "int64"),
        (np.zeros(3, np.uint64), "int64"),
        (np.zeros(3, ">f4"), "byte order"),
        (np.zeros(3, "datetime64[s]"), "convert"),
        (np.zeros(3, "U4"), "convert"),
        (np.zeros(3, np.longdouble), "convert"),
        (np.zeros((1,) * 10), "rank 10"),
        (np.zeros((4, 4))[:, ::2], "ascontiguousarray"),
    ],
)
def test_what_paddle_can_not_hold_is_refused_with_its_path(array: np.ndarray[Any, Any], words: str) -> None:
    with pytest.raises(TensorError, match=words) as caught:
        to_paddle({"a": [np.zeros(1), array]})
    assert "$.a[1]" in str(caught.value)


def test_after_an_error_nothing_is_held() -> None:
    mapping = Mapping()
    tree = {"good": mapping.array("good", np.arange(8), 0), "bad": np.zeros(3, np.uint16)}
    gc.disable()
    try:
        with pytest.raises(TensorError):
            to_paddle(tree)
        del tree
        assert mapping.gone == ["good"]
    finally:
        gc.enable()


def test_another_place_is_refused() -> None:
    with pytest.raises(PlaceError, match="'cpu' only"):
        to_paddle(np.zeros(1), place="gpu:0")


def test_four_threads_map_and_drop_at_once() -> None:
    mapping = Mapping()
    arrays = [mapping.array(str(index), np.full(64, index, np.int32), 256 * index) for index in range(100)]
    wrong: list[int] = []

    def work(mine: list[Any]) -> None:
        while mine:
            array = mine.pop()
            expected = int(array[0]) * 64
            if int(to_paddle({"x": array})["x"].sum()) != expected:
                wrong.append(expected)

    shares = [arrays[start::4] for start in range(4)]
    arrays.clear()
    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.collect()
    assert wrong == []
    assert len(mapping.gone) == 100


def test_the_slot_of_a_message_is_given_back_with_its_last_tensor(place: Place) -> None:
    consumer, producer = place.consumer(), place.producer(ring_size=1 << 20)
    producer.put({"images": np.arange(50_000, dtype=np.float32), "bf": np.ones(5000, ml_dtypes.bfloat16)})
    message = consumer.get(timeout=5)
    views = message.payload
    tensors = to_paddle(views)
    assert tensors["images"].data_ptr() == address(views["images"])
    assert tensors["bf"].data_ptr() == address(views["bf"])
    del views
    message.release()
    kept = tensors["images"][10:12]
    del tensors
    gc.collect()
    with pytest.raises(ViewsHeldError):
        consumer.close()
    assert kept.tolist() == [10.0, 11.0]
    del kept
    gc.collect()
    consumer.close()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100
    )


def test_paddle_is_not_imported_before_it_is_needed() -> None:
    result = run_python("import sys, engine, fmq, shmq, api; print('paddle' in sys.modules, 'fastapi' in sys.modules)")
    assert result.stdout.strip() == "False False", result.stderr


def test_a_sigterm_handler_from_before_still_runs_after_paddle_came() -> None:
    result = run_python(
        """
        import os, signal, sys
        import numpy as np
        signal.signal(signal.SIGTERM, lambda *_: (print("handled", flush=True), sys.exit(7)))
        from engine import to_paddle
        to_paddle(np.zeros(3))
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    assert (result.stdout.strip(), result.returncode) == ("handled", 7), result.stderr


def test_without_paddle_the_error_names_the_extra() -> None:
    result = run_python(
        """
        import sys
        sys.modules["paddle"] = None
        import numpy as np
        from engine import PlaceError, to_paddle
        try:
            to_paddle(np.zeros(3))
        except PlaceError as error:
            print(error)
        """
    )
    assert "shmq[paddle]" in result.stdout, result.stderr


def test_sigint_stays_a_keyboard_interrupt() -> None:
    to_paddle(np.zeros(1))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
