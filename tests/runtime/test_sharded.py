"""Operators sharded, replicated and split by a plan, on real processes, against one plain process."""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.sharding import (
    BLOCKS,
    FAMILIES,
    HIDDEN,
    SEQ,
    VOCAB,
    Counted,
    batches,
    close,
    config_of,
    described,
    loss_of,
    names_and_ties,
    plan_for,
    reference,
    run,
    stage_of,
)
from tests.soak import often
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.model.limits import divisors
from wavetrain.model.operator import slice_counts
from wavetrain.model.traced import trace
from wavetrain.plan import Choice, OperatorChoice, Precision
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.sharded import (
    gathered_bytes,
    load_whole,
    policy_of,
    prepare,
    reduce_now,
    run_step,
    shard_whole,
    whole_gradients,
    whole_parameters,
)
from wavetrain.runtime.stages import materialize
from wavetrain.runtime.world import gloo_group


def drawn(number):
    """A seeded draw of a model and of a plan for it."""
    r = random.Random(number)
    dp, family, tied = r.choice([1, 2, 2, 3, 4]), r.choice(FAMILIES), r.random() < 0.5
    model = described(family, tied)

    def choice(counts=(1,)):
        shard = r.choice(divisors(dp))
        return Choice(shard=shard, keep=shard > 1 and r.random() < 0.4, slices=r.choice(counts))

    choices = []
    for layer in model.layers:
        if r.random() < 0.3:
            choices.append(OperatorChoice(layer.name, "*", choice()))
        for operator in layer.operators:
            if operator.parameters and r.random() < 0.5 and "token_type" not in operator.name:
                counts = [k for k in slice_counts(operator) if k <= 4]
                first = r.randrange(BLOCKS) if layer.name in model.block_counts else 0
                choices.append(OperatorChoice(layer.name, operator.name, choice(counts), first=first))
    return family, tied, plan_for(model, dp=dp, microbatches=r.choice([1, 2, 3]), choice=choice(), choices=choices)


@pytest.mark.parametrize("number", range(often(24, 4)))
def test_drawn_plans_train_like_one_process(number):
    family, tied, plan = drawn(number)
    run(lambda: stage_of(family, tied), plan)


def whole_hf(family, tied):
    """A transformers model as its user has it, not taken apart."""
    import transformers

    kind = {"hf-gpt2": transformers.GPT2LMHeadModel, "hf-llama": transformers.LlamaForCausalLM}[family]
    torch.manual_seed(1)
    return kind(config_of(family, tied)).double().eval()


MLP = {"hf-gpt2": "transformer.h.{}.mlp.c_fc", "hf-llama": "model.layers.{}.mlp.up_proj"}
TOKENS = {"hf-gpt2": "transformer.wte", "hf-llama": "model.embed_tokens"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["hf-gpt2", "hf-llama"])
def test_a_users_own_module(family, tied):
    choices = [
        OperatorChoice("decoder", MLP[family], Choice(shard=2, slices=4), first=1),
        OperatorChoice("decoder", MLP[family], Choice(shard=1), count=1),
        OperatorChoice("embedding", TOKENS[family], Choice(shard=2, slices=2)),
        OperatorChoice("head", "lm_head", Choice(shard=1)),
    ]
    model = described(family, tied)
    run(lambda: whole_hf(family, tied), plan_for(model, dp=2, microbatches=2, choice=Choice(2), choices=choices))


