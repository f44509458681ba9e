"""What a server says of itself: /health, /ready, /metrics, /status.json, and /status as a browser shows it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from api import EngineView
from tests.e2e.servers import MIB, Server, Site, shared_memory_fixture, stop
from tests.queues import eventually

__all__ = ["shared_memory_fixture"]

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
MODEL = "pr<o>ud & small"
SECONDS = 5.0
"""Within which health has to change."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Site() as site:
        server = site.serve("--workers", "2", "--model", MODEL, "--ring-mib", "32")
        server.until_ready(2)
        yield server


@pytest.fixture
def engine(server: Server) -> Iterator[int]:
    """The engine's process. When the test is over, it goes on and serves."""
    view = EngineView("requests", server.site.namespace, server.site.runtime)
    view.look()
    pid = view.pid
    view.close()
    assert pid is not None
    yield pid
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: server.get("/health").status_code == 200, "the engine serves again")


def families(server: Server) -> dict[str, Metric]:
    """What /metrics has, by name."""
    answer = server.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def total(server: Server, name: str, **labels: str) -> float:
    """The sum of the samples of a name that have these labels."""
    return sum(
        sample.value
        for family in families(server).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


# -- health -----------------------------------------------------------------------------------------------------------


def test_health_is_200_while_the_engine_serves(server: Server, engine: int) -> None:
    answer = server.get("/health")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    [told] = answer.json()["engines"]
    assert (told["queue"], told["state"], told["pid"]) == ("requests", "serving", engine)
    assert 0 <= told["heartbeat_age"] < 1


def test_health_is_503_while_the_engine_stands_and_200_when_it_goes_on(server: Server, engine: int) -> None:
    stop(engine)
    eventually(lambda: server.get("/health").status_code == 503, "health has noticed", SECONDS)
    document = server.get("/health").json()
    assert document["status"] == "down"
    assert (document["engines"][0]["state"], document["engines"][0]["pid"]) == ("stale", engine)
    assert document["engines"][0]["heartbeat_age"] > 1
    assert total(server, "shmq_engine_up", queue="requests") == 0
    assert server.status()["engines"][0]["state"] == "stale"
    os.kill(engine, signal.SIGCONT)
    eventually(lambda: server.get("/health").status_code == 200, "health has noticed", SECONDS)
    assert server.get("/health").json()["engines"][0]["state"] == "serving"
    assert total(server, "shmq_engine_up", queue="requests") == 1


def test_what_is_sent_while_the_engine_stands_is_answered_when_it_goes_on(server: Server, engine: int) -> None:
    stop(engine)
    eventually(lambda: server.get("/health").status_code == 503, "health has noticed", SECONDS)
    assert server.post("/v1/tasks?timeout=0.2", json={"a": 1}).status_code == 504
    # It is expected to go on: a worker can take requests.
    assert server.get("/ready").status_code == 200
    os.kill(engine, signal.SIGCONT)
    assert server.post("/v1/tasks", json={"a": 2}).status_code == 200


def test_ready_is_json_either_way(server: Server) -> None:
    assert server.get("/ready").json() == {"ready": True}
    with Site() as site:
        absent = site.api("--workers", "1", "--engine", "one", "--engine", "two")
        absent.until_up(1)
        answer = absent.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["ready"] is False
        assert "queue one" in answer.json()["reason"]
        assert "queue two" in answer.json()["reason"]
        site.engine("--queue", "two")
        eventually(lambda: absent.get("/ready").status_code == 200, "one engine is enough")
        eventually(lambda: absent.get("/health").json()["status"] == "degraded", "the other one is missed")
        states = {engine["queue"]: engine["state"] for engine in absent.get("/health").json()["engines"]}
        assert states == {"one": "absent", "two": "serving"}
        assert absent.post("/v1/tasks", json={"a": 1}).status_code == 200


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_have_the_engine_the_front_end_and_the_rings(server: Server) -> None:
    assert server.post("/v1/tasks", json={"a": 1}).status_code == 200
    found = families(server)
    for name, kind in {
        "shmq_engine_up": "gauge",
        "shmq_engine_requests": "unknown",
        "shmq_http_requests": "counter",
        "shmq_http_request_seconds": "histogram",
        "shmq_http_body_bytes": "counter",
        "shmq_http_requests_in_flight": "gauge",
        "shmq_ring_bytes": "gauge",
        "shmq_ring_used_bytes": "gauge",
        "fastdeploy:zmq:msg_send": "counter",
        "fastdeploy:zmq:msg_recv": "counter",
    }.items():
        assert name in found, sorted(found)
        assert kind in ("unknown", found[name].type), name
        assert found[name].samples, name
    assert total(server, "shmq_engine_up", queue="requests") == 1
    assert total(server, "shmq_ring_bytes", queue="requests") == 2 * 32 * MIB


def test_the_counts_of_all_processes_are_added_up(server: Server) -> None:
    def finished() -> float:
        return total(server, "shmq_engine_requests_total", outcome="finished")

    def answered() -> float:
        return total(server, "shmq_http_requests_total", route="/v1/tasks", status="200")

    def put() -> float:
        return total(server, "fastdeploy:zmq:msg_send_total")

    before = finished(), answered(), put()
    for number in range(40):
        assert server.post("/v1/tasks", json={"number": number}).status_code == 200
    # Whichever worker is asked; the queues' counts are written now and then.
    eventually(lambda: finished() == before[0] + 40, "the engine has counted")
    eventually(lambda: answered() == before[1] + 40, "the workers have counted")
    # 40 calls, and some 40 answers.
    eventually(lambda: put() >= before[2] + 60, "the queues have counted")
    histogram = total(server, "shmq_http_request_seconds_count", route="/v1/tasks")
    assert histogram == total(server, "shmq_http_requests_total", route="/v1/tasks")


def test_paths_that_nobody_knows_do_not_become_labels(server: Server) -> None:
    for number in range(5):
        assert server.get(f"/unknown-{number}").status_code == 404
    routes = {sample.labels["route"] for sample in families(server)["shmq_http_requests"].samples}
    assert not [route for route in routes if "unknown" in route]
    assert total(server, "shmq_http_requests_total", route="other", status="404") >= 5


# -- the status page --------------------------------------------------------------------------------------------------


def test_status_json_has_what_the_page_shows(server: Server, engine: int) -> None:
    document = server.status()
    assert document["model"] == MODEL
    assert [told["state"] for told in document["engines"]] == ["serving"]
    assert document["engines"][0]["pid"] == engine
    requests = [queue for queue in document["queues"] if not queue["replies"]]
    assert [queue["queue"] for queue in requests] == ["requests"]
    assert requests[0]["ring_bytes"] == 2 * 32 * MIB
    assert len(document["workers"]) == 2
    assert document["max_concurrency"] == 512


class Cells(HTMLParser):
    """The texts of a page: by the id of the element that they are in, and for tables row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._where = ""
        self._tag = ""
        self.texts: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.classes: dict[str, set[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._tag = tag
        self._where = given.get("id") or self._where
        self.classes.setdefault(self._where, set()).update((given.get("class") or "").split())
        if tag == "tr":
            self.tables.setdefault(self._where, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._where][-1].append("")

    def handle_data(self, data: str) -> None:
        if self._tag not in ("script", "style"):
            self.texts[self._where] = self.texts.get(self._where, "") + data
            if self.tables.get(self._where) and self.tables[self._where][-1]:
                self.tables[self._where][-1][-1] += data


def in_browser(server: Server, tmp: Any, *options: str) -> str:
    """The page of /status after some seconds in a browser, as it stands then."""
    assert BROWSER is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", f"--user-data-dir={tmp}"]
    words += [*options, "--dump-dom", f"{server.url}/status"]
    done = subprocess.run([BROWSER, *words], capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium or chromium-browser on the PATH")
def test_the_status_page_shows_engines_queues_fill_and_workers_in_a_browser(
    server: Server, engine: int, tmp_path: Any
) -> None:
    for number in range(20):
        assert server.post("/v1/tasks", json={"number": number}).status_code == 200
    page = Cells(in_browser(server, tmp_path))
    assert page.texts["model"] == MODEL
    assert re.search(r"\d:\d\d:\d\d", page.texts["updated"]), page.texts["updated"]
    [_, row] = page.tables["engines"]
    assert row[:3] == ["requests", "serving", str(engine)]
    assert "serving" in page.classes["engines"]
    heads, queue = page.tables["queues"]
    assert heads[:2] == ["queue", "fill of its rings"]
    assert queue[0] == "requests"
    assert re.fullmatch(r"\d+ % of 67 MB", queue[1]), queue
    workers = {row[0] for row in page.tables["workers"][1:]}
    assert workers == {str(worker) for worker in server.in_flight()}
    assert "0 of 512" in page.texts["tiles"]


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium or chromium-browser on the PATH")
def test_the_status_page_shows_an_engine_that_stands(server: Server, engine: int, tmp_path: Any) -> None:
    stop(engine)
    eventually(lambda: server.get("/health").status_code == 503, "health has noticed", SECONDS)
    page = Cells(in_browser(server, tmp_path))
    assert page.tables["engines"][1][:3] == ["requests", "stale", str(engine)]
    assert "serving" not in page.classes["engines"]
