"""The demo, whole: an engine, API workers, real pictures, checked answers, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("paddle")

ROOT = Path(__file__).parents[2]
PATIENCE = 60


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    yield {**os.environ, "FMQ_NAMESPACE": f"e2e-{os.getpid()}"}
    assert [name for name in os.listdir("/dev/shm") if f":e2e-{os.getpid()}:" in name] == []


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=PATIENCE, env=environment, cwd=ROOT
    )


def start_engine(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    engine = subprocess.Popen(
        [sys.executable, "-m", "engine", "--handler", "patch-stats", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert engine.stdout is not None
    assert "serving" in engine.stdout.readline()
    return engine


def test_the_demo_ends_with_nothing_lost_and_nothing_left(environment: dict[str, str]) -> None:
    result = run("examples.demo", "--requests", "24", "--workers", "2", environment=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 lost, 0 wrong, 0 leaked" in result.stdout
    assert "48/48" in result.stdout


def test_both_sides_started_by_hand_in_either_order(environment: dict[str, str]) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "examples.load", "--requests", "20"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    engine = start_engine(environment)
    said = worker.communicate(timeout=PATIENCE)[0]
    assert worker.returncode == 0, said
    assert "0 lost, 0 wrong" in said
    engine.send_signal(signal.SIGTERM)
    said = engine.communicate(timeout=PATIENCE)[0]
    assert engine.returncode == 0
    assert "20 requests served, 0 failed" in said


def test_a_second_engine_is_refused_with_the_pid_of_the_first(environment: dict[str, str]) -> None:
    engine = start_engine(environment)
    try:
        second = run("engine", environment=environment)
        assert second.returncode == 1
        assert str(engine.pid) in second.stderr
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.communicate(timeout=PATIENCE)


def test_an_engine_that_is_killed_under_load_is_replaced_and_no_request_is_lost(environment: dict[str, str]) -> None:
    engine = start_engine(environment)
    worker = subprocess.Popen(
        [sys.executable, "-m", "examples.load", "--json", "--requests", "300", "--window", "6"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert worker.stdout is not None
    deadline = time.monotonic() + PATIENCE
    while "answered" not in worker.stdout.readline():
        assert time.monotonic() < deadline
    engine.kill()
    engine.communicate(timeout=PATIENCE)
    engine = start_engine(environment)
    said = worker.communicate(timeout=PATIENCE)[0]
    engine.send_signal(signal.SIGTERM)
    engine.communicate(timeout=PATIENCE)
    assert worker.returncode == 0, said