class Mixer(nn.Module):
    """A block with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Traceable(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.out = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.mixers = nn.ModuleList(Mixer() for _ in range(BLOCKS))
        self.shift = nn.Parameter(torch.zeros(HIDDEN))
        self.double()

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.shift
        for mixer in self.mixers:
            hidden = mixer(hidden)
        return self.out(hidden)


def test_a_traced_module():
    model = trace(Traceable(), torch.zeros(2, SEQ, dtype=torch.int64))
    block = model.blocks[0].layer
    choices = [
        OperatorChoice(block, "mixers.{}.up", Choice(1)),
        OperatorChoice(block, "mixers.{}.down", Choice(2, slices=4)),
    ]
    run(Traceable, plan_for(model, dp=2, choice=Choice(2), choices=choices))
    own = next(o.name for o in model.by_name[block].operators if any(p.name.endswith("scale") for p in o.parameters))
    plan = plan_for(model, dp=2, choices=[OperatorChoice(block, own, Choice(2))])
    with pytest.raises(InputError, match="can't be gathered by itself"):
        shard_whole(Traceable(), plan, SimpleNamespace(rank=0, size=2))


@pytest.mark.parametrize(("keep", "gathers"), [(False, 2 * 3), (True, 1)])
def test_one_reduction_per_step_and_kept_parameters_are_gathered_once(monkeypatch, keep, gathers):
    plan = plan_for(described("llama", False), dp=2, microbatches=3, choice=Choice(2, keep=keep))

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = shard_whole(stage_of("llama", False), plan, world)
            counted = Counted(monkeypatch)
            tokens, targets, count = batches(2, 3, 0)
            pairs = list(zip(tokens[world.rank], targets[world.rank], strict=True))
            for number, (own, wanted) in enumerate(pairs):
                prepare(sharded, is_last=number == 2)
                loss = loss_of(sharded.module, own, wanted, count)
                assert (gathered_bytes(sharded.module.modules()) > 0) is keep
                loss.backward()
                assert (gathered_bytes(sharded.module.modules()) > 0) is (keep and number < 2)
            units = BLOCKS + 2
            assert len(counted.reductions) == units
            assert len(counted.gathers) == units * gathers

    run_local(work, 2).check()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("order", ["F0 F1 B0 F2 B1 B2", "F0 F1 F2 B2 B0 B1"])
def test_several_in_flight_and_reduced_at_the_end(monkeypatch, order, keep):
    up = OperatorChoice("decoder", "model.layers.{}.mlp.up_proj", Choice(2, slices=2))
    plan = plan_for(described("llama", True), dp=2, microbatches=3, choice=Choice(2, keep=keep), choices=[up])
    plain = stage_of("llama", True)
    ((_, expected), *_), _ = reference(plain, *names_and_ties(plain), plan)

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = shard_whole(stage_of("llama", True), plan, world)
            counted = Counted(monkeypatch)
            tokens, targets, count = batches(2, 3, 0)
            losses = {}
            prepare(sharded, is_last=False)
            for kind, number in order.split():
                m = int(number)
                if kind == "F":
                    losses[m] = loss_of(sharded.module, tokens[world.rank, m], targets[world.rank, m], count)
                else:
                    losses.pop(m).backward()
            assert not counted.reductions
            reduce_now(sharded)
            assert len(counted.reductions) == len(sharded.units) - 1
            assert gathered_bytes(sharded.module.modules()) == 0
            for name, gradient in whole_gradients(sharded).items():
                close(gradient, expected[name], name)

    run_local(work, 2).check()


def test_every_gather_is_used(monkeypatch):
    """Named operators, slices and the rest of a block: twice per microbatch; a split embedding once, nothing kept."""
    up, down, tokens = "transformer.h.{}.mlp.c_fc", "transformer.h.{}.mlp.c_proj", "transformer.wte"
    choices = [
        OperatorChoice("decoder", up, Choice(2, slices=4)),
        OperatorChoice("decoder", down, Choice(2)),
        OperatorChoice("decoder", "*", Choice(1)),
        OperatorChoice("embedding", tokens, Choice(2, slices=2)),
    ]
    plan = plan_for(described("gpt2", False), dp=2, microbatches=2, choice=Choice(2), choices=choices)

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = shard_whole(stage_of("gpt2", False), plan, world)
            counted = Counted(monkeypatch)
            tokens, targets, count = batches(2, 2, 0)
            pairs = zip(tokens[world.rank], targets[world.rank], strict=True)
            run_step(sharded, [partial(loss_of, sharded.module, *pair, count) for pair in pairs])
            twice = BLOCKS * (4 + 1) + 2  # and positions, head
            assert len(counted.gathers) == 2 * (2 * twice + 2)
            assert len(counted.reductions) == 2 * (len(sharded.units) - 1)  # with every microbatch, into shards

    run_local(work, 2).check()


def test_values_go_in_and_out_by_their_unsplit_names():
    linear, embedding = "transformer.h.{}.attn.c_attn", "transformer.wte"
    choices = [
        OperatorChoice("decoder", linear, Choice(3, slices=4)),
        OperatorChoice("embedding", embedding, Choice(3)),
    ]
    plan = plan_for(described("gpt2", True), dp=3, choices=choices)

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = shard_whole(stage_of("gpt2", True), plan, world)
            expected = dict(stage_of("gpt2", True).named())
            found = whole_parameters(sharded)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            other = {name: torch.randn_like(value) for name, value in expected.items()}
            for value in other.values():
                torch.distributed.broadcast(value.detach(), 0)
            load_whole(sharded, other)
            found = whole_parameters(sharded)
            assert all(torch.equal(found[name], value) for name, value in other.items())

    run_local(work, 3).check()


def test_shards_lie_on_neighbours_and_take_their_part_of_memory():
    choices = [
        OperatorChoice("decoder", "model.layers.{}.mlp.up_proj", Choice(2)),
        OperatorChoice("decoder", "model.layers.{}.mlp.down_proj", Choice(4)),
    ]
    plan = plan_for(described("llama", False), dp=4, choices=choices)

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = shard_whole(stage_of("llama", False), plan, world)
            mlp = sharded.module.blocks[0].mlp
            assert not isinstance(mlp.gate.weight, DTensor)
            assert mlp.gate.weight.shape == (2 * HIDDEN, HIDDEN)
            for linear, group in ((mlp.up, 2), (mlp.down, 4)):
                weight = linear.weight
                assert weight.to_local().numel() * group == weight.numel()
                mesh = weight.device_mesh["shard"]
                first = world.rank // group * group
                assert mesh.mesh.tolist() == list(range(first, first + group))

    run_local(work, 4).check()


def test_mixed_precision_is_the_plans():
    plan = replace(plan_for(described("llama", False), dp=2, choice=Choice(2)), precision=Precision())

    def work(world):
        with gloo_group(world, timeout_s=60):
            stage = stage_of("llama", False)
            materialize({0: stage}, seed=3, dtype=torch.float32)
            sharded = shard_whole(stage, plan, world)
            seen = []
            sharded.module.blocks[0].mlp.up.register_forward_hook(
                lambda own, _, y: seen.extend([own.weight.dtype, y.dtype])
            )
            tokens, targets, count = batches(2, 1, 0)
            (loss,) = run_step(
                sharded, [partial(loss_of, sharded.module, tokens[world.rank, 0], targets[world.rank, 0], count)]
            )
            assert seen == [torch.bfloat16, torch.bfloat16]
            assert {p.dtype for p in sharded.module.parameters()} == {torch.float32}
            assert {g.dtype for g in whole_gradients(sharded).values()} == {torch.float32}
            plain = stage_of("llama", False)
            exact = loss_of(plain, tokens[world.rank, 0], targets[world.rank, 0], count)
            assert abs(loss - exact) < 0.02 * exact
            for name, gradient in reference(plain, *names_and_ties(plain), plan)[0][0][1].items():
                assert (whole_gradients(sharded)[name] - gradient).norm() < 0.1 * gradient.norm(), name

    run_local(work, 2).check()


def test_policy_of_a_precision():
    assert policy_of(Precision(), torch.float64).param_dtype is None
    exact = Precision(compute=DType.TF32, gradients=DType.FP32)
    assert policy_of(exact, torch.float32) == policy_of(Precision(), torch.float64)
    assert policy_of(Precision(), torch.float32).reduce_dtype is torch.float32
    policy = policy_of(Precision(compute=DType.FP16, gradients=DType.BF16), torch.float32)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.float16, torch.bfloat16)


def test_what_cant_be_run_is_said():
    plan = plan_for(described("llama", False), dp=2)
    world = SimpleNamespace(rank=0, size=3)
    with pytest.raises(InputError, match=r"the plan is for 2 ranks \(.*\), this run has 3"):
        shard_whole(stage_of("llama", False), plan, world)
    world = SimpleNamespace(rank=0, size=2)
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight\n.*no such parameter"):
        shard_whole(stage_of("gpt2", False), plan, world)
    tensor = replace(plan, layout=replace(plan.layout, tp=2, dp=1))
    with pytest.raises(InputError, match=r"layout\.tp: 2"):
        shard_whole(stage_of("llama", False), tensor, world)


class Names(TorchDispatchMode):
    """What is called while it is on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_gather_is_coalesced():
    """Gloo's threads free the name of such a work twice, if rarely: a rank dies of it."""
    plan = plan_for(described("gpt2", False), dp=2, choice=Choice(2))

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = shard_whole(stage_of("gpt2", False), plan, world)
            with Names() as called:
                whole_parameters(sharded)
            gathers = [name for name in called.seen if "gather" in name]
            assert gathers
            assert not [name for name in gathers if "coalesced" in name]

    run_local(work, 2).check()
