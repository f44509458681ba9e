"""The pickle codec: whatever pickle can take, with every array and every large buffer out of band, in the ring.

For objects that the default codec refuses: instances of classes, functions, enum members, sets. Unpickling runs
whatever the sender asks for, so a consumer reads such messages only if it was told to; see ``fmq.encoding``.

The wire format is a pickle of protocol 5 whose out-of-band buffers are the buffers of the message, in order. In it

    an array     is ``_array(buffer, dtype, shape)``: of any layout, C-contiguous when it arrives. The dtype is the tag
                 of ``fmq.arrays``, or for the structured ones, which have no tag, the dtype itself. An empty array has
                 None for a buffer.
    a tensor     on the host (whatever has ``__dlpack__``) is the same, by its own dtype: bfloat16 stays bfloat16.
    memoryviews  are ``_memoryview(buffer)``.
    bytes        and bytearrays of OUT_OF_BAND bytes or more are persistent ids: a buffer stands for bytes, a tuple of
                 one buffer for a bytearray, an int for the one with that index, which came before. A pickle with
                 persistent ids follows the byte WITH_BYTES, for only it needs an unpickler that knows them.

Object arrays, subclasses of ndarray and everything else is as pickle has it, and so are buffers that other classes
hand to it as ``pickle.PickleBuffer``: from OUT_OF_BAND bytes on they are buffers of the message too.

pickle lets nobody see bytes but ``persistent_id``, which it calls for every object: 100,000 token ids take 6.6 ms with
it, and 1.4 without. So a message is pickled without, and once more, with it, if large bytes are found in the outcome,
which takes 0.4 ms to look for.

Reducers of ``multiprocessing`` are not used. Those of Paddle put each tensor in a file that stays if nobody loads it.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from fmq.arrays import Array, Buffer, Buffers, array_over, from_tensor, tag_of
from fmq.codec import OUT_OF_BAND, Encoded
from fmq.errors import DecodeError, DTypeError, EncodeError

__all__ = ["OUT_OF_BAND", "WITH_BYTES", "decode", "encode"]

WITH_BYTES: Final = b"+"
"""What precedes a pickle with persistent ids. No pickle of protocol 2 or later begins with it."""

_PROTOCOL: Final = 5

_BUFFER: Final = pickle.PickleBuffer(bytearray())
"""Stands for a buffer that is in the list already. Writable, or a private copy would come back as a read-only one."""

_LARGE_BYTES: Final = (
    re.compile(rb"B.[\x10-\xff]\x00\x00", re.DOTALL),
    re.compile(rb"\x96.[\x10-\xff]\x00{6}", re.DOTALL),
)
"""BINBYTES and BYTEARRAY8 with a length from OUT_OF_BAND to 64 KiB. One character first: that is found at 3 GB/s."""

_DEEPEST: Final = 50
"""How many levels down the part that can't be pickled is looked for."""

_PLAIN: Final = frozenset({str, bytes, bytearray, int, float, bool, type(None)})


# -- encode -----------------------------------------------------------------------------------------------------------


def encode(obj: Any) -> Encoded:
    """Encode anything that pickle can take. No array is copied here, and one that occurs twice is stored once.

    May ask an object for its state twice. Any thread may call it, and many at once; nothing of the message may change
    until the buffers are written.

    Raises EncodeError, which names the path to what can't be pickled, with the cause chained, whatever it was.
    """
    try:
        buffers, chunks = _pickle(_Pickler, obj)
        if _have_large_bytes(chunks):
            buffers, chunks = _pickle(_BytesPickler, obj)
            chunks.insert(0, WITH_BYTES)
    except RecursionError:
        raise EncodeError(
            "the message is nested too deep for pickle, or for what is left of the stack; flatten it"
        ) from None
    except MemoryError:
        raise
    except Exception as error:
        # Reducers are anybody's code and raise anything.
        raise _explained(obj, error) from error
    return Encoded(b"".join(chunks), buffers.arrays)


