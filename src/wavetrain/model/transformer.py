"""From an `Architecture` to a `Model`: every operator of every layer, in the order data crosses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from wavetrain.model.architecture import Architecture, Stretch
from wavetrain.model.families import FAMILIES, Family
from wavetrain.model.model import Layer, Model, Run
from wavetrain.model.operator import (
    TOKENS,
    Attention,
    Axis,
    Elementwise,
    Embedding,
    Experts,
    Linear,
    Loss,
    Norm,
    Operator,
    Parameter,
    Size,
    Term,
)

POSITION_LOOKUPS = Size((Term(1, 0, 1),))  # once per position, whatever the microbatch


def build(architecture: Architecture, *, name: str, source: str = "") -> Model:
    """The model that an architecture determines."""
    made = _Transformer(architecture)
    kinds = {stretch: made.block(stretch) for stretch in _kinds(architecture)}
    runs, first = [], 0
    for kind, group in groupby(architecture.layers, _kind):
        count = sum(stretch.count for stretch in group)
        runs.append(Run(kinds[kind].name, count, first))
        first += count
    return Model(
        name=name,
        seq_len=architecture.seq_len,
        layers=(made.embedding(), *kinds.values(), made.head()),
        order=(Run("embedding", 1), *runs, Run("head", 1)),
        architecture=architecture,
        source=source,
    )


def unsupported(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """(key, rule) for each feature that the family has no module for."""
    names, grouped = FAMILIES[architecture.family].names, FAMILIES[architecture.family].grouped
    needs = {
        "kv_heads": architecture.kv_heads != architecture.heads and not grouped,
        "head_dim": architecture.heads * architecture.head_dim != architecture.hidden and not grouped,
        "positions": architecture.positions == "learned" and "positions" not in names,
        "experts": architecture.experts > 0 and "experts" not in names,
        "mlp": architecture.mlp == "gated" and "gate" not in names and "gate_up" not in names,
        "qk_norm": architecture.qk_norm and "q_norm" not in names,
        "norm_place": architecture.norm_place == "both" and "attention_after" not in names,
        "embedding_norm": architecture.embedding_norm and "embedding_norm" not in names,
        "embedding_width": architecture.embedding_width > 0 and "project_in" not in names,
        "token_types": architecture.token_types > 0 and "token_types" not in names,
    }
    needs["mlp"] |= architecture.mlp == "plain" and not architecture.experts and "up" not in names
    needs["head"] = architecture.head == "masked" and "head_dense" not in names
    for key, missing in needs.items():
        if missing:
            yield key, f"the {architecture.family} family has no module for this"


def _kind(stretch: Stretch) -> tuple[bool, bool]:
    return stretch.windowed, stretch.experts


def _kinds(architecture: Architecture) -> list[tuple[bool, bool]]:
    return list(dict.fromkeys(map(_kind, architecture.layers)))


class _Transformer:
    """The operators of one architecture; holds the architecture and its family's names, nothing that changes."""

    def __init__(self, architecture: Architecture) -> None:
        self.a = architecture
        self.family: Family = FAMILIES[architecture.family]
        self.names = self.family.names

    # --- the three sorts of layers ---

    def embedding(self) -> Layer:
        a = self.a
        width = a.embedding_width or a.hidden
        operators: list[Operator] = [self._table("tokens", a.vocab, width, Axis.VOCAB)]
        if a.embedding_width:
            operators.append(self._linear("project_in", width, a.hidden))
        if a.positions == "learned":
            operators.append(self._table("positions", a.position_rows, a.hidden, Axis.NONE, POSITION_LOOKUPS))
        if a.token_types:
            operators.append(self._table("token_types", a.token_types, a.hidden, Axis.NONE))
        added = len(operators) - bool(a.embedding_width)
        if added > 1 or a.dropout:
            function = "dropout-add" if a.dropout else "add"
            operators.append(self._elementwise("embedding_add", function, reads=added, width=a.hidden, mask=a.dropout))
        if a.embedding_norm:
            operators.append(self._norm("embedding_norm"))
        return Layer("embedding", "", tuple(operators))

    def block(self, kind: tuple[bool, bool]) -> Layer:
        windowed, experts = kind
        base = "encoder" if self.a.head == "masked" else "decoder"
        name = base + "-windowed" * windowed + "-experts" * experts
        operators = (*self._attention_half(windowed), *self._mlp_half(experts))
        return Layer(name, self.names["layer"], operators)

    def head(self) -> Layer:
        a = self.a
        operators: list[Operator] = []
        if a.final_norm:
            operators.append(self._norm("final_norm"))
        width = a.embedding_width or a.hidden
        if a.embedding_width:
            operators.append(self._linear("project_out", a.hidden, width))
        if a.head == "masked":
            operators.append(self._linear("head_dense", a.hidden, a.hidden, bias=True))
            activation = self._elementwise("head_activation", a.activation, reads=1, width=a.hidden, saved=1)
            operators += [activation, self._norm("head_norm")]
        operators.append(self._vocabulary_projection(width))
        operators.append(Loss("loss", a.vocab))
        return Layer("head", "", tuple(operators))

    def _vocabulary_projection(self, width: int) -> Linear:
        a, path = self.a, self.names["head"]
        tied = f"{self.names['tokens']}.weight" if a.tied else ""
        parameters = [Parameter(f"{path}.weight", (a.vocab, width), tied)]
        if a.head == "masked":  # the bias lives beside the projection, which refers to it where it is tied
            bias = self.names["head_bias"]
            twin = bias if a.tied else ""
            parameters += [Parameter(bias, (a.vocab,)), Parameter(f"{path}.bias", (a.vocab,), twin)]
        return Linear(path, tuple(parameters), width, a.vocab, Axis.VOCAB, a.vocab)

    # --- the two halves of a block ---

    def _attention_half(self, windowed: bool) -> Iterator[Operator]:
        a = self.a
        if a.norm_place != "after":
            yield self._norm("attention_norm")
        yield from self._queries_keys_values()
        if a.qk_norm:
            yield self._norm("q_norm", width=a.head_dim, count=a.heads)
            yield self._norm("k_norm", width=a.head_dim, count=a.kv_heads)
        if a.positions == "rotary":
            rotated = (a.heads + a.kv_heads) * a.head_dim
            path = self._path("attention") + ".rotary"
            yield Elementwise(path, "rotary", 1, TOKENS.times(rotated), axis=Axis.FEATURES, units=a.kv_heads)
        yield Attention(
            self._path("attention"),
            a.heads,
            a.kv_heads,
            a.head_dim,
            causal=a.head == "causal",
            window=a.window if windowed else None,
            dropout=a.attention_dropout,
        )
        yield self._linear("out", a.heads * a.head_dim, a.hidden, a.out_bias, Axis.ROW, a.heads)
        if a.norm_place == "both":
            yield self._norm("attention_after")
        yield self._residual("attention_add")
        if a.norm_place == "after":
            yield self._norm("attention_norm")

    def _queries_keys_values(self) -> Iterator[Operator]:
        a = self.a
        sizes = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
        if "qkv" in self.names:
            yield self._linear("qkv", a.hidden, sum(sizes.values()), a.qkv_bias, Axis.COLUMN, a.kv_heads)
            return
        for role, size in sizes.items():
            units = a.heads if role == "q" else a.kv_heads
            yield self._linear(role, a.hidden, size, a.qkv_bias, Axis.COLUMN, units, saves_input=role == "q")

    def _mlp_half(self, experts: bool) -> Iterator[Operator]:
        a = self.a
        if a.norm_place != "after":
            yield replace(self._norm("mlp_norm"), saves_input=not a.parallel_residual)
        yield from self._experts() if experts else self._dense_mlp()
        if a.norm_place == "both":
            yield self._norm("mlp_after")
        yield self._residual("mlp_add")
        if a.norm_place == "after":
            yield self._norm("mlp_norm")

    def _dense_mlp(self) -> Iterator[Operator]:
        a = self.a
        gated = a.mlp == "gated"
        if gated and "gate_up" in self.names:
            yield self._linear("gate_up", a.hidden, 2 * a.ffn, a.mlp_bias, Axis.COLUMN, a.ffn)
        else:
            if gated:
                yield self._linear("gate", a.hidden, a.ffn, a.mlp_bias, Axis.COLUMN, a.ffn)
            yield self._linear("up", a.hidden, a.ffn, a.mlp_bias, Axis.COLUMN, a.ffn, saves_input=not gated)
        function = f"{a.activation}-mul" if gated else a.activation
        inputs = 2 if gated else 1
        path = f"{self._path('mlp')}.activation"
        ffn = TOKENS.times(a.ffn)
        yield Elementwise(path, function, inputs, ffn, saved_tensors=inputs, axis=Axis.FEATURES, units=a.ffn)
        yield self._linear("down", a.ffn, a.hidden, a.mlp_bias, Axis.ROW, a.ffn)

    def _experts(self) -> Iterator[Operator]:
        a, path = self.a, self._path("experts")
        yield self._linear("router", a.hidden, a.experts)
        gated = a.mlp == "gated"
        first = ("gate_up_proj", 2 * a.expert_ffn) if gated else ("up_proj", a.expert_ffn)
        parameters = (
            Parameter(f"{path}.{first[0]}", (a.experts, first[1], a.hidden)),
            Parameter(f"{path}.down_proj", (a.experts, a.hidden, a.expert_ffn)),
        )
        yield Experts(path, parameters, a.experts, a.experts_per_token, a.hidden, a.expert_ffn, gated)

    # --- single operators ---

    def _path(self, role: str) -> str:
        name = self.names.get(role, role)
        outside = ("embedding", "project", "head", "final", "tokens", "positions", "token_types")
        return name if role.startswith(outside) else f"{self.names['layer']}.{name}"

    def _linear(
        self,
        role: str,
        inputs: int,
        outputs: int,
        bias: bool = False,
        axis: Axis = Axis.NONE,
        units: int = 1,
        *,
        saves_input: bool = True,
    ) -> Linear:
        path = self._path(role)
        shape = (inputs, outputs) if self.family.transposed else (outputs, inputs)
        parameters = [Parameter(f"{path}.weight", shape)]
        if bias:
            parameters.append(Parameter(f"{path}.bias", (outputs,)))
        return Linear(path, tuple(parameters), inputs, outputs, axis, units, saves_input)

    def _table(self, role: str, rows: int, width: int, axis: Axis, looked_up: Size = TOKENS) -> Embedding:
        path = self._path(role)
        units = rows if axis is Axis.VOCAB else 1
        return Embedding(path, (Parameter(f"{path}.weight", (rows, width)),), rows, width, axis, units, looked_up)

    def _norm(self, role: str, width: int = 0, count: int = 1) -> Norm:
        width = width or self.a.hidden
        path = self._path(role)
        parameters = [Parameter(f"{path}.weight", (width,))]
        if self.a.norm_bias:
            parameters.append(Parameter(f"{path}.bias", (width,)))
        return Norm(path, tuple(parameters), self.a.norm, TOKENS.times(count * width))

    def _residual(self, role: str) -> Elementwise:
        function = "dropout-add" if self.a.dropout else "add"
        return self._elementwise(role, function, reads=2, width=self.a.hidden, mask=self.a.dropout)

    def _elementwise(
        self, role: str, function: str, *, reads: int, width: int, saved: int = 0, mask: bool = False
    ) -> Elementwise:
        return Elementwise(self._path(role), function, reads, TOKENS.times(width), saved, mask)
