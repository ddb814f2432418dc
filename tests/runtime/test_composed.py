"""Layouts of everything at once, on real processes, against one plain process."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.runtime.near import at, close
from tests.runtime.plans import small_model
from tests.soak import SOAK, often
from torch import nn

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.commands.train_run import job_of
from wavetrain.model.limits import divisors
from wavetrain.model.operator import slice_counts
from wavetrain.plan import Choice, Layout, OperatorChoice, Plan, Precision
from wavetrain.plan.check import check
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import num_stages
from wavetrain.runtime.data import counting, sampling_of
from wavetrain.runtime.hf import parts_of_config
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.learn import AdamW, Rate, learning_rate
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.recompute import check_recompute
from wavetrain.runtime.stages import cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.world import gloo_group
from wavetrain.sim.predict import to_run

STEPS, SEED, MOST_RANKS = 5, 3, 8
DRAWS = often(300, 5)
RATE = Rate(peak=1e-3, schedule="cosine", warmup=1, steps=STEPS)
ADAMW = AdamW(epsilon=1e-4)  # a smaller one makes steps of roundings where a gradient is zero: the bias of keys
FAMILIES = ("gpt", "gpt2", "llama", "qwen3", "phi3", "bert", "hf-gpt2", "hf-llama", "hf-qwen2", "hf-bert")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "wave", "wave-zb", "zb-h1", "zb-v", "chimera")


@dataclass(frozen=True)
class Described:
    """A small model; how many heads and tokens are drawn."""

    family: str
    blocks: int
    heads: int = 4
    kv_heads: int = 4
    vocab: int = 30
    tied: bool = False
    seq_len: int = 8

    @property
    def hidden(self) -> int:
        return 4 * self.heads


@lru_cache(maxsize=256)
def model_of(d: Described):
    grouped = {} if d.kv_heads == d.heads else {"kv_heads": d.kv_heads}
    return small_model(family=d.family.removeprefix("hf-"), **_sizes(d), **grouped)


def _sizes(d: Described):
    return {
        "blocks": d.blocks,
        "hidden": d.hidden,
        "heads": d.heads,
        "vocab": d.vocab,
        "seq_len": d.seq_len,
        "tied": d.tied,
    }


@lru_cache(maxsize=256)
def parts_for(d: Described):
    if not d.family.startswith("hf-"):
        return parts_of(model_of(d))
    import transformers

    common = {
        "vocab_size": d.vocab,
        "tie_word_embeddings": d.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if d.family == "hf-gpt2":
        sizes = {"n_embd": d.hidden, "n_layer": d.blocks, "n_head": d.heads, "n_positions": d.seq_len}
        return parts_of_config(transformers.GPT2Config(n_inner=2 * d.hidden, **sizes, **common))
    kind = {"hf-llama": "LlamaConfig", "hf-qwen2": "Qwen2Config", "hf-bert": "BertConfig"}[d.family]
    more = {} if d.family == "hf-bert" else {"num_key_value_heads": d.kv_heads}
    config = getattr(transformers, kind)(
        hidden_size=d.hidden,
        num_hidden_layers=d.blocks,
        num_attention_heads=d.heads,
        intermediate_size=2 * d.hidden,
        max_position_embeddings=d.seq_len,
        **more,
        **common,
    )
    return parts_of_config(config)


@st.composite
def cases(draw):
    """A model and a legal plan for it."""
    pp = draw(st.sampled_from([1, 2, 2, 3, 4]))
    tp = draw(st.sampled_from([t for t in (1, 2, 2, 4) if t * pp <= MOST_RANKS]))
    dp = draw(st.sampled_from([d for d in (1, 2, 2, 3, 4) if d * tp * pp <= MOST_RANKS]))
    layout = _layout(draw, pp, tp, dp)
    stages = num_stages(layout)
    family = draw(st.sampled_from(FAMILIES))
    grouped = family in ("llama", "qwen3", "phi3", "hf-llama", "hf-qwen2")
    model = Described(
        family,
        blocks=stages + draw(st.integers(0, 2)) if stages > 1 else draw(st.integers(1, 3)),
        kv_heads=draw(st.sampled_from([4, 2, 1])) if grouped else 4,
        vocab=draw(st.sampled_from([30, 29, 32])),
        tied=draw(st.booleans()),
    )
    plan = Plan(
        model=model_of(model),
        cluster=load_cluster("dgx-h100:1").part(layout.num_devices),
        layout=layout,
        cut=_cut(draw, model.blocks, stages),
        seq_len=model.seq_len,
        recompute=draw(st.sampled_from(list(Recompute))),
        choice=_choice(draw, dp),
        choices=tuple(_choices(draw, model, dp)),
        precision=Precision(compute=DType.FP32, products=DType.FP32, state_bytes=8),
    )
    return model, _mended(plan), draw(st.sampled_from([math.inf, 0.05]))


def _layout(draw, pp, tp, dp):
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b"
    if schedule == "chimera" and pp % 2:
        schedule = "wave"
    microbatches = draw(st.integers(1, 2)) * pp if schedule in ("interleaved", "chimera") else draw(st.integers(1, 5))
    microbatch = draw(st.sampled_from([1, 2]))
    return Layout(
        global_batch=dp * microbatches * microbatch,
        microbatch=microbatch,
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        dp=dp,
        pp=pp,
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        waves=draw(st.sampled_from([1, 2])) if schedule in ("wave", "wave-zb") and pp < 4 else 1,
        pp_inside=draw(st.booleans()),
    )


def _cut(draw, blocks, stages):
    """Blocks dealt out unevenly, some stages with none."""
    cut = [blocks // stages + (number < blocks % stages) for number in range(stages)]
    if stages > 1 and draw(st.booleans()):
        a, b = draw(st.integers(0, stages - 1)), draw(st.integers(0, stages - 1))
        moved = 1 if cut[a] > 1 or (a in (0, stages - 1) and cut[a]) else 0
        cut[a] -= moved
        cut[b] += moved
    return tuple(cut)


def _choice(draw, dp, counts=(1,), recompute=False):
    shard = draw(st.sampled_from(divisors(dp)))
    keep = shard > 1 and draw(st.booleans())
    return Choice(shard=shard, keep=keep, slices=draw(st.sampled_from(counts)), recompute=recompute)


def _choices(draw, model, dp):
    described = model_of(model)
    for layer in described.layers:
        is_block = layer.name in described.block_counts
        for operator in layer.operators:
            if not draw(st.sampled_from([False, False, True])) or "token_type" in operator.name:
                continue
            if not operator.parameters and not is_block:
                continue
            counts = [k for k in slice_counts(operator) if k <= 3] if operator.parameters else [1]
            again = is_block and draw(st.booleans())
            first = draw(st.integers(0, model.blocks - 1)) if is_block else 0
            choice = _choice(draw, dp, counts, again) if operator.parameters else Choice(recompute=again)
            yield OperatorChoice(layer.name, operator.name, choice, first=first)


def _mended(plan):
    """What rules forbid together is left out: recomputation is said once, and whole where backwards are split."""
    if plan.recompute is not Recompute.NONE:
        plan = replace(plan, choices=tuple(replace(c, choice=replace(c.choice, recompute=False)) for c in plan.choices))
    problems = check(plan)
    assert not problems, problems
    actions, _ = to_run(plan)
    if actions.is_split and plan.recompute is not Recompute.FULL:
        choices = tuple(replace(c, choice=replace(c.choice, recompute=False)) for c in plan.choices)
        plan = replace(plan, recompute=Recompute.NONE, choices=choices)
    check_recompute(plan, is_split=actions.is_split)
    return plan


# --- one plain process ---


def reference(model, plan, most):
    """Per step loss, norm and gradients as the optimizer sees them; the parameters at the end."""
    parts = parts_for(model)
    stages = cut_into_stages(parts, (model.blocks,), [0])
    materialize(stages, seed=SEED, dtype=torch.float64)
    stage = stages[0]
    named = {}
    for name, parameter in stage.named():  # tied weights are one
        named[parts.ties.get(name, name)] = parameter
    for name, parameter in stage.named():
        own = named[parts.ties.get(name, name)]
        if own is not parameter:
            _tie(stage, parameter, own)
    decaying = [p for p in named.values() if p.ndim >= 2]
    staying = [p for p in named.values() if p.ndim < 2]
    groups = [{"params": decaying, "weight_decay": AdamW().weight_decay}, {"params": staying, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, eps=ADAMW.epsilon, foreach=False)
    seen = []
    for step in range(STEPS):
        batch = counting(sampling_of(plan, seed=SEED), vocab=model.vocab, step=step, microbatch=plan.layout.microbatch)
        loss = sum(stage(tokens, batch.targets[m]) for m, tokens in batch.tokens.items()) / batch.num_targets
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in named.values() if p.grad is not None]).item()
        if norm > most:
            for p in named.values():
                if p.grad is not None:
                    p.grad.mul_(most / norm)
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        seen.append((loss.item(), norm, gradients))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(RATE, step=step)
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: p.detach() for name, p in named.items()}, parts.ties


def _tie(stage, parameter, own):
    for module in stage.modules():
        for leaf, found in list(module.named_parameters(recurse=False)):
            if found is parameter:
                setattr(module, leaf, own)


# --- and all ranks ---


def compare(learner, expected):
    seen, last, ties = expected
    learn, found = learner._learn, []

    def capture(rate):
        found.append({name: g for c in learner.stages.values() for name, g in c.whole_gradients().items()})
        learn(rate)

    learner._learn = capture
    for step, (loss, norm, gradients) in enumerate(seen):
        done = learner.step(step)
        assert abs(done.loss - loss) <= 1e-12 * abs(loss), f"loss of step {step}: {done.loss} != {loss}"
        assert abs(done.gradient_norm - norm) <= 1e-12 * norm, f"norm of step {step}: {done.gradient_norm} != {norm}"
        for name, value in found[step].items():
            close(value, gradients[ties.get(name, name)], f"gradient of {name} in step {step}")
        used = {ties.get(name, name) for name in found[step]}
        own = {ties.get(name, name) for c in learner.stages.values() for name in c.names}
        assert used == own & gradients.keys(), f"step {step}: gradients of {used ^ (own & gradients.keys())}"
    for composed in learner.stages.values():
        whole = composed.whole_parameters()
        for leaf in learner.leaves[composed.number]:
            assert leaf.shape == tuple(whole[leaf.name].shape), leaf.key
            assert torch.equal(at(whole[leaf.name], leaf.place), leaf.values), f"{leaf.key} is not at {leaf.place}"
        for name, value in whole.items():
            close(value, last[ties.get(name, name)], name)


def run(model, plan, most=math.inf):
    parts = parts_for(model)
    expected = reference(model, plan, most)
    job = job_of(
        plan,
        steps=STEPS,
        seed=SEED,
        rate=RATE,
        adamw=ADAMW,
        clip=most,
        build=lambda: parts,
        dtype=torch.float64,
        transport="gloo",
    )

    def work(world):
        torch.set_num_threads(1)
        with gloo_group(world, timeout_s=60):
            compare(Learner(job, world), expected)

    run_local(work, plan.layout.num_devices).check()


@pytest.mark.timeout(often(3600, 300))
@settings(max_examples=DRAWS, deadline=None, suppress_health_check=list(HealthCheck), derandomize=not SOAK)
@given(cases())
def test_drawn_layouts_train_like_one_process(case):
    run(*case)
