"""What the actions of each stage take and hold, for the event simulation of one plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import fields

import numpy as np

from wavetrain.cluster.laws import Laws
from wavetrain.cost.memory import Blocks, Passage, Unit, walked_bytes
from wavetrain.plan.plan import Plan
from wavetrain.schedule.action import COMPUTE, Action, Actions, Kind
from wavetrain.sim.batch import Batch, Floats, Numbers
from wavetrain.sim.engine import Result, StageBytes, StageTimes
from wavetrain.sim.estimate import Estimate, hop_seconds
from wavetrain.sim.gather import variants
from wavetrain.sim.memory import Place, block_ways, end_units, output_bytes, reserve_bytes, saved_bytes, static_parts


def block_order(plan: Plan) -> Numbers:
    """Which variant each block is, by its number in the plan's batch."""
    numbers = {variant: number for number, variant in enumerate(variants(plan))}
    return np.array([numbers[variant] for variant in plan.blocks], dtype=np.intp)


def stage_counts(plan: Plan) -> Floats:
    """Blocks of each variant (columns) in every stage; a second copy of the model has the same."""
    order, ends = block_order(plan), np.cumsum(plan.cut)
    counts = np.zeros((len(plan.cut), int(order.max(initial=0)) + 1))
    np.add.at(counts, (np.searchsorted(ends, np.arange(len(order)), side="right"), order), 1.0)
    return counts[np.arange(plan.placement.num_stages) % len(plan.cut)]


def rank_counts(plan: Plan) -> Floats:
    """Blocks of each variant on every rank."""
    by_stage = stage_counts(plan)
    counts = np.zeros((plan.layout.pp, by_stage.shape[1]))
    np.add.at(counts, np.array(plan.placement.ranks), by_stage)
    return counts


def stage_times(plan: Plan, batch: Batch, found: Estimate) -> tuple[StageTimes, ...]:
    """Seconds of every stage's actions; a second copy of the model has the same."""
    host_s, placement = float(found.message.host_s[0]), plan.placement
    each = np.stack([found.variants.f_s[0], found.variants.i_s[0], found.variants.weight_s[0]], axis=1)
    own_s = stage_counts(plan) @ each
    hops = hop_seconds(batch)[:, 0]
    made = []
    for stage in range(placement.num_stages):
        parts = own_s[stage]
        ahead_s = behind_s = 0.0
        if placement.is_first(stage):
            parts = parts + _end(found.embedding.f_s, found.embedding.i_s, found.embedding.w_s)
        else:
            behind_s = wire_seconds(plan, hops, placement.ranks[stage - 1], placement.ranks[stage])
        if placement.is_last(stage):
            parts = parts + _end(found.head.f_s, found.head.i_s, found.head.w_s)
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
    stride = plan.layout.stage_stride
    for tier, hop_s in zip(plan.cluster.tiers, hops, strict=False):
        if sender * stride // tier.size == receiver * stride // tier.size:
            return float(hop_s) if sender != receiver else 0.0
    return 0.0


def _end(*parts: Floats) -> Floats:
    return np.array([part[0] for part in parts])


def stage_bytes(plan: Plan, batch: Batch, laws: Laws) -> tuple[StageBytes, ...]:
    """Bytes of every stage's actions."""
    saved, ways = saved_bytes(batch, laws), block_ways(batch, laws)
    ways = Blocks(*(getattr(ways, item.name)[0] for item in fields(ways)))
    order, starts = block_order(plan), np.concatenate([[0], np.cumsum(plan.cut)])
    is_first, is_last = _ends(plan)
    known: dict[object, StageBytes] = {}
    made = []
    for stage in range(plan.placement.num_stages):
        piece = stage % len(plan.cut)
        own = order[starts[piece] : starts[piece + 1]]
        first, last = is_first(stage), is_last(stage)
        key = (own.tobytes(), first, last)
        if key not in known:
            place = Place(np.zeros((1, 1, 1)), np.array([[float(first)]]), np.array([[float(last)]]))
            units = [
                Unit(*(getattr(unit, item.name)[0, 0] for item in fields(unit))) for unit in end_units(batch, place)
            ]
            none = np.zeros(1)
            passage = Passage(none, output_bytes(batch) * bool(len(own)), none, saved.logits * last)
            passage = Passage(*(getattr(passage, item.name)[0] for item in fields(passage)))
            forward, backward = walked_bytes(own, ways, (units[0], units[1]), passage)
            kept = float(ways.saved[own].sum() + first * saved.embedding[0] + last * saved.head[0])
            known[key] = StageBytes(saved=kept, saved_for_w=kept, transient_f=forward, transient_b=backward)
        made.append(known[key])
    return tuple(made)


def _ends(plan: Plan) -> tuple[Callable[[int], bool], Callable[[int], bool]]:
    return plan.placement.is_first, plan.placement.is_last


def rank_places(plan: Plan) -> Place:
    """Every rank of one plan's pipeline as a place."""
    ranks, placement = plan.layout.pp, plan.placement
    first, last = np.zeros((ranks, 1)), np.zeros((ranks, 1))
    for stage, rank in enumerate(placement.ranks):
        first[rank] += placement.is_first(stage)
        last[rank] += placement.is_last(stage)
    return Place(rank_counts(plan)[:, None, :], first, last)


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
