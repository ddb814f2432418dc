"""Real processes: each fault is injected into rank 1 of a line of ranks that pass a tensor on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.runtime.namespaces import needs_namespaces
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from wavetrain.base.errors import InputError, Problem, RunError
from wavetrain.runtime.board import process_state
from wavetrain.runtime.launch import INTERRUPTED, Outcome, Work, run_local, run_rank
from wavetrain.runtime.progress import Phase
from wavetrain.runtime.report import Cause, Limits
from wavetrain.runtime.virtual import network
from wavetrain.runtime.world import Place, World, gloo_group, meet, place_from_environment

QUICK = Limits(floor_s=1.0, start_s=20.0)
STEPS, FAULTY, FAULT_STEP = 6, 1, 3
Fault = Callable[[World], None]


def no_fault(world: World) -> None:
    del world


def line(fault: Fault, *, steps: int = STEPS) -> Work:
    """Each rank gets a tensor from the one before it, adds 1 and passes it on; then all meet."""

    def work(world: World) -> int:
        progress, value = world.progress, torch.zeros(4)
        with gloo_group(world, timeout_s=60.0):
            for progress.step in range(steps):
                name = f"{world.rank}F{progress.step}"
                progress.computing(0, name)
                if world.rank:
                    progress.waiting(f"{world.rank}RECV_F{progress.step}", world.rank - 1)
                    dist.recv(value, world.rank - 1)
                progress.computing(1, name)
                if (world.rank, progress.step) == (FAULTY, FAULT_STEP):
                    fault(world)
                if world.rank + 1 < world.size:
                    progress.waiting("ack", world.rank + 1)  # gloo's send returns when the receiver is ready
                    dist.send(value + 1, world.rank + 1)
            progress.enter(Phase.COLLECTIVE)
            dist.barrier()
        world.give(str(value[0].item()).encode())
        return 0

    return work


def kill(world: World) -> None:
    del world
    os.kill(os.getpid(), signal.SIGKILL)


def stop(world: World) -> None:
    del world
    os.kill(os.getpid(), signal.SIGSTOP)


def throw(world: World) -> None:
    raise ValueError(f"injected into rank {world.rank}")


def leave(world: World) -> None:
    del world
    os._exit(0)


def loop(world: World) -> None:
    while world.rank >= 0:
        pass


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def forked(act: Callable[[], int]) -> Iterator[int]:
    """A process that does something and exits with what that returns; killed if it is left over."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = act()
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def exit_code(pid: int, seconds: float = 20.0) -> int:
    end = time.monotonic() + seconds
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end, "still running"
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(found[1])


def test_all_ranks_end_well_and_hand_back_their_results() -> None:
    def work(world: World) -> None:
        line(no_fault)(world)
        world.give(b"x" * 1_000_000 * world.rank)

    for _ in range(2):  # a second run from the same process works as well
        outcome = run_local(work, 3).check()
        assert (outcome.exit_code, outcome.exits, outcome.report) == (0, (0, 0, 0), None)
        assert [result.rstrip(b"x") for result in outcome.results] == [b"0.0", b"1.0", b"2.0"]
        assert [len(result) for result in outcome.results] == [3, 1_000_003, 2_000_003]
        assert children_of(os.getpid()) == []


def test_ranks_compute_after_their_parent_has() -> None:
    """Fork after a backward pass, which starts threads in some builds of torch."""

    def gradient() -> bytes:
        x = torch.arange(400.0, requires_grad=True)
        (x.reshape(20, 20) @ x.reshape(20, 20)).square().sum().backward()
        assert x.grad is not None
        return x.grad.numpy().tobytes()

    expected = gradient()
    outcome = run_local(lambda world: world.give(gradient()), 2).check()
    assert outcome.results == (expected, expected)


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        (kill, Cause.KILLED, "rank 1 was killed by signal 9 (SIGKILL), in step 3 at 1F3"),
        (throw, Cause.EXCEPTION, "rank 1 raised an exception: ValueError: injected into rank 1, in step 3 at 1F3"),
        (leave, Cause.EXITED, "rank 1 exited before its work was done: exit code 0, in step 3 at 1F3"),
        (stop, Cause.STOPPED, "rank 1 is stopped"),
        (loop, Cause.COMPUTING, "rank 1 has been computing"),
    ],
)
def test_faults(fault: Fault, cause: Cause, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun_s = time.monotonic()
    outcome = run_local(line(fault), 4, limits=QUICK, report_dir=tmp_path)
    assert time.monotonic() - begun_s < 20.0
    report = outcome.report
    assert report is not None
    assert (outcome.exit_code, report.culprit, report.cause) == (4, FAULTY, cause), report.text
    assert words in report.text.splitlines()[0]
    assert report.chain == (1, 2, 3)
    assert report.text in caplog.text
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["schema"], document["culprit"], document["chain"]) == ("wavetrain.hang/1", 1, [1, 2, 3])
    assert (document["ranks"][0]["step"], document["ranks"][0]["action"]) == (FAULT_STEP, "1F3")
    assert outcome.ended_s < 5.0
    assert children_of(os.getpid()) == []
    with pytest.raises(RunError, match="rank 1"):
        outcome.check()


