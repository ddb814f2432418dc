"""What whole steps take beyond operators and collectives: constants that are solved for when all others are known.

Each of these laws is linear in its constant, or nearly so: a few predictions and one measurement give it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from wavetrain.cluster.cluster import Achieved, Cluster, Network, Tier
from wavetrain.runtime.samples import PIPELINE, RECOMPUTED, REPLICAS, SHARDED, Sample, Small, StepCase
from wavetrain.sim.predict import simulate

Change = Callable[[Cluster, float], Cluster]
GATHERED = ("all_gather", "reduce_scatter")  # what FSDP2 does
UNIT = 1e-3
SECANTS = 4
ROUNDS = 5  # of the first two, of which each needs the other


def in_whole_steps(cluster: Cluster, samples: Sequence[Sample]) -> Cluster:
    """The cluster with what a step takes once, what messages and gathers take on the host, how far gradients hide.

    One after the other, each with those before it.
    """
    by_size = sorted((sample for sample in samples if sample.what == REPLICAS), key=lambda sample: sample.sizes)
    constants: list[Change] = [partial(_with_law, name) for name in ("step_s", "gradient_exposed")]
    steps = [*zip(by_size, constants, strict=False)] * ROUNDS
    steps += [(sample, partial(_with_law, "recompute_gap_s")) for sample in samples if sample.what == RECOMPUTED]
    steps += [(sample, _with_start) for sample in samples if sample.what == SHARDED]
    steps += [(sample, partial(_with_law, "message_s")) for sample in samples if sample.what == PIPELINE]
    for sample, change in steps:
        cluster = _solved(cluster, sample, change)
    return cluster


def _solved(cluster: Cluster, sample: Sample, change: Change) -> Cluster:
    """With the constant for which the prediction is what was measured; not below 0, and a share not above 1."""
    case = StepCase(sample.what, Small(*sample.sizes), sample.ranks)

    def step_s(value: float) -> float:
        return simulate(case.plan(change(cluster, value))).step_s

    none_s, value = step_s(0.0), UNIT
    for _ in range(SECANTS):
        slope = (step_s(value) - none_s) / value
        if sample.seconds <= none_s or slope <= 0:
            return change(cluster, 0.0)
        value = (sample.seconds - none_s) / slope
    return change(cluster, value)


def _with_law(name: str, cluster: Cluster, value: float) -> Cluster:
    most = 1.0 if name.endswith("_exposed") else float("inf")
    laws = replace(cluster.laws, **{name: min(value, most)})  # type: ignore[arg-type]
    return replace(cluster, own_laws=laws)


def _with_start(cluster: Cluster, value: float) -> Cluster:
    """Each gather and scatter of sharded parameters begins so much later than it does alone."""
    group = cluster.groups[0]
    node = group.node
    tiers = tuple(replace(tier, kinds=_started(tier, value)) for tier in node.tiers)
    network = node.network and replace(node.network, kinds=_started(node.network, value))
    return replace(cluster, groups=(replace(group, node=replace(node, tiers=tiers, network=network)),))


def _started(links: Tier | Network, value: float) -> tuple[Achieved, ...]:
    usual = Achieved("", links.efficiency, links.latency_s, links.start_s, links.ramp_s)
    own = {one.kind: one for one in links.kinds}
    for kind in GATHERED:
        known = own.get(kind, usual)
        own[kind] = replace(known, kind=kind, start_s=known.start_s + value)
    return tuple(own.values())
