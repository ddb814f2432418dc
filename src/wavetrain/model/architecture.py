"""`Architecture`: the few numbers and choices that determine a transformer, whoever published it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Positions = Literal["learned", "rotary", "alibi", "none"]
NormFunction = Literal["layernorm", "rmsnorm"]
NormPlace = Literal["before", "after", "both"]
Mlp = Literal["plain", "gated"]
Head = Literal["causal", "masked"]

POSITIONS, NORMS, MLPS = map(get_args, (Positions, NormFunction, Mlp))


@dataclass(frozen=True)
class Stretch:
    """`count` layers in a row that attend to the whole sequence or a window, with a dense MLP or experts."""

    count: int
    windowed: bool = False
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformer, in numbers. Names of its parameters come from its `family`."""

    family: str
    layers: tuple[Stretch, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq_len: int
    positions: Positions = "rotary"
    position_rows: int = 0  # of a learned table
    token_types: int = 0
    embedding_width: int = 0  # 0: as wide as the layers, else projected in and out
    embedding_norm: bool = False
    norm: NormFunction = "rmsnorm"
    norm_bias: bool = False
    norm_place: NormPlace = "before"
    final_norm: bool = True
    parallel_residual: bool = False  # attention and MLP read the same input
    qk_norm: bool = False
    mlp: Mlp = "gated"
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head: Head = "causal"
    tied: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    window: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0

    @property
    def num_layers(self) -> int:
        return sum(stretch.count for stretch in self.layers)
