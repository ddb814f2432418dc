"""`Stack`: the software a plan runs on, as its user would state it; `Precision`: number formats and optimizer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from wavetrain.base.units import DType


class AttentionImpl(StrEnum):
    """Which attention kernel runs."""

    UNFUSED = "unfused-torch"  # scores written out, eager softmax
    FUSED_SOFTMAX = "unfused-fused-softmax"  # scores written out, scale, mask and softmax in one kernel (Megatron)
    FLASH1 = "flash1"
    FLASH2 = "flash2"
    TRITON = "flash-triton"
    CUDNN = "flash-cudnn"

    @property
    def keeps_scores(self) -> bool:
        return self in (AttentionImpl.UNFUSED, AttentionImpl.FUSED_SOFTMAX)


class Fusion(StrEnum):
    """How memory-bound operators run."""

    FUSED = "fused"  # hand-written kernels: bias, dropout and residual together
    COMPILED = "compiled"  # a compiler fuses them
    EAGER = "eager"  # one kernel per tensor operation


@dataclass(frozen=True, kw_only=True)
class Stack:
    """How the software executes a plan."""

    attention: AttentionImpl = AttentionImpl.FLASH2
    elementwise: Fusion = Fusion.FUSED
    norm: Fusion = Fusion.FUSED
    logits_parallel: bool = True  # the vocabulary projection and the loss are cut by tensor parallelism
    gradient_overlap: bool = True  # gradients are reduced while the backward still runs
    tensor_overlap: bool = False  # tensor-parallel collectives run beside the products they belong to
    message_overlap: bool = False  # messages between stages travel while both ends compute, as Hanayo's runtime does
    message_s: float | None = None  # host time per message between stages, where it was measured
    bucket_bytes: float | None = None  # gradients are reduced in pieces of this size; None: each rank's at once
    kept_copies: float = 1.0  # of what stays gathered; 3 where it is one unit, with its gradient and a staging buffer
    barrier: bool = True  # all ranks wait for each other before the optimizer step (not so in zero bubble's)


def stack_with(overlap: Collection[str], **more: Any) -> Stack:
    """A stack in which these (of `OVERLAPS`) travel beside compute."""
    return Stack(
        gradient_overlap="gradients" in overlap,
        tensor_overlap="tensor" in overlap,
        message_overlap="messages" in overlap,
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats, and the optimizer's states per parameter."""

    compute: DType = DType.BF16  # activations, gathered parameters
    products: DType = DType.BF16  # matrix products of the layers (FP8 here with compute in BF16)
    gradients: DType = DType.FP32  # as accumulated and reduced
    state_bytes: int = 12  # Adam: fp32 master copy and two moments

    @property
    def fp8(self) -> bool:
        return self.products is DType.FP8
