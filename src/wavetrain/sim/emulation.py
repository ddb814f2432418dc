"""From a plan to its `Emulation`: the estimate's times without those of communication, and its sizes instead."""

from __future__ import annotations

import numpy as np

from wavetrain.base.errors import InputError, Problem
from wavetrain.cluster.laws import Laws
from wavetrain.plan.emulation import Emulation, LayerWork, Travel
from wavetrain.plan.plan import Plan
from wavetrain.sim.batch import Batch, Floats
from wavetrain.sim.estimate import EndTimes, Estimate, end_shard_seconds, estimate
from wavetrain.sim.gather import gather
from wavetrain.sim.stages import block_order


def emulation(plan: Plan, laws: Laws | None = None) -> Emulation:
    """What all ranks of a plan wait for and exchange in a step, as `simulate` counts it."""
    refuse_parts(plan)
    batch, laws = gather([plan]), laws or plan.cluster.laws
    found = estimate(batch, laws)
    order, starts = block_order(plan), np.concatenate([[0], np.cumsum(plan.cut)])
    stages = []
    for stage in range(plan.placement.num_stages):
        piece = stage % len(plan.cut)  # a second copy of the model has the same
        layers = [_block(batch, found, int(variant)) for variant in order[starts[piece] : starts[piece + 1]]]
        first = [_embedding(batch, found)] if plan.placement.is_first(stage) else []
        last = [_head(batch, found, laws.head_exposed)] if plan.placement.is_last(stage) else []
        stages.append((*first, *layers, *last))
    return Emulation(tuple(stages), _only(found.tail["optimizer"]), _only(found.tail["host"]))


def refuse_parts(plan: Plan) -> None:
    """Collectives inside layers are not emulated."""
    rule = "all ranks are emulated without tensor and context parallelism only"
    remedy = f"{plan.layout.pp} ranks: one pipeline, which stands for all"
    degrees = {name: getattr(plan.layout, name) for name in ("tp", "cp")}
    cut = [(f"layout.{name}", degree) for name, degree in degrees.items() if degree > 1]
    if cut:
        raise InputError(Problem(where="plan", key=key, value=value, rule=rule, remedy=remedy) for key, value in cut)


def _block(batch: Batch, found: Estimate, variant: int) -> LayerWork:
    times, at = found.variants, (0, variant)
    sharded = tuple(
        Travel(
            elements=round(part.parameters[at]),
            group=round(part.group[at]),
            keep=bool(part.keep[at]),
            collectives=round(part.collectives[at]),
        )
        for part in batch.sharded
        if part.parameters[at] > 0 and part.group[at] > 1
    )
    return LayerWork(
        forward_s=float(times.forward_s[at] + times.slice_f_s[at]),
        input_s=float(times.input_s[at] + times.recompute_s[at] + times.slice_b_s[at]),
        weight_s=float(times.weight_s[at]),
        sharded=sharded,
        replicated=round(batch.facts.parameters[batch.blocks[at]] - batch.sharded_parameters[at]),
    )


def _embedding(batch: Batch, found: Estimate) -> LayerWork:
    gather_s, scatter_s = end_shard_seconds(batch, batch.embedding)
    times = found.embedding
    own = EndTimes(times.f_s - gather_s, times.i_s - scatter_s, times.w_s, 0.0 * gather_s)
    elements, group = round(_only(batch.facts.parameters[batch.embedding])), round(_only(batch.end_group))
    return _end(own, Travel(elements, group, in_backward=False))


def _head(batch: Batch, found: Estimate, shown: float) -> LayerWork:
    """Where its collectives hide behind its products, says the estimate, none is emulated."""
    elements, group = round(_only(batch.facts.parameters[batch.head])), round(_only(batch.end_group))
    gather_s, scatter_s = (shown * part_s for part_s in end_shard_seconds(batch, batch.head))
    times = found.head
    own = EndTimes(times.f_s - gather_s, times.i_s - gather_s - scatter_s, times.w_s, 0.0 * gather_s)
    return _end(own, Travel(elements, group, hidden=not shown))


def _end(times: EndTimes, travel: Travel) -> LayerWork:
    cut = travel.group > 1 and travel.elements > 0
    return LayerWork(
        forward_s=_only(times.f_s),
        input_s=_only(times.i_s),
        weight_s=_only(times.w_s),
        sharded=(travel,) if cut else (),
        replicated=0 if cut else travel.elements,
    )


def _only(values: Floats) -> float:
    return float(values[0])
