"""Tensor and sequence parallelism on real processes: what parts compute is what one process computes."""

import random
from dataclasses import replace

import pytest
import torch
from tests.runtime.tensors import (
    BATCH,
    FAMILIES,
    FFN,
    GROUPED,
    HEADS,
    HIDDEN,
    SEQ,
    TAKEN_APART,
    Case,
    alone,
    backward,
    batch_of,
    modules_of,
    plan_for,
    run,
)
from torch import nn

from wavetrain.base.errors import InputError
from wavetrain.model.operator import Axis
from wavetrain.plan import Stack
from wavetrain.runtime.split import split
from wavetrain.runtime.tensor import add_partial, connect, cut_parameters


@pytest.mark.parametrize("number", range(8))
def test_every_family(number):
    """Cut along the sequence and not, tied and not, keys and values cut and copied; an uneven vocabulary."""
    tp, first = (2, 4)[number % 2], number // 2
    cases = []
    for family in (*FAMILIES, *TAKEN_APART)[first::4]:
        r, kv = random.Random(family), 2 if family in GROUPED else HEADS
        sequence, tied = (r.random() < 0.5) == (tp == 2), (r.random() < 0.5) == (tp == 2)
        cases.append(Case(family, tp, sequence, tied, kv_heads=kv, vocab=61))
    run(*cases)


def test_one_key_for_all_parts():
    families = ("gpt", "qwen3", "phi3", "hf-qwen2")
    run(*(Case(family, 4, sequence=number % 2 == 0, kv_heads=1) for number, family in enumerate(families)))


@pytest.mark.parametrize("tp", [2, 4])
def test_stages_of_a_pipeline(tp):
    """First, middle and last stages, also without blocks."""
    cuts = [(1, 1, 1), (0, 2, 0), (1, 1)]
    families = ["gpt2", "bert", "llama", "hf-llama", "hf-bert"]
    r = random.Random(tp)
    run(*(Case(family, tp, r.random() < 0.5, r.random() < 0.5, cut=r.choice(cuts)) for family in families))


def test_vocabularies_that_parts_do_not_divide():
    """Where they are fewer than the full shares, a part has no rows at all."""
    tables = (("embedding.tokens", 2), ("head.head", 2))
    run(Case("gpt", 2, vocab=3, tied=True), Case("bert", 2, vocab=5, sequence=True, slices=tables))
    run(Case("gpt", 4, vocab=3, sequence=True, slices=tables), Case("hf-bert", 4, vocab=5, tied=True))


SLICED = {
    "gpt2": (("attention.qkv", 3), ("attention.out", 2), ("mlp.up", 2), ("mlp.down", 4), ("embedding.tokens", 2)),
    "phi3": (("attention.qkv", 4), ("mlp.gate_up", 2), ("head.head", 3), ("embedding.tokens", 4)),
    "bert": (("attention.k", 2), ("attention.out", 4), ("head.head", 2), ("mlp.down", 2)),
    "hf-gpt2": (("attn.c_attn", 2), ("attn.c_proj", 2), ("mlp.c_proj", 2), ("head.1", 5)),
    "hf-llama": (("k_proj", 2), ("v_proj", 3), ("o_proj", 2), ("embedding", 2), ("head.1", 2)),
}


@pytest.mark.parametrize("tp", [2, 4])
def test_operators_in_slices_on_top(tp):
    r = random.Random(tp)
    cases = []
    for family, slices in SLICED.items() if tp == 2 else r.sample(sorted(SLICED.items()), 3):
        kv = 1 if family in GROUPED else HEADS
        cases.append(Case(family, tp, r.random() < 0.5, vocab=61, kv_heads=kv, slices=slices))
    run(*cases)


@pytest.mark.parametrize(("tp", "families"), [(2, ("gpt", "phi3", "hf-gpt2")), (4, ("qwen3", "bert", "hf-llama"))])
def test_a_split_backward(tp, families):
    r = random.Random(tp)
    cases = [Case(f, tp, r.random() < 0.5, cut=r.choice([(2,), (1, 1)]), split_backward=True) for f in families]
    cases.append(Case("llama", tp, sequence=True, kv_heads=1, slices=(("attention.k", 2),), split_backward=True))
    run(*cases)


@pytest.mark.parametrize("late", [False, True])
def test_shards_of_replicas_on_top(late):
    """FSDP2 over replicas: gradients of parts are added shard by shard."""
    slices = (("attention.qkv", 3), ("mlp.down", 2))
    run(
        Case("qwen3", 2, late, kv_heads=1, vocab=61, dp=2, late=late),
        Case("phi3", 2, not late, kv_heads=1, dp=2, late=late, slices=slices),
        Case("bert", 2, late, vocab=3, dp=2, late=late),
    )


@pytest.mark.parametrize(
    ("tp", "families"), [(2, ("hf-gpt2", "hf-mistral", "hf-phi3")), (4, ("hf-llama", "hf-qwen2", "hf-phi3"))]
)
def test_a_users_own_module(tp, families):
    """Taken as it is, with whole logits."""
    run(*(Case(f, tp, tied=tp == 2, kv_heads=HEADS if f == "hf-gpt2" else 2, vocab=61, own=True) for f in families))


# --- what the parts are ---


