"""Arrays on their way through shared memory: what their dtypes are called, what counts as one, how they are copied.

A dtype travels as a tag: the ``str`` of a numpy dtype (``<f4``, ``>i8``, ``|b1``, ``<M8[ns]``, ``<U12``, ``|V7``), or the
name of one of ml_dtypes (``bfloat16``, ``float8_e4m3fn``, ``int4``, one byte an element below 8 bits). Nothing else has
one: not the structured dtypes, not those that hold references, not ml_dtypes in foreign byte order. ``longdouble`` is
whatever the machine takes it for (``<f16``), so it should not leave for a machine of another kind.

Paddle and torch are never imported here; their tensors are known by DLPack.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fmq.errors import EncodeError

_CPU = 1
"""kDLCPU of DLPack."""

_EXTENSIONS: dict[str, np.dtype[Any]] = {
    name: np.dtype(scalar)
    for name, scalar in vars(ml_dtypes).items()
    if isinstance(scalar, type) and issubclass(scalar, np.generic)
}
_NUMERIC = [np.dtype(code).newbyteorder(order) for code in "?bhilqBHILQefdgFDG" for order in "<>"]
_DTYPES = {dtype.str: dtype for dtype in _NUMERIC} | _EXTENSIONS
# By dtype, since `l` and `q` are two that are spelled the same.
_TAGS = {dtype: dtype.str for dtype in _NUMERIC} | {dtype: name for name, dtype in _EXTENSIONS.items()}

_SIZED = re.compile(r"[<>][mM]8(\[\d*(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?|[<>]U\d{1,10}|\|[SV]\d{1,10}")
"""The tags of dtypes that are too many for a table."""


def tag_of(dtype: np.dtype[Any]) -> str | None:
    """The tag of a dtype, or None if its arrays can't travel."""
    tag = _TAGS.get(dtype)
    if tag is None and dtype.names is None and not dtype.hasobject and _SIZED.fullmatch(dtype.str):
        return dtype.str
    return tag


def dtype_of(tag: str) -> np.dtype[Any] | None:
    """The dtype with this tag, or None if there is none. The tag may be anything; nothing in it is evaluated."""
    dtype = _DTYPES.get(tag)
    if dtype is None and _SIZED.fullmatch(tag):
        try:
            dtype = np.dtype(tag)
        except (OverflowError, TypeError, ValueError):
            return None
        # Only what tag_of writes: not `<M8[1s]`, which is `<M8[s]`.
        return dtype if dtype.str == tag else None
    return dtype


def address_of(array: NDArray[Any]) -> int:
    """Where the first element lies in memory."""
    return int(array.__array_interface__["data"][0])


def from_tensor(tensor: Any) -> NDArray[Any]:
    """A host tensor with ``__dlpack__`` (Paddle, torch) as an array over the same memory, which it keeps alive.

    bfloat16 and float8 included, which DLPack knows and numpy does not. Gradients are left behind. Raises EncodeError for
    a tensor on a device, or if numpy can't read it.
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
        # `int16` and `int8` of torch, of paddle, of numpy for those that use its dtypes: they exist if the tensor does.
        library = sys.modules[type(tensor.dtype).__module__.partition(".")[0]]
        bits = tensor.view(getattr(library, f"int{8 * extension.itemsize}"))
        return np.from_dlpack(bits).view(extension)
    except (AttributeError, BufferError, KeyError, RuntimeError, ValueError) as error:
        raise EncodeError(f"numpy can't read this {name} ({error}); convert it to a numpy array before") from error


def _extension_of(tensor: Any) -> np.dtype[Any] | None:
    name = str(getattr(tensor, "dtype", "")).rpartition(".")[2]
    return _EXTENSIONS.get(name) if name.startswith(("bfloat16", "float8_")) else None


def copy_buffer(source: NDArray[Any], target: NDArray[np.uint8]) -> None:
    """Copy an array of any layout and dtype into memory, in C order and in one pass.

    ``target`` is 1-D, writable, contiguous, ``source.nbytes`` long, and aligned for the dtype. Lets go of the interpreter
    lock while it copies. Any thread may call it; nobody else may write to the target meanwhile.
    """
    if not source.nbytes:
        return
    if source.dtype.kind in "SU":
        # numpy holds the lock while it copies strings (15 ms for 256 MiB); as bytes it does not.
        source = source.view(f"V{source.itemsize}")
    np.copyto(target.view(source.dtype).reshape(source.shape), source)
