"""The built-in modules: names, shapes and ties as described, logits as transformers computes them."""

import json
import math
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import nn

from wavetrain.base.errors import InputError
from wavetrain.model import Layer, Model, Run, load_model, presets
from wavetrain.model.model import EMPTY
from wavetrain.runtime.stages import cut_into_stages, load, materialize
from wavetrain.runtime.transformer import STYLES, Rotary, parts_of

SEQ, VOCAB = 16, 97
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, **NO_TOKENS}
GROUPED = COMMON | {"num_key_value_heads": 2, "intermediate_size": 56, "max_position_embeddings": 64}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": SEQ,
    **NO_TOKENS,
}
CONFIGS = {
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"tie_word_embeddings": False, "n_inner": 40},
    "opt": COMMON | {"model_type": "opt", "ffn_dim": 48, "max_position_embeddings": SEQ, "word_embed_proj_dim": 32},
    "bert": COMMON | {"model_type": "bert", "intermediate_size": 40, "max_position_embeddings": SEQ},
    "bert-untied": COMMON | {"model_type": "bert", "intermediate_size": 40, "tie_word_embeddings": False},
    "llama": GROUPED | {"model_type": "llama"},
    "llama-bias": GROUPED | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": GROUPED | {"model_type": "llama", "head_dim": 6, "tie_word_embeddings": True},
    "mistral": GROUPED | {"model_type": "mistral"},
    "mistral-window": GROUPED | {"model_type": "mistral", "sliding_window": 5},
    "qwen2": GROUPED | {"model_type": "qwen2"},
    "qwen2-window": GROUPED
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": GROUPED | {"model_type": "qwen3", "head_dim": 10},
    "phi3": GROUPED | {"model_type": "phi3"},
}


def described(name: str, folder: Path) -> Model:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name]))
    return load_model(path)


