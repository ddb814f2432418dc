"""Operators sharded, replicated and split by a plan, on real processes, against one plain process."""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.plans import small_model
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.model.limits import divisors
from wavetrain.model.operator import slice_counts
from wavetrain.model.traced import trace
from wavetrain.plan import Choice, Layout, OperatorChoice, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.runtime.hf import parts_of_config
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.sharded import (
    gathered_bytes,
    load_whole,
    parallelize,
    policy_of,
    prepare,
    reduce_now,
    run_step,
    whole_gradients,
    whole_parameters,
)
from wavetrain.runtime.stages import IGNORED, cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.world import gloo_group

VOCAB, SEQ, HIDDEN, BLOCKS, STEPS = 30, 8, 16, 2, 3
FAMILIES = ("gpt2", "llama", "bert", "hf-gpt2", "hf-llama")


def described(family, tied):
    return small_model(
        blocks=BLOCKS, family=family.removeprefix("hf-"), hidden=HIDDEN, vocab=VOCAB, seq_len=SEQ, tied=tied
    )


def config_of(family, tied):
    import transformers

    common = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if family == "hf-gpt2":
        return transformers.GPT2Config(
            n_embd=HIDDEN, n_layer=BLOCKS, n_head=4, n_positions=SEQ, n_inner=2 * HIDDEN, **common
        )
    return transformers.LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=SEQ,
        **common,
    )


def plan_for(model, *, dp, microbatches=1, choice=None, choices=()):
    plan = Plan(
        model=model,
        cluster=load_cluster("dgx-h100:1").part(dp),
        layout=Layout(global_batch=dp * microbatches, dp=dp),
        cut=(BLOCKS,),
        seq_len=SEQ,
        choice=choice or Choice(),
        choices=tuple(choices),
        precision=Precision(compute=DType.FP32, products=DType.FP32),
    )
    assert not check(plan), check(plan)
    return plan


def stage_of(family, tied):
    """The whole model as one stage, in float64."""
    parts = parts_of_config(config_of(family, tied)) if family.startswith("hf-") else parts_of(described(family, tied))
    stages = cut_into_stages(parts, (BLOCKS,), [0])
    materialize(stages, seed=3, dtype=torch.float64)
    return stages[0]


def batches(replicas, microbatches, step):
    """Tokens and targets by replica and microbatch; some targets count for nothing."""
    generator = torch.Generator().manual_seed(step)
    shape = (replicas, microbatches, 2, SEQ)
    tokens, targets = (torch.randint(VOCAB, shape, generator=generator) for _ in range(2))
    targets[torch.rand(shape, generator=generator) < 0.2] = IGNORED
    return tokens, targets, int((targets != IGNORED).sum())


def loss_of(module, tokens, targets, num_targets):
    if hasattr(module, "enter"):
        return module(tokens, targets) / num_targets
    logits = module(tokens) if hasattr(module, "mixers") else module(tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED) / num_targets


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=False)


def reference(module, names, ties, plan):
    """One process, all replicas' microbatches: per step the loss and gradients, and the parameters at the end."""
    canonical = {name: group[0] for group in ties for name in group}
    by_name = {name: module.get_parameter(path) for path, name in names.items()}
    unique = {canonical.get(name, name): by_name[canonical.get(name, name)] for name in by_name}
    distinct = list({id(p): p for p in by_name.values()}.values())
    optimizer, seen = adamw(list(unique.values())), []
    for step in range(STEPS):
        tokens, targets, count = batches(plan.layout.dp, plan.layout.num_microbatches, step)
        pairs = zip(tokens.flatten(0, 1), targets.flatten(0, 1), strict=True)
        loss = sum(loss_of(module, own, wanted, count) for own, wanted in pairs)
        found = torch.autograd.grad(loss, distinct, allow_unused=True)
        gradients = {}
        for parameter, gradient in zip(distinct, found, strict=True):
            name = next(name for name, own in by_name.items() if own is parameter)
            key = canonical.get(name, name)
            if gradient is not None:
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
        for key, parameter in unique.items():
            parameter.grad = gradients.get(key)
        optimizer.step()
        seen.append((loss.detach(), {name: gradients.get(canonical.get(name, name)) for name in by_name}))
    return seen, {name: unique[canonical.get(name, name)].detach().clone() for name in by_name}


def close(value, expected, what, *, floor=1e-16):
    """Equal to 1e-12 of the largest element; `floor` is for what is zero but for roundings (the bias of keys)."""
    if expected is None or value is None:
        assert value is expected, what
        return
    assert value.shape == expected.shape, what
    worst = (value - expected).abs().max().item()
    assert worst <= 1e-12 * expected.abs().max().item() + floor, f"{what}: off by {worst}"


