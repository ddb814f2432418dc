"""Small models, plans of their operators, and one plain process to compare with."""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from tests.runtime.near import close
from tests.runtime.plans import small_model
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.plan import Choice, Layout, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.runtime.hf import parts_of_config
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.sharded import (
    run_step,
    shard_whole,
    whole_gradients,
    whole_parameters,
)
from wavetrain.runtime.stages import IGNORED, cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.units import _paths
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
    names = {path: name for name, path in _paths(module)}
    ties = module.parts.ties if hasattr(module, "parts") else {}
    groups = {}
    for path, name in names.items():
        same = module.get_parameter(path)
        groups.setdefault(ties.get(name, name) if ties else id(same), []).append(name)
    return names, [group for group in groups.values() if len(group) > 1]


def run(build, plan, then=None):
    """`build` makes the module, the same in every process."""
    plain = build()
    names, ties = names_and_ties(plain)
    expected = reference(plain, names, ties, plan)

    def work(world):
        with gloo_group(world, timeout_s=60):
            sharded = shard_whole(build(), plan, world)
            compare(world, sharded, plan, expected)
            if then is not None:
                then(world, sharded)

    run_local(work, plan.layout.dp).check()


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