def oracle(name: str) -> nn.Module:
    """transformers' own model, every parameter random: norms and biases too."""
    fields = CONFIGS[name]
    config = transformers.CONFIG_MAPPING[fields["model_type"]](**fields)
    kind = transformers.AutoModelForMaskedLM if name.startswith("bert") else transformers.AutoModelForCausalLM
    torch.manual_seed(1)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def logits(model: Model, values: nn.Module, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    parts = parts_of(model)
    stages = cut_into_stages(parts, (len(parts.blocks),), [0])
    materialize(stages, seed=0, dtype=dtype)
    load(stages, values.state_dict())
    stage = stages[0]
    return stage.head(stage.run(stage.enter(tokens)))


@pytest.fixture
def exact_norms(monkeypatch):
    """transformers computes RMS norms in float32 even if all else is float64; for a comparison it must not."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    for family in ("llama", "mistral", "qwen2", "qwen3", "phi3"):
        source = import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(getattr(source, f"{family.capitalize()}RMSNorm"), "forward", forward)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_and_ties_are_those_described(name, tmp_path):
    model = described(name, tmp_path)
    parts = parts_of(model)
    everywhere = [pair for part in (parts.embedding, *parts.blocks, parts.head) for pair in part.references()]
    assert [(p.name, p.shape) for p in sorted(model.parameters(), key=lambda p: p.name)] == sorted(
        (name, tuple(parameter.shape)) for name, parameter in everywhere
    )
    assert parts.ties == {p.name: p.tied for p in model.parameters() if p.tied}
    assert all(parameter.is_meta for _, parameter in everywhere)
    held = [name for name, _ in parts.named()]
    assert len(held) == len(set(held)) == len({id(parameter) for _, parameter in parts.named()})


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, tmp_path):
    values = oracle(name)
    tokens = torch.randint(VOCAB, (3, SEQ))
    with torch.no_grad():
        ours = logits(described(name, tmp_path), values, tokens, torch.float32)
        torch.testing.assert_close(ours, values(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers_in_float64(name, tmp_path):
    values = oracle(name).double()
    tokens = torch.randint(VOCAB, (3, SEQ))
    with torch.no_grad():
        ours = logits(described(name, tmp_path), values, tokens, torch.float64)
        theirs = values(tokens).logits
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_a_window_shorter_than_the_sequence_counts(name, tmp_path):
    """What lies out of all windows' reach changes nothing."""
    model = described(name, tmp_path)
    values = oracle(name)
    tokens = torch.randint(VOCAB, (1, SEQ))
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % VOCAB
    with torch.no_grad():
        before, after = (logits(model, values, each, torch.float64)[0] for each in (tokens, other))
    reached = (before != after).any(-1).nonzero().max().item()
    layers = sum(stretch.count for stretch in model.architecture.layers if stretch.windowed)
    assert reached == (SEQ - 1 if layers < 4 else min(SEQ - 1, layers * (5 - 1)))


def test_causal_models_do_not_look_ahead_and_masked_ones_do(tmp_path):
    for name, changed in (("gpt2", 9), ("llama", 9), ("bert", 0)):
        values = oracle(name)
        tokens = torch.randint(VOCAB, (1, SEQ))
        other = tokens.clone()
        other[0, 9] = (other[0, 9] + 1) % VOCAB
        with torch.no_grad():
            before, after = (logits(described(name, tmp_path), values, x, torch.float32)[0] for x in (tokens, other))
        assert (before != after).any(-1).nonzero().min() == changed


@pytest.mark.parametrize("family", STYLES)
def test_every_style_can_be_built_from_the_short_form(family, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(f"family: {family}\nlayers: 3\nhidden: 32\nheads: 4\nvocab: 97\nseq_len: 16\nffn: 40\n")
    stages = cut_into_stages(parts_of(load_model(path)), (1, 1, 1), range(3))
    materialize(stages, seed=0)
    tokens = torch.randint(VOCAB, (2, SEQ))
    x = tokens
    for stage in stages.values():
        x = stage(x, tokens)
    x.backward()
    assert x.item() / tokens.numel() == pytest.approx(math.log(VOCAB), rel=0.15)
    assert all(parameter.grad is not None for stage in stages.values() for _, parameter in stage.named())


def test_our_own_family_with_every_option(tmp_path):
    path = tmp_path / "model.yaml"
    options = (
        "kv_heads: 2\nmlp: gated\nqk_norm: true\npositions: rotary\nnorm: rmsnorm\nbias: false\nactivation: relu2\n"
    )
    path.write_text(f"layers: 3\nhidden: 32\nheads: 4\nvocab: 97\nseq_len: 16\nffn: 40\n{options}")
    model = load_model(path)
    parts = parts_of(model)
    assert {name for name, _ in parts.named()} == {p.name for p in model.parameters()}
    stages = cut_into_stages(parts, (3,), [0])
    materialize(stages, seed=0)
    tokens = torch.randint(VOCAB, (2, SEQ))
    assert torch.isfinite(stages[0](tokens, tokens))


REFUSED = {
    "family: mixtral\nffn: 32\nexperts: 4\nexperts_per_token: 2\n": {"family", "experts"},
    "family: gpt\nexperts: 4\nexperts_per_token: 2\n": {"experts"},
    "family: bloom\n": {"family", "positions"},
    "family: gpt\npositions: alibi\n": {"positions"},
    "family: gpt_neox\n": {"family", "parallel_residual"},
    "family: gemma2\nffn: 32\n": {"family", "norm_place"},
    "family: llama\nffn: 32\nhead_dim: 7\n": {"head_dim"},
    "family: gpt\nnorm: rmsnorm\nnorm_bias: true\n": {"norm_bias"},
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_module_is_refused_by_name(text, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(f"layers: 3\nhidden: 32\nheads: 4\nvocab: 97\nseq_len: 16\n{text}")
    with pytest.raises(InputError) as error:
        parts_of(load_model(path))
    assert {problem.key for problem in error.value.problems} == REFUSED[text]


def test_a_traced_model_is_refused():
    model = Model("mine", 8, (Layer("nothing", "", EMPTY.operators),), (Run("nothing", 1),))
    with pytest.raises(InputError, match="traced"):
        parts_of(model)


def reasons(model: Model) -> set[str]:
    try:
        assert len(parts_of(model).blocks) == model.num_blocks
    except InputError as error:
        return {problem.key for problem in error.problems}
    return set()


def test_every_preset_is_built_or_refused_with_reasons():
    models = [load_model(name) for name in presets()]
    found = [reasons(model) for model in models if model.num_layers <= 60]  # time: the longer ones are no different
    assert "" not in set().union(*found)
    assert found.count(set()) > 20


def test_rotary_tables_are_made_once_per_shape():
    rotary = Rotary(8, 10_000.0)
    q, longer = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    rotary.turn(q, q)
    table = rotary._table
    rotary.turn(q, q)
    assert rotary._table is table
    rotary.turn(longer, longer)
    assert rotary._table is not table