def compare(world, sharded, plan, expected):
    """Train as the plan says; losses, gradients and parameters are those of one process."""
    steps, last = expected
    optimizer = adamw(sharded.module.parameters())
    for step, (loss, gradients) in enumerate(steps):
        tokens, targets, count = batches(plan.layout.dp, plan.layout.num_microbatches, step)
        pairs = zip(tokens[world.rank], targets[world.rank], strict=True)
        own = [partial(loss_of, sharded.module, own, wanted, count) for own, wanted in pairs]
        total = sum(run_step(sharded, own))
        torch.distributed.all_reduce(total)
        close(total, loss, f"loss of step {step}")
        found = whole_gradients(sharded)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            close(found[name], gradient, f"gradient of {name} in step {step}")
        optimizer.step()
        optimizer.zero_grad()
    found = whole_parameters(sharded)
    assert found.keys() == last.keys()
    for name, value in last.items():
        close(found[name], value, name, floor=1e-14)  # Adam enlarges what should be zero


def names_and_ties(module):
    from wavetrain.runtime import sharded

    names = sharded._names(module)
    if hasattr(module, "parts"):
        keys = {name: module.parts.ties.get(name, name) for name in names.values()}
    else:
        keys = {name: id(module.get_parameter(path)) for path, name in names.items()}
    groups = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    return names, [group for group in groups.values() if len(group) > 1]


def run(build, plan, then=None):
    """`build` makes the module, the same in every process."""
    plain = build()
    names, ties = names_and_ties(plain)
    expected = reference(plain, names, ties, plan)

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = parallelize(build(), plan, world)
            compare(world, sharded, plan, expected)
            if then is not None:
                then(world, sharded)

    run_local(work, plan.layout.dp).check()


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


@pytest.mark.parametrize("number", range(24))
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
        parallelize(Traceable(), plan, SimpleNamespace(rank=0, size=2))


class Counted:
    """How often each unit is gathered and reduced, while this is entered."""

    def __init__(self, monkeypatch):
        self.gathers, self.reductions = [], []
        gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce
        monkeypatch.setattr(
            _fsdp_param_group, "foreach_all_gather", lambda *a: (self.gathers.append(a[0][0]), gather(*a))[1]
        )
        monkeypatch.setattr(
            _fsdp_param_group, "foreach_reduce", lambda *a: (self.reductions.append(a[0][0]), reduce(*a))[1]
        )


@pytest.mark.parametrize(("keep", "gathers"), [(False, 2 * 3), (True, 1)])
def test_one_reduction_per_step_and_kept_parameters_are_gathered_once(monkeypatch, keep, gathers):
    plan = plan_for(described("llama", False), dp=2, microbatches=3, choice=Choice(2, keep=keep))

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = parallelize(stage_of("llama", False), plan, world)
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
            sharded = parallelize(stage_of("llama", True), plan, world)
            counted = Counted(monkeypatch)
            tokens, targets, count = batches(2, 3, 0)
            losses = {}
            sharded.root.set_is_last_backward(False)
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
            sharded = parallelize(stage_of("gpt2", False), plan, world)
            counted = Counted(monkeypatch)
            tokens, targets, count = batches(2, 2, 0)
            pairs = zip(tokens[world.rank], targets[world.rank], strict=True)
            run_step(sharded, [partial(loss_of, sharded.module, *pair, count) for pair in pairs])
            twice = BLOCKS * (4 + 1) + 2  # and positions, head
            assert len(counted.gathers) == 2 * (2 * twice + 2)
            assert len(counted.reductions) == len(sharded.units) - 1

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
            sharded = parallelize(stage_of("gpt2", True), plan, world)
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
            sharded = parallelize(stage_of("llama", False), plan, world)
            mlp = sharded.module.blocks[0].mlp
            for linear, group in ((mlp.gate, 1), (mlp.up, 2), (mlp.down, 4)):
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
            sharded = parallelize(stage, plan, world)
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
    policy = policy_of(Precision(compute=DType.FP16, gradients=DType.BF16), torch.float32)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.float16, torch.bfloat16)


def test_what_cant_be_run_is_said():
    plan = plan_for(described("llama", False), dp=2)
    world = SimpleNamespace(rank=0, size=3)
    with pytest.raises(InputError, match="the plan is for 2 ranks, this run has 3"):
        parallelize(stage_of("llama", False), plan, world)
    world = SimpleNamespace(rank=0, size=2)
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight\n.*no such parameter"):
        parallelize(stage_of("gpt2", False), plan, world)
    tensor = replace(plan, layout=replace(plan.layout, tp=2, dp=1))
    with pytest.raises(InputError, match=r"layout\.tp: 2"):
        parallelize(stage_of("llama", False), tensor, world)
