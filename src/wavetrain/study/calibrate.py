"""From timed operators to a `Device` and the `Laws` of its software: constants that the simulator's laws take.

The laws are those of every other cluster (`cost/`): products by their FLOPs, streams by bytes per element, a gap before
each kernel. Slopes are fitted to relative errors, so that small and large operators count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.cluster import AttentionRates, Cluster, Device, Group, Node, Rates
from wavetrain.cluster.laws import TRAFFICS, Laws, Traffic, load_laws
from wavetrain.runtime.samples import (
    AGAIN,
    ALONE,
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTED,
    REST,
    TRAINED,
    Sample,
    Small,
    lone_case,
    smalls,
)
from wavetrain.sim.ending import rank_parameters, rank_tensors
from wavetrain.sim.gather import gather
from wavetrain.sim.predict import to_run

Floats = NDArray[np.float64]
Units = Callable[[tuple[int, ...]], float]

PHASES = (FORWARD, BACKWARD)
# Which timed operator stands for a class of traffic. Fused and eager are the same here: it is what the runtime runs,
# and it has no dropout.
STANDS_FOR = {
    Traffic.NORM: "norm",
    Traffic.NORM_EAGER: "norm",
    Traffic.RMS_NORM: "rms-norm",
    Traffic.ACTIVATION: "activation",
    Traffic.GATED: "gated",
    Traffic.RESIDUAL: "residual",
    Traffic.RESIDUAL_EAGER: "residual",
    Traffic.DROPOUT: "residual",
    Traffic.ROTARY: "rotary",
    Traffic.LOGITS: "logits",
    Traffic.LOOKUP: "lookup",
    Traffic.OTHER: "activation",
}
LEAST_BYTES = 0.01  # per element: a law's constant is above 0
LARGER_COUNT = 0.2  # power of a model's time that its relative error counts by: larger ones are trained for longer
LEAST_SHARE = 0.001  # what a cluster file takes
INNER_HALVES = (0.0, 2.0, 8.0, 32.0, 128.0, 512.0, 2048.0)  # in between, noise would choose
USUAL_INNER_HALF, PAYS = 8.0, 0.7  # another one must shrink the squares of errors to this share


@dataclass(frozen=True)
class Line:
    """seconds = start + per_unit * units; the start is found in whole models."""

    per_unit_s: float
    errors: Floats  # of each sample, relative


@dataclass(frozen=True)
class Products:
    """seconds = start + 2 * rows * columns * (inner + inner_half) / rate; the start is found in whole models."""

    rate: float
    inner_half: float
    errors: Floats


@dataclass(frozen=True)
class Calibrated:
    """What was found, and how far the samples are from it."""

    device: Device
    laws: Laws
    residuals: dict[str, float]  # by operator, the median relative error of its line


def fitted(columns: Sequence[Floats], seconds: Floats) -> tuple[Floats, Floats]:
    """The weights, none below 0, with which columns come nearest to `seconds`; and the errors. All relative."""
    table, wanted = np.stack(columns, axis=1) / seconds[:, None], np.ones_like(seconds)
    kept = list(range(len(columns)))
    while True:
        weights = np.zeros(len(columns))
        weights[kept] = np.linalg.lstsq(table[:, kept], wanted, rcond=None)[0]
        below = [number for number in kept if weights[number] < 0]
        if not below:
            return weights, np.asarray(table @ weights - 1)
        kept.remove(min(below, key=lambda number: weights[number]))


def line(units: Sequence[float], seconds: Sequence[float]) -> Line:
    x, t = np.asarray(units, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    (_, per_unit_s), errors = fitted([np.ones_like(t), x], t)
    return Line(float(per_unit_s), errors)


def calibrate_compute(
    samples: Sequence[Sample], *, name: str, title: str, memory_bytes: int, like: Device
) -> Calibrated:
    """Fit a device and the software on it; what can't be timed (watts, price) is as of the device it is `like`."""
    formats = sorted({sample.dtype for sample in samples if sample.what.startswith("gemm")})
    products = {dtype: product_law(samples, dtype) for dtype in formats}
    rates = {dtype: law.rate for dtype, law in products.items()}
    memory_rate = _memory_rate(samples)
    streams = {
        (what, phase): line(*_of(samples, f"{what}-{phase}", TRAINED, _elements))
        for what in sorted(set(STANDS_FOR.values()))
        for phase in PHASES
    }
    attention = [line(*_of(samples, f"attention-{phase}", TRAINED, _attention_flops)) for phase in PHASES]
    once = once_seconds(samples)
    share = _share(attention[0].per_unit_s, rates[TRAINED])
    device = replace(
        like,
        name=name,
        title=title,
        peak=Rates(**rates),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_rate,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        fp8_efficiency=None,
        inner_half=products.get("bf16", products[TRAINED]).inner_half,
        vector_inner_half=products[TRAINED].inner_half,
        tile=1,
        attention=AttentionRates(share, share, share, share),
    )
    laws = replace(
        runtime_laws(),
        forward_bytes=_bytes(streams, "forward", memory_rate),
        backward_bytes=_bytes(streams, "backward", memory_rate),
        eager_factor=1.0,
        attention_backward=attention[1].per_unit_s * share * rates[TRAINED],
        accumulation=line(*_of(samples, "accumulate", TRAINED, lambda sizes: sizes[0])).per_unit_s * memory_rate / 4,
        optimizer_bytes=once.parameter_s * memory_rate,
        tensor_step_s=once.tensor_s,
    )
    if once.step_s is not None:
        laws = replace(laws, step_s=once.step_s)
    residuals = dict(_residuals(products[TRAINED], streams, attention))
    return in_whole_models(Calibrated(device, laws, residuals), samples)


