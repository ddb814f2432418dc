"""The law of collectives: published rates, shapes of the latency, monotony, arrays."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.cluster import load_cluster, node_names
from wavetrain.cost.collective import COLLECTIVES, NCCL_CHOICES, Collective, Span, fastest, reaches, seconds

AR, AG, RS, A2A, SEND = Collective
GIB16 = 2.0**34
KINDS = st.sampled_from(Collective)
SIZES = st.floats(1.0, 1e12)
CLUSTERS = st.builds(
    lambda name, nodes: load_cluster(f"{name}:{nodes if load_cluster(name).node.network else 1}"),
    st.sampled_from(node_names()),
    st.sampled_from((1, 2, 3, 8, 64, 1000)),
)


@st.composite
def groups(draw):
    """A cluster's tiers and a group that fits on them; steps may hide behind transfers."""
    cluster = draw(CLUSTERS)
    shares = st.sampled_from((0.0, 0.5, 1.0))
    ranks = draw(st.integers(1, cluster.num_devices))
    stride = draw(st.integers(1, max(1, (cluster.num_devices - 1) // max(1, ranks - 1))))
    return tuple(replace(tier, hidden=draw(shares)) for tier in cluster.tiers), Span(ranks, stride)


def bus_gb_per_s(kind, name, ranks, stride=1, num_bytes=GIB16, **how):
    """Bus bandwidth as nccl-tests defines it."""
    rounds = 2 if kind is AR else 1
    time_s = seconds(kind, num_bytes, Span(ranks, stride), load_cluster(name).tiers, **how)
    return rounds * (ranks - 1) / ranks * num_bytes / time_s / 1e9


@pytest.mark.parametrize(
    ("kind", "name", "ranks", "stride", "published", "algorithms"),
    [
        (AR, "dgx-a100", 8, 1, 235, None),
        (AR, "dgx-h200", 8, 1, 367, ("ring",)),
        (AG, "dgx-h200", 8, 1, 361, None),
        (RS, "dgx-h200", 8, 1, 363, None),
        (AR, "dgx-h200", 8, 1, 480, None),
        (AR, "dgx-b200", 8, 1, 846, None),
        (AR, "dgx-a100:2", 16, 1, 192, None),
        (AR, "dgx-h100:2", 16, 1, 380, None),
        (AR, "dgx-a100:2", 2, 8, 24, None),  # one port each
        (AR, "dgx-h100:2", 2, 8, 48, None),
        (AR, "dgx-1-v100", 8, 1, 134, None),
        (AR, "dgx-1-v100", 2, 1, 22, None),  # a single link of the cube mesh
        (AR, "mi300x-node", 8, 1, 313, None),
    ],
)
def test_published_rates_of_long_messages(kind, name, ranks, stride, published, algorithms):
    found = bus_gb_per_s(kind, name, ranks, stride, algorithms=algorithms)
    assert found == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(
    ("nodes", "mib", "published"), [(4, 64, 217), (8, 256, 281), (32, 64, 151), (64, 256, 246), (512, 1024, 286)]
)
def test_published_all_reduce_over_many_nodes(nodes, mib, published):
    """Fernandez et al. 2024, Figure 2 (read off the plot, +/- 5 GB/s)."""
    found = bus_gb_per_s(AR, f"dgx-h100:{nodes}", 8 * nodes, num_bytes=mib * 2**20)
    assert found == pytest.approx(published, rel=0.15)


def test_ring_latency_is_linear_and_others_logarithmic():
    tiers = load_cluster("dgx-h100:512").tiers
    ranks = 8 * 2.0 ** np.arange(4, 10)

    def growth(kind, **how):
        return np.diff(seconds(kind, 1.0, Span(ranks, 1), tiers, **how))

    per_node = growth(AG) / np.diff(ranks / 8)
    assert per_node == pytest.approx(np.full(5, 7 * tiers[0].relay_s + tiers[1].latency_s))
    assert 20e-6 < per_node[0] < 38e-6  # 21 us fitted to whole training steps elsewhere, 37.8 us by NCCL's own table
    assert growth(AR) == pytest.approx(np.full(5, 6 * tiers[1].latency_s))
    assert growth(AG, algorithms=("pat",)) == pytest.approx(np.full(5, tiers[1].latency_s))


def test_pat_and_hierarchical_are_choices_of_the_caller():
    chosen = {name for names in NCCL_CHOICES.values() for name in names}
    assert set(COLLECTIVES) - chosen == {"pat", "hierarchical"}
    tiers, span = load_cluster("dgx-h100:256").tiers, Span(2048, 1)
    classical = seconds(AG, 4e8, span, tiers)
    assert seconds(AG, 4e8, span, tiers, algorithms=("ring", "pat")) < classical / 2
    assert seconds(AG, 4e8, span, tiers, algorithms=("hierarchical",)) < classical


@pytest.mark.parametrize(
    ("name", "span", "num_bytes", "algorithm"),
    [
        ("dgx-a100", Span(8, 1), 1e9, "ring"),
        ("dgx-h100", Span(8, 1), 1e9, "nvls"),
        ("dgx-h100", Span(2, 1), 1e9, "ring"),
        ("gb200-nvl72:18", Span(72, 1), 1e9, "nvls"),
        ("dgx-h100:64", Span(512, 1), 1e6, "nvls_tree"),
        ("dgx-h100:64", Span(64, 8), 1e6, "tree"),
        ("dgx-a100:64", Span(512, 1), 1e6, "tree"),
        ("dgx-a100:4", Span(32, 1), 1e11, "ring"),
    ],
)
def test_the_algorithm_that_nccl_would_choose(name, span, num_bytes, algorithm):
    tiers = load_cluster(name).tiers
    time_s, found = fastest(AR, num_bytes, span, tiers)
    assert (found, time_s) == (algorithm, seconds(AR, num_bytes, span, tiers))


def test_members_of_a_group_by_tier():
    tiers = load_cluster("dgx-a100:4").tiers
    for ranks, stride, inner, outer in ((32, 1, 8, 32), (8, 1, 8, 8), (4, 8, 1, 4), (16, 2, 4, 16), (2, 4, 2, 2)):
        node, network = reaches(Span(ranks, stride), tiers)
        assert (node.outer, network.inner, network.outer) == (inner, inner, outer)
        assert (bool(node.crossed), bool(network.crossed)) == (inner > 1, outer > inner)


def test_shared_nics_halve_a_groups_rate():
    alone = replace(load_cluster("p4d:2").tiers[-1], sharers=1.0)
    inside, shared = load_cluster("p4d:2").tiers
    for kind in (AR, AG, SEND):
        span = Span(2, 8)
        ratio = seconds(kind, GIB16, span, (inside, shared)) / seconds(kind, GIB16, span, (inside, alone))
        assert ratio == pytest.approx(2, rel=1e-3)


def test_an_all_to_all_is_bound_by_the_nics_it_uses():
    tiers = load_cluster("dgx-h100:4").tiers
    between = 1e10 * 24 / 32 / (50e9 * tiers[1].efficiency / (1 + 2 * tiers[1].congestion))
    assert seconds(A2A, 1e10, Span(32, 1), tiers) == pytest.approx(between, rel=0.01)
    assert seconds(A2A, 1e10, Span(8, 1), tiers) == pytest.approx(1e10 * 7 / 8 / (450e9 * 0.815), rel=0.01)


@pytest.mark.parametrize("kind", [AR, AG, RS, SEND])
@pytest.mark.parametrize("num_bytes", [2**10, 2**20, 2**30])
def test_the_longer_of_steps_and_transfer_hides_the_other(kind, num_bytes):
    """All of it, a half, nothing; a start is not hidden."""
    links = replace(load_cluster("dgx-a100").tiers[0], start_s=1e-3, ramp_s=0.0, multicast=0.0, tree=False)
    shown, half, longer = (
        seconds(kind, num_bytes, Span(4), (replace(links, hidden=hidden),)) - 1e-3 for hidden in (0.0, 0.5, 1.0)
    )
    steps_s = seconds(kind, num_bytes, Span(4), (replace(links, bytes_per_s=1e30),)) - 1e-3
    assert longer == pytest.approx(max(steps_s, shown - steps_s))
    assert half == pytest.approx((shown + longer) / 2)


def test_sends():
    tiers = load_cluster("dgx-h100:4").tiers
    near, far = (seconds(SEND, 1e9, Span(2, stride), tiers) for stride in (1, 8))
    assert near == pytest.approx(1e9 / (450e9 * 0.815), rel=0.05)
    assert far == pytest.approx(1e9 / (50e9 * 0.96), rel=0.05)
    assert seconds(SEND, 1e9, Span(4, 8), tiers) == pytest.approx(far, rel=0.03)  # stages of a pipeline, each a node


@given(groups(), KINDS, SIZES)
def test_nothing_to_do_costs_nothing(group, kind, num_bytes):
    tiers, span = group
    assert seconds(kind, num_bytes, Span(1, span.stride), tiers) == 0.0
    assert seconds(kind, 0.0, span, tiers) == 0.0
    assert fastest(kind, num_bytes, Span(1, 1), tiers)[0] == 0.0
    found = seconds(kind, num_bytes, span, tiers)
    assert np.isfinite(found)
    assert (found > 0) == (span.ranks > 1)


@given(groups(), KINDS, SIZES, st.floats(1, 1e6))
def test_more_bytes_are_never_faster(group, kind, num_bytes, factor):
    tiers, span = group
    assert seconds(kind, num_bytes * factor, span, tiers) >= seconds(kind, num_bytes, span, tiers) * (1 - 1e-12)


CHANGES = {
    "bytes_per_s": lambda tier, f: replace(tier, bytes_per_s=tier.bytes_per_s * f),
    "pair": lambda tier, f: replace(tier, pair_bytes_per_s=tier.pair_bytes_per_s and tier.pair_bytes_per_s * f),
    "latency": lambda tier, f: replace(tier, latency_s=tier.latency_s / f),
    "start": lambda tier, f: replace(tier, start_s=tier.start_s / f),
    "ramp": lambda tier, f: replace(tier, ramp_s=tier.ramp_s / f),
    "sharers": lambda tier, f: replace(tier, sharers=max(1.0, tier.sharers / f)),
    "efficiency": lambda tier, f: replace(tier, efficiency=min(1.0, tier.efficiency * f)),
    "congestion": lambda tier, f: replace(tier, congestion=tier.congestion / f),
    "hidden": lambda tier, f: replace(tier, hidden=1 - (1 - tier.hidden) / f),
}


@given(groups(), KINDS, SIZES, st.floats(1, 1e3), st.sampled_from(sorted(CHANGES)), st.integers(0, 3))
def test_a_better_tier_is_never_slower(group, kind, num_bytes, factor, change, which):
    tiers, span = group
    if not tiers:
        return
    which %= len(tiers)
    better = tuple(CHANGES[change](tier, factor) if i == which else tier for i, tier in enumerate(tiers))
    for algorithm in COLLECTIVES:
        try:
            before = seconds(kind, num_bytes, span, tiers, algorithms=(algorithm,))
        except ValueError:
            continue
        assert seconds(kind, num_bytes, span, better, algorithms=(algorithm,)) <= before * (1 + 1e-12)


@given(KINDS, st.lists(st.tuples(SIZES, st.integers(1, 16), st.integers(1, 8)), min_size=1, max_size=20))
def test_arrays_give_what_numbers_give(kind, items):
    tiers = load_cluster("dgx-h100:16").tiers
    num_bytes, ranks, stride = np.array(items).T
    found = seconds(kind, num_bytes, Span(ranks, stride), tiers)
    assert found.shape == num_bytes.shape
    one_by_one = [seconds(kind, b, Span(int(r), int(s)), tiers) for b, r, s in items]
    assert all(isinstance(time_s, float) for time_s in one_by_one)
    assert found == pytest.approx(one_by_one, rel=1e-12)


def test_shapes_broadcast():
    tiers = load_cluster("dgx-h100:16").tiers
    found = seconds(AR, np.array([[1e6], [1e9]]), Span(np.array([1, 8, 128]), 1), tiers)
    assert found.shape == (2, 3)
    assert np.all(found[:, 0] == 0)
    assert seconds(AG, np.ones(3), Span(1, 1), ()).shape == (3,)


def test_what_can_not_be_done_is_an_error():
    tiers = load_cluster("dgx-a100:2").tiers
    for ranks, stride in ((17, 1), (3, 8), (0, 1), (2, 0)):
        with pytest.raises(ValueError, match="does not fit"):
            seconds(AR, 1.0, Span(ranks, stride), tiers)
    with pytest.raises(ValueError, match="does not fit on 1 device"):
        seconds(AR, 1.0, Span(2, 1), ())
    for kind, algorithm in (
        (AR, "nvls"),
        (AR, "pat"),
        (AG, "tree"),
        (SEND, "ring"),
        (AG, "direct"),
        (A2A, "nvls_tree"),
    ):
        with pytest.raises(ValueError, match="can't be done"):
            seconds(kind, 1.0, Span(16, 1), tiers, algorithms=(algorithm,))


def test_fast_enough_for_a_search():
    tiers = load_cluster("dgx-h100:64").tiers
    num_bytes, span = np.linspace(1, 1e10, 100_000), Span(np.tile([2, 8, 64, 512], 25_000), 1)
    start = time.perf_counter()
    seconds(AR, num_bytes, span, tiers)
    assert time.perf_counter() - start < 1.0  # 0.04 s on an idle core
