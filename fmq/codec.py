"""The default codec: a tree of Python objects to a msgpack blob and a list of buffers, and back without a copy.

What msgpack has is written as msgpack has it. What it lacks, or would blur, is one of its extensions, so that it comes
back exactly as it was. Arrays are not in the blob at all: it refers to them by their index in the list of buffers,
which the transport places in shared memory. They come back as views of it.

The wire format is msgpack with these extension codes. "packed" means that the payload is msgpack, extensions included;
an index is an int, from 0.

    code  name        payload
    ----  ----------  -------------------------------------------------------------------------------------------------
     -1   (msgpack)   its own timestamp: a datetime in ``timezone.utc``
      1   ARRAY       packed [index, dtype tag, [dimension, ...]]; the index is nil, and no buffer there, if it is empty
      2   BYTES       packed index: bytes of OUT_OF_BAND bytes or more
      3   BYTEARRAY   packed index, or packed bin: a shorter one
      4   MEMORYVIEW  packed index, or packed bin: an empty one
      5   TUPLE       packed array of the items
      6   DICT        packed array [key, value, key, value, ...]: a dict with keys that msgpack lacks
      7   INT         little-endian two's complement of any length: an int below -2**63 or above 2**64 - 1
      8   DATETIME    packed [local time in ISO 8601, fold, offset in microseconds]: a datetime in another time zone, of
                      which the offset is kept, or a naive one, of which it is nil
      9   SCALAR      packed [dtype tag, bin]: a numpy scalar; with the tag ``S`` the bin is a string of bytes itself,
                      with ``U`` a str in UTF-8

A buffer is the elements of an array in C order, or the bytes. The tags are those of ``fmq.arrays``.

Encoding goes from cheap to dear. A tree of nothing but plain objects is recognised by the types of its items and
encoded by a single call (0.7 + 0.2 us for a request of six fields and 20 ids). Else it is rewritten: copied along
those paths that lead to something special, with the special replaced by its extension. Ints and strings are looked at
one by one only after msgspec has refused one. Decoding is a single call of msgspec that hands every extension to a
hook.

All functions may be called from any thread, and at once; the caller must not change a tree while it is being encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime, timedelta, timezone
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from fmq.arrays import Array, Buffer, Buffers, array_over, copy_buffer, from_tensor, scalar_from, tag_of
from fmq.errors import DecodeError, DTypeError, EncodeError

__all__ = [
    "MAX_DEPTH",
    "OUT_OF_BAND",
    "DTypeError",
    "DecodeError",
    "Decoder",
    "EncodeError",
    "Encoded",
    "copy_buffer",
    "decode",
    "encode",
]

OUT_OF_BAND: Final = 4096
"""bytes and bytearrays of at least so many bytes leave the blob. Arrays and memoryviews always do, unless empty."""

MAX_DEPTH: Final = 500
"""Levels of nesting. A tuple counts twice, and so does a dict with keys that msgpack lacks: two calls to decode them.

