"""Families: how a published line of models names its modules. Adding one is one entry here and one reader in hf.py.

Each key is a role in the transformer (see transformer.py); the value is the module's path, relative to the layer
for the roles of a layer. A family fuses what it names together: `qkv` instead of `q`, `k`, `v`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Module names of a line of models."""

    names: Mapping[str, str]
    transposed: bool = False  # weights stored inputs x outputs (GPT-2's Conv1D)
    grouped: bool = True  # keys and values may be fewer than queries, and heads of any width
    defaults: Mapping[str, object] = field(default_factory=dict)  # of Architecture, for short YAML


_LLAMA = {
    "tokens": "model.embed_tokens",
    "layer": "model.layers.{}",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "experts": "mlp.experts",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_GEMMA2 = _LLAMA | {
    "attention_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_after": "post_feedforward_layernorm",
}
_PHI3 = {role: name for role, name in _LLAMA.items() if role not in ("q", "k", "v", "gate", "up")} | {
    "qkv": "self_attn.qkv_proj",
    "gate_up": "mlp.gate_up_proj",
}
_GPT2 = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "layer": "transformer.h.{}",
    "attention_norm": "ln_1",
    "attention": "attn",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp": "mlp",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT_NEOX = {
    "tokens": "gpt_neox.embed_in",
    "layer": "gpt_neox.layers.{}",
    "attention_norm": "input_layernorm",
    "attention": "attention",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "lm_head",
}
_OPT = {
    "tokens": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "project_in": "model.decoder.project_in",
    "layer": "model.decoder.layers.{}",
    "attention_norm": "self_attn_layer_norm",
    "attention": "self_attn",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp": "mlp",
    "up": "fc1",
    "down": "fc2",
    "final_norm": "model.decoder.final_layer_norm",
    "project_out": "model.decoder.project_out",
    "head": "lm_head",
}
_BLOOM = {
    "tokens": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "layer": "transformer.h.{}",
    "attention_norm": "input_layernorm",
    "attention": "self_attention",
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_MPT = {
    "tokens": "transformer.wte",
    "layer": "transformer.blocks.{}",
    "attention_norm": "norm_1",
    "attention": "attn",
    "qkv": "attn.Wqkv",
    "out": "attn.out_proj",
    "mlp_norm": "norm_2",
    "mlp": "ffn",
    "up": "ffn.up_proj",
    "down": "ffn.down_proj",
    "final_norm": "transformer.norm_f",
    "head": "lm_head",
}
_BERT = {
    "tokens": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "layer": "bert.encoder.layer.{}",
    "attention": "attention.self",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp": "output",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "head_dense": "cls.predictions.transform.dense",
    "head_norm": "cls.predictions.transform.LayerNorm",
    "head_bias": "cls.predictions.bias",
    "head": "cls.predictions.decoder",
}
_GPT = {  # our own: GPT-2's shape with plain linears
    "tokens": "embedding.tokens",
    "positions": "embedding.positions",
    "layer": "layers.{}",
    "attention_norm": "attention_norm",
    "attention": "attention",
    "qkv": "attention.qkv",
    "out": "attention.out",
    "mlp_norm": "mlp_norm",
    "mlp": "mlp",
    "gate_up": "mlp.gate_up",
    "up": "mlp.up",
    "down": "mlp.down",
    "q_norm": "attention.q_norm",
    "k_norm": "attention.k_norm",
    "router": "mlp.router",
    "experts": "mlp.experts",
    "final_norm": "final_norm",
    "head": "head",
}

_GPT_STYLE: dict[str, object] = {
    "positions": "learned",
    "norm": "layernorm",
    "norm_bias": True,
    "mlp": "plain",
    "activation": "gelu",
    "bias": True,
    "tied": True,
    "dropout": True,
}
_NEOX_STYLE = _GPT_STYLE | {"positions": "rotary", "tied": False, "dropout": False, "parallel_residual": True}
_BLOOM_STYLE = _GPT_STYLE | {"positions": "alibi", "dropout": False, "embedding_norm": True}
_BARE_STYLE = _GPT_STYLE | {"positions": "alibi", "dropout": False, "bias": False, "norm_bias": False}
_ROTARY_STYLE: dict[str, object] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "norm_bias": False,
    "mlp": "gated",
    "activation": "silu",
    "bias": False,
    "tied": False,
    "dropout": False,
}

FAMILIES: dict[str, Family] = {
    "gpt": Family(_GPT, defaults=_GPT_STYLE),
    "gpt2": Family(_GPT2, transposed=True, grouped=False, defaults=_GPT_STYLE),
    "gpt_neox": Family(_GPT_NEOX, grouped=False, defaults=_NEOX_STYLE),
    "opt": Family(_OPT, grouped=False, defaults=_GPT_STYLE | {"activation": "relu"}),
    "bloom": Family(_BLOOM, grouped=False, defaults=_BLOOM_STYLE),
    "mpt": Family(_MPT, grouped=False, defaults=_BARE_STYLE),
    "bert": Family(
        _BERT,
        grouped=False,
        defaults=_GPT_STYLE
        | {"head": "masked", "norm_place": "after", "final_norm": False, "embedding_norm": True, "token_types": 2},
    ),
    "llama": Family(_LLAMA, defaults=_ROTARY_STYLE),
    "mistral": Family(_LLAMA, defaults=_ROTARY_STYLE),
    "qwen2": Family(_LLAMA, defaults=_ROTARY_STYLE | {"qkv_bias": True}),
    "qwen3": Family(_LLAMA, defaults=_ROTARY_STYLE | {"qk_norm": True}),
    "gemma2": Family(_GEMMA2, defaults=_ROTARY_STYLE | {"activation": "gelu", "tied": True, "norm_place": "both"}),
    "phi3": Family(_PHI3, defaults=_ROTARY_STYLE),
    "mixtral": Family(_LLAMA, defaults=_ROTARY_STYLE),
    "qwen3_moe": Family(_LLAMA, defaults=_ROTARY_STYLE | {"qk_norm": True}),
}
