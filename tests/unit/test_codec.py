"""The default codec: what goes in comes out, and what can't is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import gc
import math
import subprocess
import sys
import threading
import time
import uuid
import weakref
import zoneinfo
from datetime import date, datetime, timedelta, timezone
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from fmq.codec import MAX_DEPTH, OUT_OF_BAND, Decoder, Encoded, copy_buffer, decode, encode
from fmq.errors import DecodeError, DTypeError, EncodeError

pack = msgspec.msgpack.Encoder().encode


def travel(encoded: Encoded) -> list[NDArray[np.uint8]]:
    """What a transport does: copy each buffer to memory aligned to 64 bytes, hand out read-only views of it."""
    views = []
    for buffer in encoded.buffers:
        assert buffer.nbytes > 0
        memory = np.zeros(buffer.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        target = np.frombuffer(memoryview(memory), np.uint8, buffer.nbytes, start)
        copy_buffer(buffer, target)
        target.flags.writeable = False
        views.append(target)
    return views


def round_trip(obj: Any, type: Any = Any) -> Any:
    encoded = encode(obj)
    return Decoder(type).decode(encoded.blob, travel(encoded))


def assert_same(found: Any, expected: Any) -> None:
    """The same types all the way down, and the same values, bit by bit where it matters."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.dtype.str == expected.dtype.str
        assert found.shape == expected.shape
        assert found.flags.c_contiguous
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, np.generic):
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert len(found) == len(expected)
        for (key, value), (expected_key, expected_value) in zip(found.items(), expected.items(), strict=True):
            assert_same(key, expected_key)
            assert_same(value, expected_value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for value, expected_value in zip(found, expected, strict=True):
            assert_same(value, expected_value)
    elif isinstance(expected, float):
        assert math.copysign(1, found) == math.copysign(1, expected)
        assert found == expected or (math.isnan(found) and math.isnan(expected))
    elif isinstance(expected, datetime):
        assert (found, found.fold, found.utcoffset()) == (expected, expected.fold, expected.utcoffset())
    elif isinstance(expected, memoryview):
        assert found.readonly
        assert (found.format, found.shape) == (expected.format, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


# -- plain trees ------------------------------------------------------------------------------------------------------

REQUEST = {"id": "req-123", "prompt": "x" * 900, "max_tokens": 10, "temp": 0.7, "stream": True, "ids": list(range(20))}


def test_a_plain_tree_is_just_msgpack() -> None:
    tree = {**REQUEST, "nested": [{"a": [1, "b", None]}, []], 5: b"short", "when": datetime.now(timezone.utc)}
    assert encode(tree) == Encoded(pack(tree), [])
    assert_same(round_trip(tree), tree)


@pytest.mark.parametrize("value", [None, True, False, 0, -1, "", "é\0", b"", [], {}, 1.5, -(1 << 63), (1 << 64) - 1])
def test_a_scalar_is_a_message_too(value: Any) -> None:
    assert_same(round_trip(value), value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, np.float64("nan"), np.float32(-0.0)])
def test_odd_floats_come_back_as_they_were(value: Any) -> None:
    assert_same(round_trip({"value": [value]}), {"value": [value]})


def test_ones_and_true_stay_apart() -> None:
    assert_same(round_trip([1, True, 1.0, 0, False, 0.0]), [1, True, 1.0, 0, False, 0.0])


def test_the_blob_may_be_a_memoryview() -> None:
    encoded = encode({"a": (1, 2)})
    assert decode(memoryview(encoded.blob), []) == {"a": (1, 2)}


# -- what msgpack would blur ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [(), (1, 2), ((1,), [(), {"a": (None,)}]), [(1, 2)] * 3, ("a", np.float32(1))])
def test_a_tuple_comes_back_as_a_tuple(value: Any) -> None:
    assert_same(round_trip(value), value)
    assert_same(round_trip({"a": [value]}), {"a": [value]})


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, 1 << 127, -(1 << 127), 255 << 64, 10**400, -(10**400)])
def test_an_int_beyond_64_bits_comes_back_exactly(value: int) -> None:
    assert_same(round_trip(value), value)
    tree = {"a": [1, value, "b"], value: (value,), "c": np.arange(3)}
    assert_same(round_trip(tree), tree)


def test_a_naive_datetime_stays_naive() -> None:
    value = datetime(2026, 2, 3, 4, 5, 6, 789)
    assert_same(round_trip([value, value.replace(fold=1)]), [value, value.replace(fold=1)])


@pytest.mark.parametrize("hours", [-11.5, 0, 5.75])
def test_an_aware_datetime_keeps_its_instant_and_its_offset(hours: float) -> None:
    for rest in (timedelta(), timedelta(seconds=7), timedelta(microseconds=1)):
        value = datetime(1, 2, 3, 4, 5, 6, 789, timezone(timedelta(hours=hours) + rest))
        assert_same(round_trip(value), value)


def test_a_time_zone_by_name_comes_back_as_its_offset_at_that_time() -> None:
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    for value in (datetime(2026, 7, 1, tzinfo=zone), datetime(2026, 10, 25, 2, 30, tzinfo=zone, fold=1)):
        assert_same(round_trip(value), value.replace(tzinfo=timezone(value.utcoffset() or timedelta())))