Half of the interpreter's default recursion limit, so that a message that was encoded can be decoded too.
"""

ARRAY: Final = 1
BYTES: Final = 2
BYTEARRAY: Final = 3
MEMORYVIEW: Final = 4
TUPLE: Final = 5
DICT: Final = 6
INT: Final = 7
DATETIME: Final = 8
SCALAR: Final = 9

_NUMBERS: Final = frozenset({float, bool, type(None)})
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_KEYS: Final = _SCALARS | {bytes}


class Encoded(NamedTuple):
    """A message as it travels.

    ``buffers`` are the arrays themselves, of any dtype and layout, none of them empty and none twice: for each, write
    its ``nbytes`` with ``copy_buffer`` and hand them to ``decode`` in the same order. Until then they must not change.
    """

    blob: bytes
    buffers: list[Array]


_new = tuple.__new__
_pack = msgspec.msgpack.Encoder().encode
_unpack_array = msgspec.msgpack.Decoder(tuple[int | None, str, tuple[Annotated[int, msgspec.Meta(ge=0)], ...]]).decode
_unpack_scalar = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_unpack_datetime = msgspec.msgpack.Decoder(tuple[str, bool, int | None]).decode
_unpack_index = msgspec.msgpack.Decoder(int).decode
_unpack_index_or_bytes = msgspec.msgpack.Decoder(int | bytes).decode


# -- encode -----------------------------------------------------------------------------------------------------------


def encode(obj: Any) -> Encoded:
    """Encode a tree of dict, list, tuple, str, bytes, bytearray, memoryview, int, float, bool, None, datetime, arrays.

    Arrays, at any depth, are numpy arrays of any dtype but the structured, object and StringDType ones, numpy scalars,
    and host tensors with ``__dlpack__``. No array is copied here. One that occurs twice is stored once. msgspec Structs
    are encoded as msgspec does. Subclasses of these types are refused, since they would arrive as something else.

    Raises EncodeError, which names the path in the tree. For an array whose dtype can't travel it is a DTypeError.
    """
    try:
        try:
            if _is_plain(obj, 1):
                # As Encoded(...), in 0.14 us, not 0.22.
                return _new(Encoded, (_pack(obj), []))
            return _Writer(thorough=False).encode(obj)
        except (OverflowError, UnicodeEncodeError):
            return _Writer(thorough=True).encode(obj)
    except EncodeError:
        raise
    except RecursionError:
        raise EncodeError("the message is nested too deep for what is left of the stack; flatten it") from None
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        # What is left is what msgspec says of Structs with fields that are unset, and of strings beyond 4 GiB.
        raise EncodeError(f"the message can't be encoded: {error}") from error


def _is_plain(value: Any, depth: int) -> bool:
    """Whether msgpack has all of it, but for too large ints and invalid strings, which msgspec finds itself."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if depth > MAX_DEPTH:
        return False
    if kind is dict:
        # One loop: 0.25 us for six items, where C-speed checks of keys and of values take 0.4, and find no nested ones.
        for key, item in value.items():
            if type(key) is not str and type(key) not in _KEYS:
                return False
            if type(item) not in _SCALARS and not _is_plain(item, depth + 1):
                return False
        return True
    if kind is list:
        if value and type(value[0]) in _SCALARS:
            # 8 ns an item if all are of one type, as token ids are. A set of the types takes 13, a loop 17 to 25.
            kinds = [*map(type, value)]
            if kinds.count(kinds[0]) == len(kinds) or _SCALARS.issuperset(kinds):
                return True
        for item in value:  # noqa: SIM110 - a generator would double the use of the stack
            if type(item) not in _SCALARS and not _is_plain(item, depth + 1):
                return False
        return True
    if kind is bytes:
        return len(value) < OUT_OF_BAND
    if kind is datetime:
        return value.tzinfo is timezone.utc and not value.fold
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            item = getattr(value, name, msgspec.UNSET)
            if type(item) not in _SCALARS and item is not msgspec.UNSET and not _is_plain(item, depth + 1):
                return False
        return True
    return False


