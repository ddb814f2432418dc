"""What a layer launches: one record per kernel, with its shape after tensor-parallel and slice splitting.

Records carry no time. They are flat arrays, so that thousands of layers are priced in one pass of the laws in
`compute`: `Work -> kernels -> seconds`. Conventions:

- a product is (rows x inner) times (inner x columns), `amount` of them; its weight gradient has the rows as inner size;
- a memory-bound kernel is a number of elements and a class of traffic; the bytes per element of each class and phase
  are data (`laws.yaml`), because they belong to the software, not to the model;
- fused attention is FLOPs of its whole score matrix, times a half where it is causal (flash kernels skip the rest).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.laws import TRAFFICS, Traffic
from wavetrain.model.model import Layer
from wavetrain.model.operator import (
    Attention,
    Axis,
    Elementwise,
    Embedding,
    Experts,
    Linear,
    Loss,
    Norm,
    Operator,
    Traced,
    Work,
)
from wavetrain.plan.stack import AttentionImpl, Fusion, Stack


class Phase(IntEnum):
    """The part of a microbatch's work a kernel belongs to: forward, input gradient, weight gradient."""

    F = 0
    I = 1  # noqa: E741 - the letter of the action
    W = 2


class Sort(IntEnum):
    """Which law prices a kernel."""

    PRODUCT = 0  # a matrix product of the layers (may run in FP8)
    HIGH_PRODUCT = 1  # a matrix product kept in the compute format: attention, logits, router
    ATTENTION = 2  # fused attention
    STREAM = 3  # memory-bound


_TRAFFIC_INDEX = {name: number for number, name in enumerate(TRAFFICS)}


class Kernel(NamedTuple):
    """One kernel of one operator: its law, phase and size."""

    operator: int  # number in the layer
    phase: Phase
    sort: Sort
    rows: float = 0.0
    columns: float = 0.0
    inner: float = 0.0
    amount: float = 0.0  # products; elements of a stream; FLOPs of fused attention
    traffic: int = 0
    launches: float = 1.0
    attends: float = 0.0  # 1 for what selective recomputation repeats: scores, softmax, context
    again: float = 0.0  # 1 where the plan has chosen to compute this operator again
    tail: float = 0.0  # 1 from a layer's last product on, where it ends with one: no backward needs these results


@dataclass(frozen=True)
class Split:
    """How tensor and context parallelism and operator splitting cut a layer's work on one device."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1  # cuts every sequence; a position still attends to all others
    slices: int = 1

    @property
    def whole(self) -> int:
        """Ways in which activations that tensor parallelism leaves whole are cut along the sequence."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    @property
    def parts(self) -> int:
        """Ways in which activations between a column and a row cut are cut."""
        return self.cp * self.tp


@dataclass(frozen=True)
class Table:
    """Kernels of many layers as columns; `case` says which layer a row belongs to."""

    case: NDArray[np.intp]
    phase: NDArray[np.intp]
    sort: NDArray[np.intp]
    rows: NDArray[np.float64]
    columns: NDArray[np.float64]
    inner: NDArray[np.float64]
    amount: NDArray[np.float64]
    traffic: NDArray[np.intp]
    launches: NDArray[np.float64]
    attends: NDArray[np.float64]
    again: NDArray[np.float64]
    tail: NDArray[np.float64]
    num_cases: int


def table(cases: list[list[Kernel]]) -> Table:
    """The kernels of several layers, one after the other."""
    flat = [(case, *kernel) for case, kernels in enumerate(cases) for kernel in kernels]
    columns = np.array(flat, dtype=np.float64).reshape(-1, 13).T
    case, _, phase, sort = (columns[i].astype(np.intp) for i in range(4))
    return Table(
        case=case,
        phase=phase,
        sort=sort,
        rows=columns[4],
        columns=columns[5],
        inner=columns[6],
        amount=columns[7],
        traffic=columns[8].astype(np.intp),
        launches=columns[9],
        attends=columns[10],
        again=columns[11],
        tail=columns[12],
        num_cases=len(cases),
    )


