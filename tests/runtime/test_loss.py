"""The cross-entropy of cut logits."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.tensors import Case, alone

from wavetrain.runtime.loss import vocabulary_loss
from wavetrain.runtime.stages import IGNORED


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_loss_of_cut_logits(dtype):
    """Large logits, targets at the ends of parts, none that counts, a part without columns."""
    generator = torch.Generator().manual_seed(0)
    logits = (1000 * torch.randn(12, 5, generator=generator)).to(dtype)
    targets = torch.tensor([0, 1, 2, 3, 4, IGNORED] * 2)
    near = 1e-13 if dtype is torch.float64 else 1e-5

    def then(grid):
        first, last = min(5, 2 * grid.part), min(5, 2 * grid.part + 2)
        for wanted in (targets, torch.full_like(targets, IGNORED)):
            plain = logits.clone().requires_grad_()
            expected = F.cross_entropy(plain, wanted, reduction="sum", ignore_index=IGNORED)
            expected.mul(0.3).backward()
            own = logits[:, first:last].clone().requires_grad_()
            loss = vocabulary_loss(own, wanted, first=first, group=grid.tp.get_group())
            loss.mul(0.3).backward()
            assert loss.dtype is dtype
            assert torch.allclose(loss, expected, rtol=near, atol=0)
            assert torch.allclose(own.grad, plain.grad[:, first:last], rtol=near, atol=near)

    alone(Case("gpt", 4), then)
