"""Who is let in, who is turned away with what, and what becomes of the requests of clients that go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fmq.calls import Gauge
from tests.e2e.servers import MIB, TOLD, Server, Site, shared_memory_fixture, stop
from tests.queues import eventually

__all__ = ["shared_memory_fixture"]

Posts = Callable[..., "Future[httpx.Response]"]


@pytest.fixture(name="posts")
def posts_fixture() -> Iterator[Posts]:
    """Posts from threads: what comes of it, in the future."""
    with ThreadPoolExecutor(32) as pool:
        yield lambda server, body, query="": pool.submit(server.post, f"/v1/tasks{query}", json=body)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One worker and one engine that runs one request at a time, for what can be told apart then."""
    with Site() as site:
        arguments = ["--workers", "1", "--handler", TOLD, "--max-batch", "1", "--ring-mib", "16", "--spill-mib", "96"]
        server = site.serve(*arguments)
        server.until_ready()
        yield server
        eventually(lambda: not any(server.in_flight().values()), "nobody is in flight any more")
        eventually(lambda: server.ring_used() == 0, "the ring is empty")


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """Two workers that may have eight requests between them."""
    with Site() as site:
        server = site.serve("--workers", "2", "--handler", TOLD, "--max-concurrency", "8")
        server.until_ready(2)
        yield server


@pytest.fixture
def hold(server: Server) -> Iterator[str]:
    """A file that held requests wait for. When the test is over, it is there."""
    path = server.site.path("hold")
    yield path
    open(path, "w").close()


def release(path: str) -> None:
    open(path, "w").close()


