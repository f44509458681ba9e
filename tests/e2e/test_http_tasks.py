"""POST /v1/tasks: every kind of body, checked by dtype, shape and CRC-32; every error; and bodies that are nonsense."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save as save_safetensors

from tests.e2e.servers import MIB, TOLD, Server, Site, shared_memory_fixture
from tests.queues import eventually

__all__ = ["shared_memory_fixture"]

LIMIT_MIB = 8
NPY, NPZ, SAFETENSORS = "application/x-npy", "application/x-npz", "application/x-safetensors"
BYTES, JSON = "application/octet-stream", "application/json"
FORM = "multipart/form-data; boundary=cut"

rng = np.random.default_rng(20240607)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Site() as site:
        server = site.serve("--workers", "2", "--handler", TOLD, "--max-body-mib", str(LIMIT_MIB), "--no-access-log")
        server.until_ready(2)
        workers = set(server.in_flight())
        yield server
        assert set(server.in_flight()) == workers, f"a worker has died:\n{server.log[-4000:]}"
        assert not any(server.in_flight().values())


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(client: httpx.Client, body: Any, kind: str = JSON, path: str = "/v1/tasks", **headers: str) -> httpx.Response:
    content = json.dumps(body).encode() if kind == JSON and not isinstance(body, bytes | Iterator) else body
    return client.post(path, content=content, headers={"Content-Type": kind, **headers})


def echoed(answer: httpx.Response) -> Any:
    """The one output of the one choice of an answer."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == JSON
    document = answer.json()
    assert document["request_id"] == answer.headers["x-request-id"]
    [choice] = document["choices"]
    assert choice["choice"] == 0
    [output] = choice["outputs"]
    return output


def description(array: NDArray[Any]) -> dict[str, Any]:
    """What Echo says of an array that has arrived."""
    return {"dtype": str(array.dtype), "shape": list(array.shape), "crc32": zlib.crc32(array.tobytes())}


def npy(array: NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=False)
    return file.getvalue()