def _share(per_flop_s: float, rate: float) -> float:
    """Attention over products, as far as a cluster file can say it."""
    return min(1.0, max(LEAST_SHARE, 1 / (per_flop_s * rate))) if per_flop_s > 0 else 1.0


def _memory_rate(samples: Sequence[Sample]) -> float:
    """Of copies, together: on a processor in a core's own caches, else beyond them."""
    copies = [sample for sample in samples if sample.what == "copy"]
    return sum(sample.sizes[0] for sample in copies) / sum(sample.seconds for sample in copies)


def runtime_laws() -> Laws:
    """Our runtime on a processor without streams: nothing is launched ahead, each collective is waited for."""
    nothing = ("launch_s", "tensor_host_s", "recompute_host_s", "recompute_tail", "doubling", "reserve_bytes")
    shown = ("link_exposed", "network_exposed", "head_exposed", "tensor_exposed", "context_exposed")
    values = dict.fromkeys((*nothing, "buffer_bytes", "fragmentation"), 0.0) | dict.fromkeys(shown, 1.0)
    return replace(load_laws(), **values)  # type: ignore[arg-type]


def in_whole_models(found: Calibrated, samples: Sequence[Sample]) -> Calibrated:
    """Rates and gaps as they are in whole models, where caches are cold and operators are of all kinds.

    A model's time is scale x (products and attention) + streams + gap x kernels: scale and gap are fitted.
    """
    fast = replace(found.device, peak=Rates(**{name: 2 * rate for name, rate in found.device.peak.known().items()}))
    without, slow = (replace(found.laws, gap_s=gap_s) for gap_s in (0.0, 1.0))
    forward, backward, rows = smalls(samples, FORWARD), smalls(samples, BACKWARD), []
    for small in forward:
        plain_s, faster_s, gaps_s = (
            sum(small_seconds(small, device, laws))
            for device, laws in ((found.device, without), (fast, without), (found.device, slow))
        )
        products_s, kernels = 2 * (plain_s - faster_s), gaps_s - plain_s
        rows.append((products_s, plain_s - products_s, kernels, forward[small] + backward[small]))
    products_s, streams_s, kernels, seconds = np.array(rows, dtype=np.float64).T
    scale, gap_s = _scale_and_gap(products_s, streams_s, kernels, seconds)
    errors = (scale * products_s + streams_s + gap_s * kernels) / seconds - 1
    rates = {name: rate / scale for name, rate in found.device.peak.known().items()}
    residuals = found.residuals | {"whole models": _middle(errors)}
    device, laws = replace(found.device, peak=Rates(**rates)), replace(found.laws, gap_s=gap_s)
    return Calibrated(device, _computing_again(device, laws, samples), residuals)


def _computing_again(device: Device, laws: Laws, samples: Sequence[Sample]) -> Laws:
    """With what is lost per layer that is computed again: beyond another forward, over what the model takes without.

    That forward takes as many times what laws say of it as the first one did.
    """
    forward, backward = (smalls(samples, phase) for phase in PHASES)
    lost = list[float]()
    for small, seconds in smalls(samples, AGAIN).items():
        without = replace(laws, recompute_gap_s=0.0)
        said_forward_s, said_backward_s = small_seconds(small, device, without)
        said_again_s = sum(small_seconds(small, device, without, RECOMPUTED)) - said_forward_s - said_backward_s
        again_s = said_again_s * forward[small] / said_forward_s
        lost.append((seconds - forward[small] - backward[small] - again_s) / small.layers)
    return replace(laws, recompute_gap_s=max(0.0, float(np.mean(lost)))) if lost else laws


def _scale_and_gap(products_s: Floats, streams_s: Floats, kernels: Floats, seconds: Floats) -> tuple[float, float]:
    """How much longer products take, and what is lost before each kernel, so that the sums are nearest."""
    weights = seconds**LARGER_COUNT / seconds
    columns = np.stack([products_s, kernels], axis=1) * weights[:, None]
    scale, gap_s = np.linalg.lstsq(columns, (seconds - streams_s) * weights, rcond=None)[0]
    return max(float(scale), 0.1), max(float(gap_s), 0.0)


