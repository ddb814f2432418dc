"""Goodput: against Young's rule, Daly's estimate and a simulation that draws failures; extremes; the page's table."""

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from wavetrain.study.scaling.goodput import Costs, Goodput, best_interval, costs, goodput, mtbi_seconds, useful_share
from wavetrain.study.scaling.spec import Failures

ROOT = Path(__file__).parents[3]
USUAL = Failures(
    device_hours=50_700,
    detection_s=60,
    restart_s=300,
    write_bytes_per_s=1e9,
    read_bytes_per_s=1e9,
    copy_bytes_per_s=1e10,
    asynchronous=True,
)
SLACK = 1e-12


def of(devices=1024, *, state=8e10, rank=None, node_devices=8, failures=USUAL, step_s=0.0, **changes):
    return goodput(
        state_bytes=state,
        rank_state_bytes=state / devices if rank is None else rank,
        devices=devices,
        node_devices=node_devices,
        failures=replace(failures, **changes),
        step_s=step_s,
    )


# --- what things cost ---


def test_llama_3_is_interrupted_every_three_hours():
    assert mtbi_seconds(16_384, 50_700) / 3600 == pytest.approx(54 * 24 / 419, rel=1e-3)


def test_the_costs_are_their_definitions():
    given_ = {"state_bytes": 8e12, "rank_state_bytes": 5e9, "devices": 64, "node_devices": 8}
    found = costs(**given_, failures=USUAL)
    assert found.mtbi_s == 50_700 * 3600 / 64
    assert found.checkpoint_s == pytest.approx(0.5)  # 5 GB at 10 GB/s
    assert found.write_s == pytest.approx(1000.0)  # 8 TB over 8 nodes at 1 GB/s
    assert found.restart_s == pytest.approx(60 + 300 + 40)  # 8 x 5 GB at 1 GB/s
    waiting = costs(**given_, failures=replace(USUAL, asynchronous=False))
    assert (waiting.checkpoint_s, waiting.write_s) == (pytest.approx(1000.0), 0.0)
    assert waiting.restart_s == found.restart_s


def test_part_of_a_node_writes_as_one_and_reads_for_its_devices():
    found = costs(state_bytes=8e9, rank_state_bytes=4e9, devices=2, node_devices=8, failures=USUAL)
    assert found.write_s == pytest.approx(8.0)
    assert found.restart_s == pytest.approx(360 + 8)


@pytest.mark.parametrize(
    "bad", [{"devices": 0}, {"rank": -1.0}, {"state": math.nan}, {"device_hours": 0.0}, {"write_bytes_per_s": math.inf}]
)
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match="must be finite"):
        of(**({"rank": 1.0} | bad))


# --- the best interval ---


def young_s(found):
    return math.sqrt(2 * found.checkpoint_s * found.mtbi_s)


def daly_s(found):
    """Daly's estimate of 2006."""
    part = found.checkpoint_s / (2 * found.mtbi_s)
    return young_s(found) * (1 + math.sqrt(part) / 3 + part / 9) - found.checkpoint_s


@pytest.mark.parametrize("wait", [1e-9, 1e-7, 1e-6, 1e-4, 1e-2, 0.3])
def test_young_and_daly_are_its_first_and_higher_orders(wait):
    found = Costs(mtbi_s=1e4, checkpoint_s=wait * 1e4, write_s=0.0, restart_s=0.0)
    best_s = best_interval(found)
    assert best_s == pytest.approx(young_s(found), rel=math.sqrt(wait))
    assert best_s == pytest.approx(daly_s(found), rel=wait)


def test_both_ways_to_the_interval_meet():
    """The series below, bisection above: no step where one takes over."""
    at = 5e-7  # sqrt(2 x 5e-7) = 1e-3
    below, above = (best_interval(Costs(1.0, at * factor, 0.0, 0.0)) for factor in (1 - 1e-6, 1 + 1e-6))
    assert above / below == pytest.approx(1 + 1e-6, abs=1e-9)


moments = st.floats(-6, 3).map(lambda power: 10.0**power)


