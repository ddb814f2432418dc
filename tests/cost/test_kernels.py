"""The kernel table: however work is cut, all of it is there."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.cost.kernels import Phase, Sort, Split, kernels, table
from wavetrain.model import load_model
from wavetrain.model.operator import Attention, Axis, Experts, Linear, Work
from wavetrain.plan.stack import AttentionImpl, Fusion, Stack

UNFUSED = Stack(attention=AttentionImpl.FUSED_SOFTMAX)
PRODUCTS = (Sort.PRODUCT, Sort.HIGH_PRODUCT)
works = st.builds(Work, seq_len=st.sampled_from((64, 256, 1024)), microbatch=st.integers(1, 4))
splits = st.builds(
    Split,
    tp=st.sampled_from((1, 2, 4)),
    sequence_parallel=st.booleans(),
    cp=st.sampled_from((1, 2, 4)),
    slices=st.sampled_from((1, 2, 8)),
)
names = st.sampled_from(("tiny-gpt", "gpt3-125m", "tiny-llama", "llama2-70b", "tiny-bert", "opt-13b"))


def flops(kernel):
    """FLOPs of one kernel: a product's 2 m n k each, of fused attention what it counts itself."""
    if kernel.sort in PRODUCTS:
        return 2 * kernel.rows * kernel.columns * kernel.inner * kernel.amount
    return kernel.amount if kernel.sort is Sort.ATTENTION else 0.0


def by_phase(model, work, split, stack, **options):
    """FLOPs of all devices that share a microbatch: forward, and both parts of the backward."""
    total = np.zeros(3)
    for layer in model.layers:
        for kernel in kernels(layer, work, split, stack, **options):
            total[kernel.phase] += model.counts[layer.name] * flops(kernel)
    return total * split.tp * split.cp


def repeated(model, work, split):
    """FLOPs that every rank of a tensor-parallel group does again: what tensor parallelism leaves whole, and keys and
    values that have fewer heads than there are ranks.
    """
    total = 0.0
    for layer in model.layers:
        for operator in layer.operators:
            if isinstance(operator, Linear):
                ways = {Axis.NONE: 1, Axis.COLUMN: min(split.tp, operator.units)}.get(operator.axis, split.tp)
                total += model.counts[layer.name] * operator.forward_flops(work) * (split.tp / ways - 1)
    return total


@settings(max_examples=60)
@given(names, works, splits)
def test_unfused_work_is_conserved_exactly(name, work, split):
    model = load_model(name)
    total = by_phase(model, work, split, UNFUSED)
    again = repeated(model, work, split)
    assert total[Phase.F] == pytest.approx(model.forward_flops(work) + again, rel=1e-12)
    assert total[1:].sum() == pytest.approx(model.backward_flops(work) + 2 * again, rel=1e-12)


@settings(max_examples=40)
@given(names, works, splits)
def test_fused_attention_does_half_of_a_causal_score_matrix(name, work, split):
    model = load_model(name)
    attention = model.total(lambda o: o.forward_flops(work) if isinstance(o, Attention) else 0)
    halved = model.total(lambda o: o.forward_flops(work) / 2 if isinstance(o, Attention) and o.causal else 0)
    total = by_phase(model, work, split, Stack())
    again = repeated(model, work, split)
    assert total[Phase.F] == pytest.approx(model.forward_flops(work) + again - halved, rel=1e-12)
    # The backward of fused attention is priced as a multiple of its forward: its kernel counts one forward.
    expected = model.backward_flops(work) + 2 * again - 2 * attention + (attention - halved)
    assert total[1:].sum() == pytest.approx(expected, rel=1e-12)


@settings(max_examples=20)
@given(works, splits, st.booleans())
def test_experts_do_the_work_of_the_active_ones(work, split, fp8):
    model = load_model("tiny-moe")
    total = by_phase(model, work, split, UNFUSED, fp8=fp8)
    assert total[Phase.F] == pytest.approx(model.forward_flops(work) + repeated(model, work, split), rel=1e-12)


@given(names, works, splits)
@settings(max_examples=20)
def test_number_formats_change_no_work(name, work, split):
    model = load_model(name)
    assert np.allclose(by_phase(model, work, split, UNFUSED, fp8=True), by_phase(model, work, split, UNFUSED))


