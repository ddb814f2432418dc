"""What whole steps take beyond operators and collectives: constants that are solved for when all others are known.

A step never gets shorter as one of these constants grows: it is enclosed by predictions, from both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

from wavetrain.cluster.cluster import Achieved, Cluster, Network, Rates, Tier, achieved
from wavetrain.runtime.samples import ALONE, EMPTY, REPLICAS, SHARDED, TINY, WIDE, Sample, step_case
from wavetrain.sim.predict import simulate
from wavetrain.study.calibrate_network import LEAST_EFFICIENCY

WHOLE = (ALONE, EMPTY, REPLICAS, SHARDED)
GATHERED = ("all_gather", "reduce_scatter")  # what FSDP2 does
IN_COMPANY = ("all_reduce", *GATHERED)
UNIT = 1e-3
ENDLESS = 1e24  # per second
MOST = 1e6  # of any constant, in its unit
BISECTIONS = 16
ROUNDS = 5  # of constants of which each needs the others

Change = Callable[[Cluster, float], Cluster]  # a cluster with another value of a constant that is to be found


def in_whole_steps(cluster: Cluster, samples: Sequence[Sample]) -> Cluster:
    """The cluster with what only whole steps of all ranks show.

    Of a pipeline that computes nothing: how many times longer messages are on their way than alone. Of tiny replicas:
    what a step takes once where ranks wait for one another. Of a wide model on replicas and sharded: how many times
    longer bytes of collectives take than alone, with caches that are cold and all that is copied for them. Of a tiny
    one sharded: how much later gathers begin than alone, with all that FSDP2 does.
    """
    by_case = {(sample.what, sample.sizes[1]): sample for sample in samples if sample.what in WHOLE}
    tiny, wide = TINY.hidden, WIDE.hidden
    if by_case:  # on processors, where what carries gradients beside compute takes its core
        cluster = _law("gradient_exposed")(cluster, 1.0)
    if empty := by_case.get((EMPTY, tiny)):
        cluster = _with_messages(_law("message_s")(cluster, 0.0), empty)
    alone = {width: _on_one(cluster, by_case.get((ALONE, width))) for width in (tiny, wide)}
    each_needs_the_others = [
        (_law("step_s"), tiny, [REPLICAS]),
        (_slower(cluster, IN_COMPANY), wide, [REPLICAS, SHARDED]),
        (_start(cluster, GATHERED), tiny, [SHARDED]),
    ]
    for change, width, whats in each_needs_the_others * ROUNDS:
        known = [by_case[what, width] for what in whats if (what, width) in by_case]
        if known:
            cluster = change(cluster, mean(_solved(cluster, one, change, late_s=alone[width]) for one in known))
    return cluster


def _with_messages(cluster: Cluster, empty: Sample) -> Cluster:
    """What hosts take for a message can't be told from its way: it is all latency, or `message_s` where none was found.

    A pipeline that was quicker than its messages alone says nothing.
    """
    change = _longer(cluster) if any(achieved(tier, "send").latency_s for tier in cluster.tiers) else _law("message_s")
    value = _solved(instant(cluster), empty, change)
    return change(cluster, value) if value else cluster


def _on_one(cluster: Cluster, sample: Sample | None) -> float:
    """Seconds that a step on one rank took longer than predicted; 0 where none was timed."""
    if sample is None:
        return 0.0
    return sample.seconds - simulate(step_case(sample).plan(cluster.part(1))).step_s


def instant(cluster: Cluster) -> Cluster:
    """The same links, and devices that take no time."""
    group, node, device = cluster.groups[0], cluster.groups[0].node, cluster.device
    rates = Rates(**dict.fromkeys(device.peak.known(), ENDLESS))
    device = replace(device, peak=rates, memory_bytes_per_s=ENDLESS)
    laws = replace(cluster.laws, gap_s=0.0, launch_s=0.0, step_s=0.0, tensor_step_s=0.0)
    return replace(cluster, groups=(replace(group, node=replace(node, device=device)),), own_laws=laws)


def _solved(cluster: Cluster, sample: Sample, change: Change, *, late_s: float = 0.0) -> float:
    """The constant for which the prediction is what was measured, not below 0.

    `late_s`: what the same model took longer than predicted on one rank. That is nothing that ranks exchange, and a
    machine that is slow for a while is slow at both.
    """
    case, seconds = step_case(sample), sample.seconds - late_s

    def step_s(value: float) -> float:
        return simulate(case.plan(change(cluster, value))).step_s

    none_s = step_s(0.0)
    low, high = 0.0, UNIT
    while step_s(high) < seconds and high < MOST:
        low, high = high, 2 * high
    if seconds <= none_s or step_s(MOST) <= none_s:
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if step_s(middle) < seconds else (low, middle)
    return (low + high) / 2


def _law(name: str) -> Change:
    def change(cluster: Cluster, value: float) -> Cluster:
        laws = replace(cluster.laws, **{name: value})  # type: ignore[arg-type]
        return replace(cluster, own_laws=laws)

    return change


def _start(alone: Cluster, kinds: Sequence[str]) -> Change:
    """Some kinds of collectives begin so much later than alone."""
    return _achieved(alone, kinds, lambda own, first, value: replace(own, start_s=first.start_s + value))


def _longer(alone: Cluster) -> Change:
    """Messages are so many times longer on their way than alone, whatever is in them."""
    return _achieved(alone, ["send"], lambda own, first, value: replace(own, latency_s=first.latency_s * value))


def _slower(alone: Cluster, kinds: Sequence[str]) -> Change:
    """Bytes of some kinds of collectives take so many times longer than alone, beyond once."""

    def slower(own: Achieved, first: Achieved, value: float) -> Achieved:
        return replace(own, efficiency=max(LEAST_EFFICIENCY, first.efficiency / (1 + value)))

    return _achieved(alone, kinds, slower)


def _achieved(alone: Cluster, kinds: Sequence[str], change: Callable[[Achieved, Achieved, float], Achieved]) -> Change:
    """Change what kinds achieve now, given what they do alone."""

    def on(links: Tier | Network, first: Tier | Network, value: float) -> tuple[Achieved, ...]:
        own = {one.kind: one for one in links.kinds}
        for kind in kinds:
            own[kind] = change(achieved(links, kind), achieved(first, kind), value)
        return tuple(own.values())

    def changed(cluster: Cluster, value: float) -> Cluster:
        group, node, first = cluster.groups[0], cluster.groups[0].node, alone.groups[0].node
        pairs = zip(node.tiers, first.tiers, strict=True)
        tiers = tuple(replace(tier, kinds=on(tier, before, value)) for tier, before in pairs)
        network = node.network
        if network is not None and first.network is not None:
            network = replace(network, kinds=on(network, first.network, value))
        return replace(cluster, groups=(replace(group, node=replace(node, tiers=tiers, network=network)),))

    return changed
