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


def joining(group: dist.ProcessGroup, width: int) -> Change:
    """The last dimension in full, of what `torch.chunk` would cut it into; each part needs its own gradients only."""
    return partial(_changed, there=partial(_joined, group, width), back=partial(_own_columns, group, width))


def gather_rows(mine: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """The first dimension in full, of what `torch.chunk` would cut it into.

    DTensor's own gather is coalesced, and gloo (torch 2.13) frees the name of such a work twice, rarely: its threads
    write it without a lock, and it is too long to be stored in place.
    """
    each = -(-rows // group.size())
    padding = mine.new_zeros(each - len(mine), *mine.shape[1:])
    whole = mine.new_empty(each * group.size(), *mine.shape[1:])
    _gather(whole, torch.cat([mine, padding]), group=group)
    return whole[:rows]


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


def _joined(group: dist.ProcessGroup, width: int, x: Tensor) -> Tensor:
    return gather_rows(x.movedim(-1, 0), width, group).movedim(0, -1).contiguous()


def _own_columns(group: dist.ProcessGroup, width: int, x: Tensor) -> Tensor:
    each = -(-width // group.size())
    first = min(each * group.rank(), width)
    return x.narrow(-1, first, min(each, width - first)).contiguous()


def _own(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return x.chunk(group.size(), SEQUENCE_DIM)[group.rank()].contiguous()
