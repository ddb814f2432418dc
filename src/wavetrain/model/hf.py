"""Hugging Face `config.json`, read by hand: one function per model_type, no import of transformers.

Keys and defaults are those of transformers' configuration classes (checked against transformers 5 in the tests). The
sizes that make a model (layers, hidden, heads, vocabulary) must be in the file; minor keys take the class's default.
What would build other parameters than these readers know (cross-attention, norms without weights) is refused.
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
    check_at_most,
    check_divides,
)

Windows = Literal["all", "late", "alternate"]

NEEDED = ("layers", "hidden", "heads", "vocab")
NULLABLE = frozenset(("n_inner", "sliding_window", "head_dim", "num_key_value_heads", "mlp_only_layers", "layer_types"))


def read_config(node: Node) -> Architecture:
    """The architecture that a config.json describes."""
    config = Fields(node, strict=False, nullable=NULLABLE)
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
    _refuse(c, "add_cross_attention", True)
    names = {"hidden": ("n_embd", "hidden_size"), "heads": ("n_head", "num_attention_heads")}
    common = _classic(c, "gpt2", **names, layers=("n_layer", "num_hidden_layers"))
    seq_len = c.whole(_either(c, "n_positions", "max_position_embeddings"), most=MOST_SEQ_LEN, default=1024)
    return replace(
        common,
        ffn=c.whole("n_inner", most=MOST_FFN, default=common.ffn),
        seq_len=seq_len,
        positions="learned",
        position_rows=seq_len,
        activation=_activation(c, "activation_function", "gelu_new"),
        dropout=_rate(c, "resid_pdrop", 0.1),
        attention_dropout=_rate(c, "attn_pdrop", 0.1),
    )


def _gpt_neox(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=True)
    return replace(
        _classic(c, "gpt_neox"),
        ffn=c.whole("intermediate_size", most=MOST_FFN),
        seq_len=_seq_len(c, 2048),
        positions="rotary",
        activation=_activation(c, "hidden_act", "gelu"),
        qkv_bias=bias,
        out_bias=bias,
        tied=_tied(c, False),
        dropout=_rate(c, "hidden_dropout", 0.0),
        attention_dropout=_rate(c, "attention_dropout", 0.0),
        parallel_residual=c.flag("use_parallel_residual", default=True),
    )


def _opt(c: Fields) -> Architecture:
    _refuse(c, "layer_norm_elementwise_affine", False)
    common = _classic(c, "opt")
    seq_len = _seq_len(c, 2048)
    before = c.flag("do_layer_norm_before", default=True)
    width = c.whole("word_embed_proj_dim", most=MOST_HIDDEN, default=common.hidden)
    bias = c.flag("enable_bias", default=True)
    return replace(
        common,
        ffn=c.whole("ffn_dim", most=MOST_FFN),
        seq_len=seq_len,
        positions="learned",
        position_rows=seq_len + 2,  # the table starts two rows in
        embedding_width=0 if width == common.hidden else width,
        norm_place="before" if before else "after",
        final_norm=before and not c.flag("_remove_final_layer_norm", default=False),
        activation=_activation(c, "activation_function", "relu"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        dropout=_rate(c, "dropout", 0.1),
        attention_dropout=_rate(c, "attention_dropout", 0.0),
    )


def _bloom(c: Fields) -> Architecture:
    names = {"hidden": ("hidden_size", "n_embed"), "heads": ("n_head", "num_attention_heads")}
    return replace(
        _classic(c, "bloom", **names, layers=("n_layer", "num_hidden_layers")),
        seq_len=c.whole("seq_length", most=MOST_SEQ_LEN, default=2048),
        embedding_norm=True,
        dropout=_rate(c, "hidden_dropout", 0.0),
        attention_dropout=_rate(c, "attention_dropout", 0.0),
    )


def _mpt(c: Fields) -> Architecture:
    attention = c.section("attn_config") if c.has("attn_config") else None
    if c.whole("expansion_ratio", most=64, default=4) != 4 and c.good("expansion_ratio"):
        c.complain("expansion_ratio", "must be 4: transformers builds MPT with 4, whatever this says")
    names = {"hidden": ("d_model", "hidden_size"), "heads": ("n_heads", "num_attention_heads")}
    return replace(  # transformers builds no position table, whatever learned_pos_emb says
        _classic(c, "mpt", **names, layers=("n_layers", "num_hidden_layers")),
        seq_len=c.whole("max_seq_len", most=MOST_SEQ_LEN, default=2048),
        norm_bias=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        dropout=_rate(c, "resid_pdrop", 0.0),
        attention_dropout=_rate(attention, "attn_pdrop", 0.0) if attention else False,
    )


def _bert(c: Fields) -> Architecture:
    _refuse(c, "add_cross_attention", True)
    seq_len = _seq_len(c, 512)
    return replace(
        _classic(c, "bert"),
        ffn=c.whole("intermediate_size", most=MOST_FFN),
        seq_len=seq_len,
        positions="learned",
        position_rows=seq_len,
        token_types=c.whole("type_vocab_size", most=MOST_VOCAB, default=2),
        embedding_norm=True,
        norm_place="after",
        final_norm=False,
        activation=_activation(c, "hidden_act", "gelu"),
        head="masked",
        dropout=_rate(c, "hidden_dropout_prob", 0.1),
        attention_dropout=_rate(c, "attention_probs_dropout_prob", 0.1),
    )


def _llama(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=False)
    mlp_bias = c.flag("mlp_bias", default=False)
    return replace(_rotary(c, "llama", seq_len=2048), qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _mistral(c: Fields) -> Architecture:
    window = _window(c, 4096)
    return replace(_rotary(c, "mistral", seq_len=131072), window=window, layers=_windowed(c, window, "all"))


def _mixtral(c: Fields) -> Architecture:
    window = _window(c, None)
    common = _rotary(c, "mixtral", seq_len=131072)
    experts, active = _experts(c)
    layers = tuple(replace(stretch, experts=True) for stretch in _windowed(c, window, "all"))
    mixed = replace(common, experts=experts, experts_per_token=active, expert_ffn=common.ffn)
    return replace(mixed, window=window, layers=layers)


def _qwen2(c: Fields) -> Architecture:
    window = _switched_window(c)
    layers = _windowed(c, window, "late")
    return replace(_rotary(c, "qwen2", seq_len=32768), qkv_bias=True, window=window, layers=layers)


def _qwen3(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=False)
    window = _switched_window(c)
    common = _rotary(c, "qwen3", seq_len=32768, head_dim=128)
    layers = _windowed(c, window, "late")
    return replace(common, qkv_bias=bias, out_bias=bias, qk_norm=True, window=window, layers=layers)


def _qwen3_moe(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=False)
    window = _switched_window(c)
    common = _rotary(c, "qwen3_moe", seq_len=32768)
    experts, active = _experts(c)
    return replace(
        common,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        window=window,
        layers=_sparse(c, window is not None),
        experts=experts,
        experts_per_token=active,
        expert_ffn=c.whole("moe_intermediate_size", most=MOST_FFN, default=768),
    )


def _gemma2(c: Fields) -> Architecture:
    bias = c.flag("attention_bias", default=False)
    window = _window(c, 4096)
    return replace(
        _rotary(c, "gemma2", seq_len=8192, head_dim=256),
        qkv_bias=bias,
        out_bias=bias,
        activation=_activation(c, "hidden_activation", "gelu_pytorch_tanh"),
        tied=_tied(c, True),
        norm_place="both",
        window=window,
        layers=_windowed(c, window, "alternate"),
    )


def _phi3(c: Fields) -> Architecture:
    window = _window(c, None)
    dropout = _rate(c, "resid_pdrop", 0.0)
    layers = _windowed(c, window, "all")
    return replace(_rotary(c, "phi3", seq_len=4096), dropout=dropout, window=window, layers=layers)


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


# --- what the LayerNorm, plain-MLP families share, and what the rotary, RMSNorm, gated ones do ---


def _classic(
    c: Fields,
    family: str,
    *,
    hidden: tuple[str, ...] = ("hidden_size",),
    heads: tuple[str, ...] = ("num_attention_heads",),
    layers: tuple[str, ...] = ("num_hidden_layers",),
) -> Architecture:
    """GPT-2's shape with biases everywhere; positions, lengths and what else differs are added by each."""
    width, count, head_dim = _widths(c, hidden=hidden, heads=heads)
    return Architecture(
        family=family,
        layers=_uniform(c, *layers),
        hidden=width,
        heads=count,
        kv_heads=count,
        head_dim=head_dim,
        ffn=4 * width,
        vocab=_vocab(c),
        seq_len=1,
        positions="alibi",
        norm="layernorm",
        norm_bias=True,
        mlp="plain",
        activation="gelu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=_tied(c, True),
    )


