"""The closed form of memory: what the fullest rank of each plan holds at its peak, by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavetrain.cost.laws import Laws
from wavetrain.cost.memory import Passage, Unit, kept_bytes, recomputed_bytes, state_bytes, working_bytes
from wavetrain.plan.stack import Fusion
from wavetrain.sim.batch import Batch
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
    """Ranks of a pipeline that hold alike: rows are places, columns are plans."""

    blocks: Floats
    has_first: Floats  # 1 where the embedding is
    has_last: Floats  # 1 where the head is


def places(batch: Batch) -> Place:
    """The rank of the first stage, the fullest one between, the rank of the last stage."""
    single = batch.pp == 1
    blocks = np.stack([np.where(single, batch.num_blocks, n) for n in (batch.first, batch.most, batch.last)])
    first = np.stack([np.ones_like(single), single, single])
    last = np.stack([single | batch.folded, single, single | ~batch.folded])
    both = batch.copies > 1
    first[2], last[2] = first[2] | both, last[2] | both
    return Place(blocks, first.astype(np.float64), last.astype(np.float64))


def memory(batch: Batch, laws: Laws) -> Holdings:
    """What every plan of a batch holds at its peak."""
    place = places(batch)
    saved = saved_bytes(batch, laws)
    live = in_flight(batch) / batch.stages / batch.copies  # microbatches of all of a rank's stages
    per_microbatch = place.blocks * saved.block + place.has_first * saved.embedding + place.has_last * saved.head
    parts = static_parts(batch, place, laws)
    parts |= {"activations": live * per_microbatch, "working": np.maximum(*passing_bytes(batch, place, laws))}
    total = np.asarray(sum(parts.values()))
    reserve = reserve_bytes(parts["activations"] + parts["working"], laws)
    fullest = (total + reserve).argmax(axis=0)[None]
    chosen = {name: np.take_along_axis(value, fullest, axis=0)[0] for name, value in parts.items()}
    peak, kept_free = (np.take_along_axis(value, fullest, axis=0)[0] for value in (total, reserve))
    return Holdings(peak, kept_free, chosen)


def passing_bytes(batch: Batch, place: Place, laws: Laws) -> tuple[Floats, Floats]:
    """Most bytes in passing on each place, in a forward and in a backward."""
    saved, some = saved_bytes(batch, laws), place.blocks > 0
    output = batch.mean_block(batch.facts.output_elements) * batch.precision.compute.num_bytes
    return working_bytes(
        place.blocks,
        _block_unit(batch, some.astype(np.float64)),
        _end_unit(batch, batch.facts.parameters[batch.embedding] * place.has_first),
        _end_unit(batch, batch.facts.parameters[batch.head] * place.has_last),
        Passage(
            saved=saved.block * some,
            output=output * some,
            working=(saved.again + batch.largest_block(batch.facts.working_bytes)) * some,
            logits=saved.logits * place.has_last,
        ),
    )


def _block_unit(batch: Batch, some: Floats) -> Unit:
    """The sharded part of a block; of an operator that is split, one slice at a time."""
    compute, reduced = batch.precision.compute.num_bytes, batch.precision.gradients.num_bytes
    zero = np.zeros_like(batch.tp)
    cut = [(part, np.where(part.group > 1, part.parameters, 0.0)) for part in batch.sharded]
    scattered = sum((n / part.group * reduced for part, n in cut), zero)
    mean = batch.mean_block(batch.facts.parameters)
    larger = batch.largest_block(batch.facts.parameters) / np.maximum(mean, 1.0)  # the fullest moment is at the largest
    return Unit(
        gathered=some * larger * sum((n / part.collectives * compute for part, n in cut), zero),
        kept=some * sum((np.where(part.keep, n, 0.0) * compute for part, n in cut), zero),
        reduced=some * larger * sum((n / part.collectives * reduced for part, n in cut), zero),
        scattered=some * scattered,
        shard=some * _once(batch) * scattered,
    )


def _end_unit(batch: Batch, parameters: Floats) -> Unit:
    whole = np.where(batch.end_group > 1, parameters, 0.0)
    reduced = whole * batch.precision.gradients.num_bytes
    return Unit(
        gathered=whole * batch.precision.compute.num_bytes,
        kept=0.0 * whole,
        reduced=reduced,
        scattered=reduced / batch.end_group,
        shard=_once(batch) * reduced / batch.end_group,
    )


def _once(batch: Batch) -> Floats:
    """1 where gradients are made once per step, unit by unit; 0 where microbatches add to what is there."""
    return (batch.microbatches <= 1).astype(np.float64)


def reserve_bytes(passing: Floats, laws: Laws) -> Floats:
    """What a device needs beside its tensors: the context, and holes among activations that come and go."""
    return laws.reserve_bytes + laws.fragmentation * passing


def static_parts(batch: Batch, place: Place, laws: Laws) -> dict[str, Floats]:
    """Bytes that a rank holds all through a step, by name."""
    facts, blocks = batch.facts, place.blocks
    whole = blocks * (batch.mean_block(facts.parameters) - batch.sharded_parameters)
    ends = place.has_first * facts.parameters[batch.embedding] + place.has_last * _head_parameters(batch)
    whole = whole + np.where(batch.end_group > 1, 0.0, ends)
    shards = np.where(batch.end_group > 1, ends / batch.end_group, 0.0)
    for part in batch.sharded:
        shards = shards + blocks * part.parameters / part.group
    optimizer_ways = np.where(batch.shard_optimizer, batch.data_ranks, 1.0)
    parameters, gradients, optimizer = state_bytes(whole, shards, batch.precision, optimizer_ways)
    accumulated = (1.0 - _once(batch)) * shards * batch.precision.gradients.num_bytes
    return {
        "parameters": parameters,
        "gradients": gradients + accumulated,
        "optimizer": optimizer,
        "gathered": batch.stack.kept_copies * blocks * _block_unit(batch, np.ones_like(batch.tp)).kept,
        "buffers": np.where(batch.data_ranks * batch.pp > 1, laws.buffer_bytes, 0.0) + 0 * blocks,
    }


@dataclass(frozen=True)
class Saved:
    """Bytes of one microbatch: kept by a block, the embedding and the head; of a block for its backward; logits."""

    block: Floats
    embedding: Floats
    head: Floats
    again: Floats
    logits: Floats


def saved_bytes(batch: Batch, laws: Laws) -> Saved:
    """What one microbatch keeps, and what comes back for a moment."""
    facts = batch.facts
    everything = batch.mean_block(facts.saved_bytes) + eager_bytes(batch, laws)
    scores = batch.mean_block(facts.score_bytes)
    inputs = batch.mean_block(facts.output_elements) * batch.precision.compute.num_bytes
    again = recomputed_bytes(everything, scores, batch.mean_block(facts.dropped_bytes), batch.recompute)
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
    """Stages' activations alive at once on the first, a middle and the last rank, in chunks of a rank's stages.

    1F1B and interleaved: Narayanan et al. 2021; zero bubble: Qi et al. 2023; waves: measured on executed orders
    (docs/schedule.md). Never more than all microbatches.
    """
    ranks, v, m = batch.pp, batch.stages, batch.microbatches
    kinds = {name: batch.schedule == number for number, name in enumerate(SCHEDULE_KINDS)}
    looped, deep = kinds["interleaved"], kinds["zb-h2"] & (m >= 2 * ranks - 1)
    all_at_once = kinds["gpipe"] | kinds["looped-bfs"]
    full = ranks * v
    first = np.select([looped, deep, all_at_once], [full + ranks - 1, 2 * ranks - 1, m * v], full)
    last = np.select([looped, kinds["1f1b"]], [(v - 1) * ranks + 1, 1.0], first)  # the others hold alike on all ranks
    middle = np.where(batch.pp > 1, np.maximum(first - np.where(looped, 2, 1), last), first)
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
    norms = batch.mean_block(batch.facts.norm_elements) if batch.stack.norm is Fusion.EAGER else 0.0
    pointwise = batch.mean_block(batch.facts.activation_elements)
    eager = laws.eager_activation_bytes if batch.stack.elementwise is Fusion.EAGER else 0.0
    return np.asarray(norms * laws.eager_norm_bytes + pointwise * eager)
