"""Bytes of states and activations, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.units import DType
from wavetrain.cost.memory import Blocks, Passage, Unit, kept_bytes, state_bytes, walked_bytes, working_bytes
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
    """Only the master copy and the moments stay, all cut; parameters and gradients exist for a moment."""
    assert per_parameter(MIXED, shards=4) == [1, 0, 2]
    assert per_parameter(HALF, shards=4) == [1, 0, 2]


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


def unit(number, *, kept=0.0, shards=8, once=True):
    """A unit of so many parameters, bf16 gathered and fp32 reduced."""
    values = (2 * number, 2 * kept, 4 * number, 4 * number / shards, 4 * number / shards * once)
    return Unit(*(np.array(float(value)) for value in values))


def passage(saved=0.0, output=0.0, working=0.0, logits=0.0):
    return Passage(*(np.array(float(value)) for value in (saved, output, working, logits)))


def test_a_block_at_work_by_hand():
    """In the backward: in full and its buffer, the next one's buffer, the reduction behind: 2 + 2 + 2 + 4 bytes."""
    nothing, blocks = unit(0), np.array(8.0)
    forward, backward = working_bytes(blocks, unit(100, once=False), nothing, nothing, passage())
    assert (forward, backward) == (600, 1000)
    forward, backward = working_bytes(blocks, unit(100, kept=100, once=False), nothing, nothing, passage())
    assert (forward, backward) == (400, 600)  # its gradient, the reduction behind: 2 + 4
    _, backward = working_bytes(blocks, unit(0), nothing, nothing, passage(working=30, saved=7))
    assert backward == 30
    forward, backward = working_bytes(blocks, unit(0), nothing, nothing, passage(logits=50, working=30))
    assert (forward, backward) == (50, 50)


def test_what_is_saved_goes_as_shards_of_gradients_come():
    """At the end of the backward seven shards are there and seven blocks have given back what they saved."""
    nothing, blocks = unit(0), np.array(8.0)
    _, backward = working_bytes(blocks, unit(100), nothing, nothing, passage())
    assert backward == 1000 + 6 * 50
    _, less = working_bytes(blocks, unit(100), nothing, nothing, passage(saved=1000))
    assert less == 600


def test_a_vocabulary_may_be_the_largest_unit():
    _, backward = working_bytes(np.array(2.0), unit(1), unit(1000), unit(0), passage())
    assert backward >= 1000 * (2 + 4 + 0.5)


@given(
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 50), min_size=12, max_size=12),
)
def test_a_walk_through_equal_blocks_is_the_closed_form(blocks, kept, has_first, has_last, sizes):
    block, saved = [float(size) for size in sizes[:4]], float(sizes[4])
    unit = Unit(block[0], block[0] * kept, block[1], block[2], min(block[2], saved), block[0] * kept)
    first, last = (
        Unit(*(float(size) * there for size in (sizes[at], 0, sizes[at] * 2, sizes[at] / 2, sizes[at] / 2)))
        for at, there in ((5, has_first), (6, has_last))
    )
    passage = Passage(saved, float(sizes[7]), float(sizes[8]), float(sizes[9]) * has_last)
    closed = working_bytes(np.array(float(blocks)), unit, first, last, passage)
    column = np.array([[unit.gathered], [unit.kept], [unit.reduced], [unit.scattered]])[:, None]
    row = [np.array([value]) for value in (unit.kept, unit.shard, saved, passage.working, 0.0)]
    walked = walked_bytes(np.zeros(blocks, dtype=np.intp), Blocks(*column, *row), (first, last), passage)
    assert walked == pytest.approx([float(value) for value in closed])
