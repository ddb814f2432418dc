import json
import os
import threading
from pathlib import Path

import pytest

from wavetrain.runtime.launch import run_local
from wavetrain.runtime.settle import settle
from wavetrain.runtime.world import World, gloo_group


def _policies(world: World) -> None:
    """Those of all threads of a rank that has made a process group."""
    settle()
    with gloo_group(world, timeout_s=30):
        tasks = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
        own = [threading.get_native_id(), *(task for task, name in tasks.items() if "gloo" in name)]
        world.give(json.dumps([os.sched_getscheduler(task) for task in own]).encode())


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has this policy")
def test_threads_of_a_rank_and_those_of_gloo_wait_for_their_turn() -> None:
    for given in run_local(_policies, 2).check().results:
        main, *of_gloo = json.loads(given or b"[]")
        assert main == os.SCHED_BATCH
        assert of_gloo
        assert set(of_gloo) == {os.SCHED_BATCH}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has this policy")
def test_where_the_system_forbids_it_all_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    main, *_ = json.loads(run_local(_policies, 1).check().results[0] or b"[]")
    assert main == os.sched_getscheduler(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has this policy")
def test_a_chosen_policy_stays() -> None:
    def work(world: World) -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        _policies(world)

    main, *_ = json.loads(run_local(work, 1).check().results[0] or b"[]")
    assert main == os.SCHED_IDLE
