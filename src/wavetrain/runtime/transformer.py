"""The built-in transformer: modules from an `Architecture`, under the parameter names that `wavetrain.model` describes.

One set of modules for all families; what differs is a flag of the architecture or an entry in `STYLES`. There is no
dropout (yet): a plan's dropout costs time in a prediction, and is 0 in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor, nn

from wavetrain.base.errors import InputError, Problem
from wavetrain.model.architecture import Architecture, Stretch
from wavetrain.model.families import FAMILIES
from wavetrain.model.model import Model
from wavetrain.runtime.parts import Part, Parts, join


@dataclass(frozen=True)
class Style:
    """What an architecture leaves open, as the configuration classes of transformers have it by default."""

    eps: float
    tanh_gelu: bool = False
    theta: float = 10_000.0  # of rotary positions


STYLES = {
    "gpt": Style(1e-5),
    "gpt2": Style(1e-5, tanh_gelu=True),
    "opt": Style(1e-5),
    "bert": Style(1e-12),
    "llama": Style(1e-6),
    "mistral": Style(1e-6),
    "qwen2": Style(1e-6),
    "qwen3": Style(1e-6),
    "phi3": Style(1e-5),
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def parts_of(model: Model) -> Parts:
    """A described model as modules on the meta device."""
    problems = tuple(_missing(model))
    if problems:
        raise InputError(problems)
    a = model.architecture
    assert a is not None
    ties = {p.name: p.tied for p in model.parameters() if p.tied}
    rotary = Rotary(a.head_dim, STYLES[a.family].theta) if a.positions == "rotary" else None
    with torch.device("meta"):
        kinds = [stretch for stretch in a.layers for _ in range(stretch.count)]
        embedding = _part(a, Embedding(a), ties)
        blocks = tuple(_part(a, Block(a, kind, rotary), ties, number) for number, kind in enumerate(kinds))
        head = _part(a, Head(a), ties)
    return Parts(embedding=embedding, blocks=blocks, head=head, hidden=a.hidden, vocab=a.vocab, ties=ties)


def _missing(model: Model) -> Iterator[Problem]:
    """What the runtime has no module for."""
    a = model.architecture
    if a is None:
        yield Problem(where=model.name, rule="a traced module can't be built again from its description")
        return
    if a.num_layers != model.num_blocks:  # what is built is bounded by what was checked
        rule = f"has {a.num_layers:,} layers, the model has {model.num_blocks:,}"
        yield Problem(where=model.name, key="architecture", rule=rule)
    if a.family not in STYLES:
        rule = "the runtime has no module for this family"
        yield Problem(where=model.name, key="family", value=a.family, rule=rule, legal=tuple(STYLES))
    needs = {
        "experts": a.experts > 0,
        "positions": a.positions == "alibi",
        "head_dim": a.positions == "rotary" and a.head_dim % 2 == 1,
        "parallel_residual": a.parallel_residual,
        "norm_place": a.norm_place == "both",
        "embedding_width": a.embedding_width > 0,
        "norm_bias": a.norm_bias and a.norm == "rmsnorm",
        "activation": a.activation not in ACTIVATIONS,
    }
    for key, missing in needs.items():
        if missing:
            rule = "the runtime has no module for this"
            yield Problem(where=model.name, key=key, value=getattr(a, key), rule=rule)


def _part(a: Architecture, module: nn.Module, ties: dict[str, str], number: int | None = None) -> Part:
    """A module whose submodules are named by their roles, with the family's names for them."""
    names = {path: _name(a, path, number) for path, _ in module.named_parameters()}
    join(module, names, ties)
    return Part(module, names)


def _name(a: Architecture, path: str, number: int | None) -> str:
    roles, layer = FAMILIES[a.family].names, ""
    if number is not None:
        layer = roles["layer"].format(number) + "."
    owner, _, leaf = path.rpartition(".")
    return layer + (f"{roles[owner.rpartition('.')[2]]}.{leaf}" if owner else roles[path])


# --- the three sorts of parts ---


