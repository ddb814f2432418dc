"""What this machine is."""

import os
from types import SimpleNamespace

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
    monkeypatch.setattr(module, "core", lambda number: (str(number % 6),))
    assert ranks_here("cpu") == 6
    monkeypatch.setattr(module, "core", lambda number: (str(number),))
    assert ranks_here("cpu") == 8


def test_work_of_others_is_seen(monkeypatch) -> None:
    """What all cores did during the look, over how long it was."""
    assert module._busy_ticks() > 0
    seconds, ticks = iter((10.0, 12.0)), iter((500, 500 + 6 * module._TICKS))
    slept = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=slept.append))
    monkeypatch.setattr(module, "_busy_ticks", lambda: next(ticks))
    assert busy_cores() == 3.0
    assert slept == [module.LOOK_S]
