"""What both ends over TCP share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

RECHECK = 0.02
"""Seconds between two looks while waiting, for of several who wait one may take the wake-up of another."""

WINDOW_BYTES = 64 * 1024 * 1024
WINDOW_MESSAGES = 1024


async def in_thread(work: Callable[[], None]) -> None:
    """Do what may take a moment without holding the event loop up; it is done even if this is cancelled."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, work))


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 62:
        raise ValueError(f"{name} is a number from 1 on; this one is {value!r}")
