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
    """Parameters of a block that lie cut over a group and travel together: one entry per plan and kind of block."""

    parameters: Floats  # per block on one device, before cutting
    group: Floats  # devices it is cut over
    keep: Flags  # gathered in the forward, kept until the backward
    collectives: Floats  # separate collectives per block and direction
    whole: Floats  # parameters of all that travels together where nothing is chosen by itself
    named: Flags  # one operator by itself


@dataclass(frozen=True)
class Batch:
    """Columns of plans. Blocks are the repeated layers between the embedding and the head.

    What belongs to blocks has a second axis, one entry per variant: a kind of layer and the choices made for it.
    """

    device: Device
    tiers: tuple[Tier, ...]
    node_devices: int
    stack: Stack
    precision: Precision
    facts: LayerFacts
    embedding: Numbers  # case of the first layer
    blocks: Numbers  # cases of the variants of blocks
    sliced: Numbers  # the same with operators in slices that are chosen by themselves
    block_counts: Floats
    head: Numbers
    tp: Floats
    sequence_parallel: Flags
    cp: Floats
    dp: Floats
    pp: Floats
    data_stride: Floats  # devices from one context- or data-parallel rank to the next
    stage_stride: Floats  # and from one rank of a pipeline to the next
    stages: Floats  # per rank
    folded: Flags  # the first and the last stage are on the same rank (waves; both copies of a model together)
    copies: Floats  # of the model in one pipeline, which share its microbatches
    first: Floats  # blocks on the rank of the first stage
    most: Floats  # blocks on the fullest rank
    last: Floats  # blocks on the rank of the last stage
    microbatches: Floats
    schedule: Numbers  # number in SCHEDULE_KINDS
    recompute: Numbers  # of the variants: 0 none, 1 selective, 2 full, 3 operators chosen one by one
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

    @property
    def shard_stride(self) -> Floats:
        """Devices from one data-parallel rank to the next."""
        return self.data_stride * self.cp

    def mean(self, values: Floats) -> Floats:
        """What variants have, for the average block of each plan."""
        if values.shape[1] == 1:
            return np.asarray(values[:, 0])
        return np.asarray((values * self.block_counts).sum(axis=1) / self.num_blocks)

    def mean_block(self, values: Floats) -> Floats:
        """A fact of cases for the average block of each plan."""
        return self.mean(values[self.blocks])

    def largest(self, values: Floats) -> Floats:
        """What variants have, for the block of each plan that has most of it."""
        return np.asarray(np.where(self.block_counts > 0, values, 0.0).max(axis=1))

    @property
    def sharded_parameters(self) -> Floats:
        """Parameters per block on one device that are cut over some group, by variant."""
        return sum((part.parameters for part in self.sharded), np.zeros(self.blocks.shape))
