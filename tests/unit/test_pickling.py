"""The pickle codec: what the default one refuses, just as much without a copy, and only for those who asked for it."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import gc
import multiprocessing.reduction
import os
import pickle
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fmq import AsyncConsumer, CodecRefusedError, Consumer, DecodeError, EncodeError, Message, Producer, pickling
from fmq.arrays import copy_buffer
from fmq.encoding import BLOB_LAST, PICKLE
from fmq.pickling import OUT_OF_BAND, decode, encode
from tests.queues import Place, address_of, is_empty, lies_in, place_fixture, run_to_end

__all__ = ["place_fixture"]

MIB = 1024 * 1024
BOTH = ("msgpack", "pickle")


def views_of(buffers: list[NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Read-only copies of the buffers of a message, as its consumer has them."""
    views = []
    for buffer in buffers:
        view = np.empty(buffer.nbytes, np.uint8)
        copy_buffer(buffer, view)
        view.flags.writeable = False
        views.append(view)
    return views


def round_trip(obj: Any) -> Any:
    encoded = encode(obj)
    return decode(encoded.blob, views_of(encoded.buffers))


def settle(consumer: Consumer) -> None:
    """Let the consumer take note of what was dropped."""
    gc.collect()
    with pytest.raises(TimeoutError):
        consumer.get(timeout=0)


def put_blob(producer: Producer, blob: bytes, buffers: tuple[NDArray[Any], ...] = ()) -> None:
    """Put bytes that say of themselves that they are a pickle."""
    producer._put_now(producer._start(PICKLE, blob, list(buffers), None))


# -- a request as other servers have it -------------------------------------------------------------------------------


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1


@dataclasses.dataclass
class Position:
    offset: int
    length: int


@dataclasses.dataclass(slots=True)
class Slotted:
    name: str
    image: NDArray[Any]


class Processor:
    """Counts tokens, by a static and by a bound method."""

    def __init__(self, merge: int) -> None:
        self.merge = merge

    @staticmethod
    def num_tokens(grid_thw: NDArray[Any]) -> int:
        return int(np.prod(grid_thw)) // 4

    def merged(self, grid_thw: NDArray[Any]) -> int:
        return int(np.prod(grid_thw)) // self.merge


class Request:
    """Some fields, and arrays among them."""

    def __init__(self, request_id: str, inputs: dict[str, Any]) -> None:
        self.request_id = request_id
        self.status = Status.RUNNING
        self.multimodal_inputs = inputs
        self.prompt_token_ids = list(range(300))
        self.itself = self


def request_of(patches: int = 2000) -> dict[str, Any]:
    """Keys and shapes as a vision-language server has them."""
    chance = np.random.default_rng(1)
    image = chance.integers(0, 256, (patches, 588), np.uint8)
    return {
        "request_id": "chatcmpl-1",
        "prompt_token_ids": list(range(1000)),
        "status": Status.WAITING,
        "sampling": {"temperature": 0.7, "stop": ("a", "b"), "bad": {1, 2, 3}},
        "arrival_time": 1.5,
        "multimodal_inputs": {
            "images": image,
            "grid_thw": np.array([[1, 40, 50]]),
            "position_ids": np.arange(3 * 1000, dtype=np.int64).reshape(3, 1000).T,
            "image_type_ids": np.zeros(3, np.int32),
            "mm_positions": [Position(0, 100), Position(100, 400)],
            "mm_hashes": ["a" * 64, "b" * 64],
            "mm_num_token_func": Processor.num_tokens,
            "merged_func": Processor(16).merged,
            "image_patch_id": np.int64(100295),
            "audio_features": [np.ones((4, 8), ml_dtypes.bfloat16), None],
            "slotted": Slotted("x", image[:10]),
        },
    }


