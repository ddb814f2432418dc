"""Marginal returns, knees and crossovers: laws with a known answer, and series that are not as they should be."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from made import record, records

from wavetrain.study.scaling.returns import Series, best, crossovers, knee, marginal, series

DOUBLINGS = [8 * 2**power for power in range(12)]


def line(rates, **more):
    (found,) = series(records(rates, **more))
    return found


def shares(found):
    return [step.share for step in found]


# --- series ---


def test_series_are_sorted_and_kept_apart():
    given_ = [record(16, 2.0), record(8, 1.0), record(8, 3.0, strategy="tp 2"), record(32), record(8, 1.0, node="o")]
    found = series(given_)
    assert [(one.setting.node, one.strategy) for one in found] == [("n", "fsdp"), ("n", "tp 2"), ("o", "fsdp")]
    assert [one.devices for one in found[0].records] == [8, 16]
    assert [one.devices for one in found[0].missing] == [32]


@pytest.mark.parametrize(
    "other",
    [{"model": "x"}, {"seq_len": 1}, {"node": "x"}, {"strategy": "x"}, {"objective": "cost"}, {"batch": "1 in all"}],
)
def test_what_differs_in_anything_else_is_another_series(other):
    assert len(series([record(8, 1.0), record(16, 1.0, **other)])) == 2


def test_a_point_that_is_there_twice_counts_once():
    (found,) = series([record(8, 1.0), record(8, 2.0), record(16, 3.0)])
    assert [one.tokens_per_s for one in found.records] == [1.0, 3.0]


def test_no_records_are_no_series():
    assert series([]) == ()
    assert crossovers([]) == ()
    assert best([]) == ()


# --- marginal returns ---


def test_a_step_is_measured_by_the_smallest_size():
    first, second = marginal(line({8: 80.0, 16: 140.0, 64: 260.0}))
    assert (first.before, first.after, second.before, second.after) == (8, 16, 16, 64)
    assert first.tokens_per_s == pytest.approx(60 / 8)
    assert first.share == pytest.approx(0.75)  # of 10 tokens/s per device
    assert second.share == pytest.approx(120 / 48 / 10)


def test_per_watt_and_per_dollar():
    given_ = [record(8, 80.0, watts=500.0), record(16, 140.0, watts=400.0)]
    (step,) = marginal(series(given_)[0])
    assert step.tokens_per_joule == pytest.approx(60 / 2400)  # 6.4 kW after 4 kW
    assert step.joule_share == pytest.approx(60 / 2400 / (80 / 4000))
    assert step.tokens_per_usd == pytest.approx(60 / (16 / 3600))  # 16 dollars per hour more
    assert step.usd_share == pytest.approx(step.share)  # all devices cost the same


def test_devices_that_draw_no_more_have_no_price_in_watts():
    given_ = [record(8, 80.0, watts=500.0), record(16, 90.0, watts=250.0), record(32, 100.0)]
    steps = marginal(series(given_)[0])
    assert [step.tokens_per_joule for step in steps] == [None, None]
    assert [step.joule_share for step in steps] == [None, None]
    assert all(step.usd_share is not None for step in steps)


def test_with_failures():
    given_ = [record(8, 80.0, good=1.0), record(16, 160.0, good=0.75)]
    (step,) = marginal(series(given_)[0], failures=True)
    assert step.tokens_per_s == pytest.approx(40 / 8)
    assert step.share == pytest.approx(0.5)
    assert marginal(series(given_)[0])[0].share == pytest.approx(1.0)
    assert marginal(line({8: 80.0, 16: 160.0}), failures=True) == ()


def test_failures_that_leave_nothing_are_a_loss_and_no_share_of_nothing():
    given_ = [record(8, 80.0, good=0.0), record(16, 160.0, good=0.5), record(32, 320.0, good=0.0)]
    (step,) = marginal(series(given_)[0], failures=True)
    assert (step.before, step.after, step.share) == (16, 32, pytest.approx(-1.0))


def test_a_scale_where_nothing_fits_is_stepped_over():
    (step,) = marginal(series([record(8, 80.0), record(16), record(32, 240.0)])[0])
    assert (step.before, step.after, step.share) == (8, 32, pytest.approx(160 / 24 / 10))


@pytest.mark.parametrize("given_", [[record(8, 1.0)], [record(8)], [record(8), record(16, 1.0)]])
def test_one_point_has_no_steps_and_no_knee(given_):
    (found,) = series(given_)
    assert marginal(found) == ()
    assert knee(found, 0.5) is None


# --- the knee ---


def saturating(b, devices):
    return {n: 100.0 * n / (1 + b * n) for n in devices}


def true_knee(b, first, stop):
    """Where 1 / (1 + b n)^2 falls to `stop` of 1 / (1 + b first)."""
    return (math.sqrt((1 + b * first) / stop) - 1) / b


@given(st.floats(-9, -3), st.floats(0.1, 0.8))
def test_a_law_has_its_knee(power, stop):
    b = 2.0**power
    at = true_knee(b, 8, stop)
    found = knee(line(saturating(b, DOUBLINGS)), stop)
    if 2 * DOUBLINGS[0] < at < DOUBLINGS[-3]:
        assert found.devices == pytest.approx(at, rel=0.1)
        assert found.before / math.sqrt(2) <= found.devices <= found.after / math.sqrt(2)


@pytest.mark.parametrize("b", [1 / 50, 1 / 300])
def test_finer_series_come_nearer(b):
    errors = []
    for parts in (1, 2, 4, 8):
        grid = [round(8 * 1024 * 2 ** (k / parts)) for k in range(-10 * parts, parts + 1)]
        found = knee(line(saturating(b, grid)), 0.5)
        errors.append(abs(found.devices / true_knee(b, 8, 0.5) - 1))
    assert errors[0] < 0.06
    assert errors[-1] < 0.002
    assert errors == sorted(errors, reverse=True)


@given(st.floats(1e-3, 1e9), st.sets(st.integers(1, 10**7), min_size=1, max_size=8), st.floats(0.0, 1.0))
def test_ideal_scaling_has_no_knee(rate, devices, stop):
    assert knee(line({n: rate * n for n in devices}), stop) is None


rated = st.dictionaries(st.sampled_from(DOUBLINGS), st.floats(1e-3, 1e6), min_size=1, max_size=8)


@settings(max_examples=200)
@given(rated, st.floats(0.05, 1.0))
def test_a_knee_is_where_it_says(rates, stop):
    """Any series, also one that falls or rises again: all before pays, the step after does not."""
    found, steps = knee(line(rates), stop), marginal(line(rates))
    bad = [step for step in steps if step.share < stop - 1e-9]
    assert (found is None) == (not bad)
    if found is not None:
        assert (found.before, found.after) == (bad[0].before, bad[0].after)
        assert all(step.share >= stop - 1e-9 for step in steps if step.after <= found.before)
        known = [n for n in sorted(rates) if n <= found.before]
        lowest = math.sqrt(known[-2] * known[-1]) if len(known) > 1 else found.before
        assert lowest * (1 - 1e-9) <= found.devices <= math.sqrt(found.before * found.after) * (1 + 1e-9)


@settings(max_examples=100)
@given(rated, rated, st.floats(0.05, 1.0), st.sampled_from([1e-3, 0.5, 1024.0]))
def test_a_unit_is_no_finding(rates, others, stop, scale):
    def known(factor):
        one = records({n: factor * rate for n, rate in rates.items()})
        two = records({n: factor * rate for n, rate in others.items()}, strategy="tp 2")
        knees = [knee(found, stop) for found in series([*one, *two])]
        return knees, [(c.first, c.second, c.before, c.after, c.fits) for c in crossovers([*one, *two])]

    knees, crossings = known(1.0)
    scaled_knees, scaled_crossings = known(scale)
    assert scaled_crossings == crossings
    for one, other in zip(knees, scaled_knees, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert other.devices == pytest.approx(one.devices)


def test_the_first_step_that_does_not_pay_decides():
    found = knee(line({8: 80.0, 16: 160.0, 32: 170.0, 64: 490.0}), 0.5)
    assert (found.before, found.after) == (16, 32)


def test_a_knee_at_the_very_start():
    found = knee(line({8: 80.0, 32: 80.0}), 0.5)
    assert (found.before, found.after) == (8, 32)
    assert found.devices == pytest.approx(8 * math.sqrt(2))  # halfway to the step's middle, 16


def test_who_asks_for_more_than_the_first_give_stops_with_them():
    found = knee(line({8: 80.0, 16: 160.0}), 1.5)
    assert (found.devices, found.before, found.after) == (8.0, 8, 16)


def test_failures_bring_the_knee_forward():
    given_ = [record(n, 100.0 * n, good=1 / (1 + n / 500)) for n in DOUBLINGS]
    (found,) = series(given_)
    assert knee(found, 0.5) is None
    assert knee(found, 0.5, failures=True).devices == pytest.approx(true_knee(1 / 500, 8, 0.5), rel=0.1)


# --- strategies against each other ---


def pair(ones, others):
    return crossovers([*records(ones), *records(others, strategy="tp 2")])


def test_two_laws_cross_where_they_do():
    ones = {n: n * n**-0.2 for n in DOUBLINGS}
    others = {n: n * 0.5 * n**-0.05 for n in DOUBLINGS}
    (found,) = pair(ones, others)
    assert (found.first, found.second, found.fits) == ("fsdp", "tp 2", True)
    assert found.devices == pytest.approx(2 ** (1 / 0.15))  # powers are lines in logarithms, so this is exact
    assert found.before < found.devices < found.after
    assert found.after == 2 * found.before


def test_all_crossings_are_listed_in_order():
    found = pair({8: 2.0, 16: 1.0, 32: 2.0, 64: 1.0}, {8: 1.0, 16: 2.0, 32: 1.0, 64: 2.0})
    assert [(one.first, one.second, one.before) for one in found] == [
        ("fsdp", "tp 2", 8),
        ("tp 2", "fsdp", 16),
        ("fsdp", "tp 2", 32),
    ]
    assert all(one.devices == pytest.approx(one.before * math.sqrt(2)) for one in found)


def test_equals_do_not_cross():
    assert pair({8: 1.0, 16: 2.0}, {8: 1.0, 16: 2.0}) == ()
    assert pair({8: 1.0, 16: 2.0}, {8: 1.0 + 1e-12, 16: 2.0 - 1e-12}) == ()
    assert pair({8: 1.0, 16: 2.0}, {8: 1.5, 16: 2.5}) == ()


def test_equals_that_part_cross_once_where_they_part():
    (found,) = pair({8: 1.0, 16: 2.0, 32: 3.0, 64: 4.0}, {8: 1.0, 16: 2.0, 32: 3.5, 64: 4.0})
    assert (found.second, found.before, found.after, found.devices) == ("tp 2", 16, 32, 16.0)


def test_to_touch_is_not_to_cross():
    assert pair({8: 1.0, 16: 2.0, 32: 3.0}, {8: 2.0, 16: 2.0, 32: 4.0}) == ()


def test_a_tie_between_is_where_they_cross():
    (found,) = pair({8: 2.0, 16: 2.0, 32: 2.0}, {8: 1.0, 16: 2.0, 32: 4.0})
    assert (found.devices, found.before, found.after) == (16.0, 16, 32)


def test_one_that_does_not_fit_yet_takes_over_where_it_does():
    (found,) = pair({8: None, 16: 4.0}, {8: 1.0, 16: 2.0})
    assert (found.first, found.second) == ("tp 2", "fsdp")
    assert (found.devices, found.before, found.after, found.fits) == (16.0, 8, 16, False)


def test_one_that_no_longer_fits_is_overtaken():
    (found,) = pair({8: 4.0, 16: None}, {8: 1.0, 16: 2.0})
    assert (found.first, found.second) == ("fsdp", "tp 2")
    assert (found.devices, found.fits) == (16.0, False)


def test_a_slower_one_that_ceases_to_fit_crosses_nothing():
    assert pair({8: 4.0, 16: 8.0}, {8: 1.0, 16: None}) == ()


def test_scales_where_neither_fits_or_one_was_not_computed_say_nothing():
    (found,) = pair({8: 2.0, 16: None, 32: 9.0, 64: 2.0}, {8: 1.0, 16: None, 64: 4.0})
    assert (found.before, found.after) == (8, 64)
    assert found.devices == pytest.approx(math.sqrt(8 * 64))


def test_pairs_of_one_setting_only():
    ones = records({8: 2.0, 16: 1.0})
    assert crossovers([*ones, *records({8: 1.0, 16: 2.0}, strategy="tp 2", model="x")]) == ()


def test_who_asks_for_energy_compares_tokens_per_joule():
    ones = [record(8, 80.0, watts=100.0), record(16, 160.0, watts=100.0)]
    others = [record(8, 40.0, watts=40.0, strategy="tp 2"), record(16, 80.0, watts=60.0, strategy="tp 2")]
    assert crossovers([*ones, *others]) == ()
    assert [one.strategy for one in best([*ones, *others])] == ["fsdp", "fsdp"]
    frugal = [replace(one, objective="energy") for one in (*ones, *others)]
    (found,) = crossovers([*ones, *others, *frugal])
    assert (found.first, found.second, found.setting.objective) == ("tp 2", "fsdp", "energy")
    names = [one.strategy for one in best([*ones, *others, *frugal])]
    assert names == ["fsdp", "fsdp", "tp 2", "fsdp"]  # each setting by its own objective


@settings(max_examples=100)
@given(rated, rated)
def test_leaders_follow_from_crossings(ones, others):
    """Whoever leads at the first common scale leads until a crossing says otherwise."""
    found = pair(ones, others)
    common = sorted(ones.keys() & others.keys())
    assert [one.second for one in found[:-1]] == [one.first for one in found[1:]]
    for before, after in pairwise(common):
        changed = (ones[before] < others[before]) != (ones[after] < others[after])
        if not any(math.isclose(ones[n], others[n], rel_tol=1e-8) for n in common):
            assert changed == any(one.after == after for one in found)


def test_the_best_of_each_scale():
    given_ = [
        *records({16: 1.0, 8: 2.0, 32: None}),
        *records({8: 1.0, 16: 3.0, 32: None, 64: 1.0}, strategy="tp 2"),
        *records({8: 9.0}, model="x"),
        *records({8: 2.0 * (1 + 1e-12)}, strategy="equal"),
    ]
    found = [(one.model, one.devices, one.strategy) for one in best(given_)]
    assert found == [("m", 8, "fsdp"), ("m", 16, "tp 2"), ("m", 64, "tp 2"), ("x", 8, "fsdp")]


def test_values_are_frozen():
    found = line({8: 1.0})
    assert isinstance(found, Series)
    assert replace(found, strategy="x").records == found.records
    with pytest.raises(AttributeError):
        found.strategy = "x"
