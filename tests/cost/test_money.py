"""What a step costs."""

import pytest

from wavetrain.cost.money import usd_per_million_tokens


def test_by_hand():
    # 8 devices at 2 dollars an hour, 1,000 tokens a second: a million tokens take 1,000 s.
    assert usd_per_million_tokens(16.0, 1000.0) == pytest.approx(16 * 1000 / 3600)


def test_in_proportion():
    once = usd_per_million_tokens(10.0, 500.0)
    assert usd_per_million_tokens(20.0, 500.0) == pytest.approx(2 * once)
    assert usd_per_million_tokens(10.0, 1000.0) == pytest.approx(once / 2)
    assert usd_per_million_tokens(0.0, 500.0) == 0.0
