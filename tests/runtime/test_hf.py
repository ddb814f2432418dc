"""transformers models taken apart: composed again, the parts compute bit for bit what the whole computes."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

from wavetrain.base.errors import InputError
from wavetrain.model import load_model
from wavetrain.runtime.hf import LINES, parts_of_config, parts_of_module
from wavetrain.runtime.stages import Stage, cut_into_stages, load, materialize
from wavetrain.runtime.transformer import parts_of

SEQ, VOCAB = 16, 97
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, **NO_TOKENS}
GROUPED = COMMON | {"num_key_value_heads": 2, "intermediate_size": 56, "max_position_embeddings": 64}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": SEQ, **NO_TOKENS}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
MODELS = {
    "gpt2": transformers.GPT2Config(**GPT2),
    "gpt2-untied": transformers.GPT2Config(**GPT2, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True),
    "gpt2-dropout": transformers.GPT2Config(**GPT2, resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5),
    "llama": transformers.LlamaConfig(**GROUPED),
    "llama-tied": transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True, attention_bias=True),
    "llama-scaled": transformers.LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "mistral": transformers.MistralConfig(**GROUPED),
    "mistral-window": transformers.MistralConfig(**GROUPED, sliding_window=5),
    "mistral-no-window": transformers.MistralConfig(**GROUPED, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen2-window": transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=2, tie_word_embeddings=True
    ),
    "bert": transformers.BertConfig(**COMMON, intermediate_size=40, max_position_embeddings=20),
    "bert-padded": transformers.BertConfig(**(COMMON | {"pad_token_id": 0}), intermediate_size=40),
    "bert-untied": transformers.BertConfig(**COMMON, intermediate_size=40, tie_word_embeddings=False),
}


def built(name: str, attention: str = "sdpa") -> nn.Module:
    """transformers' own model with random values everywhere: norms and biases too."""
    config = copy.deepcopy(MODELS[name])
    kind = next(kind for kind, line in LINES.items() if line.model_type == config.model_type)
    config._attn_implementation = attention
    torch.manual_seed(1)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def staged(model: nn.Module, cut: tuple[int, ...]) -> dict[int, Stage]:
    stages = cut_into_stages(parts_of_module(model), cut, range(len(cut)))
    materialize(stages, seed=0, dtype=model.dtype)
    load(stages, model.state_dict())
    return stages


def logits(stages: dict[int, Stage], tokens: Tensor) -> Tensor:
    x = tokens
    for stage in stages.values():
        x = stage.run(stage.enter(x) if stage.is_first else x)
    return list(stages.values())[-1].head(x)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_composed_parts_equal_the_module_bit_for_bit(name, attention):
    model = built(name, attention)
    stages = staged(model, (1, 2, 0, 1))
    for batch, seq_len in ((3, SEQ), (1, SEQ), (2, 7), (3, SEQ)):
        tokens = torch.randint(VOCAB, (batch, seq_len))
        ours = logits(stages, tokens)
        assert torch.equal(ours, model(tokens).logits)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_the_modules_bit_for_bit(name):
    model = built(name)
    stages = staged(model, (1, 2, 0, 1))
    tokens, targets = torch.randint(VOCAB, (2, 3, SEQ))
    F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    x = tokens
    for stage in stages.values():
        x = stage.train()(x, targets)  # training changes nothing: there is no dropout
    x.backward()
    ours = dict(pair for stage in stages.values() for pair in stage.named())
    twins = parts_of_module(model).twins
    for key, parameter in model.named_parameters():
        partner = dict(twins).get(key)
        if partner is not None:  # two gradients to be added, in an order that is not autograd's
            torch.testing.assert_close(ours[key].grad + ours[partner].grad, parameter.grad, rtol=1e-4, atol=1e-5)
        elif parameter.grad is None:
            assert ours[key].grad is None
        else:
            assert torch.equal(ours[key].grad, parameter.grad), key


