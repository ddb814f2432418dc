"""Fit the law of a kernel's time (`wavetrain.cost.compute`) to operator profiles; prints, writes nothing.

    python validation/fit_kernels.py GROUNDTRUTH_DIR

Reads `op_profiles.csv` (Aceso's profiles of Megatron operators, 16 bit). Rows used for matrix products: every forward
and backward time but those that end in an all-reduce where tp > 1 (attention dense and MLP-2 forward; QKV, MLP-1 and
logits backward). Backward is the input gradient only, except on the A10G (input and weight gradient). The number of
heads comes from the size of the score matrix (`activation_MiB`): the column `heads` says 48 for hidden size 6144, but
the profiled layers have 64.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wavetrain.base.units import MIB, DType
from wavetrain.cluster import load_cluster
from wavetrain.cluster.cluster import Device
from wavetrain.cost.compute import Units, gemm_seconds, stream_seconds

Array = NDArray[np.float64]
Row = dict[str, str]
Shape = tuple[float, float, float, float]  # rows, columns, inner, count

GPUS = {"A100-40GB-SXM": "a100-sxm-40gb", "A10G": "a10g", "L4": "l4", "V100-32GB-SXM2": "v100-sxm2-32gb"}
MULTIPROCESSORS = {"A100-40GB-SXM": 108, "A10G": 80, "L4": 58, "V100-32GB-SXM2": 80}
FULL_BACKWARD = "full backward"
VOCABULARY = 51200
PRODUCTS = {
    "enc-attention-qkv": "QKV",
    "enc-attention-dense": "dense",
    "enc-MLP-GEMM-1": "MLP-1",
    "enc-MLP-GEMM-2": "MLP-2",
    "enc-attention-score": "score",
    "enc-attention-context": "context",
    "gpt-post-process": "logits",
}
REDUCED = {("dense", 0), ("MLP-2", 0), ("QKV", 1), ("MLP-1", 1), ("logits", 1)}  # all-reduce inside where tp > 1
STREAMS = {
    "enc-1st-layernorm": "layernorm 1",
    "enc-2nd-layernorm": "layernorm 2",
    "final-layernorm": "final layernorm",
    "enc-post-attention-dropout": "bias-dropout-residual, attention",
    "enc-post-MLP-dropout": "bias-dropout-residual, MLP",
    "enc-MLP-gelu": "bias-GeLU",
    "enc-attention-softmax": "softmax",
    "enc-attention-dropout": "attention dropout",
}
START = {  # of the search; the first four are the law, the others belong to the profiled software
    "matmul_efficiency": 0.85,
    "inner_half": 60.0,
    "operand_share": 0.8,
    "launch_us": 5.0,
    "qkv_bytes_forward": 5.0,
    "qkv_bytes_backward": 5.0,
    "logit_bytes_forward": 35.0,
    "logit_bytes_backward": 12.0,
    "host_us": 80.0,
}
BELOW_ONE = {"matmul_efficiency", "operand_share"}
VARIANTS = {
    "smooth": {"tile": 1},
    "tile 64 (the law)": {"tile": 64},
    "tile 64 and waves": {"tile": 64, "waves": 1},
    "tile 128": {"tile": 128},
    "tile 128 and waves": {"tile": 128, "waves": 1},
    "tile 64, no K term": {"tile": 64, "flat": 1},
}


@dataclass(frozen=True)
class Sample:
    """Times of one device, with the products that each is made of."""

    measured_s: Array
    labels: list[tuple[str, int, bool]]  # operator, 0 forward or 1 backward, tp = 1
    shapes: Array  # a row per product
    owner: NDArray[np.intp]  # which time a product belongs to
    qkv_elements: Array
    logits: Array


def main(folder: Path) -> None:
    with (folder / "op_profiles.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    heads = {(r["gpu"], r["model"]): _heads(r) for r in rows if r["op"] == "enc-attention-score"}
    for row in rows:
        row["heads"] = str(heads[row["gpu"], row["model"]])
    for gpu, name in GPUS.items():
        own = [row for row in rows if row["gpu"] == gpu]
        device = load_cluster(name).device
        print_products(gpu, device, sample(own))
        print_streams(device, own)


def _heads(row: Row) -> int:
    return round(
        float(row["activation_MiB"]) * MIB / 2 / int(row["seq"]) ** 2 / int(row["microbatch"]) * int(row["tp"])
    )


# --- matrix products ---


def products_of(row: Row) -> tuple[list[Shape], list[Shape]]:
    """Products of an operator, forward and backward."""
    hidden, heads, seq, batch, tp = (int(row[key]) for key in ("hidden", "heads", "seq", "microbatch", "tp"))
    tokens, kind = seq * batch, PRODUCTS[row["op"]]
    head, count = hidden // heads, batch * heads / tp
    if kind == "score":
        return [(seq, seq, head, count)], [(seq, head, seq, count)] * 2
    if kind == "context":
        return [(seq, head, seq, count)], [(seq, seq, head, count), (seq, head, seq, count)]
    outer, inner = {
        "QKV": (3 * hidden / tp, hidden),
        "dense": (hidden, hidden / tp),
        "MLP-1": (4 * hidden / tp, hidden),
        "MLP-2": (hidden, 4 * hidden / tp),
        "logits": (VOCABULARY / tp, hidden),
    }[kind]
    backward: list[Shape] = [(tokens, inner, outer, 1)]
    if row["bwd_kind"] == FULL_BACKWARD:
        backward.append((outer, inner, tokens, 1))
    return [(tokens, outer, inner, 1)], backward


def sample(rows: list[Row]) -> Sample:
    times: list[float] = []
    labels: list[tuple[str, int, bool]] = []
    shapes: list[Shape] = []
    owner: list[int] = []
    qkv: list[float] = []
    logits: list[float] = []
    for row in rows:
        if row["op"] not in PRODUCTS:
            continue
        kind, tp, tokens = PRODUCTS[row["op"]], int(row["tp"]), int(row["seq"]) * int(row["microbatch"])
        for phase, own in enumerate(products_of(row)):
            if tp > 1 and (kind, phase) in REDUCED:
                continue
            shapes += own
            owner += [len(times)] * len(own)
            times.append(float(row["bwd_us" if phase else "fwd_us"]) * 1e-6)
            labels.append((kind, phase, tp == 1))
            qkv.append(3 * int(row["hidden"]) / tp * tokens if kind == "QKV" else 0)
            logits.append(VOCABULARY / tp * tokens if kind == "logits" else 0)
    return Sample(np.array(times), labels, np.array(shapes), np.array(owner), np.array(qkv), np.array(logits))


def predicted(values: dict[str, float], units: Units, device: Device, data: Sample) -> Array:
    """Time of each operator: its products, the copies and loss around them, and a floor of host time."""
    m, n, k, count = data.shapes.T
    best = replace(device, matmul_efficiency=values["matmul_efficiency"])
    kernel_s = gemm_seconds(m, n, k, count, best, DType.FP16, units) + values["launch_us"] * 1e-6
    backward = np.array([phase for _, phase, _ in data.labels]) == 1
    per_element = np.where(backward, values["qkv_bytes_backward"], values["qkv_bytes_forward"])
    per_logit = np.where(backward, values["logit_bytes_backward"], values["logit_bytes_forward"])
    nominal = replace(device, memory_efficiency=1.0)
    around_s = stream_seconds(data.qkv_elements * per_element + data.logits * per_logit, nominal)
    total_s = np.bincount(data.owner, kernel_s, len(data.measured_s)) + around_s
    return np.asarray(np.maximum(total_s, values["host_us"] * 1e-6))


def fit(gpu: str, device: Device, data: Sample, variant: dict[str, int]) -> tuple[dict[str, float], Array]:
    """Constants with the least mean absolute logarithmic error, and the times they predict."""

    def read(point: Array) -> tuple[dict[str, float], Units]:
        values = {
            name: float(1 / (1 + np.exp(-x)) if name in BELOW_ONE else np.exp(x))
            for name, x in zip(START, point, strict=True)
        }
        values["inner_half"] *= not variant.get("flat")
        waves = MULTIPROCESSORS[gpu] if variant.get("waves") else 0
        return values, Units(values["inner_half"], values["operand_share"], variant["tile"], waves)

    def loss(point: Array) -> float:
        values, units = read(point)
        return float(np.mean(np.abs(np.log(predicted(values, units, device, data) / data.measured_s))))

    point = np.array([np.log(x / (1 - x)) if name in BELOW_ONE else np.log(x) for name, x in START.items()])
    for step in (0.5, 0.3, 0.1):
        point = least(loss, point, step)
    values, units = read(point)
    return values, predicted(values, units, device, data)


def least(loss: Callable[[Array], float], start: Array, step: float, rounds: int = 900) -> Array:
    """The point of least loss by the simplex search of Nelder and Mead."""
    points = np.vstack([start, start + step * np.eye(len(start))])
    losses = np.array([loss(point) for point in points])
    for _ in range(rounds):
        order = np.argsort(losses)
        points, losses = points[order], losses[order]
        if losses[-1] - losses[0] < 1e-7:
            break
        centre, worst = points[:-1].mean(axis=0), points[-1]
        tries = [2 * centre - worst]
        found = [loss(tries[0])]
        if found[0] < losses[0]:
            tries.append(3 * centre - 2 * worst)
        elif found[0] >= losses[-2]:
            tries.append((centre + (worst if found[0] >= losses[-1] else tries[0])) / 2)
        found += [loss(point) for point in tries[1:]]
        pick = int(np.argmin(found))
        if found[pick] < losses[-2]:
            points[-1], losses[-1] = tries[pick], found[pick]
        else:
            points[1:] = (points[1:] + points[0]) / 2
            losses[1:] = [loss(point) for point in points[1:]]
    return np.asarray(points[np.argmin(losses)])


def print_products(gpu: str, device: Device, data: Sample) -> None:
    print(f"\n{gpu}: {len(data.measured_s)} times of matrix products")
    values, times = fit(gpu, device, data, VARIANTS["tile 64 (the law)"])
    print("  " + ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
    ratio = times / data.measured_s - 1
    print(f"  {'operator':10} forward: |error| %, mean %   backward: |error| %, mean %")
    for kind in PRODUCTS.values():
        cells = []
        for phase in (0, 1):
            own = ratio[[label[:2] == (kind, phase) for label in data.labels]]
            cells.append(f"{100 * np.abs(own).mean():18.1f} {100 * own.mean():+6.1f}")
        print(f"  {kind:10} {'  '.join(cells)}")
    for text, phase, alone in (
        ("forward, tp = 1", 0, True),
        ("backward, tp = 1", 1, True),
        ("backward, tp > 1", 1, False),
    ):
        linear = [k not in ("score", "context") and p == phase and t == alone for k, p, t in data.labels]
        print(f"  linear operators, {text}: measured over predicted, median {1 / (1 + np.median(ratio[linear])):.3f}")
    for name, variant in VARIANTS.items():
        times = fit(gpu, device, data, variant)[1]
        print(f"  mean |error|, {name:20} {100 * np.abs(times / data.measured_s - 1).mean():.2f} %")
    fixed, times = _with_catalog(gpu, device, data)
    print(f"  mean |error|, catalog efficiency {fixed:.3f}: {100 * np.abs(times / data.measured_s - 1).mean():.2f} %")


def _with_catalog(gpu: str, device: Device, data: Sample) -> tuple[float, Array]:
    """Times with the catalog's matmul efficiency in place of the fitted one, all else as fitted."""
    values, _ = fit(gpu, device, data, VARIANTS["tile 64 (the law)"])
    values["matmul_efficiency"] = device.matmul_efficiency
    units = Units(values["inner_half"], values["operand_share"], 64)
    return device.matmul_efficiency, predicted(values, units, device, data)


