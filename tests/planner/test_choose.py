"""The choice is the best there is: equal to trying everything, with a proof that holds."""

import json
import sys
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from instances import cases_of, choices_of, num_selections, problem_of

from wavetrain.planner.choose import choose, least_peak
from wavetrain.planner.leaves import to_json, verify
from wavetrain.planner.price import Weights, cheapest, cost_of, kinds_of, roughly_cheapest, within
from wavetrain.planner.problem import MILLION, Option, Problem, Run, Unit, arranged, load_of, peak, time


def check(problem, best, least):
    found = choose(problem)
    assert found.time == best
    assert verify(problem, found.certificate) == []
    if best is None:
        assert found.selection is None
        assert found.lower is None
        assert found.tightest.peak == least == peak(problem, found.tightest.selection)
    else:
        assert found.gap == 0
        assert found.lower == best == time(problem, found.selection)
        assert found.peak == peak(problem, found.selection) <= problem.limit


def small(seeds, most=20_000, **shape):
    """Problems of random size with no more than so many selections."""
    for seed in seeds:
        problem = problem_of(seed, **shape)
        if num_selections(problem) <= most:
            yield problem


def test_up_to_seven_operators_of_up_to_eight_options():
    drawn = [p for n in range(1, 8) for p in small(range(1000 * n, 1000 * n + 130), operators=n, options=8)]
    assert len(drawn) >= 500
    for seed, problem in enumerate(drawn):
        for case in cases_of(problem, seed):
            check(*case)


def test_copies_in_any_order():
    drawn = list(small(range(160), operators=2, options=3, units=2, counts=(1, 2, 3, 4), bundles=1))
    assert len(drawn) >= 100
    for problem in drawn:
        for case in cases_of(problem):
            check(*case)


@pytest.mark.parametrize("seed", range(6))
def test_twelve_operators_of_three_options(seed):
    for case in cases_of(problem_of(seed, operators=12, options=3, units=6, exactly=True, bundles=0), seed):
        check(*case)


@pytest.mark.parametrize("seed", range(12))
def test_seven_operators_of_eight_options(seed):
    for case in cases_of(problem_of(seed, operators=7, options=8, units=4, exactly=True, bundles=0), seed + 1):
        check(*case)


def test_numbers_of_real_size():
    for problem in small(range(40), operators=5, options=4, units=3, size=10**11):
        for case in cases_of(problem, 2):
            check(*case)


def test_the_same_bytes_twice():
    problem = next(cases_of(problem_of(5, operators=6, options=4, counts=(1, 2)), 2))[0]
    first, second = (json.dumps(to_json(choose(problem).certificate)) for _ in range(2))
    assert first == second


def test_no_time_at_all_still_gives_a_true_bound():
    for seed in range(30):
        for problem, best, _ in cases_of(problem_of(seed, operators=5, options=4), 2):
            found = choose(problem, time_limit_s=0.0)
            assert verify(problem, found.certificate) == []
            if found.selection is not None:
                assert found.lower <= best <= found.time
                assert found.gap == (found.time - found.lower) / max(1, found.time) or found.gap >= 0


def test_least_peak_is_the_least():
    for problem in small(range(60), operators=4, options=4, counts=(1, 1, 2)):
        *_, least = next(cases_of(problem, 0))
        assert least_peak(problem).peak == least


def test_prices_of_a_unit_equal_a_full_list():
    for seed in range(40):
        problem = problem_of(seed, operators=6, options=4, units=1, exactly=True)
        unit, weights = problem.units[0], Weights(3, 7 * MILLION, -2 * MILLION, 10**7, 3 * 10**7, 10**6, 2 * 10**7)
        priced = sorted((cost_of(load_of(problem, unit, picks), weights), picks) for picks in choices_of(unit))
        (kind,) = kinds_of(problem)
        least = cheapest([(kind, weights)])[0][0]
        assert least == priced[0][0]
        assert {cost_of(load, weights) for load in within([(kind, weights, least)])[0].values()} == {least}
        # Dominated choices may be missing; none is there that should not be, and every cost is right.
        budget = priced[len(priced) // 20][0]
        found = {(cost_of(load, weights), picks) for picks, load in within([(kind, weights, budget)])[0].items()}
        assert found <= {item for item in priced if item[0] <= budget}


def test_many_units_are_priced_as_each_by_itself():
    weights = Weights(3, 7 * MILLION, -2 * MILLION, 10**7, 3 * 10**7, 10**6, 2 * 10**7)
    drawn = (problem_of(seed, operators=12, options=4, units=3, exactly=True) for seed in range(40))
    for problem in drawn:
        together = [(kind, weights) for kind in kinds_of(problem)]
        alone = [cheapest([(kind, weights)])[0] for kind in kinds_of(problem)]
        assert cheapest(together) == alone
        assert all(low <= cost for (low, _), (cost, _) in zip(roughly_cheapest(together), alone, strict=True))
        budgets = [cost + abs(cost) // 20 for cost, _ in alone]
        asked = [(kind, weights, budget) for (kind, _), budget in zip(together, budgets, strict=True)]
        assert within(asked) == [within([each])[0] for each in asked]


def test_the_order_of_copies_has_the_lowest_peak():
    for seed in range(120):
        problem = problem_of(seed, operators=1, options=5, units=1, exactly=True, bundles=0)
        unit = replace(problem.units[0], count=5)
        problem = replace(problem, units=(unit,))
        counts = {(index,): 1 for index in range(5)}
        best = peak(problem, (arranged(problem, unit, counts.items()),))
        orders = permutations(Run(1, picks) for picks in counts)
        assert best == min(peak(problem, (order,)) for order in orders)


def test_the_time_of_a_step_by_hand():
    pick = Option(fixed=5, forward=30, backward=10, hides=4, reduction=50, held=1, saved=2, left=3, beside=4, own=5)
    problem = Problem(
        units=(Unit(forward=20, backward=16, operators=((pick,),), count=2),),
        limit=100,
        microbatches=3,
        forward_share=500_000,
        backward_share=250_000,
        reduction_share=100_000,
        fixed=7,
    )
    selection = ((Run(2, (0,)),),)
    # forward: 30 - 20 / 2 = 20 shows; backward: a quarter of 10; reduction: 100 - 0.9 * 40 = 64.
    assert time(problem, selection) == (7 + 2 * 5 + 2 * 3 * 20) * MILLION + 2 * 3 * 2_500_000 + 64 * MILLION
    assert peak(problem, selection) == 2 + (2 + 3) + 9  # held, saved by the first and left by the second, running


def test_units_of_bundles_only_and_units_of_nothing():
    packs = tuple(Option(fixed=5 - held, held=held) for held in range(5))
    problem = Problem(units=(Unit(bundles=packs, count=3), Unit()), limit=7)
    check(problem, min((15 - sum(x)) * MILLION for x in product(range(5), repeat=3) if sum(x) <= 7), 0)


@pytest.mark.parametrize("wrong", [{"limit": -1}, {"forward_share": MILLION + 1}, {"units": (Unit(count=0),)}])
def test_numbers_without_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match=r"not|least"):
        Problem(**{"units": (Unit(),), "limit": 1} | wrong)
