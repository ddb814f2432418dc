"""From plans to a `Batch`: every layer that the plans run becomes a case once, every plan a row of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wavetrain.cost.kernels import Split
from wavetrain.cost.layers import Case, layer_facts, local_parameters
from wavetrain.model.model import Layer
from wavetrain.model.operator import Work
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan
from wavetrain.sim.batch import Batch, Floats, Sharded
from wavetrain.sim.estimate import SCHEDULE_KINDS

RECOMPUTES = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
CHOSEN = 3  # behind them: operators chosen one by one


class _Row(NamedTuple):
    """The scalar columns of a plan, in the order of `Batch`."""

    embedding: int
    head: int
    tp: int
    sequence_parallel: bool
    cp: int
    dp: int
    pp: int
    stages: float
    folded: bool
    copies: int
    first: int
    most: int
    last: int
    microbatches: int
    schedule: int
    recompute: int
    shard_optimizer: bool
    end_group: int
    barrier: bool


class _Part(NamedTuple):
    """Parameters of one block that share a choice."""

    parameters: float
    group: int
    keep: bool
    collectives: int


class _Cases:
    """Cases met so far; a case that was met has its number."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.items: list[Case] = []

    def number(self, plan: Plan, layer: Layer) -> int:
        layout = plan.layout
        work = Work(plan.seq_len, layout.microbatch, plan.precision.compute)
        split = Split(layout.tp, layout.sequence_parallel, layout.cp, plan.choice.slices)
        again = recomputed(plan, layer)
        slices = tuple((c.operator, c.choice.slices) for c in plan.choices if c.layer == layer.name)
        key = (id(plan.model), layer.name, work, split, again, slices)
        if key not in self.numbers:
            self.numbers[key] = len(self.items)
            self.items.append(Case(layer, work, split, plan.stack, plan.precision, again, slices))
        return self.numbers[key]


def recomputed(plan: Plan, layer: Layer) -> frozenset[str]:
    """The operators of a layer that the plan computes again by its own choice."""
    return frozenset(o.name for o in layer.operators if plan.choice_of(layer, o.name).recompute)


def gather(plans: Sequence[Plan]) -> Batch:
    """The batch of plans that share node type, stack and precision."""
    cases, rows = _Cases(), []
    blocks: list[list[tuple[int, int]]] = []
    parts: list[list[_Part]] = []
    for plan in plans:
        rows.append(_row(plan, cases))
        kinds = plan.model.block_counts.items()
        blocks.append([(cases.number(plan, plan.model.by_name[name]), count) for name, count in kinds])
        parts.append(_parts(plan))
    columns = {name: np.array(values) for name, values in zip(_Row._fields, zip(*rows, strict=True), strict=True)}
    flags = ("sequence_parallel", "folded", "shard_optimizer", "barrier")
    numbers = ("embedding", "head", "schedule", "recompute")
    typed = {n: v.astype(bool if n in flags else np.intp if n in numbers else np.float64) for n, v in columns.items()}
    width = max(len(row) for row in blocks)
    padded = np.array([row + [(row[0][0], 0)] * (width - len(row)) for row in blocks])
    first = max(plans, key=lambda plan: plan.cluster.num_devices)  # its outermost tier holds the groups of all
    return Batch(
        device=first.cluster.device,
        tiers=first.cluster.tiers,
        node_devices=first.cluster.node.num_devices,
        stack=first.stack,
        precision=first.precision,
        facts=layer_facts(cases.items),
        blocks=padded[:, :, 0].astype(np.intp),
        block_counts=padded[:, :, 1].astype(np.float64),
        sharded=_sharded(parts),
        **typed,
    )


def gather_all(plans: Sequence[Plan]) -> list[tuple[Batch, list[int]]]:
    """Any plans as batches of those that share node type, stack and precision, each with its plans' positions."""
    groups: dict[object, list[int]] = {}
    for number, plan in enumerate(plans):
        groups.setdefault((plan.cluster.node, plan.stack, plan.precision), []).append(number)
    return [(gather([plans[n] for n in numbers]), numbers) for numbers in groups.values()]


def _row(plan: Plan, cases: _Cases) -> _Row:
    layout, placement, counts = plan.layout, plan.placement, plan.blocks_by_rank
    first_rank, last_rank = placement.ranks[0], placement.ranks[placement.depth - 1]
    copies = placement.num_stages // placement.depth
    return _Row(
        embedding=cases.number(plan, plan.model.ends[0]),
        head=cases.number(plan, plan.model.ends[1]),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        dp=layout.dp,
        pp=layout.pp,
        stages=placement.num_stages / layout.pp / copies,
        folded=layout.pp > 1 and (first_rank == last_rank or copies > 1),
        copies=copies,
        first=counts[first_rank],
        most=max(counts),
        last=counts[last_rank],
        microbatches=layout.num_microbatches,
        schedule=SCHEDULE_KINDS.index(layout.schedule),
        recompute=CHOSEN if _chooses(plan) else RECOMPUTES.index(plan.recompute),
        shard_optimizer=layout.shard_optimizer,
        end_group=_end_group(plan),
        barrier=plan.stack.barrier,
    )


def _end_group(plan: Plan) -> int:
    """The group that the embedding is cut over; the head goes with it."""
    first = plan.model.ends[0]
    return max((plan.choice_of(first, operator.name).shard for operator in first.operators), default=1)


def _chooses(plan: Plan) -> bool:
    """Whether operators are computed again one by one; full recomputation of the plan leaves nothing to choose."""
    blocks = (plan.model.by_name[name] for name in plan.model.block_counts)
    return plan.recompute is Recompute.NONE and any(recomputed(plan, layer) for layer in blocks)


def _parts(plan: Plan) -> list[_Part]:
    """The sharded parameters of the average block, one part per (group, keep)."""
    layout = plan.layout
    split = Split(layout.tp, layout.sequence_parallel, layout.cp)
    total: dict[tuple[int, bool], list[float]] = {}
    for name, count in plan.model.block_counts.items():
        layer, share = plan.model.by_name[name], count / plan.model.num_blocks
        slices: dict[tuple[int, bool], int] = {}
        for operator in layer.operators:
            choice = plan.choice_of(layer, operator.name)
            if choice.shard > 1:
                key = (choice.shard, choice.keep)
                entry = total.setdefault(key, [0.0, 0.0])
                entry[0] += local_parameters(operator, split) * share
                slices[key] = max(slices.get(key, 1), choice.slices)
        for key, pieces in slices.items():
            total[key][1] += pieces * share
    return [_Part(value[0], *key, round(max(1.0, value[1]))) for key, value in total.items()]


def _sharded(parts: list[list[_Part]]) -> list[Sharded]:
    width = max(len(row) for row in parts)
    empty = _Part(0.0, 1, False, 1)
    made = []
    for position in range(width):
        column: list[_Part] = [row[position] if position < len(row) else empty for row in parts]
        made.append(
            Sharded(
                parameters=_floats([p.parameters for p in column]),
                group=_floats([p.group for p in column]),
                keep=np.array([p.keep for p in column], dtype=bool),
                collectives=_floats([p.collectives for p in column]),
            )
        )
    return made


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)
