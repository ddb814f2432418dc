"""`Batch`: plans as columns, so that thousands are priced in one pass; rows share node type, stack and precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.cluster import Device, Tier
from wavetrain.cost.layers import LayerFacts
from wavetrain.plan.stack import Precision, Stack

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class Sharded:
    """A part of every block's parameters that lies cut over a group: one choice of those a plan makes."""

    parameters: Floats  # per block on one device, before cutting
    group: Floats  # devices it is cut over
    keep: Flags  # gathered in the forward, kept until the backward
    collectives: Floats  # separate collectives per block and direction


@dataclass(frozen=True)
class Batch:
    """Columns of plans. Blocks are the repeated layers between the embedding and the head."""

    device: Device
    tiers: tuple[Tier, ...]
    node_devices: int
    stack: Stack
    precision: Precision
    facts: LayerFacts
    embedding: Numbers  # case of the first layer
    blocks: Numbers  # cases of the kinds of blocks, one column each
    block_counts: Floats
    head: Numbers
    tp: Floats
    sequence_parallel: Flags
    cp: Floats
    dp: Floats
    pp: Floats
    stages: Floats  # per rank
    folded: Flags  # the first and the last stage are on the same rank (waves; both copies of a model together)
    copies: Floats  # of the model in one pipeline, which share its microbatches
    first: Floats  # blocks on the rank of the first stage
    most: Floats  # blocks on the fullest rank
    last: Floats  # blocks on the rank of the last stage
    microbatches: Floats
    schedule: Numbers  # number in SCHEDULE_KINDS
    recompute: Numbers  # 0 none, 1 selective, 2 full, 3 operators chosen one by one
    shard_optimizer: Flags
    sharded: Sequence[Sharded]
    end_group: Floats  # devices that embedding and head are cut over
    barrier: Flags  # the optimizer waits for all ranks

    @property
    def num_blocks(self) -> Floats:
        return np.asarray(self.block_counts.sum(axis=1))

    @property
    def data_ranks(self) -> Floats:
        """Ranks that hold the same parameters: data and context parallel."""
        return self.dp * self.cp

    def mean_block(self, values: Floats) -> Floats:
        """A fact of cases for the average block of each plan."""
        return np.asarray((values[self.blocks] * self.block_counts).sum(axis=1) / self.num_blocks)

    def largest_block(self, values: Floats) -> Floats:
        """A fact of cases for the block of each plan that has most of it."""
        return np.asarray(np.where(self.block_counts > 0, values[self.blocks], 0.0).max(axis=1))

    @property
    def sharded_parameters(self) -> Floats:
        """Parameters per block on one device that are cut over some group."""
        zero = np.zeros(len(self.tp))
        return sum((part.parameters for part in self.sharded), zero)
