"""What happens to hidden states between operators that are cut: one collective forward, another one backward.

By torch.distributed's own collectives; DTensor does the same and takes some tenths of a millisecond each time for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEQUENCE_DIM = 1
Change = Callable[[Tensor], Tensor]
# Their old names warn where there are new ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def entering(group: dist.ProcessGroup, *, sequence: bool) -> Change:
    """Into a region: hidden states in full; their gradients, of which each part has a share, are added."""
    if sequence:
        return partial(_changed, there=partial(_gathered, group), back=partial(_scattered_sum, group))
    return partial(_changed, there=_same, back=partial(_sum, group))


def leaving(group: dist.ProcessGroup, *, sequence: bool) -> Change:
    """Out of a region: shares are added."""
    if sequence:
        return partial(_changed, there=partial(_scattered_sum, group), back=partial(_gathered, group))
    return partial(_changed, there=partial(_sum, group), back=_same)


def cutting(group: dist.ProcessGroup) -> Change:
    """Hidden states that all parts have in full, cut along the sequence."""
    return partial(_changed, there=partial(_own, group), back=partial(_gathered, group))


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _changed(x: Tensor, *, there: Change, back: Change) -> Tensor:
    return _Changed.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]


def _same(x: Tensor) -> Tensor:
    return x


def _sum(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _gather(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(group.size()), SEQUENCE_DIM)


def _scattered_sum(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    parts = torch.cat(x.chunk(group.size(), SEQUENCE_DIM))
    total = x.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    _reduce_scatter(total, parts, group=group)
    return total


def _own(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return x.chunk(group.size(), SEQUENCE_DIM)[group.rank()].contiguous()
