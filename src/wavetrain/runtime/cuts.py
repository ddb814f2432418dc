"""`Cut`: which part of tensor parallelism has what of a tensor, and how the outputs of an operator are dealt out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wavetrain.model.families import FAMILIES
from wavetrain.model.model import Model
from wavetrain.model.operator import Axis, Embedding, Linear, Operator

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """What each part has of a tensor: index ranges of one dimension, one after the other; all of it if there are none.

    Ranges of several parts may be the same (keys and values that are fewer than parts), and a part may have none (the
    bias of a row operator, which part 0 adds).
    """

    shape: tuple[int, ...]  # of the whole
    dim: int = 0
    ranges: tuple[tuple[Range, ...], ...] = ()  # by part


def part_of(cut: Cut, whole: Tensor, part: int) -> Tensor:
    """What a part has of a whole tensor, as a tensor of its own."""
    if not cut.ranges:
        return whole.clone()
    held = [whole.narrow(cut.dim, first, last - first) for first, last in cut.ranges[part]]
    return torch.cat(held or [whole.narrow(cut.dim, 0, 0)], cut.dim)


def joined_parts(cut: Cut, tensors: Sequence[Tensor | None]) -> Tensor:
    """The whole tensor from those of all parts; None, or anything, for a part that has nothing of it."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not cut.ranges:
        return given[0].clone()
    whole = given[0].new_empty(cut.shape)
    for ranges, tensor in zip(cut.ranges, tensors, strict=True):
        sizes = [last - first for first, last in ranges]
        held = () if tensor is None or not sizes else torch.split_with_sizes(tensor, sizes, cut.dim)
        for (first, last), values in zip(ranges, held, strict=True):
            whole.narrow(cut.dim, first, last - first).copy_(values)
    return whole


# --- which part has what ---


@dataclass(frozen=True)
class Segment:
    """Outputs of an operator that are dealt out together: `units` of equal size, copied where parts are more."""

    size: int
    units: int
    copied: bool = False

    def range(self, part: int, parts: int) -> Range:
        width = self.size // self.units
        each = -(-self.units // parts)  # as DTensor cuts: full shares first, then what is left, then nothing
        first = part * self.units // parts if self.copied else min(self.units, part * each)
        last = first + 1 if self.copied else min(self.units, first + each)
        return first * width, last * width


def segments_of(model: Model, operator: Operator, tp: int) -> tuple[Segment, ...]:
    """The outputs of a column or vocabulary operator, or the inputs of a row operator, in order."""
    a, role = model.architecture, role_of(model, operator)
    if a is not None and role in ("k", "v", "qkv"):
        queries = Segment(a.heads * a.head_dim, a.heads)
        keys = Segment(a.kv_heads * a.head_dim, a.kv_heads, copied=a.kv_heads % tp > 0)
        return (queries, keys, keys) if role == "qkv" else (keys,)
    if a is not None and role == "gate_up":
        return (Segment(a.ffn, a.ffn),) * 2
    if isinstance(operator, Embedding):
        return (Segment(operator.rows, operator.rows),)
    assert isinstance(operator, Linear)
    size = operator.inputs if operator.axis is Axis.ROW else operator.outputs
    return (Segment(size, operator.units),)


def role_of(model: Model, operator: Operator) -> str:
    """What an operator is in its family's terms, if that makes a difference to its cut."""
    if model.architecture is None:
        return ""
    names = FAMILIES[model.architecture.family].names
    roles = {f"{names['layer']}.{names[role]}": role for role in ("k", "v", "qkv", "gate_up") if role in names}
    return roles.get(operator.name, "")


def ranges_of(segments: Iterable[Segment], tp: int) -> tuple[tuple[Range, ...], ...]:
    """Of several segments, one after the other."""
    by_part: list[list[Range]] = [[] for _ in range(tp)]
    begin = 0
    for segment in segments:
        for part, ranges in enumerate(by_part):
            first, last = segment.range(part, tp)
            ranges.append((begin + first, begin + last))
        begin += segment.size
    return tuple(map(tuple, by_part))
