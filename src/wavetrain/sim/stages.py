"""What the actions of each stage take and hold, for the event simulation of one plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from wavetrain.cost.laws import Laws
from wavetrain.plan.plan import Plan
from wavetrain.schedule.action import COMPUTE, Action, Actions, Kind
from wavetrain.sim.batch import Batch, Floats
from wavetrain.sim.engine import Result, StageBytes, StageTimes
from wavetrain.sim.estimate import Estimate, hop_seconds
from wavetrain.sim.memory import Place, passing_bytes, reserve_bytes, saved_bytes, static_parts


def stage_times(plan: Plan, batch: Batch, found: Estimate) -> tuple[StageTimes, ...]:
    """Seconds of every stage's actions; a second copy of the model has the same."""
    block, host_s, placement = found.block, float(found.message.host_s[0]), plan.placement
    f, i, w = float(block.f_s[0]), float(block.i_s[0]), float(block.weight_s[0])
    hops = hop_seconds(batch)[:, 0]
    made = []
    for stage in range(placement.num_stages):
        count = plan.cut[stage % len(plan.cut)]
        parts = np.array([count * f, count * i, count * w])
        ahead_s = behind_s = 0.0
        if placement.is_first(stage):
            parts += _end(found.embedding.f_s, found.embedding.i_s, found.embedding.w_s)
        else:
            behind_s = wire_seconds(plan, hops, placement.ranks[stage - 1], placement.ranks[stage])
        if placement.is_last(stage):
            parts += _end(found.head.f_s, found.head.i_s, found.head.w_s)
        else:
            ahead_s = wire_seconds(plan, hops, placement.ranks[stage], placement.ranks[stage + 1])
        own_f, own_i, own_w = map(float, parts)
        if plan.stack.message_overlap:
            made.append(StageTimes(own_f, own_i, own_w, send_f=ahead_s, send_b=behind_s, message_s=host_s / 2))
            continue
        ends = [s for s in (ahead_s, behind_s) if s]
        wire_s = sum(ends) / len(ends) if ends else 0.0
        made.append(StageTimes(own_f, own_i, own_w, message_s=(host_s + wire_s) / 2))  # half on either side
    return tuple(made)


def wire_seconds(plan: Plan, hops: Floats, sender: int, receiver: int) -> float:
    """A message between two ranks, over the innermost tier that holds both; none within a rank."""
    layout = plan.layout
    stride = layout.tp * layout.cp * layout.dp
    for tier, hop_s in zip(plan.cluster.tiers, hops, strict=False):
        if sender * stride // tier.size == receiver * stride // tier.size:
            return float(hop_s) if sender != receiver else 0.0
    return 0.0


def _end(*parts: Floats) -> Floats:
    return np.array([part[0] for part in parts])


def stage_bytes(plan: Plan, batch: Batch, laws: Laws) -> tuple[StageBytes, ...]:
    """Bytes of every stage's actions."""
    saved = saved_bytes(batch, laws)
    stages = range(plan.placement.num_stages)
    first, last = (np.array([[float(is_end(s))] for s in stages]) for is_end in _ends(plan))
    counts = np.array([[float(plan.cut[s % len(plan.cut)])] for s in stages])
    forward, backward = passing_bytes(batch, Place(counts, first, last), laws)
    kept = counts * saved.block + first * saved.embedding + last * saved.head
    return tuple(
        StageBytes(
            saved=float(kept[s, 0]),
            saved_for_w=float(kept[s, 0]),
            transient_f=float(forward[s, 0]),
            transient_b=float(backward[s, 0]),
        )
        for s in stages
    )


def _ends(plan: Plan) -> tuple[Callable[[int], bool], Callable[[int], bool]]:
    return plan.placement.is_first, plan.placement.is_last


def rank_places(plan: Plan) -> Place:
    """Every rank of one plan's pipeline as a place."""
    ranks, placement = plan.layout.pp, plan.placement
    first, last = np.zeros((ranks, 1)), np.zeros((ranks, 1))
    for stage, rank in enumerate(placement.ranks):
        first[rank] += placement.is_first(stage)
        last[rank] += placement.is_last(stage)
    return Place(np.array(plan.blocks_by_rank, dtype=np.float64)[:, None], first, last)


def static_bytes(plan: Plan, batch: Batch, laws: Laws) -> dict[str, Floats]:
    """Bytes that each rank holds all through a step, by name."""
    return {name: value[:, 0] for name, value in static_parts(batch, rank_places(plan), laws).items()}


def fullest_rank(static: dict[str, Floats], result: Result, laws: Laws) -> tuple[int, float]:
    """The rank that needs most, and what it needs beside its tensors."""
    held = np.asarray(sum(static.values()))
    peaks = np.array(result.peak_bytes)
    reserve = reserve_bytes(peaks - held, laws)
    rank = int((peaks + reserve).argmax())
    return rank, float(reserve[rank])


def peak_parts(
    rank: int, static: dict[str, Floats], result: Result, actions: Actions, sizes: tuple[StageBytes, ...]
) -> dict[str, float]:
    """The bytes of a rank's peak by name; they sum to it exactly."""
    parts = {name: float(value[rank]) for name, value in static.items()}
    passing = result.peak_bytes[rank] - sum(parts.values())
    running = running_at(rank, result, actions)
    momentary = 0.0
    if running is not None:
        size = sizes[running.stage]
        momentary = size.transient_f if running.kind is Kind.F else size.transient_b
    return parts | {"activations": passing - momentary, "working": momentary}


def running_at(rank: int, result: Result, actions: Actions) -> Action | None:
    """The compute action that a rank runs when its memory peaks."""
    starts = result.starts_s[rank]
    order = [action for action in actions.ranks[rank] if action.kind in COMPUTE]
    position = bisect_right(starts, result.peak_at_s[rank]) - 1
    return order[position] if 0 <= position < len(order) else None
