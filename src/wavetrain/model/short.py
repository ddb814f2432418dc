"""The short form of a model: a dozen keys in YAML, as people describe models to each other. Presets use it too.

    family: llama
    layers: 32
    hidden: 4096
    heads: 32
    ffn: 11008
    vocab: 32000
    seq_len: 4096

What is not stated follows from the family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from wavetrain.base.fields import Fields
from wavetrain.model.architecture import MLPS, NORMS, POSITIONS, Architecture, Stretch
from wavetrain.model.families import FAMILIES
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
from wavetrain.model.transformer import unsupported

WINDOWS = ("all", "alternate")
IDENTIFYING = ("layers", "hidden", "heads", "vocab", "family", "ffn", "seq_len")  # keys only a model has


ACTIVATIONS = ("gelu", "silu", "relu", "relu2", "tanh", "quick_gelu")


def read_short(f: Fields) -> Architecture:
    """The architecture that the short form states; what is wrong with it is raised by `f.finish()`."""
    family = f.choice("family", tuple(FAMILIES), default="gpt")
    style = _Style(f, FAMILIES[family].defaults)
    hidden = f.whole("hidden", most=MOST_HIDDEN)
    heads = f.whole("heads", most=MOST_HEADS)
    length = f.whole("seq_len", most=MOST_SEQ_LEN)
    mlp = style.choice("mlp", MLPS)
    experts, active = _experts(f)
    ffn = _ffn(f, hidden, mlp)
    bias = style.flag("bias")
    dropout = style.flag("dropout")
    positions = style.choice("positions", POSITIONS)
    norm = style.choice("norm", NORMS)
    architecture = Architecture(
        family=family,
        layers=_stretches(f, experts),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(f, heads),
        head_dim=_head_dim(f, hidden, heads),
        ffn=ffn,
        vocab=f.whole("vocab", most=MOST_VOCAB),
        seq_len=length,
        positions=positions,
        position_rows=length + (2 if family == "opt" else 0) if positions == "learned" else 0,
        token_types=style.value("token_types", 0),
        embedding_norm=style.value("embedding_norm", False),
        norm=norm,
        norm_bias=f.flag("norm_bias", default=norm == "layernorm" and style.value("norm_bias", True)),
        norm_place=style.value("norm_place", "before"),
        final_norm=style.value("final_norm", True),
        qk_norm=style.flag("qk_norm"),
        mlp=mlp,
        activation=f.choice("activation", ACTIVATIONS, default=style.value("activation", "gelu")),
        qkv_bias=f.flag("qkv_bias", default=style.value("qkv_bias", bias)),
        out_bias=bias,
        mlp_bias=bias,
        head=style.value("head", "causal"),
        tied=style.flag("tied"),
        dropout=dropout,
        attention_dropout=dropout,
        window=f.whole("window", most=MOST_SEQ_LEN, default=None),
        experts=experts,
        experts_per_token=active,
        expert_ffn=f.whole("expert_ffn", most=MOST_FFN, default=ffn) if experts else 0,
        parallel_residual=style.value("parallel_residual", False),
    )
    if f.good("family"):
        for key, rule in unsupported(architecture):
            having = [name for name in FAMILIES if key not in dict(unsupported(replace(architecture, family=name)))]
            f.complain(key, rule, legal=[f"family: {name}" for name in having])
    return architecture


class _Style:
    """A family's customary choices, each of which the file may override."""

    def __init__(self, f: Fields, defaults: Any) -> None:
        self.f = f
        self.defaults = defaults

    def flag(self, key: str) -> bool:
        return self.f.flag(key, default=cast(bool, self.defaults.get(key, False)))

    def choice(self, key: str, legal: tuple[str, ...]) -> Any:
        return self.f.choice(key, legal, default=self.defaults[key])

    def value(self, key: str, default: Any) -> Any:
        """A trait of the family that the file can't change."""
        return self.defaults.get(key, default)


def _experts(f: Fields) -> tuple[int, int]:
    if not f.has("experts"):
        for key in ("experts_per_token", "expert_ffn"):
            if f.has(key):
                f.complain(key, "means nothing without experts")
        return 0, 0
    experts = f.whole("experts", most=MOST_EXPERTS)
    active = f.whole("experts_per_token", most=MOST_EXPERTS)
    check_at_most(f, "experts_per_token", "experts", (active, experts))
    return experts, active


def _ffn(f: Fields, hidden: int, mlp: str) -> int:
    if mlp == "gated":  # no customary size: 8/3 of hidden is rounded differently by everyone
        return f.whole("ffn", most=MOST_FFN)
    return f.whole("ffn", most=MOST_FFN, default=4 * hidden)


def _kv_heads(f: Fields, heads: int) -> int:
    kv_heads = f.whole("kv_heads", most=MOST_HEADS, default=heads)
    check_divides(f, "kv_heads", "heads", (kv_heads, heads))
    return kv_heads


def _head_dim(f: Fields, hidden: int, heads: int) -> int:
    head_dim = f.whole("head_dim", most=MOST_HIDDEN, default=None)
    if head_dim is None and f.good("head_dim"):
        check_divides(f, "heads", "hidden", (heads, hidden), otherwise=", or head_dim be given")
    return head_dim or max(1, hidden // heads)


def _stretches(f: Fields, experts: int) -> tuple[Stretch, ...]:
    count = f.whole("layers", most=MOST_LAYERS)
    windows = f.choice("windows", WINDOWS, default="all")
    mixed = experts > 0
    if not f.has("window"):
        if f.has("windows"):
            f.complain("windows", "means nothing without window")
        return (Stretch(count, False, mixed),)
    if windows == "alternate":
        return tuple(Stretch(1, layer % 2 == 0, mixed) for layer in range(count))
    return (Stretch(count, True, mixed),)