def kernels(
    layer: Layer,
    work: Work,
    split: Split,
    stack: Stack,
    *,
    fp8: bool = False,
    slices: Mapping[str, int] | None = None,
) -> list[Kernel]:
    """Every kernel that a layer's forward, input gradient and weight gradient launch on one device.

    `slices` of single operators, by name, replace those of `split`.
    """
    made: list[Kernel] = []
    whole, tail = split, _tail(layer)
    for number, operator in enumerate(layer.operators):
        split = replace(whole, slices=slices[operator.name]) if slices and operator.name in slices else whole
        own = _of(operator, work, split, stack, fp8)
        made += [kernel._replace(operator=number, tail=float(number >= tail)) for kernel in own]
    return made


def _tail(layer: Layer) -> int:
    """The operator that ends a layer with a product, sums after it aside; beyond the last where none does."""
    count = len(layer.operators)
    last = next((number for number in reversed(range(count)) if not _is_sum(layer.operators[number])), count)
    return last if last < count and isinstance(layer.operators[last], Linear) else count


def _is_sum(operator: Operator) -> bool:
    """Whether its backward needs nothing of its forward."""
    return isinstance(operator, Elementwise) and not operator.saved_tensors and not operator.mask


def _of(operator: Operator, work: Work, split: Split, stack: Stack, fp8: bool) -> Iterator[Kernel]:
    match operator:
        case Linear():
            yield from _linear(operator, work, split, fp8)
        case Attention():
            yield from _attention(operator, work, split, stack)
        case Norm():
            fused = Traffic.RMS_NORM if operator.function == "rmsnorm" else Traffic.NORM
            traffic = fused if stack.norm is not Fusion.EAGER else Traffic.NORM_EAGER
            yield from _stream(traffic, operator.elements.at(work) / split.whole, eager=stack.norm is Fusion.EAGER)
        case Elementwise():
            yield from _elementwise(operator, work, split, stack)
        case Embedding():
            yield from _stream(Traffic.LOOKUP, operator.output_elements(work) / split.whole)
        case Experts():
            yield from _experts(operator, work, split, fp8)
        case Loss():
            cut = split.parts if stack.logits_parallel else split.cp
            yield from _stream(Traffic.LOGITS, work.tokens * operator.vocab / cut)
        case Traced():
            yield from _traced(operator, work)


def _stream(traffic: Traffic, elements: float, *, eager: bool = False) -> Iterator[Kernel]:
    launches = 4.0 if eager else 1.0
    for phase in (Phase.F, Phase.I):
        yield Kernel(0, phase, Sort.STREAM, amount=elements, traffic=_TRAFFIC_INDEX[traffic], launches=launches)


def _product(m: float, n: float, k: float, count: float, sort: Sort) -> Iterator[Kernel]:
    """A product and the two of its backward: the weight gradient sums over the rows."""
    yield Kernel(0, Phase.F, sort, m, n, k, count)
    yield Kernel(0, Phase.I, sort, m, k, n, count)
    yield Kernel(0, Phase.W, sort, k, n, m, count)


def _linear(operator: Linear, work: Work, split: Split, fp8: bool) -> Iterator[Kernel]:
    rows = operator.rows.at(work) / split.cp
    inputs, outputs = float(operator.inputs), float(operator.outputs)
    sort = Sort.PRODUCT if fp8 else Sort.HIGH_PRODUCT
    if operator.axis is Axis.COLUMN:
        outputs /= min(split.tp, operator.units)  # keys and values shared by several ranks are computed on each
    elif operator.axis is Axis.ROW:
        inputs /= split.tp
    elif operator.axis is Axis.VOCAB:
        outputs /= split.tp
        sort = Sort.HIGH_PRODUCT
    yield from _product(rows, outputs, inputs / split.slices, split.slices, sort)
    if sort is Sort.PRODUCT:
        yield Kernel(0, Phase.F, Sort.STREAM, amount=rows * inputs, traffic=_TRAFFIC_INDEX[Traffic.CAST])
        yield Kernel(0, Phase.I, Sort.STREAM, amount=rows * outputs, traffic=_TRAFFIC_INDEX[Traffic.CAST])


