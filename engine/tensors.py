"""Arrays of a message as Paddle tensors over the same memory.

A tensor made here keeps exactly the numpy view alive that it was made of, and so the message's space in the ring: it
is given back when the last tensor over the message, and everything that shares memory with it (slices, ``detach()``,
``reshape``), is gone, and not before. The way is ``paddle.empty([0]).get_tensor().set(view, place, True)``: it aliases
at any alignment, leaks nothing, and has the right lifetime. ``paddle.from_dlpack`` keeps one deleter an address, which
is wrong for memory that is used again, and the Tensor constructor leaks some 100 bytes a call.

A tensor can't be read-only: an in-place operation on it changes the message, and only that message.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import PlaceError, TensorError

if TYPE_CHECKING:
    from types import ModuleType

MAX_RANK = 9
"""Paddle's limit."""

_DIRECT = {
    np.dtype(name)
    for name in (
        *("bool", "int8", "uint8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_FLOAT8 = {
    np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn",
    np.dtype(ml_dtypes.float8_e5m2): "float8_e5m2",
}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_ADVICE = {
    np.dtype(np.uint16): "Paddle takes uint16 for bfloat16; send int32, or an array of ml_dtypes.bfloat16 if it is one",
    np.dtype(np.uint32): "Paddle has no uint32; send int64",
    np.dtype(np.uint64): "Paddle has no uint64; send int64",
}

_loading = threading.Lock()
_paddle: ModuleType | None = None


def load_paddle() -> ModuleType:
    """Import Paddle, once, and return it. Any thread; takes about a second the first time.

    Importing Paddle replaces the handlers of SIGTERM and of the crash signals, and a handler that was set before is
    silently lost. So its handlers are taken out again, and Python's are put back: in the main thread at once; in
    another thread Python can't set handlers, so call this from the main thread first if you handle SIGTERM.

    Raises PlaceError if Paddle is not installed.
    """
    global _paddle
    with _loading:
        if _paddle is None:
            ours = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT)}
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "No ccache found")
                    import paddle
            except ImportError as error:
                raise PlaceError(
                    f"tensors need Paddle, and it can't be imported ({error}); install it: pip install 'shmq[paddle]', "
                    "or 'shmq[gpu]' for a GPU build"
                ) from error
            paddle.disable_signal_handler()
            if threading.current_thread() is threading.main_thread():
                for number, handler in ours.items():
                    if handler is not None:
                        signal.signal(number, handler)
            _paddle = paddle
    return _paddle


def to_paddle(tree: Any, place: str = "cpu") -> Any:
    """A copy of the tree in which every numpy array is a Paddle tensor over the same memory.

    ``tree``: dicts, lists, tuples and msgspec structs, nested; what is neither these nor an array stays as it is. An
    array that occurs twice becomes one tensor. Arrays have to be C-contiguous, as those of a message are; bool, int8
    to int64, uint8, float16 to float64, complex64, complex128, bfloat16, float8_e4m3fn and float8_e5m2, up to rank 9.
    ``place``: "cpu". Any thread.

    Raises TensorError for an array that Paddle can't hold, after all tensors made so far were dropped; PlaceError for
    another place, or without Paddle.
    """
    if place != "cpu":
        raise PlaceError(
            f"tensors can't be had on {place!r}: this version maps onto 'cpu' only; copy from there with "
            "tensor.to(device) or tensor.cuda()"
        )
    paddle = load_paddle()
    cpu = paddle.CPUPlace()
    made: dict[int, Any] = {}

    def convert(array: NDArray[Any], path: str) -> Any:
        tensor = made.get(id(array))
        if tensor is None:
            tensor = made[id(array)] = _tensor(paddle, cpu, array, path)
        return tensor

    try:
        return _walk(tree, "$", convert)
    except BaseException:
        # The traceback keeps this frame, and what it holds, for as long as somebody looks at the error.
        made.clear()
        raise


def _walk(node: Any, path: str, convert: Callable[[NDArray[Any], str], Any]) -> Any:
    if isinstance(node, np.ndarray):
        return convert(node, path)
    if isinstance(node, dict):
        return {key: _walk(value, f"{path}.{key}", convert) for key, value in node.items()}
    if isinstance(node, list):
        return [_walk(value, f"{path}[{index}]", convert) for index, value in enumerate(node)]
    if isinstance(node, tuple):
        return tuple(_walk(value, f"{path}[{index}]", convert) for index, value in enumerate(node))
    if isinstance(node, msgspec.Struct):
        changed = {field: _walk(getattr(node, field), f"{path}.{field}", convert) for field in node.__struct_fields__}
        return msgspec.structs.replace(node, **changed)
    return node


def _tensor(paddle: ModuleType, cpu: Any, array: NDArray[Any], path: str) -> Any:
    dtype = array.dtype
    if array.ndim > MAX_RANK:
        raise TensorError(f"{path}: an array of rank {array.ndim}; Paddle takes up to {MAX_RANK}, so reshape it first")
    if dtype in _DIRECT:
        view, cast = array, None
    elif dtype == _BFLOAT16:
        # Paddle reads uint16 as bfloat16.
        view, cast = array.view(np.uint16), None
    elif dtype in _FLOAT8:
        view, cast = array.view(np.int8), _FLOAT8[dtype]
    else:
        advice = _ADVICE.get(dtype.newbyteorder("="), "convert it in the producer, to float32 or int64, say")
        if not dtype.isnative:
            advice = "Paddle takes the host's byte order only; send array.astype(array.dtype.newbyteorder('='))"
        raise TensorError(f"{path}: an array of dtype {dtype} can't become a tensor: {advice}")
    if array.size == 0:
        # Never an alias: there is nothing to share.
        return paddle.empty(array.shape, dtype=cast or ("bfloat16" if dtype == _BFLOAT16 else dtype.name))
    if not array.flags.c_contiguous:
        raise TensorError(
            f"{path}: an array with strides {array.strides} would be copied, not shared; pass np.ascontiguousarray(it)"
        )
    # On the CPU afterwards, whatever the default device is.
    tensor = paddle.empty([0])
    tensor.get_tensor().set(view, cpu, True)
    if cast is not None:
        tensor = tensor.view(cast)
    if tensor.data_ptr() != array.__array_interface__["data"][0]:
        raise TensorError(f"{path}: Paddle {paddle.__version__} copied an array of dtype {dtype} instead of sharing it")
    return tensor
