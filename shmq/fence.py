"""Memory ordering: the only place that knows what a processor may reorder.

Two things have to be ordered between two processes that share a ring.

*Publishing.* A writer stores the bytes of a record and then the word that announces it; a reader loads that word and
then the bytes. Neither pair may be swapped. The same holds for giving back: a reader's last load of a record comes
before its store of the release byte.

*Handshakes.* Each side stores one word and then loads the other's: the producer stores ``head`` and loads ``asleep``,
the consumer stores ``asleep`` and loads ``head`` (likewise the release bytes and ``wanted``). If the store may still
wait in a buffer while the load is done, both miss each other and a wake-up is lost. Only a full fence forbids that.

What is relied on
    x86-64
        Loads are not reordered with loads, stores not with stores, and a store not with an earlier load (Intel SDM
        vol. 3A, 9.2.2; AMD64 APM vol. 2, 7.2), so publishing needs nothing. A store may pass a later load, so a
        handshake needs a locked instruction. Taking and dropping a ``threading.Lock`` executes at least one
        (``lock cmpxchg`` in ``sem_trywait`` or ``PyMutex_Lock``, ``lock xadd`` in ``sem_post``), and orders all
        that the thread did before and after it.
    aarch64 and others
        Loads and stores may be reordered freely, and a Python lock is only an acquire and a release. Both needs are
        met by ``atomic_thread_fence(memory_order_seq_cst)`` of the C library's companion ``libatomic.so.1``
        (a ``dmb ish`` on aarch64). Where that library is missing, importing this module fails and says so.

The compiler is no concern: each store or load is a call through CPython's memoryview or mmap, which no compiler
reorders, and an aligned 64-bit item of a ``memoryview`` cast to ``"Q"`` is moved by one instruction (a ``memcpy`` of
constant size eight), so that it is never seen half written.

``full()`` costs about 0.1 us on x86-64 and 0.4 us through ctypes elsewhere.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

TOTAL_STORE_ORDER = platform.machine() in {"x86_64", "AMD64", "i686", "i386"}
"""True where publishing needs no fence: ``publish`` and ``observe`` then do nothing."""

LOCK_IS_FENCE = TOTAL_STORE_ORDER
"""True where dropping a ``threading.Lock`` orders what was stored before it with what is loaded after it."""


def _nothing() -> None:
    """Order nothing: the processor has done so already."""


def _full_by_lock() -> Callable[[], None]:
    local = threading.local()

    def full() -> None:
        # One lock a thread: a shared one could make a thread wait for another that was switched out while it held it.
        try:
            lock = local.lock
        except AttributeError:
            lock = local.lock = threading.Lock()
        with lock:
            pass

    return full


def _full_by_libatomic() -> Callable[[], None]:
    try:
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"shmq needs a memory fence on {platform.machine()}, and libatomic.so.1 has none to offer ({error}); "
            "install it (Debian: libatomic1)"
        ) from error
    fence.argtypes = [ctypes.c_int]
    fence.restype = None
    sequentially_consistent = 5

    def full() -> None:
        fence(sequentially_consistent)

    return full


full: Callable[[], None] = _full_by_lock() if TOTAL_STORE_ORDER else _full_by_libatomic()
"""Order every load and store before the call before every one after it, seen from all processors."""

publish: Callable[[], None] = _nothing if TOTAL_STORE_ORDER else full
"""Call between the stores of a record and the store that announces it, or its loads and the store that frees it."""

observe: Callable[[], None] = _nothing if TOTAL_STORE_ORDER else full
"""Call between the load that announces a record and the loads of its bytes."""
