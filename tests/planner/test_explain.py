"""Explanations add up: decisions lead to the plan, alternatives are legal, changes really change the layout."""

from dataclasses import replace
from itertools import pairwise

import pytest

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan import Request, check, plan_of
from wavetrain.planner.ask import question
from wavetrain.planner.explain import (
    alternatives,
    changes,
    difference,
    explain,
    flips,
    instead,
    kind_of,
    least_memory,
    runner_ups,
    walk,
    with_links,
    with_memory,
)
from wavetrain.planner.largest import largest_batch
from wavetrain.planner.rescue import is_empty, rescue
from wavetrain.planner.search import search
from wavetrain.sim.predict import simulate

ASKED = question(load_model("gpt3-125m"), load_cluster("dgx-a100").part(4), global_batch=16, mixed=False)


SMALL = with_memory(replace(ASKED, cluster=load_cluster("dgx-a100").part(2), global_batch=4), 0.03)  # nothing fits


@pytest.fixture(scope="module")
def answer():
    return search(ASKED)


def pipelined():
    request = Request(
        model=ASKED.model,
        cluster=ASKED.cluster,
        global_batch=16,
        tp=2,
        pp=2,
        waves=2,
        recompute="full",
        shard=None,
    )
    return plan_of(request)


def test_decisions_lead_to_the_plan():
    plan = pipelined()
    steps = walk(ASKED, plan)
    assert steps[-1].plan == plan
    assert len(steps) >= 4
    assert not any(check(step.plan) for step in steps)
    for before, after in pairwise(steps):
        grown = after.step_s - before.step_s
        assert sum(after.terms.values()) == pytest.approx(grown, abs=0.02 * before.step_s)
    assert steps[-1].step_s == simulate(plan).step_s


def test_runner_ups_are_of_other_kinds(answer):
    found = runner_ups(answer)
    kinds = {kind_of(item.plan) for item in found}
    assert len(kinds) == len(found) == 2
    assert kind_of(answer.best) not in kinds
    assert all(item.worse >= 0 and not item.too_much_bytes for item in found)


def test_alternatives_are_what_they_are_called():
    found = {item.name: item.plan.layout for item in alternatives(ASKED, pipelined())}
    assert found["no tensor parallelism"].tp == 1
    assert found["no pipeline"].pp == 1
    assert found["pure FSDP"].dp == 4


def test_another_that_does_not_fit_says_by_how_much(answer):
    small = with_memory(ASKED, 0.04)
    best = search(small).best
    assert best is not None
    other = instead(small, best, "replicas", {"tp": 1, "pp": 1, "shard": "none", "shard_optimizer": False, "cp": 1})
    assert other.too_much_bytes > 0
    assert instead(ASKED, answer.best, "five", {"tp": 5}).plan is None


def test_a_change_that_flips_the_layout_does():
    found = [flip for flip in flips(ASKED, time_limit_s=20) if flip.factor is not None]
    assert found
    now = search(ASKED).best
    for flip in found:
        change, _ = changes(ASKED)[flip.what]
        assert search(change(ASKED, flip.factor)).best == flip.plan
        assert flip.words == (difference(now, flip.plan) if flip.plan else "nothing fits") != ""


def test_links_are_those_that_devices_share():
    two = replace(ASKED, cluster=load_cluster("dgx-a100:2"))
    network, links = (with_links(asked, 2.0).cluster.tiers for asked in (two, ASKED))
    assert [tier.bytes_per_s for tier in network] == [
        two.cluster.tiers[0].bytes_per_s,
        two.cluster.tiers[1].bytes_per_s * 2,
    ]
    assert links[0].bytes_per_s == ASKED.cluster.tiers[0].bytes_per_s * 2


def test_the_least_memory_is_enough_and_not_much_less():
    assert not search(SMALL).found
    factor, found = least_memory(SMALL)
    assert found.outline.needed_bytes <= SMALL.capacity_bytes * factor * 1.001
    assert search(with_memory(SMALL, factor * 1.001)).found
    assert not search(with_memory(SMALL, factor * 0.97)).found


def test_changes_that_help_are_legal_and_fit():
    found = rescue(search(SMALL), time_limit_s=1.0)
    assert found.too_much_bytes > 0
    assert found.changes
    assert not any(check(change.plan) for change in found.changes)


def test_no_layout_at_all():
    none = replace(ASKED, pins=replace(ASKED.pins, dp=3))
    assert is_empty(none)
    assert any(reason.startswith("dp 3: ") for reason in rescue(search(none)).reasons)


def test_a_layout_without_a_schedule_is_none():
    none = replace(ASKED, pins=replace(ASKED.pins, pp=1, schedule="wave"))
    assert is_empty(none)
    assert not is_empty(replace(none, pins=replace(none.pins, pp=2)))
    found = rescue(search(replace(none, mixed=False)), time_limit_s=1.0)
    assert [reason.partition(":")[0] for reason in found.reasons] == ["pp 1", "schedule wave"]
    assert "possible: 2" in found.reasons[0]


def test_the_largest_batch_is_the_largest():
    small = with_memory(ASKED, 0.06)
    best = largest_batch(small).best.layout
    assert best.num_microbatches == best.pp == 1
    pins = replace(ASKED.pins, pp=1, devices=4)
    for dp in (1, 2, 4):
        size = best.global_batch // dp + 1
        more = replace(small, global_batch=dp * size, pins=replace(pins, dp=dp, microbatch=size))
        assert not search(more).found


def test_a_plan_that_is_not_the_best_is_told(answer):
    found = explain(ASKED, pipelined(), flips_limit_s=0.01)
    assert found.gap is None
    assert found.better.slower < 0
    best = explain(ASKED, answer.best, flips_limit_s=0.01)
    assert best.gap == 0
    assert best.better is None
    assert not any(flip.is_known for flip in best.flips)
