from __future__ import annotations

import ctypes
import platform
import threading
from typing import NoReturn

import pytest

from shmq import fence

X86 = platform.machine() in {"x86_64", "AMD64", "i686", "i386"}


def test_every_fence_can_be_called_from_any_thread() -> None:
    returned: list[object] = []

    def call() -> None:
        returned.extend([fence.full(), fence.publish(), fence.observe(), fence.full()])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    call()
    assert returned == [None] * 20


@pytest.mark.skipif(not X86, reason="only x86 keeps loads and stores in order by itself")
def test_x86_is_known_to_keep_the_order_of_stores() -> None:
    assert fence.TOTAL_STORE_ORDER is True
    assert fence.LOCK_IS_FENCE is True
    assert fence.publish is not fence.full
    assert fence.observe is not fence.full


@pytest.mark.skipif(X86, reason="x86 needs no fence to publish")
def test_other_processors_fence_when_they_publish_and_observe() -> None:
    assert fence.TOTAL_STORE_ORDER is False
    assert fence.publish is fence.full
    assert fence.observe is fence.full


def test_a_full_fence_on_x86_takes_and_drops_a_lock_of_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CountingLock] = []

    class CountingLock:
        def __init__(self) -> None:
            self.calls: list[str] = []
            made.append(self)

        def __enter__(self) -> None:
            self.calls.append("acquire")

        def __exit__(self, *exc: object) -> None:
            self.calls.append("release")

    monkeypatch.setattr(fence.threading, "Lock", CountingLock)
    full = fence._full_by_lock()
    full()
    full()
    assert [lock.calls for lock in made] == [["acquire", "release"] * 2]


def test_the_c_library_fence_works_where_it_is_installed() -> None:
    try:
        ctypes.CDLL("libatomic.so.1")
    except OSError:
        pytest.skip("libatomic.so.1 is not installed")
    full = fence._full_by_libatomic()
    full()
    assert full() is None


def test_a_missing_libatomic_is_an_import_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(fence.ctypes, "CDLL", missing)
    with pytest.raises(ImportError, match="libatomic1") as caught:
        fence._full_by_libatomic()
    assert platform.machine() in str(caught.value)
    assert "libatomic.so.1" in str(caught.value)


def test_a_libatomic_without_the_fence_is_an_import_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence.ctypes, "CDLL", lambda name: object())
    with pytest.raises(ImportError, match="libatomic1"):
        fence._full_by_libatomic()
