"""Orders from costs: proven optima met, any cap honoured, never worse than a fixed schedule."""

import random
from fractions import Fraction
from itertools import product

import pytest
from tests.soak import often, sample

from wavetrain.base.errors import InputError
from wavetrain.schedule import SCHEDULES, Actions, Costs, Shape, derive, evaluate, lower_bound, verify
from wavetrain.schedule.derive import as_split, slots
from wavetrain.schedule.periodic import periodic
from wavetrain.schedule.placement import bidirectional, linear, loop, snake
from wavetrain.schedule.schedules import fixed_orders

# hanayo-and-pipelines 2.2: minimum makespans for P = 4, 2 chunks, t_f = 1, t_b = 2, proven by constraint programming.
CAPS = ("3", "3.5", "4", "4.5", "5", "5.5")
OPTIMA = {
    ("snake", 4): (39, 37, 36, 36, 36, 36),
    ("loop", 4): (39, 36, 33, 33, 33, 33),
    ("snake", 8): (63, 61, 60, 59, 58, 57),
    ("loop", 8): (65, 60, 57, 57, 57, 57),
}


@pytest.mark.parametrize(("problem", "cap"), sample(product(OPTIMA, CAPS), 4))
def test_proven_optima(problem, cap):
    shape, microbatches = problem
    placement = snake(4, 1) if shape == "snake" else loop(4, 2)
    costs = Costs.uniform(8)
    found = derive(placement, microbatches, costs, split=False, cap=Fraction(cap))
    verify(found.actions, cap=Fraction(cap), microbatches=microbatches)
    optimum = OPTIMA[shape, microbatches][CAPS.index(cap)]
    assert optimum <= found.makespan <= (optimum * 1.05 if cap == "3" else optimum)
    assert found.lower_bound <= optimum


@pytest.mark.parametrize("seed", range(often(4, 2)))
def test_any_cap_gives_a_valid_order(seed):
    """A seeded sample of P <= 8, W <= 4, M <= 32 and every cap from the least; `make soak` runs all."""
    rng = random.Random(seed)
    for _ in range(6):
        P, W, M = rng.randint(2, 8), rng.randint(1, 4), rng.randint(1, 32)
        cap = Fraction(rng.randint(2 * W, 2 * W * P), 2 * W)
        split = rng.random() < 0.5
        placement = snake(P, W) if rng.random() < 0.5 else loop(P, 2 * W)
        found = derive(placement, M, Costs.uniform(2 * P * W), split=split, cap=cap, effort=0)
        verify(found.actions, cap=cap, microbatches=M)
        assert found.actions.placement == placement


def test_a_cap_below_one_microbatch_is_refused():
    with pytest.raises(InputError, match="too small"):
        derive(snake(4, 2), 4, Costs.uniform(16), split=False, cap=Fraction(3, 4))


def random_costs(rng, placement):
    stages, ranks = placement.num_stages, placement.num_ranks

    def times(low, high):
        return tuple(rng.randint(low, high) for _ in range(stages))

    links = tuple((a, b, rng.randint(0, 6)) for a in range(ranks) for b in range(ranks) if a != b)
    return Costs(times(4, 12), times(3, 16), times(2, 12), rng.randint(0, 3), links if rng.random() < 0.7 else ())


@pytest.mark.parametrize("batch", range(10))
def test_never_worse_than_any_fixed_schedule(batch):
    """Fifty random sets of costs each: unequal stages, unequal parts, a time per link."""
    rng = random.Random(batch)
    for _ in range(50):
        P = rng.randint(2, 4)
        placement = rng.choice([linear(P), loop(P, 2), snake(P, 1), snake(P, 2)])
        M = rng.randint(1, 6)
        split = rng.random() < 0.5
        costs = random_costs(rng, placement)
        found = derive(placement, M, costs, split=split, effort=20_000)
        verify(found.actions, microbatches=M)
        assert evaluate(found.actions, costs).makespan == found.makespan
        assert found.lower_bound <= found.makespan
        for name, order in fixed_orders(placement, M, costs):
            if split or not order.is_split:
                assert found.makespan <= evaluate(order, costs).makespan, name