# --- memory-bound operators ---


def elements_of(row: Row) -> float:
    """Elements of an operator's output on one device: scores, ffn or hidden."""
    hidden, heads, seq, batch, tp = (int(row[key]) for key in ("hidden", "heads", "seq", "microbatch", "tp"))
    if row["op"] in ("enc-attention-softmax", "enc-attention-dropout"):
        return heads / tp * seq * seq * batch
    return 4 * hidden / tp * seq * batch if row["op"] == "enc-MLP-gelu" else hidden * seq * batch


def print_streams(device: Device, rows: list[Row]) -> None:
    """Per operator: time = launch + elements * bytes / nominal bandwidth, and a floor, with the error."""
    print(f"  bytes per element at {device.memory_bytes_per_s / 1e9:.0f} GB/s; added us; floor us; mean |error| %")
    for op, name in STREAMS.items():
        own = [row for row in rows if row["op"] == op]
        size = np.array([elements_of(row) for row in own])
        cells = []
        for key in ("fwd_us", "bwd_us"):
            measured_s = np.array([float(row[key]) for row in own]) * 1e-6
            cells.append(_stream_fit(size / device.memory_bytes_per_s, measured_s))
        print(f"  {name:34} forward {cells[0]}   backward {cells[1]}")


def _stream_fit(unit_s: Array, measured_s: Array) -> str:
    def times(point: Array) -> Array:
        per_element, added_us, floor_us = np.exp(point)
        return np.asarray(np.maximum(per_element * unit_s + added_us * 1e-6, floor_us * 1e-6))

    def loss(point: Array) -> float:
        return float(np.mean(np.abs(np.log(times(point) / measured_s))))

    point = np.log([np.median(measured_s / unit_s), 5.0, measured_s.min() * 1e6])
    for step in (0.3, 0.3, 0.1):
        point = least(loss, point, step)
    per_element, added_us, floor_us = np.exp(point)
    error = 100 * np.abs(times(point) / measured_s - 1).mean()
    return f"{per_element:5.1f} B {added_us:5.1f} {floor_us:5.0f} {error:5.1f}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python validation/fit_kernels.py GROUNDTRUTH_DIR")
    main(Path(sys.argv[1]))
