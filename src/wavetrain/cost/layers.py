"""What one layer costs on one device: seconds per phase, messages, parameters and bytes, for many layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wavetrain.base.units import DType
from wavetrain.cluster.cluster import Device
from wavetrain.cluster.laws import TRAFFICS, Laws, Traffic
from wavetrain.cost.compute import Units, gemm_seconds, peak_rate, stream_seconds
from wavetrain.cost.kernels import Kernel, Phase, Sort, Split, Table, kernels, table
from wavetrain.model.model import Layer
from wavetrain.model.operator import (
    Attention,
    AttentionKernel,
    Axis,
    Elementwise,
    Experts,
    Linear,
    Loss,
    Norm,
    Operator,
    Work,
    num_parameters,
)
from wavetrain.plan.stack import AttentionImpl, Fusion, Precision, Stack

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A layer as one device runs it."""

    layer: Layer
    work: Work
    split: Split
    stack: Stack
    precision: Precision
    recomputed: frozenset[str] = frozenset()  # operators that the plan has chosen to compute again
    slices: tuple[tuple[str, int], ...] = ()  # of operators that differ from `split`


@dataclass(frozen=True)
class LayerFacts:
    """What does not depend on the device, one entry per case: sizes that a plan's memory and messages are made of."""

    table: Table
    parameters: Floats  # on one device, after tensor parallelism
    whole_parameters: Floats
    messages: Floats  # tensor-parallel collectives in a forward
    message_elements: Floats  # of all of them together
    context_elements: Floats  # keys and values on one device, exchanged by context parallelism
    output_elements: Floats  # handed to the next layer, on one device
    saved_bytes: Floats  # kept from forward to backward by one microbatch
    score_bytes: Floats  # the part of it that selective recomputation drops
    norm_elements: Floats  # normalized, on one device
    activation_elements: Floats  # of activations and rotary embeddings, on one device
    logits: Floats  # on one device
    dropped_bytes: Floats  # of saved_bytes, what the operators chosen to be computed again do not keep
    repeated_elements: Floats  # of message_elements, what they exchange again
    working_bytes: Floats  # gradients of a product's input and output, of the largest one
    tensors: Floats  # of parameters


@dataclass(frozen=True)
class LayerSeconds:
    """Kernel time and launches by phase (columns F, I, W); the forward time of some operators."""

    kernels_s: Floats
    launches: Floats
    attention_s: Floats
    chosen_s: Floats  # forward of the operators chosen to be computed again
    tail_s: Floats  # forward of a layer's last product and what follows it


def layer_facts(cases: Sequence[Case]) -> LayerFacts:
    """The facts of each case, in order."""
    made = [_kernels(case) for case in cases]
    rows = np.array([_facts(case) for case in cases], dtype=np.float64).reshape(len(cases), 15)
    return LayerFacts(table(made), *rows.T)


def _kernels(case: Case) -> list[Kernel]:
    slices = dict(case.slices)
    made = kernels(case.layer, case.work, case.split, case.stack, fp8=case.precision.fp8, slices=slices)
    if not case.recomputed:
        return made
    names = [operator.name for operator in case.layer.operators]
    return [kernel._replace(again=float(names[kernel.operator] in case.recomputed)) for kernel in made]


def layer_seconds(facts: Table, device: Device, stack: Stack, precision: Precision, laws: Laws) -> LayerSeconds:
    """Price the kernels of cases that share a device, a stack and a precision."""
    seconds = kernel_seconds(facts, device, stack, precision, laws)
    cases = facts.num_cases
    key = facts.case * 3 + facts.phase
    by_phase = np.bincount(key, seconds, cases * 3).reshape(cases, 3)
    launches = np.asarray(np.bincount(key, facts.launches, cases * 3).reshape(cases, 3), dtype=np.float64)
    with_gaps = seconds + facts.launches * laws.gap_s

    def forward(these: Floats, own: Floats) -> Floats:
        chosen = np.where((these > 0) & (facts.phase == Phase.F), own, 0.0)
        return np.asarray(np.bincount(facts.case, chosen, cases), dtype=np.float64)

    attention_s, chosen_s = (forward(these, seconds) for these in (facts.attends, facts.again))
    tail_s = forward(facts.tail, with_gaps)
    return LayerSeconds(by_phase + launches * laws.gap_s, launches, attention_s, chosen_s, tail_s)