def npz(compressed: bool = False, **arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def picture(mode: str, form: str, size: tuple[int, int] = (37, 23), **options: Any) -> bytes:
    height, width = size[1], size[0]
    pixels = rng.integers(0, 256, (height, width, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert("RGB" if mode == "P" else mode).convert(mode).save(file, form, **options)
    return file.getvalue()


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def values(dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of random numbers, among them no NaN, whose bits some conversions would not keep."""
    return rng.integers(0, 100, shape).astype(dtype)


def part(headers: str, body: bytes = b"1") -> bytes:
    return b"--cut\r\n" + headers.encode() + b"\r\n\r\n" + body + b"\r\n"


def field(name: str, body: bytes = b"1", rest: str = "") -> bytes:
    return part(f'Content-Disposition: form-data; name="{name}"{rest}', body)


END = b"--cut--\r\n"

# -- JSON, choices, streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task",
    [
        {"prompt": "häßlich \u4e2d\u6587 \U0001f600", "n": 1, "x": [1, 2.5, None, True, {"deep": [[[]]]}]},
        [],
        {},
        "text",
        17,
        None,
        False,
        -(2**63) - 1,
        2**64,
        5e-324,
    ],
)
def test_json_comes_back_as_it_was_sent(client: httpx.Client, task: Any) -> None:
    assert echoed(post(client, task)) == task


def test_json_is_the_type_of_a_body_that_names_none(client: httpx.Client) -> None:
    request = client.build_request("POST", "/v1/tasks", content=b'{"a":1}')
    assert "content-type" not in request.headers
    assert echoed(client.send(request)) == {"a": 1}


def test_json_larger_than_what_is_kept_in_private_memory_goes_through_the_ring(client: httpx.Client) -> None:
    task = {"tokens": list(range(60_000)), "text": "x" * 100_000}
    assert echoed(post(client, task)) == task


def test_a_small_body_without_content_length_is_taken(client: httpx.Client) -> None:
    assert echoed(post(client, iter([b'{"a"', b":[1]", b"}"]))) == {"a": [1]}


@pytest.mark.parametrize("count", [1, 2, 128])
def test_n_choices_are_n_answers(client: httpx.Client, count: int) -> None:
    document = post(client, {"a": 1}, path=f"/v1/tasks?n={count}").json()
    assert document["choices"] == [{"choice": choice, "outputs": [{"a": 1}]} for choice in range(count)]


def test_the_steps_of_an_answer_are_all_in_it(client: httpx.Client) -> None:
    assert post(client, {"flow": 5}).json()["choices"] == [{"choice": 0, "outputs": [0, 1, 2, 3, 4]}]


def events(client: httpx.Client, body: Any, kind: str = JSON, query: str = "") -> list[Any]:
    """What a stream's events have, without the [DONE] that it ends with."""
    path = f"/v1/tasks?stream=true{query}"
    content = json.dumps(body).encode() if kind == JSON else body
    with client.stream("POST", path, content=content, headers={"Content-Type": kind}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        text = b"".join(answer.iter_raw()).decode()
    assert text.endswith("\n\n")
    told = [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]
    assert told[-1] == "[DONE]"
    return [json.loads(event) for event in told[:-1]]


def test_a_stream_has_an_event_for_each_step(client: httpx.Client) -> None:
    assert events(client, {"flow": 4}) == [
        {"choice": 0, "step": step, "value": step, "finished": step == 3} for step in range(4)
    ]


def test_a_stream_has_the_events_of_all_choices(client: httpx.Client) -> None:
    array = values("i4", (100, 300))
    told = events(client, npy(array), NPY, "&n=3")
    assert sorted(event["choice"] for event in told) == [0, 1, 2]
    assert all(event["value"] == {"array": description(array)} and event["finished"] for event in told)


def test_a_stream_ends_with_the_error_that_ended_it(client: httpx.Client) -> None:
    [event] = events(client, {"fail": "this can't be done"})
    assert event["error"]["type"] == "handler_error"
    assert "this can't be done" in event["error"]["message"]
    assert event["error"]["request_id"]


# -- arrays -----------------------------------------------------------------------------------------------------------

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">i2", ">f4", ">u8"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7, 5), (2, 3, 4, 5), (40_001,)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_npy_arrives_with_its_dtype_shape_and_bytes(client: httpx.Client, dtype: str) -> None:
    for shape in SHAPES:
        array = values(dtype, shape)
        assert echoed(post(client, npy(array), NPY)) == {"array": description(array)}


def test_an_npy_in_fortran_order_arrives_as_the_same_array(client: httpx.Client) -> None:
    for dtype in ("f4", ">i2", "?"):
        array = np.asfortranarray(values(dtype, (61, 47, 33)))
        assert b"'fortran_order': True" in npy(array)
        assert echoed(post(client, npy(array), NPY)) == {"array": description(array)}


def test_an_npy_of_format_2_is_read(client: httpx.Client) -> None:
    array = values("f8", (300, 50))
    assert echoed(post(client, npy(array, (2, 0)), NPY)) == {"array": description(array)}


@pytest.mark.parametrize("compressed", [False, True], ids=["stored", "compressed"])
def test_the_arrays_of_an_npz_arrive_by_name(client: httpx.Client, compressed: bool) -> None:
    arrays = {
        "pixels": values("u1", (300, 200, 3)),
        "mask": values("?", (5, 7)),
        "half": values("f2", (1000,)),
        "big": values(">f8", (3, 5)),
        "fortran": np.asfortranarray(values("i4", (9, 8, 7))),
        "scalar": values("f4", ()),
        "empty": values("i8", (0, 4)),
        "a name, with things": values("u2", (2,)),
    }
    expected = {name: description(array) for name, array in arrays.items()}
    assert echoed(post(client, npz(compressed, **arrays), NPZ)) == expected


def test_the_tensors_of_a_safetensors_file_arrive_by_name(client: httpx.Client) -> None:
    arrays = {
        "bfloat16": values(ml_dtypes.bfloat16, (64, 33)),
        "half": values("f2", (5, 3)),
        "float": values("f4", (128, 300)),
        "bool": values("?", (3,)),
        "int8": values("i1", (7, 1)),
        "int64": values("i8", (2, 2, 2)),
        "scalar": values("f8", ()),
        "empty": values("f4", (0, 9)),
    }
    body = save_safetensors(arrays, metadata={"format": "np"})
    assert echoed(post(client, body, SAFETENSORS)) == {name: description(array) for name, array in arrays.items()}


def test_safetensors_that_are_not_aligned_arrive_whole(client: httpx.Client) -> None:
    first, second = values("u1", (3,)), values("f8", (5, 7))
    end = 3 + second.nbytes
    head = {
        "first": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "second": {"dtype": "F64", "shape": [5, 7], "data_offsets": [3, end]},
    }
    body = safetensors_of(head, first.tobytes() + second.tobytes())
    assert echoed(post(client, body, SAFETENSORS)) == {"first": description(first), "second": description(second)}


def safetensors_of(head: Any, data: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 64 * 1024 + 1, 3 * MIB + 7])
def test_other_bytes_arrive_as_they_are(client: httpx.Client, size: int) -> None:
    data = rng.integers(0, 256, size, np.uint8)
    assert echoed(post(client, data.tobytes(), BYTES)) == {"data": description(data)}


@pytest.mark.parametrize(
    ("mode", "form", "kind"),
    [
        ("RGB", "PNG", "image/png"),
        ("RGBA", "PNG", "image/png"),
        ("L", "PNG", "image/png"),
        ("P", "PNG", "image/png"),
        ("1", "PNG", "image/png"),
        ("RGB", "JPEG", "image/jpeg"),
        ("CMYK", "JPEG", "image/jpeg"),
        ("RGB", "WEBP", "image/webp"),
        ("P", "GIF", "image/gif"),
        ("RGB", "BMP", "image/bmp"),
        ("RGB", "PNG", "image/whatever"),
    ],
)
def test_a_picture_arrives_as_its_pixels(client: httpx.Client, mode: str, form: str, kind: str) -> None:
    data = picture(mode, form)
    assert echoed(post(client, data, kind)) == {"image": description(pixels_of(data))}


def test_a_picture_of_several_megabytes_arrives_as_its_pixels(client: httpx.Client) -> None:
    data = picture("RGB", "PNG", (900, 700))
    assert MIB < len(data) < LIMIT_MIB * MIB
    assert echoed(post(client, data, "image/png")) == {"image": description(pixels_of(data))}


# -- forms ------------------------------------------------------------------------------------------------------------


def test_a_form_has_its_parts_by_name_each_as_what_it_is(client: httpx.Client) -> None:
    png, jpeg = picture("RGB", "PNG", (200, 100)), picture("L", "JPEG")
    array, half = np.asfortranarray(values("f4", (50, 60))), values("f2", (3,))
    raw = rng.integers(0, 256, 70_001, np.uint8)
    tensors = {"w": values(ml_dtypes.bfloat16, (3, 3))}
    answer = client.post(
        "/v1/tasks",
        data={"prompt": "What is this, señor?"},
        files=[
            ("images", ("a.png", png, "image/png")),
            ("images", ("b.jpg", jpeg, "application/octet-stream")),
            ("array", ("array.npy", npy(array))),
            ("typed", ("whatever", npy(half), NPY)),
            ("arrays", ("both.npz", npz(True, a=array, b=half))),
            ("tensors", ("model.safetensors", save_safetensors(tensors))),
            ("raw", ("raw.bin", raw.tobytes(), BYTES)),
            ("options", ("options.json", b'{"top_k": [1, 2]}', JSON)),
            ("named", ("options.JSON", b"[true]")),
            ("note", ("note.txt", "für später".encode())),
            ("nothing", ("nothing.bin", b"", BYTES)),
        ],
    )
    assert echoed(answer) == {
        "prompt": "What is this, señor?",
        "images": [description(pixels_of(png)), description(pixels_of(jpeg))],
        "array": description(array),
        "typed": description(half),
        "arrays": {"a": description(array), "b": description(half)},
        "tensors": {"w": description(tensors["w"])},
        "raw": description(raw),
        "options": {"top_k": [1, 2]},
        "named": [True],
        "note": "für später",
        "nothing": description(raw[:0]),
    }


def test_parts_of_odd_sizes_are_aligned_for_the_arrays_that_follow_them(client: httpx.Client) -> None:
    arrays = [values("f8", (size, 3)) for size in (1, 2, 1000, 20_000)]
    files: list[Any] = []
    for number, array in enumerate(arrays):
        files += [(f"b{number}", ("x.bin", b"odd" * (number + 1), BYTES)), (f"a{number}", ("x.npy", npy(array)))]
    answer = echoed(client.post("/v1/tasks", files=files))
    for number, array in enumerate(arrays):
        assert answer[f"a{number}"] == description(array)
        assert answer[f"b{number}"]["crc32"] == zlib.crc32(b"odd" * (number + 1))


def test_a_form_may_have_256_parts_and_no_more(client: httpx.Client) -> None:
    parts = [field(f"f{number}", str(number).encode()) for number in range(257)]
    answer = echoed(post(client, b"".join(parts[:256]) + END, FORM))
    assert answer == {f"f{number}": str(number) for number in range(256)}
    refused(post(client, b"".join(parts) + END, FORM), 400, message="at most 256 parts")


def test_what_looks_like_a_boundary_within_a_part_is_part_of_it(client: httpx.Client) -> None:
    data = b"\r\n--cu\r\n--\r\n-\r\n\r--cut\n--cut--" * 5000
    answer = echoed(post(client, field("x", data, '; filename="x"') + END, FORM))
    assert answer["x"] == description(np.frombuffer(data, np.uint8))


# -- errors -----------------------------------------------------------------------------------------------------------


def refused(
    answer: httpx.Response, status: int, kind: str = "invalid_request_error", param: Any = ..., message: str = ""
) -> dict[str, Any]:
    """The error of an answer, after a look whether it is whole."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == JSON
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"type", "message", "param", "code", "request_id"}
    assert error["type"] == kind
    assert error["request_id"] == answer.headers["x-request-id"]
    assert message in error["message"]
    if param is not ...:
        assert error["param"] == param
    return error


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"a": [1, 2,, 3]}', "byte 12", "$"),
        (b'{"a": 1', "truncated", "$"),
        (b"", "truncated", "$"),
        (b'{"a": 1} x', "byte 10", "$"),
        (b"NaN", "byte 0", "$"),
        (b'{"a": "\xff"}', "UTF-8", "$"),
        (b'{"a": [0, 1e999]}', "out of range", "$[...][1]"),
        (b"[" * 100_000, "nested too deeply", "$"),
        (b'{"a":' * 100_000, "nested too deeply", "$"),
        (b"[" * 800 + b"]" * 800, "nested deeper", None),
        ("{}".encode("utf-16"), "byte 0", "$"),
    ],
)
def test_bad_json_is_a_400_that_says_where(client: httpx.Client, body: bytes, message: str, param: str | None) -> None:
    refused(post(client, body), 400, param=param, message=message)


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "video/mp4", "x", "", "multipart/mixed"])
def test_a_media_type_that_is_not_taken_is_a_415_that_says_which_are(client: httpx.Client, kind: str) -> None:
    error = refused(post(client, b"1", kind), 415, "unsupported_media_type", message=repr(kind))
    assert NPY in error["message"]


@pytest.mark.parametrize("kind", [JSON, BYTES, NPY, "image/png"])
def test_a_large_body_that_does_not_say_how_large_is_a_411(client: httpx.Client, kind: str) -> None:
    answer = post(client, iter([b"x" * 40_000] * 3), kind)
    refused(answer, 411, "length_required", message="Content-Length")


def test_a_form_that_does_not_say_how_large_it_is_is_a_411(client: httpx.Client) -> None:
    refused(post(client, iter([field("x") + END]), FORM), 411, "length_required")


@pytest.mark.parametrize(("kind", "mib"), [(BYTES, LIMIT_MIB), (NPY, LIMIT_MIB), (FORM, LIMIT_MIB), (JSON, 64)])
def test_a_body_over_the_limit_is_a_413_before_it_is_sent(server: Server, kind: str, mib: int) -> None:
    length = mib * MIB + 1
    head = f"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head.encode())
        status, headers, body = read_answer(connection)
    assert status == 413
    assert headers["content-type"] == JSON
    assert json.loads(body)["error"]["type"] == "request_too_large"
    assert f"{length:,}" in json.loads(body)["error"]["message"]


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer from a connection: its status, headers and body."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while line := file.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers, file.read(int(headers["content-length"]))


ARRAY = np.arange(60_000, dtype="f4").reshape(200, 300)
STORED = npz(x=ARRAY)


def npy_of(head: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + data


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no npy"),
        (b"x", "no npy"),
        (b"\x93NUMPX" + npy(ARRAY)[6:], "no npy"),
        (npy(ARRAY)[:50], "no npy"),
        (npy(ARRAY)[:-1], "239,999 came"),
        (npy(ARRAY) + b"x", "240,001 came"),
        (npy(ARRAY, (3, 0)), "3.0"),
        (npy_of("{'descr': '|O', 'fortran_order': False, 'shape': ()}"), "Python objects"),
        (npy_of("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (0,)}"), "plain numbers"),
        (npy_of("{'descr': '|V0', 'fortran_order': False, 'shape': (3,)}"), "plain numbers"),
        (npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), "can't have shape"),
        (npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 65 + ")}", b"1234"), "can't have shape"),
        (npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 40 + ",)}"), "0 came"),
        (npy_of("(" * 5000), "no npy"),
        (npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5}"), "no npy"),
        (npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 30 + ", 0)}"), "can't have shape"),
        (npy_of("{'descr': 'nonsense', 'fortran_order': False, 'shape': ()}"), "no npy"),
        (npy_of("__import__('os').abort()"), "no npy"),
    ],
)
def test_a_damaged_npy_is_a_400_that_says_what_is_wrong(client: httpx.Client, body: bytes, message: str) -> None:
    refused(post(client, body, NPY), 400, param="$", message=message)
    refused(post(client, field("a", body, '; filename="a.npy"') + END, FORM), 400, param="$.a", message=message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no npz"),
        (b"PK\x05\x06", "no npz"),
        (STORED[:-30], "no npz"),
        (STORED[:5000] + bytes([STORED[5000] ^ 1]) + STORED[5001:], "CRC"),
        (npz(True, x=ARRAY).replace(b"PK\x03\x04", b"PK\x03\x05", 1), "no npz"),
        (npy(ARRAY), "no npz"),
    ],
)
def test_a_damaged_npz_is_a_400_that_says_what_is_wrong(client: httpx.Client, body: bytes, message: str) -> None:
    error = refused(post(client, body, NPZ), 400, message=message)
    assert error["param"] in ("$", "$.x")


def zip_of(name: str, data: bytes, kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr(name, data)
    return file.getvalue()


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_of_an_npz_that_is_too_short_or_too_long_is_a_400_with_its_name(
    client: httpx.Client, kind: int
) -> None:
    for data, message in ((npy(ARRAY)[:-8], "ends after"), (npy(ARRAY) + b"xy", "goes on"), (b"x" * 99, "no npy")):
        answer = post(client, zip_of("inner.npy", data, kind), NPZ)
        error = refused(answer, 400, message=message)
        assert error["param"].startswith("$.inner")


def test_an_npz_whose_compressed_data_is_damaged_is_a_400(client: httpx.Client) -> None:
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        body = bytearray(zip_of("x.npy", npy(values("f8", (90, 100))), kind))
        for place in range(200, len(body) - 200, 100):
            body[place] ^= 0x55
        refused(post(client, bytes(body), NPZ), 400, param="$.x")


def test_an_npz_that_would_become_larger_than_the_limit_is_a_413(client: httpx.Client) -> None:
    bomb = npz(True, a=np.zeros(LIMIT_MIB * MIB - 1, np.uint8), b=np.zeros(2, np.uint8))
    assert len(bomb) < 100_000
    refused(post(client, bomb, NPZ), 413, "request_too_large", "$", message=f"{LIMIT_MIB * MIB + 1:,}")


def tensor(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "$"),
        (b"1234567", "$"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "$"),
        (struct.pack("<Q", 3) + b"{}", "$"),
        (safetensors_of([]), "$"),
        (struct.pack("<Q", 5) + b'{"x":' + b"1234", "$"),
        (safetensors_of({"x": 1}), "$"),
        (safetensors_of(tensor(shape=[-1]), b"1234"), "$"),
        (safetensors_of(tensor(shape=[1.5]), b"1234"), "$"),
        (safetensors_of(tensor("F4"), b"1234"), "$.x"),
        (safetensors_of(tensor(offsets=(0, 8)), b"1234"), "$.x"),
        (safetensors_of(tensor(offsets=(-4, 0)), b"1234"), "$.x"),
        (safetensors_of(tensor(offsets=(4, 8)), b"12345678"), "$.x"),
        (safetensors_of(tensor(shape=[2**62, 2**62], offsets=(0, 2**126)), b"1234"), "$.x"),
        (safetensors_of(tensor(shape=[1] * 65), b"1234"), "$.x"),
        (safetensors_of(tensor(shape=[2**62, 2**62, 0], offsets=(0, 0))), "$.x"),
        (safetensors_of(tensor(shape=[2**70, 0], offsets=(0, 0))), "$.x"),
        (struct.pack("<Q", 10_006) + b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}", "$"),
        (safetensors_of(tensor(), b"12345"), "$"),
    ],
)
def test_a_damaged_safetensors_file_is_a_400_with_the_tensor(client: httpx.Client, body: bytes, param: str) -> None:
    refused(post(client, body, SAFETENSORS), 400, param=param)


PNG = picture("RGB", "PNG", (100, 90))


@pytest.mark.parametrize("body", [b"", b"x" * 1000, PNG[:20], PNG[:1000], PNG[:33] + b"\xff" * 200 + PNG[233:], STORED])
def test_a_damaged_picture_is_a_400(client: httpx.Client, body: bytes) -> None:
    refused(post(client, body, "image/png"), 400, param="$", message="picture")
    refused(post(client, field("p", body, '; filename="p.png"') + END, FORM), 400, param="$.p", message="picture")


def test_a_picture_of_a_format_that_is_not_taken_is_a_400(client: httpx.Client) -> None:
    refused(post(client, picture("RGB", "TIFF"), "image/tiff"), 400, param="$", message="PNG, JPEG")


def test_a_picture_of_too_many_pixels_is_refused_by_its_head_alone(client: httpx.Client) -> None:
    head = struct.pack(">IIBBBBB", 12_000, 12_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    body = b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    refused(post(client, body, "image/png"), 413, "request_too_large", "$", message="12,000")


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (field("x"), FORM, "no end"),
        (field("x") + b"--cut", FORM, "no end"),
        (field("x")[:-3], FORM, "no end"),
        (b"", FORM, "no end"),
        (field("x") + END, "multipart/form-data", "boundary"),
        (field("x") + END, "multipart/form-data; boundary=", "boundary"),
        (field("x") + END, "multipart/form-data; boundary=other", "boundary"),
        (field("x") + END, "multipart/form-data; boundary=" + "b" * 1000, "oundary"),
        (part("Content-Type: text/plain") + END, FORM, "part 0"),
        (field("x") + part("Content-Disposition: form-data") + END, FORM, "part 1"),
        (part("Content-Disposition: attachment; name=x") + END, FORM, "part 0"),
        (field("x", b"1", "\r\nX-Long: " + "y" * 100_000) + END, FORM, "can't be read"),
        (field("x").replace(b"\r\n", b"\n") + END, FORM, "can't be read"),
    ],
)
def test_a_form_that_is_none_is_a_400(client: httpx.Client, body: bytes, kind: str, message: str) -> None:
    refused(post(client, body, kind), 400, message=message)


@pytest.mark.parametrize(
    ("body", "rest", "param"),
    [
        (b'{"a": [1, x]}', '; filename="options.json"', "$.f"),
        (b'{"a": [1, 1e999]}', '; filename="options.json"', "$.f[...][1]"),
        (b"\xff\xfe", "", "$.f"),
        (b"x", '; filename="f.npz"', "$.f"),
        (b"x", '; filename="f.safetensors"', "$.f"),
    ],
)
def test_an_error_in_a_part_names_the_part(client: httpx.Client, body: bytes, rest: str, param: str) -> None:
    refused(post(client, field("before") + field("f", body, rest) + END, FORM), 400, param=param)


def test_a_form_larger_than_a_loan_is_worth_and_without_an_end_is_a_400(client: httpx.Client) -> None:
    refused(post(client, field("x", b"y" * 3 * MIB), FORM), 400, message="no end")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/tasks/x", "/v1//tasks", "/%00%ff", "/../etc/passwd"])
def test_an_unknown_route_is_a_404(client: httpx.Client, path: str) -> None:
    refused(client.get(path), 404, "not_found")
    refused(post(client, {}, path=path), 404, "not_found")


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_a_wrong_method_is_a_405_that_names_the_right_one(client: httpx.Client, method: str) -> None:
    answer = client.request(method, "/v1/tasks")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert client.head("/v1/tasks").status_code == 405


# -- request ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_id", ["a", "r-1.2:3_4", "x" * 128])
def test_a_request_id_comes_back(client: httpx.Client, given_id: str) -> None:
    answer = post(client, {}, **{"X-Request-Id": given_id})
    assert answer.headers["x-request-id"] == given_id
    assert answer.json()["request_id"] == given_id
    error = refused(post(client, b"{", **{"X-Request-Id": given_id}), 400)
    assert error["request_id"] == given_id


@pytest.mark.parametrize("given_id", ["", "a b", "x" * 129, "a/b", "<script>", "ä", "a\tb"])
def test_a_request_id_that_could_do_harm_is_replaced(client: httpx.Client, given_id: str) -> None:
    headers = [(b"Content-Type", b"application/json"), (b"X-Request-Id", given_id.encode())]
    answer = client.post("/v1/tasks", content=b"{}", headers=headers)
    assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_the_same_request_id_may_be_used_twice_at_a_time(server: Server, client: httpx.Client) -> None:
    hold = server.site.path("hold")
    body = json.dumps({"hold": hold}).encode()
    head = f"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nX-Request-Id: same\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)) for _ in range(2)
        ]
        for connection in connections:
            connection.sendall(head + body)
        open(hold, "w").close()
        for connection in connections:
            status, headers, _ = read_answer(connection)
            assert (status, headers["x-request-id"]) == (200, "same")


# -- the protocol -----------------------------------------------------------------------------------------------------


def raw(server: Server, data: bytes) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
        return answer


def head_of(*headers: str, close: bool = True) -> bytes:
    lines = ["POST /v1/tasks HTTP/1.1", "Host: x", *headers, *(["Connection: close"] if close else [])]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@pytest.mark.parametrize("length", ["-1", "-9223372036854775808", "+1", "abc", "1_0", "1 1", "0x1", "", "9" * 30])
def test_a_content_length_that_is_no_number_is_a_400(server: Server, length: str) -> None:
    answer = raw(server, head_of(f"Content-Length: {length}", close=False) + b"1")
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_two_lengths_or_a_length_with_chunks_are_a_400(server: Server) -> None:
    for headers in (
        ("Content-Length: 1", "Content-Length: 2"),
        ("Content-Length: 1", "Transfer-Encoding: chunked"),
    ):
        assert raw(server, head_of(*headers, close=False) + b"1\r\n1\r\n0\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_requests_that_are_sent_ahead_are_answered_in_order(server: Server) -> None:
    requests = [head_of("Content-Length: 1", close=number == 9) + str(number).encode() for number in range(10)]
    answer = raw(server, b"".join(requests))
    assert re.findall(rb'"outputs":\[(\d)\]', answer) == [str(number).encode() for number in range(10)]


def test_a_request_with_large_headers_is_answered(server: Server) -> None:
    for headers in (["X-Big: " + "a" * 200_000], [f"X-{number}: a" for number in range(2000)]):
        answer = raw(server, head_of(*headers, "Content-Length: 1") + b"1")
        assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_body_that_comes_byte_by_byte_is_taken(server: Server) -> None:
    body = b'{"slow":1}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head_of(f"Content-Length: {len(body)}") + body:
            connection.sendall(bytes([byte]))
        status, _, answer = read_answer(connection)
    assert status == 200
    assert json.loads(answer)["choices"][0]["outputs"] == [{"slow": 1}]


def test_http_1_0_and_expect_continue_are_understood(server: Server) -> None:
    answer = raw(server, b"POST /v1/tasks HTTP/1.0\r\nContent-Length: 1\r\n\r\n1")
    assert b" 200 OK" in answer
    answer = raw(server, head_of("Content-Length: 1", "Expect: 100-continue") + b"1")
    assert answer.startswith(b"HTTP/1.1 100 ")
    assert b"HTTP/1.1 200 OK" in answer


def test_bytes_that_are_no_http_never_end_a_worker(server: Server) -> None:
    source = random.Random(7)
    whole = head_of("Content-Type: application/json", "Content-Length: 7", "X-Request-Id: me") + b'{"a":1}'
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(source.randint(1, 6)):
            place = source.randrange(len(data))
            data[place : place + source.randint(0, 3)] = source.randbytes(source.randint(0, 4))
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65536):
                    answer += piece
        assert b" 500 " not in answer.partition(b"\r\n")[0], bytes(data)


# -- nonsense ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query", ["n=0", "n=129", "n=x", "n=", "timeout=nan", "timeout=inf", "timeout=-1", "timeout=0", "stream=maybe"]
)
def test_a_wrong_query_is_an_error_like_all_others(client: httpx.Client, query: str) -> None:
    refused(post(client, {}, path=f"/v1/tasks?{query}"), 400, param=f"query.{query.partition('=')[0]}")


def test_a_path_does_not_begin_a_line_of_the_log() -> None:
    with Site() as site:
        server = site.api("--workers", "1")
        server.until_up(1)
        server.get("/v1/%0Aforged%0D%1b")
        eventually(lambda: "forged" in server.log, "it is logged")
        assert not any(line.startswith("forged") for line in server.log.splitlines())


WHOLE: list[tuple[str, bytes]] = [
    (JSON, b'{"prompt": "x", "list": [1, 2.5e3, null, true, "\\u00e9"], "deep": {"a": {"b": []}}}'),
    (NPY, npy(ARRAY[:3, :5])),
    (NPY, npy(np.asfortranarray(ARRAY[:3, :5]), (2, 0))),
    (FORM, field("t", b"text") + field("a", npy(ARRAY[:2, :2]), '; filename="a.npy"') + END),
    (NPZ, npz(a=ARRAY[:2, :3], b=np.ones(3, "?"))),
    (NPZ, npz(True, a=ARRAY[:2, :3], b=np.ones(3, "?"))),
    (SAFETENSORS, save_safetensors({"a": ARRAY[:2, :3].copy(), "b": np.ones(3, "?")})),
    (BYTES, b"bytes"),
    ("image/png", picture("RGB", "PNG", (5, 4))),
    ("image/png", picture("P", "PNG", (5, 4))),
    ("image/jpeg", picture("RGB", "JPEG", (9, 8))),
    ("image/webp", picture("RGB", "WEBP", (9, 8))),
    ("image/gif", picture("P", "GIF", (5, 4))),
    ("image/bmp", picture("RGB", "BMP", (5, 4))),
    (FORM, field("t", b"text") + field("s", save_safetensors({"a": ARRAY[:2]}), '; filename="a.safetensors"') + END),
    (FORM, field("p", picture("RGB", "PNG", (3, 2)), '; filename="p.png"') + field("j", b"{}", "; filename=j.json")),
]

Edit = Callable[[bytearray], None]
places = st.integers(0, 2**16)


def _overwrite(place: int, data: bytes) -> Edit:
    def edit(body: bytearray) -> None:
        at = place % (len(body) + 1)
        body[at : at + len(data)] = data

    return edit


def _insert(place: int, data: bytes) -> Edit:
    def edit(body: bytearray) -> None:
        at = place % (len(body) + 1)
        body[at:at] = data

    return edit


def _cut(place: int, count: int) -> Edit:
    def edit(body: bytearray) -> None:
        at = place % (len(body) + 1)
        del body[at : at + count]

    return edit


def _flip(place: int, bit: int) -> Edit:
    def edit(body: bytearray) -> None:
        if body:
            body[place % len(body)] ^= 1 << bit

    return edit


pieces = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from(
        [b"\0" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"(", b")", b"[", b"{", b'"', b"-1", b"1e99", b"\r\n"]
    ),
)
edits = st.one_of(
    st.builds(_overwrite, places, pieces),
    st.builds(_insert, places, pieces),
    st.builds(_cut, places, st.integers(1, 2**12)),
    st.builds(_flip, places, st.integers(0, 7)),
)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(WHOLE), st.lists(edits, max_size=4))
def test_no_body_that_was_tampered_with_is_a_500_or_ends_a_worker(
    client: httpx.Client, whole: tuple[str, bytes], changes: list[Edit]
) -> None:
    kind, body = whole[0], bytearray(whole[1])
    for change in changes:
        change(body)
    answer = post(client, bytes(body), kind)
    assert answer.status_code in (200, 400, 413), (kind, bytes(body), answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted({kind for kind, _ in WHOLE})), st.binary(max_size=200))
def test_no_random_bytes_are_a_500_or_end_a_worker(client: httpx.Client, kind: str, body: bytes) -> None:
    answer = post(client, body, kind)
    assert answer.status_code in (200, 400, 413), (kind, body, answer.text)
    if kind not in (BYTES, JSON):
        refused(answer, 400)