def _rotary(c: Fields, family: str, *, seq_len: int, head_dim: int | None = None) -> Architecture:
    """What all of them have; windows, mixtures and biases are added by each."""
    width = c.whole("hidden_size", most=MOST_HIDDEN)
    heads = c.whole("num_attention_heads", most=MOST_HEADS)
    if head_dim is not None and "head_dim" in c.items and not c.has("head_dim"):
        c.complain("head_dim", f"must have a value; without the key it is {head_dim}")
    head_dim = c.whole("head_dim", most=MOST_HIDDEN, default=head_dim)
    if head_dim is None:
        check_divides(c, "num_attention_heads", "hidden_size", (heads, width), otherwise=", or head_dim be given")
        head_dim = max(1, width // heads)
    return Architecture(
        family=family,
        layers=_uniform(c, "num_hidden_layers"),
        hidden=width,
        heads=heads,
        kv_heads=_kv_heads(c, heads, optional=family in ("llama", "phi3")),
        head_dim=head_dim,
        ffn=c.whole("intermediate_size", most=MOST_FFN),
        vocab=_vocab(c),
        seq_len=_seq_len(c, seq_len),
        activation=_activation(c, "hidden_act", "silu"),
        tied=_tied(c, False),
        attention_dropout=_rate(c, "attention_dropout", 0.0),
    )


def _experts(c: Fields) -> tuple[int, int]:
    key = _either(c, "num_local_experts", "num_experts")
    experts = c.whole(key, most=MOST_EXPERTS)
    active = c.whole("num_experts_per_tok", most=MOST_EXPERTS)
    check_at_most(c, "num_experts_per_tok", key, (active, experts))
    return experts, active


def _windowed(c: Fields, window: int | None, windows: Windows) -> tuple[Stretch, ...]:
    """The layers, folded into runs of those that see a window and those that see everything."""
    count = _uniform(c, "num_hidden_layers")[0].count
    late = c.whole("max_window_layers", least=0, most=MOST_LAYERS, default=28) if windows == "late" else 0
    explicit = _layer_types(c, count) if windows != "all" else ()
    if window is None:
        return (Stretch(count),)
    rule = {"all": lambda _: True, "late": lambda layer: layer >= late, "alternate": lambda layer: layer % 2 == 0}
    kinds = [name == "sliding_attention" for name in explicit] or map(rule[windows], range(count))
    return tuple(Stretch(len(list(group)), windowed) for windowed, group in groupby(kinds))


def _sparse(c: Fields, windowed: bool) -> tuple[Stretch, ...]:
    """The layers, folded into runs of mixtures and dense ones."""
    count = _uniform(c, "num_hidden_layers")[0].count
    step = c.whole("decoder_sparse_step", most=MOST_LAYERS, default=1)
    dense = _layer_numbers(c, "mlp_only_layers", count)
    kinds = (layer not in dense and (layer + 1) % step == 0 for layer in range(count))
    return tuple(Stretch(len(list(group)), windowed, mixed) for mixed, group in groupby(kinds))


def _layer_types(c: Fields, count: int) -> tuple[str, ...]:
    legal = ("full_attention", "sliding_attention")
    nodes = c.list_of("layer_types", most=MOST_LAYERS, default=())
    names = tuple(node.value for node in nodes if isinstance(node.value, str))
    unknown = next((node for node in nodes if node.value not in legal), None)
    if unknown is not None:
        near = nearest(unknown.value, legal) if isinstance(unknown.value, str) else ()
        c.complain("layer_types", "must list the type of every layer", legal=legal, near=near)
    elif names and c.good("num_hidden_layers") and len(names) != count:
        c.complain("layer_types", f"must name each of the {count} layers, not {len(names)}")
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


def _either(c: Fields, *spellings: str) -> str:
    """The spelling of a key that the file uses; two of them must agree."""
    given = [key for key in spellings if c.has(key)]
    if len(given) > 1 and c.items[given[0]].value != c.items[given[1]].value:
        c.complain(given[1], f"contradicts {given[0]}, which is another name of the same thing")
    return (given or spellings)[0]


def _refuse(c: Fields, key: str, value: bool) -> None:
    if c.flag(key, default=not value) is value and c.good(key):
        c.complain(key, "is not supported: it changes the parameters in a way that can't be described yet")


def _widths(
    c: Fields,
    *,
    hidden: tuple[str, ...],
    heads: tuple[str, ...],
) -> tuple[int, int, int]:
    """hidden, heads and the width of a head."""
    hidden_key, heads_key = _either(c, *hidden), _either(c, *heads)
    width = c.whole(hidden_key, most=MOST_HIDDEN)
    count = c.whole(heads_key, most=MOST_HEADS)
    check_divides(c, heads_key, hidden_key, (count, width))
    return width, count, max(1, width // count)


def _kv_heads(c: Fields, heads: int, *, optional: bool) -> int:
    key = "num_key_value_heads"
    given_as_null = key in c.items and c.items[key].value is None
    if optional or given_as_null:
        kv_heads = c.whole(key, most=MOST_HEADS, default=heads)
    else:
        kv_heads = c.whole(key, most=MOST_HEADS)
    check_divides(c, key, "num_attention_heads", (kv_heads, heads))
    return kv_heads


def _uniform(c: Fields, *spellings: str) -> tuple[Stretch, ...]:
    return (Stretch(c.whole(_either(c, *spellings), most=MOST_LAYERS)),)


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