def kernel_seconds(facts: Table, device: Device, stack: Stack, precision: Precision, laws: Laws) -> Floats:
    """Seconds of every kernel of a table by the law of its sort."""
    seconds = np.zeros(len(facts.case))
    units = Units(device.inner_half, device.vector_inner_half, tile=device.tile)
    for sort, dtype in ((Sort.PRODUCT, precision.products), (Sort.HIGH_PRODUCT, precision.compute)):
        of = facts.sort == sort
        if of.any():
            sizes = (facts.rows[of], facts.columns[of], facts.inner[of], facts.amount[of])
            seconds[of] = gemm_seconds(*sizes, _matmul(device, dtype), dtype, units)
    of = facts.sort == Sort.ATTENTION
    if of.any():
        rate = peak_rate(device, precision.compute) * attention_rate(device, stack.attention)
        slower = np.where(facts.phase[of] == Phase.F, 1.0, laws.attention_backward)
        seconds[of] = facts.amount[of] / rate * slower
    of = facts.sort == Sort.STREAM
    per_element = _stream_bytes(stack, laws)[facts.phase[of], facts.traffic[of]]
    seconds[of] = stream_seconds(facts.amount[of] * per_element, device)
    return seconds


def attention_rate(device: Device, kernel: AttentionImpl) -> float:
    """The share of peak that a fused attention kernel's forward reaches."""
    rates = device.attention
    return {
        AttentionImpl.FLASH1: rates.flash1,
        AttentionImpl.FLASH2: rates.flash2,
        AttentionImpl.TRITON: rates.triton,
        AttentionImpl.CUDNN: rates.cudnn,
    }.get(kernel, rates.flash2)


_EAGER = frozenset((Traffic.ACTIVATION, Traffic.GATED, Traffic.ROTARY))


def _stream_bytes(stack: Stack, laws: Laws) -> Floats:
    """Bytes per element by phase (F, I, W) and class; they count against the nominal memory rate."""
    eager = stack.elementwise is Fusion.EAGER
    factor = np.array([laws.eager_factor if eager and name in _EAGER else 1.0 for name in TRAFFICS])
    forward, backward = np.array(laws.forward_bytes) * factor, np.array(laws.backward_bytes) * factor
    return np.stack([forward, backward, np.zeros_like(backward)])


def _matmul(device: Device, dtype: DType) -> Device:
    """The device with the efficiency that its products have in a number format."""
    if dtype is DType.FP8 and device.fp8_efficiency is not None:
        return replace(device, matmul_efficiency=device.fp8_efficiency)
    return device


# --- facts of one case ---


def _facts(case: Case) -> tuple[float, ...]:
    layer, work, split = case.layer, case.work, case.split
    fused = not case.stack.attention.keeps_scores
    work = replace(work, attention=AttentionKernel.FUSED if fused else AttentionKernel.UNFUSED)
    elements = [_message_elements(o, work, split) for o in layer.operators]
    attention = [o for o in layer.operators if isinstance(o, Attention)]
    norms = [o for o in layer.operators if isinstance(o, Norm)]
    pointwise = [o for o in layer.operators if isinstance(o, Elementwise) and o.axis is Axis.FEATURES]
    losses = [o for o in layer.operators if isinstance(o, Loss)]
    logit_cut = split.parts if case.stack.logits_parallel else split.cp
    return (
        sum(local_parameters(o, split) for o in layer.operators),
        sum(num_parameters(o) for o in layer.operators),
        sum(1 for e in elements if e) if split.tp > 1 else 0,
        sum(elements) if split.tp > 1 else 0,
        sum(2 * work.tokens * o.kv_heads * o.head_dim / split.cp / min(split.tp, o.kv_heads) for o in attention),
        layer.operators[-1].output_elements(work) / split.whole,
        sum(saved_bytes(o, work, split) for o in layer.operators if not isinstance(o, Loss)),
        sum(_score_bytes(o, work, split) for o in attention),
        sum(o.elements.at(work) for o in norms) / split.whole,
        sum(o.elements.at(work) for o in pointwise) / split.parts,
        sum(work.tokens * o.vocab for o in losses) / logit_cut,
        dropped_bytes(case, work),
        sum(e for o, e in zip(layer.operators, elements, strict=True) if o.name in case.recomputed),
        max((_product_elements(o, work, split) for o in layer.operators if isinstance(o, Linear)), default=0.0)
        * work.bytes_per_element,
        sum(1 for o in layer.operators for p in o.parameters if not p.tied),
    )


