"""What this machine is."""

import os
import time

from wavetrain.runtime import machine as module
from wavetrain.runtime.machine import busy_cores, device_here, machine, ranks_here


def test_this_machine_has_cores_and_memory() -> None:
    device = device_here()
    assert 1 <= ranks_here(device) <= max(8, os.cpu_count() or 1)
    one, two = machine("cpu", ranks=1), machine("cpu", ranks=2)
    assert one.title.startswith("one core of ")
    assert two.memory_bytes == one.memory_bytes // 2 > 2**20


def test_threads_of_a_core_count_once(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(module, "_core", lambda number: (str(number % 6),))
    assert ranks_here("cpu") == 6
    monkeypatch.setattr(module, "_core", lambda number: (str(number),))
    assert ranks_here("cpu") == 8


def test_work_of_others_is_seen(monkeypatch) -> None:
    """The look is at all cores; here, a child that spins stands for others."""
    child = os.fork()
    if child == 0:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            pass
        os._exit(0)
    monkeypatch.setattr(module, "LOOK_S", 1.0)
    try:
        assert busy_cores() > 0.5
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
