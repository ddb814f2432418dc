"""Virtual hosts: their links are as fast and as long as asked, ranks are where they should be, nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.namespaces import at_least_once, namespaces, needs_delay, needs_namespaces

from wavetrain.base.errors import RunError
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.links import on_one_host, own_host
from wavetrain.runtime.virtual import VirtualCluster, virtual_cluster, why_not
from wavetrain.runtime.world import World, gloo_group

HEADERS = 1514 / 1448  # of Ethernet, IP and TCP, on every packet
RATE = 50e6


def results(cluster: VirtualCluster, work: Callable[[World], Any], ranks: int, **more: Any) -> list[Any]:
    def told(world: World) -> None:
        world.give(json.dumps(work(world)).encode())

    return [json.loads(given) for given in cluster.run(told, ranks, **more).check().results]


def idle(_world: World) -> None:
    pass


def send_seconds(world: World, num_bytes: int, *, back: bool, repeats: int = 7) -> float:
    """Rank 0's tensor to rank 1, with another one at the same time if `back`, until both know."""
    out, came, word = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4), torch.zeros(1)
    other, taken = 1 - world.rank, []
    with gloo_group(world, timeout_s=60.0):
        for _ in range(repeats):
            dist.barrier()
            start = time.monotonic()
            # The receive first: gloo says that it is posted on the same connection, behind what is being sent.
            works = [dist.irecv(came, other, tag=1)] if back or world.rank == 1 else []
            works += [dist.isend(out, other, tag=1)] if back or world.rank == 0 else []
            for work in works:
                assert work is not None
                work.wait()
            if world.rank == 1:
                dist.send(word, 0)
            else:
                dist.recv(word, 1)
            taken.append(time.monotonic() - start)
    return min(taken)  # whatever else this machine does only adds


@needs_namespaces
@pytest.mark.parametrize("back", [False, True], ids=["one way", "both ways"])
def test_a_link_has_the_rate_that_was_asked_for(back: bool) -> None:
    size = 12_000_000
    with virtual_cluster(2, rate_bytes_per_s=RATE) as cluster:

        def rate() -> float:
            seconds = results(cluster, lambda world: send_seconds(world, size, back=back), 2)[0]
            return float(size / seconds * HEADERS)

        at_least_once(rate, least=0.9 * RATE, most=1.1 * RATE)


