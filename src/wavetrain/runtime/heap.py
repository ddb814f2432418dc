"""A rank's own process: one thread, and freed memory stays with it, since a step asks for the same sizes again.

Otherwise glibc gives large blocks back to the system, and every step pays for fresh, zeroed pages: operators on
large tensors take up to twice as long, and not the same time twice.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_NEVER = 2**31 - 1
_LARGEST = 2**30


def settle() -> None:
    """For this process from now on: one thread, and its memory stays. Another C library has no such call."""
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
