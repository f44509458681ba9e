"""Arrays on their way through shared memory: which can travel, where they lie, how they are copied and rebuilt.

A dtype travels as a tag: the ``str`` of a numpy dtype (``<f4``, ``>i8``, ``|b1``, ``<M8[ns]``, ``<U12``, ``|V7``), or
the name of one of ml_dtypes (``bfloat16``, ``float8_e4m3fn``, ``int4``, one byte an element below 8 bits). Nothing else
has one: not the structured dtypes, not those that hold references, not ml_dtypes in foreign byte order. ``longdouble``
is whatever the machine takes it for (``<f16``), so it should not leave for a machine of another kind.

Paddle and torch are never imported here; their tensors are known by DLPack.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fmq.errors import DecodeError, DTypeError, EncodeError

Array = NDArray[Any]
Buffer = NDArray[np.uint8]

_MAX_DIMENSIONS: Final = 64
"""What numpy has, since 2.0; before, it refuses more than 32 itself."""

_CPU: Final = 1
"""kDLCPU of DLPack."""

_NUMERIC: Final = {np.dtype(order + code) for code in "?bhilqBHILQefdgFDG" for order in "<>"}
_DTYPES: Final[dict[str, np.dtype[Any]]] = {dtype.str: np.dtype(dtype.str) for dtype in _NUMERIC}
# By dtype, for `l` and `q` are two with one spelling.
_TAGS: Final[dict[np.dtype[Any], str]] = {dtype: dtype.str for dtype in _NUMERIC}

_SIZED: Final = re.compile(r"[<>][mM]8(\[\d*(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?|[<>]U\d{1,10}|\|[SV]\d{1,10}")
"""The tags of dtypes that are too many for a table."""


# -- dtypes -----------------------------------------------------------------------------------------------------------


@functools.cache
def _extensions() -> dict[str, np.dtype[Any]]:
    """The dtypes of ml_dtypes by name. Imported when the first is met: the import may take half a second."""
    import ml_dtypes

    found = {
        name: np.dtype(scalar)
        for name, scalar in vars(ml_dtypes).items()
        if isinstance(scalar, type) and issubclass(scalar, np.generic)
    }
    _DTYPES.update(found)
    _TAGS.update({dtype: name for name, dtype in found.items()})
    return found


def tag_of(dtype: np.dtype[Any]) -> str:
    """The tag of a dtype. Raises DTypeError if its arrays can't travel."""
    tag = _TAGS.get(dtype)
    if tag is None and "ml_dtypes" in sys.modules:
        _extensions()
        tag = _TAGS.get(dtype)
    if tag is not None:
        return tag
    tag = str(dtype.str)
    if dtype.names is None and not dtype.hasobject and _SIZED.fullmatch(tag):
        return tag
    raise DTypeError(
        f"an array of dtype {dtype} can't be encoded; send an array for each field of a structured one, a list for "
        "objects, astype('U') for StringDType, native byte order for ml_dtypes"
    )


def dtype_of(tag: str) -> np.dtype[Any]:
    """The dtype with this tag, which may be anything; it is not evaluated. Raises DecodeError if there is none."""
    dtype = _DTYPES.get(tag)
    if dtype is not None:
        return dtype
    if _SIZED.fullmatch(tag):
        try:
            dtype = np.dtype(tag)
        except (OverflowError, TypeError, ValueError):
            dtype = None
        # Only what tag_of writes: not `<M8[1s]`, which is `<M8[s]`.
        if dtype is not None and dtype.str == tag:
            return dtype
    elif tag in _extensions():
        return _extensions()[tag]
    raise DecodeError(f"the message has an array of dtype {tag[:40]!r}, which is not known here")


# -- to the ring ------------------------------------------------------------------------------------------------------


