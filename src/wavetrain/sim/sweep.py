"""From columns of layouts to a `Batch`, without a plan for each: how a search prices a hundred thousand a second."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from wavetrain.cluster.cluster import Cluster
from wavetrain.cost.kernels import Split
from wavetrain.cost.layers import Case, layer_facts
from wavetrain.model.model import Model
from wavetrain.model.operator import Work
from wavetrain.plan.cut import even_cut
from wavetrain.plan.stack import Precision, Stack
from wavetrain.schedule.placement import loop, snake
from wavetrain.sim.batch import Batch, Flags, Floats, Numbers, Sharded
from wavetrain.sim.estimate import SCHEDULE_KINDS


@dataclass(frozen=True)
class Layouts:
    """Layouts of one model on one cluster as columns of equal length; cut evenly, one choice for all layers."""

    tp: Numbers
    sequence_parallel: Flags
    cp: Numbers
    dp: Numbers
    pp: Numbers
    pp_inside: Flags
    schedule: Numbers  # number in SCHEDULE_KINDS
    stages: Numbers  # per rank
    microbatch: Numbers
    microbatches: Numbers
    recompute: Numbers  # 0 none, 1 selective, 2 full
    shard: Numbers  # group that parameters are cut over
    keep: Flags
    shard_optimizer: Flags

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, item.name)) for item in fields(self)}
        if len(lengths) != 1:
            raise ValueError("columns must have the same length")

    def __len__(self) -> int:
        return len(self.tp)


def sweep(
    model: Model,
    cluster: Cluster,
    layouts: Layouts,
    *,
    seq_len: int,
    stack: Stack | None = None,
    precision: Precision | None = None,
) -> Batch:
    """The batch of layouts; equal to gathering a plan for each."""
    stack, precision = stack or Stack(), precision or Precision()
    unique, row = distinct(layouts.tp, layouts.sequence_parallel, layouts.cp, layouts.microbatch)
    counts = model.block_counts
    layers = [model.ends[0], *(model.by_name[name] for name in counts), model.ends[1]]
    cases = []
    for tp, sequence_parallel, cp, microbatch in unique.tolist():
        work, split = Work(seq_len, microbatch, precision.compute), Split(tp, bool(sequence_parallel), cp)
        cases += [Case(layer, work, split, stack, precision) for layer in layers]
    facts = layer_facts(cases)
    width = len(layers)
    blocks = row[:, None] * width + np.arange(1, width - 1)[None]
    block_counts = np.broadcast_to(np.array(list(counts.values()), dtype=np.float64), blocks.shape)
    folded = np.isin(layouts.schedule, [SCHEDULE_KINDS.index(name) for name in ("wave", "wave-zb", "zb-v")])
    first, most, last = even_blocks(model.num_blocks, layouts, folded)
    shard = layouts.shard.astype(np.float64)
    return Batch(
        device=cluster.device,
        tiers=cluster.tiers,
        node_devices=cluster.node.num_devices,
        stack=stack,
        precision=precision,
        facts=facts,
        embedding=row * width,
        blocks=blocks,
        sliced=blocks,
        block_counts=block_counts,
        head=row * width + width - 1,
        tp=layouts.tp.astype(np.float64),
        sequence_parallel=layouts.sequence_parallel,
        cp=layouts.cp.astype(np.float64),
        dp=layouts.dp.astype(np.float64),
        pp=layouts.pp.astype(np.float64),
        data_stride=(layouts.tp * np.where(layouts.pp_inside, layouts.pp, 1)).astype(np.float64),
        stage_stride=(layouts.tp * np.where(layouts.pp_inside, 1, layouts.cp * layouts.dp)).astype(np.float64),
        stages=layouts.stages.astype(np.float64),
        folded=folded & (layouts.pp > 1),
        copies=np.ones(len(layouts)),
        first=first,
        most=most,
        last=last,
        microbatches=layouts.microbatches.astype(np.float64),
        schedule=layouts.schedule,
        recompute=np.broadcast_to(layouts.recompute[:, None], blocks.shape),
        shard_optimizer=layouts.shard_optimizer,
        sharded=[_part(facts.parameters[blocks], shard[:, None], layouts.keep[:, None])],
        end_group=shard,
        barrier=np.full(len(layouts), stack.barrier),
    )


def _part(parameters: Floats, shard: Floats, keep: Flags) -> Sharded:
    """All of a block's parameters, cut over one group."""
    cut, shape = np.where(shard > 1, parameters, 0.0), parameters.shape
    group, kept = np.broadcast_to(shard, shape), np.broadcast_to(keep, shape)
    whole = np.where(parameters > 0, parameters, 1.0)
    return Sharded(cut, group, kept, np.ones(shape), whole, np.zeros(shape, dtype=bool))


def distinct(*columns: Numbers | Flags) -> tuple[Numbers, Numbers]:
    """The distinct rows of columns of small numbers, and which of them each row is.

    Rows are told apart as one number each, which sorts ten times as fast as rows do.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, row = np.unique(key, return_index=True, return_inverse=True)
    return np.stack([column[first] for column in columns], axis=1).astype(np.intp), row.reshape(-1)


def even_blocks(num_blocks: int, layouts: Layouts, folded: Flags) -> tuple[Floats, Floats, Floats]:
    """Blocks on the rank of the first stage, on the fullest rank and on the rank of the last, when cut evenly."""
    unique, row = distinct(layouts.pp, layouts.stages, folded)
    found = [_ends(num_blocks, pp, stages, folded=bool(fold)) for pp, stages, fold in unique.tolist()]
    first, most, last = np.array(found, dtype=np.float64)[row].T
    return first, most, last


def _ends(num_blocks: int, ranks: int, stages: int, *, folded: bool) -> tuple[int, int, int]:
    placement = snake(ranks, stages // 2) if folded else loop(ranks, stages)
    counts = [0] * ranks
    for rank, blocks in zip(placement.ranks, even_cut(num_blocks, ranks * stages), strict=True):
        counts[rank] += blocks
    return counts[placement.ranks[0]], max(counts), counts[placement.ranks[-1]]
