"""Initial values that do not depend on the layout: any shard of any layout is a slice of the same tensor.

An element's value is a pure function of the seed, the parameter's name and the element's flat index in the whole
tensor. The random bits come from a counter-based mix in 64-bit integers (the finalizer of splitmix64: Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014); a normal-like value is the sum of eight 16-bit uniforms,
exact in integers, times one constant in float32. So every machine and device gives the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 16  # elements made at a time: the working memory is a few of these, whatever the tensor's size
STD = 0.02  # transformers' initializer_range, the default of every family here
RESIDUAL_OUTPUTS = ("attn.c_proj.weight", "mlp.c_proj.weight", "attention.out.weight", "mlp.down.weight")

_GOLDEN = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_LANES = 0x0000FFFF0000FFFF
_UNIFORMS, _LEVELS = 8, 1 << 16
_MEAN = _UNIFORMS * (_LEVELS - 1) // 2
_UNIT = 1 / math.sqrt(_UNIFORMS * (_LEVELS**2 - 1) / 12)  # makes the variance of the sum 1


@dataclass(frozen=True)
class Distribution:
    """What a parameter's values are drawn from; a std of 0 is a constant."""

    mean: float = 0.0
    std: float = 0.0


def distribution(name: str, shape: tuple[int, ...], *, num_layers: int, std: float = STD) -> Distribution:
    """The rule for a parameter, as transformers has it: norms 1, biases 0, matrices N(0, std).

    GPT-2 (and our own GPT) scale what feeds the residual stream by 1 / sqrt(2 layers).
    """
    if len(shape) < 2:
        return Distribution(mean=1.0 if name.endswith("weight") else 0.0)
    if name.endswith(RESIDUAL_OUTPUTS):
        return Distribution(std=std / math.sqrt(2 * num_layers))
    return Distribution(std=std)


def initial(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    drawn: Distribution,
    part: tuple[slice, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The initial values of a parameter of this whole `shape`, or of a `part` of it (one slice per dimension)."""
    ranges = _ranges(shape, part)
    made = torch.empty([len(r) for r in ranges], dtype=dtype, device=device)
    if drawn.std == 0:
        return made.fill_(drawn.mean)
    key = _key(seed, name)
    scale = torch.tensor(drawn.std * _UNIT, dtype=torch.float32, device=device)
    for box in _boxes(ranges):
        sums = _sums(_indices(box, shape, torch.device(device)), key)
        values = sums.to(torch.float32).mul_(scale)  # in float32 for every dtype: the same numbers, rounded once more
        if drawn.mean:
            values += drawn.mean
        inside = tuple(slice(b.start - r.start, b.stop - r.start) for b, r in zip(box, ranges, strict=True))
        made[inside] = values.to(dtype)
    return made


def _ranges(shape: tuple[int, ...], part: tuple[slice, ...] | None) -> tuple[range, ...]:
    pieces = (slice(None),) * len(shape) if part is None else part
    ranges = tuple(range(size)[piece] for size, piece in zip(shape, pieces, strict=True))
    if any(r.step != 1 for r in ranges):
        raise ValueError("a part must be contiguous in each dimension")
    return ranges


def _boxes(ranges: tuple[range, ...]) -> Iterator[tuple[range, ...]]:
    """The same elements in pieces of at most `BLOCK`."""
    count = math.prod(map(len, ranges))
    if count <= BLOCK:
        yield ranges
        return
    axis = next(axis for axis, r in enumerate(ranges) if len(r) > 1)
    whole = ranges[axis]
    step = max(1, len(whole) * BLOCK // count)
    for start in range(whole.start, whole.stop, step):
        piece = range(start, min(start + step, whole.stop))
        yield from _boxes((*ranges[:axis], piece, *ranges[axis + 1 :]))


def _indices(box: tuple[range, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Flat indices in the whole tensor of a box's elements."""
    flat = torch.zeros([1] * len(box), dtype=torch.int64, device=device)
    for axis, r in enumerate(box):
        stride = math.prod(shape[axis + 1 :])
        along = torch.arange(r.start, r.stop, dtype=torch.int64, device=device).mul_(stride)
        flat = flat + along.view([-1 if other == axis else 1 for other in range(len(box))])
    return flat


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8, person=b"wavetrain").digest()
    return int.from_bytes(digest, "little")


def _sums(indices: Tensor, key: int) -> Tensor:
    """Eight 16-bit uniforms per index, added and centred: exact integers."""
    counters = indices * 2  # two 64-bit words per element
    lanes = _pairs(_bits(counters, key))
    lanes += _pairs(_bits(counters.add_(1), key))
    return (lanes & 0xFFFFFFFF).add_(lanes >> 32).sub_(_MEAN)


def _pairs(bits: Tensor) -> Tensor:
    """The four 16-bit words of 64 bits, added two by two in 32-bit lanes, which can't overflow."""
    return (bits & _LANES).add_((bits >> 16) & _LANES)


def _bits(counters: Tensor, key: int) -> Tensor:
    """64 well-mixed bits per counter; int64 products wrap, and masks make the shifts logical."""
    z = counters.mul(_signed(_GOLDEN)).add_(_signed(key))
    for shift, factor in _MIXERS:
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
        z *= _signed(factor)
    z ^= (z >> _LAST_SHIFT) & ((1 << (64 - _LAST_SHIFT)) - 1)
    return z


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
