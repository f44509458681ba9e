"""Whatever can be encoded comes back as it was, and whatever bytes arrive are decoded or refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from fmq.codec import OUT_OF_BAND, Decoder, copy_buffer, decode, encode
from fmq.errors import DecodeError, EncodeError

pack = msgspec.msgpack.Encoder().encode

# -- arrays -----------------------------------------------------------------------------------------------------------

EXTENSIONS = [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4")]


def numpy_dtypes() -> st.SearchStrategy[np.dtype[Any]]:
    return st.one_of(
        npst.boolean_dtypes(),
        npst.integer_dtypes(endianness="?"),
        npst.unsigned_integer_dtypes(endianness="?"),
        npst.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
        npst.complex_number_dtypes(endianness="?", sizes=(64, 128)),
        npst.datetime64_dtypes(endianness="?"),
        npst.timedelta64_dtypes(endianness="?"),
        npst.byte_string_dtypes(max_len=9),
        npst.unicode_string_dtypes(endianness="?", max_len=9),
        st.integers(1, 20).map(lambda size: np.dtype(f"V{size}")),
        st.sampled_from(EXTENSIONS),
    )


def is_surrogate(character: str) -> bool:
    """Whether this is no character by itself; a str with one is refused."""
    return "\ud800" <= character <= "\udfff"


@st.composite
def whole_arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Of any bits, so that every NaN and every out-of-range string is among them, but for invalid code points."""
    dtype = draw(numpy_dtypes())
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    if dtype.kind == "U":
        return draw(npst.arrays(dtype, shape))
    size = math.prod(shape) * dtype.itemsize
    seed = draw(st.binary(min_size=1, max_size=64))
    content = bytearray((seed * (size // len(seed) + 1))[:size])
    return np.ndarray(shape, dtype, content)


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Views of any kind: sliced, stepped, reversed, transposed, broadcast."""
    array = draw(whole_arrays())
    if array.ndim:
        array = array[draw(npst.basic_indices(array.shape, allow_newaxis=True, allow_ellipsis=True))]
        if not isinstance(array, np.ndarray):
            return np.asarray(array)
        array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


# -- trees ------------------------------------------------------------------------------------------------------------

offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
datetimes = st.datetimes(timezones=st.none() | st.just(timezone.utc) | offsets, allow_imaginary=True)
ints = st.integers() | st.integers(-(1 << 64) - 2, 1 << 65) | st.sampled_from([1 << 64, (1 << 64) - 1, -(1 << 63)])
long_bytes = st.sampled_from([OUT_OF_BAND - 1, OUT_OF_BAND, OUT_OF_BAND + 1]).map(bytes)
key_leaves = st.none() | st.booleans() | ints | st.floats() | st.text() | st.binary() | datetimes
keys = st.recursive(key_leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
leaves = st.one_of(
    key_leaves,
    long_bytes,
    (st.binary() | long_bytes).map(bytearray),
    (st.binary() | long_bytes).map(memoryview),
    arrays(),
    arrays()
    .filter(lambda array: array.size and array.dtype.kind != "V")
    .map(lambda array: array.reshape(-1)[0])
    .filter(lambda scalar: not (isinstance(scalar, str) and any(map(is_surrogate, scalar)))),
    st.lists(ints, min_size=1),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=5),
        st.dictionaries(keys, inner, max_size=5),
    ),
    max_leaves=20,
)


def views_of(buffers: Sequence[NDArray[Any]]) -> list[NDArray[np.uint8]]:
    views = []
    for buffer in buffers:
        memory = np.zeros(buffer.nbytes + 64, np.uint8)
        view = np.frombuffer(memoryview(memory), np.uint8, buffer.nbytes, -memory.ctypes.data % 64)
        copy_buffer(buffer, view)
        view.flags.writeable = False
        views.append(view)
    return views


def normal(value: Any) -> Any:
    """Something that is equal only for what is the same: with the types spelled out, and floats and arrays as bits."""
    kind = type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return kind.__name__, value.dtype.str, value.dtype.name, value.shape, value.tobytes()
    if kind is dict:
        return kind, [(normal(key), normal(item)) for key, item in value.items()]
    if kind in (list, tuple):
        return kind, [normal(item) for item in value]
    if kind is float:
        return kind, "nan" if math.isnan(value) else value.hex()
    if kind is datetime:
        return kind, value.isoformat(), value.fold
    if kind is memoryview:
        return kind, value.tobytes()
    return kind, value


@given(trees)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    before = normal(tree)
    encoded = encode(tree)
    views = views_of(encoded.buffers)
    assert normal(decode(encoded.blob, views)) == before
    assert normal(Decoder(dict[str, Any]).decode(*encode_in_dict(tree))["tree"]) == before
    assert normal(tree) == before


def encode_in_dict(tree: Any) -> tuple[bytes, list[NDArray[np.uint8]]]:
    encoded = encode({"tree": tree})
    return encoded.blob, views_of(encoded.buffers)


@given(st.lists(arrays(), max_size=4))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_arrays_come_back_bit_by_bit_in_c_order(some: list[NDArray[Any]]) -> None:
    encoded = encode(some)
    assert all(buffer.nbytes for buffer in encoded.buffers)
    found = decode(encoded.blob, views_of(encoded.buffers))
    assert [normal(array) for array in found] == [normal(array) for array in some]
    assert all(array.flags.c_contiguous and array.flags.aligned for array in found)


@given(whole_arrays(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_buffer_is_stored_once_if_and_only_if_it_is_the_same(array: NDArray[Any], data: st.DataObject) -> None:
    others = [array, array[...], array.copy()]
    some = data.draw(st.lists(st.sampled_from(others), min_size=1, max_size=6))
    encoded = encode(some)
    distinct = {each.ctypes.data for each in some}
    assert len(encoded.buffers) == (len(distinct) if array.nbytes else 0)
    found = decode(encoded.blob, views_of(encoded.buffers))
    if array.nbytes:
        for one, result in zip(some, found, strict=True):
            for other, other_result in zip(some, found, strict=True):
                assert (result is other_result) == (one.ctypes.data == other.ctypes.data)


@given(st.recursive(st.just({1}), lambda inner: st.lists(inner, min_size=1, max_size=1) | st.tuples(st.just(1), inner)))
@settings(max_examples=50, deadline=None)
def test_the_path_of_a_refusal_leads_to_what_was_refused(tree: Any) -> None:
    with pytest.raises(EncodeError) as raised:
        encode(tree)
    path = str(raised.value).partition(":")[0]
    assert eval(path.replace("$", "tree"), {"tree": tree}) == {1}


# -- any bytes --------------------------------------------------------------------------------------------------------

SAMPLE = {
    "a": np.arange(16, dtype=np.uint8),
    "b": {"x": (1, 2, ()), (1, None): [1 << 70, b"b", bytearray(b"c")]},
    "c": [np.arange(6, dtype="<f4").reshape(2, 3), memoryview(b"z"), np.float32(1), np.str_("s")],
    "d": datetime(2026, 1, 1, fold=1),
    "e": [datetime(2026, 1, 1, tzinfo=timezone.utc), np.empty((0, 3)), bytearray(5000), 1.5, -1, "text"],
}
BLOB, BUFFERS = encode(SAMPLE)
VIEWS = views_of(BUFFERS)


class Typed(msgspec.Struct):
    a: np.ndarray[Any, Any] | None = None
    b: dict[str, tuple[int, ...]] | None = None
    c: list[bytes] | None = None
    d: datetime | None = None


DECODERS = [Decoder(), Decoder(Typed), Decoder(dict[str, Any]), Decoder(list[Any])]


def assert_within_the_views(value: Any, depth: int = 0) -> None:
    if isinstance(value, np.ndarray) and value.nbytes:
        start = value.ctypes.data
        assert any(view.ctypes.data == start and view.nbytes == value.nbytes for view in VIEWS)
    elif isinstance(value, (list, tuple)) and depth < 50:
        for item in value:
            assert_within_the_views(item, depth + 1)
    elif isinstance(value, dict) and depth < 50:
        for item in value.values():
            assert_within_the_views(item, depth + 1)


def feed(blob: bytes) -> None:
    """Decode it in every way. Fails for any error but a DecodeError, and for arrays of memory that is nobody's."""
    for decoder in DECODERS:
        for views in ([], VIEWS):
            try:
                value = decoder.decode(blob, views)
            except DecodeError:
                continue
            assert_within_the_views(value)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_decoded_or_refused(blob: bytes) -> None:
    feed(blob)


tags = st.sampled_from(["<f4", "|u1", ">i8", "bfloat16", "<U4", "|S8", "|V24", "<M8[s]", "|V0", "U", "S", "|O", "f4"])
tags |= st.text(max_size=12)
dimensions = st.integers(-2, 30) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1])
parts = st.one_of(
    st.none(),
    st.booleans(),
    dimensions,
    st.floats(),
    tags,
    st.binary(max_size=30),
    st.lists(dimensions, max_size=4),
    st.sampled_from(["2026-01-01T00:00:00", "2026-01-01T00:00:00+01:00"]),
)
array_headers = st.tuples(st.none() | st.integers(-1, 3), tags, st.lists(dimensions, max_size=4))


def extensions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    payloads = st.one_of(
        st.binary(max_size=20),
        inner.map(pack),
        st.lists(inner, max_size=4).map(pack),
        st.lists(parts, max_size=4).map(pack),
        array_headers.map(pack),
    )
    return st.builds(Ext, st.integers(0, 11) | st.integers(-128, 127), payloads)


forged = st.recursive(
    parts,
    lambda inner: st.one_of(
        extensions(inner),
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3) | st.sampled_from("abcd"), inner, max_size=3),
    ),
    max_leaves=10,
)


@given(forged.map(pack))
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_extensions_are_decoded_or_refused(blob: bytes) -> None:
    feed(blob)


@given(st.data())
@settings(max_examples=600, deadline=None)
def test_a_damaged_message_is_decoded_or_refused(data: st.DataObject) -> None:
    blob = bytearray(BLOB)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(blob) - 1))
        change = data.draw(st.sampled_from(["set", "insert", "remove", "cut", "repeat"]))
        if change == "set":
            blob[place] = data.draw(st.integers(0, 255))
        elif change == "insert":
            blob[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif change == "remove":
            del blob[place : place + data.draw(st.integers(1, 8))]
        elif change == "cut":
            del blob[max(place, 1) :]
        else:
            blob[place:place] = blob[place : place + 16]
        if not blob:
            break
    feed(bytes(blob))
