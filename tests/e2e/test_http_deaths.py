"""Processes that are killed, and servers that are ended under load: what clients see of it, and what is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from api import EngineView
from fmq.calls import Gauge
from tests.e2e.servers import PATIENCE, TOLD, Server, Site, shared_memory_fixture
from tests.queues import eventually

__all__ = ["shared_memory_fixture"]

CLIENTS = 3


class Load:
    """Clients that ask again and again, each over its own connection, until this is left."""

    def __init__(self, server: Server, clients: int = CLIENTS) -> None:
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        self._lock = threading.Lock()
        self.statuses: Counter[int | str] = Counter()
        self.wrong: list[Any] = []

    @property
    def answered(self) -> int:
        return self.statuses.total()

    def until_more(self, count: int) -> None:
        """Wait for so many answers more."""
        before = self.answered
        eventually(lambda: self.answered >= before + count, "the clients are answered", PATIENCE)

    def _ask(self, number: int) -> None:
        text = str(number) * 100_000
        with self._server.client() as client:
            count = 0
            while not self._over.is_set():
                count += 1
                task = {"client": number, "count": count, "text": text if count % 3 == 0 else ""}
                try:
                    answer = client.post("/v1/tasks", json=task)
                except httpx.TransportError as error:
                    self._count(type(error).__name__)
                    # Nobody listens: until there is somebody again, or this is over.
                    self._over.wait(0.02)
                    continue
                if answer.status_code == 200 and answer.json()["choices"] != [{"choice": 0, "outputs": [task]}]:
                    self.wrong.append((task, answer.json()))
                self._count(answer.status_code)

    def _count(self, status: int | str) -> None:
        with self._lock:
            self.statuses[status] += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def engine_of(site: Site) -> Iterator[EngineView]:
    """The engine, looked at from here."""
    view = EngineView("requests", site.namespace, site.runtime)
    try:
        view.look()
        yield view
    finally:
        view.close()


def engine_pid(site: Site) -> int | None:
    with engine_of(site) as view:
        return view.pid if view.serving else None


def rings_of(site: Site, worker: int) -> list[str]:
    """The rings that a worker has made, those to it, and its reply queue."""
    found = [name for name in site.reply_queues() if name.startswith(f"reply.{worker}.")]
    for name in site.segments():
        if f":reply.{worker}." in name or (":requests:" in name and _owner(name) == worker):
            found.append(name)
    return found


def _owner(segment: str) -> int:
    with contextlib.suppress(FileNotFoundError), open(f"/dev/shm/{segment}", "rb") as file:
        return int.from_bytes(file.read(56)[48:], "little")
    return 0


def alive(pid: int) -> bool:
    """Whether a process is there, and more than a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_that_is_killed_under_load_is_started_again_and_every_client_is_answered() -> None:
    with Site() as site:
        server = site.serve("--workers", "2", "--max-batch", "4")
        server.until_ready(2)
        with Load(server) as load:
            for _ in range(2):
                load.until_more(100)
                killed = engine_pid(site)
                assert killed is not None
                os.kill(killed, signal.SIGKILL)
                eventually(lambda killed=killed: engine_pid(site) not in (None, killed), "there is another", PATIENCE)
                load.until_more(100)
        assert set(load.statuses) == {200}
        assert load.wrong == []
        assert server.log.count("supervisor: engine requests has ended (signal SIGKILL)") == 2
        eventually(lambda: server.ring_used() == 0, "the rings are empty")


def test_a_worker_that_is_killed_is_replaced_and_its_rings_are_drained_and_removed() -> None:
    with Site() as site:
        server = site.api("--workers", "2")
        site.engine("--handler", TOLD, "--max-batch", "1")
        server.until_ready(2)
        with Load(server) as load, ThreadPoolExecutor(8) as pool:
            load.until_more(50)
            hold = site.path("hold")
            held = [pool.submit(_status_of, server, {"hold": hold, "text": "x" * 200_000}) for _ in range(8)]
            eventually(lambda: site.word(Gauge.WAITING) >= 7, "the engine is behind")
            killed, other = sorted(server.in_flight(), key=lambda pid: -server.in_flight()[pid])
            assert len(rings_of(site, killed)) == 3
            os.kill(killed, signal.SIGKILL)
            open(hold, "w").close()
            eventually(lambda: rings_of(site, killed) == [], "the rings of the killed worker are gone", PATIENCE)
            eventually(lambda: len(server.in_flight()) == 2, "there are two workers again", PATIENCE)
            assert killed not in server.in_flight()
            assert other in server.in_flight()
            load.until_more(100)
            outcomes = Counter(future.result() for future in held)
        assert load.wrong == []
        # Of the worker that was killed, the connections were closed; of the other one, all is answered.
        assert {status for status in load.statuses if isinstance(status, int)} == {200}
        assert {status for status in outcomes if isinstance(status, int)} <= {200}
        assert load.statuses.total() - load.statuses[200] <= CLIENTS
        assert "(signal SIGKILL); it is started again" in server.log
        eventually(lambda: server.ring_used() == 0, "the rings are empty")


