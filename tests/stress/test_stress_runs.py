"""The whole program, as people run it: a run that is good, each fault found and named, every way to end."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fmq.stress import PRESETS, Sizes, run
from fmq.stress.plan import ACTIONS, FAULTS, MIB, TOPIC_FAULTS
from fmq.stress.verify import CHECKS
from shmq.segment import names
from tests.queues import eventually

DEADLINE_S = 60.0
SMALL = ["--sizes", "log:256-256KiB", "--ring", "2MiB", "--seed", "7", "--patience", "20"]
ESCAPE = "\x1b"


@pytest.fixture(name="nothing_left", autouse=True)
def nothing_left_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory for runs, which have to leave it and the process table as they were."""
    # Not tmp_path, which is too long for the path of a socket.
    with tempfile.TemporaryDirectory(prefix="fmqs", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)
        assert os.listdir(directory) == []
        assert launchers(Path(directory)) == []


def launchers(directory: Path) -> list[int]:
    """The processes of runs that have this temporary directory."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"fmq.stress" in command and f"TMPDIR={directory}".encode() in environment.split(b"\0"):
            found.append(int(pid))
    return found


def start(*options: str, **keywords: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shmq", "stress", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def stress(*options: str) -> tuple[int, str, str]:
    """Run the program to its end: exit code, output, errors."""
    with start(*options) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def row(out: str, name: str) -> dict[str, str]:
    """The line of the books with that name, column by column."""
    (line,) = re.findall(rf"^books of {name}: (.*)$", out, re.MULTILINE)
    return {column: figure for figure, column in (part.split(" ", 1) for part in line.split(", "))}


# -- good runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="quick")
def quick_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the preset, shortened, with all that it can write."""
    directory = tmp_path_factory.mktemp("quick")
    code, out, err = stress(
        "quick",
        "--duration",
        "4",
        "--seed",
        "5",
        "--json",
        str(directory / "r.json"),
        "--html",
        str(directory / "r.html"),
    )
    return {
        "code": code,
        "out": out,
        "err": err,
        "json": json.loads((directory / "r.json").read_text()),
        "html": (directory / "r.html").read_text(),
    }


def test_a_quick_run_holds_every_check_and_balances(quick: dict[str, Any]) -> None:
    assert (quick["code"], quick["err"]) == (0, "")
    books = row(quick["out"], "all")
    assert int(books["put"].replace(",", "")) > 100
    assert books["delivered"] == books["put"]
    assert re.findall(r"^check (\w+): held", quick["out"], re.MULTILINE) == list(CHECKS)
    assert quick["out"].rstrip().endswith("Every check held.")


def test_without_a_terminal_there_are_plain_lines_while_it_runs(quick: dict[str, Any]) -> None:
    assert ESCAPE not in quick["out"]
    assert "\r" not in quick["out"]
    assert len(re.findall(r"^ +\d+\.\d s  GB/s [\d.]+, messages/s [\d,]+, ", quick["out"], re.MULTILINE)) >= 2


def test_the_json_has_the_full_figures(quick: dict[str, Any]) -> None:
    document = quick["json"]
    assert document["good"] is True
    assert document["plan"]["seed"] == 5
    assert document["command"] == "shmq stress quick --seed 5 --duration 4"
    assert [check["name"] for check in document["checks"]] == list(CHECKS)
    assert document["findings"] == []
    total = document["books"]["all"]
    assert document["books"]["balanced"]
    assert total["put"] == total["delivered"] == sum(account["put"] for account in document["books"]["producers"])
    latency = document["latency"]
    assert latency["count"] == sum(count for _, _, count in latency["buckets"]) == total["delivered"]
    assert 0 < latency["percentiles_ns"]["50"] <= latency["percentiles_ns"]["99"] <= latency["max_ns"]
    assert len(document["samples"]) > 8
    # The samples end a moment before the run does.
    assert 0.5 * total["delivered"] < sum(sample["messages"] for sample in document["samples"]) <= total["delivered"]
    assert all(0 <= sample["fill"] <= 1 for sample in document["samples"])
    assert max(sample["fill"] for sample in document["samples"]) > 0.5


