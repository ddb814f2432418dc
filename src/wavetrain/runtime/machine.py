"""What this machine is, for `wavetrain measure`: devices, cores, memory, and whether something else is using it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

MOST_RANKS = 8  # that are started where nobody says how many
LOOK_S = 0.3
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Machine:
    """One device of a host, and the software on it."""

    device: str  # cpu or cuda
    title: str
    memory_bytes: int  # of one device: of a host's memory each rank's part
    torch: str


def device_here() -> str:
    """Which kind of device ranks compute on; asks the driver's library only, so that processes can still be forked."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return "cuda" if torch.cuda.is_available() else "cpu"


def ranks_here(device: str) -> int:
    """One per CUDA device; else one per core that this process may use, threads of a core counted once, at most 8."""
    if device == "cuda":
        return torch.cuda.device_count()
    cores = {core(number) for number in os.sched_getaffinity(0)}
    return min(MOST_RANKS, len(cores))


def machine(device: str, *, ranks: int) -> Machine:
    """This host, with so many ranks on it."""
    if device == "cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Machine(device, found.name, found.total_memory, str(torch.__version__))
    return Machine(device, f"one core of {_processor()}", _host_bytes() // ranks, str(torch.__version__))


def busy_cores() -> float:
    """How many cores are in use, by a short look; before anything of ours runs."""
    before = _busy_ticks()
    begun = time.monotonic()
    time.sleep(LOOK_S)
    return (_busy_ticks() - before) / _TICKS / (time.monotonic() - begun)


def _busy_ticks() -> int:
    with suppress(OSError, ValueError, IndexError):
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _, _, irq, soft, steal = map(int, words[:8])
        return user + nice + system + irq + soft + steal
    return 0


def core(number: int) -> tuple[str, ...]:
    """What threads of one core have in common."""
    folder = Path(f"/sys/devices/system/cpu/cpu{number}/topology")
    try:
        return tuple((folder / name).read_text().strip() for name in ("physical_package_id", "core_id"))
    except OSError:
        return (str(number),)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return "this host"


def _host_bytes() -> int:
    """Memory of this host, or what its control group may use of it."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no limit is the word max
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return whole