def test_the_stack_of_a_rank_that_computes_too_long_is_shown() -> None:
    outcome = run_local(line(loop), 2, limits=QUICK)
    assert outcome.report is not None
    assert " in loop" in outcome.report.text
    assert "/launch.py" not in outcome.report.text


def test_a_rank_that_returns_early_is_named() -> None:
    def work(world: World) -> int:
        return 0 if world.rank == FAULTY else line(no_fault)(world) or 0

    outcome = run_local(work, 3, limits=Limits(floor_s=1.0, start_s=1.0))
    assert outcome.report is not None
    assert outcome.exit_code == 4


def test_codes_that_ranks_return() -> None:
    assert run_local(lambda world: 5 * world.rank, 2).exit_code == 5


def test_an_input_error_is_told_without_a_trace() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            raise InputError(Problem(where="plan.json", rule="is wrong"))

    outcome = run_local(work, 2)
    assert outcome.report is not None
    assert outcome.report.statuses[0].trace == ""
    assert outcome.exits[0] == 2


def test_what_happens_before_a_rank_is_connected() -> None:
    def prepare(rank: int) -> None:
        if rank == 1:
            os._exit(3)

    outcome = run_local(line(no_fault), 2, limits=QUICK, prepare=prepare)
    assert outcome.report is not None
    assert (outcome.report.culprit, outcome.report.cause, outcome.exits[1]) == (1, Cause.EXITED, 3)
    assert "before it said anything" in outcome.report.text


def test_processes_that_a_rank_started_end_with_it() -> None:
    def work(world: World) -> None:
        if world.rank == 0:
            child = subprocess.Popen(["sleep", "600"])
            world.give(str(child.pid).encode())

    outcome = run_local(work, 2).check()
    pid = int(outcome.results[0])
    until(lambda: process_state(pid) in "XZ")


def sleeping() -> int:
    def work(world: World) -> None:
        world.progress.enter(Phase.COMPUTING)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)

    return run_local(work, 3).exit_code


def ready(parent: int) -> list[int]:
    """The parent's ranks, once they all are there and rank 1 has stopped."""
    until(lambda: len(children_of(parent)) == 3 and any(process_state(pid) == "T" for pid in children_of(parent)))
    return children_of(parent)


def test_no_orphan_survives_its_parent() -> None:
    with forked(sleeping) as parent:
        ranks = ready(parent)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        until(lambda: all(process_state(pid) in "XZ" for pid in ranks))


def test_interrupt_ends_all() -> None:
    with forked(sleeping) as parent:
        ranks = ready(parent)
        os.kill(parent, signal.SIGINT)
        assert exit_code(parent) == INTERRUPTED
        assert all(process_state(pid) == "X" for pid in ranks)


@needs_namespaces
def test_a_rank_whose_cable_is_pulled_is_named(tmp_path: Path) -> None:
    with network(3) as net:

        def act() -> int:
            work = line(lambda world: net.hosts[world.rank].cut())
            limits = Limits(floor_s=2.0, start_s=20.0)
            options = {"host": net.address, "prepare": net.prepare}
            outcome = run_local(work, 3, limits=limits, report_dir=tmp_path, **options)
            return outcome.exit_code if outcome.ended_s < 5.0 else 1

        assert net.run(act) == 4
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["culprit"], document["cause"]) == (FAULTY, "silent"), document


