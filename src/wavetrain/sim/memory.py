"""The closed form of memory: what the fullest rank of each plan holds at its peak, by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.laws import Laws
from wavetrain.cost.memory import Blocks, Passage, Unit, kept_bytes, recomputed_bytes, state_bytes, working_bytes
from wavetrain.plan.stack import Fusion
from wavetrain.sim.batch import Batch, Flags, Numbers
from wavetrain.sim.estimate import SCHEDULE_KINDS

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Holdings:
    """Bytes at the peak on the fullest rank of each plan.

    `parts` sum to `peak_bytes`: tensors alive at once, as an allocator counts them. A device must have `reserve_bytes`
    beside them: the context, and what the allocator can't use.
    """

    peak_bytes: Floats
    reserve_bytes: Floats
    parts: dict[str, Floats]


@dataclass(frozen=True)
class Place:
    """Ranks of a pipeline that hold alike: rows are places, columns are plans, then variants of blocks."""

    counts: Floats  # blocks of each variant
    has_first: Floats  # 1 where the embedding is
    has_last: Floats  # 1 where the head is

    @property
    def blocks(self) -> Floats:
        return np.asarray(self.counts.sum(axis=-1))

    def total(self, values: Floats) -> Floats:
        """What variants have, added up over the blocks of each place."""
        return np.asarray((self.counts * values).sum(axis=-1))


def places(batch: Batch) -> Place:
    """The rank of the first stage, the fullest one between, the rank of the last stage."""
    single = batch.pp == 1
    blocks = np.stack([np.where(single, batch.num_blocks, n) for n in (batch.first, batch.most, batch.last)])
    first = np.stack([np.ones_like(single), single, single])
    last = np.stack([single | batch.folded, single, single | ~batch.folded])
    both = batch.copies > 1
    first[2], last[2] = first[2] | both, last[2] | both
    shares = batch.block_counts / batch.num_blocks[:, None]
    return Place(blocks[:, :, None] * shares, first.astype(np.float64), last.astype(np.float64))


def memory(batch: Batch, laws: Laws) -> Holdings:
    """What every plan of a batch holds at its peak."""
    place = places(batch)
    saved = saved_bytes(batch, laws)
    live = in_flight(batch) / batch.stages / batch.copies  # microbatches of all of a rank's stages
    per_microbatch = place.total(saved.block) + place.has_first * saved.embedding + place.has_last * saved.head
    parts = static_parts(batch, place, laws)
    parts |= {"activations": live * per_microbatch, "working": np.maximum(*passing_bytes(batch, place, laws))}
    total = np.asarray(sum(parts.values()))
    reserve = reserve_bytes(parts["activations"] + parts["working"], laws)
    fullest = (total + reserve).argmax(axis=0)[None]
    chosen = {name: np.take_along_axis(value, fullest, axis=0)[0] for name, value in parts.items()}
    peak, kept_free = (np.take_along_axis(value, fullest, axis=0)[0] for value in (total, reserve))
    return Holdings(peak, kept_free, chosen)


def passing_bytes(batch: Batch, place: Place, laws: Laws) -> tuple[Floats, Floats]:
    """Most bytes in passing on each place, in a forward and in a backward; blocks as if all were the fullest."""
    saved, ways = saved_bytes(batch, laws), block_ways(batch, laws)
    some = (place.blocks > 0).astype(np.float64)
    fullest = [batch.largest(way.max(axis=-1)) for way in (ways.gathered, ways.reduced, ways.scattered)]
    all_kept = ((ways.kept >= ways.gathered).all(axis=-1) | (batch.block_counts == 0)).all(axis=1)
    first, last = end_units(batch, place)
    block = Unit(
        gathered=some * fullest[0],
        kept=some * np.where(all_kept, fullest[0], 0.0),
        reduced=some * fullest[1],
        scattered=some * fullest[2],
        shard=some * batch.mean(ways.shard),
        freed=some * np.where(all_kept, batch.mean(ways.freed), 0.0),
    )
    working = some * batch.largest(ways.working)
    passage = Passage(
        some * batch.mean(saved.block), some * output_bytes(batch), working, saved.logits * place.has_last
    )
    return working_bytes(place.blocks, block, first, last, passage)


def output_bytes(batch: Batch) -> Floats:
    """What a block hands on."""
    return batch.mean_block(batch.facts.output_elements) * batch.precision.compute.num_bytes


def block_ways(batch: Batch, laws: Laws) -> Blocks:
    """Bytes of every variant of blocks: plans, variants, and for what is alive together its moments."""
    compute, reduced = batch.precision.compute.num_bytes, batch.precision.gradients.num_bytes
    saved = saved_bytes(batch, laws)
    parameters, pieces, group = (
        np.stack([getattr(part, name) for part in batch.sharded], axis=-1)
        for name in ("parameters", "collectives", "group")
    )
    keep, named = (np.stack([getattr(part, name) for part in batch.sharded], axis=-1) for name in ("keep", "named"))
    passing = _alive(parameters / pieces, named)
    shards = (parameters / group).sum(axis=-1) * reduced
    return Blocks(
        gathered=compute * passing,
        kept=compute * _alive(np.where(keep, parameters / pieces, 0.0), named),
        reduced=reduced * passing,
        scattered=reduced * _alive(parameters / pieces / group, named),
        freed=_once(batch)[:, None] * compute * np.where(keep, parameters, 0.0).sum(axis=-1),
        shard=_once(batch)[:, None] * shards,
        saved=saved.block,
        working=saved.again + batch.facts.working_bytes[batch.blocks],
        apart=np.asarray(named.any(axis=-1), dtype=np.float64),
    )


def _alive(values: Floats, named: Flags) -> Floats:
    """Of parts of a block, what is alive at once: all that travels together, and one that travels by itself."""
    return np.asarray(np.where(named, 0.0, values).sum(axis=-1, keepdims=True) + np.where(named, values, 0.0))


def end_units(batch: Batch, place: Place) -> tuple[Unit, Unit]:
    """The embedding and the head where they are."""
    parameters = batch.facts.parameters
    first = _end_unit(batch, parameters[batch.embedding] * place.has_first)
    return first, _end_unit(batch, parameters[batch.head] * place.has_last)


def _end_unit(batch: Batch, parameters: Floats) -> Unit:
    whole = np.where(batch.end_group > 1, parameters, 0.0)
    reduced = whole * batch.precision.gradients.num_bytes
    return Unit(
        gathered=whole * batch.precision.compute.num_bytes,
        kept=0.0 * whole,
        reduced=reduced,
        scattered=reduced / batch.end_group,
        shard=_once(batch) * reduced / batch.end_group,
        freed=0.0 * whole,
    )


def _once(batch: Batch) -> Floats:
    """1 where gradients are made once per step, unit by unit; 0 where microbatches add to what is there."""
    return (batch.microbatches <= 1).astype(np.float64)


def reserve_bytes(passing: Floats, laws: Laws) -> Floats:
    """What a device needs beside its tensors: the context, and holes among activations that come and go."""
    return laws.reserve_bytes + laws.fragmentation * passing


def static_parts(batch: Batch, place: Place, laws: Laws) -> dict[str, Floats]:
    """Bytes that a rank holds all through a step, by name."""
    facts = batch.facts
    whole = place.total(facts.parameters[batch.blocks] - batch.sharded_parameters)
    ends = place.has_first * facts.parameters[batch.embedding] + place.has_last * _head_parameters(batch)
    whole = whole + np.where(batch.end_group > 1, 0.0, ends)
    shards = np.where(batch.end_group > 1, ends / batch.end_group, 0.0)
    kept = np.zeros_like(whole)
    for part in batch.sharded:
        shards = shards + place.total(part.parameters / part.group)
        kept = kept + place.total(np.where(part.keep, part.parameters, 0.0))
    optimizer_ways = np.where(batch.shard_optimizer, batch.data_ranks, 1.0)
    parameters, gradients, optimizer = state_bytes(whole, shards, batch.precision, optimizer_ways)
    accumulated = (1.0 - _once(batch)) * shards * batch.precision.gradients.num_bytes
    return {
        "parameters": parameters,
        "gradients": gradients + accumulated,
        "optimizer": optimizer,
        "gathered": batch.stack.kept_copies * kept * batch.precision.compute.num_bytes,
        "buffers": np.where(batch.data_ranks * batch.pp > 1, laws.buffer_bytes, 0.0) + 0 * whole,
    }


@dataclass(frozen=True)
class Saved:
    """Bytes of one microbatch: kept by a block, the embedding and the head; of a block for its backward; logits.

    Those of blocks by variant.
    """

    block: Floats
    embedding: Floats
    head: Floats
    again: Floats
    logits: Floats


def saved_bytes(batch: Batch, laws: Laws) -> Saved:
    """What one microbatch keeps, and what comes back for a moment."""
    facts, of = batch.facts, batch.blocks
    everything = facts.saved_bytes[of] + eager_bytes(batch, laws)
    inputs = facts.output_elements[of] * batch.precision.compute.num_bytes
    again = recomputed_bytes(everything, facts.score_bytes[of], facts.dropped_bytes[of], batch.recompute)
    return Saved(
        block=kept_bytes(everything, inputs, again, batch.recompute),
        embedding=facts.saved_bytes[batch.embedding],
        head=facts.saved_bytes[batch.head],
        again=again,
        logits=facts.logits[batch.head] * logit_bytes(batch, laws),
    )


def _head_parameters(batch: Batch) -> Floats:
    """Parameters of the head on one device; a tied one holds a copy where the embedding is on another rank."""
    own = batch.facts.parameters[batch.head]
    copy = batch.facts.parameters[batch.embedding]
    tied = batch.facts.whole_parameters[batch.head] < 0.5 * batch.facts.whole_parameters[batch.embedding]
    return np.where(tied & (batch.pp > 1) & ~batch.folded, own + copy, own)


def in_flight(batch: Batch) -> Floats:
    """Stages' activations alive at once on the first, a middle and the last rank of every plan."""
    return chunks_in_flight(batch.schedule, batch.pp, batch.stages, batch.microbatches)


