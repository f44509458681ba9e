"""Arrays in the bodies of requests: npy, npz and safetensors, mapped where they lie.

A body lies in a loan of the ring. An npy and the tensors of a safetensors file become views of it: nothing is copied.
What can't be a view, because it is compressed (npz) or not aligned, is copied again, in a thread, into another loan.

The npy format: numpy.lib.format; safetensors: https://huggingface.co/docs/safetensors (8 bytes of header length, a
header in JSON, the data).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from api.http.bodies import Bytes, Loans
from api.http.errors import HttpError, bad, too_large

_MAX_HEADER = 64 * 1024
_MAX_SAFETENSORS_HEADER = 16 * 1024 * 1024
_MAX_MEMBERS = 1024
_MAX_RANK = 64
_PIECE = 1024 * 1024
_HEADER_LENGTH = {(1, 0): 2, (2, 0): 4}
"""Bytes that say how long the header of an npy is, by its version."""

_SAFETENSORS_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


class MemoryFile(io.RawIOBase):
    """Memory as a file for reading, for libraries that want one. Nothing is copied but what they read."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory.data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._memory.nbytes}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = self._memory[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


@dataclass(frozen=True, slots=True)
class _Header:
    """What is said before the data of an array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def over(self, memory: NDArray[Any], place: str) -> NDArray[Any]:
        """The array over its data, [nbytes]. Raises HttpError for a shape that no array has."""
        try:
            flat = memory.view(self.dtype)
            return flat.reshape(self.shape[::-1]).T if self.fortran else flat.reshape(self.shape)
        except (ValueError, OverflowError) as error:
            raise bad(f"an array can't have shape {self.shape}: {error}", place) from None


def _read_header(file: Any, place: str) -> _Header:
    """The header of an npy, which is read from ``file`` up to the data. Raises HttpError."""
    try:
        version = npy_format.read_magic(file)
        if version not in _HEADER_LENGTH:
            raise ValueError(f"its version is {version[0]}.{version[1]}; 1.0 and 2.0 can be read")
        field = file.read(_HEADER_LENGTH[version])
        length = int.from_bytes(field, "little")
        if length > _MAX_HEADER:
            raise ValueError(f"its header would have {length:,} bytes")
        # Not from the file itself: of what is compressed, numpy would unpack any length before it looks at it.
        header = io.BytesIO(field + file.read(length))
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, dtype = read(header, max_header_size=_MAX_HEADER)
    except HttpError:
        raise
    except Exception as error:
        # The header is a Python literal: there are many ways to be none.
        raise bad(f"this is no npy: {error}", place) from None
    if dtype.hasobject:
        raise bad("an array of Python objects is not taken; send plain numbers", place)
    if dtype.names is not None or dtype.subdtype is not None or dtype.itemsize == 0:
        raise bad(f"an array of dtype {dtype} is not taken; send plain numbers", place)
    if len(shape) > _MAX_RANK or any(size < 0 for size in shape):
        raise bad(f"an array can't have shape {shape}", place)
    return _Header(dtype, tuple(int(size) for size in shape), bool(fortran))


async def npy(body: Bytes, loans: Loans, place: str = "$") -> NDArray[Any]:
    """The array of an npy file. Raises HttpError for what is none."""
    file = io.BytesIO(body[:_MAX_HEADER].tobytes())
    header = _read_header(file, place)
    data = body[file.tell() :]
    if data.nbytes != header.nbytes:
        raise bad(
            f"an array of dtype {header.dtype} and shape {header.shape} has {header.nbytes:,} bytes; "
            f"{data.nbytes:,} came",
            place,
        )
    return header.over(await aligned(data, header.dtype, loans), place)


async def aligned(data: Bytes, dtype: np.dtype[Any], loans: Loans) -> Bytes:
    """The same bytes at an address that suits the dtype: where they are, or a copy."""
    if not data.nbytes or data.__array_interface__["data"][0] % dtype.alignment == 0:
        return data
    target: Bytes = await loans.empty(data.nbytes)
    await asyncio.to_thread(np.copyto, target, data)
    return target


class _TensorInfo(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


async def safetensors(body: Bytes, loans: Loans, place: str = "$") -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file, by name. Raises HttpError for what is none."""
    if body.nbytes < 8:
        raise bad("this is no safetensors file: it has no header", place)
    length = int.from_bytes(body[:8].tobytes(), "little")
    if length > min(body.nbytes - 8, _MAX_SAFETENSORS_HEADER):
        raise bad(f"this is no safetensors file: its header would have {length:,} bytes", place)
    try:
        entries = msgspec.json.decode(body[8 : 8 + length].data, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        infos = {name: msgspec.json.decode(raw, type=_TensorInfo) for name, raw in entries.items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad(f"the header of the safetensors file can't be read: {error}", place) from None
    data = body[8 + length :]
    end = 0
    arrays: dict[str, NDArray[Any]] = {}
    for name, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        where = f"{place}.{name}"
        if info.dtype not in _SAFETENSORS_DTYPES:
            raise bad(f"dtype {info.dtype!r} is not known; send one of {', '.join(_SAFETENSORS_DTYPES)}", where)
        header = _Header(np.dtype(_SAFETENSORS_DTYPES[info.dtype]), tuple(info.shape), False)
        first, last = info.data_offsets
        if first != end or last > data.nbytes or last - first != header.nbytes:
            raise bad(
                f"its data lies at {first:,} to {last:,} of {data.nbytes:,} bytes; it should begin at {end:,} and have "
                f"{header.nbytes:,}",
                where,
            )
        if len(info.shape) > _MAX_RANK:
            raise bad(f"an array can't have {len(info.shape)} dimensions", where)
        end = last
        arrays[name] = header.over(await aligned(data[first:last], header.dtype, loans), where)
    if end != data.nbytes:
        raise bad(f"{data.nbytes - end:,} bytes follow the last tensor", place)
    return arrays


async def npz(body: Bytes, loans: Loans, limit: int, place: str = "$") -> dict[str, NDArray[Any]]:
    """The arrays of an npz file, by name, up to ``limit`` bytes in all. Raises HttpError for what is none."""
    archive, headers = await asyncio.to_thread(_open_npz, body, place)
    with archive:
        total = sum(header.nbytes for header in headers.values())
        if total > limit:
            raise too_large(f"its arrays have {total:,} bytes, and this server takes {limit:,}", place)
        targets = {name: await loans.empty(header.nbytes) for name, header in headers.items()}
        await asyncio.to_thread(_fill, archive, targets, place)
    return {
        name.removesuffix(".npy"): header.over(targets[name], _member(place, name)) for name, header in headers.items()
    }


def _open_npz(body: Bytes, place: str) -> tuple[zipfile.ZipFile, dict[str, _Header]]:
    with _damage(place):
        archive = zipfile.ZipFile(io.BufferedReader(MemoryFile(body)))
    names = archive.namelist()
    if len(names) > _MAX_MEMBERS:
        raise bad(f"it has {len(names):,} members; at most {_MAX_MEMBERS:,} are taken", place)
    headers = {}
    for name in names:
        where = _member(place, name)
        with _damage(where), archive.open(name) as member:
            headers[name] = _read_header(member, where)
    return archive, headers


def _fill(archive: zipfile.ZipFile, targets: dict[str, Bytes], place: str) -> None:
    for name, target in targets.items():
        where = _member(place, name)
        with _damage(where), archive.open(name) as member:
            _read_header(member, where)
            _read_into(member.read, target.data, where)


def _member(place: str, name: str) -> str:
    return f"{place}.{name.removesuffix('.npy')}"


@contextlib.contextmanager
def _damage(place: str) -> Iterator[None]:
    """Errors of reading an archive, as the HttpError with the place. Each way to compress has errors of its own."""
    try:
        yield
    except HttpError:
        raise
    except Exception as error:
        raise bad(f"this is no npz that can be read: {error}", place) from None


def _read_into(read: Callable[[int], bytes], target: memoryview, place: str) -> None:
    offset = 0
    while piece := read(_PIECE):
        if offset + len(piece) > target.nbytes:
            raise bad(f"it goes on after the {target.nbytes:,} bytes of its array", place)
        target[offset : offset + len(piece)] = piece
        offset += len(piece)
    if offset < target.nbytes:
        raise bad(f"it ends after {offset:,} of the {target.nbytes:,} bytes of its array", place)
