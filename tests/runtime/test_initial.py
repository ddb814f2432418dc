"""Initial values: a slice of a tensor is a tensor's slice, whatever the layout; and they are distributed as said."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.runtime import initial as module
from wavetrain.runtime.initial import BLOCK, STD, Distribution, distribution, initial

NORMAL = Distribution(std=1.0)
RECORDED = [1017249596, -1119782838, 1019513667, -1130131113, 1013169607, -1144635428]

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@st.composite
def parts(draw):
    shape = draw(shapes)
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return shape, tuple(slice(*end) for end in ends)


@given(parts(), st.integers(0, 2**70), st.sampled_from([4, 7, BLOCK]))
def test_a_part_is_a_slice_of_the_whole(case, seed, block):
    shape, part = case
    whole = initial("w", shape, seed=seed, drawn=NORMAL)
    with pytest.MonkeyPatch.context() as patch:  # blocks of any size give the same, too
        patch.setattr(module, "BLOCK", block)
        assert torch.equal(initial("w", shape, seed=seed, drawn=NORMAL, part=part), whole[part])


def test_large_tensors_are_made_of_blocks_and_any_shard_is_a_slice():
    shape = (301, 1009)
    whole = initial("w", shape, seed=5, drawn=NORMAL)
    assert whole.numel() > 4 * BLOCK
    for part in ((slice(100, 300), slice(None)), (slice(None), slice(504, 1009)), (slice(7, 8), slice(3, 4))):
        assert torch.equal(initial("w", shape, seed=5, drawn=NORMAL, part=part), whole[part])
    flat = initial("w", (301 * 1009,), seed=5, drawn=NORMAL)  # only the flat index counts
    assert torch.equal(flat, whole.flatten())


@given(parts(), st.integers(1, 50))
def test_working_memory_is_bounded(case, block):
    shape, _ = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        boxes = list(module._boxes(tuple(map(range, shape))))
    assert sum(math.prod(map(len, box)) for box in boxes) == math.prod(shape)
    assert all(math.prod(map(len, box)) <= block for box in boxes)


def test_values_are_normal_like():
    drawn = initial("w", (1_000_000,), seed=1, drawn=Distribution(std=0.02)).double() / 0.02
    assert abs(drawn.mean()) < 0.004
    assert abs(drawn.std() - 1) < 0.003
    assert abs(drawn.pow(3).mean()) < 0.01
    assert abs(drawn.pow(4).mean() - (3 - 6 / 5 / 8)) < 0.03  # of a sum of eight uniforms
    assert 4 < drawn.abs().max() < math.sqrt(24)  # the farthest that eight uniforms reach


def test_neighbours_and_rows_are_not_related():
    drawn = initial("w", (1000, 1000), seed=2, drawn=NORMAL).double()
    for lag in (1, 2, 3, 1000):
        flat = drawn.flatten()
        assert abs((flat[:-lag] * flat[lag:]).mean()) < 0.004


def test_other_names_and_seeds_give_other_values_and_no_stream_runs_into_another():
    cases = [(f"layers.{layer}.weight", seed) for layer in range(20) for seed in range(5)]
    drawn = torch.stack([initial(name, (5000,), seed=seed, drawn=NORMAL) for name, seed in cases])
    related = torch.corrcoef(drawn) - torch.eye(len(cases))
    assert related.abs().max() < 0.08
    # the same run of eight values nowhere twice: a stream that entered another one would repeat it, only shifted
    runs = torch.unique(drawn.unfold(1, 8, 1).flatten(0, 1), dim=0)
    assert len(runs) == len(cases) * (5000 - 7)


def test_the_bits_never_change():
    """Recorded: a checkpoint's seed must mean the same model for ever, on every machine."""
    drawn = initial("transformer.wte.weight", (3, 2), seed=42, drawn=Distribution(std=STD))
    assert drawn.view(torch.int32).flatten().tolist() == RECORDED


def test_against_plain_integers():
    """The same arithmetic in Python's unbounded integers."""
    mask = (1 << 64) - 1

    def bits(counter: int, key: int) -> int:
        z = (counter * 0x9E3779B97F4A7C15 + key) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = module._key(7, "w")
    words = [(bits(2 * i, key), bits(2 * i + 1, key)) for i in range(100)]
    sums = [sum((word >> shift) & 0xFFFF for word in pair for shift in (0, 16, 32, 48)) for pair in words]
    assert module._sums(torch.arange(100), key).tolist() == [total - 4 * 65535 for total in sums]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_has_the_same_values_rounded(dtype):
    single = initial("w", (50, 3), seed=1, drawn=NORMAL)
    assert torch.equal(initial("w", (50, 3), seed=1, drawn=NORMAL, dtype=dtype), single.to(dtype))


def test_constants_and_odd_shapes():
    assert initial("b", (3,), seed=1, drawn=Distribution(mean=1.0)).tolist() == [1, 1, 1]
    assert initial("b", (), seed=1, drawn=Distribution()).shape == ()
    assert initial("w", (4, 5), seed=1, drawn=NORMAL, part=(slice(2, 2), slice(None))).shape == (0, 5)
    with pytest.raises(ValueError, match="contiguous"):
        initial("w", (4,), seed=1, drawn=NORMAL, part=(slice(0, 4, 2),))


def test_rules():
    def rule(name, *shape):
        return distribution(name, shape, num_layers=8)

    assert rule("model.norm.weight", 4) == Distribution(mean=1.0)
    assert rule("transformer.h.0.ln_1.bias", 4) == rule("cls.predictions.bias", 4) == Distribution()
    assert rule("model.layers.0.mlp.down_proj.weight", 4, 4) == Distribution(std=0.02)
    for name in ("transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_proj.weight", "layers.0.mlp.down.weight"):
        assert rule(name, 4, 4) == Distribution(std=0.02 / 4)