def test_times_of_any_kind_and_size():
    """Zero durations, floats of very different sizes, fractions: an order, its bound below it."""
    rng = random.Random(7)
    for number in range(60):
        placement = rng.choice([loop(2, 2), loop(2, 3), snake(2, 1), snake(3, 1)])
        kinds = [
            lambda: rng.choice([0, 1, 2]),
            lambda: 10 ** rng.uniform(-9, 9),
            lambda: Fraction(rng.randint(1, 9), 7),
        ]
        pick = kinds[number % 3]
        costs = Costs(*(tuple(pick() for _ in range(placement.num_stages)) for _ in range(3)), transfer=pick())
        found = derive(placement, rng.randint(1, 4), costs, split=rng.random() < 0.5, effort=20_000)
        verify(found.actions)
        assert found.makespan >= found.lower_bound * (1 - 1e-12)
        assert found.gap >= 0


def test_half_the_memory_of_a_wave_costs_little_with_split_backward():
    """At 4 instead of 8 in flight, idle time stays a few percent: every microbatch goes straight through."""
    costs = Costs.uniform(16)
    found = derive(snake(8, 1), 128, costs, split=True, cap=Fraction(4), effort=0)
    verify(found.actions, cap=Fraction(4), microbatches=128)
    assert found.start == "periodic"
    assert evaluate(found.actions, costs).bubble_fraction < Fraction(4, 100)


@pytest.mark.parametrize("seed", range(3))
def test_repeating_orders_are_right_wherever_there_is_one(seed):
    rng = random.Random(seed)
    for _ in range(40):
        placement = rng.choice([linear(3), loop(3, 2), snake(4, 1), snake(2, 3)])
        costs, m, split = random_costs(rng, placement), rng.randint(1, 9), rng.random() < 0.5
        cap = Fraction(rng.randint(2, 8), 2)
        order = periodic(placement, m, costs, caps=slots(placement, m, cap), split=split)
        if order is not None:
            verify(order, cap=cap, microbatches=m)
            evaluate(order, costs)


def test_a_large_request_stays_within_its_effort():
    costs = Costs.uniform(32, f=Fraction(11, 10), i=Fraction(23, 20), w=Fraction(23, 20), transfer=Fraction(13, 100))
    found = derive(snake(8, 2), 64, costs, split=False, cap=Fraction(8), effort=100_000)
    verify(found.actions, cap=Fraction(8))
    assert found.makespan == evaluate(found.actions, costs).makespan


def test_improvement_is_repeatable():
    costs = Costs.uniform(8, f=3, i=4, w=2, transfer=1)
    twice = [derive(snake(4, 1), 6, costs, split=True, effort=200_000) for _ in range(2)]
    assert twice[0] == twice[1]


def test_measured_times_give_a_better_order_than_equal_ones():
    costs = Costs.uniform(16, f=10, i=14, w=6)
    found = derive(snake(8, 1), 16, costs, split=True, cap=Fraction(8), effort=2_000_000)
    verify(found.actions, cap=Fraction(8))
    for_equal_times, for_these = (SCHEDULES["zb-v"].order(Shape(8, 16, costs=known)) for known in (None, costs))
    assert found.makespan < evaluate(for_these, costs).makespan < evaluate(for_equal_times, costs).makespan


def test_chimera_is_among_the_fixed_schedules_of_its_placement():
    assert [name for name, _ in fixed_orders(bidirectional(4), 4, Costs.uniform(8))] == ["chimera"]
    found = derive(bidirectional(4), 4, Costs.uniform(8), split=False)
    verify(found.actions)
    assert found.makespan <= evaluate(SCHEDULES["chimera"].order(Shape(4, 4)), Costs.uniform(8)).makespan


def test_bounds_hold_for_one_microbatch_and_are_met_where_known():
    for placement in (linear(4), loop(3, 2), snake(3, 2)):
        costs = Costs.uniform(placement.num_stages, f=2, i=3, w=1, transfer=1)
        for name, order in fixed_orders(placement, 1, costs):
            found = evaluate(order, costs).makespan
            assert lower_bound(placement, 1, costs, split=order.is_split) <= found, name
    assert lower_bound(linear(4), 8, Costs.uniform(4), split=False) == 3 * 8 + 3 * 3  # 1F1B's length


def test_parting_a_backward_changes_nothing_else():
    order = SCHEDULES["1f1b"].order(Shape(3, 4))
    costs = Costs.uniform(3, f=2, i=3, w=1)
    assert evaluate(as_split(order), costs).busy == evaluate(order, costs).busy
    assert isinstance(as_split(order), Actions)