def error_of(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == kind
    assert error["request_id"] == answer.headers["x-request-id"]
    return error


def counted(server: Server, name: str, **labels: str) -> float:
    """A sample of /metrics, summed over all that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


# -- engines ----------------------------------------------------------------------------------------------------------


def test_without_an_engine_the_answer_is_503_and_one_that_is_gone_for_a_moment_is_waited_for(posts: Posts) -> None:
    with Site() as site:
        server = site.api("--workers", "1")
        server.until_up(1)
        answer = server.post("/v1/tasks", json={"a": 1})
        error = error_of(answer, 503, "engine_unavailable")
        assert answer.headers["retry-after"] == "1"
        assert "python -m engine" in error["message"]
        assert server.get("/ready").status_code == server.get("/health").status_code == 503
        assert server.get("/ready").headers["content-type"] == "application/json"
        engine = site.engine()
        eventually(lambda: server.get("/ready").status_code == 200, "the server is ready")
        assert server.post("/v1/tasks", json={"a": 1}).status_code == 200
        assert engine.end() == 0
        eventually(lambda: server.get("/health").status_code == 503, "the server sees that the engine is gone")
        late = posts(server, {"a": 2})
        eventually(lambda: sum(server.in_flight().values()) == 1, "a request waits for the next engine")
        site.engine()
        assert late.result().json()["choices"] == [{"choice": 0, "outputs": [{"a": 2}]}]


def test_what_takes_longer_than_patience_or_the_servers_deadline_ends(posts: Posts) -> None:
    with Site() as site:
        server = site.api("--workers", "1", "--patience", "0.5", "--request-timeout", "2")
        engine = site.engine("--handler", TOLD)
        server.until_ready()
        hold = site.path("never")
        error_of(server.post("/v1/tasks", json={"hold": hold}), 504, "deadline_exceeded")
        eventually(lambda: site.word(Gauge.RUNNING) == 0, "nothing runs any more")
        answer = posts(server, {"hold": hold}, "?timeout=60")
        eventually(lambda: site.word(Gauge.RUNNING) == 1, "the request runs")
        engine.kill()
        error_of(answer.result(), 503, "engine_unavailable")
        refused = server.post("/v1/tasks", json={"a": 1})
        error_of(refused, 503, "engine_unavailable")
        assert refused.headers["retry-after"] == "1"
        assert server.end() == 0
        # Of the engine that was killed.
        site.gc()


# -- too many ---------------------------------------------------------------------------------------------------------


def test_the_limit_of_requests_counts_those_of_all_workers(pair: Server, posts: Posts) -> None:
    hold = pair.site.path("hold")
    first, second = pair.in_flight()
    # While one stands, the other one has to take all that comes.
    stop(first)
    held = [posts(pair, {"hold": hold}) for _ in range(4)]
    eventually(lambda: pair.in_flight()[second] == 4, "the second worker has four requests")
    stop(second)
    os.kill(first, signal.SIGCONT)
    held += [posts(pair, {"hold": hold}) for _ in range(4)]
    eventually(lambda: pair.in_flight() == {first: 4, second: 4}, "the first worker has four as well")
    for standing in (second, first):
        stop(standing)
        answer = pair.post("/v1/tasks", json={})
        error = error_of(answer, 429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1"
        assert error["message"].startswith("8 requests")
        assert pair.get("/health").status_code == 200
        os.kill(standing, signal.SIGCONT)
    release(hold)
    assert [answer.result().status_code for answer in held] == [200] * 8
    assert pair.post("/v1/tasks", json={}).status_code == 200
    eventually(lambda: set(pair.in_flight().values()) == {0}, "all is answered")
    assert counted(pair, "shmq_http_requests_total", status="429") == 2


def test_an_error_of_one_request_of_a_batch_is_that_ones_alone(pair: Server, posts: Posts) -> None:
    hold = pair.site.path("hold")
    first = posts(pair, {"hold": hold})
    eventually(lambda: pair.site.word(Gauge.RUNNING) == 1, "the first one runs")
    tasks = [{"fail": "this one"} if number == 2 else {"number": number} for number in range(6)]
    answers = [posts(pair, task) for task in tasks]
    eventually(lambda: pair.site.word(Gauge.WAITING) == 6, "the others wait to be a batch")
    release(hold)
    assert first.result().status_code == 200
    assert [answer.result().status_code for answer in answers] == [200, 200, 500, 200, 200, 200]
    assert "this one" in answers[2].result().json()["error"]["message"]


def test_a_ring_without_room_is_503_and_has_room_again_later(server: Server, hold: str, posts: Posts) -> None:
    def send(size: int) -> httpx.Response:
        files = {"hold": (None, hold), "data": ("data.bin", b"x" * size)}
        with server.client() as client:
            return client.post("/v1/tasks", files=files)

    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(send, 40 * MIB) for _ in range(2)]
        eventually(lambda: server.site.word(Gauge.RECEIVED) and server.site.word(Gauge.WAITING) == 1, "both are there")
        answer = send(40 * MIB)
        error_of(answer, 503, "queue_full")
        assert answer.headers["retry-after"] == "1"
        release(hold)
        assert [answer.result().status_code for answer in held] == [200, 200]
    assert send(40 * MIB).status_code == 200


def test_a_body_that_could_never_have_room_is_413(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head(200 * MIB, "application/octet-stream"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


# -- deadlines and failures -------------------------------------------------------------------------------------------


def test_a_deadline_that_is_over_is_504_and_the_engine_is_free_again(server: Server, hold: str) -> None:
    error_of(server.post("/v1/tasks?timeout=0.3", json={"hold": hold}), 504, "deadline_exceeded")
    assert server.post("/v1/tasks?timeout=20", json={"a": 1}).status_code == 200
    assert server.post("/v1/tasks?timeout=1e-9", json={"a": 1}).status_code == 504


def test_a_request_that_waits_behind_another_one_until_its_deadline_is_504(
    server: Server, hold: str, posts: Posts
) -> None:
    running = posts(server, {"hold": hold})
    eventually(lambda: server.site.word(Gauge.RUNNING) == 1, "the first one runs")
    error_of(server.post("/v1/tasks?timeout=0.3", json={"a": 1}), 504, "deadline_exceeded")
    release(hold)
    assert running.result().status_code == 200


def test_an_error_of_the_handler_is_500_with_its_message(server: Server) -> None:
    failed = server.site.word(Gauge.FAILED)
    error = error_of(server.post("/v1/tasks", json={"fail": "no <such> thing, héé"}), 500, "handler_error")
    assert error["message"] == "ValueError: no <such> thing, héé"
    assert server.site.word(Gauge.FAILED) == failed + 1
    assert server.post("/v1/tasks", json={"a": 1}).status_code == 200


# -- clients that go --------------------------------------------------------------------------------------------------


def head(length: int, kind: str = "application/json", query: str = "") -> bytes:
    lines = [f"POST /v1/tasks{query} HTTP/1.1", "Host: x", f"Content-Type: {kind}", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


Begin = Callable[..., socket.socket]


@pytest.fixture(name="begin")
def begin_fixture(server: Server) -> Iterator[Begin]:
    """Begins requests over connections of their own: sends all but the last ``more`` bytes of the body."""
    with contextlib.ExitStack() as connections:

        def begin(body: bytes, kind: str = "application/json", query: str = "", more: int = 0) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            connections.enter_context(connection)
            connection.sendall(head(len(body) + more, kind, query) + body)
            return connection

        yield begin


class Before:
    """What the server and its engine have counted when this is made, to see what is new."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._failed = server.site.word(Gauge.FAILED)
        self._gone = self.gone_in_all()

    def gone_in_all(self) -> float:
        return counted(self._server, "shmq_http_requests_total", status="499")

    @property
    def failed(self) -> int:
        return self._server.site.word(Gauge.FAILED) - self._failed

    @property
    def gone(self) -> float:
        return self.gone_in_all() - self._gone


def idle(server: Server) -> bool:
    """Whether nothing of any request is left, in the front end, in the ring and in the engine."""
    return (
        not any(server.in_flight().values())
        and server.ring_used() == 0
        and server.site.word(Gauge.WAITING) == server.site.word(Gauge.RUNNING) == 0
    )


def test_a_client_that_goes_while_it_waits_has_its_request_aborted(server: Server, hold: str, begin: Begin) -> None:
    before = Before(server)
    connection = begin(json.dumps({"hold": hold, "text": "x" * MIB}).encode())
    eventually(lambda: server.site.word(Gauge.RUNNING) == 1, "the request runs")
    eventually(lambda: server.ring_used() >= MIB, "its room is in use")
    assert sum(server.in_flight().values()) == 1
    connection.close()
    eventually(lambda: idle(server), "nothing of it is left")
    assert before.failed == before.gone == 1
    assert server.post("/v1/tasks", json={"a": 1}).status_code == 200


def test_a_client_that_goes_while_its_request_waits_for_its_turn_has_it_aborted(
    server: Server, hold: str, posts: Posts, begin: Begin
) -> None:
    running = posts(server, {"hold": hold})
    eventually(lambda: server.site.word(Gauge.RUNNING) == 1, "the first one runs")
    before = Before(server)
    connection = begin(b"{}")
    eventually(lambda: server.site.word(Gauge.WAITING) == 1, "the second one waits")
    connection.close()
    eventually(lambda: server.site.word(Gauge.WAITING) == 0, "it waits no more")
    eventually(lambda: before.failed == before.gone == 1, "it has been aborted")
    release(hold)
    assert running.result().status_code == 200


def test_a_client_that_goes_in_the_middle_of_a_stream_has_its_request_aborted(server: Server, begin: Begin) -> None:
    before = Before(server)
    connection = begin(b'{"flow": 100000}', query="?stream=true&n=1")
    received = b""
    while received.count(b"data: ") < 10:
        received += connection.recv(65536)
    eventually(lambda: server.site.word(Gauge.RUNNING) == 1, "the request runs")
    connection.close()
    eventually(lambda: idle(server), "nothing of it is left")
    assert before.failed == 1
    assert server.post("/v1/tasks", json={"a": 1}).status_code == 200


def test_a_client_that_reads_its_stream_no_more_and_goes_has_its_request_aborted(server: Server, begin: Begin) -> None:
    before = Before(server)
    connection = begin(b'{"flow": 100000}', query="?stream=true")
    eventually(lambda: server.site.word(Gauge.RUNNING) == 1, "the request runs")
    # With what it has not read, the kernel resets the connection.
    connection.close()
    eventually(lambda: idle(server) and before.failed == 1, "nothing of it is left")


@pytest.mark.parametrize(
    ("kind", "begun"),
    [
        ("application/octet-stream", b""),
        ("multipart/form-data; boundary=cut", b'--cut\r\nContent-Disposition: form-data; name="x"\r\n\r\n'),
    ],
)
def test_a_client_that_goes_in_the_middle_of_an_upload_gives_its_room_back(
    server: Server, kind: str, begun: bytes, begin: Begin
) -> None:
    before, received = Before(server), server.site.word(Gauge.RECEIVED)
    connection = begin(begun + b"x" * MIB, kind, more=MIB)
    eventually(lambda: sum(server.in_flight().values()) == 1, "the upload has begun")
    eventually(lambda: server.ring_used() >= 2 * MIB, "its room is in use")
    connection.close()
    eventually(lambda: idle(server), "nothing of it is left")
    assert before.gone == 1
    assert (server.site.word(Gauge.RECEIVED), before.failed) == (received, 0), "the engine has heard of it"


def test_many_clients_that_go_leave_nothing(server: Server, begin: Begin) -> None:
    received = server.site.word(Gauge.RECEIVED)
    bodies = [json.dumps({"flow": 100000, "text": "x" * 100_000}).encode()] * 20
    connections = [begin(body, query="?stream=true" if number % 2 else "") for number, body in enumerate(bodies)]
    eventually(lambda: server.site.word(Gauge.RECEIVED) == received + 20, "all requests are there")
    threads = [threading.Thread(target=connection.close) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: idle(server), "nothing of any is left")
    assert server.post("/v1/tasks", json={"a": 1}).status_code == 200