def chunks_in_flight(schedule: Numbers, ranks: Floats, v: Floats, m: Floats) -> Floats:
    """Stages' activations alive at once on the first, a middle and the last rank, `v` stages each.

    1F1B and interleaved: Narayanan et al. 2021; zero bubble: Qi et al. 2023; waves: measured on executed orders
    (docs/schedule.md). Never more than all microbatches.
    """
    kinds = {name: schedule == number for number, name in enumerate(SCHEDULE_KINDS)}
    looped, deep = kinds["interleaved"], kinds["zb-h2"] & (m >= 2 * ranks - 1)
    all_at_once = kinds["gpipe"] | kinds["looped-bfs"]
    full = ranks * v
    first = np.select([looped, deep, all_at_once], [full + ranks - 1, 2 * ranks - 1, m * v], full)
    last = np.select([looped, kinds["1f1b"]], [(v - 1) * ranks + 1, 1.0], first)  # the others hold alike on all ranks
    middle = np.where(ranks > 1, np.maximum(first - np.where(looped, 2, 1), last), first)
    return np.asarray(np.minimum(np.stack([first, middle, last]), m * v))


def logit_bytes(batch: Batch, laws: Laws) -> float:
    """Bytes held per logit while the loss is computed."""
    return {
        Fusion.FUSED: laws.fused_logit_bytes,
        Fusion.COMPILED: laws.compiled_logit_bytes,
        Fusion.EAGER: laws.eager_logit_bytes,
    }[batch.stack.elementwise]


def eager_bytes(batch: Batch, laws: Laws) -> Floats:
    """What eager kernels of a block keep beyond the tensors that the model's description counts."""
    norms = batch.facts.norm_elements[batch.blocks] if batch.stack.norm is Fusion.EAGER else 0.0
    pointwise = batch.facts.activation_elements[batch.blocks]
    eager = laws.eager_activation_bytes if batch.stack.elementwise is Fusion.EAGER else 0.0
    return np.asarray(norms * laws.eager_norm_bytes + pointwise * eager)
