"""`Layout`: how many ways each axis of parallelism cuts the work; `Choice`: what is done with one operator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Recompute(StrEnum):
    """What of a layer's activations is computed again in the backward."""

    NONE = "none"
    SELECTIVE = "selective"  # attention scores only (Korthikanti et al. 2022)
    FULL = "full"  # everything but the layer's input


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism and the batch.

    Ranks are numbered tp innermost, then cp, dp, pp; with `pp_inside` tp, pp, cp, dp: stages are then the neighbours,
    replicas lie far apart.
    """

    global_batch: int
    microbatch: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    dp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1  # stages per rank of a looped schedule
    waves: int = 1  # of a wave schedule: 2 * waves stages per rank
    pp_inside: bool = False
    shard_optimizer: bool = False  # optimizer states cut over dp, parameters and gradients whole (ZeRO-1)

    @property
    def num_devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def data_stride(self) -> int:
        """Devices from one context- or data-parallel rank to the next."""
        return self.tp * (self.pp if self.pp_inside else 1)

    @property
    def stage_stride(self) -> int:
        """Devices from one rank of a pipeline to the next."""
        return self.tp * (1 if self.pp_inside else self.cp * self.dp)

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // (self.dp * self.microbatch)


@dataclass(frozen=True)
class Choice:
    """What is done with one operator's parameters and activations."""

    shard: int = 1  # 1: replicated; dp: fully sharded; a divisor between: sharded in a group, replicated across
    keep: bool = False  # gathered parameters stay from forward to backward
    slices: int = 1  # operator splitting: gathered and used one slice at a time
    recompute: bool = False
