"""Operator splitting: a linear or an embedding run as slices, one after the other, each gathered and freed by itself.

The mathematics is that of the whole operator, with one bias. What a slice holds is a part of the operator's own
parameters; `Split.pieces` says which parts make up each of them, so that a checkpoint has the unsplit names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor, nn

from wavetrain.base.errors import InputError, Problem
from wavetrain.model.operator import Axis
from wavetrain.runtime.transformer import TransposedLinear


@dataclass(frozen=True)
class Pieces:
    """Where a parameter's values are: at these paths, joined along a dimension."""

    paths: tuple[str, ...]
    dim: int = 0

    def under(self, path: str) -> Pieces:
        """The same, seen from a module that has this one at `path`."""
        return Pieces(tuple(joined(path, own) for own in self.paths), self.dim)


@dataclass(frozen=True)
class Sizes:
    """How large an operator is, and along which dimensions of its weight inputs and outputs lie."""

    inputs: int
    outputs: int
    input_dim: int
    output_dim: int

    def along(self, axis: Axis) -> int:
        return self.outputs if axis is Axis.COLUMN else self.inputs

    def dim(self, axis: Axis) -> int:
        return self.output_dim if axis is Axis.COLUMN else self.input_dim


def joined(path: str, leaf: str) -> str:
    """A path of modules and a name in the last of them; either may be empty."""
    return f"{path}.{leaf}" if path and leaf else path or leaf


def can_split(module: nn.Module) -> bool:
    """Whether this sort of module may be run in slices."""
    if isinstance(module, Split):
        return module.axis is Axis.COLUMN
    known = (nn.Linear, nn.Embedding, LinearSlice, EmbeddingSlice)
    return type(module) in known or is_transposed(module)  # a subclass may compute something else


def axis_for(module: nn.Module, slices: int) -> Axis:
    """Outputs, which leaves nothing to add, unless only the inputs can be cut evenly."""
    sizes = sizes_of(module)
    even_inputs_only = sizes.outputs % slices and sizes.inputs % slices == 0 and sizes.inputs
    return Axis.ROW if even_inputs_only or sizes.outputs < slices else Axis.COLUMN


