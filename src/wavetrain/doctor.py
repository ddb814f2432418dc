"""`wavetrain doctor`: what is wrong with this machine, one line per check, each with its remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from wavetrain.base.units import GIB, format_bytes

LEAST_DISK = 2 * GIB
PROBE_SECONDS = 120
ONEDNN = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_BF16"


class State(StrEnum):
    """How a check came out."""

    FINE = "fine"
    NOTE = "note"  # something is absent that only some work needs
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine() -> tuple[Check, ...]:
    """Run every check on this machine."""
    return tuple(check() for check in CHECKS)


def _python() -> Check:
    version = sys.version_info
    found = f"{version.major}.{version.minor}.{version.micro}"
    if version >= (3, 11):
        return Check("python", State.FINE, found)
    return Check("python", State.BAD, found, "install Python 3.11 or newer")


def _core() -> Check:
    return _packages("core packages", ("numpy", "PyYAML", "rich", "typer"), State.BAD, "pip install wavetrain")


def _torch() -> Check:
    return _packages("torch", ("torch", "safetensors"), State.NOTE, "to train or trace: pip install 'wavetrain[train]'")


def _packages(name: str, packages: tuple[str, ...], absent: State, remedy: str) -> Check:
    found, missing = [], []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Check(name, absent, f"missing: {', '.join(missing)}", remedy)
    return Check(name, State.FINE, ", ".join(found))


def _bf16() -> Check:
    """bf16 products kill the process on some virtual CPUs, so they are tried in another one."""
    name = "bf16 matmul"
    if not _has("torch"):
        return Check(name, State.NOTE, "not tried: no torch", "pip install 'wavetrain[train]'")
    program = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"
    setting = os.environ.get(ONEDNN, "")
    if _runs(program, os.environ):
        return Check(name, State.FINE, f"works{f' with {ONEDNN}={setting}' if setting else ''}")
    if _runs(program, {**os.environ, ONEDNN: SAFE_ISA}):
        return Check(name, State.BAD, "kills the process here", f"export {ONEDNN}={SAFE_ISA}")
    return Check(name, State.BAD, "kills the process here", "train in fp32")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _runs(program: str, environment: os._Environ[str] | dict[str, str]) -> bool:
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _accelerators() -> Check:
    name = "accelerators"
    listing = shutil.which("nvidia-smi")
    if listing:
        command = [listing, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0 and names:
            return Check(name, State.FINE, f"{len(names)} x {names[0]}")
        return Check(name, State.BAD, "nvidia-smi lists none", "check the driver")
    found = f"none found; {os.cpu_count()} CPU cores"
    return Check(name, State.NOTE, found, "plans need none; training here uses gloo")


def _memory() -> Check:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Check("memory", State.FINE, format_bytes(pages * size))


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    if free >= LEAST_DISK:
        return Check("disk here", State.FINE, f"{format_bytes(free)} free")
    return Check("disk here", State.BAD, f"{format_bytes(free)} free", "checkpoints need room: free some")


def _hostname() -> Check:
    """gloo connects to the address this machine's own name resolves to."""
    name = socket.gethostname()
    try:
        return Check("hostname", State.FINE, f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        remedy = "add it to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo for one machine"
        return Check("hostname", State.BAD, f"{name} does not resolve", remedy)


def _ports() -> Check:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            return Check("local ports", State.BAD, str(error), "ranks on one machine talk over loopback")
    return Check("local ports", State.FINE, "loopback can be bound")


def _interface() -> Check:
    name = "network interface"
    known = [interface for _, interface in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen and chosen not in known:
        remedy = f"GLOO_SOCKET_IFNAME must be one of {', '.join(known)}"
        return Check(name, State.BAD, f"{chosen} does not exist", remedy)
    return Check(name, State.FINE, chosen or ", ".join(known))


CHECKS: tuple[Callable[[], Check], ...] = (
    _python,
    _core,
    _torch,
    _bf16,
    _accelerators,
    _memory,
    _disk,
    _hostname,
    _ports,
    _interface,
)
