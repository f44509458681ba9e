"""Large uploads: the worker does not keep them in private memory, and goes on answering others meanwhile."""

from __future__ import annotations

import http.client
import io
import json
import shutil
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.e2e.servers import MIB, PATIENCE, Server, Site, shared_memory_fixture

__all__ = ["shared_memory_fixture"]

GIB = 1024 * MIB
PIECE = np.random.default_rng(11).integers(0, 256, 4 * MIB, np.uint8).tobytes()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Site() as site:
        server = site.serve("--workers", "1")
        server.until_ready()
        yield server


@pytest.fixture(scope="module")
def worker(server: Server) -> int:
    [pid] = server.in_flight()
    return pid


def private_bytes(pid: int) -> int:
    """A process's private memory."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell")


class Peak:
    """The most private memory that a process has while this is open."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.before = self.most = 0
        self.samples = 0

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, private_bytes(self._pid))
            self.samples += 1

    def __enter__(self) -> Peak:
        self.before = self.most = private_bytes(self._pid)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.before


@dataclass
class Upload:
    """A body on its way, in pieces."""

    server: Server
    size: int
    begun: float = 0.0
    ended: float = 0.0
    crc32: int = 0
    connection: http.client.HTTPConnection = field(init=False)

    def begin(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        self.begun = time.monotonic()
        self.connection.putrequest("POST", "/v1/tasks")
        self.connection.putheader("Content-Type", "application/octet-stream")
        self.connection.putheader("Content-Length", str(self.size))
        self.connection.endheaders()

    def send(self, size: int) -> None:
        for start in range(0, size, len(PIECE)):
            piece = PIECE[: size - start]
            self.connection.send(piece)
            self.crc32 = zlib.crc32(piece, self.crc32)

    def finish(self) -> None:
        """Wait for the answer, which has to tell of the same bytes."""
        answer = self.connection.getresponse()
        document = json.loads(answer.read())
        self.ended = time.monotonic()
        self.connection.close()
        assert answer.status == 200, document
        expected = {"dtype": "uint8", "shape": [self.size], "crc32": self.crc32}
        assert document["choices"][0]["outputs"] == [{"data": expected}]


@pytest.mark.skipif(shutil.disk_usage("/dev/shm").free < 2.5 * GIB, reason="/dev/shm has less than 2.5 GiB free")
def test_an_upload_of_a_gibibyte_takes_no_private_memory(server: Server, worker: int) -> None:
    def upload(size: int) -> None:
        upload = Upload(server, size)
        upload.begin()
        upload.send(size)
        upload.finish()

    upload(8 * MIB)
    with Peak(worker) as peak:
        upload(GIB)
    assert peak.samples > 20
    assert peak.growth < 64 * MIB, f"{peak.before:,} bytes before, {peak.most:,} at the most"


def test_small_requests_are_answered_while_an_upload_waits_for_its_other_half(server: Server, worker: int) -> None:
    upload = Upload(server, 64 * MIB)
    upload.begin()
    upload.send(32 * MIB)
    with server.client() as client, Peak(worker) as peak:
        for number in range(100):
            answer = client.post("/v1/tasks", json={"number": number})
            assert answer.json()["choices"][0]["outputs"] == [{"number": number}]
        assert server.in_flight() == {worker: 1}
    upload.send(32 * MIB)
    upload.finish()
    assert peak.growth < 64 * MIB


def test_small_requests_are_answered_while_large_ones_are_under_way(server: Server) -> None:
    uploads: list[Upload] = []
    failures: list[BaseException] = []
    enough = threading.Event()

    def go_on() -> None:
        try:
            while not enough.is_set():
                uploads.append(upload := Upload(server, 64 * MIB))
                upload.begin()
                upload.send(upload.size)
                upload.finish()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go_on)
    small: list[tuple[float, float]] = []
    with server.client() as client:
        client.post("/v1/tasks", json={})
        thread.start()
        try:
            while len(small) < 200 and not failures:
                begun = time.monotonic()
                answer = client.post("/v1/tasks", json={"number": len(small)})
                small.append((begun, time.monotonic()))
                assert answer.status_code == 200
        finally:
            enough.set()
            thread.join()
    assert not failures, failures
    within = [sum(upload.begun < begun and end < upload.ended for begun, end in small) for upload in uploads]
    # One that held up all others would have none within its time.
    assert max(within) >= 5, within
    assert sum(within) >= 50, within


def test_an_npz_whose_header_is_a_bomb_takes_no_private_memory(server: Server, worker: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as member:
        member.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 256 * MIB))
        for _ in range(256):
            member.write(b" " * MIB)
    with Peak(worker) as peak:
        answer = server.post("/v1/tasks", content=file.getvalue(), headers={"Content-Type": "application/x-npz"})
    assert answer.status_code == 400
    assert peak.growth < 64 * MIB


def test_json_in_a_form_has_the_limit_that_json_has(server: Server) -> None:
    text = b"[" + b"1," * (33 * MIB) + b"1]"
    form = b'--cut\r\nContent-Disposition: form-data; name="x"\r\nContent-Type: application/json\r\n\r\n' + text
    headers = {"Content-Type": "multipart/form-data; boundary=cut"}
    answer = server.post("/v1/tasks", content=form + b"\r\n--cut--\r\n", headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["param"] == "$.x"
