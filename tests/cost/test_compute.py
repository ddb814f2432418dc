"""The law of a kernel's time: what it must never do, and the numbers it was fitted to."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.cluster.cluster import Rates
from wavetrain.cost.compute import (
    Units,
    best_efficiency,
    gemm_bytes,
    gemm_seconds,
    peak_rate,
    stream_seconds,
    tiled_elements,
)

A100 = load_cluster("a100-sxm-40gb").device
A100_UNITS = Units(inner_half=179.0, operand_share=0.888)
CLOSE = 1 + 1e-12

sizes = st.integers(1, 1 << 20)
counts = st.integers(1, 4096)
formats = st.sampled_from([DType.FP32, DType.TF32, DType.BF16])
unit_kinds = st.builds(
    Units,
    inner_half=st.sampled_from([0.0, 100.0, 1000.0]),
    operand_share=st.sampled_from([0.5, 1.0]),
    tile=st.sampled_from([1, 64, 128]),
    multiprocessors=st.sampled_from([0, 80, 108]),
)


def gemm_flops(m, n, k, count):
    return 2 * m * n * k * count


def gemm_efficiency(m, n, k, count, device, dtype, units):
    """Share of the peak rate that a product reaches; 0 for one of no elements."""
    seconds = gemm_seconds(m, n, k, count, device, dtype, units)
    return gemm_flops(m, n, k, count) / peak_rate(device, dtype) / seconds if seconds > 0 else 0.0


@given(sizes, sizes, sizes, counts, formats, unit_kinds)
def test_never_beats_peak_or_bandwidth(m, n, k, count, dtype, units):
    time_s = gemm_seconds(m, n, k, count, A100, dtype, units)
    assert time_s * CLOSE >= gemm_flops(m, n, k, count) / peak_rate(A100, dtype)
    assert time_s * CLOSE >= gemm_bytes(m, n, k, count, dtype) / A100.memory_bytes_per_s
    assert 0 < gemm_efficiency(m, n, k, count, A100, dtype, units) <= best_efficiency(A100, dtype, units) * CLOSE


@given(sizes, sizes, sizes, counts, unit_kinds, st.floats(1, 100))
def test_a_better_device_is_never_slower(m, n, k, count, units, factor):
    now_s = gemm_seconds(m, n, k, count, A100, DType.BF16, units)
    for better in (
        replace(A100, peak=Rates(bf16=312e12 * factor)),
        replace(A100, memory_bytes_per_s=A100.memory_bytes_per_s * factor),
        replace(A100, matmul_efficiency=1.0),
        replace(A100, memory_efficiency=1.0),
    ):
        assert gemm_seconds(m, n, k, count, better, DType.BF16, units) <= now_s * CLOSE


@given(sizes, sizes, sizes, counts, unit_kinds, st.integers(0, 3))
def test_more_work_is_never_faster_and_twice_the_products_take_at_most_twice(m, n, k, count, units, axis):
    now_s = gemm_seconds(m, n, k, count, A100, DType.BF16, units)
    more = [m, n, k, count]
    more[axis] += 1
    assert gemm_seconds(*more, A100, DType.BF16, units) * CLOSE >= now_s
    twice_s = gemm_seconds(m, n, k, 2 * count, A100, DType.BF16, units)
    assert now_s <= twice_s * CLOSE
    assert twice_s <= 2 * now_s * CLOSE


@given(sizes, sizes, st.integers(2, 1 << 20), counts, unit_kinds, st.sampled_from([0, 1, 2]), st.data())
def test_slices_never_take_less_than_the_whole(m, n, k, count, units, axis, data):
    whole = [m, n, k, count]
    whole[axis] = max(whole[axis], 2)
    first, second = list(whole), list(whole)
    first[axis] = data.draw(st.integers(1, whole[axis] - 1))
    second[axis] = whole[axis] - first[axis]
    parts_s = gemm_seconds(*first, A100, DType.BF16, units) + gemm_seconds(*second, A100, DType.BF16, units)
    assert parts_s * CLOSE >= gemm_seconds(*whole, A100, DType.BF16, units)


@given(sizes, sizes, sizes, counts)
def test_rows_and_columns_are_alike(m, n, k, count):
    one_s = gemm_seconds(m, n, k, count, A100, DType.BF16, A100_UNITS)
    assert one_s == pytest.approx(gemm_seconds(n, m, k, count, A100, DType.BF16, A100_UNITS), rel=1e-12)


def test_arrays_broadcast_and_equal_single_calls():
    m, n = np.array([[64], [4096]]), np.array([1, 128, 4096])
    times_s = gemm_seconds(m, n, 512, 2, A100, DType.BF16, A100_UNITS)
    assert times_s.shape == (2, 3)
    for i, rows in enumerate(m[:, 0]):
        for j, columns in enumerate(n):
            assert times_s[i, j] == gemm_seconds(rows, columns, 512, 2, A100, DType.BF16, A100_UNITS)


@pytest.mark.parametrize("axis", range(4))
def test_a_product_of_nothing_is_free(axis):
    shape = [128, 128, 128, 1]
    shape[axis] = 0
    assert gemm_seconds(*shape, A100, DType.BF16, A100_UNITS) == 0
    assert gemm_efficiency(*shape, A100, DType.BF16, A100_UNITS) == 0


def test_tiles_round_up_and_waves_fill_the_device():
    assert tiled_elements(65, 64, 1, Units()) == 2 * 64 * 64
    assert tiled_elements(65, 63, 3, Units(tile=1)) == 65 * 63 * 3
    assert tiled_elements(64, 64, 109, Units(multiprocessors=108)) == 216 * 64 * 64


def test_a_long_product_reaches_the_best_efficiency():
    assert gemm_efficiency(32768, 32768, 32768, 1, A100, DType.BF16, A100_UNITS) > 0.99 * A100.matmul_efficiency


def test_vector_units_come_closer_to_their_peak_and_do_not_mind_a_short_inner_size():
    assert gemm_efficiency(8192, 8192, 8192, 1, A100, DType.FP32, A100_UNITS) == pytest.approx(0.95, rel=1e-3)
    assert gemm_efficiency(8192, 8192, 512, 1, A100, DType.FP32, A100_UNITS) > 0.94
    attained = replace(A100, matmul_efficiency=1.0)
    assert best_efficiency(attained, DType.FP32) == 1.0


def test_narrow_formats_write_16_bit_results():
    assert gemm_bytes(10, 20, 30, 2, DType.FP8) == 2 * (10 * 30 + 30 * 20 + 2 * 10 * 20)
    assert gemm_bytes(10, 20, 30, 1, DType.FP32) == 4 * (10 * 30 + 30 * 20 + 10 * 20)


def test_a_format_the_device_has_not_is_an_error_that_names_those_it_has():
    with pytest.raises(InputError, match="no unit for fp8") as caught:
        gemm_seconds(1, 1, 1, 1, A100, DType.FP8)
    assert "bf16" in str(caught.value)


@given(st.floats(0, 1e15), st.floats(1, 100))
def test_streams_follow_the_bandwidth(num_bytes, factor):
    time_s = stream_seconds(num_bytes, A100)
    assert time_s >= num_bytes / A100.memory_bytes_per_s
    faster = replace(A100, memory_bytes_per_s=A100.memory_bytes_per_s * factor)
    assert stream_seconds(num_bytes, faster) <= time_s * CLOSE
    assert stream_seconds(2 * num_bytes, A100) == pytest.approx(2 * time_s)


@pytest.mark.parametrize(
    ("shape", "measured_us"),
    [
        ((4096, 20480, 5120, 1), 3332),  # MLP-1 forward of a 13B model
        ((4096, 5120, 5120, 1), 815),  # attention dense forward
        ((4096, 5120, 20480, 1), 3056),  # MLP-1 input gradient
        ((4096, 4096, 128, 40), 1797),  # attention scores: short inner size
        ((4096, 128, 4096, 40), 1260),  # attention context: memory-bound
    ],
)
def test_measured_products_of_an_a100(shape, measured_us):
    """Aceso's operator profiles, GPT-13B, sequence 4096, microbatch 1, tp 1: products alone, not in a step."""
    alone = replace(A100, matmul_efficiency=0.869)
    assert 1e6 * gemm_seconds(*shape, alone, DType.FP16, A100_UNITS) == pytest.approx(measured_us, rel=0.12)
