"""The end of a step in the closed form: gradients summed over replicas, states updated, what else happens once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.laws import Laws
from wavetrain.cost.collective import Collective, Span, seconds
from wavetrain.cost.compute import stream_seconds
from wavetrain.cost.overlap import exposed
from wavetrain.sim.batch import Batch

if TYPE_CHECKING:
    from wavetrain.sim.estimate import BlockTimes

Floats = NDArray[np.float64]


def tail_seconds(batch: Batch, block: BlockTimes, laws: Laws) -> dict[str, Floats]:
    """Gradient reduction, the optimizer and what else happens once per step."""
    blocks = np.where(batch.pp == 1, batch.num_blocks, batch.most)
    whole, every = replicated_parameters(batch), rank_parameters(batch)
    share = np.divide(whole, every, out=np.zeros_like(whole), where=every > 0)
    reduce_s, gather_s = rank_reduction_seconds(batch, every)
    reduction_s, gather_s = share * reduce_s + replica_seconds(batch, every), share * gather_s
    if batch.stack.gradient_overlap:
        last_s = reduction_s * last_share(batch, every)
        reduction_s = last_s + exposed(reduction_s - last_s, blocks * block.hiding_s, laws.gradient_exposed)
        gather_s = gather_s * laws.gradient_exposed
    return {
        "reduction": reduction_s,
        "gather": gather_s,
        "optimizer": optimizer_seconds(batch, whole, blocks, laws) + tensors_seconds(batch, laws),
        "host": np.full(len(batch.tp), laws.step_s),
    }


def tensors_seconds(batch: Batch, laws: Laws) -> Floats:
    """What an optimizer takes for each of the fullest rank's tensors, however large they are."""
    return laws.tensor_step_s * rank_tensors(batch)


def _on_fullest_rank(batch: Batch, values: Floats) -> Floats:
    """A fact of layers for all of those on the fullest rank; the head is elsewhere where there is a pipeline."""
    blocks = np.where(batch.pp == 1, batch.num_blocks, batch.most)
    ends = values[batch.embedding] + np.where(batch.pp == 1, values[batch.head], 0.0)
    return np.asarray(blocks * batch.mean_block(values) + ends)


def last_share(batch: Batch, parameters: Floats) -> Floats:
    """Of gradients that are reduced in pieces, the share of the last piece: nothing is left to hide it behind."""
    if batch.stack.bucket_bytes is None:
        return np.zeros_like(parameters)
    pieces = np.ceil(parameters * batch.precision.gradients.num_bytes / batch.stack.bucket_bytes)
    return np.asarray(1 / np.maximum(pieces, 1.0))


def rank_reduction_seconds(batch: Batch, parameters: Floats) -> tuple[Floats, Floats]:
    """Summing the gradients of all of a rank's parameters over the replicas; collecting them where states are cut.

    Where only some are replicated, they take their share of it.
    """
    group, zero1 = Span(batch.data_ranks, batch.data_stride), batch.shard_optimizer
    size = parameters * batch.precision.gradients.num_bytes
    pieces = np.ones_like(size) if batch.stack.bucket_bytes is None else np.ceil(size / batch.stack.bucket_bytes)
    piece = size / np.maximum(pieces, 1.0)
    reduce_s = pieces * seconds(Collective.ALL_REDUCE, np.where(zero1, 0.0, piece), group, batch.tiers)
    scatter_s = pieces * seconds(Collective.REDUCE_SCATTER, np.where(zero1, piece, 0.0), group, batch.tiers)
    gather_bytes = np.where(zero1, parameters * batch.precision.compute.num_bytes, 0.0)
    return reduce_s + scatter_s, np.asarray(seconds(Collective.ALL_GATHER, gather_bytes, group, batch.tiers))


def end_parameters(batch: Batch) -> Floats:
    """Parameters of the embedding, and of the head where it is on the same rank without a pipeline."""
    facts = batch.facts
    return np.asarray(facts.parameters[batch.embedding] + np.where(batch.pp == 1, facts.parameters[batch.head], 0.0))


def rank_parameters(batch: Batch) -> Floats:
    """Parameters that the fullest rank computes with, whole or cut."""
    return _on_fullest_rank(batch, batch.facts.parameters)


def rank_tensors(batch: Batch) -> Floats:
    """Tensors of parameters on the fullest rank."""
    return _on_fullest_rank(batch, batch.facts.tensors)


def replicated_parameters(batch: Batch) -> Floats:
    """Parameters on the fullest rank that every data-parallel rank has in full."""
    blocks = np.where(batch.pp == 1, batch.num_blocks, batch.most)
    own = blocks * batch.mean(batch.facts.parameters[batch.blocks] - batch.sharded_parameters)
    return np.asarray(own + np.where(batch.end_group > 1, 0.0, end_parameters(batch)))


def replica_seconds(batch: Batch, every: Floats) -> Floats:
    """Gradients of sharded parameters are summed over the groups that hold copies (hybrid sharding).

    Each takes its share of what all of a rank's parameters would take.
    """
    blocks = np.where(batch.pp == 1, batch.num_blocks, batch.most) / batch.num_blocks
    total = np.zeros(len(batch.tp))
    ends = np.where(batch.end_group > 1, end_parameters(batch), 0.0)[:, None]
    cut = [(blocks[:, None] * batch.block_counts * part.parameters, part.group) for part in batch.sharded]
    for parameters, group in [*cut, (ends, batch.end_group[:, None])]:
        share = np.divide(parameters, every[:, None], out=np.zeros_like(parameters), where=every[:, None] > 0)
        total = total + (share * copies_seconds(batch, every[:, None], group)).sum(axis=1)
    return total


def copies_seconds(batch: Batch, parameters: Floats, group: Floats) -> Floats:
    """Summing the gradients of parameters that are cut over a group over the copies of that group."""
    copies = np.maximum(batch.data_ranks[:, None] / group, 1.0)
    near = batch.data_stride[:, None]
    stride = np.where(batch.cp[:, None] > 1, near, near * group)  # context-parallel ranks are the nearest copies
    shared = (copies > 1) & (group > 1)
    span = Span(np.where(shared, copies, 1.0), np.where(shared, stride, 1.0))
    size = np.where(shared, parameters / group * batch.precision.gradients.num_bytes, 0.0)
    return np.asarray(seconds(Collective.ALL_REDUCE, size, span, batch.tiers))


def optimizer_seconds(batch: Batch, whole_parameters: Floats, blocks: Floats, laws: Laws) -> Floats:
    """Memory traffic of the optimizer on the states that one device holds."""
    ends = end_parameters(batch)
    own = whole_parameters / np.where(batch.shard_optimizer, batch.data_ranks, 1.0)
    own = own + np.where(batch.end_group > 1, ends / batch.end_group, 0.0)
    for part in batch.sharded:
        own = own + blocks * batch.mean(part.parameters / part.group)
    return stream_seconds(own * laws.optimizer_bytes, batch.device)