def test_fp8_is_for_the_layers_only():
    """Attention and logits stay in the compute format; each FP8 product casts its input and its gradient."""
    head, block = load_model("tiny-llama").layers[-1], load_model("tiny-llama").layers[1]
    work = Work(128)
    assert not [k for k in kernels(head, work, Split(), UNFUSED, fp8=True) if k.sort is Sort.PRODUCT]
    made = kernels(block, work, Split(), UNFUSED, fp8=True)
    linears = sum(isinstance(operator, Linear) for operator in block.operators)
    assert sum(k.sort is Sort.PRODUCT for k in made) == 3 * linears
    assert all(k.sort is Sort.HIGH_PRODUCT for k in made if k.attends and k.rows)


def streamed(model, work, split, stack=UNFUSED):
    made = [k for layer in model.layers for k in kernels(layer, work, split, stack) if k.sort is Sort.STREAM]
    return sum(k.amount for k in made)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama"])
def test_sequence_parallelism_cuts_every_stream_by_tp(name):
    model, work = load_model(name), Work(256, 2)
    whole = streamed(model, work, Split())
    assert streamed(model, work, Split(tp=4, sequence_parallel=True)) == pytest.approx(whole / 4)
    assert whole / 4 < streamed(model, work, Split(tp=4)) < whole
    assert streamed(model, work, Split(cp=4)) == pytest.approx(whole / 4)


def test_slices_are_more_and_thinner_products_of_the_same_work():
    block, work = load_model("tiny-gpt").layers[1], Work(128)
    whole = [k for k in kernels(block, work, Split(), Stack()) if k.sort in PRODUCTS and k.phase is Phase.F]
    cut = [k for k in kernels(block, work, Split(slices=4), Stack()) if k.sort in PRODUCTS and k.phase is Phase.F]
    assert [k._replace(inner=k.inner * 4, amount=k.amount / 4) for k in cut] == whole


def test_eager_kernels_are_launched_four_times_as_often():
    block, work = load_model("tiny-gpt").layers[1], Work(128)
    eager = Stack(elementwise=Fusion.EAGER, norm=Fusion.EAGER)

    def launches(stack):
        return sum(k.launches for k in kernels(block, work, Split(), stack) if k.sort is Sort.STREAM)

    assert launches(eager) == 4 * launches(Stack())


def test_a_table_keeps_every_kernel_under_its_case():
    model, work = load_model("tiny-llama"), Work(64)
    cases = [kernels(layer, work, Split(), Stack()) for layer in model.layers]
    made = table(cases)
    assert made.num_cases == 3
    assert np.bincount(made.case).tolist() == [len(case) for case in cases]
    flat = [k for case in cases for k in case]
    for field in ("phase", "sort", "rows", "columns", "inner", "amount", "traffic", "launches", "attends"):
        assert getattr(made, field).tolist() == [getattr(k, field) for k in flat]


def test_experts_fewer_than_ranks_are_not_invented():
    """With more ranks than experts each rank holds one: the table never has a part of an expert."""
    experts = next(o for layer in load_model("tiny-moe").layers for o in layer.operators if isinstance(o, Experts))
    layer = replace(load_model("tiny-moe").layers[1], operators=(experts,))
    products = [k for k in kernels(layer, Work(64), Split(tp=8), Stack()) if k.sort in PRODUCTS]
    assert all(k.amount == 1 for k in products)


@pytest.mark.parametrize(
    ("name", "tail"), [("tiny-gpt", {"mlp.down", "mlp_add"}), ("tiny-llama", {"down_proj", "mlp_add"})]
)
def test_a_layer_that_ends_with_a_product_has_it_as_its_tail(name, tail):
    block = max(load_model(name).layers, key=lambda layer: len(layer.operators))
    made = kernels(block, Work(seq_len=64), Split(), Stack())
    named = {block.operators[kernel.operator].name for kernel in made if kernel.tail}
    assert {any(one.endswith(end) for end in tail) for one in named} == {True}
    assert len(named) == len(tail)
    experts = next(o for layer in load_model("mixtral-8x7b").layers for o in layer.operators if isinstance(o, Experts))
    mixed = kernels(replace(block, operators=(*block.operators, experts)), Work(seq_len=64), Split(), Stack())
    assert not any(kernel.tail for kernel in mixed)
    kept = replace(block.operators[-1], saved_tensors=1)
    needed = kernels(replace(block, operators=(*block.operators[:-1], kept)), Work(seq_len=64), Split(), Stack())
    assert not any(kernel.tail for kernel in needed)
