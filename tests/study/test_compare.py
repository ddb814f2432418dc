"""A prediction beside a run: what is off is found and named."""

from dataclasses import replace

import pytest
from tests.runtime.plans import small_plan
from tests.study.runs import run_of

from wavetrain.base.errors import InputError
from wavetrain.sim.breakdown import TERMS
from wavetrain.sim.predict import simulate
from wavetrain.study.compare import CONSTANTS, compare
from wavetrain.timeline import Timeline


@pytest.fixture(scope="module")
def plan():
    return small_plan(pp=2, schedule="1f1b", microbatches=4)


@pytest.fixture(scope="module")
def prediction(plan):
    return simulate(plan)


def test_what_is_as_predicted_is_not_off(plan, prediction):
    found = compare(plan, prediction, run_of(plan, prediction))
    assert found.step.difference == 0
    assert all(pair.difference == 0 for pair in found.terms)
    assert sum(pair.predicted for pair in found.terms) == pytest.approx(prediction.step_s)
    assert found.is_same_order
    assert found.bubble.difference == 0
    assert "as long as predicted" in found.sentences[0]
    assert len(found.sentences) == 2
    assert "No term" in found.sentences[1]


def test_the_law_that_is_off_most_comes_first(plan, prediction):
    terms = dict(prediction.breakdown)
    terms["compute"] *= 1.5
    terms["optimizer"] *= 0.5
    terms["host"] *= 0.5
    run = run_of(plan, prediction, terms=(terms,) * 2, step_s=sum(terms.values()))
    found = compare(plan, prediction, run)
    ratios = {pair.name: pair.ratio for pair in found.terms}
    assert ratios["compute"] == pytest.approx(1.5)
    assert ratios["host"] == pytest.approx(0.5)
    differences = [abs(pair.difference) for pair in found.terms]
    longest = max(found.terms, key=lambda pair: abs(pair.difference)).name
    assert found.sentences[1].startswith(f"{longest} takes ")
    assert CONSTANTS[longest] in found.sentences[1]
    assert len(found.sentences) == 1 + sum(off > 0.005 * run.step_s for off in differences)


def test_every_term_has_constants():
    assert set(CONSTANTS) == set(TERMS)


def test_a_term_that_one_side_lacks_is_said(plan, prediction):
    terms = dict(prediction.breakdown)
    terms["sharding"], terms["host"] = terms.pop("host"), 0.0
    found = compare(plan, prediction, run_of(plan, prediction, terms=(terms,) * 2))
    assert any("sharding was measured but not predicted" in sentence for sentence in found.sentences)
    assert any("host takes 0.00" in s or "host was predicted but not measured" in s for s in found.sentences)


def test_recomputation_is_compared_as_compute():
    plan = small_plan(pp=2, schedule="1f1b", recompute="full")
    prediction = simulate(plan)
    found = compare(plan, prediction, run_of(plan, prediction))
    assert "recompute" not in {pair.name for pair in found.terms}
    assert found.terms[0].predicted == prediction.breakdown["compute"] + prediction.breakdown["recompute"]


def test_memory_that_no_run_knows_has_no_difference(plan, prediction):
    found = compare(plan, prediction, run_of(plan, prediction))
    kinds = {pair.name: pair for pair in found.memory}
    assert kinds["parameters"].ratio == 1
    assert kinds["working"].measured is None
    assert kinds["working"].difference is None


def test_another_order_is_seen(plan, prediction):
    events = list(prediction.timeline.events)
    at = [i for i, event in enumerate(events) if event.name in ("0F0", "0F1")]
    one, other = (events[i] for i in at)
    events[at[0]], events[at[1]] = replace(one, name=other.name), replace(other, name=one.name)
    found = compare(plan, prediction, run_of(plan, prediction, timeline=Timeline(tuple(events))))
    assert not found.is_same_order
    assert found.moved.reordered == ((0, "compute"),)
    missing = Timeline(tuple(event for event in events if event.name != "1B3"))
    assert not compare(plan, prediction, run_of(plan, prediction, timeline=missing)).is_same_order


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"pp": 2, "schedule": "gpipe"}, "layout.schedule"),
        ({"pp": 2, "schedule": "1f1b", "microbatches": 6}, "layout.global_batch"),
        ({"pp": 2, "schedule": "1f1b", "hidden": 64}, "model"),
        ({"pp": 2, "schedule": "1f1b", "recompute": "full"}, "recompute"),
    ],
)
def test_another_plans_run_is_refused(plan, prediction, other, key):
    theirs = small_plan(**{"microbatches": 4} | other)
    with pytest.raises(InputError, match=key) as caught:
        compare(plan, prediction, run_of(theirs, simulate(theirs)))
    assert caught.value.exit_code == 2


def test_another_cluster_or_software_may_be_predicted(plan, prediction):
    cluster = replace(plan.cluster, name="other", own_laws=replace(plan.cluster.laws, step_s=1.0))
    theirs = replace(plan, cluster=cluster, stack=replace(plan.stack, message_overlap=True))
    assert compare(plan, prediction, run_of(theirs, simulate(theirs))).step.ratio > 10
