"""Blocks that compute again what their plan does not keep: the same bits, and less kept."""

import random
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from tests.runtime.pipeline import HEADS, HIDDEN, SEED, SEQ, VOCAB, batch_of, small
from tests.runtime.plans import small_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.model.operator import Attention, Elementwise, Linear, Work
from wavetrain.plan.layout import Choice, Recompute
from wavetrain.plan.plan import EVERY, OperatorChoice
from wavetrain.runtime.chunk import Computed, weighing
from wavetrain.runtime.hf import parts_of_config
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.recompute import check_recompute, recompute_stage, recomputes_in_blocks, repeated
from wavetrain.runtime.stages import cut_into_stages, materialize
from wavetrain.runtime.transformer import Attention as BuiltInAttention
from wavetrain.runtime.whole import full
from wavetrain.runtime.world import gloo_group

FAMILIES = ("gpt", "llama", "bert", "hf-gpt2", "hf-llama", "hf-bert")
BUILT_IN = FAMILIES[:3]
BLOCKS, SIZE = 2, 3


@lru_cache
def plain_plan(family, blocks=BLOCKS):
    """A plan for `small(family, ...)`; of transformers' models only the names are those of the plan's."""
    sizes = {"hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB, "seq_len": SEQ, "blocks": blocks}
    return small_plan(pp=1, schedule="1f1b", microbatches=1, family=family.removeprefix("hf-"), **sizes)


def layer_of(plan):
    return plan.model.by_name[plan.blocks[0].layer]


def choosing(plan, names, **where):
    """The plan with some operators of its blocks chosen."""
    layer = plan.blocks[0].layer
    choices = (OperatorChoice(layer, name, Choice(recompute=True), **where) for name in names)
    return replace(plan, choices=tuple(choices))


def stage_of(family, plan=None, *, parts=None):
    parts = parts or small(family, BLOCKS, False)
    stages = cut_into_stages(parts, (len(parts.blocks),), [0])
    materialize(stages, seed=SEED)
    if plan is not None:
        recompute_stage(stages[0], plan)
    return stages[0]


def step(stage):
    """Loss, gradients and bytes kept between forward and backward."""
    batch = batch_of([SIZE])
    with weighing(without=stage.parameters) as kept:
        loss = stage(batch.tokens[0], batch.targets[0])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in stage.named_parameters()}, sum(kept.values())


@lru_cache
def baseline(family):
    return step(stage_of(family))


def same(found, expected):
    (loss, gradients, _), (expected_loss, expected_gradients, _) = found, expected
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert torch.equal(gradients[name], gradient) if gradient is not None else gradients[name] is None, name


