"""The constants that ship with the package."""

import math
from dataclasses import fields
from importlib import resources

import pytest
import yaml

from wavetrain.cluster.laws import TRAFFICS, Laws, load_laws

LAWS = load_laws()
SHARES = "link_exposed network_exposed gradient_exposed tensor_exposed context_exposed".split()
SHARES += "communication_power waiting_power error_share fragmentation doubling".split()


@pytest.mark.parametrize("name", [item.name for item in fields(Laws)])
def test_every_value_is_finite_and_positive(name):
    value = getattr(LAWS, name)
    for number in value if isinstance(value, tuple) else (value,):
        assert math.isfinite(number)
        assert number > 0 or name in ("tensor_step_s", "recompute_gap_s", "head_exposed")


@pytest.mark.parametrize("name", SHARES)
def test_shares_are_below_one(name):
    assert 0 < getattr(LAWS, name) < 1


def test_the_file_holds_these_values_and_no_others():
    raw = yaml.safe_load(resources.files("wavetrain.cluster").joinpath("laws.yaml").read_text())
    assert set(raw) == {item.name for item in fields(Laws)}
    for name in ("forward_bytes", "backward_bytes"):
        assert list(raw[name]) == [traffic.value for traffic in TRAFFICS]
        assert getattr(LAWS, name) == pytest.approx(list(raw.pop(name).values()))
    assert {name: getattr(LAWS, name) for name in raw} == pytest.approx(raw)


def test_loaded_once():
    assert load_laws() is LAWS


def test_eager_kernels_move_more_than_fused_ones():
    assert LAWS.eager_factor > 1
    for fused, eager in (("norm", "norm-eager"), ("residual", "residual-eager"), ("softmax", "softmax-eager")):
        for moved in (LAWS.forward_bytes, LAWS.backward_bytes):
            by_name = dict(zip((t.value for t in TRAFFICS), moved, strict=True))
            assert by_name[eager] > by_name[fused]
