"""The statistics of predictions against measurements: worked by hand, and as properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.study.accuracy import accuracy_page
from wavetrain.study.outcome import Outcome
from wavetrain.study.validate import (
    average_ranks,
    device_family,
    set_name,
    spearman,
    step_error,
    summarize,
    top_pick_regret,
    worst,
)


def outcome(measured=None, predicted=None, **changes) -> Outcome:
    defaults = {
        "row_id": "r",
        "file": "a.csv",
        "line": 2,
        "source": "paper",
        "device": "a100-sxm-80gb",
        "workload": "w",
        "scored": True,
        "status": "ok",
        "measured_peak_bytes": None,
        "measured_step_s": measured,
        "predicted_step_s": predicted,
    }
    return Outcome(**(defaults | changes))


def only(rows):
    """The summary of the one file that the rows are from."""
    return next(item for item in summarize(rows).sets if item.is_file)


# --- by hand ---


def test_errors_by_hand():
    found = only([outcome(10, 11), outcome(10, 8), outcome(4, 4), outcome(2, 3)])  # +10, -20, 0, +50
    assert found.mape == pytest.approx(20)
    assert found.median_ape == pytest.approx(15)
    assert found.p90_ape == pytest.approx(41)  # 0.7 of the way from 20 to 50
    assert found.bias == pytest.approx(10)
    assert (found.rows, found.expressible, found.scored, found.timed, found.counts) == (4, 4, 4, 4, True)
    assert found.memory_mape is None
    assert found.oom_accuracy is None


def test_only_scored_rows_count():
    rows = [outcome(10, 11), outcome(10, 30, scored=False)]
    assert only(rows).mape == pytest.approx(10)
    assert only(rows).timed == 1
    alone = only(rows[1:])
    assert alone.mape == pytest.approx(200)
    assert not alone.counts


def test_rows_without_a_time_or_a_prediction_have_no_error():
    rows = [
        outcome(10, 11),
        outcome(10, 99, status="OOM"),
        outcome(10, 99, status="Other Error"),
        outcome(None, 99),
        outcome(0.0, 99),
        outcome(math.nan, 99),
        outcome(10, 99, reason="fp4"),
        outcome(10, None),
        outcome(10, math.inf),
    ]
    found = only(rows)
    assert [step_error(row) is not None for row in rows] == [True] + [False] * 8
    assert found.mape == pytest.approx(10)
    assert found.unpriced == 2


def test_memory_by_hand():
    rows = [
        outcome(measured_peak_bytes=100.0, predicted_peak_bytes=90.0),
        outcome(measured_peak_bytes=100.0, predicted_peak_bytes=130.0, scored=False),
        outcome(measured_peak_bytes=100.0, predicted_peak_bytes=500.0, status="OOM"),
        outcome(measured_peak_bytes=None, predicted_peak_bytes=500.0),
        outcome(measured_peak_bytes=100.0, reason="fp4"),
    ]
    assert only(rows).memory_mape == pytest.approx(20)
    assert only(rows).memory_rows == 2
    assert only(rows).mape is None


def test_confusion_by_hand():
    rows = [
        *[outcome(fits=True)] * 5,
        *[outcome(fits=True, status="OOM")] * 1,
        *[outcome(fits=False, status="oom")] * 2,
        *[outcome(fits=False, status="OK")] * 3,
        outcome(fits=True, status="Other Error"),
        outcome(fits=None),
        outcome(reason="fp4", status="OOM"),
    ]
    found = only(rows)
    assert (found.true_fits, found.false_fits, found.true_oom, found.false_oom) == (5, 1, 2, 3)
    assert found.oom_accuracy == pytest.approx(100 * 7 / 11)


def test_accuracy_needs_a_run_that_ran_out_of_memory():
    found = only([outcome(fits=True), outcome(fits=False)])
    assert found.oom_accuracy is None
    assert (found.true_fits, found.false_oom) == (1, 1)


def test_average_ranks_share_ties():
    assert average_ranks(np.array([30.0, 10.0, 20.0, 20.0])).tolist() == [4, 1, 2.5, 2.5]


def test_spearman_by_hand():
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([10.0, 20, 40, 30])) == pytest.approx(
        0.8
    )  # 1 - 6 * 2 / (4 * 15)
    assert spearman(np.array([4.0, 3, 2, 1]), np.array([1.0, 2, 3, 4])) == pytest.approx(-1)
    tied = spearman(np.array([1.0, 2, 2, 4]), np.array([1.0, 2, 3, 4]))
    assert tied == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])) is None


def test_regret_by_hand():
    assert top_pick_regret(np.array([3.0, 1, 2]), np.array([10.0, 12, 11])) == pytest.approx(20)
    assert top_pick_regret(np.array([3.0, 1, 1]), np.array([10.0, 11, 12])) == pytest.approx(20)  # the worse of a tie


def test_rankings_are_means_over_workloads():
    good = [outcome(m, m, workload="good") for m in (1, 2, 3, 4)]
    bad = [outcome(m, 5 - m, workload="bad") for m in (1, 2, 3, 4)]
    few = [outcome(m, 9 - m, workload="few") for m in (1, 2, 3)]
    repeats = [outcome(m, 1 + (m > 2), workload="repeats") for m in (1, 2, 3, 4)]
    found = only([*good, *bad, *few, *repeats])
    assert found.groups == 2
    assert found.spearman == pytest.approx(0)
    assert found.regret == pytest.approx(150)
    assert found.worst_regret == pytest.approx(300)


def test_workloads_are_not_ranked_across_devices():
    rows = [outcome(m, 5 - m, device=f"{'ah'[m > 2]}100-sxm") for m in (1, 2, 3, 4)]
    assert only(rows).groups == 0
    assert only(rows).spearman is None
    assert only(rows).regret is None


# --- sets ---


def test_sets_are_files_then_sources_and_families():
    rows = [
        outcome(device="h100-sxm-80gb"),
        outcome(file="b.csv", device="gb200"),
        outcome(),
        outcome(device="a100-pcie-40gb"),
        outcome(source="", device=""),
    ]
    names = [item.name for item in summarize(rows).sets]
    expected = ["a.csv", "a.csv: paper, h100", "a.csv: paper, a100", "a.csv: no source", "b.csv", "b.csv: paper, gb200"]
    assert names == expected
    assert [item.rows for item in summarize(rows).sets] == [4, 1, 2, 1, 1, 1]
    assert [device_family(row) for row in rows] == ["h100", "gb200", "a100", "a100", ""]
    assert {set_name(row) for row in rows} == {name for name in expected if ":" in name}


def test_nothing_gives_nothing():
    assert summarize([]).sets == ()
    assert worst(summarize([])) == []


def test_all_inexpressible():
    rows = [outcome(10, reason="fp4", line=i, row_id=f"r{i}") for i in range(2, 7)] + [outcome(10, reason="no dp")]
    found = only(rows)
    assert (found.rows, found.expressible, found.timed) == (6, 0, 0)
    numbers = (found.mape, found.median_ape, found.p90_ape, found.bias, found.memory_mape, found.oom_accuracy)
    assert set(numbers) | {found.spearman, found.regret, found.worst_regret} == {None}
    assert [(item.reason, item.rows) for item in found.unexpressed] == [("fp4", 5), ("no dp", 1)]
    assert found.unexpressed[0].examples == ("a.csv:2 r2", "a.csv:3 r3", "a.csv:4 r4")


def test_the_worst_rows_are_those_that_count():
    rows = [outcome(10, 10 + i, row_id=str(i)) for i in range(8)]
    rows += [outcome(10, 99, scored=False), outcome(10, 25, scored=False, file="b.csv", row_id="b")]
    assert [row.row_id for row, _ in worst(summarize(rows))] == ["b", "7", "6", "5", "4"]


def test_huge_numbers_do_not_overflow():
    found = only([outcome(1e-300, 1e300), outcome(1e-5, 1.7e301), outcome(1e-5, 1.7e301)])
    assert found.timed == 2
    assert found.unpriced == 1
    assert found.mape is None or math.isfinite(found.mape)


# --- properties ---

TIMES = st.lists(st.integers(1, 10**6).map(lambda n: n / 1000), min_size=1, max_size=30)


@given(TIMES)
def test_perfect_predictions(times):
    found = only([outcome(t, t, fits=True) for t in times])
    assert (found.mape, found.median_ape, found.p90_ape, found.bias) == (0, 0, 0, 0)
    if found.groups:
        assert (found.spearman, found.regret, found.worst_regret) == (1, 0, 0)
    assert (found.groups == 1) == (len(times) >= 4 and len(set(times)) >= 3)


@given(TIMES, st.sampled_from([0.25, 0.5, 1.1, 2.0, 3.7]), st.randoms(use_true_random=False))
def test_a_common_factor_changes_errors_but_no_order(times, factor, random):
    guesses = random.sample(times, len(times))
    exact = only([outcome(t, factor * t) for t in times])
    assert exact.mape == pytest.approx(abs(factor - 1) * 100)
    assert exact.bias == pytest.approx((factor - 1) * 100)
    plain = only([outcome(t, g) for t, g in zip(times, guesses, strict=True)])
    scaled = only([outcome(t, factor * g) for t, g in zip(times, guesses, strict=True)])
    assert (scaled.spearman, scaled.regret, scaled.groups) == (plain.spearman, plain.regret, plain.groups)


@given(TIMES, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(times, random):
    rows = [outcome(t, random.choice(times)) for t in times]
    one, other = only(rows), only(random.sample(rows, len(rows)))
    for name in ("mape", "median_ape", "p90_ape", "bias", "spearman", "regret"):
        assert getattr(one, name) == pytest.approx(getattr(other, name))
    assert one.spearman is None or -1 <= one.spearman <= 1
    assert one.regret is None or one.regret >= 0


# --- the page of the documentation ---


def test_accuracy_page():
    rows = [
        outcome(10, 11, row_id="run_1"),
        outcome(fits=False, predicted=5, status="OOM", row_id="run_2"),
        outcome(fits=True, predicted=5, status="OOM", row_id="run_3"),
        outcome(10, reason="fp4 | fp6", row_id="run_4"),
        outcome(10, 9, fits=False, row_id="run_5"),
    ]
    lines = accuracy_page(summarize(rows)).splitlines()
    assert "| **a.csv** | 5 | 1 | 10.0 | 10.0 | 10.0 | +0.0 | - | 33.3 | - | - |" in lines
    assert "fitted to published step times" in " ".join(lines)
    assert "| run_1 | 10 | 11 | +10.0 |" in lines
    assert "| run_2 | OOM | OOM | - |" in lines
    assert "| run_3 | OOM | 5 | - |" in lines
    assert "| run_4 | 10 | - | - |" in lines
    assert "| run_5 | 10 | 9 (OOM) | -10.0 |" in lines
    assert "| 1 | fp4 &#124; fp6 |" in lines


def test_names_are_inert_in_the_page():
    hostile = "<img src=x onerror=alert(1)>|[x](y)`*\n# heading"
    rows = [outcome(1, 1, row_id=hostile, source=hostile, file=hostile), outcome(reason=hostile, status=hostile)]
    page = accuracy_page(summarize(rows))
    assert not set("<`[]") & set(page.replace("`wavetrain validate`", ""))
    assert "\n# heading" not in page
    assert accuracy_page(summarize([])).startswith("# Accuracy\n")
