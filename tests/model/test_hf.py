"""Our reading of published config.json files against transformers' own, parameter by parameter."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from oracle import CONFIGS, NAMES, built, fields_of

from wavetrain.base.document import parse_json
from wavetrain.base.errors import InputError
from wavetrain.model import Work, load_model
from wavetrain.model.families import FAMILIES
from wavetrain.model.hf import READERS, read_config

PUBLISHED = json.loads((CONFIGS / "published.json").read_text())


def read(fields: dict):
    return read_config(parse_json(json.dumps(fields, indent=1), file="config.json"))


def test_there_are_enough_configurations_of_every_family():
    assert len(NAMES) >= 40
    assert {fields_of(name)["model_type"] for name in NAMES} == set(READERS)
    assert set(READERS) < set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_equal_those_of_transformers(name):
    fields = fields_of(name)
    oracle = {parameter: tuple(tensor.shape) for parameter, tensor in built(fields).named_parameters()}
    model = load_model(CONFIGS / f"{name}.json")
    ours = {parameter.name: parameter.shape for parameter in model.parameters() if not parameter.tied}
    assert ours == oracle
    assert model.num_parameters == sum(_size(shape) for shape in oracle.values())


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_totals_equal_the_published_ones(name):
    published = PUBLISHED[name]
    total = load_model(CONFIGS / f"{name}.json").num_parameters
    if published["rounded"]:
        assert total == pytest.approx(published["parameters"], rel=0.02)
    else:
        assert total == published["parameters"]


# What published files rarely show: every switch that changes the parameters, on a small model of each family.
SMALL = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 97},
    "gpt_neox": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 80},
    "opt": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_dim": 80,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"n_layer": 2, "hidden_size": 32, "n_head": 4},
    "mpt": {"n_layers": 2, "d_model": 32, "n_heads": 4},
    "bert": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 80},
}
ROTARY = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral"), ROTARY | {"intermediate_size": 80})
SMALL["phi3"] = ROTARY | {"intermediate_size": 80, "pad_token_id": 0}
SMALL["qwen3_moe"] = ROTARY | {"intermediate_size": 80, "num_experts": 6, "moe_intermediate_size": 24}
SMALL["qwen3_moe"] |= {"num_experts_per_tok": 2}
SMALL["mixtral"] = SMALL["mixtral"] | {"num_local_experts": 6, "num_experts_per_tok": 2}

SWITCHES = [
    ("gpt2", {"n_inner": 72}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt_neox", {"attention_bias": False}),
    ("gpt_neox", {"tie_word_embeddings": True}),
    ("opt", {"word_embed_proj_dim": 16}),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"enable_bias": False}),
    ("bloom", {"tie_word_embeddings": False}),
    ("mpt", {"tie_word_embeddings": False}),
    ("bert", {"type_vocab_size": 5}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 12}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"head_dim": 12, "sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ("qwen3", {"attention_bias": True, "head_dim": 12}),
    ("gemma2", {"head_dim": 12, "tie_word_embeddings": False}),
    ("phi3", {"tie_word_embeddings": True}),
    ("mixtral", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "attention_bias": True}),
    # another spelling, a key that transformers ignores, an untied head
    ("gpt2", {"max_position_embeddings": 77}),
    ("bert", {"tie_word_embeddings": False}),
    *((family, {"head_dim": 12}) for family in ("gpt2", "gpt_neox", "opt", "bloom", "mpt", "bert")),
    ("mixtral", {"moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    ("llama", {"decoder_sparse_step": 2, "mlp_only_layers": [0], "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True}),
]
DEFAULT_LENGTHS = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "phi3",
    "gpt2",
    "opt",
    "bert",
)


@pytest.mark.parametrize(("family", "switch"), [*((family, {}) for family in SMALL), *SWITCHES])
def test_every_switch_changes_what_it_changes_in_transformers(family, switch, tmp_path):
    fields = {"model_type": family, "vocab_size": 97} | SMALL[family] | switch
    oracle = {parameter: tuple(tensor.shape) for parameter, tensor in built(fields).named_parameters()}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    ours = {p.name: p.shape for p in load_model(path).parameters() if not p.tied}
    assert ours == oracle


@pytest.mark.parametrize("family", DEFAULT_LENGTHS)
def test_default_lengths_are_those_of_the_configuration_class(family):
    fields = {"model_type": family, "vocab_size": 97} | SMALL[family]
    assert read(fields).seq_len == built(fields).config.max_position_embeddings


def test_a_class_default_that_is_no_size():
    fields = {"model_type": "qwen3_moe", "vocab_size": 97} | SMALL["qwen3_moe"]
    del fields["moe_intermediate_size"]
    assert read(fields).expert_ffn == 768
    late = {"model_type": "qwen2", "vocab_size": 97, "use_sliding_window": True} | SMALL["qwen2"]
    assert [(s.count, s.windowed) for s in read(late | {"num_hidden_layers": 40}).layers] == [(28, False), (12, True)]


def test_a_parallel_residual_shares_the_input_of_its_norms(tmp_path):
    saved = {}
    for parallel in (True, False):
        path = tmp_path / f"{parallel}.json"
        fields = {"model_type": "gpt_neox", "vocab_size": 97, "use_parallel_residual": parallel} | SMALL["gpt_neox"]
        path.write_text(json.dumps(fields))
        saved[parallel] = load_model(path).saved_bytes(Work(16))
    assert saved[False] - saved[True] == 2 * 16 * 32 * 2  # one input of one norm in each of two layers


def test_windows_fall_on_the_layers_they_fall_on_in_transformers():
    alternating = read({"model_type": "gemma2", "vocab_size": 97} | SMALL["gemma2"])
    assert [s.windowed for s in alternating.layers] == [True, False, True, False]
    late = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
    assert [
        (s.count, s.windowed) for s in read({"model_type": "qwen2", "vocab_size": 97} | SMALL["qwen2"] | late).layers
    ] == [
        (3, False),
        (1, True),
    ]
    explicit = {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]} | late
    assert [s.count for s in read({"model_type": "qwen2", "vocab_size": 97} | SMALL["qwen2"] | explicit).layers] == [
        3,
        1,
    ]


def test_unknown_model_type_says_what_to_give_instead():
    with pytest.raises(InputError) as caught:
        read({"model_type": "lama", "hidden_size": 4})
    message = str(caught.value)
    assert "model_type: lama" in message
    assert "nearest: llama" in message
    assert "layers, hidden, heads, vocab" in message


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads", "nearest: 4 or 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "must divide num_attention_heads (4)"),
        ({"hidden_size": None}, "hidden_size", "must have a value"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers", "10,000"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "true or false"),
        ({"vocab_size": True}, "vocab_size", "whole number"),
        ({"attention_dropout": 2}, "attention_dropout", "from 0 to 1"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings", "must have a value"),
        ({"max_position_embeddings": {"value": 77, "source": "x"}}, "max_position_embeddings", "not a mapping"),
    ],
)
def test_wrong_values_are_named(change, key, says):
    with pytest.raises(InputError) as caught:
        read({"model_type": "llama", "vocab_size": 97} | SMALL["llama"] | change)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("family", "change", "key"),
    [
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("qwen3", {"head_dim": None}, "head_dim"),
        ("mixtral", {"num_experts": 3}, "num_experts"),
        ("gpt2", {"hidden_size": 48}, "hidden_size"),
        ("qwen2", {"layer_types": [{"a": 1}]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_atention"] * 4}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_moe", {"mlp_only_layers": [9]}, "mlp_only_layers"),
    ],
)
def test_what_would_build_something_else_is_refused(family, change, key):
    with pytest.raises(InputError) as caught:
        read({"model_type": family, "vocab_size": 97} | SMALL[family] | change)
    assert key in [problem.key for problem in caught.value.problems]


def test_a_ratio_transformers_ignores_is_refused():
    with pytest.raises(InputError, match="expansion_ratio: 3"):
        read({"model_type": "mpt", "vocab_size": 97, "expansion_ratio": 3} | SMALL["mpt"])


def test_all_problems_of_a_file_come_at_once():
    bad = {"model_type": "llama", "vocab_size": -1, "hidden_size": "big", "hiden_layers": 3}
    with pytest.raises(InputError) as caught:
        read(bad)
    keys = {problem.key for problem in caught.value.problems}
    assert {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"} <= keys