@needs_namespaces
def test_a_short_cut_is_ridden_out() -> None:
    with network(2) as net:

        def glitch(world: World) -> None:
            net.hosts[world.rank].cut()
            time.sleep(1.0)
            net.hosts[world.rank].mend()

        limits = Limits(floor_s=8.0, start_s=20.0)

        def act() -> int:
            return run_local(line(glitch), 2, limits=limits, host=net.address, prepare=net.prepare).exit_code

        assert net.run(act) == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def unattended(work: Work, size: int, report_dir: Path) -> Iterator[list[int]]:
    """Ranks as Slurm starts them: nobody of ours watches."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    port = free_port()
    with contextlib.ExitStack() as stack:
        pids = []
        for rank in range(size):
            place = Place(rank=rank, size=size, local_rank=rank, host="127.0.0.1", port=port, serves=rank == 0)
            act = lambda place=place: run_rank(work, meet(place), limits=QUICK, report_dir=report_dir)  # noqa: E731
            pids.append(stack.enter_context(forked(act)))
        yield pids


@pytest.mark.parametrize(
    ("fault", "cause", "code"),
    [(kill, "exited", -9), (stop, "stopped", -9), (throw, "exception", 4)],
)
def test_ranks_watch_one_another(fault: Fault, cause: str, code: int, tmp_path: Path) -> None:
    with unattended(line(fault), 3, tmp_path) as pids:
        assert [exit_code(pid) for pid in (pids[0], pids[2], pids[1])] == [4, 4, code]
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["culprit"], document["cause"], document["chain"]) == (FAULTY, cause, [1, 2])


def test_ranks_leave_together(tmp_path: Path) -> None:
    def work(world: World) -> None:
        line(no_fault)(world)
        time.sleep(0.3 * world.rank)

    with unattended(work, 3, tmp_path) as pids:
        assert [exit_code(pid) for pid in pids] == [0, 0, 0]
    assert not (tmp_path / "report.json").exists()


def test_a_rank_that_is_asked_to_end_does_so_inside_gloo(tmp_path: Path) -> None:
    def work(world: World) -> None:
        with gloo_group(world, timeout_s=60.0):
            world.progress.waiting("x", 1)
            (tmp_path / f"rank-{world.rank}").touch()
            dist.recv(torch.zeros(1), 1) if world.rank == 0 else time.sleep(60)

    with unattended(work, 2, tmp_path) as pids:
        until(lambda: (tmp_path / "rank-0").exists() and (tmp_path / "rank-1").exists())
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert exit_code(pids[1]) in (143, 4)
        assert exit_code(pids[0]) in (143, 4)


def test_a_rank_that_alone_is_asked_to_end_does_not_leave_others_waiting(tmp_path: Path) -> None:
    def work(world: World) -> None:
        with gloo_group(world, timeout_s=60.0):
            world.progress.waiting("x", 1 - world.rank)
            (tmp_path / f"rank-{world.rank}").touch()
            time.sleep(60)

    with unattended(work, 2, tmp_path) as pids:
        until(lambda: (tmp_path / "rank-0").exists() and (tmp_path / "rank-1").exists())
        os.kill(pids[1], signal.SIGTERM)
        assert exit_code(pids[1]) == 143
        assert exit_code(pids[0]) == 4
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["culprit"], document["why"]) == (1, "rank 1 was asked to end (SIGTERM)")


def test_ranks_of_a_new_attempt_meet_in_a_store_that_has_an_old_ones_words() -> None:
    """The second attempt's rank 1 comes first, and the first attempt's words are still there."""
    place = Place(rank=0, size=2, local_rank=0, host="127.0.0.1", port=free_port(), serves=True)
    rounds = []
    with ThreadPoolExecutor(2) as pool:
        store = TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)
        for delay in (0.0, 0.3):
            there = replace(place, serves=False)
            second = pool.submit(meet, replace(there, rank=1, attempt=7))  # hosts count by themselves
            time.sleep(delay)
            first = pool.submit(meet, there)
            rounds.append((first.result(20).place.round, second.result(20).place.round))
        del store
    assert rounds[0][0] == rounds[0][1] != rounds[1][0] == rounds[1][1]


def test_who_does_not_come_is_named() -> None:
    place = Place(rank=0, size=3, local_rank=0, host="127.0.0.1", port=free_port(), serves=True)
    with pytest.raises(RunError, match=r"ranks 1, 2 did not come to 127\.0\.0\.1"):
        meet(place, timeout_s=0.3)


def under_torchrun(work: Work, report_dir: Path, *, restarts: int = 0) -> int:
    """Two ranks started by torchrun's own agent, forked so that they need not import torch."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=restarts,
        monitor_interval=0.05,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": "true"},
        local_addr="127.0.0.1",
        start_method="fork",
        run_id="test",
    )

    def rank() -> None:
        place = place_from_environment(os.environ)
        assert place is not None
        sys.exit(run_rank(work, meet(place), limits=QUICK, report_dir=report_dir / str(place.attempt)))

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        elastic_launch(config, rank)()
    except ChildFailedError:
        return 1
    return 0


def test_torchrun_ends_all_at_once_and_the_culprit_is_still_named(tmp_path: Path) -> None:
    with forked(lambda: under_torchrun(line(kill), tmp_path)) as agent:
        assert exit_code(agent) == 1
    document = json.loads((tmp_path / "0" / "report.json").read_text())
    assert (document["culprit"], document["cause"]) == (FAULTY, "exited")


def test_torchruns_restart_meets_no_keys_of_the_attempt_before(tmp_path: Path) -> None:
    def fault(world: World) -> None:
        if world.place.attempt == 0:
            kill(world)

    with forked(lambda: under_torchrun(line(fault), tmp_path, restarts=1)) as agent:
        assert exit_code(agent) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_outcome_without_a_report_still_fails() -> None:
    with pytest.raises(RunError, match="exit code 5"):
        Outcome(exit_code=5, results=(), exits=(5,)).check()
