"""The time of one kernel on one device: matrix products and memory-bound streams.

    compute_s = 2 * count * tiled(m, n) * (k + inner_half) / (peak * matmul_efficiency)
    traffic_s = bytes / (bandwidth * memory_efficiency * operand_share)
    gemm_s    = (compute_s ** 3 + traffic_s ** 3) ** (1/3)
    stream_s  = bytes / bandwidth

Source: fitted to the 3,526 matrix-product times without an all-reduce in Aceso's operator profiles
(`validation/fit_kernels.py`). The cubic mean in place of a maximum takes the residual on an A100 from 7.9 to 5.4 % and
moves the other devices by 0.2 points or less. Rounding to tiles of 64 and to whole waves over the multiprocessors
changes it by less than 0.3 points on any device: waves are off by default, tiles stay for ragged and small products.
Launch and host time are no part of a kernel's time: whoever runs kernels one after another adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import DType
from wavetrain.cluster.cluster import Device

Array = NDArray[np.float64]

OVERLAP = 3.0  # exponent of the mean of compute and traffic: 1 adds them, infinity hides the shorter
VECTOR_FORMATS = (DType.FP32, DType.FP64)  # computed without matrix units, which fill and drain fast enough
LEAST_OUTPUT_BYTES = 2.0  # products of narrower formats still write 16-bit results


@dataclass(frozen=True)
class Units:
    """How a device's matrix units take a product apart."""

    inner_half: float = 0.0  # inner size at which half of the best rate is reached: filling and draining a tile
    vector_inner_half: float = 0.0  # the same without matrix units
    operand_share: float = 0.87  # rate of a product's operands over that of a plain stream
    tile: int = 64  # rows and columns are rounded up to it
    multiprocessors: int = 0  # tiles are rounded up to whole waves over these; 0 does not round
    vector_efficiency: float = 0.95  # best product over peak without matrix units: fp32 and fp64


DEFAULT_UNITS = Units()


def gemm_seconds(
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    count: ArrayLike,
    device: Device,
    dtype: DType,
    units: Units = DEFAULT_UNITS,
) -> Array:
    """Time of `count` products of (m x k) and (k x n) in one kernel.

    Seconds, without launch. Law and source: this module's head. Sizes broadcast; a product of no elements is free.
    """
    rows, columns, inner, products = (np.asarray(size, dtype=np.float64) for size in (m, n, k, count))
    traffic_s = gemm_bytes(rows, columns, inner, products, dtype) / (_stream_rate(device) * units.operand_share)
    covered = tiled_elements(rows, columns, products, units)
    inner_half = units.vector_inner_half if dtype in VECTOR_FORMATS else units.inner_half
    rate = peak_rate(device, dtype) * best_efficiency(device, dtype, units)
    compute_s = 2 * covered * (inner + inner_half) / rate
    return np.where(rows * columns * inner * products > 0, _overlapped(compute_s, traffic_s), 0.0)


def stream_seconds(num_bytes: ArrayLike, device: Device) -> Array:
    """Time of memory-bound work that moves `num_bytes`, counted as at the nominal rate of the device's memory.

    Seconds, without launch. What a kernel moves in truth is less; the bytes per element of `laws.yaml` are fitted so.
    """
    return np.asarray(num_bytes, dtype=np.float64) / device.memory_bytes_per_s


def gemm_bytes(m: ArrayLike, n: ArrayLike, k: ArrayLike, count: ArrayLike, dtype: DType) -> Array:
    """Least traffic of `count` products, bytes: each operand read once, the result written once."""
    rows, columns, inner, products = (np.asarray(size, dtype=np.float64) for size in (m, n, k, count))
    read = (rows * inner + inner * columns) * dtype.num_bytes
    written = rows * columns * max(dtype.num_bytes, LEAST_OUTPUT_BYTES)
    return products * (read + written)


def tiled_elements(m: ArrayLike, n: ArrayLike, count: ArrayLike, units: Units) -> Array:
    """Elements of the results that the matrix units compute: whole tiles, and whole waves of them."""
    rows, columns, products = (np.asarray(size, dtype=np.float64) for size in (m, n, count))
    if units.tile == 1 and not units.multiprocessors:
        return rows * columns * products
    tiles = np.ceil(rows / units.tile) * np.ceil(columns / units.tile) * products
    if units.multiprocessors:
        tiles = np.ceil(tiles / units.multiprocessors) * units.multiprocessors
    return np.asarray(tiles * float(units.tile) ** 2)


def peak_rate(device: Device, dtype: DType) -> float:
    """Peak FLOP/s of a number format; an error that names the formats of the device where it has none."""
    rate = device.peak.of(dtype)
    if rate is None:
        rule = f"{device.name} has no unit for {dtype.value}"
        raise InputError(Problem(where=device.name, key="peak_tflops", rule=rule, legal=tuple(device.peak.known())))
    return rate


def best_efficiency(device: Device, dtype: DType, units: Units = DEFAULT_UNITS) -> float:
    """Share of peak that the largest products reach.

    The catalog's figure is of matrix units in 16 bit. Vector units come closer to their peak: whole fp32 layers reach
    0.93 of it on an A100 (Sailor's layer profiles, OPT-30B).
    """
    if dtype in VECTOR_FORMATS:
        return max(device.matmul_efficiency, units.vector_efficiency)
    return device.matmul_efficiency


def _stream_rate(device: Device) -> float:
    return device.memory_bytes_per_s * device.memory_efficiency


def _overlapped(first_s: Array, second_s: Array) -> Array:
    """The mean of order `OVERLAP`, scaled by the longer so that no power under- or overflows."""
    longer, shorter = np.maximum(first_s, second_s), np.minimum(first_s, second_s)
    ratio = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    return np.asarray(longer * (1 + ratio**OVERLAP) ** (1 / OVERLAP))
