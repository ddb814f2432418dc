import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.units import DType
from wavetrain.model import OPERATORS, AttentionKernel, Work, load_model, presets, slice_counts
from wavetrain.model.operator import TOKENS, Attention, Experts, Linear, Parameter, Size, Term, num_active_parameters

UNFUSED = AttentionKernel.UNFUSED
works = st.builds(Work, st.integers(1, 4096), st.integers(1, 8), st.sampled_from([DType.BF16, DType.FP32]))


@pytest.mark.parametrize("name", ["megatron-22b", "gpt3-175b", "megatron-1t"])
@pytest.mark.parametrize(("b", "s"), [(1, 2048), (4, 1024)])
def test_a_gpt_layer_saves_what_korthikanti_counts(name, b, s):
    """Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h) bytes per layer in 16 bits, without recomputation."""
    model = load_model(name)
    a = model.architecture
    layer = model.by_name["decoder"]
    saved = sum(operator.saved_bytes(Work(s, b, DType.FP16, UNFUSED)) for operator in layer.operators)
    assert saved == s * b * a.hidden * 34 + 5 * a.heads * s * s * b


def test_osdp_activation_slope():
    """osdp-and-planners 1.3: 68 h bytes per token and layer in fp32 at tiny lengths (34 in fp16, doubled)."""
    model = load_model("osdp-gpt-48x1536")
    work = Work(6, 1, DType.FP32, UNFUSED)
    saved = sum(operator.saved_bytes(work) for operator in model.by_name["decoder"].operators)
    assert saved / work.tokens / 1536 == pytest.approx(68, rel=0.04)


def test_fused_attention_saves_no_score_matrix():
    model = load_model("llama2-7b")
    fused = [model.saved_bytes(Work(s)) for s in (1024, 2048)]
    unfused = [model.saved_bytes(Work(s, attention=UNFUSED)) for s in (1024, 2048)]
    assert fused[1] == 2 * fused[0]
    assert unfused[1] > 2.5 * unfused[0]


@given(works, st.sampled_from(["llama2-7b", "gpt3-13b", "mixtral-8x7b", "bert-large", "gemma2-9b"]))
def test_backward_is_twice_forward_and_work_adds_up(work, name):
    model = load_model(name)
    assert model.backward_flops(work) == 2 * model.forward_flops(work)
    double = Work(work.seq_len, 2 * work.microbatch, work.dtype)
    assert model.forward_flops(double) == 2 * model.forward_flops(work)
    tables = {"embedding"}  # positions are looked up once per length, not per sample
    by_layer = [(layer, count) for layer, count in model.counts.items() if layer not in tables]
    for layer, _ in by_layer:
        operators = model.by_name[layer].operators
        assert sum(o.saved_bytes(double) for o in operators) == 2 * sum(o.saved_bytes(work) for o in operators)


def test_attention_counts():
    attention = Attention("a", heads=8, kv_heads=2, head_dim=16, causal=True)
    work = Work(64, 3)
    assert attention.forward_flops(work) == 4 * 3 * 64 * 64 * 8 * 16
    windowed = Attention("a", heads=8, kv_heads=2, head_dim=16, causal=True, window=16)
    assert windowed.forward_flops(work) * 4 == attention.forward_flops(work)
    assert windowed.forward_flops(Work(16)) == attention.forward_flops(Work(16))
    assert attention.saved_bytes(work) == 3 * 64 * ((8 + 2 * 2) * 16 * 2 + 4 * 8)


def test_mixtures_do_the_work_of_some_and_hold_the_parameters_of_all():
    parameters = (Parameter("up", (8, 20, 10)), Parameter("down", (8, 10, 10)))
    experts = Experts("e", parameters, experts=8, active=2, width=10, ffn=10)
    assert num_active_parameters(experts) == 8 * 300 * 2 // 8
    assert experts.forward_flops(Work(7)) == 2 * 7 * 2 * 3 * 100


def test_slices_divide_a_dimension():
    linear = Linear("l", (), inputs=96, outputs=100)
    assert slice_counts(linear) == (1, 2, 4, 8, 16, 32)
    assert slice_counts(Attention("a", 8, 8, 16, causal=True)) == (1,)


def test_every_kind_is_in_the_table_and_in_use():
    used = {operator.kind for name in presets() for layer in load_model(name).layers for operator in layer.operators}
    assert used == set(OPERATORS) - {"traced"}


def test_sizes_are_polynomials():
    size = Size((Term(2, 1, 2), Term(0.5, 0, 1)))
    assert size.at(Work(10, 3)) == 605
    assert TOKENS.times(7).at(Work(10, 3)) == 210