@settings(max_examples=200)
@given(st.builds(Costs, mtbi_s=st.just(1.0), checkpoint_s=moments, write_s=moments, restart_s=moments))
def test_no_other_interval_is_better(found):
    best_s = best_interval(found)
    assert found.write_s <= best_s
    best = useful_share(best_s, found)
    for factor in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2.0, 10.0):
        if best_s * factor >= found.write_s:
            assert useful_share(best_s * factor, found) <= best * (1 + SLACK)


@settings(max_examples=200)
@given(st.builds(Costs, mtbi_s=st.just(1.0), checkpoint_s=moments, write_s=moments, restart_s=st.just(0.1)), moments)
def test_whole_steps_are_the_best_whole_number(found, step_s):
    best_s = best_interval(found, step_s)
    count = round(best_s / step_s)
    assert best_s == count * step_s
    assert count >= 1
    assert best_s >= found.write_s
    for other in {1, 2, count - 1, count + 1, 2 * count} - {0}:
        if other * step_s >= found.write_s:
            assert useful_share(other * step_s, found) <= useful_share(best_s, found) * (1 + SLACK)


def test_a_checkpoint_is_written_before_the_next_begins():
    found = of(state=8e12, rank=1e6)  # copied in 0.1 ms, written in 62.5 s
    assert found.interval_s == found.write_s == pytest.approx(62.5)


def test_it_is_never_longer_than_the_time_between_failures():
    assert best_interval(Costs(1.0, 1e9, 0.0, 0.0)) == pytest.approx(1.0)


# --- the share, against failures that are drawn ---


def drawn(found, interval_s, rng, checkpoints):
    """Seconds of a run that is played until so many checkpoints more are written, and of its restarts.

    Failures are drawn; a position in steps and checkpoints, and what is written by then, is all that it keeps.
    """
    attempt_s = interval_s + found.checkpoint_s
    now, failure = 0.0, rng.expovariate(1 / found.mtbi_s)
    written, position, restarting = 0, found.write_s, 0.0
    while written < checkpoints:
        goal = (written + 1) * attempt_s + found.write_s
        if now + goal - position <= failure:
            now, position, written = now + goal - position, goal, written + 1
            continue
        begin, now, position = failure, failure, written * attempt_s
        failure = now + rng.expovariate(1 / found.mtbi_s)
        while now + found.restart_s > failure:  # restarts are interrupted too
            now = failure
            failure = now + rng.expovariate(1 / found.mtbi_s)
        now += found.restart_s
        restarting += now - begin
    return now, restarting


def played(found, interval_s, share):
    """Forty runs of 120 checkpoints and about 300 failures or more: checkpoints of each, seconds, those of restarts."""
    rng, checkpoints = random.Random(8), max(120, math.ceil(300 * share * found.mtbi_s / interval_s))
    runs = [drawn(found, interval_s, rng, checkpoints) for _ in range(40)]
    return checkpoints, *zip(*runs, strict=True)


def errors_off(seen, expected):
    """By how many standard errors a mean is off."""
    error = stdev(seen) / math.sqrt(len(seen))
    assert error < 0.02 * expected
    return abs(fmean(seen) - expected) / error


@pytest.mark.parametrize(
    "found",
    [
        Costs(mtbi_s=100.0, checkpoint_s=1.0, write_s=0.0, restart_s=5.0),
        Costs(mtbi_s=100.0, checkpoint_s=0.2, write_s=8.0, restart_s=5.0),
        Costs(mtbi_s=100.0, checkpoint_s=30.0, write_s=0.0, restart_s=80.0),
        Costs(mtbi_s=100.0, checkpoint_s=1.0, write_s=90.0, restart_s=150.0),  # the floor decides
    ],
    ids=["waiting", "beside", "long", "floor"],
)
@pytest.mark.parametrize("factor", [1.0, 3.0], ids=["best", "longer"])
def test_failures_that_are_drawn_leave_the_same_share(found, factor):
    interval_s = factor * best_interval(found)
    share = useful_share(interval_s, found)
    checkpoints, walls, restarts = played(found, interval_s, share)
    wall_s = checkpoints * interval_s / share
    assert errors_off(walls, wall_s) < 3
    assert errors_off(restarts, wall_s * (1 - math.exp(-found.restart_s / found.mtbi_s))) < 3


