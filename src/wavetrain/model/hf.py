"""Hugging Face `config.json`, read by hand: one function per model_type, no import of transformers.

Keys and defaults are those of transformers' configuration classes (checked against transformers 5 in the tests). The
sizes that make a model (layers, hidden, heads, vocabulary) must be in the file; minor keys take the class's default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Literal

from wavetrain.base.document import Node
from wavetrain.base.errors import nearest
from wavetrain.base.fields import Fields
from wavetrain.model.architecture import Architecture, Stretch
from wavetrain.model.limits import (
    MOST_EXPERTS,
    MOST_FFN,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_LAYERS,
    MOST_SEQ_LEN,
    MOST_VOCAB,
    closest,
    divisors,
)

Windows = Literal["all", "late", "alternate"]

NEEDED = ("layers", "hidden", "heads", "vocab")


def read_config(node: Node) -> Architecture:
    """The architecture that a config.json describes."""
    config = Fields(node, strict=False)
    model_type = config.text("model_type")
    if config.good("model_type") and model_type not in READERS:
        remedy = f"describe it in a short YAML file instead, with the keys {', '.join(NEEDED)} and what differs"
        near = nearest(model_type, READERS)
        config.complain("model_type", "unknown model_type", legal=sorted(READERS), near=near, remedy=remedy)
    if config.problems:
        config.finish()
    architecture = READERS[model_type](config)
    config.finish()
    return architecture


# --- the readers ---


def _gpt2(c: Fields) -> Architecture:
    hidden, heads, head_dim = _widths(c, hidden="n_embd", heads="n_head")
    seq_len = c.whole("n_positions", most=MOST_SEQ_LEN, default=1024)
    return Architecture(
        family="gpt2",
        layers=_uniform(c, "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=c.whole("n_inner", most=MOST_FFN, default=4 * hidden),
        vocab=_vocab(c),
        seq_len=seq_len,
        positions="learned",
        position_rows=seq_len,
        norm="layernorm",
        norm_bias=True,
        mlp="plain",
        activation=_activation(c, "activation_function", "gelu_new"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=_tied(c, True),
        dropout=_rate(c, "resid_pdrop", 0.1),
        attention_dropout=_rate(c, "attn_pdrop", 0.1),
    )


def _gpt_neox(c: Fields) -> Architecture:
    hidden, heads, head_dim = _widths(c)
    bias = c.flag("attention_bias", default=True)
    return Architecture(
        family="gpt_neox",
        layers=_uniform(c, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=c.whole("intermediate_size", most=MOST_FFN),
        vocab=_vocab(c),
        seq_len=_seq_len(c, 2048),
        norm="layernorm",
        norm_bias=True,
        mlp="plain",
        activation=_activation(c, "hidden_act", "gelu"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        tied=_tied(c, False),
        dropout=_rate(c, "hidden_dropout", 0.0),
        attention_dropout=_rate(c, "attention_dropout", 0.0),
    )


def _opt(c: Fields) -> Architecture:
    hidden, heads, head_dim = _widths(c)
    seq_len = _seq_len(c, 2048)
    before = c.flag("do_layer_norm_before", default=True)
    width = c.whole("word_embed_proj_dim", most=MOST_HIDDEN, default=hidden)
    bias = c.flag("enable_bias", default=True)
    return Architecture(
        family="opt",
        layers=_uniform(c, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=c.whole("ffn_dim", most=MOST_FFN),
        vocab=_vocab(c),
        seq_len=seq_len,
        positions="learned",
        position_rows=seq_len + 2,  # the table starts two rows in
        embedding_width=0 if width == hidden else width,
        norm="layernorm",
        norm_bias=True,
        norm_place="before" if before else "after",
        final_norm=before and not c.flag("_remove_final_layer_norm", default=False),
        mlp="plain",
        activation=_activation(c, "activation_function", "relu"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=_tied(c, True),
        dropout=_rate(c, "dropout", 0.1),
        attention_dropout=_rate(c, "attention_dropout", 0.0),
    )


def _bloom(c: Fields) -> Architecture:
    hidden_key = "n_embed" if c.has("n_embed") and not c.has("hidden_size") else "hidden_size"
    heads_key = "num_attention_heads" if c.has("num_attention_heads") and not c.has("n_head") else "n_head"
    layers_key = "num_hidden_layers" if c.has("num_hidden_layers") and not c.has("n_layer") else "n_layer"
    hidden, heads, head_dim = _widths(c, hidden=hidden_key, heads=heads_key)
    return Architecture(
        family="bloom",
        layers=_uniform(c, layers_key),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=4 * hidden,
        vocab=_vocab(c),
        seq_len=c.whole("seq_length", most=MOST_SEQ_LEN, default=2048),
        positions="alibi",
        embedding_norm=True,
        norm="layernorm",
        norm_bias=True,
        mlp="plain",
        activation="gelu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=_tied(c, True),
        dropout=_rate(c, "hidden_dropout", 0.0),
        attention_dropout=_rate(c, "attention_dropout", 0.0),
    )


def _mpt(c: Fields) -> Architecture:
    hidden, heads, head_dim = _widths(c, hidden="d_model", heads="n_heads")
    attention = c.section("attn_config") if c.has("attn_config") else None
    if c.whole("expansion_ratio", most=64, default=4) != 4 and c.good("expansion_ratio"):
        c.complain("expansion_ratio", "must be 4: transformers builds MPT with 4, whatever this says")
    return Architecture(
        family="mpt",
        layers=_uniform(c, "n_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=4 * hidden,
        vocab=_vocab(c),
        seq_len=c.whole("max_seq_len", most=MOST_SEQ_LEN, default=2048),
        positions="alibi",  # transformers builds no position table, whatever learned_pos_emb says
        norm="layernorm",
        mlp="plain",
        activation="gelu",
        tied=_tied(c, True),
        dropout=_rate(c, "resid_pdrop", 0.0),
        attention_dropout=_rate(attention, "attn_pdrop", 0.0) if attention else False,
    )


def _bert(c: Fields) -> Architecture:
    hidden, heads, head_dim = _widths(c)
    seq_len = _seq_len(c, 512)
    return Architecture(
        family="bert",
        layers=_uniform(c, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=c.whole("intermediate_size", most=MOST_FFN),
        vocab=_vocab(c),
        seq_len=seq_len,
        positions="learned",
        position_rows=seq_len,
        token_types=c.whole("type_vocab_size", most=MOST_VOCAB, default=2),
        embedding_norm=True,
        norm="layernorm",
        norm_bias=True,
        norm_place="after",
        final_norm=False,
        mlp="plain",
        activation=_activation(c, "hidden_act", "gelu"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head="masked",
        tied=_tied(c, True),
        dropout=_rate(c, "hidden_dropout_prob", 0.1),
        attention_dropout=_rate(c, "attention_probs_dropout_prob", 0.1),
    )


def _llama(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=False)
    return replace(_rotary(c, "llama"), qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias", default=False))


def _mistral(c: Fields) -> Architecture:
    return _rotary(c, "mistral", window=_window(c, 4096))


def _mixtral(c: Fields) -> Architecture:
    return _rotary(c, "mixtral", window=_window(c, None), experts=True)


def _qwen2(c: Fields) -> Architecture:
    return replace(_rotary(c, "qwen2", window=_switched_window(c), windows="late"), qkv_bias=True)


def _qwen3(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=False)
    common = _rotary(c, "qwen3", window=_switched_window(c), windows="late", head_dim=128)
    return replace(common, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen3_moe(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=False)
    common = _rotary(c, "qwen3_moe", window=_switched_window(c), experts=True)
    return replace(common, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _gemma2(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=False)
    return replace(
        _rotary(c, "gemma2", window=_window(c, 4096), windows="alternate", head_dim=256),
        qkv_bias=bias,
        out_bias=bias,
        activation=_activation(c, "hidden_activation", "gelu_pytorch_tanh"),
        tied=_tied(c, True),
        norm_place="both",
    )


def _phi3(c: Fields) -> Architecture:
    return replace(_rotary(c, "phi3", window=_window(c, None)), dropout=_rate(c, "resid_pdrop", 0.0))


READERS: dict[str, Callable[[Fields], Architecture]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "phi3": _phi3,
    "mpt": _mpt,
    "bert": _bert,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}


# --- what the rotary, RMSNorm, gated families share ---


def _rotary(
    c: Fields,
    family: str,
    *,
    window: int | None = None,
    windows: Windows = "all",
    head_dim: int | None = None,
    experts: bool = False,
) -> Architecture:
    hidden, heads, width = _widths(c, default_head_dim=head_dim)
    ffn = c.whole("intermediate_size", most=MOST_FFN)
    num_experts, active, expert_ffn = _experts(c, ffn) if experts else (0, 0, 0)
    return Architecture(
        family=family,
        layers=_stretches(c, windows if window else None, num_experts),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(c, heads, optional=family in ("llama", "phi3")),
        head_dim=width,
        ffn=ffn,
        vocab=_vocab(c),
        seq_len=_seq_len(c, 2048),
        activation=_activation(c, "hidden_act", "silu"),
        tied=_tied(c, False),
        attention_dropout=_rate(c, "attention_dropout", 0.0),
        window=window,
        experts=num_experts,
        experts_per_token=active,
        expert_ffn=expert_ffn,
    )


def _experts(c: Fields, ffn: int) -> tuple[int, int, int]:
    key = "num_experts" if c.has("num_experts") and not c.has("num_local_experts") else "num_local_experts"
    experts = c.whole(key, most=MOST_EXPERTS)
    active = c.whole("num_experts_per_tok", most=MOST_EXPERTS)
    if c.good(key, "num_experts_per_tok") and active > experts:
        c.complain("num_experts_per_tok", f"must be at most {key} ({experts})")
    return experts, active, c.whole("moe_intermediate_size", most=MOST_FFN, default=ffn)


def _stretches(c: Fields, windows: Windows | None, experts: int) -> tuple[Stretch, ...]:
    """Which layers are windowed, and which are mixtures, folded into runs."""
    count = c.whole("num_hidden_layers", most=MOST_LAYERS)
    late = c.whole("max_window_layers", least=0, most=MOST_LAYERS, default=count)
    step = c.whole("decoder_sparse_step", most=MOST_LAYERS, default=1)
    dense = _layer_numbers(c, "mlp_only_layers", count)
    explicit = _layer_types(c, count)
    if not c.good("num_hidden_layers"):
        count = 1

    def windowed(layer: int) -> bool:
        if windows is None:
            return False
        if explicit:
            return explicit[layer] == "sliding_attention"
        return {"all": True, "late": layer >= late, "alternate": layer % 2 == 0}[windows]

    def mixed(layer: int) -> bool:
        return experts > 0 and layer not in dense and (layer + 1) % step == 0

    kinds = ((windowed(layer), mixed(layer)) for layer in range(count))
    return tuple(Stretch(len(list(group)), *kind) for kind, group in groupby(kinds))


def _layer_types(c: Fields, count: int) -> tuple[str, ...]:
    names = tuple(str(node.value) for node in c.list_of("layer_types", most=MOST_LAYERS, default=()))
    legal = ("full_attention", "sliding_attention")
    if not names or not c.good("num_hidden_layers"):
        return ()
    if len(names) != count:
        c.complain("layer_types", f"must name each of the {count} layers, not {len(names)}")
    elif unknown := sorted(set(names).difference(legal)):
        c.complain("layer_types", f"has the unknown type {unknown[0]}", legal=legal, near=nearest(unknown[0], legal))
    return names if c.good("layer_types") else ()


def _layer_numbers(c: Fields, key: str, count: int) -> frozenset[int]:
    if not c.has(key) or c.items[key].value == ():
        return frozenset()
    numbers = [node.value for node in c.list_of(key, most=MOST_LAYERS)]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            c.complain(key, f"must be a list of layer numbers from 0 to {count - 1}")
            break
    return frozenset(number for number in numbers if isinstance(number, int))


# --- single values ---


def _widths(
    c: Fields,
    *,
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    default_head_dim: int | None = None,
) -> tuple[int, int, int]:
    """hidden, heads and the width of a head."""
    width = c.whole(hidden, most=MOST_HIDDEN)
    count = c.whole(heads, most=MOST_HEADS)
    head_dim = c.whole("head_dim", most=MOST_HIDDEN, default=default_head_dim)
    if head_dim is None:
        if c.good(hidden, heads) and width % count:
            legal = divisors(width)
            c.complain(heads, f"must divide {hidden} ({width})", legal=legal, near=closest(count, legal))
        head_dim = max(1, width // count)
    return width, count, head_dim


def _kv_heads(c: Fields, heads: int, *, optional: bool) -> int:
    key = "num_key_value_heads"
    given_as_null = key in c.items and c.items[key].value is None
    if optional or given_as_null:
        kv_heads = c.whole(key, most=MOST_HEADS, default=heads)
    else:
        kv_heads = c.whole(key, most=MOST_HEADS)
    if c.good(key, "num_attention_heads") and heads % kv_heads:
        legal = divisors(heads)
        c.complain(key, f"must divide num_attention_heads ({heads})", legal=legal, near=closest(kv_heads, legal))
    return kv_heads


def _uniform(c: Fields, key: str) -> tuple[Stretch, ...]:
    return (Stretch(c.whole(key, most=MOST_LAYERS)),)


def _vocab(c: Fields) -> int:
    return c.whole("vocab_size", most=MOST_VOCAB)


def _seq_len(c: Fields, default: int) -> int:
    return c.whole("max_position_embeddings", most=MOST_SEQ_LEN, default=default)


def _window(c: Fields, default: int | None) -> int | None:
    """The sliding window; absent means the class's default, null means none."""
    if "sliding_window" in c.items and not c.has("sliding_window"):
        return None
    return c.whole("sliding_window", most=MOST_SEQ_LEN, default=default)


def _switched_window(c: Fields) -> int | None:
    window = _window(c, 4096)
    return window if c.flag("use_sliding_window", default=False) else None


def _tied(c: Fields, default: bool) -> bool:
    return c.flag("tie_word_embeddings", default=default)


def _rate(c: Fields, key: str, default: float) -> bool:
    """Whether a dropout rate is above zero."""
    return c.number(key, least=0.0, most=1.0, default=default) > 0


def _activation(c: Fields, key: str, default: str) -> str:
    """gelu_new, gelu_fast, gelu_pytorch_tanh ... are one function to us; what they cost is the same."""
    name = c.text(key, default=default)
    return "gelu" if name.startswith("gelu") else name
