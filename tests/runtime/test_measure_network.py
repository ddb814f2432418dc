"""Real measurements between processes of this machine, and the law that is fitted to them."""

import json
import statistics
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tests.runtime.namespaces import at_least_once, needs_namespaces
from tests.soak import sample

from wavetrain.base.errors import RunError
from wavetrain.cluster import Cluster, Group, Node, load_cluster
from wavetrain.cost.collective import Collective, seconds
from wavetrain.runtime import measure_network
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.measure_network import (
    QUICK,
    QUICK_SIZES,
    Effort,
    Hosts,
    Pass,
    Shape,
    hosts_of,
    network_samples,
)
from wavetrain.runtime.report import Limits
from wavetrain.runtime.samples import Sample
from wavetrain.runtime.virtual import VirtualCluster, virtual_cluster
from wavetrain.runtime.world import World, gloo_group
from wavetrain.study.calibrate_network import calibrate_network, span_of

RATE = 4e7
PATIENT = Limits(floor_s=300.0, start_s=300.0)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def given(work, ranks: int, run=run_local) -> list:
    """What each rank's work returns."""

    def whole(world: World) -> None:
        world.give(json.dumps(work(world)).encode())

    return [json.loads(result) for result in run(whole, ranks, limits=PATIENT).check().results]


def measured(world: World) -> list[dict]:
    return [one.row for one in network_samples(world, device="cpu", effort=QUICK)]


def read(rows: list[dict]) -> list[Sample]:
    return list(map(Sample.of, rows))


def errors(samples: list[Sample], *, devices: int, hosts: int) -> list[float]:
    """Of the fitted law, through a cluster as a plan would have it."""
    joined = calibrate_network(samples, devices=devices, hosts=hosts, tree=False)
    node = Node("n", "n", load_cluster("cpu-host").device, devices, 0.0, joined.tiers, joined.network)
    tiers = Cluster("c", (Group(node, hosts),)).tiers
    told = [seconds(Collective(s.what), s.sizes[0], span_of(s, devices), tiers) for s in samples]
    return [abs(float(one) / s.seconds - 1) for one, s in zip(told, samples, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_fitted_law_says_what_was_measured(ranks: int) -> None:
    rows = given(measured, ranks)
    assert all(row == rows[0] for row in rows), "all ranks have the same samples"
    samples = read(rows[0])
    groups = [2, 4] if ranks == 4 else [2]
    shapes = {(what, n, 1) for what in COLLECTIVES for n in groups} | {("send", 2, 1)}
    assert {(s.what, s.ranks, s.hosts) for s in samples} == shapes
    least_s = most_s = 0.0  # of the smallest and the largest, over all shapes: one alone may meet another process
    for shape in shapes:
        own = {s.sizes[0]: s.seconds for s in samples if (s.what, s.ranks, s.hosts) == shape}
        assert set(own) <= set(QUICK_SIZES)
        assert min(own.values()) > 0
        least_s, most_s = least_s + own[min(own)], most_s + own[max(own)]
    assert most_s > least_s
    assert statistics.median(errors(samples, devices=ranks, hosts=1)) < 0.35


@needs_namespaces
@pytest.mark.parametrize("each", sample([1, 2], 1))
def test_hosts_are_joined_by_links_of_the_rate_they_have(each: int) -> None:
    """Namespaces are hosts, whose ranks share a NIC and no memory: messages go over gloo, also inside a host."""

    kinds, inside = (*COLLECTIVES, "send"), {(what, 2, 1) for what in (*COLLECTIVES, "send")}
    over_all = {(what, 4, 2) for what in COLLECTIVES} | inside if each == 2 else set()

    def once(cluster: VirtualCluster) -> bool:
        """No message is faster than its link; and, if nothing else was in the way, the law says as much."""
        samples = read(given(measured, 2 * each, run=cluster.run)[0])
        assert {(s.what, s.ranks, s.hosts) for s in samples} == {(what, 2, 2) for what in kinds} | over_all
        long = [s for s in samples if s.what == "send" and s.hosts == 2 and s.sizes[0] >= 2**20]
        assert long
        assert max(each * s.sizes[0] / s.seconds for s in long) < 1.1 * RATE
        joined = calibrate_network(samples, devices=each, hosts=2, tree=False)
        assert joined.network is not None
        right = joined.network.nic_bytes_per_s == pytest.approx(RATE, rel=0.15)
        return right and statistics.median(errors(samples, devices=each, hosts=2)) < 0.35

    with virtual_cluster(2, rate_bytes_per_s=RATE) as cluster:
        at_least_once(lambda: once(cluster), least=True, most=True)


def test_one_rank_has_no_network() -> None:
    assert given(measured, 1) == [[]]


def world_with(names: list[str]) -> SimpleNamespace:
    store = dist.HashStore()
    for rank, name in enumerate(names):
        store.set(f"measure-host/{rank}", name)
    return SimpleNamespace(rank=0, size=len(names), store=store)


@pytest.mark.parametrize(
    ("names", "hosts"),
    [(["a "], Hosts(1, 1)), (["a ", "a ", "b ", "b "], Hosts(2, 2)), (["a ", "b ", "c "], Hosts(3, 1))],
)
def test_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch, names: list[str], hosts: Hosts) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    monkeypatch.setattr(measure_network, "own_host", lambda: "")
    assert hosts_of(world_with(names)) == hosts


@pytest.mark.parametrize("names", [["a ", "b ", "a ", "b "], ["a ", "a ", "b "]])
def test_unequal_or_mixed_hosts_are_refused(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    monkeypatch.setattr(measure_network, "own_host", lambda: "")
    with pytest.raises(RunError, match="equal numbers of ranks"):
        hosts_of(world_with(names))


def test_the_quicker_half_counts() -> None:
    assert measure_network._typical([1.0, 9.0, 1.2, 50.0, 1.1, 8.0]) == 1.1
    assert measure_network._typical([7.0]) == 7.0
    assert Shape("send", 4, 2, 1).sample(1.1) == Sample("send", (4,), 1.1, "fp32", 2, 1)


def test_a_part_of_an_effort_times_everything_once_at_least() -> None:
    assert QUICK.part(1) == QUICK
    assert [(QUICK.part(n).passes, QUICK.part(n).turns_s) for n in (2, 5)] == [(2, 1.5), (1, 0.6)]


def test_larger_sizes_are_left_out_once_one_takes_too_long() -> None:
    passes = [Pass(Shape("send", 4**k, 2, 1), lambda: None) for k in range(5)]
    timer = SimpleNamespace(time=lambda one: one.shape.num_bytes * 1.0)
    kept = measure_network._warmed([passes], timer, Effort(QUICK_SIZES, 1.0, pass_s=10.0))
    assert [one.shape.num_bytes for one in kept] == [1, 4, 16]


def test_clocks_of_hosts_are_compared() -> None:
    """Where kernels differ, a rank's clock is compared with rank 0's by asking; one kernel has one clock."""

    def work(world: World) -> float:
        with gloo_group(world, timeout_s=60.0):
            if world.rank == 2:
                return measure_network._clock_shift(world)
            real = time.monotonic
            if world.rank == 1:
                measure_network.time = SimpleNamespace(monotonic=lambda: real() + 1000.0)
                measure_network._boot = lambda: "another"
            return measure_network._clock_shift(world)

    shifts = given(work, 3)
    assert shifts[0] == shifts[2] == 0.0
    assert shifts[1] == pytest.approx(1000.0, abs=0.05)
