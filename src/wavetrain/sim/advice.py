"""A plan that does not fit: which changes would make it fit, and what each costs in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from wavetrain.base.units import DType
from wavetrain.cluster.laws import Laws
from wavetrain.plan.check import check
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.sim.estimate import estimate
from wavetrain.sim.gather import gather
from wavetrain.sim.memory import memory


@dataclass(frozen=True)
class Remedy:
    """A change, and what comes of it."""

    change: str
    step_s: float
    needed_bytes: float
    plan: Plan


def remedies(plan: Plan, laws: Laws | None = None, *, most: int = 3) -> list[Remedy]:
    """The changes that make a plan fit, fastest first: one thing each, or two where one is not enough."""
    laws = laws or plan.cluster.laws
    single = list(_legal(_changes(plan)))
    found = list(_fitting(single, laws))
    if len(found) < most:
        double = ((f"{a}, {b}", changed) for a, first in single for b, changed in _legal(_changes(first)) if a < b)
        found += list(_fitting(list(double), laws))
    found.sort(key=lambda remedy: remedy.step_s)
    return found[:most]


def _fitting(changed: list[tuple[str, Plan]], laws: Laws) -> Iterator[Remedy]:
    for change, plan in changed:
        batch = gather([plan])
        held = memory(batch, laws)
        needed = float((held.peak_bytes + held.reserve_bytes)[0])
        if needed <= plan.cluster.device.memory_bytes:
            yield Remedy(change, float(estimate(batch, laws).step_s[0]), needed, plan)


def _legal(changed: Iterator[tuple[str, Plan]]) -> Iterator[tuple[str, Plan]]:
    return ((change, plan) for change, plan in changed if not check(plan))


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans that differ in one thing and hold less."""
    yield from _fewer_states(plan)
    yield from _fewer_activations(plan)
    yield from _other_cuts(plan)


def _fewer_states(plan: Plan) -> Iterator[tuple[str, Plan]]:
    layout, choice = plan.layout, plan.choice
    node = max(1, min(layout.dp, plan.cluster.node.num_devices // (layout.tp * layout.cp)))
    for group, where in ((node, "inside the node"), (layout.dp, "over all replicas")):
        if group > choice.shard:
            words = f"shard parameters {where} ({group})"
            yield words, replace(plan, choice=Choice(shard=group, slices=choice.slices), layout=_whole(layout))
    if choice.shard > 1 and choice.keep:
        yield "free gathered parameters after the forward", replace(plan, choice=replace(choice, keep=False))
    if choice.shard == 1 and not layout.shard_optimizer and layout.dp > 1:
        yield "shard the optimizer's states", replace(plan, layout=replace(layout, shard_optimizer=True))
    if plan.precision.gradients.num_bytes > DType.BF16.num_bytes:
        yield "gradients in bf16", replace(plan, precision=replace(plan.precision, gradients=DType.BF16))


def _fewer_activations(plan: Plan) -> Iterator[tuple[str, Plan]]:
    layout = plan.layout
    if plan.recompute is Recompute.NONE and plan.stack.attention.keeps_scores:
        yield "recompute attention scores", replace(plan, recompute=Recompute.SELECTIVE)
    if plan.recompute is not Recompute.FULL:
        yield "recompute every layer", replace(plan, recompute=Recompute.FULL)
    for size in sorted({1, layout.microbatch // 2} - {0, layout.microbatch}):
        yield f"microbatch {size}", _with(plan, microbatch=size)
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "sequence parallelism", _with(plan, sequence_parallel=True)


def _other_cuts(plan: Plan) -> Iterator[tuple[str, Plan]]:
    dp = plan.layout.dp
    for axis in ("tp", "cp", "pp") if dp % 2 == 0 else ():
        degree = 2 * getattr(plan.layout, axis)
        yield f"{axis} {degree}, dp {dp // 2}", _with(plan, **{axis: degree, "dp": dp // 2})


def _whole(layout: Layout) -> Layout:
    """Sharded parameters shard their optimizer states anyway."""
    return replace(layout, shard_optimizer=False)


def _with(plan: Plan, **changes: Any) -> Plan:
    """The plan with another layout, cut anew; a shard group that no longer divides the replicas shrinks to them."""
    layout = replace(plan.layout, **changes)
    shard = min(plan.choice.shard, layout.dp)
    cut = even_cut(plan.model.num_blocks, num_stages(layout))
    return replace(plan, layout=layout, cut=cut, choice=replace(plan.choice, shard=shard))
