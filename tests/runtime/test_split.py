"""Operators in slices: the same mathematics, and no more gathered at once than a slice."""

import json
from functools import partial
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.test_sharded import batches, described, loss_of, plan_for, stage_of
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from wavetrain.base.errors import InputError
from wavetrain.model.operator import Axis
from wavetrain.plan import Choice, OperatorChoice
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.sharded import gathered_bytes, run_step, shard_whole
from wavetrain.runtime.split import axis_for, can_split, split
from wavetrain.runtime.transformer import TransposedLinear
from wavetrain.runtime.world import gloo_group

DOUBLE = {"dtype": torch.float64}


def linear(inputs, outputs, *, bias, transposed):
    made = (TransposedLinear if transposed else nn.Linear)(inputs, outputs, bias=bias).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def twin_of(module, build):
    """A second module with the same values."""
    twin = build()
    twin.load_state_dict(module.state_dict())
    return twin


def whole(made, leaf, part=lambda p: p):
    pieces = made.pieces[leaf]
    return torch.cat([part(made.get_parameter(path)) for path in pieces.paths], pieces.dim)


def same(made, plain, given):
    """Outputs and all gradients."""
    first, second = (x.clone().requires_grad_(x.is_floating_point()) for x in (given, given))
    found, expected = made(first), plain(second)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    if given.is_floating_point():
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-12, atol=1e-13)
    assert made.pieces.keys() == dict(plain.named_parameters()).keys()
    for leaf, parameter in plain.named_parameters():
        assert torch.equal(whole(made, leaf), parameter)
        gradient = whole(made, leaf, lambda p: p.grad)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-13)
    sizes = sum(p.numel() for p in made.parameters()), sum(p.numel() for p in plain.parameters())
    assert sizes[0] == sizes[1], "nothing twice: one bias"


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(2, 9),
    outputs=st.integers(2, 9),
    slices=st.integers(1, 4),
    axis=st.sampled_from([Axis.COLUMN, Axis.ROW, None]),
    bias=st.booleans(),
    transposed=st.booleans(),
    dims=st.sampled_from([(3,), (2, 3)]),
)
def test_a_linear_in_slices_is_the_same_linear(inputs, outputs, slices, axis, bias, transposed, dims):
    build = partial(linear, inputs, outputs, bias=bias, transposed=transposed)
    plain = build()
    twin = twin_of(plain, build)
    size = inputs if (axis or axis_for(plain, slices)) is Axis.ROW else outputs
    if slices > size:
        with pytest.raises(InputError, match="can't be cut"):
            split(twin, slices=slices, axis=axis)
        return
    same(split(twin, slices=slices, axis=axis), plain, torch.randn(*dims, inputs, **DOUBLE))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(3, 12),
    width=st.integers(3, 8),
    slices=st.integers(1, 3),
    axis=st.sampled_from([Axis.COLUMN, Axis.ROW]),
    padding=st.sampled_from([None, 0, 2, -1]),
)
def test_an_embedding_in_slices_is_the_same_embedding(rows, width, slices, axis, padding):
    build = partial(nn.Embedding, rows, width, padding_idx=padding, **DOUBLE)
    plain = build()
    same(split(twin_of(plain, build), slices=slices, axis=axis), plain, torch.randint(rows, (2, 7)))


def test_transformers_transposed_linear():
    from transformers.pytorch_utils import Conv1D

    build = lambda: Conv1D(8, 6).double()  # noqa: E731 -- outputs, inputs
    plain = build()
    for axis in (Axis.COLUMN, Axis.ROW):
        same(split(twin_of(plain, build), slices=2, axis=axis), plain, torch.randn(2, 3, 6, **DOUBLE))
        plain.zero_grad()


def test_outputs_are_cut_unless_only_inputs_can_be_cut_evenly():
    assert axis_for(nn.Linear(8, 8), 4) is Axis.COLUMN
    assert axis_for(nn.Linear(8, 6), 4) is Axis.ROW
    assert axis_for(nn.Linear(6, 6), 4) is Axis.COLUMN
    assert axis_for(nn.Linear(8, 2), 4) is Axis.ROW
    assert axis_for(nn.Embedding(8, 6), 4) is Axis.ROW


def test_the_unsplit_module_lets_go_of_its_parameters():
    module = nn.Linear(4, 4)
    split(module, slices=2)
    assert not list(module.parameters())


def test_what_cant_be_split():
    assert not can_split(nn.LayerNorm(3))
    with pytest.raises(InputError, match="LayerNorm"):
        split(nn.LayerNorm(3), slices=3)
    with pytest.raises(InputError, match="max_norm"):
        split(nn.Embedding(4, 4, max_norm=1.0), slices=2)


class Watched:
    """The most that some units had gathered at once; it grows only where a gather ends."""

    def __init__(self, monkeypatch, modules):
        self.peak = 0
        wait = FSDPParamGroup.wait_for_unshard

        def waited(group):
            wait(group)
            self.peak = max(self.peak, gathered_bytes(modules))

        monkeypatch.setattr(FSDPParamGroup, "wait_for_unshard", waited)


def peak_of(monkeypatch, layer, operator, choice):
    """Bytes of one operator gathered at once in a step of two microbatches; of each of its slices, padded to shards."""
    plan = plan_for(
        described("gpt2", False), dp=2, microbatches=2, choices=[OperatorChoice(layer, operator, choice, count=1)]
    )

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = shard_whole(stage_of("gpt2", False), plan, world)
            own = [name for name in sharded.pieces if name.startswith(operator.replace("{}", "0"))]
            paths = {path.rpartition(".")[0] for name in own for path in sharded.pieces[name].paths}
            slices = [sharded.module.get_submodule(path) for path in sorted(paths)]
            watched = Watched(monkeypatch, slices)
            tokens, targets, count = batches(2, 2, 0)
            pairs = zip(tokens[world.rank], targets[world.rank], strict=True)
            run_step(sharded, [partial(loss_of, sharded.module, *pair, count) for pair in pairs])
            full = [sum(padded_bytes(p.shape, choice.shard) for p in module.parameters()) for module in slices]
            world.give(json.dumps([watched.peak, full]).encode())

    results = run_local(work, 2).check().results
    assert results[0] == results[1]
    return json.loads(results[0])


def padded_bytes(shape, shard):
    """FSDP2 fills the first dimension up to a multiple of the group."""
    return -(-shape[0] // shard) * shard * prod(shape[1:]) * 8


OPERATORS = [
    ("decoder", "transformer.h.{}.mlp.c_fc"),
    ("decoder", "transformer.h.{}.attn.c_attn"),
    ("embedding", "transformer.wte"),
    ("head", "lm_head"),
]


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize(("layer", "operator"), OPERATORS)
@pytest.mark.parametrize("shard", [1, 2])
def test_no_more_is_gathered_at_once_than_a_slice(monkeypatch, layer, operator, slices, shard):
    peak, sizes = peak_of(monkeypatch, layer, operator, Choice(shard, slices=slices))
    assert len(sizes) == slices
    assert peak == (max(sizes) if shard > 1 else 0)  # what is replicated is there
    assert max(sizes) * slices <= sum(sizes) * 1.01


def test_kept_slices_stay(monkeypatch):
    peak, sizes = peak_of(monkeypatch, *OPERATORS[0], Choice(2, slices=2, keep=True))
    assert peak == sum(sizes)