@needs_namespaces
def test_what_two_senders_have_for_one_host_shares_its_link() -> None:
    """A host receives no faster than it sends: a bucket at its interface alone would let both in at once."""
    size = 5_000_000

    def work(world: World) -> float:
        taken = []
        with gloo_group(world, timeout_s=60.0):
            for _ in range(5):
                dist.barrier()
                start = time.monotonic()
                if world.rank:
                    dist.send(torch.zeros(size // 4), 0)
                else:
                    for arriving in [dist.irecv(torch.zeros(size // 4), rank) for rank in (1, 2)]:
                        assert arriving is not None
                        arriving.wait()
                taken.append(time.monotonic() - start)
        return min(taken)

    with virtual_cluster(3, rate_bytes_per_s=RATE) as cluster:
        at_least_once(
            lambda: float(2 * size / results(cluster, work, 3)[0] * HEADERS), least=0.9 * RATE, most=1.1 * RATE
        )


def round_trip_s(world: World) -> float:
    word, taken = torch.zeros(1), []
    with gloo_group(world, timeout_s=60.0):
        for _ in range(15):
            start = time.monotonic()
            if world.rank == 0:
                dist.send(word, 1)
                dist.recv(word, 1)
            else:
                dist.recv(word, 0)
                dist.send(word, 0)
            taken.append(time.monotonic() - start)
    return min(taken)


@needs_delay
def test_delay_adds_up() -> None:
    found = {}
    for delay_s in (0.0, 0.01, 0.03):
        with virtual_cluster(2, rate_bytes_per_s=RATE, delay_s=delay_s) as cluster:
            found[delay_s] = results(cluster, round_trip_s, 2)[0]
    assert found[0.0] < 0.01  # half of what the shorter delay adds, on a busy machine too
    for delay_s in (0.01, 0.03):
        assert 2 * delay_s <= found[delay_s] < 2 * delay_s + 0.01


@needs_delay
def test_a_link_with_a_delay_has_its_rate() -> None:
    size = 5_000_000
    with virtual_cluster(2, rate_bytes_per_s=RATE, delay_s=0.002) as cluster:

        def rate() -> float:
            seconds = results(cluster, lambda world: send_seconds(world, size, back=False), 2)[0]
            return float(size / (seconds - 2 * 0.002) * HEADERS)

        at_least_once(rate, least=0.9 * RATE, most=1.1 * RATE)


@needs_namespaces
def test_ranks_are_on_hosts_in_blocks_and_hosts_are_apart() -> None:
    def work(world: World) -> tuple[str, bool, list[int]]:
        return own_host(), on_one_host(world), sorted(os.sched_getaffinity(0))

    with virtual_cluster(2) as cluster:
        blocks = results(cluster, work, 4)
        turns = results(cluster, work, 4, in_turns=True)
        pinned = results(cluster, work, 4, pin=True)
    assert [host for host, _, _ in blocks] == [blocks[0][0]] * 2 + [blocks[2][0]] * 2
    assert [host for host, _, _ in turns] == [blocks[0][0], blocks[2][0]] * 2
    assert blocks[0][0] != blocks[2][0]
    assert not any(one for _, one, _ in blocks)
    cores = sorted(os.sched_getaffinity(0))
    assert [own for _, _, own in blocks] == [cores] * 4
    assert [own for _, _, own in pinned] == [[cores[rank % len(cores)]] for rank in range(4)]


@needs_namespaces
def test_ranks_of_one_virtual_host_share_memory() -> None:
    with virtual_cluster(1) as cluster:
        assert all(results(cluster, on_one_host, 2))


@needs_namespaces
def test_whoever_starts_ranks_stays_where_it_was() -> None:
    before = own_host()
    with virtual_cluster(2) as cluster:
        results(cluster, lambda world: world.rank, 2)
        assert own_host() == before
    assert run_local(idle, 2).exit_code == 0  # its store is on this machine's own network


@needs_namespaces
def test_ranks_that_do_not_fill_hosts_evenly_are_refused() -> None:
    with virtual_cluster(2) as cluster, pytest.raises(RunError, match=r"3 ranks .* over 2 virtual hosts"):
        cluster.run(idle, 3)


@needs_namespaces
@pytest.mark.parametrize("delay_s", [0.0, pytest.param(0.005, marks=needs_delay)])
def test_nothing_stays_after_an_exception(delay_s: float) -> None:
    during: list[list[str]] = []

    def fail() -> None:
        during.append(namespaces())
        raise KeyError

    with pytest.raises(KeyError), virtual_cluster(2, rate_bytes_per_s=RATE, delay_s=delay_s):
        fail()
    assert len(during[0]) == 3
    assert namespaces() == []


@needs_namespaces
def test_a_cluster_that_can_not_be_made_leaves_nothing() -> None:
    with pytest.raises(RunError, match=r"tc .*qdisc"), virtual_cluster(2, rate_bytes_per_s=0.0):
        pass
    assert namespaces() == []


@needs_delay
def test_a_tap_that_is_forbidden_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    opened = len([*Path("/proc/self/fd").iterdir()])
    monkeypatch.setattr("fcntl.ioctl", forbidden)
    with pytest.raises(RunError, match=r"a tap in wt.*: Operation not permitted"), virtual_cluster(2, delay_s=0.01):
        pass
    assert namespaces() == []
    assert len([*Path("/proc/self/fd").iterdir()]) == opened


@needs_namespaces
def test_one_that_can_not_be_removed_in_time_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real, late = subprocess.run, list[str]()

    def run(command: list[str], **options: Any) -> Any:
        if command[:3] == ["ip", "netns", "del"] and not late:
            late.append(command[3])
            raise subprocess.TimeoutExpired(command, 20.0)
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    with virtual_cluster(2):
        pass
    assert namespaces() == late
    run(["ip", "netns", "del", *late], check=True)


@needs_namespaces
def test_a_command_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, 20.0)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RunError, match=r"ip netns add .*: no end after 20 s"), virtual_cluster(1):
        pass


@needs_namespaces
def test_what_killed_processes_left_is_removed() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    dead, living, foreign = f"wt{ended.pid}n0hub", "wt1n0h0", "wt-of-others"
    for name in (dead, living, foreign):
        subprocess.run(["ip", "netns", "add", name], check=True, timeout=20)
    try:
        with virtual_cluster(1):
            pass
        assert namespaces(ended.pid) == []
        assert namespaces(1) == [living]
        assert Path("/run/netns", foreign).exists()
    finally:
        for name in (living, foreign):
            subprocess.run(["ip", "netns", "del", name], check=True, timeout=20)


SLEEPER = """
import time
from wavetrain.runtime.virtual import virtual_cluster
def work(world):
    print("ready", flush=True)
    time.sleep(60)
with virtual_cluster(2, delay_s=0.001) as cluster:
    cluster.run(work, 2)
"""


@needs_delay
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_stays_after_a_signal(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2  # a line of each rank
        assert len(namespaces(process.pid)) == 3
        process.send_signal(number)
        code = process.wait(timeout=20)
    assert code == (0 if number is signal.SIGINT else 128 + number)  # interrupted ranks are an outcome
    assert namespaces(process.pid) == []


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "virtual hosts need root"
    with pytest.raises(RunError, match="virtual hosts need root"), virtual_cluster(2):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_not() == "virtual hosts need ip and tc (iproute2)"