class _Writer:
    """Rewrites one tree. The methods return what stands for a value in the blob: itself, if msgpack has all of it.

    ``thorough`` looks at each int and each string as well. One call deep for each level of the tree.
    """

    __slots__ = ("_buffers", "_passed", "_path", "_thorough")

    def __init__(self, thorough: bool) -> None:
        self._buffers = Buffers()
        self._thorough = thorough
        self._passed = _NUMBERS if thorough else _SCALARS
        self._path: list[Any] = []

    def encode(self, obj: Any) -> Encoded:
        blob = _pack(_WRITERS.get(type(obj), _Writer._other)(self, obj, 1))
        return Encoded(blob, self._buffers.arrays)

    def _container(self, value: Any, depth: int) -> Any:
        """What stands for a dict, list, tuple or Struct. One method for all: one call for each level of the tree."""
        kind = type(value)
        odd = kind is tuple or (kind is dict and self._has_odd_keys(value))
        depth += odd
        self._check_depth(depth)
        passed = self._passed
        items: Iterable[tuple[Any, Any]]
        if kind is dict:
            items = value.items()
        elif kind is not list and kind is not tuple:
            items = [(name, getattr(value, name, msgspec.UNSET)) for name in value.__struct_fields__]
            passed = passed | {msgspec.UnsetType}
        else:
            items = () if passed.issuperset(map(type, value)) else enumerate(value)
        path = self._path
        path.append(None)
        changed = {}
        for key, item in items:
            if (of := type(item)) not in passed:
                path[-1] = key
                written = _WRITERS.get(of, _Writer._other)(self, item, depth + 1)
                if written is not item:
                    changed[key] = written
        path.pop()
        if changed:
            value = _replace(value, changed)
        if odd:
            return Ext(TUPLE, _pack(value)) if kind is tuple else self._pairs(value, depth)
        return value

    def _has_odd_keys(self, value: dict[Any, Any]) -> bool:
        if not _KEYS.issuperset(map(type, value)):
            return True
        return self._thorough and any(self._key(key, 0) is not key for key in value)

    def _pairs(self, value: dict[Any, Any], depth: int) -> Ext:
        pairs: list[Any] = []
        for key, item in value.items():
            pairs += (self._key(key, depth), item)
        return Ext(DICT, _pack(pairs))

    def _key(self, key: Any, depth: int) -> Any:
        kind = type(key)
        if kind is bytes or kind in self._passed:
            return key
        self._path.append(key)
        if kind is tuple:
            self._check_depth(depth + 2)
            written = Ext(TUPLE, _pack([self._key(item, depth + 2) for item in key]))
        elif kind in _SCALARS or kind is datetime or isinstance(key, np.generic):
            written = _WRITERS.get(kind, _Writer._other)(self, key, depth)
        else:
            raise self._error(
                f"{kind.__name__} can't be a key of a dict; use a str, a number, bytes or a tuple of these"
            )
        self._path.pop()
        return written

    # -- leaves -------------------------------------------------------------------------------------------------------

    def _int(self, value: int, depth: int) -> Any:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return Ext(INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def _str(self, value: str, depth: int) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self._error(
                f"the str has a lone surrogate at {error.start} and is not valid Unicode; send it as bytes, by "
                "value.encode('utf-8', 'surrogatepass')"
            ) from None
        return value

    def _bytes(self, value: bytes, depth: int) -> Any:
        if len(value) < OUT_OF_BAND:
            return value
        return Ext(BYTES, _pack(self._buffers.append(np.frombuffer(value, np.uint8))))

    def _bytearray(self, value: bytearray, depth: int) -> Ext:
        small = len(value) < OUT_OF_BAND
        return Ext(BYTEARRAY, _pack(value if small else self._buffers.append(np.frombuffer(value, np.uint8))))

    def _memoryview(self, value: memoryview, depth: int) -> Ext:
        try:
            if value.format != "B" or value.ndim != 1:
                raise self._error(
                    f"a memoryview of format {value.format!r} with {value.ndim} dimensions can't be encoded; send "
                    "np.asarray(view), or view.cast('B')"
                )
            return Ext(MEMORYVIEW, _pack(self._buffers.append(np.asarray(value)) if value.nbytes else b""))
        except ValueError as error:
            raise self._error(f"the memoryview can't be read: {error}") from error

    def _datetime(self, value: datetime, depth: int) -> Any:
        if value.tzinfo is timezone.utc and not value.fold:
            return value
        offset = value.utcoffset()
        # The offset apart: fromisoformat takes one of less than a second for none at all.
        microseconds = None if offset is None else offset // timedelta(microseconds=1)
        return Ext(DATETIME, _pack((value.replace(tzinfo=None).isoformat(), bool(value.fold), microseconds)))

    def _array(self, value: Array, depth: int) -> Ext:
        tag = self._tag(value.dtype)
        index = self._buffers.add(value, tag) if value.nbytes else None
        return Ext(ARRAY, _pack((index, tag, value.shape)))

    def _scalar(self, value: np.generic) -> Ext:
        if isinstance(value, np.str_):
            # str(value) would drop trailing NULs.
            return Ext(SCALAR, _pack(("U", self._str(str.__str__(value), 0).encode())))
        if isinstance(value, np.bytes_):
            return Ext(SCALAR, _pack(("S", bytes(value))))
        return Ext(SCALAR, _pack((self._tag(value.dtype), value.tobytes())))

    def _tensor(self, value: Any, depth: int) -> Ext:
        try:
            return self._array(from_tensor(value), depth)
        except DTypeError:
            raise
        except EncodeError as error:
            raise self._error(str(error)) from error.__cause__

    def _tag(self, dtype: np.dtype[Any]) -> str:
        try:
            return tag_of(dtype)
        except DTypeError as error:
            raise DTypeError(f"{self._where()}: {error}") from None

    def _other(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, np.generic):
            return self._scalar(value)
        if isinstance(value, msgspec.Struct):
            return self._container(value, depth)
        if isinstance(value, np.ma.MaskedArray):
            raise self._error("a masked array would lose its mask; send .filled(), or .data and .mask as two arrays")
        if isinstance(value, np.ndarray):
            raise self._error(f"{kind.__name__} would arrive as a plain array; send np.asarray() of it")
        if hasattr(kind, "__dlpack__"):
            return self._tensor(value, depth)
        for base in (*_WRITERS, float):
            if isinstance(value, base):
                raise self._error(
                    f"{kind.__name__} can't be encoded, for it would arrive as a plain {base.__name__}; convert it to "
                    f"{base.__name__} before"
                )
        raise self._error(
            f"{kind.__name__} can't be encoded; convert it to a supported type (dict, list, tuple, str, bytes, int, "
            "float, bool, None, datetime, a numpy array or a msgspec.Struct)"
        )

    # -- errors -------------------------------------------------------------------------------------------------------

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH} levels, or an object that contains itself; flatten it")

    def _error(self, message: str) -> EncodeError:
        return EncodeError(f"{self._where()}: {message}")

    def _where(self) -> str:
        path = self._path
        head, tail = (path, []) if len(path) <= 20 else (path[:8], path[-4:])
        return "$" + "".join(map(_step, head)) + ("..." + "".join(map(_step, tail)) if tail else "")