def _attention(operator: Attention, work: Work, split: Split, stack: Stack) -> Iterator[Kernel]:
    for kernel in _scores(operator, work, split, stack):
        yield kernel._replace(attends=1.0)


def _scores(operator: Attention, work: Work, split: Split, stack: Stack) -> Iterator[Kernel]:
    scores = operator.scores(work) / split.parts
    if not stack.attention.keeps_scores:
        computed = 0.5 if operator.causal and operator.window is None else 1.0
        for phase in (Phase.F, Phase.I):
            yield Kernel(0, phase, Sort.ATTENTION, amount=4 * scores * operator.head_dim * computed)
        return
    heads = work.microbatch * operator.heads / split.tp
    keys = min(work.seq_len, operator.window or work.seq_len)
    length, dim = work.seq_len / split.cp, operator.head_dim
    for m, n, k in ((length, keys, dim), (length, dim, keys)):
        yield Kernel(0, Phase.F, Sort.HIGH_PRODUCT, m, n, k, heads)
        yield Kernel(0, Phase.I, Sort.HIGH_PRODUCT, m, k, n, heads)
        yield Kernel(0, Phase.I, Sort.HIGH_PRODUCT, k, n, m, heads)
    eager = stack.attention is AttentionImpl.UNFUSED
    yield from _stream(Traffic.SOFTMAX_EAGER if eager else Traffic.SOFTMAX, scores, eager=eager)
    if operator.dropout:
        yield from _stream(Traffic.SCORE_DROPOUT, scores)


_FUNCTIONS = {"add": Traffic.RESIDUAL, "dropout-add": Traffic.DROPOUT, "rotary": Traffic.ROTARY}


def _elementwise(operator: Elementwise, work: Work, split: Split, stack: Stack) -> Iterator[Kernel]:
    cut = split.parts if operator.axis is Axis.FEATURES else split.whole
    traffic = _FUNCTIONS.get(operator.function)
    if traffic is None:
        traffic = Traffic.GATED if operator.reads > 1 else Traffic.ACTIVATION
    eager = stack.elementwise is Fusion.EAGER
    if eager and traffic in (Traffic.RESIDUAL, Traffic.DROPOUT):
        traffic = Traffic.RESIDUAL_EAGER
    yield from _stream(traffic, operator.elements.at(work) / cut, eager=eager)


def _experts(operator: Experts, work: Work, split: Split, fp8: bool) -> Iterator[Kernel]:
    here = max(1.0, operator.experts / split.tp)  # experts of this device
    rows = work.tokens / split.cp * operator.active / operator.experts
    sort = Sort.PRODUCT if fp8 else Sort.HIGH_PRODUCT
    up = operator.ffn * (2 if operator.gated else 1)
    yield from _product(rows, up, operator.width / split.slices, here * split.slices, sort)
    yield from _product(rows, operator.width, operator.ffn / split.slices, here * split.slices, sort)
    traffic = Traffic.GATED if operator.gated else Traffic.ACTIVATION
    yield from _stream(traffic, rows * here * operator.ffn)
    yield from _stream(Traffic.LOOKUP, 2 * rows * here * operator.width)  # tokens permuted to their experts and back


def _traced(operator: Traced, work: Work) -> Iterator[Kernel]:
    flops = operator.forward_flops(work)
    if flops:
        side = max(1.0, (flops / 2) ** (1 / 3))  # the shape is unknown: a cube of the same FLOPs
        phases = (Phase.F, Phase.I, Phase.W) if operator.parameters else (Phase.F, Phase.I, Phase.I)
        for phase in phases:
            yield Kernel(0, phase, Sort.HIGH_PRODUCT, side, side, side, 1.0)
    yield from _stream(Traffic.OTHER, operator.output_elements(work))