@pytest.mark.parametrize("name", MODELS)
def test_names_are_the_modules_own(name):
    model = built(name)
    parts = parts_of_module(model)
    everywhere = [pair for part in (parts.embedding, *parts.blocks, parts.head) for pair in part.references()]
    theirs = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert {name: parameter.shape for name, parameter in everywhere} == theirs
    assert len(everywhere) == len(theirs)
    assert all(parameter.is_meta for _, parameter in everywhere)
    assert bool(parts.twins) == model.config.tie_word_embeddings
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert (parts.hidden, parts.vocab) == (32, VOCAB)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen2", "bert", "bert-untied"])
def test_the_built_in_model_has_the_same_parts_and_the_same_values(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[name].to_dict()))
    ours, theirs = parts_of(load_model(path)), parts_of_config(MODELS[name])
    assert ours.ties == theirs.ties
    values = []
    for parts in (ours, theirs):
        stages = cut_into_stages(parts, (2, 2), range(2))
        materialize(stages, seed=3)
        values.append(dict(pair for stage in stages.values() for pair in stage.named()))
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][key], values[1][key]) for key in values[0])


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "llama", "mistral", "qwen2", "bert", "bert-untied"])
def test_initial_values_are_distributed_as_transformers_has_them(name):
    config = MODELS[name]
    kind = next(kind for kind, line in LINES.items() if line.model_type == config.model_type)
    torch.manual_seed(0)
    theirs = dict(getattr(transformers, kind)(config).named_parameters(remove_duplicate=False))
    stages = cut_into_stages(parts_of_config(config), (4,), [0])
    materialize(stages, seed=0)
    for key, parameter in stages[0].named():
        std, chance = theirs[key].std().item(), 5 / math.sqrt(parameter.numel())
        assert parameter.mean().item() == pytest.approx(theirs[key].mean().item(), abs=2 * std * chance), key
        assert parameter.std().item() == pytest.approx(std, rel=chance), key


def test_the_initializer_range_of_the_configuration_counts():
    config = transformers.LlamaConfig(**GROUPED, initializer_range=0.5)
    stages = cut_into_stages(parts_of_config(config), (4,), [0])
    materialize(stages, seed=0)
    assert dict(stages[0].named())["lm_head.weight"].std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("name", ["llama", "llama-scaled", "bert"])
def test_buffers_have_values_after_the_meta_device(name):
    model = built(name)
    stages = staged(model, (0, 4))
    ours = {key.rpartition(".")[2]: buffer for stage in stages.values() for key, buffer in stage.named_buffers()}
    for key, buffer in model.named_buffers():
        assert torch.equal(ours[key.rpartition(".")[2]], buffer)


def test_rotary_angles_stay_exact_in_bfloat16():
    model = built("llama")
    stages = cut_into_stages(parts_of_module(model), (4,), [0])
    materialize(stages, seed=0, dtype=torch.bfloat16)
    assert {buffer.dtype for buffer in stages[0].buffers()} == {torch.float32}
    assert {parameter.dtype for parameter in stages[0].parameters()} == {torch.bfloat16}
    tokens = torch.randint(VOCAB, (2, SEQ))
    assert stages[0](tokens, tokens).dtype == torch.float32


def test_what_can_not_be_taken_apart_is_refused():
    with pytest.raises(InputError, match="LlamaForCausalLM"):
        parts_of_module(nn.Linear(2, 2))
    with pytest.raises(InputError, match="model_type: opt"):
        parts_of_config(transformers.OPTConfig())
    with pytest.raises(InputError, match="is_decoder"):
        parts_of_config(transformers.BertConfig(**COMMON, is_decoder=True))
    with pytest.raises(InputError, match="add_cross_attention"):
        parts_of_config(transformers.GPT2Config(**GPT2, add_cross_attention=True))


def test_the_given_configuration_is_left_alone():
    config = transformers.GPT2Config(**GPT2, resid_pdrop=0.5)
    parts_of_config(config)
    assert config.resid_pdrop == 0.5


def test_transformers_is_imported_late():
    code = "import sys, wavetrain.runtime.hf, wavetrain.runtime.stages; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
