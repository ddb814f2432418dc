"""What whole steps take beyond operators and collectives: constants that are solved for when all others are known.

Each of these laws is linear in its constant, or nearly so: a few predictions and one measurement give it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from wavetrain.cluster.cluster import Achieved, Cluster, Network, Tier, achieved
from wavetrain.runtime.samples import (
    FEW,
    MANY,
    PIPELINE,
    RECOMPUTED,
    REPLICAS,
    SHARDED,
    TINY,
    WIDE,
    Sample,
    step_case,
)
from wavetrain.sim.predict import simulate
from wavetrain.study.calibrate_network import LEAST_EFFICIENCY

GATHERED = ("all_gather", "reduce_scatter")  # what FSDP2 does
REDUCED = ("all_reduce",)
UNIT = 1e-3
SECANTS = 4
VISIBLE = 0.1  # of a step: what a share must be of to be found
ROUNDS = 5  # of two constants of which each needs the other


@dataclass(frozen=True)
class Change:
    """A constant to be found: a cluster with another value of it."""

    apply: Callable[[Cluster, float], Cluster]
    is_share: bool = False  # not above 1

    def __call__(self, cluster: Cluster, value: float) -> Cluster:
        return self.apply(cluster, min(value, 1.0) if self.is_share else value)


def in_whole_steps(cluster: Cluster, samples: Sequence[Sample]) -> Cluster:
    """The cluster with what only whole steps show.

    Of a pipeline with few and with many microbatches: what a step takes once, and a message on its hosts. With these:
    what computing again takes. Of a tiny and a wide model on replicas: how much later all-reduces begin than alone, and
    how far gradients hide; of the same sharded: how much later gathers begin, and how much longer they take, with all
    that FSDP2 does around them.
    """
    by_case = {(sample.what, sample.sizes[1], sample.sizes[-1]): sample for sample in samples if len(sample.sizes) == 7}
    tiny, wide = TINY.hidden, WIDE.hidden
    solved: list[list[tuple[tuple[str, int, int], Change]]] = [
        [((PIPELINE, tiny, FEW), _law("step_s")), ((PIPELINE, tiny, MANY), _law("message_s"))],
        [((RECOMPUTED, tiny, MANY), _law("recompute_gap_s"))],
        [((REPLICAS, tiny, 1), _start(cluster, REDUCED)), ((REPLICAS, wide, 1), _law("gradient_exposed"))],
        [((SHARDED, tiny, 1), _start(cluster, GATHERED)), ((SHARDED, wide, 1), _slower(cluster, GATHERED))],
    ]
    for together in solved:
        for case, change in together * (ROUNDS if len(together) > 1 else 1):
            if case in by_case:
                cluster = _solved(cluster, by_case[case], change)
    return cluster


def _solved(cluster: Cluster, sample: Sample, change: Change) -> Cluster:
    """With the constant for which the prediction is what was measured; not below 0, and a share not above 1."""
    case = step_case(sample)

    def step_s(value: float) -> float:
        return simulate(case.plan(change(cluster, value))).step_s

    none_s, value = step_s(0.0), UNIT
    if change.is_share and step_s(1.0) - none_s < VISIBLE * sample.seconds:
        return cluster  # a share of next to nothing could be any
    for _ in range(SECANTS):
        slope = (step_s(value) - none_s) / value
        if sample.seconds <= none_s or slope <= 0:
            return change(cluster, 0.0)
        value = (sample.seconds - none_s) / slope
    return change(cluster, value)


def _law(name: str) -> Change:
    def change(cluster: Cluster, value: float) -> Cluster:
        laws = replace(cluster.laws, **{name: value})  # type: ignore[arg-type]
        return replace(cluster, own_laws=laws)

    return Change(change, is_share=name.endswith("_exposed"))


def _start(alone: Cluster, kinds: Sequence[str]) -> Change:
    """Some kinds of collectives begin so much later than alone."""
    return _achieved(alone, kinds, lambda own, first, value: replace(own, start_s=first.start_s + value))


def _slower(alone: Cluster, kinds: Sequence[str]) -> Change:
    """Some kinds of collectives take so many times longer than alone, beyond once."""

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

    return Change(changed)
