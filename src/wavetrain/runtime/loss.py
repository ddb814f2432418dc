"""The cross-entropy of logits whose columns are cut over parts; nobody ever has them whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.runtime.stages import IGNORED


def vocabulary_loss(logits: Tensor, targets: Tensor, *, first: int, group: dist.ProcessGroup) -> Tensor:
    """The sum of the cross-entropy over all targets that count, from this part's columns of the logits.

    The same on all parts. torch's `loss_parallel` wants its context around the backward too, which is elsewhere here.
    """
    return _VocabularyLoss.apply(logits, targets, first, group)  # type: ignore[no-any-return, no-untyped-call]


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        rows, columns = logits.shape
        largest = logits.amax(-1) if columns else logits.new_full((rows,), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits - largest.unsqueeze(-1)
        own = targets - first
        (here,) = torch.where((own >= 0) & (own < columns) & (targets != IGNORED))
        chosen = own[here]
        sums = logits.new_zeros(2, rows)  # of the exponentials; what was aimed at
        sums[1, here] = shifted[here, chosen]
        exponentials = shifted.exp_()
        sums[0] = exponentials.sum(-1)
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        counts = targets != IGNORED
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), here, chosen, counts)
        return (sums[0].log() - sums[1])[counts].sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        shares, here, chosen, counts = ctx.saved_tensors
        result = shares * counts.unsqueeze(-1)
        result[here, chosen] -= 1
        return result.mul_(gradients[0]), None, None, None