def small_seconds(small: Small, device: Device, laws: Laws, what: str = ALONE) -> tuple[float, float]:
    """What the laws say of a small model's forward and backward on one device."""
    cluster = Cluster("one", (Group(Node("one", "one", device, 1, 0.0, ()), 1),), own_laws=laws)
    _, (times,) = to_run(lone_case(what, small).plan(cluster))
    return times.f, times.recompute + times.i + times.w


def product_law(samples: Sequence[Sample], dtype: str) -> Products:
    """Of linear layers, forward and backward together: with fixed weights, only their inputs have gradients.

    A chain has layers of width x outputs and back again, so sizes of results are means over both.
    """
    rows = []
    for sample in samples:
        if sample.dtype == dtype and sample.what.startswith("gemm"):
            tokens, outputs, width = sample.sizes
            volume, result, weights = tokens * outputs * width, tokens * (outputs + width) / 2, outputs * width
            learns = sample.what == "gemm-backward"
            rows.append((1 + learns, 2 * volume * (1 + learns), 2 * (result + weights * learns), sample.seconds))
    kernels, flops, results, seconds = np.array(rows, dtype=np.float64).T
    tried = []
    for inner_half in INNER_HALVES:
        (_, per_flop_s), errors = fitted([kernels, flops + inner_half * results], seconds)
        squares = float(np.sum(errors**2)) * (PAYS if inner_half == USUAL_INNER_HALF else 1.0)
        tried.append((squares, float(per_flop_s), inner_half, errors))
    _, per_flop_s, inner_half, errors = min(tried, key=lambda one: one[0])
    if per_flop_s <= 0:  # noise hid what products take: none is faster than the fastest that was timed
        per_flop_s = float(np.min(seconds / flops))
    return Products(1 / per_flop_s, inner_half, errors)


@dataclass(frozen=True)
class Once:
    """seconds = step + parameter x parameters + tensor x tensors: what a step takes beside its actions."""

    parameter_s: float
    tensor_s: float
    step_s: float | None  # None: no step was timed


def once_seconds(samples: Sequence[Sample]) -> Once:
    """Of optimizers, by themselves or in whole steps, and of what such a step takes beside: apart, since only the
    latter, which is less, has a part that is always the same."""
    rows = [(*sample.sizes, sample.seconds) for sample in samples if sample.what == OPTIMIZER]
    rows += [(*held(small), seconds) for small, seconds in smalls(samples, OPTIMIZER).items()]
    *columns, seconds = np.array(rows, dtype=np.float64).T
    parameter_s, tensor_s = map(float, fitted(columns, seconds)[0])
    beside = [(*held(small), 1.0, seconds) for small, seconds in smalls(samples, REST).items()]
    if not beside:
        return Once(parameter_s, tensor_s, None)
    *columns, seconds = np.array(beside, dtype=np.float64).T
    more_parameter_s, more_tensor_s, step_s = map(float, fitted(columns, seconds)[0])
    return Once(parameter_s + more_parameter_s, tensor_s + more_tensor_s, step_s)


def held(small: Small) -> tuple[float, float]:
    """Parameters and tensors of a model, as the law of the optimizer counts them."""
    batch = gather([lone_case(ALONE, small).plan()])
    return float(rank_parameters(batch)[0]), float(rank_tensors(batch)[0])


def _bytes(streams: Mapping[tuple[str, str], Line], phase: str, memory_rate: float) -> tuple[float, ...]:
    usual: tuple[float, ...] = getattr(load_laws(), f"{phase}_bytes")
    found = list(usual)
    for number, traffic in enumerate(TRAFFICS):
        if traffic in STANDS_FOR:
            found[number] = max(LEAST_BYTES, streams[STANDS_FOR[traffic], phase].per_unit_s * memory_rate)
    return tuple(found)


def _residuals(
    products: Products, streams: Mapping[tuple[str, str], Line], attention: Sequence[Line]
) -> Iterable[tuple[str, float]]:
    """The median error of each law."""
    yield "products", _middle(products.errors)
    for (what, phase), one in streams.items():
        yield f"{what} {phase}", _middle(one.errors)
    for phase, one in zip(PHASES, attention, strict=True):
        yield f"attention {phase}", _middle(one.errors)


def _middle(errors: Floats) -> float:
    return float(np.median(np.abs(errors)))


# --- samples as units and seconds ---


def _of(samples: Sequence[Sample], what: str, dtype: str, units: Units) -> tuple[list[float], list[float]]:
    chosen = [sample for sample in samples if (sample.what, sample.dtype) == (what, dtype)]
    return [units(sample.sizes) for sample in chosen], [sample.seconds for sample in chosen]


def _elements(sizes: tuple[int, ...]) -> float:
    return float(np.prod(sizes))


def _attention_flops(sizes: tuple[int, ...]) -> float:
    """Of the half that a causal kernel computes."""
    batch, heads, length, dim = sizes
    return 4 * batch * heads * length * length * dim / 2