class Embedding(nn.Module):
    """Tokens (and where they are) to hidden states."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.tokens = nn.Embedding(a.vocab, a.hidden)
        self.positions = nn.Embedding(a.position_rows, a.hidden) if a.positions == "learned" else None
        self.first_position = a.position_rows - a.seq_len if a.positions == "learned" else 0  # OPT skips two rows
        self.token_types = nn.Embedding(a.token_types, a.hidden) if a.token_types else None
        self.embedding_norm = _norm(a) if a.embedding_norm else None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.tokens(tokens)
        if self.token_types is not None:
            hidden = hidden + self.token_types.weight[0]  # one segment
        if self.positions is not None:
            first = self.first_position
            hidden = hidden + self.positions(torch.arange(first, first + tokens.shape[1], device=tokens.device))
        return hidden if self.embedding_norm is None else self.embedding_norm(hidden)


class Block(nn.Module):
    """Attention and MLP, each added to what it read."""

    def __init__(self, a: Architecture, kind: Stretch, rotary: Rotary | None) -> None:
        super().__init__()
        self.norm_first = a.norm_place == "before"
        self.attention_norm = _norm(a)
        self.attention = Attention(a, a.window if kind.windowed else None, rotary)
        self.mlp_norm = _norm(a)
        self.mlp = Mlp(a)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.norm_first:
            hidden = hidden + self.attention(self.attention_norm(hidden))
            return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]
        hidden = self.attention_norm(hidden + self.attention(hidden))
        return self.mlp_norm(hidden + self.mlp(hidden))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Hidden states to logits; a masked-LM head transforms them first."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        masked = a.head == "masked"
        self.final_norm = _norm(a) if a.final_norm else None
        self.head_dense = nn.Linear(a.hidden, a.hidden) if masked else None
        self.head_norm = _norm(a) if masked else None
        self.activation = _activation(a)
        self.head = nn.Linear(a.hidden, a.vocab, bias=masked)
        if masked:
            self.head_bias = nn.Parameter(torch.empty(a.vocab))  # the projection's bias, if tied, by its own name

    def forward(self, hidden: Tensor) -> Tensor:
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        if self.head_dense is not None and self.head_norm is not None:
            hidden = self.head_norm(self.activation(self.head_dense(hidden)))
        return self.head(hidden)  # type: ignore[no-any-return]


# --- what blocks are made of ---


class Attention(nn.Module):
    """Multi-head attention, with fewer keys and values than queries if so described."""

    def __init__(self, a: Architecture, window: int | None, rotary: Rotary | None) -> None:
        super().__init__()
        self.sizes = [heads * a.head_dim for heads in (a.heads, a.kv_heads, a.kv_heads)]
        self.head_dim, self.grouped = a.head_dim, a.kv_heads != a.heads
        self.causal, self.window, self.rotary = a.head == "causal", window, rotary
        self.fused = "qkv" in FAMILIES[a.family].names
        if self.fused:
            self.qkv = _linear(a, a.hidden, sum(self.sizes), a.qkv_bias)
        else:
            self.q, self.k, self.v = (_linear(a, a.hidden, size, a.qkv_bias) for size in self.sizes)
        self.q_norm = _norm(a, a.head_dim) if a.qk_norm else None
        self.k_norm = _norm(a, a.head_dim) if a.qk_norm else None
        self.out = _linear(a, self.sizes[0], a.hidden, a.out_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden).split(self.sizes, -1) if self.fused else self._separate(hidden)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if self.rotary is not None:
            q, k = self.rotary.turn(q, k)
        return self.out(self.core(q, k, v))  # type: ignore[no-any-return]

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores, softmax and values, between the projections: what selective recomputation computes again."""
        mask = self._window_mask(q)
        causal = self.causal and mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped)
        return mixed.transpose(1, 2).flatten(2)

    def _separate(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(hidden), self.k(hidden), self.v(hidden)

    def _window_mask(self, q: Tensor) -> Tensor | None:
        """Which keys a query sees, where that is fewer than all before it: itself and the window - 1 before it."""
        seq_len = q.shape[-2]
        if self.window is None or self.window >= seq_len:
            return None
        places = torch.arange(seq_len, device=q.device)
        back = places[:, None] - places
        return (back >= 0) & (back < self.window) if self.causal else back.abs() < self.window


class Mlp(nn.Module):
    """Up, activation, down; the activation of a gate times up where gated."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gated = a.mlp == "gated"
        self.fused = self.gated and "gate_up" in FAMILIES[a.family].names
        self.activation = _activation(a)
        if self.fused:
            self.gate_up = _linear(a, a.hidden, 2 * a.ffn, a.mlp_bias)
        else:
            if self.gated:
                self.gate = _linear(a, a.hidden, a.ffn, a.mlp_bias)
            self.up = _linear(a, a.hidden, a.ffn, a.mlp_bias)
        self.down = _linear(a, a.ffn, a.hidden, a.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.gate_up(hidden).chunk(2, -1)
            inner = self.activation(gate) * up
        elif self.gated:
            inner = self.activation(self.gate(hidden)) * self.up(hidden)
        else:
            inner = self.activation(self.up(hidden))
        return self.down(inner)  # type: ignore[no-any-return]


class TransposedLinear(nn.Module):
    """A linear layer whose weight is stored inputs x outputs, as GPT-2's are."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Rotary:
    """Rotary positions (Su et al., RoFormer, 2021), in halves as Llama has them; one table for all blocks of a stage.

    No module and no buffer: nothing to materialize, nothing to lose on the meta device.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim, self.theta = head_dim, theta
        self._key: tuple[int, torch.dtype, torch.device] | None = None
        self._table: tuple[Tensor, Tensor] | None = None

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._cos_sin(q)
        return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin

    def _cos_sin(self, q: Tensor) -> tuple[Tensor, Tensor]:
        key = (q.shape[-2], q.dtype, q.device)
        if self._table is None or self._key != key:
            powers = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device="cpu") / self.head_dim
            frequencies = (1.0 / self.theta**powers).to(q.device)
            angles = torch.arange(key[0], device=q.device).float()[:, None] * frequencies
            angles = torch.cat((angles, angles), -1)
            self._key, self._table = key, (angles.cos().to(q.dtype), angles.sin().to(q.dtype))
        return self._table


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _linear(a: Architecture, inputs: int, outputs: int, bias: bool) -> nn.Module:
    kind = TransposedLinear if FAMILIES[a.family].transposed else nn.Linear
    return kind(inputs, outputs, bias=bias)


def _norm(a: Architecture, width: int | None = None) -> nn.Module:
    eps = STYLES[a.family].eps
    if a.norm == "rmsnorm":
        return nn.RMSNorm(width or a.hidden, eps)
    return nn.LayerNorm(width or a.hidden, eps, bias=a.norm_bias)


def _activation(a: Architecture) -> Callable[[Tensor], Tensor]:
    if a.activation == "gelu" and STYLES[a.family].tanh_gelu:
        return partial(F.gelu, approximate="tanh")
    return ACTIVATIONS[a.activation]
