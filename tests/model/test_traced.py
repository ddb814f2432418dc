"""Any module as a model: parameters exact, FLOPs from the graph, equal to the described ones."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from oracle import built
from test_hf import SMALL

from wavetrain.base.errors import InputError
from wavetrain.model import Work, load_model, write_model
from wavetrain.model.operator import Linear
from wavetrain.model.traced import trace


def names(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}


@pytest.mark.parametrize("family", sorted(SMALL))
def test_traced_and_described_models_agree(family, tmp_path):
    fields = {"model_type": family, "vocab_size": 97, "use_cache": False} | SMALL[family]
    module = built(fields)
    with torch.device("meta"):
        traced = trace(module, {"input_ids": torch.zeros(2, 64, dtype=torch.long)})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    described = load_model(path)
    assert {p.name: p.shape for p in traced.parameters() if not p.tied} == names(module)
    assert traced.num_parameters == described.num_parameters
    for work in (Work(64, 2), Work(128, 3), Work(100, 1)):
        assert traced.forward_flops(work) == pytest.approx(described.forward_flops(work), rel=0.001)
    saved = tmp_path / "model.json"
    write_model(traced, saved)
    assert load_model(saved) == traced


def test_equal_layers_are_folded():
    fields = {"model_type": "llama", "vocab_size": 97, "use_cache": False} | SMALL["llama"]
    with torch.device("meta"):
        model = trace(built(fields), {"input_ids": torch.zeros(2, 64, dtype=torch.long)})
    assert [run.count for run in model.order] == [1, 4, 1]
    assert model.by_name[model.order[1].layer].path == "model.layers.{}"


class Branching(nn.Module):
    """Shared, tied, unused and convolutional parts, and a length-independent head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.twice = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.twice(torch.relu(self.twice(x)))
        return self.out(x.mean(dim=1))


def test_shared_tied_and_unused_parameters_are_counted_once():
    module = Branching()
    model = trace(module, torch.zeros(1, 8, dtype=torch.long))
    assert {p.name: p.shape for p in model.parameters() if not p.tied} == names(module)
    assert model.num_parameters == sum(p.numel() for p in module.parameters())
    work = Work(20, 3)
    convolution, linears, head = 2 * 60 * 16 * 16 * 3, 2 * (2 * 60 * 16 * 16), 2 * 3 * 16 * 50
    assert model.forward_flops(work) == convolution + linears + head


def test_products_without_parameters_count():
    class Products(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bsd,btd->bst", x, x) @ x

    model = trace(Products(), torch.zeros(2, 8, 16))
    assert model.forward_flops(Work(10, 3)) == 2 * (2 * 3 * 10 * 10 * 16)
    assert model.num_parameters == 0


def test_weights_are_neither_read_nor_moved():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).train()
    before = [p.detach().clone() for p in module.parameters()]
    model = trace(module, torch.zeros(4, 5, 8))
    assert module.training
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    linears = [o for layer in model.layers for o in layer.operators if isinstance(o, Linear)]
    assert [o.forward_flops(Work(5, 4)) for o in linears] == [2 * 20 * 64] * len(linears)


def test_what_cannot_be_traced_says_why():
    class Dynamic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(InputError, match=r"torch\.export can't trace it"):
        trace(Dynamic(), torch.zeros(2, 4))
    with pytest.raises(InputError, match="lstm"):
        trace(nn.LSTM(4, 4, batch_first=True), torch.zeros(2, 3, 4))
