import json
import os
import threading
from pathlib import Path

import pytest

from wavetrain.runtime.launch import run_local
from wavetrain.runtime.settle import own_cores, settle
from wavetrain.runtime.world import Place, World, gloo_group


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


def place(rank: int, ranks: int, cores: set[int]) -> Place:
    return Place(rank=rank, size=ranks, local_rank=rank, host="", port=0, local_size=ranks, cores=frozenset(cores))


@pytest.mark.parametrize(
    ("ranks", "own"),
    [
        (1, [{0, 1, 2, 3, 4, 5, 6, 7}]),
        (2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (3, [{0, 4}, {1, 5}, {2, 6}]),
        (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (5, [set()] * 5),
    ],
)
def test_each_rank_has_whole_cores_of_its_own(monkeypatch: pytest.MonkeyPatch, ranks: int, own: list[set[int]]) -> None:
    """Four cores of two threads each, numbered as Linux does."""
    monkeypatch.setattr("wavetrain.runtime.settle.core", lambda number: ("0", str(number % 4)))
    assert [own_cores(place(rank, ranks, set(range(8)))) for rank in range(ranks)] == own
    assert [own_cores(place(rank, ranks, set())) for rank in range(ranks)] == [set()] * ranks, "somebody has dealt them"
    assert place(0, 9, set(range(8))).num_cores == 8
    assert place(0, 9, set()).num_cores == len(os.sched_getaffinity(0)), "as far as it knows"


def test_what_somebody_has_chosen_stays() -> None:
    """`taskset` for a rank, say, after all cores were counted."""

    def work(world: World) -> None:
        os.sched_setaffinity(0, {max(world.place.cores)})
        settle(world.place)
        world.give(json.dumps(sorted(os.sched_getaffinity(0))).encode())

    cores = sorted(os.sched_getaffinity(0))
    assert [json.loads(given) for given in run_local(work, 2).check().results] == [cores[-1:]] * 2


def test_ranks_stay_on_their_cores_with_all_threads() -> None:
    def work(world: World) -> None:
        settle(world.place)
        with gloo_group(world, timeout_s=30):
            tasks = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
            own = [threading.get_native_id(), *(task for task, name in tasks.items() if "gloo" in name)]
            world.give(json.dumps([sorted(os.sched_getaffinity(task)) for task in own]).encode())

    ranks, usable = 2, os.sched_getaffinity(0)
    found = [json.loads(given) for given in run_local(work, ranks).check().results]
    for rank, (main, *of_gloo) in enumerate(found):
        assert set(main) == (own_cores(place(rank, ranks, usable)) or usable)
        assert of_gloo == [main] * len(of_gloo)
        assert of_gloo
