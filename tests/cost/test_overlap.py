"""What communication shows beside compute."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.cost.overlap import exposed

times = st.floats(0, 1e3)
shares = st.floats(0, 1)


def shown(communication_s, compute_s, share):
    return float(exposed(np.array(communication_s), np.array(compute_s), share))


def test_by_hand():
    assert shown(3.0, 10.0, 0.0) == 0.0  # hidden
    assert shown(3.0, 10.0, 0.5) == 1.5
    assert shown(10.0, 3.0, 0.0) == 7.0  # what is longer shows in full
    assert shown(10.0, 3.0, 0.5) == 8.5
    assert shown(10.0, 3.0, 1.0) == 10.0  # one after the other
    assert shown(0.0, 3.0, 0.5) == 0.0
    assert shown(3.0, 0.0, 0.5) == 3.0


@given(times, times, shares)
def test_between_nothing_and_all_of_it(communication_s, compute_s, share):
    seconds = shown(communication_s, compute_s, share)
    assert max(0.0, communication_s - compute_s) <= seconds <= communication_s * (1 + 1e-12)


@given(times, times, times, shares)
def test_more_communication_never_shows_less(one_s, more_s, compute_s, share):
    assert shown(one_s + more_s, compute_s, share) >= shown(one_s, compute_s, share) * (1 - 1e-12)


@given(times, times, times, shares)
def test_less_compute_never_makes_both_together_longer(communication_s, compute_s, more_s, share):
    """A faster device may show more communication, but never more than it saves."""
    fast_s, slow_s = compute_s, compute_s + more_s
    together = (seconds + shown(communication_s, seconds, share) for seconds in (fast_s, slow_s))
    assert next(together) <= next(together) * (1 + 1e-12)


def test_arrays():
    seconds = exposed(np.array([1.0, 4.0]), np.array([2.0, 2.0]), np.array([0.5, 0.0]))
    assert seconds == pytest.approx([0.5, 2.0])
