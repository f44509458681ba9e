"""The files of examples/deploy name options and variables that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


def commands() -> list[tuple[str, list[str]]]:
    """(module, options) of each command in a unit or in the compose file."""
    texts = [path.read_text() for path in sorted(DEPLOY.glob("*.service"))]
    texts += [
        service["command"] for service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    ]
    found = []
    for text in texts:
        for line in re.findall(r"python -m (.*)", text):
            module, *words = line.split()
            found.append((module, [word for word in words if word.startswith("--")]))
    return found


def test_every_unit_and_every_container_starts_something() -> None:
    assert sorted(module for module, _ in commands()) == ["api", "api", "engine", "engine"]


@pytest.mark.parametrize("module", ["api", "engine"])
def test_every_option_is_one(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"COLUMNS": "200"},
    )
    options = {option for name, options in commands() if name == module for option in options}
    assert options
    assert options <= set(re.findall(r"--[a-z-]+", result.stdout))


def test_containers_share_memory_and_sockets() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services["memory"]["ipc"] == "shareable"
    for name in ("engine", "api"):
        assert services[name]["ipc"] == "service:memory"
        assert services[name]["volumes"] == ["sockets:/run/shmq"]
        # Longer than it takes to end in order.
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > 40