def test_a_request_of_another_server_comes_back_as_it_was(place: Place) -> None:
    producer, consumer = place.producer(ring_size=8 * MIB, codec="pickle"), place.consumer(accept=BOTH)
    before = request_of()
    assert not before["multimodal_inputs"]["position_ids"].flags.c_contiguous
    producer.put(before)
    with consumer.get(timeout=0) as message:
        found, inputs, expected = message.payload, message.payload["multimodal_inputs"], before["multimodal_inputs"]
        assert [*found] == [*before]
        assert [*inputs] == [*expected]
        for name in ("request_id", "prompt_token_ids", "sampling", "arrival_time"):
            assert found[name] == before[name]
            assert type(found[name]) is type(before[name])
        assert found["status"] is Status.WAITING
        for name in ("images", "grid_thw", "position_ids", "image_type_ids"):
            assert inputs[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(inputs[name], expected[name])
            assert lies_in(inputs[name], producer.ring)
            assert not inputs[name].flags.writeable
            assert inputs[name].flags.c_contiguous
        assert inputs["mm_positions"] == expected["mm_positions"]
        assert inputs["mm_hashes"] == expected["mm_hashes"]
        assert inputs["mm_num_token_func"] is Processor.num_tokens
        assert inputs["mm_num_token_func"](grid_thw=inputs["grid_thw"]) == 500
        assert inputs["merged_func"](inputs["grid_thw"]) == 125
        assert type(inputs["image_patch_id"]) is np.int64
        assert inputs["image_patch_id"] == 100295
        assert inputs["audio_features"][0].dtype == ml_dtypes.bfloat16
        assert inputs["audio_features"][0].tolist() == np.ones((4, 8)).tolist()
        assert inputs["slotted"].name == "x"
        np.testing.assert_array_equal(inputs["slotted"].image, expected["images"][:10])
        del found, inputs
    del message
    settle(consumer)
    assert is_empty(producer)


def test_an_object_with_arrays_and_cycles_in_it_comes_back_and_its_arrays_lie_in_the_ring(place: Place) -> None:
    producer, consumer = place.producer(ring_size=8 * MIB, codec="pickle"), place.consumer(accept="pickle")
    request = Request("r1", request_of()["multimodal_inputs"])
    producer.put([request, request])
    message = consumer.get(timeout=0)
    first, second = message.payload
    assert type(first) is Request
    assert first is second
    assert first.itself is first
    assert first.status is Status.RUNNING
    assert first.prompt_token_ids == request.prompt_token_ids
    images = first.multimodal_inputs["images"]
    np.testing.assert_array_equal(images, request.multimodal_inputs["images"])
    assert lies_in(images, producer.ring)
    message.release()
    del message, first, second
    gc.collect()
    settle(consumer)
    # The array outlives its message, and keeps the space.
    assert not is_empty(producer)
    np.testing.assert_array_equal(images, request.multimodal_inputs["images"])
    del images
    settle(consumer)
    assert is_empty(producer)


# -- arrays -----------------------------------------------------------------------------------------------------------

STRUCTURED = np.dtype([("x", "<i4"), ("y", "<f8", (2,)), ("z", "S3")], align=True)

ARRAYS = {
    "plain": np.arange(24).reshape(2, 3, 4),
    "fortran": np.asfortranarray(np.arange(24).reshape(4, 6)),
    "transposed": np.arange(24).reshape(2, 3, 4).T,
    "stepped": np.arange(100)[::-3],
    "broadcast": np.broadcast_to(np.float32(7), (3, 5)),
    "0-d": np.array(5, np.int16),
    "empty": np.zeros((0, 3), np.float16),
    "big-endian": np.arange(5, dtype=">i4"),
    "bool": np.array([True, False]),
    "dates": np.array(["2026-01-01", "NaT"], "M8[D]"),
    "text": np.array(["a", "bcd"]),
    "bfloat16": np.arange(9).astype(ml_dtypes.bfloat16)[::2],
    "float8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "structured": np.array([(1, (2.0, 3.0), b"abc"), (4, (5.0, 6.0), b"")], STRUCTURED),
    "structured, stepped": np.zeros(6, STRUCTURED)[::2],
    "structured, empty": np.zeros(0, STRUCTURED),
    "void": np.frombuffer(b"abcdef", "V3"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_layout_and_dtype_is_a_buffer_itself_and_comes_back_read_only(name: str) -> None:
    array = ARRAYS[name]
    encoded = encode({"a": [array]})
    if array.nbytes:
        # Not a copy: the object itself.
        assert len(encoded.buffers) == 1
        assert encoded.buffers[0] is array
    else:
        assert encoded.buffers == []
    views = views_of(encoded.buffers)
    found = decode(encoded.blob, views)["a"][0]
    assert type(found) is np.ndarray
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    if array.dtype.names is not None:
        # With what lies between the fields, which tobytes() of a structured array may leave out.
        array = array.view(f"V{array.itemsize}")
    assert found.tobytes() == array.tobytes()
    assert found.flags.c_contiguous
    if array.nbytes:
        assert address_of(found) == address_of(views[0])
        assert not found.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", None, {1}, np.arange(3)], object),
        np.array([(1, "x")], [("a", "i4"), ("b", object)]),
        np.ma.array([1.0, 2.0], mask=[True, False]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=["object", "structured with objects", "masked", "recarray"],
)
def test_arrays_that_are_no_plain_memory_are_left_to_pickle(array: Any) -> None:
    found = round_trip(array)
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    assert repr(found) == repr(array)


@pytest.mark.skipif(not hasattr(np, "dtypes") or not hasattr(np.dtypes, "StringDType"), reason="numpy before 2")
def test_an_array_of_strings_of_any_length_is_left_to_pickle() -> None:
    found = round_trip(np.array(["a", "b" * 100], np.dtypes.StringDType()))
    assert found.tolist() == ["a", "b" * 100]


def test_arrays_in_an_array_of_objects_are_out_of_band() -> None:
    inner = np.arange(1000)
    encoded = encode(np.array([inner, None], object))
    assert encoded.buffers[0] is inner


def test_an_array_on_a_file_arrives_as_a_plain_one(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "a", np.int32, "w+", shape=(4, 5))
    array[:] = 7
    found = round_trip(array)
    assert type(found) is np.ndarray
    assert found.tolist() == array.tolist()


def test_an_array_that_occurs_twice_is_stored_once_and_is_one_array_again() -> None:
    array = np.arange(6000).reshape(60, 100)
    again, other = array[...], array.copy()
    encoded = encode({"a": array, "b": [array, Position(0, array)], "again": again, "other": other})
    assert [id(buffer) for buffer in encoded.buffers] == [id(array), id(other)]
    found = decode(encoded.blob, views_of(encoded.buffers))
    assert found["a"] is found["b"][0] is found["b"][1].length is found["again"]
    assert found["other"] is not found["a"]


def test_the_same_memory_with_another_shape_or_dtype_is_another_array() -> None:
    array = np.arange(6)
    found = round_trip([array, array.reshape(2, 3), array.view(np.uint64), array[::-1][::-1]])
    assert [each.shape for each in found] == [(6,), (2, 3), (6,), (6,)]
    assert [each.dtype for each in found] == [np.int64, np.int64, np.uint64, np.int64]
    assert found[3] is found[0]


def test_a_private_copy_has_writable_arrays_and_memoryviews_that_are_not(place: Place) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer(accept=BOTH)
    frozen = np.arange(1000)
    frozen.flags.writeable = False
    producer.put({"a": Position(0, frozen), "s": np.zeros(3, STRUCTURED), "b": bytes(5000), "m": memoryview(b"abc")})
    message = consumer.get(timeout=0)
    found = message.detach()
    settle(consumer)
    assert is_empty(producer)
    found["a"].length[:] = 1
    found["s"]["x"] = 2
    assert found["b"] == bytes(5000)
    assert found["m"] == b"abc"
    assert found["m"].readonly


# -- bytes and other buffers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("size", [OUT_OF_BAND, 65535, 65536, 65537, 300_000, 1 << 24])
def test_large_bytes_leave_the_pickle_wherever_they_are(kind: type, size: int) -> None:
    value = kind(os.urandom(1) * size)
    encoded = encode({"a": [Position(0, value)], "b": value, "ids": list(range(3000))})
    assert [buffer.nbytes for buffer in encoded.buffers] == [size]
    assert address_of(encoded.buffers[0]) == address_of(np.frombuffer(value, np.uint8))
    assert len(encoded.blob) < 10_000
    found = decode(encoded.blob, views_of(encoded.buffers))
    assert type(found["b"]) is kind
    assert found["b"] == value
    assert found["a"][0].length is found["b"]


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_small_bytes_stay_in_the_pickle(kind: type) -> None:
    value = kind(b"x") * (OUT_OF_BAND - 1)
    encoded = encode([value])
    assert encoded.buffers == []
    assert decode(encoded.blob, []) == [value]


def test_long_text_and_many_ids_are_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        pytest.fail("it was pickled again, as if there were bytes in it")

    monkeypatch.setattr(pickling, "_BytesPickler", fail)
    obj = {"ids": list(range(100_000)), "prompt": "Bonjour " * 50_000, "a": np.arange(100_000), "s": bytes(100)}
    assert round_trip(obj)["prompt"] == obj["prompt"]


def test_what_only_looks_like_large_bytes_comes_back_all_the_same() -> None:
    obj = ["B\x00\x10\x00\x00", b"B\x00\x20\x00\x00", {"x": b"\x96\x00\x10" + bytes(6)}, np.arange(3)]
    found = round_trip(obj)
    assert found[:3] == obj[:3]


def test_large_bytes_beside_arrays_and_objects_keep_their_places() -> None:
    obj = [np.arange(5), b"a" * 5000, Position(1, np.arange(3)), bytearray(b"b" * 5000), np.arange(7), b"c" * 70_000]
    found = round_trip(obj)
    assert [found[index].tolist() for index in (0, 4)] == [[*range(5)], [*range(7)]]
    assert found[1] == obj[1]
    assert found[2].length.tolist() == [0, 1, 2]
    assert found[3] == obj[3]
    assert found[5] == obj[5]


def test_bytes_alone_are_neither_pickled_nor_refused(place: Place) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer()
    for size in (0, 10, 20_000):
        producer.put(b"x" * size)
        assert consumer.get(timeout=0).payload == b"x" * size


def test_a_memoryview_arrives_as_one_that_is_read_only(place: Place) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer(accept=BOTH)
    loan = producer.reserve(10_000)
    loan[:] = b"x" * 10_000
    producer.put({"data": loan, "set": {1}, "none": memoryview(b"")})
    assert producer.copied_bytes == 0
    message = consumer.get(timeout=0)
    assert message.payload["data"] == b"x" * 10_000
    assert message.payload["data"].readonly
    assert message.payload["none"].nbytes == 0
    with pytest.raises(EncodeError, match=r"\$\[0\].*np.asarray"):
        producer.put([memoryview(np.arange(3))])
    message.release()
    del message, loan


class Wrapper:
    """Pickles its buffer itself, as pickle's protocol 5 has it."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapper, (pickle.PickleBuffer(self.buffer),)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_the_buffers_of_other_classes_are_out_of_band_if_they_are_large(kind: type) -> None:
    large, small = kind(b"x") * 10_000, kind(b"y") * 10
    encoded = encode([np.arange(3), Wrapper(large), Wrapper(small), np.arange(4)])
    assert [buffer.nbytes for buffer in encoded.buffers] == [24, 10_000, 32]
    views = views_of(encoded.buffers)
    found = decode(encoded.blob, views)
    assert found[1].buffer == large
    assert address_of(np.asarray(found[1].buffer)) == address_of(views[1])
    assert memoryview(found[1].buffer).readonly
    assert found[2].buffer == small
    assert found[3].tolist() == [0, 1, 2, 3]


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.fixture(name="paddle")
def paddle_fixture() -> Any:
    """Paddle, if it is installed."""
    return pytest.importorskip("paddle")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64", "uint8", "bool", "float8_e4m3fn"])
def test_a_tensor_arrives_as_an_array_of_its_dtype_and_becomes_a_tensor_again(
    place: Place, paddle: Any, dtype: str
) -> None:
    from engine import to_paddle

    producer, consumer = place.producer(ring_size=MIB, codec="pickle"), place.consumer(accept=BOTH)
    values = paddle.to_tensor(np.arange(6000).reshape(60, 100) % 2).astype(dtype)
    expected = values.astype("float32").numpy()
    producer.put({"inputs": Position(0, [values, values]), "status": Status.RUNNING})
    message = consumer.get(timeout=0)
    first, second = message.payload["inputs"].length
    assert first is second
    assert first.dtype.name == dtype
    assert lies_in(first, producer.ring)
    tensor = to_paddle(first)
    assert tensor.dtype == getattr(paddle, dtype)
    assert tensor.data_ptr() == address_of(first)
    np.testing.assert_array_equal(tensor.astype("float32").numpy(), expected)
    message.release()
    del message, first, second, tensor
    settle(consumer)
    assert is_empty(producer)


def test_no_tensor_leaves_a_file_behind_although_paddle_would_have_it_so(paddle: Any) -> None:
    before = set(os.listdir("/dev/shm"))
    tensor = paddle.to_tensor(np.arange(100_000))
    encoded = encode({"object": Position(0, tensor)})
    assert [buffer.nbytes for buffer in encoded.buffers] == [800_000]
    assert [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("paddle")] == []
    # What is avoided: the reducers that this process does have.
    assert type(tensor) in multiprocessing.reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]


def test_a_tensor_is_not_copied_on_its_way_out(paddle: Any) -> None:
    tensor = paddle.ones([50, 20], "bfloat16")
    (buffer,) = encode([tensor]).buffers
    assert address_of(buffer) == tensor.data_ptr()


class Remote:
    """A tensor on a GPU, as far as DLPack tells."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self) -> Any:
        raise AssertionError("nobody should look")


def test_a_tensor_on_a_device_is_refused_with_its_path() -> None:
    with pytest.raises(EncodeError, match=r"\$\.inputs\.length\[1\]: a Remote on a device .*\.cpu\(\)"):
        encode({"inputs": Position(0, [1, Remote()])})


def test_paddle_is_not_imported_for_it() -> None:
    program = """
        import sys
        import numpy as np
        from fmq import pickling
        pickling.decode(*pickling.encode({"a": 1, "b": {1, 2}}))
        assert "paddle" not in sys.modules and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


# -- loans and space --------------------------------------------------------------------------------------------------


def test_a_loan_in_an_object_is_put_without_a_copy(place: Place) -> None:
    producer, consumer = place.producer(ring_size=MIB, codec="pickle"), place.consumer(accept=BOTH)
    loan = producer.empty((100, 100), np.int16)
    loan[:] = 7
    producer.put(Position(0, {"whole": loan, "part": loan[10:20]}))
    assert producer.copied_bytes == 0
    assert producer.array_bytes == 22_000
    with pytest.raises(ValueError, match="read-only"):
        loan[:] = 8
    message = consumer.get(timeout=0)
    whole, part = message.payload.length["whole"], message.payload.length["part"]
    assert (whole == 7).all()
    assert address_of(part) - address_of(whole) == 2000
    message.release()
    del message, loan, whole
    settle(consumer)
    assert not is_empty(producer)
    assert (part == 7).all()
    del part
    settle(consumer)
    assert is_empty(producer)


def test_an_array_is_copied_once_and_its_space_used_again_and_again(place: Place) -> None:
    producer, consumer = place.producer(ring_size=MIB, codec="pickle"), place.consumer(accept=BOTH)
    for index in range(20):
        producer.put(Position(index, np.full(200_000, index, np.uint8)), timeout=0)
        message = consumer.get(timeout=0)
        assert (message.payload.length == index).all()
        assert lies_in(message.payload.length, producer.ring)
        message.release()
        del message
        settle(consumer)
    assert producer.copied_bytes == 20 * 200_000
    assert len(place.segments()) == 1


def test_encoding_keeps_no_array_alive(place: Place) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer(accept=BOTH)
    gc.collect()
    gc.disable()
    try:
        loan = producer.empty(10_000)
        producer.put({"a": Position(0, loan), "b": b"x" * 5000})
        message = consumer.get(timeout=0)
        message.release()
        del loan, message
        with pytest.raises(TimeoutError):
            consumer.get(timeout=0)
        assert is_empty(producer), "something in a cycle waits for the collector"
    finally:
        gc.enable()


def test_a_pickle_that_is_longer_than_a_record_comes_through(place: Place) -> None:
    producer, consumer = place.producer(ring_size=MIB, codec="pickle"), place.consumer(accept=BOTH)
    obj = {"ids": set(range(50_000)), "b": b"x" * 5000, "a": np.arange(10)}
    blob = encode(obj).blob
    assert len(blob) > 100_000
    assert consumer_reads(producer, consumer, obj)["ids"] == obj["ids"]


def consumer_reads(producer: Producer, consumer: Consumer, obj: Any) -> Any:
    producer.put(obj)
    return consumer.get(timeout=0).detach()


# -- what can't be pickled --------------------------------------------------------------------------------------------


def local() -> Callable[[], int]:
    def inner() -> int:
        return 1

    return inner


class Stubborn:
    """Fails in code of its own."""

    def __reduce__(self) -> Any:
        raise KeyError("what its author did not think of")


def refused() -> Iterator[tuple[str, Any, str]]:
    yield "lambda", lambda: 1, "function"
    yield "local function", local(), "function"
    yield "lock", threading.Lock(), "lock"
    yield "generator", (index for index in range(3)), "generator"
    yield "own code", Stubborn(), "Stubborn"


@pytest.mark.parametrize(("thing", "kind"), [pytest.param(thing, kind, id=name) for name, thing, kind in refused()])
def test_what_can_not_be_pickled_is_named_with_its_path_and_what_to_do(thing: Any, kind: str) -> None:
    tree = {"a": 1, "big": np.arange(10_000), "requests": [Position(0, 0), Position(0, {"x y": (1, thing)})]}
    with pytest.raises(EncodeError) as raised:
        encode(tree)
    text = str(raised.value)
    assert text.startswith(f"$.requests[1].length['x y'][1]: {kind} can't be pickled (")
    assert "leave it out" in text
    assert raised.value.__cause__ is not None


def test_a_socket_is_refused_too_and_in_slots_as_well() -> None:
    with socket.socket() as one, pytest.raises(EncodeError, match=r"^\$\.image: socket can't be pickled"):
        encode(Slotted("x", one))  # type: ignore[arg-type]


def test_what_a_class_leaves_out_of_its_state_is_not_to_blame() -> None:
    class_with_lock = LeavesOut()
    assert round_trip(class_with_lock).value == 5
    with pytest.raises(EncodeError, match=r"^\$\.b: function can't be pickled"):
        encode({"a": class_with_lock, "b": lambda: 1})
    # The lock comes first, but the value is the reason.
    class_with_lock.value = local()
    with pytest.raises(EncodeError, match=r"^\$\.a: LeavesOut can't be pickled \(.*local"):
        encode({"a": class_with_lock})


class LeavesOut:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: Any = 5

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}


def test_what_is_nested_too_deep_is_an_encode_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        with pytest.raises(EncodeError, match="nested too deep"):
            encode(deep)
    finally:
        while deep:
            deep = deep.pop()


def test_a_message_that_can_not_be_encoded_leaves_nothing_behind(place: Place) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer(accept=BOTH)
    with pytest.raises(EncodeError):
        producer.put({"a": np.arange(1000), "f": lambda: 1})
    assert is_empty(producer)
    assert consumer_reads(producer, consumer, {1, 2}) == {1, 2}


# -- who reads it -----------------------------------------------------------------------------------------------------

ran: list[str] = []


class Trap:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> Any:
        return spring, ()


def spring() -> None:
    ran.append("it ran")


@pytest.mark.parametrize("accept", [None, "msgpack", ("msgpack",)])
def test_a_consumer_that_was_not_told_to_does_not_unpickle_and_goes_on(place: Place, accept: Any) -> None:
    options = {} if accept is None else {"accept": accept}
    pickles, plain, consumer = place.producer(codec="pickle"), place.producer(), place.consumer(**options)
    ran.clear()
    pickles.put([Trap(), np.arange(3000), b"x" * 5000])
    pickles.put([Trap()])
    plain.put({"next": np.arange(10)})
    found: list[Any] = []
    for _ in range(3):
        try:
            found.append(consumer.get(timeout=0).detach())
        except CodecRefusedError as error:
            found.append(str(error))
    texts = [each for each in found if isinstance(each, str)]
    assert len(texts) == 2
    assert all("accept=('msgpack', 'pickle')" in text and "run code" in text for text in texts)
    assert [each["next"].tolist() for each in found if isinstance(each, dict)] == [[*range(10)]]
    assert ran == []
    del found
    settle(consumer)
    # As any message that can't be decoded: done.
    assert is_empty(pickles)


def test_the_trap_of_the_test_above_would_have_been_sprung(place: Place) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer(accept=BOTH)
    ran.clear()
    producer.put([Trap()])
    consumer.get(timeout=0).release()
    assert ran == ["it ran"]


def test_a_consumer_of_pickle_alone_refuses_msgpack(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer(accept=["pickle"])
    producer.put({"a": 1})
    with pytest.raises(CodecRefusedError, match=re.escape("accept=('pickle', 'msgpack')")):
        consumer.get(timeout=0)


def test_a_consumer_of_both_reads_both_whoever_put_it(place: Place) -> None:
    one, other, consumer = place.producer(), place.producer(codec="pickle"), place.consumer(accept=BOTH)
    one.put({"a": (1, np.arange(3))})
    other.put({"a": {1, 2}})
    payloads = [message.payload["a"] for message in consumer.get_many(timeout=0)]
    assert sorted(type(each).__name__ for each in payloads) == ["set", "tuple"]
    del payloads


def test_a_refused_message_is_an_error_that_code_for_undecodable_ones_catches() -> None:
    assert issubclass(CodecRefusedError, DecodeError)


@pytest.mark.parametrize("name", ["json", "Pickle", "", None, 2])
def test_a_codec_that_is_none_is_refused_with_the_names_there_are(place: Place, name: Any) -> None:
    with pytest.raises(ValueError, match=r"'msgpack', 'pickle'"):
        place.producer(codec=name)
    with pytest.raises(ValueError, match=r"'msgpack', 'pickle'"):
        place.consumer(accept=["msgpack", name])
    assert place.segments() == []


def test_a_consumer_that_accepts_nothing_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match="name at least one"):
        place.consumer(accept=())


def test_a_type_and_pickle_do_not_go_together(place: Place) -> None:
    class Typed(msgspec.Struct):
        a: int

    with pytest.raises(ValueError, match="type="):
        place.consumer(type=Typed, accept=BOTH)
    place.consumer(type=Typed)


def test_the_default_of_both_sides_is_msgpack(place: Place) -> None:
    producer, consumer = place.producer(), place.consumer()
    with pytest.raises(EncodeError, match="set can't be encoded"):
        producer.put({1, 2})
    assert consumer_reads(producer, consumer, {"a": 1}) == {"a": 1}


def test_the_awaited_sides_take_the_same_words(place: Place) -> None:
    async def main() -> None:
        async with place.async_producer(ring_size=8 * MIB, codec="pickle") as producer:
            async with place.async_consumer(accept=BOTH) as consumer:
                await producer.put(Position(0, np.full(2 * MIB, 7, np.uint8)))
                message = await consumer.get(timeout=5)
                assert (message.payload.length == 7).all()
                assert lies_in(message.payload.length, producer.ring)
                message.release()
                del message
            await refuses(place, producer)

    run_to_end(main())


async def refuses(place: Place, producer: Any) -> None:
    consumer: AsyncConsumer
    async with place.async_consumer() as consumer:
        await producer.put({1, 2})
        with pytest.raises(CodecRefusedError):
            await consumer.get(timeout=5)
        await asyncio.sleep(0)


# -- damage -----------------------------------------------------------------------------------------------------------

GOOD = encode([1, "two", {3}])


@pytest.mark.parametrize(
    ("blob", "cause"),
    [
        (b"", EOFError),
        (b"+", EOFError),
        (b"nonsense", pickle.UnpicklingError),
        (GOOD.blob[:-3], pickle.UnpicklingError),
        (b"cno_such_module\nthing\n.", ModuleNotFoundError),
        (b"cfmq\nno_such_name\n.", AttributeError),
        (b"cbuiltins\nlist\n(I5\ntR.", TypeError),
        (b"+\x80\x05K\x07Q.", IndexError),
        (b"+\x80\x05)Q.", IndexError),
        (b"\x80\x05K\x07Q.", pickle.UnpicklingError),
    ],
)
def test_a_damaged_pickle_is_a_decode_error_with_its_cause_and_the_next_message_comes(
    place: Place, blob: bytes, cause: type[Exception]
) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer(accept=BOTH)
    put_blob(producer, blob)
    put_blob(producer, blob, (np.arange(3), np.arange(30_000)))
    producer.put({1, 2})
    for _ in range(2):
        with pytest.raises(DecodeError, match=cause.__name__) as raised:
            consumer.get(timeout=0)
        assert isinstance(raised.value.__cause__, cause)
        del raised
    assert consumer.get(timeout=0).payload == {1, 2}
    settle(consumer)
    assert is_empty(producer)


def test_a_pickle_that_says_its_blob_is_a_buffer_and_has_none_is_refused(place: Place) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer(accept=BOTH)
    producer._put_now(producer._start(PICKLE | BLOB_LAST, b"x", [], None))
    with pytest.raises(DecodeError):
        consumer.get(timeout=0)


def test_an_array_whose_buffer_has_another_length_is_refused() -> None:
    for array in (np.arange(100), np.zeros(100, STRUCTURED)):
        blob, (buffer,) = encode(array)
        view = np.frombuffer(buffer.tobytes(), np.uint8)
        for wrong in (view[:-8], np.concatenate([view, view[:8]])):
            with pytest.raises(DecodeError):
                decode(blob, [wrong])


class Picky:
    def __setstate__(self, state: Any) -> None:
        raise LookupError("not with me")


def test_an_object_that_does_not_take_its_state_is_a_decode_error_and_gives_its_space_back(place: Place) -> None:
    producer, consumer = place.producer(codec="pickle"), place.consumer(accept=BOTH)
    picky = Picky()
    picky.__dict__["a"] = np.arange(3000)
    producer.put(picky)
    with pytest.raises(DecodeError, match="LookupError: not with me"):
        consumer.get(timeout=0)
    sys.last_value = None
    settle(consumer)
    assert is_empty(producer)


# -- set aside --------------------------------------------------------------------------------------------------------


def test_a_pickled_message_that_comes_again_is_the_same(place: Place) -> None:
    producer = place.producer(codec="pickle")
    producer.put(Position(3, np.arange(3000)))
    first = place.consumer(accept=BOTH)
    message: Message = first.get(timeout=0)
    kept = message.payload.length.copy()
    message.payload = None
    first.close()
    again = place.consumer(accept=BOTH).get(timeout=0)
    assert again.redelivered
    assert again.payload.offset == 3
    np.testing.assert_array_equal(again.payload.length, kept)
    again.release()
    del message, again


# -- the documentation ------------------------------------------------------------------------------------------------


def test_the_documentation_says_what_accepting_pickle_means() -> None:
    text = (Path(__file__).parents[2] / "docs" / "queue.md").read_text()
    section = text.partition("\n## Pickle")[2].partition("\n## ")[0]
    assert 'codec="pickle"' in section
    assert 'accept=("msgpack", "pickle")' in section
    assert re.search(r"run\w* (any )?code", section)
