"""Values for those who know neither numpy nor the codec, as JSON and as msgpack."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from fmq.calls import ChatStep, Events, Output
from fmq.plain import plain, to_json, to_msgpack

ARRAYS = {
    "int32": np.arange(6, dtype=np.int32).reshape(2, 3),
    "uint8, every other one": np.arange(10, dtype=np.uint8)[::2],
    "transposed": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "backwards": np.arange(5, dtype=np.int16)[::-1],
    "no dimension": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "bool": np.array([True, False]),
    "bfloat16": np.array([1.5, -2], ml_dtypes.bfloat16),
}
SCALARS = [
    (np.float32(0.5), 0.5),
    (np.float64(1.25), 1.25),
    (np.int64(-3), -3),
    (np.uint8(255), 255),
    (np.bool_(True), True),
    (ml_dtypes.bfloat16(1.5), 1.5),
    (np.str_("text"), "text"),
]


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_an_array_is_its_dtype_shape_and_bytes_in_c_order(array: np.ndarray[Any, Any]) -> None:
    head = {"dtype": str(array.dtype), "shape": list(array.shape)}
    data = np.ascontiguousarray(array).tobytes()
    assert json.loads(to_json(array)) == {**head, "data": base64.b64encode(data).decode()}
    assert msgspec.msgpack.decode(to_msgpack(array)) == {**head, "data": data}


@pytest.mark.parametrize(("number", "expected"), SCALARS)
def test_a_number_of_numpy_is_a_number(number: Any, expected: Any) -> None:
    assert json.loads(to_json([number])) == [expected]
    assert msgspec.msgpack.decode(to_msgpack([number])) == [expected]


def test_arrays_and_numbers_are_found_anywhere_in_a_tree_and_in_structs() -> None:
    value = {"a": [np.int8(1), {"b": (np.zeros(1, np.uint8), None)}], "c": ChatStep("hi", "stop", 2)}
    events = Events([Output("r1", 0, 3, value)])
    array = {"dtype": "uint8", "shape": [1]}
    tree = {"a": [1, {"b": [{**array, "data": "AA=="}, None]}], "c": ["hi", "stop", 2]}
    assert json.loads(to_json(events))["outputs"] == [["r1", 0, 3, tree, True, None]]
    tree["a"][1]["b"][0]["data"] = b"\0"
    assert msgspec.msgpack.decode(to_msgpack(events))["outputs"] == [["r1", 0, 3, tree, True, None]]


def test_json_begins_as_json_does_and_msgpack_does_not() -> None:
    assert to_json({"value": 1}) == b'{"value":1}'
    assert not to_msgpack({"value": 1}).startswith(b"{")


@pytest.mark.parametrize("encode", [to_json, to_msgpack])
@pytest.mark.parametrize("value", [object(), 1j, np.complex64(1j), range(3)], ids=lambda value: type(value).__name__)
def test_what_is_no_array_nor_number_has_no_plain_form(encode: Callable[[Any], bytes], value: Any) -> None:
    with pytest.raises(NotImplementedError, match="has no plain form"):
        encode({"deep": [value]})


def test_the_error_names_the_type() -> None:
    with pytest.raises(NotImplementedError, match="a slice has no plain form"):
        plain(slice(1))


@pytest.mark.parametrize("encode", [to_json, to_msgpack])
def test_text_that_is_no_unicode_is_a_value_error(encode: Callable[[Any], bytes]) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        encode("\ud800")