def test_the_html_is_one_page_that_needs_nothing_else(quick: dict[str, Any]) -> None:
    page = quick["html"]
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|\bsrc=", page)
    assert not re.search(r"(href=\"|url\()(?!#)", page)
    assert page.count("<svg") == 4
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', page) + re.findall(r"url\(#([^)]+)\)", page))
    assert used <= set(ids)
    for title in ("Throughput", "Latency", "Ring fill", "Nothing piles up", "Books", "Checks"):
        assert f"<h2>{title}</h2>" in page
    assert "Every check held" in page


def test_a_short_run_of_all_chaos_holds_every_check(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    code, out, _ = stress("chaos", "--duration", "7", "--seed", "3", "--chaos-interval", "0.12", "--json", str(file))
    assert code == 0, out
    document = json.loads(file.read_text())
    assert set(document["actions"]) == {action for actions in ACTIONS.values() for action in actions}
    assert document["lives"]["producer"] > 3
    assert document["lives"]["consumer"] > 3
    total = document["books"]["all"]
    assert total["redelivered"] > 0
    assert total["put"] + total["doubtful"] == total["delivered"]
    assert document["recovery"]["count"] > 0
    assert {event["kind"] for event in document["events"]} >= set(ACTIONS["kill"])


def test_kills_come_several_a_second_and_end_the_run() -> None:
    code, out, _ = stress("chaos", *SMALL, "--chaos", "kill", "--chaos-interval", "0.1", "--kills", "40")
    assert code == 0, out
    kills = [int(count) for count in re.findall(r"(\d+) kill-(?:producer|consumer)", out.partition("\nchaos: ")[2])]
    assert sum(kills) == 40
    assert re.search(r"consumer restarted to first redelivered message: p50 [\d.]+ (us|ms|s),", out)
    assert "\n0 lost, 0 out of order, 0 twice, 0 damaged, 0 segments or files left. Every check held.\n" in out


@pytest.mark.parametrize(
    "options",
    [
        ["--asyncio", "--transfer", "loan"],
        ["--consumers", "2", "--transfer", "copy", "--no-checksums"],
        ["--producers", "1", "--rate", "300", "--hold", "0.001-0.02"],
    ],
    ids=["asyncio and loans", "two queues", "paced and held"],
)
def test_a_number_of_messages_ends_the_run_whatever_the_load(options: list[str]) -> None:
    code, out, _ = stress("quick", *SMALL, "--messages", "601", *options)
    assert code == 0, out
    assert row(out, "all")["put"] == row(out, "all")["delivered"] == "601"


def test_what_expires_and_what_is_set_aside_stands_in_the_books() -> None:
    chaos = ["--chaos", "kill-consumer,slow", "--chaos-interval", "0.1", "--kills", "15"]
    code, out, err = stress("chaos", *SMALL, *chaos, "--ttl", "0.05", "--max-deliveries", "1", "--hold", "0.01-0.02")
    assert (code, err) == (0, ""), out
    # What workers log comes between the events.
    assert re.search(r"^ +\d+\.\d s  consumer 0: queue q0: message \d+ of producer .* is set aside", out, re.MULTILINE)
    books = {column: int(figure.replace(",", "")) for column, figure in row(out, "all").items() if column != "GB"}
    assert books["expired"] > 0
    assert books["set aside"] > 0
    assert books["put"] + books["in doubt"] == books["delivered"] + books["expired"] + books["set aside"]


def test_it_runs_from_python_too_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    plan = msgspec.structs.replace(
        PRESETS["quick"], messages=200, duration=None, ring_size=MIB, sizes=Sizes.parse("4KiB")
    )
    result = run(plan)
    assert result.good, result.findings
    assert result.total.put == result.total.delivered == 200
    assert capfd.readouterr() == ("", "")


# -- topics -----------------------------------------------------------------------------------------------------------


def test_a_topic_has_books_for_every_reader_in_all_reports(tmp_path: Path) -> None:
    code, out, err = stress(
        "quick",
        *SMALL,
        *("--readers", "3", "--messages", "400", "--chaos", "slow,hold", "--chaos-interval", "0.2"),
        *("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")),
    )
    assert (code, err) == (0, ""), out
    assert ": 1 publisher, 3 readers, policy block, payloads " in out
    assert "books of publisher 0: 400 put, 0 in doubt\n" in out
    for reader in range(3):
        books = row(out, f"reader {reader}")
        assert books["put"] == books["delivered"] == "400"
    assert row(out, "all")["delivered"] == "1,200"
    document = json.loads((tmp_path / "r.json").read_text())
    assert [account["delivered"] for account in document["books"]["readers"]] == [400, 400, 400]
    assert document["books"]["all"]["nbytes"] == 3 * document["books"]["readers"][0]["nbytes"]
    assert document["plan"]["policy"] == "block"
    page = (tmp_path / "r.html").read_text()
    assert "<td>reader 2</td>" in page
    assert "consumer" not in page
    assert "producer" not in page


