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


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return mask @ self.proj(x)


def test_a_length_in_another_input_is_a_length():
    model = trace(Masked(), (torch.zeros(2, 5, 8), torch.zeros(5, 5)))
    assert model.forward_flops(Work(20, 3)) == 2 * 60 * 8 * 8 + 2 * 3 * 20 * 20 * 8


class Residual(nn.Module):
    """Work in the parent between numbered layers."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_layers_with_work_between_them_fold():
    model = trace(Residual([nn.Linear(8, 8) for _ in range(20)]), torch.zeros(2, 5, 8))
    assert len(model.layers) <= 3
    assert sum(run.count for run in model.order) >= 20


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
        ),
        nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Identity(), nn.Linear(5, 5)),
        nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1))),
    ],
)
def test_image_models_keep_their_names(module):
    model = trace(module, torch.zeros(2, 3, 8, 8))
    assert {p.name: p.shape for p in model.parameters() if not p.tied} == names(module)
    assert model.fixed_length
    assert model.forward_flops(Work(1, 6)) == 3 * model.forward_flops(Work(1, 2)) > 0
    with pytest.raises(InputError, match="fixes its length"):
        model.forward_flops(Work(2))


class Twice(nn.Module):
    """Layers run in any order, more than once, and tied to each other."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[2].weight = self.blocks[1].weight
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.relu(self.blocks[number](x))
        return x


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 1, 0, 1, 2), (1, 2), (2, 2)])
def test_any_order_of_layers_counts_every_parameter_once(order):
    module = Twice(order)
    model = trace(module, torch.zeros(2, 5, 8))
    found = [p for p in model.parameters() if not p.tied]
    assert {p.name: p.shape for p in found} == names(module)
    assert len(found) == len(names(module))
    assert model.forward_flops(Work(5, 2)) == len(order) * 2 * 10 * 64


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2))


def test_a_stride_over_the_sequence_is_followed():
    model = trace(Strided(), torch.zeros(2, 6, 8))
    assert model.forward_flops(Work(20, 3)) == 2 * 3 * 10 * 8 * 16


@pytest.mark.parametrize(
    ("product", "flops"),
    [
        (lambda x, w: torch.einsum("...i,ij->...j", x, w), 2 * 60 * 8 * 4),
        (lambda x, w: torch.tensordot(x, w, dims=([2], [0])), 2 * 60 * 8 * 4),
        (lambda x, w: x @ w, 2 * 60 * 8 * 4),
        (lambda x, w: torch.addbmm(torch.zeros(8, 4), x.transpose(1, 2), x @ w), 2 * 60 * 8 * 4 * 2),
    ],
)
def test_products_in_every_spelling(product, flops):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return product(x, self.w)

    assert trace(Product(), torch.zeros(2, 5, 8)).forward_flops(Work(20, 3)) == flops


def test_a_broadcast_input_stays_broadcast():
    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x + positions.unsqueeze(-1)

    assert trace(Shifted(), (torch.zeros(4, 5, 8), torch.zeros(1, 5))).num_parameters == 0


def test_a_transformer_of_torch_itself():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    module = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = trace(module, torch.zeros(2, 6, 16))
    assert {p.name: p.shape for p in model.parameters() if not p.tied} == names(module)
    per_token = 2 * (16 * 48 + 16 * 16 + 2 * 16 * 32)
    assert model.forward_flops(Work(10, 3)) == 3 * (30 * per_token + 4 * 3 * 10 * 10 * 16)


def test_saved_bytes_of_a_traced_model_are_of_the_right_size(tmp_path):
    """An estimate: what eager autograd keeps, which is more than what fused kernels do."""
    for family in ("gpt2", "llama", "bert"):
        fields = {"model_type": family, "vocab_size": 97, "use_cache": False} | SMALL[family]
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with torch.device("meta"):
            traced = trace(built(fields), {"input_ids": torch.zeros(2, 64, dtype=torch.long)})
        ratio = traced.saved_bytes(Work(64, 2)) / load_model(tmp_path / "config.json").saved_bytes(Work(64, 2))
        assert 0.7 < ratio < 2


def test_what_cannot_be_traced_says_why():
    class Dynamic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(InputError, match=r"torch\.export can't trace it"):
        trace(Dynamic(), torch.zeros(2, 4))
    with pytest.raises(InputError, match="lstm"):
        trace(nn.LSTM(4, 4, batch_first=True), torch.zeros(2, 3, 4))
    with pytest.raises(InputError, match="lstm_cell"):
        trace(nn.LSTMCell(4, 4), torch.zeros(2, 4))