def split(module: nn.Module, *, slices: int, axis: Axis | None = None) -> Split:
    """The module as `slices` modules that run one after the other; its parameters go over to them.

    Column slices give some of the outputs each; row slices take some of the inputs each (an embedding's inputs are its
    rows) and are added. Slices may be unequal by one where their number does not divide the dimension. What is in
    column slices already is cut finer, in place, each slice by its share.
    """
    if not can_split(module):
        legal = ("Linear", "TransposedLinear", "Conv1D", "Embedding")
        raise InputError(Problem(where=type(module).__name__, rule="can't be run in slices", legal=legal))
    if isinstance(module, Split):
        return _finer(module, slices)
    axis = axis or axis_for(module, slices)
    size = sizes_of(module).along(axis)
    if not 1 <= slices <= size:
        rule = f"a dimension of {size} can't be cut into so many"
        raise InputError(Problem(where=type(module).__name__, key="slices", value=slices, rule=rule))
    counts = [size // slices + (number < size % slices) for number in range(slices)]
    make = _embedding_slices if isinstance(module, nn.Embedding | EmbeddingSlice) else _linear_slices
    made = Split(make(module, counts, axis), _pieces(module, axis, slices), counts, axis)
    for leaf in ("weight", "bias"):
        if getattr(module, leaf, None) is not None:
            module.register_parameter(leaf, None)  # the slices have copies: nobody else should hold the whole
    return made


class Split(nn.Module):
    """An operator in slices."""

    def __init__(self, slices: Sequence[nn.Module], pieces: Mapping[str, Pieces], counts: Sequence[int], axis: Axis):
        super().__init__()
        self.slices = nn.ModuleList(slices)
        self.pieces = pieces  # by the name of a parameter of the unsplit module
        self.axis = axis
        takes_all = axis is Axis.COLUMN or isinstance(slices[0], EmbeddingSlice)
        self._counts = None if takes_all else list(counts)  # of the inputs that each slice takes

    @property
    def leaves(self) -> dict[str, nn.Module]:
        """The slices that are not cut any finer, by their paths."""
        found: dict[str, nn.Module] = {}
        for number, piece in enumerate(self.slices):
            inner = piece.leaves if isinstance(piece, Split) else {"": piece}
            found |= {joined(f"slices.{number}", path): leaf for path, leaf in inner.items()}
        return found

    def forward(self, x: Tensor) -> Tensor:
        inputs = [x] * len(self.slices) if self._counts is None else torch.split_with_sizes(x, self._counts, -1)
        if self.axis is Axis.COLUMN:
            return torch.cat([run(own) for run, own in zip(self.slices, inputs, strict=True)], -1)
        total: Tensor = self.slices[0](inputs[0])
        for run, own in zip(self.slices[1:], inputs[1:], strict=True):
            total = total + run(own)  # one partial result at a time
        return total


class LinearSlice(nn.Module):
    """Some outputs of a linear, or its share of them from some inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.transposed = transposed  # stored inputs x outputs

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t() if self.transposed else self.weight, self.bias)


class EmbeddingSlice(nn.Module):
    """Some features of an embedding, or some of its rows; a token of another row gives zeros."""

    def __init__(self, weight: Tensor, *, first: int, rows: int, padding: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.first, self.is_all = first, weight.shape[0] == rows
        self.rows, self.padding_row = rows, padding  # of the whole embedding
        inside = padding is not None and 0 <= padding - first < weight.shape[0]
        self.padding = padding - first if padding is not None and inside else None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_all:
            return F.embedding(tokens, self.weight, self.padding)
        rows = self.weight.shape[0]
        own = tokens - self.first
        weight = self.weight if rows else F.pad(self.weight, (0, 0, 0, 1))  # there must be a row to look up
        looked_up = F.embedding(own.clamp(0, max(rows - 1, 0)), weight, self.padding)
        return looked_up.masked_fill(((own < 0) | (own >= rows)).unsqueeze(-1), 0.0)


def is_transposed(module: nn.Module) -> bool:
    """Stored inputs x outputs: ours, or transformers' class of the same kind, which is not imported for this."""
    if isinstance(module, LinearSlice):
        return module.transposed
    return type(module) is TransposedLinear or type(module).__name__ == "Conv1D"


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def sizes_of(module: nn.Module) -> Sizes:
    """How an operator's weight lies."""
    rows, columns = _weight(module).shape
    if isinstance(module, nn.Embedding | EmbeddingSlice) or is_transposed(module):
        return Sizes(rows, columns, input_dim=0, output_dim=1)
    return Sizes(columns, rows, input_dim=1, output_dim=0)


def _parts(whole: Tensor, counts: Sequence[int], dim: int) -> list[Tensor]:
    parts = torch.split_with_sizes(whole.detach(), list(counts), dim)
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _linear_slices(module: nn.Module, counts: Sequence[int], axis: Axis) -> list[nn.Module]:
    weights = _parts(_weight(module), counts, sizes_of(module).dim(axis))
    bias = getattr(module, "bias", None)
    biases: list[Tensor | None] = [None] * len(counts)
    if bias is not None and axis is Axis.COLUMN:
        biases = [*_parts(bias, counts, 0)]
    elif bias is not None:
        biases[-1] = bias.detach().clone()  # once, not with every partial sum
    transposed = is_transposed(module)
    return [LinearSlice(w, b, transposed=transposed) for w, b in zip(weights, biases, strict=True)]


def _embedding_slices(module: nn.Module, counts: Sequence[int], axis: Axis) -> list[nn.Module]:
    rows, padding, base = rows_of(module)
    weights = _parts(_weight(module), counts, sizes_of(module).dim(axis))
    before = [0] * len(counts) if axis is Axis.COLUMN else [sum(counts[:number]) for number in range(len(counts))]
    firsts = [base + number for number in before]
    pairs = zip(weights, firsts, strict=True)
    return [EmbeddingSlice(weight, first=first, rows=rows, padding=padding) for weight, first in pairs]


def rows_of(module: nn.Module) -> tuple[int, int | None, int]:
    """How many rows the whole embedding has, which of them is padding, and with which this module begins."""
    if isinstance(module, EmbeddingSlice):
        return module.rows, module.padding_row, module.first
    assert isinstance(module, nn.Embedding)
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        rule = "an embedding with max_norm, scale_grad_by_freq or sparse gradients can't be cut"
        raise InputError(Problem(where="Embedding", rule=rule))
    return module.num_embeddings, module.padding_idx, 0


def _finer(whole: Split, slices: int) -> Split:
    """Each slice in slices by its share of the outputs; what is small stays one."""
    sizes = [sizes_of(piece).outputs for piece in whole.slices]
    counts = [max(1, slices * size // sum(sizes)) for size in sizes]
    counts[0] += max(0, slices - sum(counts))
    pieces: dict[str, list[str]] = {leaf: [] for leaf in whole.pieces}
    for number, (piece, count) in enumerate(zip(whole.slices, counts, strict=True)):
        if count > 1:
            whole.slices[number] = split(piece, slices=count, axis=Axis.COLUMN)
        made = whole.slices[number]
        for leaf in pieces:
            inner = made.pieces[leaf] if isinstance(made, Split) else Pieces((leaf,))
            pieces[leaf] += inner.under(f"slices.{number}").paths
    whole.pieces = {leaf: Pieces(tuple(paths), whole.pieces[leaf].dim) for leaf, paths in pieces.items()}
    return whole


def _pieces(module: nn.Module, axis: Axis, slices: int) -> dict[str, Pieces]:
    every = range(slices)
    pieces = {"weight": Pieces(tuple(f"slices.{n}.weight" for n in every), sizes_of(module).dim(axis))}
    if getattr(module, "bias", None) is not None:
        owners = every if axis is Axis.COLUMN else every[-1:]
        pieces["bias"] = Pieces(tuple(f"slices.{n}.bias" for n in owners))
    return pieces
