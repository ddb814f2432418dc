"""A rank's own process: one thread, memory that stays with it, and no thread of it that throws out another.

Memory: glibc gives large blocks back to the system, and every step pays for fresh, zeroed pages: operators on large
tensors take up to twice as long, and not the same time twice. A step asks for the same sizes again.

Threads: gloo's receiving thread polls without pause while another thread holds the lock of a connection. If the
kernel lets it throw that one off its core, it polls until the end of its slice, 3 to 4 ms, a third of all small
all-reduces long (benchmarks/waking.py). Under SCHED_BATCH a thread that wakes up waits for its turn.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_NEVER = 2**31 - 1
_LARGEST = 2**30


def settle() -> None:
    """For this process from now on, threads that it starts included; before it makes process groups.

    Other systems and C libraries have no such calls, and some sandboxes forbid them: then all is as it was. A policy
    that somebody has chosen (`chrt`) stays.
    """
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    with suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