def _status_of(server: Server, task: Any) -> int | str:
    try:
        return server.post("/v1/tasks", json=task).status_code
    except httpx.TransportError as error:
        return type(error).__name__


def test_when_the_supervisor_is_killed_all_end_and_nothing_is_left_to_collect() -> None:
    with Site() as site:
        server = site.serve("--workers", "2")
        server.until_ready(2)
        with Load(server) as load:
            load.until_more(50)
        assert set(load.statuses) == {200}
        processes = site.processes()
        assert len(processes) == 5
        server.kill()
        eventually(lambda: not any(map(alive, processes)), "all processes have ended", PATIENCE)
        site.gc()
        assert site.segments() == []
        assert [name for name in site.left() if "shmq-metrics-" not in name] == []
        shutil.rmtree(site.temporary)
        os.mkdir(site.temporary)


def test_a_server_that_is_ended_answers_what_it_has_and_leaves_nothing() -> None:
    with Site() as site, ThreadPoolExecutor(10) as pool:
        server = site.serve("--workers", "2", "--handler", TOLD)
        server.until_ready(2)
        hold = site.path("hold")
        held = [pool.submit(server.post, "/v1/tasks", json={"hold": hold, "number": number}) for number in range(8)]
        streams = [pool.submit(server.post, "/v1/tasks?stream=true", json={"flow": 50}) for _ in range(2)]
        eventually(lambda: sum(server.in_flight().values()) == 10, "ten requests are in flight")
        server.signal(signal.SIGTERM)
        eventually(lambda: not _answers(server), "nobody answers new connections any more")
        open(hold, "w").close()
        answers = [future.result() for future in held]
        assert [answer.status_code for answer in answers] == [200] * 8
        assert [answer.json()["choices"][0]["outputs"][0]["number"] for answer in answers] == list(range(8))
        assert all(future.result().text.endswith("data: [DONE]\n\n") for future in streams)
        assert all(future.result().text.count("data: ") == 51 for future in streams)
        assert server.wait() == 0
        assert site.processes() == []
        assert site.left() == []


def _answers(server: Server) -> bool:
    with server.client(timeout=0.5) as client:
        try:
            client.get("/ready")
        except httpx.TransportError:
            return False
    return True


def test_a_server_that_is_ended_under_load_answers_nothing_but_200_and_leaves_nothing() -> None:
    with Site() as site:
        server = site.serve("--workers", "2")
        server.until_ready(2)
        with Load(server) as load:
            load.until_more(60)
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        assert load.wrong == []
        assert {status for status in load.statuses if isinstance(status, int)} == {200}
        assert site.processes() == []
        assert site.left() == []


def test_ctrl_c_in_a_terminal_reaches_the_supervisor_alone_and_what_is_in_flight_is_answered() -> None:
    with Site() as site:
        server = site.serve("--workers", "2", "--option", "step_seconds=0.05")
        server.until_ready(2)
        others = [pid for pid in site.processes() if pid != server.pid]
        assert all(os.getpgid(pid) != os.getpgid(server.pid) for pid in others)
        with Load(server, 12) as load:
            load.until_more(60)
            server.signal(signal.SIGINT)
            assert server.wait() == 0
        assert {status for status in load.statuses if isinstance(status, int)} == {200}
        assert site.left() == []


def test_when_the_supervisor_is_killed_under_load_the_engine_ends_last() -> None:
    with Site() as site:
        server = site.serve("--workers", "2")
        server.until_ready(2)
        with Load(server) as load:
            load.until_more(50)
            processes = site.processes()
            server.kill()
            eventually(lambda: not any(map(alive, processes)), "all have ended", PATIENCE)
        assert {status for status in load.statuses if isinstance(status, int)} == {200}
        site.gc()
        assert site.segments() == []
        shutil.rmtree(site.temporary)
        os.mkdir(site.temporary)