def _replace(value: Any, changed: dict[Any, Any]) -> Any:
    """A copy of a container with some of its items replaced; of a tuple, a list."""
    if isinstance(value, dict):
        return value | changed
    if isinstance(value, msgspec.Struct):
        # Still a Struct, so that msgspec sees to its tag, its renames and its defaults.
        value = copy(value)
        for name, item in changed.items():
            msgspec.structs.force_setattr(value, name, item)
        return value
    items = list(value)
    for index, item in changed.items():
        items[index] = item
    return items


def _step(key: Any) -> str:
    if type(key) is str and key.isidentifier():
        return f".{key}"
    text = repr(key)
    return f"[{text}]" if len(text) <= 60 else f"[{text[:57]}...]"


_WRITERS: Final[Mapping[type, Callable[[_Writer, Any, int], Any]]] = MappingProxyType(
    {
        dict: _Writer._container,
        list: _Writer._container,
        tuple: _Writer._container,
        str: _Writer._str,
        int: _Writer._int,
        bytes: _Writer._bytes,
        bytearray: _Writer._bytearray,
        memoryview: _Writer._memoryview,
        datetime: _Writer._datetime,
        np.ndarray: _Writer._array,
        np.memmap: _Writer._array,
    }
)


# -- decode -----------------------------------------------------------------------------------------------------------


class Decoder:
    """Decodes messages into ``type``: anything msgspec can check and convert to, a Struct with array fields among them.

    Fields annotated ``np.ndarray`` or ``NDArray[...]`` take any array; what dtype and shape it has is not checked.
    Raises what msgspec does (TypeError) if it has no way to decode into ``type``.
    """

    __slots__ = ("_type", "_typed")

    def __init__(self, type: Any = Any) -> None:
        self._type = type
        self._typed = None if type is Any else msgspec.msgpack.Decoder(type, ext_hook=_give_up)

    def decode(self, blob: bytes | memoryview, views: Sequence[Buffer]) -> Any:
        """The message in ``blob``, whose buffers are ``views``: contiguous 1-D uint8 arrays, aligned to 64 bytes.

        Arrays and memoryviews of the result look into the views and keep them alive (an array that of which the view is
        a slice, if it is one). Arrays are writable if the view is, memoryviews never. bytes and bytearrays are copies.
        One buffer referred to twice with the same dtype and shape is the same array twice.

        Both arguments may hold anything: raises DecodeError if they are not what ``encode`` writes, or if the message
        does not fit the type.
        """
        try:
            if self._typed is None:
                # A single call, if there are no extensions: 0.5 us for a request of six fields, as bare msgspec.
                return _decode_alone(blob) if not views else _decode_tree(blob, views)
            if not views:
                try:
                    return self._typed.decode(blob)
                except (msgspec.ValidationError, _ExtensionFoundError):
                    # Of extensions msgspec knows nothing, so the whole tree first, then the type; 0.8 us, not 0.4.
                    pass
            return self._convert(_decode_tree(blob, views))
        except msgspec.ValidationError as error:
            raise DecodeError(f"the message does not fit the type asked for: {error}") from error
        except (msgspec.DecodeError, TypeError, UnicodeDecodeError) as error:
            # A TypeError is what msgspec before 0.19 says of keys that can't be hashed.
            raise DecodeError(f"the {len(blob)} bytes of the message are damaged, or foreign: {error}") from error
        except RecursionError:
            raise DecodeError("the message is nested too deep") from None

    def _convert(self, tree: Any) -> Any:
        try:
            return msgspec.convert(tree, self._type, builtin_types=_BUILTIN)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            # What arrays and scalars raise where a dict or Struct is asked for, since msgspec takes them for mappings.
            raise DecodeError(f"the message does not fit the type asked for: {error}") from error


