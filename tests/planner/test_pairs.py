"""Two ways to run blocks, so many of each as fit."""

import pytest

from wavetrain.planner.pairs import best_pair
from wavetrain.planner.problem import Option, Problem, Unit, peak, time

LEAN, FAST = Option(fixed=10, held=1), Option(fixed=1, held=5)


@pytest.mark.parametrize(("limit", "fast"), [(4, 0), (8, 1), (11, 1), (12, 2), (20, 4), (99, 4)])
def test_as_many_fast_blocks_as_fit(limit, fast):
    problem = Problem(units=(Unit(bundles=(LEAN, FAST), count=4),), limit=limit)
    found = best_pair(problem)
    assert peak(problem, found) <= limit
    assert time(problem, found) == 10**6 * (10 * (4 - fast) + fast)


def test_none_where_nothing_fits():
    assert best_pair(Problem(units=(Unit(bundles=(LEAN, FAST), count=4),), limit=3)) is None