class _Buffers(Buffers):
    """The buffers of one message, and what else is to be known of them. The pickler's, which it does not know."""

    __slots__ = ("sources",)

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, Any] = {}
        """The array or tensor that a buffer was made of, by its index."""

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """What pickle calls for each PickleBuffer. True if it is to stay in the pickle."""
        if buffer is _BUFFER:
            return False
        # Contiguous: pickle refuses others before.
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True
        self.append(np.frombuffer(raw, np.uint8))
        return False


class _Sink:
    """The file that a pickle is written to: a list of its chunks, among them large strings of bytes themselves."""

    __slots__ = ("chunks", "write")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.write = self.chunks.append


class _Pickler(pickle.Pickler):
    """Puts arrays and tensors out of band."""

    def __init__(self, sink: _Sink, buffers: _Buffers) -> None:
        super().__init__(sink, _PROTOCOL, buffer_callback=buffers.take)
        self._buffers = buffers

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild an object, or NotImplemented for pickle's own way; pickle does not ask for built-in ones."""
        kind = type(obj)
        if kind is np.ndarray or kind is np.memmap:
            return NotImplemented if obj.dtype.hasobject else self._reduced(obj, obj)
        if kind is memoryview:
            return self._reduced_memoryview(obj)
        if hasattr(kind, "__dlpack__") and not isinstance(obj, np.ndarray):
            return self._reduced(obj, from_tensor(obj))
        return NotImplemented

    def _reduced(self, source: Any, array: Array) -> Any:
        dtype: Any = array.dtype
        try:
            tag = tag_of(dtype)
        except DTypeError:
            tag = dtype
        if not array.nbytes:
            return _array, (None, tag, array.shape)
        buffers = self._buffers
        new = len(buffers.arrays)
        index = buffers.add(array, tag)
        if index < new:
            # The same memory in another object. pickle knows the first one, and writes a reference.
            return _same, (buffers.sources[index],)
        buffers.sources[index] = source
        return _array, (_BUFFER, tag, array.shape)

    def _reduced_memoryview(self, view: memoryview) -> Any:
        if view.format != "B" or view.ndim != 1:
            raise EncodeError(
                f"a memoryview of format {view.format!r} with {view.ndim} dimensions can't be encoded; send "
                "np.asarray(view), or view.cast('B')"
            )
        if not view.nbytes:
            return _memoryview, (b"",)
        self._buffers.append(np.asarray(view))
        return _memoryview, (_BUFFER,)


class _BytesPickler(_Pickler):
    """Puts large bytes and bytearrays out of band as well. Slower: it is asked about each object there is."""

    def __init__(self, sink: _Sink, buffers: _Buffers) -> None:
        super().__init__(sink, buffers)
        self._large: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, obj: Any) -> Any:
        """What stands for large bytes; None for all else."""
        kind = type(obj)
        if (kind is not bytes and kind is not bytearray) or len(obj) < OUT_OF_BAND:
            return None
        known = self._large.get(id(obj))
        if known is not None:
            return known[0]
        # With the object, whose id must not become another's.
        self._large[id(obj)] = (len(self._large), obj)
        self._buffers.append(np.frombuffer(obj, np.uint8))
        return _BUFFER if kind is bytes else (_BUFFER,)


def _pickle(pickler: type[_Pickler], obj: Any) -> tuple[_Buffers, list[bytes]]:
    sink, buffers = _Sink(), _Buffers()
    pickler(sink, buffers).dump(obj)
    return buffers, sink.chunks


def _have_large_bytes(chunks: Sequence[bytes]) -> bool:
    """Whether there are bytes that should be out of band. An error on either side costs time, and is not wrong."""
    for chunk in chunks:
        if any(pattern.search(chunk) for pattern in _LARGE_BYTES):
            return True
    # From 64 KiB on, pickle writes them by themselves, not copied, after the opcode with their length.
    for head, content in itertools.pairwise(chunks):
        if len(content) >= OUT_OF_BAND:
            length = struct.pack("<Q", len(content))
            if head.endswith((b"\x8e" + length, b"\x96" + length, b"B" + length[:4])):
                return True
    return False


# -- what went wrong --------------------------------------------------------------------------------------------------


