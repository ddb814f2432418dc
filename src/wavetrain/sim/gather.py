"""From plans to a `Batch`: every layer that the plans run becomes a case once, every plan a row of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wavetrain.cost.kernels import Split
from wavetrain.cost.layers import Case, layer_facts, local_parameters
from wavetrain.model.model import EMPTY, Layer
from wavetrain.model.operator import Work
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan, Variant
from wavetrain.sim.batch import Batch, Sharded
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
    data_stride: int
    stage_stride: int
    stages: float
    folded: bool
    copies: int
    first: int
    most: int
    last: int
    microbatches: int
    schedule: int
    shard_optimizer: bool
    end_group: int
    barrier: bool


class _Part(NamedTuple):
    """Parameters of one block that travel together."""

    parameters: float = 0.0
    group: int = 1
    keep: bool = False
    collectives: int = 1
    whole: float = 1.0
    named: bool = False


class _Cases:
    """Cases met so far; a case that was met has its number."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}
        self.items: list[Case] = []

    def number(self, plan: Plan, variant: Variant, *, sliced: bool = False) -> int:
        layout, layer = plan.layout, layer_of(plan, variant)
        work = Work(plan.seq_len, layout.microbatch, plan.precision.compute)
        split = Split(layout.tp, layout.sequence_parallel, layout.cp, variant.choice.slices)
        again = recomputed(plan, variant)
        named = tuple((name, choice.slices) for name, choice in variant.named)
        slices = named if sliced and any(count > 1 for _, count in named) else ()
        key = (id(plan.model), layer.name, work, split, again, slices)
        if key not in self.numbers:
            self.numbers[key] = len(self.items)
            self.items.append(Case(layer, work, split, plan.stack, plan.precision, again, slices))
        return self.numbers[key]

    def entry(self, plan: Plan, variant: Variant, count: int) -> tuple[int, int, int, int]:
        """A variant of blocks: its case, how often it occurs, what is computed again, its case with slices."""
        plain, sliced = self.number(plan, variant), self.number(plan, variant, sliced=True)
        return plain, count, recompute_kind(plan, variant), sliced


def layer_of(plan: Plan, variant: Variant) -> Layer:
    """The layer that a variant is one of; an end of a model that can't be cut is empty."""
    return plan.model.by_name.get(variant.layer, EMPTY)


def recomputed(plan: Plan, variant: Variant) -> frozenset[str]:
    """The operators of a layer that the plan computes again by its own choice."""
    if not variant.choice.recompute and not variant.named:
        return frozenset()
    return frozenset(o.name for o in layer_of(plan, variant).operators if variant.of(o.name).recompute)


def recompute_kind(plan: Plan, variant: Variant) -> int:
    """What of a block is computed again: as the plan says for all, or its operators one by one, which may be all."""
    if plan.recompute is not Recompute.NONE:
        return RECOMPUTES.index(plan.recompute)
    again = len(recomputed(plan, variant))
    every = len(layer_of(plan, variant).operators)
    return 0 if not again else RECOMPUTES.index(Recompute.FULL) if again == every else CHOSEN


def variants(plan: Plan) -> dict[Variant, int]:
    """How often each way to run a block occurs in a plan, in order of appearance."""
    return Counter(plan.blocks)


def gather(plans: Sequence[Plan]) -> Batch:
    """The batch of plans that share node type, stack and precision."""
    cases, rows = _Cases(), []
    blocks: list[list[tuple[int, int, int, int]]] = []
    parts: list[list[list[_Part]]] = []
    for plan in plans:
        rows.append(_row(plan, cases))
        found = variants(plan)
        blocks.append([cases.entry(plan, variant, count) for variant, count in found.items()])
        parts.append([_parts(plan, variant) for variant in found])
    columns = {name: np.array(values) for name, values in zip(_Row._fields, zip(*rows, strict=True), strict=True)}
    flags = ("sequence_parallel", "folded", "shard_optimizer", "barrier")
    numbers = ("embedding", "head", "schedule")
    typed = {n: v.astype(bool if n in flags else np.intp if n in numbers else np.float64) for n, v in columns.items()}
    width = max(len(row) for row in blocks)
    padded = np.array([row + [(row[0][0], 0, row[0][2], row[0][0])] * (width - len(row)) for row in blocks])
    first = max(plans, key=lambda plan: plan.cluster.num_devices)  # its outermost tier holds the groups of all
    return Batch(
        device=first.cluster.device,
        tiers=first.cluster.tiers,
        node_devices=first.cluster.node.num_devices,
        stack=first.stack,
        precision=first.precision,
        facts=layer_facts(cases.items),
        blocks=padded[:, :, 0].astype(np.intp),
        sliced=padded[:, :, 3].astype(np.intp),
        block_counts=padded[:, :, 1].astype(np.float64),
        recompute=padded[:, :, 2].astype(np.intp),
        sharded=_sharded(parts, width),
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
        embedding=cases.number(plan, plan.ends[0]),
        head=cases.number(plan, plan.ends[1]),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        dp=layout.dp,
        pp=layout.pp,
        data_stride=layout.data_stride,
        stage_stride=layout.stage_stride,
        stages=placement.num_stages / layout.pp / copies,
        folded=layout.pp > 1 and (first_rank == last_rank or copies > 1),
        copies=copies,
        first=counts[first_rank],
        most=max(counts),
        last=counts[last_rank],
        microbatches=layout.num_microbatches,
        schedule=SCHEDULE_KINDS.index(layout.schedule),
        shard_optimizer=layout.shard_optimizer,
        end_group=_end_group(plan),
        barrier=plan.stack.barrier,
    )


def _end_group(plan: Plan) -> int:
    """The group that the embedding is cut over; the head goes with it."""
    first = plan.ends[0]
    return max((first.of(operator.name).shard for operator in layer_of(plan, first).operators), default=1)


def _parts(plan: Plan, variant: Variant) -> list[_Part]:
    """The sharded parameters of a block: what travels together, and each operator that is chosen by itself."""
    layout = plan.layout
    split = Split(layout.tp, layout.sequence_parallel, layout.cp)
    named = dict(variant.named)
    found, together, whole = [], 0.0, 0.0
    for operator in layer_of(plan, variant).operators:
        parameters = local_parameters(operator, split)
        whole += parameters
        if operator.name not in named:
            together += parameters
            continue
        choice = named[operator.name]
        if choice.shard > 1 and parameters:
            found.append(_Part(parameters, choice.shard, choice.keep, choice.slices, parameters, named=True))
    choice = variant.choice
    if choice.shard > 1 and together:
        found.insert(0, _Part(together, choice.shard, choice.keep, choice.slices, whole))
    return found


def _sharded(parts: list[list[list[_Part]]], width: int) -> list[Sharded]:
    """Parts as columns; rows with fewer are filled with parts of no parameters."""
    most = max(1, *(len(found) for row in parts for found in row))
    empty = _Part()
    made = []
    for position in range(most):
        cells = [
            [found[position] if position < len(found) else empty for found in row] + [empty] * (width - len(row))
            for row in parts
        ]
        columns = (np.array([[cell[field] for cell in row] for row in cells]) for field in range(len(empty)))
        parameters, group, keep, collectives, whole, named = columns
        made.append(
            Sharded(
                parameters=parameters.astype(np.float64),
                group=group.astype(np.float64),
                keep=keep.astype(bool),
                collectives=collectives.astype(np.float64),
                whole=whole.astype(np.float64),
                named=named.astype(bool),
            )
        )
    return made
