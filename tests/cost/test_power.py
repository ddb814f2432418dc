"""What a device draws: limits by hand, and the share of each thing it does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.cluster import device_names, load_cluster
from wavetrain.cluster.laws import load_laws
from wavetrain.cost.power import COMMUNICATING, WAITING, device_watts
from wavetrain.sim.breakdown import TERMS

LAWS = load_laws()
H100 = load_cluster("dgx-h100").device


def test_limits():
    assert device_watts(H100, {}, LAWS) == H100.idle_w
    assert device_watts(H100, {"compute": 2.0}, LAWS) == pytest.approx(H100.busy_w)
    above = H100.busy_w - H100.idle_w
    assert device_watts(H100, {"bubble": 1.0}, LAWS) == pytest.approx(H100.idle_w + LAWS.waiting_power * above)
    assert device_watts(H100, {"tensor": 1.0}, LAWS) == pytest.approx(H100.idle_w + LAWS.communication_power * above)


def test_halves():
    """Half of the time computing, half waiting: the mean of both."""
    alone = [device_watts(H100, {name: 1.0}, LAWS) for name in ("compute", "bubble")]
    assert device_watts(H100, {"compute": 3.0, "bubble": 3.0}, LAWS) == pytest.approx(sum(alone) / 2)


@given(st.dictionaries(st.sampled_from(sorted(TERMS)), st.floats(0.0, 10.0)), st.sampled_from(device_names()))
def test_between_idle_and_busy(breakdown, name):
    device = load_cluster(name).device
    watts = device_watts(device, breakdown, LAWS)
    assert device.idle_w * (1 - 1e-9) <= watts <= device.busy_w * (1 + 1e-9)


def test_waiting_draws_less_than_communicating_and_that_less_than_compute():
    assert 0 < LAWS.waiting_power < LAWS.communication_power < 1


def test_every_term_is_one_sort_of_doing():
    assert not set(WAITING) & set(COMMUNICATING)
    assert set(WAITING) | set(COMMUNICATING) | {"compute", "recompute", "optimizer"} == set(TERMS)


def test_every_term_of_a_step_draws_as_one_of_three():
    """A new term must say how it draws."""
    from wavetrain.cost.power import COMMUNICATING, WAITING
    from wavetrain.sim.breakdown import TERMS

    assert {*WAITING, *COMMUNICATING, "compute", "recompute", "optimizer"} == set(TERMS)
    assert not set(WAITING) & set(COMMUNICATING)
