"""Ending with one's parent: a process that was started for another must not outlive it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""prctl(2)"""


def end_with(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent, process ``parent``, ends. In the main thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        # It has ended meanwhile.
        os.kill(os.getpid(), signal.SIGTERM)
