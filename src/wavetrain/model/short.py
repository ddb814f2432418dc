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
    closest,
    divisors,
)
from wavetrain.model.transformer import unsupported

WINDOWS = ("all", "alternate")
IDENTIFYING = ("layers", "hidden", "heads", "vocab", "family", "ffn", "seq_len")  # keys only a model has


def read_short(f: Fields, *, seq_len: int | None = None) -> Architecture:
    """The architecture that the short form states; `seq_len` replaces the file's. Raises on `f.finish()`."""
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
    architecture = Architecture(
        family=family,
        layers=_stretches(f, experts),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(f, heads),
        head_dim=_head_dim(f, hidden, heads),
        ffn=ffn,
        vocab=f.whole("vocab", most=MOST_VOCAB),
        seq_len=seq_len or length,
        positions=positions,
        position_rows=(seq_len or length) + (2 if family == "opt" else 0) if positions == "learned" else 0,
        token_types=style.value("token_types", 0),
        embedding_norm=style.value("embedding_norm", False),
        norm=style.choice("norm", NORMS),
        norm_bias=style.flag("norm_bias"),
        norm_place=style.value("norm_place", "before"),
        final_norm=style.value("final_norm", True),
        qk_norm=style.flag("qk_norm"),
        mlp=mlp,
        activation=f.text("activation", default=style.value("activation", "gelu")),
        qkv_bias=style.flag("qkv_bias") or bias,
        out_bias=bias,
        mlp_bias=bias,
        head=style.value("head", "causal"),
        tied=style.flag("tied"),
        dropout=dropout,
        attention_dropout=dropout,
        window=f.whole("window", most=MOST_SEQ_LEN, default=None),
        experts=experts,
        experts_per_token=active,
        expert_ffn=f.whole("expert_ffn", most=MOST_FFN, default=ffn),
    )
    if f.good("family"):
        for key, rule in unsupported(architecture):
            having = [name for name in FAMILIES if name != family and _has(name, key)]
            f.complain(key, rule, legal=having and [f"family: {name}" for name in having])
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


def _has(family: str, key: str) -> bool:
    role = {"mlp": "gate", "qk_norm": "q_norm", "norm_place": "attention_after", "head": "head_dense"}.get(key, key)
    return role in FAMILIES[family].names


def _experts(f: Fields) -> tuple[int, int]:
    if not f.has("experts"):
        f.has("experts_per_token")
        return 0, 0
    experts = f.whole("experts", most=MOST_EXPERTS)
    active = f.whole("experts_per_token", most=MOST_EXPERTS)
    if f.good("experts", "experts_per_token") and active > experts:
        f.complain("experts_per_token", f"must be at most experts ({experts})")
    return experts, active


def _ffn(f: Fields, hidden: int, mlp: str) -> int:
    if mlp == "gated":  # no customary size: 8/3 of hidden is rounded differently by everyone
        return f.whole("ffn", most=MOST_FFN)
    return f.whole("ffn", most=MOST_FFN, default=4 * hidden)


def _kv_heads(f: Fields, heads: int) -> int:
    kv_heads = f.whole("kv_heads", most=MOST_HEADS, default=heads)
    if f.good("heads", "kv_heads") and heads % kv_heads:
        legal = divisors(heads)
        f.complain("kv_heads", f"must divide heads ({heads})", legal=legal, near=closest(kv_heads, legal))
    return kv_heads


def _head_dim(f: Fields, hidden: int, heads: int) -> int:
    head_dim = f.whole("head_dim", most=MOST_HIDDEN, default=None)
    if head_dim is None and f.good("hidden", "heads", "head_dim") and hidden % heads:
        legal = divisors(hidden)
        rule = f"must divide hidden ({hidden}), or head_dim must be given"
        f.complain("heads", rule, legal=legal, near=closest(heads, legal))
    return head_dim or max(1, hidden // heads)


def _stretches(f: Fields, experts: int) -> tuple[Stretch, ...]:
    count = f.whole("layers", most=MOST_LAYERS)
    windows = f.choice("windows", WINDOWS, default="all")
    mixed = experts > 0
    if not f.has("window"):
        return (Stretch(count, False, mixed),)
    if windows == "alternate":
        return tuple(Stretch(1, layer % 2 == 0, mixed) for layer in range(count))
    return (Stretch(count, True, mixed),)
