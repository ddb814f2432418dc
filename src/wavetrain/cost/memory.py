"""Bytes of a parameter's states, of a block's activations, and of what is gathered for a moment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from wavetrain.plan.stack import Precision

Floats = NDArray[np.float64]

MASTER_BYTES = 4  # the optimizer's copy of a parameter, fp32


def state_bytes(
    whole: Floats, shards: Floats, precision: Precision, optimizer_ways: Floats
) -> tuple[Floats, Floats, Floats]:
    """Bytes of parameters, gradients and optimizer states on one device (states include a master copy of 4).

    Whole parameters: the format they compute in, gradients as accumulated, and the optimizer's states. If those are cut
    `optimizer_ways` (ZeRO-1; Rajbhandari et al. 2020), gradients stay in the format they are computed in and are
    accumulated in shards. Of sharded parameters a device keeps a shard of the master copy and of the other states; in
    full they and their gradients are what `working_bytes` is about.
    """
    compute, accumulated = precision.compute.num_bytes, precision.gradients.num_bytes
    parameters = whole * compute + shards * MASTER_BYTES
    cut = np.minimum(accumulated, compute + np.maximum(accumulated - compute, 0.0) / optimizer_ways)
    gradients = whole * np.where(optimizer_ways > 1, cut, accumulated)
    master = MASTER_BYTES if precision.compute.num_bytes >= MASTER_BYTES else 0  # then parameters are the master copy
    optimizer = whole / optimizer_ways * (precision.state_bytes - master) + shards * (
        precision.state_bytes - MASTER_BYTES
    )
    return parameters, gradients, optimizer


def recomputed_bytes(saved: Floats, scores: Floats, chosen: Floats, recompute: NDArray[np.intp]) -> Floats:
    """Bytes that a block does not keep of one microbatch; they come back while its backward runs.

    `recompute`: 0 none, 1 selective: the scores (Korthikanti et al. 2022, section 5), 2 full: all, 3 chosen operators.
    """
    return np.select([recompute == 2, recompute == 1, recompute == 3], [saved, scores, chosen], 0.0)


def kept_bytes(saved: Floats, inputs: Floats, recomputed: Floats, recompute: NDArray[np.intp]) -> Floats:
    """Bytes that a block keeps of one microbatch: what is not recomputed; if that is everything, its input."""
    return np.where(recompute == 2, inputs, saved - recomputed)


@dataclass(frozen=True)
class Unit:
    """Bytes of what is gathered, used and freed at once: a block, the embedding, the head."""

    gathered: Floats  # in full, in the format it computes in
    kept: Floats  # the part of it that stays gathered until the backward
    reduced: Floats  # its gradient in full, in the format it is reduced in
    scattered: Floats  # of that gradient, what one device receives
    shard: Floats  # the same where it stays until the step's end; 0 where it is added to what is always there
    freed: Floats | float = 0.0  # of what is kept, what goes after its backward; nothing where more microbatches come


@dataclass(frozen=True)
class Passage:
    """Bytes of activations of one microbatch on its way: saved and put out by a block, beside its products, logits."""

    saved: Floats
    output: Floats
    working: Floats  # gradients of a product's input and output, and what is recomputed
    logits: Floats


def working_bytes(blocks: Floats, block: Unit, first: Unit, last: Unit, passage: Passage) -> tuple[Floats, Floats]:
    """Most bytes in passing while a forward, or a backward, goes through the blocks of a rank, all run alike.

    They come on top of states, of parameters that are kept, and of the activations of the whole forward. The largest
    of the moments that may be: a unit in full, the buffer it was gathered in and the one before that; in the backward
    the next one's buffer, its own gradient, the reduction's input of the unit behind it, and shards of what is reduced;
    `working` beside a block's, `logits` beside the head's products. Blocks behind have given back what they saved.
    Source: FSDP2's memory tracker, which it meets within 4 % (tests/sim/test_tracker.py).
    """
    g = block.gathered
    k = np.where(block.kept >= g, g, 0.0)  # where only some is kept, the fullest moment is at a block that is not
    freed = np.where(k > 0, block.freed, 0.0)
    free = g - k
    saved, output, working, logits = passage.saved, passage.output, passage.working, passage.logits
    behind = np.maximum(blocks - 1, 0.0)
    forward = np.maximum(3 * g - k + output - saved, 2 * last.gathered + g + logits)
    ahead = np.where(blocks > 1, free, first.gathered)
    moments = (
        2 * last.gathered + free + logits,
        2 * g - k + ahead + working + last.reduced + last.shard,
        _if(blocks > 1, 2 * g - k - freed + working + block.reduced + block.shard + last.shard - saved)
        + np.where(blocks > 2, free, first.gathered),
        _if(blocks > 2, 2 * g - k - (behind - 1) * freed + free + working + block.reduced + last.shard)
        + np.maximum(blocks - 2, 0) * (block.shard - saved),
        _if(blocks > 1, 2 * g - k - behind * freed + first.gathered + working + block.reduced + last.shard)
        + behind * (block.shard - saved),
        2 * first.gathered - blocks * freed + block.reduced + last.shard + blocks * (block.shard - saved),
        g - k + ahead + block.reduced + block.scattered + output - saved,
        last.gathered + free + last.reduced + last.scattered + output,
        first.gathered + first.reduced + first.scattered + last.shard + output + blocks * (block.shard - saved - freed),
    )
    backward = reduce(np.maximum, moments)
    return np.maximum(forward, 0.0), np.maximum(backward, 0.0)


def _if(condition: NDArray[np.bool_], value: Floats) -> Floats:
    """A moment that there is only under a condition."""
    return np.where(condition, value, -np.inf)


@dataclass(frozen=True)
class Blocks:
    """Bytes of the ways to run a block (rows).

    Columns of the first four: what is alive together while the block runs, one moment each: all that travels together
    and one of the operators that travel by themselves.
    """

    gathered: Floats
    kept: Floats
    reduced: Floats
    scattered: Floats
    freed: Floats  # of all that is kept, what goes after its backward
    shard: Floats
    saved: Floats
    working: Floats
    apart: Floats  # 1 where operators travel by themselves


def walked_bytes(
    order: NDArray[np.intp], ways: Blocks, ends: tuple[Unit, Unit], passage: Passage
) -> tuple[float, float]:
    """The same as `working_bytes` for blocks that are run in different ways; `order` says how each is.

    The neighbours of a block count as if they were run like itself, so that blocks are judged one by one; where
    operators travel by themselves, what is beside products and what the block saves counts in every moment, so that
    operators are.
    """
    first, last = ends
    ending = 2 * last.gathered + passage.logits, last.gathered + last.reduced + last.scattered
    beginning = 2 * first.gathered, first.gathered + first.reduced + first.scattered + passage.output
    if not len(order):
        backward = max(*ending, *(moment + last.shard for moment in beginning))
        return float(ending[0]), float(backward)
    g, k, reduced = ways.gathered[order], ways.kept[order], ways.reduced[order]
    saved, working = ways.saved[order], ways.working[order]
    change = ways.shard[order] - saved - ways.freed[order]  # what a backward leaves
    dropped = change[::-1].cumsum()[::-1]
    free = g - k
    ahead, behind = free.copy(), reduced.copy()
    ahead[0], behind[-1] = first.gathered, last.reduced
    moments = (dropped - change + working)[:, None] + free + g + ahead + behind + last.shard
    apart = (ways.apart[order] * (working + saved))[:, None]
    later = saved[::-1].cumsum()[::-1]
    forwards = 3 * g - k + passage.output - later[:, None] + apart
    scatter = free[-1] + ahead[-1] + reduced[-1] + ways.scattered[order[-1]] + passage.output - saved[-1] + apart[-1]
    backward = max(
        moments.max(),
        scatter.max(),
        ending[0] + free[-1].max(),
        ending[1] + free[-1].max() + passage.output,
        beginning[0] + reduced[0].max() + last.shard + dropped[0],
        beginning[1] + last.shard + dropped[0],
    )
    forward = max(forwards.max(), ending[0] + g[-1].max())
    return max(float(forward), 0.0), max(float(backward), 0.0)