class Buffers:
    """The buffers of one message. An array that is added twice is there once; it is kept alive."""

    __slots__ = ("_addresses", "_first", "arrays")

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._first: dict[Any, int] = {}
        self._addresses: dict[Any, dict[int, int]] = {}

    def append(self, array: Array) -> int:
        """Add an array, whatever is there, and return its index."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def add(self, array: Array, tag: str) -> int:
        """The index of this array, or of another one with the same tag, shape and strides over the same memory."""
        new = len(self.arrays)
        layout = (tag, array.shape, array.strides)
        first = self._first.setdefault(layout, new)
        if first != new:
            if self.arrays[first] is array:
                return first
            # Only now, for an address takes 0.9 us, and a layout 0.2.
            alike = self._addresses.get(layout)
            if alike is None:
                alike = self._addresses[layout] = {_address(self.arrays[first]): first}
            index = alike.setdefault(_address(array), new)
            if index != new:
                return index
        return self.append(array)


def from_tensor(tensor: Any) -> Array:
    """A host tensor with ``__dlpack__`` (Paddle, torch) as an array over the same memory, which it keeps alive.

    bfloat16 and float8 included, which DLPack knows and numpy does not. Gradients are left behind. Raises EncodeError
    for a tensor on a device, or if numpy can't read it.
    """
    name = type(tensor).__name__
    try:
        device = int(tensor.__dlpack_device__()[0])
        if device != _CPU:
            raise EncodeError(f"a {name} on a device (DLPack type {device}) can't be encoded; call .cpu() on it before")
        if hasattr(tensor, "detach"):
            tensor = tensor.detach()
        extension = _extension_of(tensor)
        if extension is None:
            return np.from_dlpack(tensor)
        # `int16` and `int8` of torch, of paddle, of numpy for those that use its dtypes.
        library = sys.modules[type(tensor.dtype).__module__.partition(".")[0]]
        bits = tensor.view(getattr(library, f"int{8 * extension.itemsize}"))
        return np.from_dlpack(bits).view(extension)
    except EncodeError:
        raise
    except (AttributeError, BufferError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise EncodeError(f"numpy can't read this {name} ({error}); convert it to a numpy array before") from error


def copy_buffer(source: Array, target: Buffer) -> None:
    """Copy an array of any layout and dtype into memory, in C order and in one pass.

    ``target`` is 1-D, writable, contiguous, ``source.nbytes`` long, and aligned for the dtype. Lets go of the
    interpreter lock while it copies. Any thread may call it; nobody else may write to the target meanwhile.
    """
    if not source.nbytes:
        return
    if source.dtype.kind in "SU" or source.dtype.names is not None:
        # numpy holds the lock while it copies strings (15 ms for 256 MiB); as bytes it does not. Of structured items it
        # would leave out what lies between the fields, and leave there what was in the ring before.
        source = source.view(f"V{source.itemsize}")
    np.copyto(target.view(source.dtype).reshape(source.shape), source)


def _extension_of(tensor: Any) -> np.dtype[Any] | None:
    name = str(getattr(tensor, "dtype", "")).rpartition(".")[2]
    return _extensions().get(name) if name.startswith(("bfloat16", "float8_")) else None


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


# -- from the ring ----------------------------------------------------------------------------------------------------


def array_over(view: Buffer | memoryview | None, tag: str, shape: tuple[int, ...]) -> Array:
    """An array over a 1-D view of bytes, which it keeps alive; None for an empty one. It is writable if the view is.

    Tag and shape may be anything, but for negative dimensions: raises DecodeError if the view is not just as long.
    """
    dtype = dtype_of(tag)
    length = 0 if view is None else len(view)
    # Before the product: that of a million large dimensions would take minutes.
    if len(shape) > _MAX_DIMENSIONS or math.prod(shape) * dtype.itemsize != length:
        raise DecodeError(
            f"an array of dtype {tag!r} with {len(shape)} dimensions needs a buffer of another length than {length:,}"
        )
    try:
        array: Array = np.ndarray(shape, dtype, b"" if view is None else view)
    except (OverflowError, TypeError, ValueError) as error:
        raise DecodeError(f"there is no array with the {len(shape)} dimensions in the message: {error}") from error
    return array


def scalar_from(tag: str, data: bytes) -> Any:
    """A numpy scalar from its bytes. Raises DecodeError if they are not just as long."""
    dtype = dtype_of(tag)
    if dtype.itemsize != len(data):
        raise DecodeError(f"a scalar of dtype {tag!r} can't be made of {len(data)} bytes")
    return np.ndarray((), dtype, data)[()]