def test_the_simulation_would_see_a_forgotten_writing_time():
    found = Costs(mtbi_s=100.0, checkpoint_s=0.2, write_s=8.0, restart_s=5.0)
    interval_s = best_interval(found)
    forgotten = useful_share(interval_s, replace(found, write_s=0.0))
    checkpoints, walls, _ = played(found, interval_s, forgotten)
    assert errors_off(walls, checkpoints * interval_s / forgotten) > 10


# --- properties of the whole ---

sizes = st.floats(6, 15).map(lambda power: 10.0**power)
counts = st.integers(0, 20).map(lambda power: 2**power)
failing = st.builds(
    Failures,
    device_hours=st.floats(2, 7).map(lambda power: 10.0**power),
    detection_s=st.floats(0, 600),
    restart_s=st.floats(0, 1800),
    write_bytes_per_s=st.floats(7, 11).map(lambda power: 10.0**power),
    read_bytes_per_s=st.floats(7, 11).map(lambda power: 10.0**power),
    copy_bytes_per_s=st.floats(8, 11).map(lambda power: 10.0**power),
    asynchronous=st.booleans(),
)


def sane(found: Goodput):
    parts = (found.share, found.checkpoint_share, found.restart_share, found.replay_share)
    assert all(0 <= part <= 1 for part in parts)
    assert sum(parts) == pytest.approx(1.0, abs=1e-9)
    assert math.isfinite(found.interval_s)
    return True


@settings(max_examples=150)
@given(sizes, sizes, counts, failing)
def test_shares_are_shares_and_more_devices_never_help(state, rank, devices, failures):
    few, many = (of(n, state=state, rank=rank, failures=failures) for n in (devices, 2 * devices))
    assert sane(few)
    assert sane(many)
    assert few.checkpoint_bytes == state
    assert many.share <= few.share * (1 + SLACK)


@settings(max_examples=150)
@given(
    sizes,
    sizes,
    counts,
    failing,
    st.sampled_from(["device_hours", "write_bytes_per_s", "read_bytes_per_s", "copy_bytes_per_s"]),
    st.floats(1, 100),
)
def test_better_machines_never_hurt(state, rank, devices, failures, name, factor):
    better = replace(failures, **{name: factor * getattr(failures, name)})
    worse_share, share = (of(devices, state=state, rank=rank, failures=one).share for one in (failures, better))
    assert share >= worse_share * (1 - SLACK)


@pytest.mark.parametrize(
    ("found", "least", "most"),
    [
        (of(1), 0.9997, 0.99971),  # Young: sqrt(2 x 8 s / 50,700 h) is lost
        (of(1, device_hours=1e12), 0.9999999, 1.0),
        (of(10**6), 0.1, 0.15),  # one every 3 minutes, six to restart
        (of(10**6, device_hours=1e-3), 0.0, 0.0),
        (of(8, state=1.0), 0.99998, 1.0),
        (of(8, state=0.0), 0.99998, 1.0),
        (of(8, state=1e18), 0.0, 1e-6),
        (of(8, state=1e18, asynchronous=False), 0.0, 1e-6),
        (of(64, restart_s=1e12, device_hours=1e-9), 0.0, 0.0),
        (of(64, detection_s=0.0, restart_s=0.0, device_hours=1e12), 0.9999999, 1.0),
    ],
)
def test_extremes(found, least, most):
    assert sane(found)
    assert least <= found.share <= most


def test_where_a_restart_rarely_ends_little_is_left_and_it_is_said_why():
    found = of(10**6)
    assert found.mtbi_s < found.restart_s
    assert found.share > 0
    assert found.restart_share > 0.8


# --- the page ---


def test_the_table_of_the_page_is_the_file():
    page = (ROOT / "docs" / "goodput.md").read_text()
    stated = yaml.safe_load((ROOT / "src/wavetrain/study/scaling/failures.yaml").read_text())
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert set(rows) == set(stated)
    for name, fact in stated.items():
        value, said = rows[name].split(" | ", maxsplit=1)
        if isinstance(fact, dict):
            assert yaml.safe_load(value) == fact["value"]
            assert said == fact.get("source", fact.get("note"))
        else:
            assert yaml.safe_load(value) is fact


def test_our_failures_are_those_of_the_file():
    from wavetrain.study.scaling.read import default_failures

    assert default_failures() == USUAL
