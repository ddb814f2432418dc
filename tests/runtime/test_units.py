"""What of a plan becomes a unit that is gathered, and what stays plain."""

from dataclasses import replace

import pytest
import torch
from tests.runtime.sharding import (
    BLOCKS,
    batches,
    described,
    loss_of,
    names_and_ties,
    plan_for,
    reference,
    run,
    stage_of,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from wavetrain.plan import Choice, OperatorChoice, Precision
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.sharded import (
    complete,
    gathered_bytes,
    prepare,
    shard_whole,
    whole_gradients,
)
from wavetrain.runtime.stages import materialize
from wavetrain.runtime.world import gloo_group


@pytest.mark.parametrize("dp", [1, 2])
def test_replicated_operators_in_another_format_have_a_copy_for_the_whole_step(dp):
    """Values stay float32, and so do gradients; beside them there is one bfloat16 copy of everything.

    Tolerances: bfloat16 has 8 bits, so a rounding is 2**-9 of a value; a loss of some ten roundings in a row is within
    2 %, a gradient, which passes twice as many, within 10 % of its norm.
    """
    plan = replace(plan_for(described("gpt2", False), dp=dp, microbatches=2), precision=Precision())
    plain = stage_of("gpt2", False)
    ((exact, gradients), *_), _ = reference(plain, *names_and_ties(plain), plan)
    size = sum(parameter.numel() for parameter in plain.parameters())

    def work(world):
        with gloo_group(world, timeout_s=60):
            stage = stage_of("gpt2", False)
            materialize({0: stage}, seed=3, dtype=torch.float32)
            sharded = shard_whole(stage, plan, world)
            assert all(unit.choice.keep for unit in sharded.units[:-1])
            assert not sharded.replicated.parameters
            tokens, targets, count = batches(dp, 2, 0)
            total = torch.zeros(())
            for m in range(2):
                loss = loss_of(sharded.module, tokens[world.rank, m], targets[world.rank, m], count)
                assert gathered_bytes(sharded.module.modules()) == 2 * size
                prepare(sharded, is_last=m == 1)
                loss.backward()
                total += loss.detach()
            complete(sharded)
            assert gathered_bytes(sharded.module.modules()) == 0
            torch.distributed.all_reduce(total)
            assert abs(total - exact) < 0.02 * exact
            assert {p.dtype for p in sharded.module.parameters()} == {torch.float32}
            for name, gradient in whole_gradients(sharded).items():
                assert gradient.dtype is torch.float32
                if "attn.c_attn.bias" not in name:  # the part of keys is zero but for roundings
                    assert (gradient - gradients[name]).norm() < 0.1 * gradients[name].norm(), name

    run_local(work, dp).check()


@pytest.mark.parametrize("dp", [1, 2])
def test_replicated_operators_stay_plain(dp):
    """Nothing is wrapped, gathered or copied; what is tied is one Parameter, as in the model."""
    plan = plan_for(described("bert", True), dp=dp, microbatches=2)

    def then(_world, sharded):
        assert not sharded.units
        assert not any(isinstance(module, FSDPModule) for module in sharded.module.modules())
        assert not any(isinstance(parameter, DTensor) for parameter in sharded.module.parameters())
        assert sharded.module.head.head.weight is sharded.module.embedding.tokens.weight
        assert sharded.ties == ()
        assert bool(sharded.replicated.buckets) == (dp > 1)
        assert gathered_bytes(sharded.module.modules()) == 0

    run(lambda: stage_of("bert", True), plan, then)


def test_plain_operators_inside_of_a_sharded_layer():
    """Also what is no module that is called: BERT's token types."""
    model = described("bert", False)
    types = next(o.name for o in model.ends[0].operators if "token_type" in o.name)
    linear = next(o.name for o in model.layers[1].operators if o.slice_dims)
    choices = [
        OperatorChoice(model.layers[0].name, types, Choice(1)),
        OperatorChoice(model.layers[1].name, linear, Choice(1, slices=2)),
    ]
    plan = plan_for(model, dp=2, microbatches=2, choice=Choice(2), choices=choices)

    def then(_world, sharded):
        plain = {name for name, p in sharded.module.named_parameters() if not isinstance(p, DTensor)}
        assert len(sharded.replicated.parameters) == len(plain) == 1 + BLOCKS * 4  # a weight and a bias in two slices
        assert {name.split(".")[0] for name in plain} == {"embedding", "blocks"}

    run(lambda: stage_of("bert", False), plan, then)
