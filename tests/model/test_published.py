"""What papers state of four models, out of `describe --json`."""

import json

import pytest

STATED = {
    # parameters in billions, and where they are stated
    "gpt3-175b": (175.0, 0.005, "Brown et al. 2020, Table 2.1: 175.0B"),
    "llama3-405b": (405.0, 0.005, "Grattafiori et al. 2024, Table 3: 405B"),
    "bloom-176b": (176.247, 1e-5, "Le Scao et al. 2022, Table 3: 176,247M"),
    "mixtral-8x7b": (47.0, 0.01, "Jiang et al. 2024, abstract: 47B parameters"),
}
ACTIVE = {"mixtral-8x7b": (13.0, 0.01, "Jiang et al. 2024, abstract: 13B active parameters")}


def described(run, name):
    ran = run("describe", name, "--json")
    assert ran.code == 0
    return json.loads(ran.out)


@pytest.mark.parametrize("name", STATED)
def test_parameters_are_the_published_ones(run, name):
    billions, tolerance, _ = STATED[name]
    assert described(run, name)["num_parameters"] == pytest.approx(billions * 1e9, rel=tolerance)
    if name in ACTIVE:
        billions, tolerance, _ = ACTIVE[name]
        assert described(run, name)["num_active_parameters"] == pytest.approx(billions * 1e9, rel=tolerance)


@pytest.mark.parametrize("name", STATED)
def test_training_flops_are_6n_plus_attention(run, name):
    """6N (Kaplan et al. 2020) plus 12 L H Q T for attention (Chowdhery et al. 2022, PaLM, appendix B), per token."""
    found = described(run, name)
    a = found["architecture"]
    layers = sum(stretch["count"] for stretch in a["layers"])
    attention = 12 * layers * a["heads"] * a["head_dim"] * found["work"]["seq_len"]
    assert found["attention_training_flops_per_token"] == attention
    # An input embedding is looked up, not multiplied: where the output does not share it, its rows do no work.
    looked_up = 0 if a["tied"] else a["vocab"] * a["hidden"]
    weights = found["num_active_parameters"] - looked_up
    assert found["training_flops_per_token"] == pytest.approx(6 * weights + attention, rel=0.001)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("megatron-1.7b", 1.7), ("megatron-3.6b", 3.6), ("megatron-7.5b", 7.5), ("megatron-18b", 18.4)),
        *(("megatron-39b", 39.1), ("megatron-76b", 76.1), ("megatron-145b", 145.6), ("megatron-310b", 310.1)),
        *(("megatron-530b", 529.6), ("megatron-1t", 1008.0)),
    ],
)
def test_megatron_sizes_are_those_of_sc21(run, name, billions):
    """Narayanan et al. 2021, Table 1, number of parameters in billions."""
    assert described(run, name)["num_parameters"] / 1e9 == pytest.approx(billions, abs=0.05)


def test_mpt_70b_has_the_count_its_benchmark_states(run):
    """MosaicML llm-foundry benchmark README: 64,862,437,376 parameters."""
    assert described(run, "mpt-70b")["num_parameters"] == 64_862_437_376
