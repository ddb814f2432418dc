"""What a layer costs on one device: published activation formulas, and sums that must come out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.cluster.laws import load_laws
from wavetrain.cost.kernels import Phase, Split
from wavetrain.cost.layers import Case, kernel_seconds, layer_facts, layer_seconds, local_parameters
from wavetrain.model import load_model
from wavetrain.model.operator import Attention, Work, num_parameters
from wavetrain.plan.stack import AttentionImpl, Fusion, Precision, Stack

LAWS = load_laws()
A100 = load_cluster("dgx-a100").device
UNFUSED = Stack(attention=AttentionImpl.FUSED_SOFTMAX)
FP16 = Precision(compute=DType.FP16, products=DType.FP16)
FP32 = Precision(compute=DType.FP32, products=DType.FP32)


def with_dropout(name):
    """The block of a GPT that drops out in all three places of Korthikanti et al."""
    block = load_model(name).layers[1]
    masked = tuple(replace(o, dropout=True) if isinstance(o, Attention) else o for o in block.operators)
    masked = tuple(replace(o, mask=True) if getattr(o, "function", "") in ("add", "dropout-add") else o for o in masked)
    return replace(block, operators=masked)


def case(layer, work=None, split=None, stack=None, precision=None):
    return Case(layer, work or Work(256), split or Split(), stack or Stack(), precision or Precision())


def seconds_of(cases, device=A100):
    one = cases[0]
    return layer_seconds(layer_facts(cases).table, device, one.stack, one.precision, LAWS)


@pytest.mark.parametrize("name", ["megatron-22b", "megatron-175b", "gpt3-1.3b"])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("microbatch", [1, 4])
def test_activations_of_korthikanti(name, tp, sequence_parallel, microbatch):
    """Korthikanti et al. 2022, equations 1, 2 and 4, to the byte: fp16, three dropouts, scores written out."""
    a = load_model(name).architecture
    s, b, h, heads = 2048, microbatch, a.hidden, a.heads
    split = Split(tp=tp, sequence_parallel=sequence_parallel)
    facts = layer_facts([case(with_dropout(name), Work(s, b, DType.FP16), split, UNFUSED, FP16)])
    whole = 10 / tp if sequence_parallel else 10
    assert facts.saved_bytes[0] == pytest.approx(s * b * h * (whole + 24 / tp + 5 * heads * s / (h * tp)), rel=1e-12)
    assert facts.score_bytes[0] == pytest.approx(5 * heads * s * s * b / tp, rel=1e-12)


@pytest.mark.parametrize("hidden", [512, 2048, 8192])
def test_activations_of_osdp(hidden):
    """The slope of OSDP's measured table: 65 to 68 h bytes per token in fp32, six tokens long, nothing fused."""
    name = {512: "medium-gpt", 2048: "gpt3-1.3b", 8192: "megatron-39b"}[hidden]
    layer = with_dropout(name)
    bytes_of = [
        layer_facts([case(layer, Work(6, b, DType.FP32), None, UNFUSED, FP32)]).saved_bytes[0] for b in (10, 20)
    ]
    slope = (bytes_of[1] - bytes_of[0]) / (10 * 6 * hidden)
    assert 65 * 0.96 <= slope <= 68 * 1.04
    assert slope == pytest.approx(66, rel=0.04)  # 34 x 2, less two dropout masks that stay a byte wide


def test_fused_attention_keeps_no_scores():
    layer, work = with_dropout("gpt3-1.3b"), Work(2048, 1, DType.FP16)
    fused = layer_facts([case(layer, work, None, Stack(), FP16)])
    unfused = layer_facts([case(layer, work, None, UNFUSED, FP16)])
    assert fused.score_bytes[0] == 0
    statistics = 4 * 2048 * 16
    assert fused.saved_bytes[0] == unfused.saved_bytes[0] - unfused.score_bytes[0] + statistics


@settings(max_examples=40)
@given(
    st.sampled_from(("tiny-gpt", "tiny-llama", "llama2-70b", "tiny-moe", "tiny-bert")),
    st.sampled_from((1, 2, 4)),
    st.booleans(),
    st.sampled_from((1, 2)),
)
def test_parameters_are_cut_never_lost(name, tp, sequence_parallel, cp):
    split = Split(tp, sequence_parallel, cp)
    for layer in load_model(name).layers:
        for operator in layer.operators:
            here, whole = local_parameters(operator, split), num_parameters(operator)
            assert whole / tp * (1 - 1e-12) <= here <= whole
    assert all(
        local_parameters(o, Split()) == num_parameters(o) for layer in load_model(name).layers for o in layer.operators
    )


def test_nothing_is_sent_by_a_group_of_one():
    facts = layer_facts([case(layer) for layer in load_model("tiny-gpt").layers])
    assert not facts.messages.any()
    assert not facts.message_elements.any()


def test_a_block_sends_twice():
    """Shoeybi et al. 2019: one all-reduce behind attention and one behind the MLP, each of the block's output."""
    model, work = load_model("gpt3-125m"), Work(256, 2)
    facts = layer_facts([case(model.layers[1], work, Split(tp=4))])
    assert facts.messages[0] == 2
    assert facts.message_elements[0] == 2 * work.tokens * 768
    assert layer_facts([case(model.layers[1], work, Split(tp=4, cp=2))]).message_elements[0] == work.tokens * 768


def test_the_whole_block_is_priced_by_phase():
    """A layer's seconds are the sums of its kernels' and the gaps between them."""
    cases = [case(layer) for layer in load_model("tiny-llama").layers]
    facts, times = layer_facts(cases), seconds_of(cases)
    by_kernel = kernel_seconds(facts.table, A100, Stack(), Precision(), LAWS)
    for number in range(3):
        for phase in Phase:
            of = (facts.table.case == number) & (facts.table.phase == phase)
            gaps = facts.table.launches[of].sum() * LAWS.gap_s
            assert times.kernels_s[number, phase] == pytest.approx(by_kernel[of].sum() + gaps)
            assert times.launches[number, phase] == facts.table.launches[of].sum()


def test_cases_do_not_disturb_each_other():
    cases = [case(layer, Work(s, b)) for layer in load_model("tiny-llama").layers for s in (64, 512) for b in (1, 3)]
    together = seconds_of(cases)
    for number, one in enumerate(cases):
        alone = seconds_of([one])
        assert np.allclose(together.kernels_s[number], alone.kernels_s[0], rtol=1e-12, atol=0)
        assert together.attention_s[number] == pytest.approx(alone.attention_s[0], rel=1e-12)


def test_eager_kernels_take_longer():
    layer = load_model("gpt3-1.3b").layers[1]
    eager = Stack(attention=AttentionImpl.UNFUSED, elementwise=Fusion.EAGER, norm=Fusion.EAGER)
    fused = seconds_of([case(layer, stack=UNFUSED)]).kernels_s
    slow = seconds_of([case(layer, stack=eager)]).kernels_s
    assert (slow >= fused).all()
    assert slow.sum() > fused.sum()


def test_selective_recomputation_repeats_attention_alone():
    """What it repeats is the forward of attention: with flash attention the one kernel, else scores to context."""
    layer, work = load_model("gpt3-1.3b").layers[1], Work(2048)
    times = seconds_of([case(layer, work)])
    rate = A100.peak.bf16 * A100.attention.flash2
    assert times.attention_s[0] == pytest.approx(4 * 2048**2 * 2048 / 2 / rate, rel=1e-9)
    assert 0 < times.attention_s[0] < times.kernels_s[0, Phase.F]