def test_a_part_has_its_share_and_no_whole_logits():
    case = Case("llama", 4, kv_heads=2, vocab=61, sequence=True)

    def then(grid):
        (stage,) = modules_of(case)
        before = sum(p.numel() for p in stage.parameters())
        parallel = cut_parameters(stage, plan_for(case), grid)
        connect(stage, parallel)
        block = stage.blocks[0]
        assert block.attention.q.weight.shape == (HIDDEN // 4, HIDDEN)
        assert block.attention.k.weight.shape == (HIDDEN // 4, HIDDEN)  # one head of two
        assert block.mlp.down.weight.shape == (HIDDEN, FFN // 4)
        rows = 16 if grid.part < 3 else 13
        assert stage.head.head.weight.shape == stage.embedding.tokens.weight.shape == (rows, HIDDEN)
        assert sum(p.numel() for p in stage.parameters()) < 0.33 * before
        seen, gathered = [], []
        stage.head.register_forward_hook(lambda _m, _i, logits: seen.append(logits.shape))
        block.register_forward_hook(lambda _m, i, o: gathered.append((i[0].shape, o.shape)))
        with Shapes() as shapes:
            backward(case, [stage], batch_of(case, 0, 0))
        assert seen == [(BATCH, SEQ, rows)]
        assert gathered == [((BATCH, SEQ // 4, HIDDEN),) * 2]
        assert shapes.largest <= max(BATCH * SEQ * rows, BATCH * SEQ * HIDDEN)

    alone(case, then)


class Shapes(torch.overrides.TorchFunctionMode):
    """The largest number of elements of any floating-point result."""

    largest = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.largest = max(self.largest, result.numel())
        return result


def test_tied_parameters_stay_tied():
    for case in (Case("bert", 2, tied=True), Case("hf-gpt2", 2, tied=True, own=True)):

        def then(grid, case=case):
            (module,) = modules_of(case)
            parallel = cut_parameters(module, plan_for(case), grid)
            paths = (parallel.embeddings[0], parallel.projections[0])
            first, second = (module.get_submodule(path).weight for path in paths)
            assert first.data_ptr() == second.data_ptr()
            assert (first is second) is case.own
            if case.family == "bert":
                assert module.head.head.bias is module.head.head_bias

        alone(case, then)


def test_what_is_in_slices_is_cut_finer():
    """A fused operator whose keys are copied is in two slices already when a plan splits it."""
    torch.manual_seed(0)
    plain, x = nn.Linear(6, 10).double(), torch.randn(4, 6, dtype=torch.float64)
    expected, weight, bias = plain(x), plain.weight.detach().clone(), plain.bias.detach().clone()
    made = split(split(plain, slices=2, axis=Axis.COLUMN), slices=5)
    assert len(made.leaves) == 5
    assert all(made.get_submodule(path) is leaf for path, leaf in made.leaves.items())
    assert torch.allclose(made(x), expected, rtol=1e-14, atol=1e-14)
    for leaf, values in (("weight", weight), ("bias", bias)):
        pieces = made.pieces[leaf]
        assert torch.equal(torch.cat([made.get_parameter(path) for path in pieces.paths], pieces.dim), values)


def test_one_part_is_everything():
    case = Case("llama", 1)

    def then(grid):
        (stage,) = modules_of(case)
        parallel = cut_parameters(stage, plan_for(case), grid)
        connect(stage, parallel)
        (plain,) = modules_of(case)
        batch = batch_of(case, 0, 0)
        assert torch.equal(backward(case, [stage], batch), backward(case, [plain], batch))
        add_partial(stage, parallel)
        assert not any(cut.ranges for cut in parallel.cuts.values())
        for mine, other in zip(stage.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)

    alone(case, then)


# --- what can't be cut ---


class Here:
    """A grid without processes."""

    part, tp = 0, None


def test_what_cant_be_cut_is_said():
    case = Case("hf-llama", 2, own=True)
    plan, (module,) = plan_for(case), modules_of(case)
    with pytest.raises(InputError, match="logits_parallel: False"):
        cut_parameters(module, replace(plan, stack=Stack(logits_parallel=False)), Here)
    with pytest.raises(InputError, match=r"sequence_parallel: True\n.*whole sequences"):
        cut_parameters(module, replace(plan, layout=replace(plan.layout, sequence_parallel=True)), Here)
    module.lm_head = nn.Sequential(module.lm_head)
    module.lm_head.weight = module.lm_head[0].weight
    with pytest.raises(InputError, match="is a Sequential, which tensor parallelism can't cut"):
        cut_parameters(module, plan, Here)


def test_a_parameter_that_is_used_elsewhere_is_not_cut():
    case = Case("hf-llama", 2, own=True)
    (module,) = modules_of(case)
    module.probe = nn.Linear(HIDDEN, case.vocab, bias=False)
    module.probe.weight = module.lm_head.weight
    with pytest.raises(InputError, match=r"(?s)probe\.weight.*same parameter as lm_head\.weight"):
        cut_parameters(module, plan_for(case), Here)


def test_an_unknown_layout_of_keys_is_not_cut():
    case = Case("gpt", 2)
    (stage,) = modules_of(case)
    stage.blocks[0].attention.__class__ = type("HeadByHead", (nn.Module,), {})
    with pytest.raises(InputError, match="how a HeadByHead lays out queries, keys and values is not known"):
        cut_parameters(stage, plan_for(case), Here)