def decode(blob: bytes | memoryview, views: Sequence[Buffer]) -> Any:
    """``Decoder().decode(blob, views)``: Structs come back as dicts."""
    return _untyped.decode(blob, views)


class _ExtensionFoundError(Exception):
    """There is an extension in what was to be decoded straight into a type."""


def _give_up(code: int, data: memoryview) -> Any:
    raise _ExtensionFoundError


class _Reader:
    """Rebuilds what the extensions of one message stand for."""

    __slots__ = ("_arrays", "_copied", "_depth", "_views")

    def __init__(self, views: Sequence[Buffer]) -> None:
        self._views = views
        self._arrays: dict[bytes, Array] = {}
        self._copied: set[int] = set()
        self._depth = 0

    def rebuild(self, code: int, data: memoryview) -> Any:
        """The value of an extension; what msgspec calls for each. Raises DecodeError, or msgspec's."""
        if code == ARRAY:
            return self._array(data)
        if code in (TUPLE, DICT):
            # Right here, so that a level takes no more than two calls of the stack.
            self._depth += 1
            if self._depth > MAX_DEPTH // 2:
                raise DecodeError(f"the message is nested deeper than {MAX_DEPTH} levels")
            items = msgspec.msgpack.decode(data, ext_hook=self.rebuild)
            self._depth -= 1
            if type(items) is not list:
                raise DecodeError(f"the items of a tuple or dict are {type(items).__name__}, and not an array")
            return tuple(items) if code == TUPLE else _dict(items)
        if code == SCALAR:
            return _scalar(data)
        if code == DATETIME:
            return _datetime(data)
        if code == INT:
            return int.from_bytes(data, "little", signed=True)
        if code == BYTES:
            return self._view_to_copy(_unpack_index(data)).tobytes()
        if code == BYTEARRAY:
            found = _unpack_index_or_bytes(data)
            return bytearray(found if isinstance(found, bytes) else self._view_to_copy(found))
        if code == MEMORYVIEW:
            found = _unpack_index_or_bytes(data)
            return memoryview(found if isinstance(found, bytes) else self._view(found).data).toreadonly()
        raise DecodeError(f"the message has an extension of code {code}, which this version does not know")

    def _array(self, data: memoryview) -> Array:
        key = bytes(data)
        array = self._arrays.get(key)
        if array is None:
            index, tag, shape = _unpack_array(key)
            array = self._arrays[key] = array_over(None if index is None else self._view(index), tag, shape)
        return array

    def _view(self, index: int) -> Buffer:
        if not 0 <= index < len(self._views):
            raise DecodeError(f"the message refers to buffer {index}, and has {len(self._views)}")
        return self._views[index]

    def _view_to_copy(self, index: int) -> Buffer:
        # Else a few bytes of blob could ask for copies of one large buffer without end.
        if index in self._copied:
            raise DecodeError(f"the message refers to buffer {index} as bytes more than once")
        self._copied.add(index)
        return self._view(index)


def _dict(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise DecodeError(f"a dict of {len(items)} keys and values has a key without a value")
    try:
        return dict(zip(items[::2], items[1::2], strict=True))
    except TypeError as error:
        raise DecodeError(f"a dict in the message has a key that can't be one: {error}") from error


def _scalar(data: memoryview) -> Any:
    tag, content = _unpack_scalar(data)
    if tag == "U":
        return np.str_(content.decode())
    return np.bytes_(content) if tag == "S" else scalar_from(tag, content)


def _datetime(data: memoryview) -> datetime:
    iso, fold, offset = _unpack_datetime(data)
    try:
        zone = None if offset is None else timezone(timedelta(microseconds=offset))
        return datetime.fromisoformat(iso).replace(fold=fold, tzinfo=zone)
    except (OverflowError, ValueError) as error:
        raise DecodeError(f"the message has a datetime that can't be one: {iso[:50]!r}") from error


def _rebuild_alone(code: int, data: memoryview) -> Any:
    return _Reader(()).rebuild(code, data)


def _decode_tree(blob: bytes | memoryview, views: Sequence[Buffer]) -> Any:
    return msgspec.msgpack.decode(blob, ext_hook=_Reader(views).rebuild)


_BUILTIN: Final = (bytes, bytearray, memoryview, datetime)
"""What a decoded tree has of its own, so that msgspec makes none of these out of a str."""

_decode_alone = msgspec.msgpack.Decoder(ext_hook=_rebuild_alone).decode
_untyped = Decoder()