def _product_elements(operator: Linear, work: Work, split: Split) -> float:
    """Elements that a product takes in and puts out on one device."""
    inputs = operator.inputs / (split.tp if operator.axis is Axis.ROW else 1)
    outputs = operator.outputs / (split.tp if operator.axis in (Axis.COLUMN, Axis.VOCAB) else 1)
    return operator.rows.at(work) / split.cp * (inputs + outputs)


def dropped_bytes(case: Case, work: Work) -> float:
    """Bytes that operators computed again do not keep for their backward.

    An operator computed again needs its input: kept if the operator before is not computed again, else made anew.
    """
    total, before = 0.0, False
    for operator in case.layer.operators:
        again = operator.name in case.recomputed
        if again:
            inner = _score_bytes(operator, work, case.split) if isinstance(operator, Attention) else 0.0
            total += saved_bytes(operator, work, case.split) if before else inner
        before = again
    return total


def local_parameters(operator: Operator, split: Split) -> float:
    """Parameters of an operator on one device: matrices are cut by tensor parallelism, most vectors are not."""
    cut = {Axis.COLUMN: split.tp, Axis.ROW: split.tp, Axis.VOCAB: split.tp, Axis.EXPERTS: split.tp}
    ways = min(cut.get(operator.axis, 1), operator.units if operator.axis is Axis.COLUMN else split.tp)
    whole_vectors = operator.axis is Axis.ROW
    total = 0.0
    for p in operator.parameters:
        if not p.tied:
            total += p.num_elements / (1 if whole_vectors and len(p.shape) == 1 else ways)
    return total


def saved_bytes(operator: Operator, work: Work, split: Split) -> float:
    """Bytes that one device keeps of an operator from forward to backward, for one microbatch.

    Korthikanti et al. 2022, equations 1 to 4: what lies between a column and a row cut is divided by tp; layer inputs,
    norms and residuals only with sequence parallelism; everything by context parallelism.
    """
    cut = split.parts if operator.axis in (Axis.ROW, Axis.FEATURES, Axis.HEADS) else split.whole
    if isinstance(operator, Experts):
        cut = split.parts  # each rank the tokens of its experts
    return operator.saved_bytes(work) / cut


def _score_bytes(operator: Attention, work: Work, split: Split) -> float:
    """Bytes of the score matrices that unfused attention keeps; fused attention keeps none."""
    fused = replace(work, attention=AttentionKernel.FUSED)
    statistics = 4 * work.tokens * operator.heads
    if work.attention is AttentionKernel.FUSED:
        return 0.0
    return (operator.saved_bytes(work) - operator.saved_bytes(fused) + statistics) / split.parts


def _message_elements(operator: Operator, work: Work, split: Split) -> float:
    """Elements of the collective that tensor parallelism needs behind an operator's forward.

    A row cut leaves partial sums, a vocabulary cut of an embedding too; a column cut's input gradient is the mirror
    image in the backward, so both directions are counted once here (Shoeybi et al. 2019, section 3).
    """
    summed = operator.axis is Axis.ROW or isinstance(operator, Experts)
    looked_up = operator.axis is Axis.VOCAB and not isinstance(operator, Linear | Loss)
    return operator.output_elements(work) / split.cp if summed or looked_up else 0.0
