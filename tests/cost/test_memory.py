"""Bytes of states and activations, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.units import DType
from wavetrain.cost.memory import gathered_bytes, kept_bytes, state_bytes
from wavetrain.plan.stack import Precision

MIXED = Precision()  # bf16, gradients in fp32, Adam's 12
FP32 = Precision(compute=DType.FP32, products=DType.FP32, gradients=DType.FP32)
HALF = Precision(gradients=DType.BF16)


def per_parameter(precision, *, shards=None, ways=1):
    """Bytes of parameter, gradient and states for each of 1,000 parameters."""
    whole = 0.0 if shards else 1000.0
    parts = state_bytes(np.array(whole), np.array(1000.0 / (shards or 1) * bool(shards)), precision, np.array(ways))
    return [float(part) / 1000 for part in parts]


def test_replicated():
    assert per_parameter(MIXED) == [2, 4, 12]
    assert per_parameter(HALF) == [2, 2, 12]  # the 16 bytes of Rajbhandari et al. 2020
    assert per_parameter(FP32) == [4, 4, 8]  # the parameters are the master copy


def test_sharded_optimizer():
    """ZeRO-1: states cut; gradients in the format they are computed in, the wider sum cut too."""
    assert per_parameter(HALF, ways=8) == [2, 2, 12 / 8]
    assert per_parameter(MIXED, ways=8) == pytest.approx([2, 2 + 2 / 8, 12 / 8])
    assert per_parameter(MIXED, ways=1) == per_parameter(MIXED)


def test_fully_sharded():
    """Only the master copy, the moments and the gradients stay, all cut; parameters exist for a moment."""
    assert per_parameter(MIXED, shards=4) == [0, 1, 3]
    assert per_parameter(HALF, shards=4) == [0, 0.5, 3]


@given(st.sampled_from([MIXED, HALF, FP32]), st.integers(1, 1024), st.integers(1, 8))
def test_more_ways_never_hold_more(precision, ways, factor):
    one, more = (sum(per_parameter(precision, ways=n)) for n in (ways, ways * factor))
    assert more <= one * (1 + 1e-12)
    one, more = (sum(per_parameter(precision, shards=n)) for n in (ways, ways * factor))
    assert more <= one * (1 + 1e-12)


def test_what_recomputation_keeps():
    """Everything, all but what comes back, or the input alone."""
    saved, inputs, recomputed = np.full(3, 100.0), np.full(3, 5.0), np.array([0.0, 30.0, 100.0])
    assert kept_bytes(saved, inputs, recomputed, np.array([0, 1, 2])).tolist() == [100, 70, 5]


def test_gathered_copies():
    """Four copies of the block at work in the compute format, a slice at a time; and what is kept."""
    block, kept = np.array(10.0), np.array(0.0)
    assert gathered_bytes(block, kept, 1.0, MIXED) == 4 * 10 * 2
    assert gathered_bytes(block, kept, 4.0, MIXED) == 10 * 2
    assert gathered_bytes(block, np.array(50.0), 1.0, FP32) == (4 * 10 + 50) * 4
