"""Bytes of a parameter's states, of a block's activations, and of what is gathered for a moment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wavetrain.plan.stack import Precision

Floats = NDArray[np.float64]

MASTER_BYTES = 4  # the optimizer's copy of a parameter, fp32
GATHERED_COPIES = 4.0  # of a block: in use, prefetched, its gradient, and the buffer it is scattered from


def state_bytes(
    whole: Floats, shards: Floats, precision: Precision, optimizer_ways: Floats
) -> tuple[Floats, Floats, Floats]:
    """Bytes of parameters, gradients and optimizer states on one device.

    Whole parameters: the format they compute in, gradients as accumulated, and the optimizer's states. If those are cut
    `optimizer_ways` (ZeRO-1; Rajbhandari et al. 2020), gradients stay in the format they are computed in and are
    accumulated in shards. Sharded parameters keep the optimizer's master copy only: in full they and their gradients
    exist for a moment.
    """
    compute, accumulated = precision.compute.num_bytes, precision.gradients.num_bytes
    parameters = whole * compute
    cut = np.minimum(accumulated, compute + np.maximum(accumulated - compute, 0.0) / optimizer_ways)
    gradients = whole * np.where(optimizer_ways > 1, cut, accumulated) + shards * accumulated
    master = MASTER_BYTES if precision.compute.num_bytes >= MASTER_BYTES else 0  # then parameters are the master copy
    optimizer = whole / optimizer_ways * (precision.state_bytes - master) + shards * precision.state_bytes
    return parameters, gradients, optimizer


def recomputed_bytes(saved: Floats, scores: Floats, chosen: Floats, recompute: NDArray[np.intp]) -> Floats:
    """Bytes that a block does not keep of one microbatch; they come back while its backward runs.

    `recompute`: 0 none, 1 selective: the scores (Korthikanti et al. 2022, section 5), 2 full: all, 3 chosen operators.
    """
    return np.select([recompute == 2, recompute == 1, recompute == 3], [saved, scores, chosen], 0.0)


def kept_bytes(saved: Floats, inputs: Floats, recomputed: Floats, recompute: NDArray[np.intp]) -> Floats:
    """Bytes that a block keeps of one microbatch: what is not recomputed; if that is everything, its input."""
    return np.where(recompute == 2, inputs, saved - recomputed)


def gathered_bytes(block: Floats, kept: Floats, slices: Floats | float, precision: Precision) -> Floats:
    """Bytes of parameters that exist in full: of the block at work, and of all that is kept until the backward.

    Source: FSDP2's memory tracker, four copies of a block at the backward's peak (docs/memory.md); slices of a split
    operator are gathered one at a time.
    """
    return (GATHERED_COPIES * block / slices + kept) * precision.compute.num_bytes
