"""Operators: the smallest things a plan decides about, and what each costs.

Every operator states its parameters and, for one `Work` (a microbatch of a length, in a number format), its FLOPs,
the elements it puts out and the bytes it keeps for its backward. Conventions, the same everywhere:

- FLOPs are those of matrix products, 2 per multiply-add (Kaplan et al. 2020; PaLM, appendix B). Attention counts the
  whole score matrix, also where it is causal; what a kernel skips of it is the cost model's business.
- A backward takes the input gradient ("input") and the weight gradient ("weight") separately: schedules may part them.
- An operator saves its own inputs, as Korthikanti et al. 2022, section 4.1, count them; a tensor that two operators
  need is saved by the first. Per-row statistics (norm, softmax maxima of unfused attention) are left out as they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import ClassVar, TypeAlias

from wavetrain.base.units import DType


class AttentionKernel(StrEnum):
    """Whether attention keeps its score matrix (unfused) or recomputes it (fused, as flash attention does)."""

    FUSED = "fused"
    UNFUSED = "unfused"


class Axis(StrEnum):
    """How tensor parallelism may cut an operator."""

    COLUMN = "column"  # the outputs of a linear; its results stay cut
    ROW = "row"  # the inputs of a linear; its results are partial sums
    VOCAB = "vocab"  # the rows of an embedding or a vocabulary projection
    HEADS = "heads"  # attention, each rank its heads
    EXPERTS = "experts"  # whole experts of a mixture
    FEATURES = "features"  # an elementwise operator between a column and a row cut
    SEQUENCE = "sequence"  # parameters whole; activations cut along the sequence if sequence-parallel
    NONE = "none"


@dataclass(frozen=True)
class Work:
    """One microbatch as an operator sees it."""

    seq_len: int
    microbatch: int = 1
    dtype: DType = DType.BF16
    attention: AttentionKernel = AttentionKernel.FUSED

    @property
    def tokens(self) -> int:
        return self.microbatch * self.seq_len

    @property
    def bytes_per_element(self) -> float:
        return self.dtype.num_bytes


MOST_POWER = 4
MOST_FACTOR = 1e30
MOST_ELEMENTS = 10**15  # in one dimension of anything


def _check_sizes(name: str, sizes: Iterable[int], *, least: int = 1) -> None:
    if any(not least <= size <= MOST_ELEMENTS for size in sizes):
        raise ValueError(f"the sizes of {name} must be from {least} to {MOST_ELEMENTS:,}")


@dataclass(frozen=True)
class Term:
    """factor * microbatch**microbatches * seq_len**lengths."""

    factor: float
    microbatches: int
    lengths: int

    def __post_init__(self) -> None:
        if not all(0 <= power <= MOST_POWER for power in (self.microbatches, self.lengths)):
            raise ValueError(f"powers must be from 0 to {MOST_POWER}")
        if not abs(self.factor) <= MOST_FACTOR:
            raise ValueError(f"a factor must be at most {MOST_FACTOR:g}")


@dataclass(frozen=True)
class Size:
    """A count that depends on the work: a polynomial in microbatch size and sequence length."""

    terms: tuple[Term, ...]

    def at(self, work: Work) -> int:
        b, s = work.microbatch, work.seq_len
        return round(sum(float(t.factor * b**t.microbatches * s**t.lengths) for t in self.terms))

    def times(self, factor: float) -> Size:
        return Size(tuple(Term(t.factor * factor, t.microbatches, t.lengths) for t in self.terms))


TOKENS = Size((Term(1, 1, 1),))
SAMPLES = Size((Term(1, 1, 0),))
NOTHING = Size(())


@dataclass(frozen=True)
class Parameter:
    """A trained tensor under its name in the module tree; `{}` stands for the number of a repeated layer."""

    name: str
    shape: tuple[int, ...]
    tied: str = ""  # the name of the parameter this one is the same tensor as; it is counted there

    def __post_init__(self) -> None:
        _check_sizes(self.name, self.shape, least=0)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class _Operator:
    """What holds unless an operator says otherwise: no matrix product, and no dimension to slice."""

    name: str

    def __post_init__(self) -> None:
        sizes = (value for value in vars(self).values() if isinstance(value, int) and not isinstance(value, bool))
        _check_sizes(self.name, sizes)

    def forward_flops(self, work: Work) -> int:  # noqa: ARG002 - the interface of those that have products
        return 0

    def backward_flops(self, work: Work) -> tuple[int, int]:  # noqa: ARG002
        """FLOPs of the input gradient and of the weight gradient."""
        return 0, 0

    @property
    def slice_dims(self) -> tuple[int, ...]:
        """Dimensions of its weight along which operator splitting may slice it."""
        return ()


@dataclass(frozen=True)
class Linear(_Operator):
    """rows x inputs times inputs x outputs, plus a bias."""

    kind: ClassVar[str] = "linear"
    name: str
    parameters: tuple[Parameter, ...]
    inputs: int
    outputs: int
    axis: Axis = Axis.NONE
    units: int = 1  # pieces the axis may be cut into: heads, features
    saves_input: bool = True  # False where an earlier operator saved the same tensor
    rows: Size = TOKENS

    def forward_flops(self, work: Work) -> int:
        return 2 * self.rows.at(work) * self.inputs * self.outputs

    def backward_flops(self, work: Work) -> tuple[int, int]:
        return self.forward_flops(work), self.forward_flops(work)

    def output_elements(self, work: Work) -> int:
        return self.rows.at(work) * self.outputs

    def saved_bytes(self, work: Work) -> float:
        return self.rows.at(work) * self.inputs * work.bytes_per_element if self.saves_input else 0

    @property
    def slice_dims(self) -> tuple[int, ...]:
        return (self.inputs, self.outputs)


@dataclass(frozen=True)
class Embedding(_Operator):
    """A table of `rows` vectors of `width`, looked up once per token."""

    kind: ClassVar[str] = "embedding"
    name: str
    parameters: tuple[Parameter, ...]
    rows: int
    width: int
    axis: Axis = Axis.NONE
    units: int = 1
    looked_up: Size = TOKENS

    def output_elements(self, work: Work) -> int:
        return self.looked_up.at(work) * self.width

    def saved_bytes(self, work: Work) -> float:
        return self.looked_up.at(work) * 8  # the indices, 64-bit

    @property
    def slice_dims(self) -> tuple[int, ...]:
        return (self.rows, self.width)


@dataclass(frozen=True)
class Attention(_Operator):
    """softmax(Q K^T) V: `heads` queries share `kv_heads` keys and values; each position sees `window` keys at most."""

    kind: ClassVar[str] = "attention"
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None
    dropout: bool = False
    axis: Axis = Axis.HEADS
    parameters: tuple[Parameter, ...] = ()

    @property
    def units(self) -> int:
        return self.heads

    def scores(self, work: Work) -> int:
        """Entries of the score matrices of all heads."""
        keys = min(work.seq_len, self.window or work.seq_len)
        return work.tokens * keys * self.heads

    def forward_flops(self, work: Work) -> int:
        return 4 * self.scores(work) * self.head_dim

    def backward_flops(self, work: Work) -> tuple[int, int]:
        return 2 * self.forward_flops(work), 0

    def output_elements(self, work: Work) -> int:
        return work.tokens * self.heads * self.head_dim

    def saved_bytes(self, work: Work) -> float:
        qkv = work.tokens * (self.heads + 2 * self.kv_heads) * self.head_dim * work.bytes_per_element
        if work.attention is AttentionKernel.FUSED:
            return qkv + 4 * work.tokens * self.heads  # log-sum-exp in fp32
        softmax = self.scores(work) * work.bytes_per_element
        mask_and_dropped = self.scores(work) * (1 + work.bytes_per_element) if self.dropout else 0
        return qkv + softmax + mask_and_dropped


@dataclass(frozen=True)
class Norm(_Operator):
    """LayerNorm or RMSNorm over the last `width` elements."""

    kind: ClassVar[str] = "norm"
    name: str
    parameters: tuple[Parameter, ...]
    function: str  # layernorm, rmsnorm
    elements: Size  # elements normalized
    axis: Axis = Axis.SEQUENCE
    units: int = 1
    saves_input: bool = True

    def output_elements(self, work: Work) -> int:
        return self.elements.at(work)

    def saved_bytes(self, work: Work) -> float:
        return self.elements.at(work) * work.bytes_per_element if self.saves_input else 0


@dataclass(frozen=True)
class Elementwise(_Operator):
    """Anything bound by memory traffic: activations, gating, residual sums, dropout, rotary embedding."""

    kind: ClassVar[str] = "elementwise"
    name: str
    function: str  # gelu, silu-mul, add, dropout-add, rotary, ...
    reads: int  # tensors of `elements` read
    elements: Size  # elements put out
    saved_tensors: int = 0  # inputs kept that no other operator keeps
    mask: bool = False  # a byte of dropout mask per element
    axis: Axis = Axis.SEQUENCE
    units: int = 1
    parameters: tuple[Parameter, ...] = ()

    def __post_init__(self) -> None:
        _check_sizes(self.name, (self.reads, self.saved_tensors, self.units), least=0)

    def output_elements(self, work: Work) -> int:
        return self.elements.at(work)

    def saved_bytes(self, work: Work) -> float:
        return self.elements.at(work) * (self.saved_tensors * work.bytes_per_element + self.mask)


@dataclass(frozen=True)
class Experts(_Operator):
    """A mixture of `experts` MLPs of which each token visits `active`; the parameters of all, the work of some."""

    kind: ClassVar[str] = "experts"
    name: str
    parameters: tuple[Parameter, ...]
    experts: int
    active: int
    width: int
    ffn: int
    gated: bool = True
    axis: Axis = Axis.EXPERTS

    @property
    def units(self) -> int:
        return self.experts

    def forward_flops(self, work: Work) -> int:
        matrices = 3 if self.gated else 2
        return 2 * work.tokens * self.active * matrices * self.width * self.ffn

    def backward_flops(self, work: Work) -> tuple[int, int]:
        return self.forward_flops(work), self.forward_flops(work)

    def output_elements(self, work: Work) -> int:
        return work.tokens * self.width

    def saved_bytes(self, work: Work) -> float:
        hidden_tensors = 3 if self.gated else 2  # gate, up and their product; or before and after the activation
        per_token = self.active * (self.width + hidden_tensors * self.ffn)
        return work.tokens * per_token * work.bytes_per_element

    @property
    def slice_dims(self) -> tuple[int, ...]:
        return (self.experts,)


@dataclass(frozen=True)
class Loss(_Operator):
    """Cross-entropy over `vocab` classes; the logits are kept in fp32 (Korthikanti et al. 2022, section 4.3)."""

    kind: ClassVar[str] = "loss"
    name: str
    vocab: int
    axis: Axis = Axis.VOCAB
    parameters: tuple[Parameter, ...] = ()

    @property
    def units(self) -> int:
        return self.vocab

    def output_elements(self, work: Work) -> int:
        return work.tokens

    def saved_bytes(self, work: Work) -> float:
        return 4 * work.tokens * self.vocab


@dataclass(frozen=True)
class Traced(_Operator):
    """A part of a traced graph that is none of the above: its FLOPs and elements as the graph has them."""

    kind: ClassVar[str] = "traced"
    name: str
    function: str  # the graph's own names for what it does
    parameters: tuple[Parameter, ...]
    flops: Size
    elements: Size  # put out
    saved: Size  # elements of its inputs that the backward needs
    axis: Axis = Axis.NONE
    units: int = 1

    def forward_flops(self, work: Work) -> int:
        return self.flops.at(work)

    def backward_flops(self, work: Work) -> tuple[int, int]:
        flops = self.flops.at(work)
        return (flops, flops) if self.parameters else (2 * flops, 0)

    def output_elements(self, work: Work) -> int:
        return self.elements.at(work)

    def saved_bytes(self, work: Work) -> float:
        return self.saved.at(work) * work.bytes_per_element


Operator: TypeAlias = Linear | Embedding | Attention | Norm | Elementwise | Experts | Loss | Traced

OPERATORS: dict[str, type[Operator]] = {
    cls.kind: cls for cls in (Linear, Embedding, Attention, Norm, Elementwise, Experts, Loss, Traced)
}


def num_parameters(operator: Operator) -> int:
    """Elements of the parameters that are counted here (tied ones are counted where they live)."""
    return sum(p.num_elements for p in operator.parameters if not p.tied)


def num_active_parameters(operator: Operator) -> int:
    """Parameters that one token meets: of a mixture, those of the experts it visits."""
    total = num_parameters(operator)
    return total * operator.active // operator.experts if isinstance(operator, Experts) else total


def slice_counts(operator: Operator, *, most: int = 64) -> tuple[int, ...]:
    """Into how many sequential slices operator splitting may cut it: powers of two that divide a dimension."""
    counts = [2**k for k in range(most.bit_length()) if 2**k <= most]
    return tuple(k for k in counts if k == 1 or any(dim % k == 0 and dim > k for dim in operator.slice_dims))
