"""What the tests of the FastDeploy faces share: settings that lead to a place of the test's own."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fmq import FMQ, EndpointManager, FMQFactory
from fmq.fastdeploy.component import Component, Context
from shmq import collect
from shmq.segment import names
from tests.queues import Place

RING = 1 << 20
Settings = Callable[..., dict[str, Any]]


@pytest.fixture(name="settings")
def settings_fixture(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Call it to say what ``$FMQ_CONFIG_JSON`` is beside the place, or to be told what it is."""

    kept: list[Component] = []
    add = Context.add

    def keep(self: Context, component: Component) -> None:
        kept.append(component)
        add(self, component)

    def settings(**more: Any) -> dict[str, Any]:
        found = {"ipc_root": place.runtime, "namespace": place.namespace, "ring_size": RING, "close_timeout": 0.2}
        monkeypatch.setenv("FMQ_CONFIG_JSON", json.dumps(found | more))
        return found | more

    # A queue that is dropped open is closed, and a warning given, which is for a test of its own.
    monkeypatch.setattr(Context, "add", keep)
    monkeypatch.setattr(EndpointManager, "config", None)
    assert FMQ._instance is None
    settings()
    yield settings
    gc.collect()
    asyncio.run(FMQFactory.destroy())
    for component in kept:
        component.give_up()
    collect(f"shmq:{place.namespace}:", discard=True)
    assert segments(place) == [], "segments were left behind"


def segments(place: Place) -> list[str]:
    """The names of all segments of the place's namespace."""
    return names(f"shmq:{place.namespace}:")