@contextmanager
def counting(*kernels):
    """How often kernels run."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in kernels
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        yield mode


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def forwards(stage, *kernels):
    """How often kernels run in a forward and its backward."""
    batch = batch_of([SIZE])
    with counting(*kernels) as before:
        loss = stage(batch.tokens[0], batch.targets[0])
    with counting(*kernels) as after:
        loss.backward()
    return before.count, after.count


# --- the same bits, fewer bytes ---


@pytest.mark.parametrize("family", FAMILIES)
def test_full_keeps_the_inputs_of_blocks(family):
    plan = replace(plain_plan(family), recompute=Recompute.FULL)
    found = step(stage_of(family, plan))
    same(found, baseline(family))
    assert found[2] < baseline(family)[2] / 2
    one = replace(plain_plan(family, 1), recompute=Recompute.FULL)
    fewer = step(stage_of(family, one, parts=small(family, 1, False)))[2]
    assert found[2] - fewer == SIZE * SEQ * HIDDEN * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_selective_keeps_less(family):
    found = step(stage_of(family, replace(plain_plan(family), recompute=Recompute.SELECTIVE)))
    same(found, baseline(family))
    assert found[2] < baseline(family)[2]
    core = [o.name for o in layer_of(plain_plan(family)).operators if isinstance(o, Attention)]
    assert step(stage_of(family, choosing(plain_plan(family), core)))[2] == found[2]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_selective_drops_the_scores_of_eager_attention(family):
    parts = eager(family)
    plan = replace(plain_plan(f"hf-{family}"), recompute=Recompute.SELECTIVE)
    expected, found = step(stage_of("", parts=parts)), step(stage_of("", plan, parts=parts))
    same(found, expected)
    scores, mask = (size * SEQ * SEQ * 4 for size in (BLOCKS * SIZE * HEADS, SIZE))  # one mask for all blocks
    assert found[2] <= expected[2] - scores + mask
    chosen = [o.name for o in layer_of(plan).operators if isinstance(o, Attention) or o.name.endswith("activation")]
    both = step(stage_of("", choosing(plain_plan(f"hf-{family}"), chosen), parts=parts))
    same(both, expected)
    assert both[2] < found[2]


def eager(family):
    import transformers

    kind = {"gpt2": "GPT2Config", "llama": "LlamaConfig", "bert": "BertConfig"}[family]
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS, "vocab_size": VOCAB}
    more = {} if family == "gpt2" else {"intermediate_size": 24}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, kind)(
        **sizes, **more, **ids, tie_word_embeddings=False, max_position_embeddings=SEQ, attn_implementation="eager"
    )
    return parts_of_config(config)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_operators(family, seed):
    plan, r = plain_plan(family), random.Random(f"{family} {seed}")
    names = [o.name for o in layer_of(plan).operators]
    chosen = frozenset(r.sample(names, r.randint(2, len(names) - 1)))
    found = step(stage_of(family, choosing(plan, chosen)))
    same(found, baseline(family))
    full = step(stage_of(family, replace(plan, recompute=Recompute.FULL)))[2]
    again = repeated(layer_of(plan).operators, chosen)
    assert full <= found[2] <= baseline(family)[2]
    assert (found[2] < baseline(family)[2]) is bool(again)
    assert (found[2] == full) is (again == frozenset(names))


@pytest.mark.parametrize("family", BUILT_IN)
def test_every_operator_drops_what_the_plan_says(family):
    """What a plan counts on, at the least; the attention core alone keeps q, k and v."""
    plan, work = plain_plan(family), Work(SEQ, SIZE, DType.FP32)
    for operator in layer_of(plan).operators:
        found = step(stage_of(family, choosing(plan, [operator.name])))
        same(found, baseline(family))
        dropped = baseline(family)[2] - found[2]
        mask = isinstance(operator, Elementwise) and operator.saved_tensors == 0  # of a dropout that is not there
        planned = 0 if mask else BLOCKS * operator.saved_bytes(work)
        assert dropped > 0 if isinstance(operator, Attention) else dropped >= planned, operator.name
        assert (dropped > 0) is (planned > 0), operator.name


@pytest.mark.parametrize("family", BUILT_IN)
def test_pairs_of_operators_drop_what_the_plan_says(family):
    plan, work, r = plain_plan(family), Work(SEQ, SIZE, DType.FP32), random.Random(family)
    operators = [o for o in layer_of(plan).operators if not isinstance(o, Elementwise) or o.saved_tensors]
    for _ in range(6):
        two = r.sample(operators, 2)
        found = step(stage_of(family, choosing(plan, [o.name for o in two])))
        same(found, baseline(family))
        assert baseline(family)[2] - found[2] >= BLOCKS * sum(o.saved_bytes(work) for o in two), two


@pytest.mark.parametrize("family", FAMILIES)
def test_all_operators_are_the_whole_block(family):
    full = step(stage_of(family, replace(plain_plan(family), recompute=Recompute.FULL)))[2]
    plan = replace(plain_plan(family), choice=Choice(recompute=True))
    found = step(stage_of(family, plan))
    same(found, baseline(family))
    assert found[2] == full
    some = choosing(plain_plan(family), [EVERY], first=1)  # the second block only
    found = step(stage_of(family, some))
    same(found, baseline(family))
    assert full < found[2] < baseline(family)[2]


def test_operators_that_save_nothing_change_nothing():
    plan = choosing(plain_plan("llama"), ["model.layers.{}.attention_add", "model.layers.{}.self_attn.rotary"])
    assert not repeated(layer_of(plan).operators, frozenset(item.operator for item in plan.choices))
    stage = stage_of("llama", plan)
    assert all("forward" not in vars(module) for module in stage.modules())


# --- what runs again ---


@pytest.mark.parametrize("family", ["gpt", "hf-gpt2", "bert", "hf-bert"])
def test_full_and_selective_run_again(family):
    plan = plain_plan(family)
    products, attention = (forwards(stage_of(family), *kernels)[1] for kernels in (PRODUCTS, [FUSED]))
    assert attention == 0
    full, selective = (replace(plan, recompute=kind) for kind in (Recompute.FULL, Recompute.SELECTIVE))
    assert forwards(stage_of(family, full), FUSED) == (BLOCKS, BLOCKS)
    assert forwards(stage_of(family, selective), FUSED) == (BLOCKS, BLOCKS)
    assert forwards(stage_of(family, full), *PRODUCTS)[1] > products
    assert forwards(stage_of(family, selective), *PRODUCTS)[1] == products


@pytest.mark.parametrize("family", ["gpt", "hf-gpt2"])
def test_only_chosen_operators_run_again(family):
    plan = plain_plan(family)
    role = {o.name.removeprefix("transformer.h.{}."): o.name for o in layer_of(plan).operators}
    by_kind = {type(o).__name__: o.name for o in layer_of(plan).operators}
    names = [o.name for o in layer_of(plan).operators]
    out = names[names.index(by_kind["Attention"]) + 1]
    activation = next(name for name in role.values() if name.endswith("activation"))
    before = forwards(stage_of(family), *PRODUCTS)
    # The activation's input is the product before it; attention and all other products are kept.
    stage = stage_of(family, choosing(plan, [activation]))
    assert forwards(stage, *PRODUCTS) == (before[0], before[1] + BLOCKS)
    assert forwards(stage, FUSED) == (BLOCKS, 0)
    # What the output projection saved is attention's result.
    stage = stage_of(family, choosing(plan, [out]))
    assert forwards(stage, *PRODUCTS) == before
    assert forwards(stage, FUSED) == (BLOCKS, BLOCKS)


def test_nothing_is_kept_without_gradients():
    plan = choosing(plain_plan("gpt"), [layer_of(plain_plan("gpt")).operators[0].name])
    for recompute in (plan, replace(plain_plan("gpt"), recompute=Recompute.FULL)):
        batch = batch_of([SIZE])
        with torch.no_grad(), weighing(without=list) as kept:
            loss = stage_of("gpt", recompute)(batch.tokens[0], batch.targets[0])
        assert not kept
        assert torch.equal(loss, baseline("gpt")[0])


def test_another_model_of_transformers_is_left_alone():
    plan = replace(plain_plan("hf-llama"), recompute=Recompute.SELECTIVE)
    other = stage_of("hf-llama")
    stage = stage_of("hf-llama", plan)
    assert other.blocks[0].layer.self_attn.config._attn_implementation == "sdpa"
    assert stage.blocks[0].surroundings.config._attn_implementation == "sdpa"
    assert forwards(other, FUSED) == (BLOCKS, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_paths_of_parameters_stay(family):
    expected = [name for name, _ in stage_of(family).named_parameters()]
    plan = plain_plan(family)
    chosen = choosing(plan, [o.name for o in layer_of(plan).operators[:4]])
    for kind in (*(replace(plan, recompute=kind) for kind in Recompute), chosen):
        stage = stage_of(family, kind)
        assert [name for name, _ in stage.named_parameters()] == expected
        assert list(stage.state_dict()) == expected


def test_kernels_that_write_in_place():
    """What is changed in place runs again, so that it is changed once."""
    plan = plain_plan("gpt")
    plan = choosing(plan, [next(o.name for o in layer_of(plan).operators if o.name.endswith("activation"))])
    stages = []
    for recompute in (None, plan):
        stage = stage_of("gpt")
        for module in stage.modules():
            if isinstance(module, BuiltInAttention):
                module.out.register_forward_hook(lambda _module, _inputs, output: output.mul_(1.5).add_(1))
        if recompute is not None:
            recompute_stage(stage, recompute)
        stages.append(step(stage))
    same(stages[1], stages[0])
    assert stages[1][2] < stages[0][2]


# --- as parts of a pipeline ---


KINDS = ("none", "full", "selective", "chosen")


def planned(family, kind):
    if kind != "chosen":
        return replace(plain_plan(family), recompute=Recompute(kind))
    names = [o.name for o in layer_of(plain_plan(family)).operators]
    return choosing(plain_plan(family), names[2:7])


@pytest.mark.parametrize("order", ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B2 B1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_in_flight(family, order):
    """Two stages, microbatches of several sizes, through chunks."""
    results = [in_flight(planned(family, kind), family, order) for kind in KINDS]
    for result in results[1:]:
        assert result[0].keys() == results[0][0].keys()
        assert all(torch.equal(loss, results[0][0][m]) for m, loss in result[0].items())
        for name, gradient in results[0][1].items():
            assert (result[1][name] is None) is (gradient is None)
            assert gradient is None or torch.equal(result[1][name], gradient), name
    none, full, selective, chosen = (result[2] for result in results)
    assert full < chosen < none
    assert full < selective < none


def in_flight(plan, family, order):
    plan = replace(plan, cut=(1, 1))
    stages = cut_into_stages(small(family, BLOCKS, False), plan.cut, [0, 1])
    materialize(stages, seed=SEED)
    for stage in stages.values():
        recompute_stage(stage, plan)
    first, last = (Computed(stage) for stage in stages.values())
    batch, held = batch_of([2, 3, 1]), 0
    for chunk in (first, last):
        chunk.begin(batch)
    for kind, m in order.split():
        if kind == "F":
            last.forward(int(m), first.forward(int(m), None))
            held = max(held, first.held_bytes + last.held_bytes)
        else:
            first.backward(int(m), last.backward(int(m), None))
    gradients = {(s, name): p.grad for s, stage in stages.items() for name, p in stage.named()}
    return last.losses, gradients, held


def test_a_stage_of_a_second_copy_has_the_blocks_of_its_place():
    plan = replace(planned("gpt", "none"), cut=(1, 1))
    plan = choosing(plan, [EVERY], first=1)
    stages = cut_into_stages(small("gpt", BLOCKS, False), plan.cut, range(4))
    for stage in stages.values():
        recompute_stage(stage, plan)
    changed = [number for number, stage in stages.items() if "forward" in vars(stage.blocks[0])]
    assert changed == [1, 3]


# --- with FSDP2, in two processes ---


def shard(stage, inside):
    """Every block a unit, or every operator with parameters and the rest of the block."""
    for block in stage.blocks:
        if inside:
            for module in list(block.modules()):
                if list(module.parameters(recurse=False)):
                    module.register_forward_hook(without_base)
                    fully_shard(module, reshard_after_forward=True)
        fully_shard(block, reshard_after_forward=True)
    fully_shard(stage)


def without_base(_module, _inputs, output):
    """As `parallelize` does it: FSDP2 warns of outputs that are views."""
    return torch.ops.aten._unsafe_view(output, output.shape)


@pytest.mark.parametrize("family", ["llama", "hf-gpt2", "hf-bert"])
def test_with_fsdp(family):
    """Sharded before or after, the block or its operators; a full tensor of the same bits as without recomputation."""
    small(family, BLOCKS, False)  # what is imported for it, before the ranks are forked

    def work(world):
        with gloo_group(world, timeout_s=60):
            for inside in (False, True):
                expected = gathered(family, planned(family, "none"), inside=inside, first="shard")
                for kind in KINDS[1:]:
                    for first in ("shard", "recompute"):
                        found = gathered(family, planned(family, kind), inside=inside, first=first)
                        same(found, expected)
                        assert (expected[2], found[2]) == (0, 2 * BLOCKS), (kind, inside, first)

    run_local(work, 2).check()


def gathered(family, plan, *, inside, first):
    stage = stage_of(family)
    if first == "recompute":
        recompute_stage(stage, plan)
    shard(stage, inside)
    if first == "shard":
        recompute_stage(stage, plan)
    again = 0
    for seed in range(2):  # two microbatches, so that gathers of the second find the books of the first
        batch = batch_of([SIZE + torch.distributed.get_rank()], seed)
        loss = stage(batch.tokens[0], batch.targets[0])
        with counting(FUSED) as counted:
            loss.backward()
        again += counted.count
    gradients = {name: None if p.grad is None else full(p.grad) for name, p in stage.named_parameters()}
    return loss.detach(), gradients, again


def test_with_tensor_parallelism():
    """Operators whose tensors are distributed ones are kept and computed again like others."""
    plan = plain_plan("llama")
    names = {o.name.rpartition(".")[2]: o.name for o in layer_of(plan).operators}
    chosen = choosing(plan, [names[role] for role in ("activation", "down_proj", "post_attention_layernorm")])

    def work(world):
        with gloo_group(world, timeout_s=60):
            mesh = init_device_mesh("cpu", (2,))
            expected, *found = (cut_by_heads(each, mesh) for each in (plan, planned("llama", "full"), chosen))
            for result in found:
                same(result, expected)
                assert result[2] > expected[2]

    run_local(work, 2).check()


def cut_by_heads(plan, mesh):
    stage = stage_of("llama")
    ways = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel()) | dict.fromkeys(
        ("out", "down"), RowwiseParallel()
    )
    for block in stage.blocks:
        for module in (block.attention, block.mlp):
            parallelize_module(module, mesh, {name: ways[name] for name, _ in module.named_children() if name in ways})
    recompute_stage(stage, plan)
    batch = batch_of([SIZE])
    loss = stage(batch.tokens[0], batch.targets[0])
    with counting(*PRODUCTS) as counted:
        loss.backward()
    gradients = {name: full(p.grad) for name, p in stage.named_parameters()}
    return loss.detach(), gradients, counted.count


# --- split backwards ---


def test_split_backwards_recompute_stages_or_nothing():
    for kind, in_blocks in (("none", False), ("full", True), ("selective", True), ("chosen", True)):
        plan = planned("gpt", kind)
        check_recompute(plan, is_split=False)
        assert recomputes_in_blocks(plan, is_split=False) is in_blocks
        assert not recomputes_in_blocks(plan, is_split=True)
    check_recompute(planned("gpt", "none"), is_split=True)
    check_recompute(planned("gpt", "full"), is_split=True)
    check_recompute(replace(plain_plan("gpt"), choice=Choice(recompute=True)), is_split=True)


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        (planned("gpt", "selective"), "recompute"),
        (planned("gpt", "chosen"), "choices"),
        (choosing(plain_plan("gpt"), [EVERY], first=1), "choices"),
    ],
)
def test_split_backwards_refuse_the_rest(plan, key):
    with pytest.raises(InputError) as caught:
        check_recompute(plan, is_split=True)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.legal == ("none", "full")
    assert "full" in problem.remedy


def test_a_stage_of_another_model_is_refused():
    plan = choosing(plain_plan("gpt"), [layer_of(plain_plan("gpt")).operators[0].name])
    with pytest.raises(InputError, match="no such operator"):
        recompute_stage(stage_of("llama"), plan)


def test_the_last_product_of_a_block_is_not_computed_again():
    """What the law's `recompute_tail` of our runtime says: 0."""

    def flops(plan):
        stage, batch = stage_of("gpt", plan), batch_of([SIZE])
        with FlopCounterMode(display=False) as counter:
            stage(batch.tokens[0], batch.targets[0]).backward()
        return counter.get_total_flops()

    plan = plain_plan("gpt")
    *others, _ = (o for o in layer_of(plan).operators if isinstance(o, Linear))
    again = flops(replace(plan, recompute=Recompute.FULL)) - flops(None)
    assert again == BLOCKS * sum(2 * SIZE * SEQ * o.inputs * o.outputs for o in others)