@pytest.mark.parametrize(
    "options",
    [["--policy", "block"], ["--policy", "skip", "--asyncio"], ["--policy", "drop", "--transfer", "loan"]],
    ids=["block", "skip, asyncio", "drop, loans"],
)
def test_a_short_run_of_all_chaos_holds_every_check_of_a_topic(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    chaos = ["--sizes", "log:256-1MiB", "--ring", "4MiB", "--seed", "3", "--chaos-interval", "0.06", "--patience", "20"]
    code, out, err = stress("chaos", *chaos, "--duration", "5", "--readers", "4", *options, "--json", str(file))
    assert (code, err) == (0, ""), out
    document = json.loads(file.read_text())
    every = ["kill", "stop", "restart", "fork"]
    assert set(document["actions"]) >= {f"{action}-{role}" for action in every for role in ("publisher", "reader")}
    assert document["lives"]["publisher"] > 3
    assert document["lives"]["reader"] > 4
    total = document["books"]["all"]
    assert total["put"] + total["doubtful"] == total["delivered"] + total["skipped"]
    # What else skips depends on who is slow for how long.
    assert options[1] != "block" or total["skipped"] == 0


@pytest.mark.parametrize("policy", ["skip", "drop"])
def test_readers_that_are_slow_are_skipped_as_often_as_the_ring_says(policy: str) -> None:
    slow = ["--chaos", "slow,hold", "--chaos-interval", "0.1", "--duration", "3"]
    code, out, _ = stress("chaos", *SMALL, *slow, "--readers", "2", "--policy", policy)
    assert code == 0, out
    assert int(row(out, "all")["skipped"].replace(",", "")) > 0


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["flip", "double", "swap", "free", "withhold"])
def test_a_fault_in_a_topic_is_found_and_named(fault: str) -> None:
    code, out, _ = stress("quick", *SMALL, "--duration", "1.5", "--readers", "2", "--fault", fault)
    assert code == 1, out
    assert f" ({FAULTS[fault]}), at " in re.findall(r"^FAILED: .*", out, re.MULTILINE)[0]


def test_a_message_that_a_reader_was_not_offered_is_no_skipped_one() -> None:
    options = ["--duration", "1.5", "--readers", "2", "--policy", "skip", "--fault", "withhold"]
    code, out, _ = stress("quick", *SMALL, *options)
    assert code == 1, out
    assert re.search(r"publisher 0 \(.*\): (\d+) messages skipped by the journals, (?!\1 )\d+ by the ring", out)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in TOPIC_FAULTS])
def test_a_fault_that_was_made_on_purpose_is_found_and_named(fault: str) -> None:
    duration = {"memory": "5"}.get(fault, "1.5")
    code, out, _ = stress("quick", *SMALL, "--duration", duration, "--fault", fault)
    assert code == 1, out
    check = FAULTS[fault]
    assert f"FAILED: {CHECKS[check]} ({check}), at " in out
    assert f"check {check}: FAILED" in out
    # And it says how to see it again.
    assert re.search(rf"^seed 7; to repeat it: shmq stress quick --seed 7 .*--fault {fault}$", out, re.MULTILINE)


# -- how it ends, and what it refuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_in_order_with_the_report_so_far(number: int) -> None:
    with start("soak", *SMALL) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        assert "messages/s" in lines[0]
        process.send_signal(number)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    assert "stopped before its end, in order" in out
    assert "Every check held." in out


def test_a_second_interrupt_ends_it_at_once_and_nothing_that_this_left_is_a_failure(nothing_left: Path) -> None:
    with start("soak", *SMALL, "--sizes", "256KiB", "--hold", "60", "--held", "4") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert "ring fill" in lines[1]
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    assert "stopped at once: what was on its way" in out
    assert not names("shmq:shmq-stress-")


