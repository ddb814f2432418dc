"""A rank's own process: one thread, memory and cores that stay with it, and no thread of it that throws out another.

Memory: glibc gives large blocks back to the system, and every step pays for fresh, zeroed pages: operators on large
tensors take up to twice as long, and not the same time twice. A step asks for the same sizes again.

Threads: gloo's receiving thread polls without pause while another thread holds the lock of a connection. If the
kernel lets it throw that one off its core, it polls until the end of its slice, 3 to 4 ms, a third of all small
all-reduces long (benchmarks/waking.py). Under SCHED_BATCH a thread that wakes up waits for its turn.

Cores: a message wakes threads of gloo and then the rank itself. Where the kernel spreads these over cores, each hands
data to the next through slower caches, and takes the other rank's core: small all-reduces take a third longer, and
vary by a tenth from run to run instead of a hundredth (benchmarks/waking.py). So each rank stays on its own cores.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import torch

from wavetrain.runtime.machine import core
from wavetrain.runtime.world import Place

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_NEVER = 2**31 - 1
_LARGEST = 2**30


def settle(place: Place | None = None) -> None:
    """For this process from now on, threads that it starts included; before it makes process groups.

    A rank that is at a `place` stays on its share of the cores there, if there is one for each.

    Other systems and C libraries have no such calls, and some sandboxes forbid them: then all is as it was. A policy
    that somebody has chosen (`chrt`, `taskset`) stays.
    """
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    with suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if place is not None and (own := own_cores(place)):
        with suppress(OSError, AttributeError):
            if os.sched_getaffinity(0) == place.cores:
                os.sched_setaffinity(0, own)


def own_cores(place: Place) -> set[int]:
    """As many whole cores for each rank of a host; none where there are too few, or others have dealt them out."""
    threads: dict[tuple[str, ...], set[int]] = {}
    for number in sorted(place.cores):
        threads.setdefault(core(number), set()).add(number)
    each, cores = len(threads) // place.local_size, list(threads.values())
    return set().union(*cores[each * place.local_rank :][:each])