@pytest.mark.parametrize("value", [datetime.min, datetime.max])
def test_the_first_and_the_last_datetime_come_back(value: datetime) -> None:
    for zone in (None, timezone.utc, timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))):
        assert_same(round_trip(value.replace(tzinfo=zone)), value.replace(tzinfo=zone))


@pytest.mark.parametrize(
    "keys",
    [
        [1, -5, 1 << 70],
        [None, True, 2.5, "s", b"b"],
        [(1, 2), (), ("a", (None, 1 << 65))],
        [np.float32(1.5), np.int64(3), np.str_("x")],
        [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone.utc)],
        [b"k" * 5000, "k" * 5000],
        [math.nan, float("nan")],
    ],
)
def test_a_dict_may_have_any_hashable_value_as_a_key(keys: list[Any]) -> None:
    tree = {"d": {key: {"n": [index, (key,)]} for index, key in enumerate(keys)}}
    assert_same(round_trip(tree), tree)


def test_the_order_of_a_dict_is_kept() -> None:
    tree = {"z": (1,), 3: 2, (1,): 3, "a": np.zeros(2)}
    assert list(round_trip(tree)) == ["z", 3, (1,), "a"]


@pytest.mark.parametrize("size", [0, 1, OUT_OF_BAND - 1, OUT_OF_BAND, 100_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind_come_back_as_that_kind(kind: Any, size: int) -> None:
    value = kind(bytes(range(256)) * (size // 256) + bytes(size % 256))
    assert_same(round_trip([value, value, "end"]), [value, value, "end"])


def test_long_bytes_leave_the_blob_without_a_copy_and_short_ones_do_not() -> None:
    long, short = b"x" * OUT_OF_BAND, bytearray(OUT_OF_BAND - 1)
    encoded = encode([long, short, bytearray(long)])
    assert [buffer.nbytes for buffer in encoded.buffers] == [OUT_OF_BAND, OUT_OF_BAND]
    assert encoded.buffers[0].ctypes.data == np.frombuffer(long, np.uint8).ctypes.data
    assert len(encoded.blob) < OUT_OF_BAND + 50


def test_a_memoryview_comes_back_as_a_read_only_view_of_the_buffer() -> None:
    encoded = encode(memoryview(bytearray(b"abcdef"))[::2])
    view = np.frombuffer(bytearray(b"ace"), np.uint8)
    found = decode(encoded.blob, [view])
    assert found.readonly
    assert found.obj is view
    copy_buffer(encoded.buffers[0], view)
    assert found.tobytes() == b"ace"


def test_a_bytearray_that_comes_back_is_private_and_can_grow() -> None:
    encoded = encode(bytearray(OUT_OF_BAND))
    views = travel(encoded)
    found = decode(encoded.blob, views)
    found[0] = 7
    found += b"more"
    assert views[0][0] == 0


@pytest.mark.parametrize(
    "value",
    [
        np.bool_(True),
        np.uint64(2**64 - 1),
        np.float16(0.1),
        np.float32("nan"),
        np.longdouble(1) / 3,
        np.complex64(1 - 2j),
        np.datetime64("2026-01-01T00:00:01", "ms"),
        np.datetime64("NaT", "ns"),
        np.timedelta64(25, "s"),
        np.str_("héllo\0"),
        np.str_(""),
        np.bytes_(b"a\0b\0"),
        np.void(b"abc"),
        ml_dtypes.bfloat16(1.5),
        ml_dtypes.float8_e4m3fn(-2),
        ml_dtypes.int4(-3),
    ],
)
def test_a_numpy_scalar_comes_back_as_a_scalar_of_its_dtype(value: np.generic) -> None:
    assert_same(round_trip({"v": value}), {"v": value})


# -- arrays -----------------------------------------------------------------------------------------------------------

NUMPY_DTYPES = [*"?bhilqBHILQefdgFDG", ">i2", ">u8", ">f4", ">f8", ">c16", "M8[ns]", ">M8[D]", "m8[25us]", "M8", "m8"]
SIZED_DTYPES = ["U5", ">U5", "S7", "V3"]
EXTENSION_DTYPES = [
    np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int4", "uint4")
]


def some_array(dtype: np.dtype[Any], shape: tuple[int, ...] = (4, 6)) -> NDArray[Any]:
    numbers = np.arange(math.prod(shape)).reshape(shape) % 7
    if dtype.kind == "V" and dtype.names is None and dtype not in EXTENSION_DTYPES:
        return np.frombuffer(bytes(range(math.prod(shape) * dtype.itemsize)), dtype).reshape(shape)
    return numbers.astype(dtype)


LAYOUTS = {
    "contiguous": lambda a: a,
    "0-d": lambda a: a[1, 1, ...],
    "transposed": lambda a: a.T,
    "Fortran": np.asfortranarray,
    "strided": lambda a: a[::2, 1::2],
    "reversed": lambda a: a[::-1, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[0], (3, 6)),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype),
    "with an axis of one": lambda a: a[:, None, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, *SIZED_DTYPES, *EXTENSION_DTYPES], ids=str)
def test_an_array_of_any_dtype_and_layout_comes_back_in_c_order(dtype: Any, layout: str) -> None:
    array = LAYOUTS[layout](some_array(np.dtype(dtype)))
    assert_same(round_trip({"a": [array]}), {"a": [array]})


@pytest.mark.parametrize("shape", [(0,), (3, 0, 4), (2**40, 0)])
@pytest.mark.parametrize("dtype", ["f4", "U3", "bfloat16", "M8[s]"])
def test_an_empty_array_needs_no_buffer(shape: tuple[int, ...], dtype: str) -> None:
    array: NDArray[Any] = np.empty(shape, dtype)
    encoded = encode([array])
    assert encoded.buffers == []
    assert_same(decode(encoded.blob, [])[0], array)


@pytest.mark.parametrize("dtype", ["U0", "S0", "V0"])
def test_an_array_of_empty_elements_comes_back(dtype: str) -> None:
    array = np.ndarray((3,), dtype, b"")
    assert_same(round_trip(array), array)


def test_decoded_arrays_are_views_of_the_buffers_and_as_writable_as_they_are() -> None:
    encoded = encode({"a": np.arange(6.0).reshape(2, 3)})
    for writable in (False, True):
        view = np.frombuffer(bytearray(encoded.buffers[0].tobytes()), np.uint8)
        view.flags.writeable = writable
        array = decode(encoded.blob, [view])["a"]
        assert array.base is view
        assert array.flags.writeable is writable
        assert array.ctypes.data == view.ctypes.data


@pytest.mark.parametrize("value", [np.arange(10), memoryview(b"abc")])
def test_what_looks_into_a_view_keeps_it_alive_and_nothing_else_does(value: Any) -> None:
    encoded = encode([value, (1, value)])
    views = travel(encoded)
    gone = weakref.ref(views[-1])
    found = decode(encoded.blob, views)
    views.clear()
    gc.collect()
    part = found[1][1]
    del found
    assert gone() is not None
    gc.disable()
    try:
        del part
        assert gone() is None
    finally:
        gc.enable()


def test_encode_does_not_copy_arrays() -> None:
    array = np.zeros((512, 512))
    strided = array[::-1, ::3]
    buffers = encode({"a": array, "b": (strided,)}).buffers
    assert buffers[0] is array
    assert buffers[1] is strided


def test_an_array_of_terabytes_is_encoded_without_touching_it() -> None:
    array = np.broadcast_to(np.float32(1), (2**20, 2**20))
    encoded = encode(array)
    assert encoded.buffers[0] is array
    assert encoded.buffers[0].nbytes == 2**42
    assert len(encoded.blob) < 40


def test_an_array_beyond_32_bits_comes_back() -> None:
    # Of memory that is never written, so that no page of it exists.
    view = np.zeros(3 << 30, np.uint8)
    blob = encode(np.broadcast_to(np.int32(0), (3, 1 << 28))).blob
    array = decode(blob, [view])
    assert array.shape == (3, 1 << 28)
    assert array.ctypes.data == view.ctypes.data
    assert array[-1, -1] == 0


def test_the_same_array_twice_is_stored_once_and_comes_back_as_one() -> None:
    array = np.arange(12).reshape(3, 4)
    encoded = encode({"a": array, "b": [array, (array,)]})
    assert len(encoded.buffers) == 1
    found = decode(encoded.blob, travel(encoded))
    assert found["a"] is found["b"][0]
    assert found["a"] is found["b"][1][0]


def test_two_arrays_over_the_same_memory_are_stored_once() -> None:
    array = np.arange(12)
    others = [np.arange(12) for _ in range(3)]
    encoded = encode([others[0], array, others[1], array[:], array[:], others[2]])
    assert len(encoded.buffers) == 4
    found = decode(encoded.blob, travel(encoded))
    assert found[1] is found[3]
    assert found[1] is found[4]
    assert len({id(each) for each in found}) == 4


def test_arrays_that_share_only_some_of_their_memory_or_shape_are_stored_apart() -> None:
    array = np.arange(12)
    parts = [array, array[:6], array[6:], array[::2], array[5::-1], array.reshape(3, 4), array.view("u8"), array[:6]]
    encoded = encode(parts)
    assert len(encoded.buffers) == 7
    found = decode(encoded.blob, travel(encoded))
    for result, part in zip(found, parts, strict=True):
        assert_same(result, part)


def test_a_memmap_comes_back_as_an_array(tmp_path: Any) -> None:
    memmap = np.memmap(tmp_path / "file", np.int16, "w+", shape=(3, 4))
    memmap[:] = np.arange(12).reshape(3, 4)
    encoded = encode([memmap])
    assert encoded.buffers[0].ctypes.data == memmap.ctypes.data
    assert_same(decode(encoded.blob, travel(encoded))[0], np.array(memmap))


def test_the_dtype_is_a_tag_in_the_blob() -> None:
    for array, tag in ((np.zeros(2, ">f4"), b">f4"), (np.zeros(2, ml_dtypes.bfloat16), b"bfloat16")):
        assert tag in encode(array).blob
    raw = np.arange(4, dtype=np.uint16)
    found = decode(encode(raw.view(ml_dtypes.bfloat16)).blob, [np.frombuffer(raw.tobytes(), np.uint8)])
    assert found.dtype == ml_dtypes.bfloat16


def test_copy_buffer_writes_what_tobytes_would() -> None:
    for dtype in (*NUMPY_DTYPES, *SIZED_DTYPES, *EXTENSION_DTYPES):
        for layout in LAYOUTS.values():
            array = layout(some_array(np.dtype(dtype)))
            target = np.full(array.nbytes, 0xAA, np.uint8)
            copy_buffer(array, target)
            if array.dtype.char not in "gG":  # whose padding is anything
                assert target.tobytes() == array.tobytes()
    copy_buffer(np.empty((0, 3)), np.empty(0, np.uint8))


# -- what is refused --------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    A = "a"


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Data:
    x: int = 1


def subclass(base: type, *args: Any) -> Any:
    return type(f"My{base.__name__}", (base,), {})(*args)


SUBCLASSES = [
    collections.OrderedDict(a=1),
    collections.defaultdict(int, a=1),
    collections.Counter("a"),
    Number.ONE,
    Word.A,
    Point(1),
    *(subclass(base) for base in (dict, list, tuple, str, int, float, bytes, bytearray)),
    subclass(datetime, 2026, 1, 1),
]


@pytest.mark.parametrize("value", SUBCLASSES, ids=lambda value: type(value).__name__)
def test_a_subclass_is_refused_since_it_would_arrive_as_its_base(value: Any) -> None:
    with pytest.raises(
        EncodeError, match=rf"^\$\.a\[1\]: {type(value).__name__} can't be encoded.*would arrive as a plain"
    ):
        encode({"a": [0, value]})
    with pytest.raises(EncodeError, match=r"^\$: "):
        encode(value)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset(),
        decimal.Decimal(1),
        uuid.UUID(int=1),
        Colour.RED,
        Data(),
        Data,
        object(),
        len,
        3j,
        ...,
        range(3),
        iter([]),
        date(2026, 1, 1),
        timedelta(1),
        collections.deque(),
        msgspec.UNSET,
        msgspec.Raw(b"\x01"),
        Ext(1, b""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_other_type_is_refused_by_its_path(value: Any) -> None:
    expected = (
        rf"^\$\.messages\[2\]\.meta: {type(value).__name__} can't be encoded; convert it to a supported type \(dict,"
    )
    with pytest.raises(EncodeError, match=expected):
        encode({"ok": 1, "messages": [{}, "x", {"meta": value}]})


def test_the_path_spells_out_odd_keys_and_shortens_long_ones() -> None:
    for tree, path in (
        ({"a b": {1: {None: ({(1, 2): [{1}]},)}}}, "$['a b'][1][None][0][(1, 2)][0]: "),
        ({"k" * 50 + " " + "k" * 50: {1}}, "$['" + "k" * 50 + " " + "k" * 5 + "...]: "),
    ):
        with pytest.raises(EncodeError) as raised:
            encode(tree)
        assert str(raised.value).startswith(path)


@pytest.mark.parametrize("dtype", ["O", "f4,i4", [("a", "f4", (2,)), ("b", "O")]])
def test_an_array_of_structures_or_objects_is_refused(dtype: Any) -> None:
    for value in (np.zeros(3, dtype), np.zeros(0, dtype), np.zeros((), dtype)):
        with pytest.raises(DTypeError, match=r"^\$\.a\[0\]: an array of dtype .* can't be encoded; send"):
            encode({"a": [value]})


def test_a_structured_scalar_is_refused() -> None:
    with pytest.raises(DTypeError, match=r"^\$\.a: "):
        encode({"a": np.zeros(2, "f4,i4")[0]})


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 1")
def test_an_array_of_variable_strings_is_refused() -> None:
    with pytest.raises(DTypeError, match=r"^\$: an array of dtype StringDType.*astype\('U'\)"):
        encode(np.array(["a", "b"], np.dtypes.StringDType()))


def test_a_dtype_of_ml_dtypes_in_foreign_byte_order_is_refused() -> None:
    with pytest.raises(DTypeError, match="native byte order"):
        encode(np.zeros(3, np.dtype(ml_dtypes.bfloat16).newbyteorder(">")))


def test_a_masked_array_and_a_matrix_are_refused() -> None:
    with pytest.raises(EncodeError, match=r"^\$\.a: a masked array would lose its mask"):
        encode({"a": np.ma.masked_less(np.arange(3), 1)})
    with pytest.raises(EncodeError, match=r"^\$\.a: MyMatrix would arrive as a plain array; send np.asarray"):
        encode({"a": np.zeros((2, 2)).view(type("MyMatrix", (np.ndarray,), {}))})


def test_a_memoryview_of_anything_but_bytes_is_refused() -> None:
    released = memoryview(b"abc")
    released.release()
    for view in (memoryview(np.zeros(3)), memoryview(b"abcd").cast("B", (2, 2)), released):
        with pytest.raises(EncodeError, match=r"^\$\[0\]: .*memoryview"):
            encode([view])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_a_string_with_a_lone_surrogate_is_refused_by_its_path(text: str) -> None:
    for tree, path in (
        ({"a": ["ok", text]}, r"\$\.a\[1\]"),
        ({"a": [np.zeros(3), (1, text)]}, r"\$\.a\[1\]\[1\]"),
        ({"a": {"x": 1, text: 1}}, r"\$\.a\['.*'\]"),
        ({"a": {("x", text): 1}}, r"\$\.a\[\('x', .*\)\]\['.*'\]"),
        ({"a": np.str_(text)}, r"\$\.a"),
        (text, r"\$"),
    ):
        with pytest.raises(EncodeError, match=f"^{path}: the str has a lone surrogate at"):
            encode(tree)


@pytest.mark.parametrize(
    "key", [frozenset(), Colour.RED, Point(1), (1, frozenset()), memoryview(b"a"), date(2026, 1, 1)]
)
def test_a_key_that_could_not_be_one_again_is_refused(key: Any) -> None:
    with pytest.raises(EncodeError, match=r"^\$\.a\[.*: .* can't be a key of a dict"):
        encode({"a": {"x": 1, key: 2}})


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS: dict[str, tuple[Any, int]] = {
    "list": (lambda value: [value], 1),
    "dict": (lambda value: {"k": value}, 1),
    "tuple": (lambda value: (value,), 2),
    "dict with odd keys": (lambda value: {np.int8(1): value}, 2),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_nesting_comes_back_up_to_the_limit_and_is_refused_beyond(wrap: str) -> None:
    make, levels = WRAPS[wrap]
    for leaf in (lambda value: value, lambda value: [value, np.zeros(1)][0]):
        assert round_trip(leaf(nested(MAX_DEPTH // levels, make))) == nested(MAX_DEPTH // levels, make)
    with pytest.raises(EncodeError, match=r"^\$[\[.].*\.\.\..*: nested deeper than 500 levels"):
        encode(nested(MAX_DEPTH // levels + 1, make))


def test_a_circle_is_refused_and_not_followed_for_ever() -> None:
    circle: list[Any] = []
    circle += [circle, circle]
    loop: dict[str, Any] = {"a": np.zeros(3)}
    loop["self"] = (loop, [loop])
    for tree in (circle, loop, {"x": [circle]}):
        with pytest.raises(EncodeError, match=r"contains itself"):
            encode(tree)


def test_depth_on_a_full_stack_is_an_error_and_not_a_crash() -> None:
    tree = nested(MAX_DEPTH, WRAPS["list"][0])
    blob = encode(tree).blob

    def call(frames: int, function: Any) -> Any:
        return function() if frames == 0 else call(frames - 1, function)

    frames = sys.getrecursionlimit() - 400
    with pytest.raises(EncodeError, match="nested too deep"):
        call(frames, lambda: encode(tree))
    with pytest.raises(EncodeError, match="nested too deep"):
        call(frames, lambda: encode(nested(MAX_DEPTH // 2, WRAPS["tuple"][0])) and encode((tree[0],)))
    if sys.version_info < (3, 12):  # where C calls count on the same stack
        with pytest.raises(DecodeError, match="nested too deep"):
            call(frames, lambda: decode(blob, []))


# -- Structs ----------------------------------------------------------------------------------------------------------


class Image(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    pixel_data: np.ndarray[Any, Any]
    shape_hint: tuple[int, ...] = ()
    mask: NDArray[np.bool_] | None = None


class Request(msgspec.Struct, tag="request"):
    id: str
    image: Image
    images: list[Image]
    raw: bytes
    when: datetime
    anything: Any
    by_pair: dict[tuple[int, int], float]
    scale: np.float32
    big: int = 0
    unset: int | msgspec.UnsetType = msgspec.UNSET
    made: bool = False

    def __post_init__(self) -> None:
        self.made = True


def a_request() -> Request:
    image = Image(np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3), (2, 3))
    other = Image(np.zeros(3), mask=np.ones(3, bool))
    return Request(
        "r1",
        image,
        [other, image],
        b"x" * OUT_OF_BAND,
        datetime(2026, 1, 1),
        {"t": (1, {(1,): bytearray(b"b")})},
        {(1, 2): 0.5},
        np.float32(0.25),
        1 << 80,
    )


def test_a_struct_with_arrays_comes_back_as_that_struct() -> None:
    request = a_request()
    found = round_trip(request, Request)
    assert type(found) is Request
    assert type(found.image) is Image
    assert found.image.pixel_data is found.images[1].pixel_data
    for name in ("id", "raw", "when", "anything", "by_pair", "scale", "big", "unset", "made"):
        assert_same(getattr(found, name), getattr(request, name))
    for result, image in zip([found.image, *found.images], [request.image, *request.images], strict=True):
        assert_same(result.pixel_data, image.pixel_data)
        assert_same(result.mask, image.mask)
        assert_same(result.shape_hint, image.shape_hint)


def test_a_struct_comes_back_as_a_dict_without_a_type() -> None:
    found = round_trip(a_request())
    assert found["type"] == "request"
    assert "unset" not in found
    assert_same(found["image"], {"pixelData": a_request().image.pixel_data, "shapeHint": (2, 3)})
    assert found["images"][0]["mask"].all()


def test_encoding_a_struct_leaves_it_as_it_was() -> None:
    request = a_request()
    encode(request)
    assert type(request.image.pixel_data) is np.ndarray
    assert request.image.shape_hint == (2, 3)


class Plain(msgspec.Struct, array_like=True):
    id: str
    ids: list[int]
    shape: tuple[int, ...] = (1,)


def test_a_struct_without_arrays_comes_back_too() -> None:
    assert round_trip(Plain("a", [1, 2], (3, 4)), Plain) == Plain("a", [1, 2], (3, 4))
    assert round_trip(Plain("a", [1, 2], (3, 4))) == ["a", [1, 2], (3, 4)]


class Flat(msgspec.Struct):
    id: str
    ids: list[int]
    when: datetime
    next: Any = None


def test_a_struct_of_plain_fields_is_just_msgpack() -> None:
    flat = Flat("a", [1, 2], datetime.now(timezone.utc), Flat("b", [], datetime.now(timezone.utc)))
    assert encode([flat]) == Encoded(pack([flat]), [])
    assert round_trip(flat, Flat).when == flat.when


def test_what_is_wrong_in_a_struct_is_named_by_its_path() -> None:
    with pytest.raises(EncodeError, match=r"^\$\[0\]\.next\.next: set can't be encoded"):
        encode([Flat("a", [], datetime.now(timezone.utc), Flat("b", [], datetime.now(timezone.utc), {1}))])
    with pytest.raises(EncodeError, match=r"^\$\.x: OrderedDict can't be encoded"):
        encode({"x": collections.OrderedDict()})


def test_a_struct_with_a_field_that_is_not_there_is_refused() -> None:
    flat = Flat("a", [], datetime.now(timezone.utc))
    del flat.ids
    for tree in (flat, [flat, (1,)]):
        with pytest.raises(EncodeError, match="unset"):
            encode(tree)


@pytest.mark.parametrize(
    "tree", [{"id": "a", "ids": ["x"]}, {"id": (1,)}, {"id": np.zeros(3)}, np.zeros(3), np.float64(3), np.void(b"a")]
)
def test_what_does_not_fit_the_type_is_a_decode_error(tree: Any) -> None:
    for type in (Flat, dict[str, int], Plain, list[int], str):
        with pytest.raises(DecodeError, match="does not fit the type asked for"):
            round_trip(tree, type)


def test_a_list_is_no_array_where_the_type_asks_for_one() -> None:
    with pytest.raises(DecodeError, match=r"Expected `numpy.ndarray`.*pixelData"):
        round_trip({"pixelData": [1, 2]}, Image)


class Dated(msgspec.Struct):
    raw: bytes
    when: datetime
    anything: Any


@pytest.mark.parametrize("name", ["raw", "when"])
@pytest.mark.parametrize("anything", [None, (1,), np.zeros(1)], ids=["plain", "extension", "array"])
def test_a_field_of_another_kind_is_not_converted_whatever_else_is_in_the_message(name: str, anything: Any) -> None:
    tree = {"raw": b"abc", "when": datetime(2026, 1, 1), "anything": anything}
    assert round_trip(tree, Dated).when == tree["when"]
    with pytest.raises(DecodeError, match=rf"Expected `(bytes|datetime)`, got `(str|int)` - at `\$\.{name}`"):
        round_trip({**tree, name: "YWJj" if name == "raw" else 5}, Dated)


def test_a_type_that_can_not_be_decoded_into_is_refused_at_once() -> None:
    with pytest.raises(TypeError):
        Decoder(int | str | bytes)


# -- tensors ----------------------------------------------------------------------------------------------------------


class Tensor:
    """An array that is known by DLPack alone."""

    def __init__(self, array: NDArray[Any], device: int = 1) -> None:
        self.array = array
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


def test_a_host_tensor_is_taken_as_an_array_without_a_copy() -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    encoded = encode({"t": Tensor(array), "strided": [Tensor(array[::2, 1::2])], "again": Tensor(array)})
    assert [buffer.ctypes.data - array.ctypes.data for buffer in encoded.buffers] == [0, 2]
    found = decode(encoded.blob, travel(encoded))
    assert found["t"] is found["again"]
    assert_same(found["strided"][0], np.ascontiguousarray(array[::2, 1::2]))


def test_a_tensor_on_a_device_is_refused_with_the_way_out() -> None:
    with pytest.raises(EncodeError, match=r"^\$\.t: a Tensor on a device \(DLPack type 2\).*call \.cpu\(\)"):
        encode({"t": Tensor(np.zeros(3), device=2)})


def test_a_tensor_that_numpy_can_not_read_is_refused() -> None:
    broken = type("Broken", (), {"__dlpack__": lambda self: 3, "__dlpack_device__": lambda self: (1, 0)})()
    with pytest.raises(EncodeError, match=r"^\$\[0\]: numpy can't read this Broken"):
        encode([broken])


def test_many_short_lived_tensors_are_told_apart() -> None:
    array = np.arange(100)
    encoded = encode(
        [Tensor(array[:1]), *(Tensor(array[:1]) for _ in range(50)), *(Tensor(array[i:][:1]) for i in range(99))]
    )
    found = decode(encoded.blob, travel(encoded))
    assert [int(each[0]) for each in found] == [0] * 51 + list(range(99))
    assert len(encoded.buffers) == 99


@pytest.fixture(scope="module")
def paddle() -> Any:
    return pytest.importorskip("paddle")


@pytest.mark.parametrize(
    "dtype",
    [
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
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    ],
)
def test_a_paddle_tensor_on_the_host_is_taken_without_a_copy(paddle: Any, dtype: str) -> None:
    whole = paddle.arange(24, dtype="float32").reshape([4, 6]).astype(dtype)
    expected = (np.arange(24).reshape(4, 6) + 0.0).astype(np.float32).astype(np.dtype(dtype))
    for tensor, array in ((whole, expected), (whole[1:3], expected[1:3])):
        encoded = encode({"t": tensor})
        assert encoded.buffers[0].ctypes.data == tensor.data_ptr()
        assert_same(decode(encoded.blob, travel(encoded))["t"], np.ascontiguousarray(array))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paddle_tensors_of_any_shape_and_layout_come_back(paddle: Any, dtype: str) -> None:
    base = paddle.arange(24, dtype="float32").reshape([4, 6]).astype(dtype)
    for tensor in (base.t(), base[1:, 2:], base[0, 0], base[:0], base.reshape([2, 3, 4])):
        found = round_trip([tensor])[0]
        assert found.dtype == np.dtype(dtype)
        assert found.shape == tuple(tensor.shape)
        assert found.astype("f4").tolist() == tensor.astype("float32").numpy().tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_a_paddle_tensor_lives_as_long_as_its_message(paddle: Any, dtype: str) -> None:
    tensor = paddle.ones([100_000]).astype(dtype)
    encoded = encode({"t": tensor})
    del tensor
    gc.collect()
    others = [paddle.full([100_000], 7).astype(dtype) for _ in range(8)]
    assert (decode(encoded.blob, travel(encoded))["t"].astype("f4") == 1).all()
    assert len(others) == 8


def test_a_paddle_tensor_that_wants_gradients_is_taken_for_its_values(paddle: Any) -> None:
    tensor = paddle.ones([3])
    tensor.stop_gradient = False
    assert_same(round_trip(tensor * 2), np.full(3, 2, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_a_torch_tensor_on_the_host_is_taken_without_a_copy(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(getattr(torch, dtype)).requires_grad_()
    encoded = encode({"t": tensor})
    assert encoded.buffers[0].ctypes.data == tensor.data_ptr()
    expected = np.arange(24, dtype=np.float32).reshape(4, 6).astype(np.dtype(dtype))
    assert_same(decode(encoded.blob, travel(encoded))["t"], expected)


def test_neither_paddle_nor_torch_is_imported() -> None:
    program = "import sys, fmq.codec; sys.exit(any(name in sys.modules for name in ('paddle', 'torch')))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


# -- hostile bytes ----------------------------------------------------------------------------------------------------

VIEW = np.frombuffer(bytes(24), np.uint8)


def ext(code: int, *payload: Any) -> bytes:
    return pack(Ext(code, pack(list(payload))))


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "trailing bytes": b"\x01\x01",
    "cut off": pack(REQUEST)[:-5],
    "a list of 4 G items": b"\xdd\xff\xff\xff\xff",
    "nested lists of 256 M items": b"\xdd\x10\x00\x00\x00" * 50,
    "a dict of 4 G items": b"\xdf\xff\xff\xff\xff",
    "a string of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "an extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "no UTF-8": b"\xa2\xff\xff",
    "lists without end": b"\x91" * 100_000,
    "dicts without end": b"\x81\x01" * 100_000,
    "a dict as a key": b"\x81\x80\x01",
    "an array as a key": b"\x81" + ext(1, 0, "|u1", [24]) + b"\x01",
    "a wrong timestamp": b"\xd7\xff" + b"\xff" * 8,
    "an unknown code": pack(Ext(99, b"")),
    "a negative code": pack(Ext(-2, b"")),
    "an array without a payload": pack(Ext(1, b"")),
    "an array that is an int": pack(Ext(1, b"\x01")),
    "an array of too few parts": ext(1, 0, "<f4"),
    "an array of too many parts": ext(1, 0, "<f4", [6], 1),
    "an array in another tuple": pack(Ext(1, pack([Ext(5, b"")]))),
    "an index that is a str": ext(1, "0", "<f4", [6]),
    "an index that is a bool": ext(1, False, "<f4", [6]),
    "an index out of range": ext(1, 1, "<f4", [6]),
    "a negative index": ext(1, -1, "<f4", [6]),
    "a huge index": ext(1, 2**64 - 1, "<f4", [6]),
    "no dtype": ext(1, 0, "", [6]),
    "an unknown dtype": ext(1, 0, "<f3", [6]),
    "an object dtype": ext(1, 0, "|O", [3]),
    "another object dtype": ext(1, 0, "O8", [3]),
    "a structured dtype": ext(1, 0, "f4,f4", [3]),
    "a dtype with a shape": ext(1, 0, "(2,)f4", [3]),
    "a dtype by another name": ext(1, 0, "float32", [6]),
    "a dtype without byte order": ext(1, 0, "f4", [6]),
    "a unit by another name": ext(1, 0, "<M8[1s]", [3]),
    "an unknown unit": ext(1, 0, "<M8[xs]", [3]),
    "a unit that is too large": ext(1, 0, "<M8[99999999999s]", [3]),
    "strings of negative length": ext(1, 0, "<U-6", [1]),
    "strings that are too long": ext(1, 0, "<U9999999999", [1]),
    "bytes in a byte order": ext(1, 0, "<V24", [1]),
    "a tag of a million characters": ext(1, 0, "<f4" * 300_000, [6]),
    "too small a shape": ext(1, 0, "<f4", [5]),
    "too large a shape": ext(1, 0, "<f4", [7]),
    "no dimensions for 24 bytes": ext(1, 0, "<f4", []),
    "negative dimensions": ext(1, 0, "<f4", [-2, -3]),
    "a dimension that is a float": ext(1, 0, "<f4", [6.0]),
    "a product beyond 64 bits": ext(1, 0, "<f4", [2**32, 2**32, 6]),
    "a product that is right modulo 2**64": ext(1, 0, "|u1", [2**63, 2, 24]),
    "too many dimensions": ext(1, 0, "|u1", [24] + [1] * 65),
    "a million huge dimensions": ext(1, 0, "|u1", [2**63] * 1_000_000),
    "a huge empty array": ext(1, None, "<f4", [2**62, 2**62, 0]),
    "an empty dimension beyond 64 bits": ext(1, None, "<f4", [2**64 - 1, 0]),
    "an array that is not empty without a buffer": ext(1, None, "<f4", [6]),
    "an empty array with a buffer": ext(1, 0, "<f4", [0]),
    "elements of no size with a buffer": ext(1, 0, "|V0", [24]),
    "bytes out of range": pack(Ext(2, pack(1))),
    "bytes by a negative index": pack(Ext(2, pack(-1))),
    "bytes within": pack(Ext(2, pack(b"abc"))),
    "one buffer copied for ever": pack([Ext(2, pack(0))] * 2),
    "one buffer copied for ever to bytearrays": pack([Ext(2, pack(0)), Ext(3, pack(0))]),
    "a bytearray out of range": pack(Ext(3, pack(7))),
    "a bytearray of a str": pack(Ext(3, pack("abc"))),
    "a memoryview out of range": pack(Ext(4, pack(7))),
    "a memoryview of nothing": pack(Ext(4, b"")),
    "a tuple that is a dict": pack(Ext(5, pack({}))),
    "a tuple that is cut off": pack(Ext(5, b"\x92\x01")),
    "a tuple with trailing bytes": pack(Ext(5, b"\x91\x01\x01")),
    "a dict of three": ext(6, 1, 2, 3),
    "a dict that is an int": pack(Ext(6, b"\x01")),
    "a dict with a list as a key": ext(6, [], 1),
    "a datetime that is none": ext(8, "yesterday", False, None),
    "a datetime without an offset": ext(8, "2026-01-01T00:00:00", False),
    "a datetime with a fold of 2": ext(8, "2026-01-01T00:00:00", 2, None),
    "a datetime a day off": ext(8, "2026-01-01T00:00:00", False, 86_400_000_000),
    "a datetime ages off": ext(8, "2026-01-01T00:00:00", False, -(2**63)),
    "a scalar of too few bytes": ext(9, "<f4", b"abc"),
    "a scalar of too many bytes": ext(9, "<f4", b"abcde"),
    "a scalar of an object": ext(9, "|O", bytes(8)),
    "a scalar of a GiB": ext(9, "|V1073741824", b""),
    "a string scalar that is no UTF-8": ext(9, "U", b"\xff"),
}


def tuples(depth: int) -> bytes:
    value: Any = 1
    for _ in range(depth):
        value = Ext(5, pack([value]))
    return pack(value)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes_are_a_decode_error(case: str) -> None:
    for decoder in (Decoder(), Decoder(Flat), Decoder(Image), Decoder(list[Any])):
        with pytest.raises(DecodeError) as raised:
            decoder.decode(HOSTILE[case], [VIEW])
        assert len(str(raised.value)) < 500


def test_bytes_that_need_a_buffer_are_a_decode_error_without_one() -> None:
    for value in (np.zeros(3), b"x" * OUT_OF_BAND, bytearray(OUT_OF_BAND), memoryview(b"abc")):
        for decoder in (Decoder(), Decoder(list[Any])):
            with pytest.raises(DecodeError, match="refers to buffer 0, and has 0"):
                decoder.decode(encode([value]).blob, [])


@pytest.mark.parametrize("depth", [MAX_DEPTH // 2 + 1, 2_000])
def test_extensions_nested_without_end_are_a_decode_error(depth: int) -> None:
    for views in ([], [VIEW]):
        with pytest.raises(DecodeError, match="nested"):
            decode(tuples(depth), views)


def test_a_buffer_may_be_looked_at_in_more_than_one_way() -> None:
    blob = pack([Ext(1, pack([0, "<f4", [6]])), Ext(1, pack([0, "|u1", [2, 12]])), Ext(4, pack(0)), Ext(2, pack(0))])
    found = decode(blob, [VIEW])
    assert found[0].ctypes.data == found[1].ctypes.data
    assert found[2] == found[3] == bytes(24)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_many_threads_encode_and_decode_at_once() -> None:
    decoder = Decoder()
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            start.wait(10)
            for turn in range(300):
                array = np.full((3, 5), number * 1000 + turn)
                tree = {"n": number, "t": (turn, array, [array]), "big": 1 << (64 + number), "plain": [turn] * 50}
                encoded = encode(tree)
                assert len(encoded.buffers) == 1
                assert_same(decoder.decode(encoded.blob, travel(encoded)), tree)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


@pytest.mark.parametrize(
    "source",
    [np.zeros(1 << 25, np.uint8), np.zeros(1 << 22, "U4"), np.zeros(1 << 24, ml_dtypes.bfloat16)[::2]],
    ids=["bytes", "strings", "strided"],
)
def test_other_threads_run_while_a_large_buffer_is_copied(source: NDArray[Any]) -> None:
    target = np.zeros(source.nbytes, np.uint8)
    turns = [0]
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    # Nobody is made to give the interpreter lock away, so whoever runs was let.
    sys.setswitchinterval(100)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = turns[0]
        for _ in range(50):  # A busy machine may have no processor for the other thread during one copy.
            copy_buffer(source, target)
            if turns[0] > before:
                break
        assert turns[0] > before
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join(60)