def test_a_supervisor_that_is_killed_leaves_no_process_segment_or_file(nothing_left: Path) -> None:
    with start("soak", *SMALL) as process:
        assert process.stdout is not None
        assert "messages/s" in process.stdout.readline()
        (directory,) = nothing_left.iterdir()
        prefix = f"shmq:{directory.name}:"
        assert len(names(prefix)) == 2
        process.kill()
        process.wait()
    eventually(lambda: not launchers(nothing_left), "the workers ended")
    eventually(lambda: not directory.exists() and not names(prefix), "everything was removed")


def test_a_launcher_that_is_killed_is_an_error_and_leaves_nothing(nothing_left: Path) -> None:
    with start("soak", *SMALL) as process:
        assert process.stdout is not None
        assert "messages/s" in process.stdout.readline()
        (launcher,) = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        os.kill(launcher, signal.SIGKILL)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err == "shmq stress: the process that starts the workers is gone\n"
    eventually(lambda: not launchers(nothing_left), "the workers ended")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["hasty"], "there is no preset 'hasty'; there are quick, standard, soak, chaos"),
        (["--duration", "0"], "--duration is a number of seconds above 0"),
        (["--duration", "soon"], "--duration takes seconds, or none"),
        (["--sizes", "4 parsecs"], "'4 parsecs' is no number of bytes"),
        (["--sizes", "2MiB-1MiB"], "the smaller first"),
        (["--sizes", "normal:1-2"], "--sizes takes"),
        (["--ring", "1KiB"], "--ring goes from 64KiB"),
        (["--ring", "64GiB", "--producers", "64"], "of /dev/shm, and"),
        (["--producers", "2", "--consumers", "3"], "--consumers goes from 1 to the number of producers, 2"),
        (["--readers", "0"], "--readers goes from 1 to 64; this one is 0"),
        (["--readers", "65"], "--readers goes from 1 to 64; this one is 65"),
        (["--readers", "2", "--producers", "2"], "leave --producers and --consumers away"),
        (["--readers", "2", "--max-deliveries", "2"], "in a topic nothing is delivered again"),
        (["--readers", "2", "--policy", "skip", "--ttl", "1"], "--ttl goes with --policy block alone"),
        (["--readers", "2", "--policy", "wait"], "--policy takes one of block, skip, drop"),
        (["--policy", "drop"], "say how many with --readers"),
        (["--fault", "withhold"], "--fault withhold is for a topic"),
        (["--hold", "0.5-0.1"], "--hold takes seconds"),
        (["--chaos", "kill,earthquake"], "it does not know 'earthquake'"),
        (["--kills", "3"], "there are none without --chaos kill"),
        (["--transfer", "fax"], "--transfer takes one of copy, loan, mixed"),
        (["--json", "/proc/none/r.json"], "there is no directory /proc/none"),
        (["--html", "/tmp"], "/tmp can't be written: Is a directory"),
        (["--fault", "gremlin"], "--fault takes one of"),
    ],
)
def test_an_option_that_can_not_be_meant_is_refused_in_one_line(options: list[str], complaint: str) -> None:
    code, out, err = stress(*options)
    assert (code, out) == (2, "")
    assert err.startswith("shmq stress: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_temporary_directory_that_is_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    code, out, err = stress("quick", *SMALL)
    assert (code, out) == (2, "")
    assert "set TMPDIR to a shorter directory" in err
    assert os.listdir(long) == []


def test_in_a_terminal_there_is_a_panel_and_then_tables() -> None:
    primary, secondary = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"}
    command = [sys.executable, "-m", "shmq", "stress", "quick", "--duration", "1.5", *SMALL]
    with subprocess.Popen(command, stdout=secondary, stderr=secondary, env=environment) as process:
        os.close(secondary)
        shown = b""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if select.select([primary], [], [], 0.1)[0]:
                try:
                    shown += os.read(primary, 65536)
                except OSError:
                    break
    os.close(primary)
    assert process.returncode == 0
    text = shown.decode()
    assert ESCAPE in text
    assert "ring fill" in text
    assert re.search(r"load.*━", text)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "books" in last
    assert "Every check held." in last
