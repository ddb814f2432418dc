"""`Place`: where in a whole tensor a rank's piece of it is, however parts, slices and shards have cut it.

Every cut is along one dimension, so a piece is a product: for each dimension the index ranges that it has, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from wavetrain.runtime.cuts import Cut, Range

Place = tuple[tuple[Range, ...], ...]


def place_in_whole(
    pieces: Sequence[Tensor], number: int, dim: int, cut: Cut | None, part: int
) -> tuple[tuple[int, ...], Place]:
    """The whole's shape, and where the local tensor of one of its pieces is in it.

    `pieces` make up, joined along `dim`, what a part has of the whole; `cut` says what that is, None: all of it.
    """
    own = list(pieces[0].shape)
    if own:
        own[dim] = sum(piece.shape[dim] for piece in pieces)
    ranges = [(0, size) for size in own]
    if own:
        before = sum(piece.shape[dim] for piece in pieces[:number])
        ranges[dim] = (before, before + pieces[number].shape[dim])
    ranges = [_within(outer, inner) for outer, inner in zip(ranges, _shard_of(pieces[number]), strict=True)]
    if cut is None or not cut.ranges:
        return tuple(own), tuple((axis,) for axis in ranges)
    held = cut.ranges[part]
    place = tuple(
        tuple(_translated(held, axis)) if number == cut.dim else (axis,) for number, axis in enumerate(ranges)
    )
    return cut.shape, place


def _within(outer: Range, inner: Range) -> Range:
    return outer[0] + inner[0], outer[0] + inner[1]


def _shard_of(piece: Tensor) -> list[Range]:
    """What of a tensor is on this rank, by dimension."""
    if not isinstance(piece, DTensor):
        return [(0, size) for size in piece.shape]
    shape, offset = compute_local_shape_and_global_offset(piece.shape, piece.device_mesh, piece.placements)
    return [(first, first + size) for first, size in zip(offset, shape, strict=True)]


def _translated(held: Iterable[Range], wanted: Range) -> Iterable[Range]:
    """Indices of what a part holds, as indices of the whole."""
    at = 0
    for first, last in held:
        begin, end = max(wanted[0], at), min(wanted[1], at + last - first)
        if begin < end:
            yield first + begin - at, first + end - at
        at += last - first