def _explained(obj: Any, error: Exception) -> EncodeError:
    """The error of a message, with the path to the part that is to blame: found by pickling ever smaller parts."""
    path, part = "$", obj
    for _ in range(_DEEPEST):
        for step, child in _parts(part):
            if type(child) not in _PLAIN and (found := _failure(child)) is not None:
                path, part, error = path + step, child, found
                break
        else:
            break
    if isinstance(error, EncodeError):
        return type(error)(f"{path}: {error}")
    return EncodeError(
        f"{path}: {type(part).__name__} can't be pickled ({error}); leave it out, send what it holds, or give its "
        "class a __getstate__ or __reduce__. Functions and classes travel by name, so they have to be found by import"
    )


def _failure(obj: Any) -> Exception | None:
    try:
        _pickle(_Pickler, obj)
    except Exception as error:
        return error
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """What pickle will find in an object, as far as that is plain to see: (step of the path, part)."""
    if isinstance(obj, dict):
        for key, item in obj.items():
            yield f".{key}" if type(key) is str and key.isidentifier() else f"[{key!r:.60}]", item
    elif isinstance(obj, (list, tuple)):
        for index, item in enumerate(obj):
            yield f"[{index}]", item
    elif _has_plain_state(type(obj)):
        for name in itertools.chain(getattr(obj, "__dict__", ()), _slots(type(obj))):
            if hasattr(obj, name):
                yield f".{name}", getattr(obj, name)


def _has_plain_state(kind: type) -> bool:
    hooks = ("__reduce_ex__", "__reduce__", "__getstate__")
    return not issubclass(kind, type) and all(
        getattr(kind, hook, None) is getattr(object, hook, None) for hook in hooks
    )


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


# -- decode -----------------------------------------------------------------------------------------------------------


def decode(blob: bytes | memoryview, views: Sequence[Buffer]) -> Any:
    """The object in ``blob``, whose buffers are ``views``: contiguous 1-D uint8 arrays, aligned to 64 bytes.

    *Runs whatever the blob says*: only for blobs of those who may run code here. Arrays, memoryviews and the buffers of
    other classes look into the views and keep them alive; they are writable if the view is, memoryviews never. bytes
    and bytearrays are copies.

    Raises DecodeError, with the cause chained, for whatever goes wrong: a damaged pickle, a name that can't be
    imported here, an object that can't take its state.
    """
    buffers = (view.data for view in views)
    try:
        if blob[:1] == WITH_BYTES:
            return _BytesUnpickler(io.BytesIO(blob[1:]), buffers=buffers).load()
        return pickle.loads(blob, buffers=buffers)
    except DecodeError:
        raise
    except Exception as error:
        # Anybody's code, as above.
        raise DecodeError(
            f"the {len(blob)} bytes of the message can't be unpickled, for they are damaged, or need what is not here: "
            f"{type(error).__name__}: {error}"
        ) from error


class _BytesUnpickler(pickle.Unpickler):
    """Knows the persistent ids of bytes."""

    def __init__(self, file: io.BytesIO, *, buffers: Iterator[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._large: list[bytes | bytearray] = []

    def persistent_load(self, pid: Any) -> bytes | bytearray:
        """The bytes that an id stands for."""
        if type(pid) is int:
            return self._large[pid]
        self._large.append(bytearray(pid[0]) if type(pid) is tuple else bytes(pid))
        return self._large[-1]


# Named in messages: they have to stay where they are.


def _array(buffer: memoryview | None, dtype: Any, shape: tuple[int, ...]) -> Array:
    if isinstance(dtype, str):
        return array_over(buffer, dtype, shape)
    array: Array = np.ndarray(shape, dtype, b"" if buffer is None else buffer)
    if buffer is not None and array.nbytes != buffer.nbytes:
        raise DecodeError(f"an array of {array.nbytes:,} bytes has a buffer of {buffer.nbytes:,}")
    return array


def _same(array: Array) -> Array:
    return array


def _memoryview(buffer: memoryview | bytes) -> memoryview:
    return memoryview(buffer).toreadonly()
