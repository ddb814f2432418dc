"""The search finds the best plan of the space: no plan that fits is better, whatever is left out unseen."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))
sys.path.insert(0, str(Path(__file__).parent))
from plans import better, with_device
from questions import listed, question_of

from wavetrain.cluster import load_cluster
from wavetrain.plan.stack import AttentionImpl, Stack
from wavetrain.planner.question import Objective, Pins
from wavetrain.planner.search import TIE, search
from wavetrain.sim.predict import outline

UNFUSED, FREELY = Stack(attention=AttentionImpl.UNFUSED), Stack(barrier=False)


def part(cluster, devices, memory_bytes=None):
    found = load_cluster(cluster).part(devices)
    return found if memory_bytes is None else with_device(found, memory_bytes=int(memory_bytes))


def case(model, cluster, batch, blocks, **others):
    return question_of(model, cluster, batch=batch, blocks=blocks, **others)


CASES = {
    # everything free
    "one device": case("tiny-gpt", part("dgx-a100", 1), 12, 3, stack=UNFUSED),
    "two devices": case("tiny-gpt", part("dgx-a100", 2), 6, 3),
    "two slow devices": case("gpt3-125m", part("osdp-titan", 2), 4, 5),
    "two, no barrier": case("tiny-llama", part("g5-48xlarge", 2), 8, 4, stack=FREELY),
    "three devices": case("tiny-llama", part("dgx-a100", 3), 6, 5),
    "three, two kinds": case("two kinds", part("dgx-h100", 3), 3, 6),
    "four devices": case("tiny-moe", part("dgx-a100", 4), 2, 3),
    "a rack's tray": case("gpt3-125m", "gb200-nvl72", 3, 4),
    # tight memory, everything free
    "two tight": case("gpt3-125m", part("dgx-a100", 2, 3.06e9), 4, 6),
    "three tight": case("gpt3-125m", part("p4d", 3, 3.0e9), 3, 6),
    "two very tight": case("gpt3-1.3b", part("dgx-a100", 2, 4.6e9), 8, 4, stack=UNFUSED),
    "nothing fits": case("gpt3-1.3b", part("dgx-a100", 2, 2.2e9), 4, 4),
    # with pins
    "pipelines": case("gpt3-125m", part("dgx-a100", 4), 16, 6, pins=Pins(pp=2, microbatch=1, recompute="none", cp=1)),
    "waves": case("tiny-llama", part("dgx-a100", 6), 12, 6, pins=Pins(pp=3, schedule="wave")),
    "tight pipelines": case("gpt3-125m", part("dgx-a100", 4, 2.6e9), 12, 6, pins=Pins(pp=4, microbatch=1)),
    "no pipelines": case("gpt3-125m", part("dgx-a100", 8, 3.2e9), 8, 4, pins=Pins(pp=1, microbatch=1)),
    "a node": case("llama2-7b", "dgx-a100", 8, 4, pins=Pins(schedule="1f1b", recompute="none", cp=1, keep=False)),
    "zero bubble": case("gpt3-1.3b", part("dgx-a100", 6), 12, 6, pins=Pins(pp=3, schedule="zb-h1", cp=1)),
    "least dollars": case("tiny-gpt", part("dgx-a100", 3), 4, 3, objective=Objective.COST),
    "some memory left free": case("gpt3-125m", part("dgx-a100", 2), 4, 4, headroom=0.97),
}


@pytest.mark.parametrize("name", CASES)
def test_no_plan_of_the_space_is_better(name):
    question = CASES[name]
    costs, least_bytes = [], []
    for plan in listed(question):
        seen = outline(plan, question.laws)
        least_bytes.append(seen.needed_bytes)
        if seen.needed_bytes <= question.capacity_bytes:
            costs.append(question.true_cost(plan, seen.step_s))
    found = search(question)
    assert len(least_bytes) > 15
    if not costs:
        assert found.found == ()
        assert found.best is None
        assert min(least_bytes) > question.capacity_bytes
    else:
        assert found.found[0].cost == pytest.approx(min(costs), rel=2e-8)
        assert found.gap == 0.0
        assert all(item.outline.needed_bytes <= question.capacity_bytes for item in found.found)
    if "tight" in name:
        assert len(costs) < len(least_bytes)


def test_the_cases_are_what_they_are_called():
    assert search(CASES["nothing fits"]).found == ()
    assert all(search(CASES[name]).found for name in CASES if name != "nothing fits")


@pytest.mark.parametrize("name", ["three devices", "two tight", "nothing fits", "pipelines"])
def test_two_searches_are_alike(name):
    one, other = search(CASES[name]), search(CASES[name])
    assert [(item.plan, item.cost) for item in one.found] == [(item.plan, item.cost) for item in other.found]
    assert (one.space, one.evaluated) == (other.space, other.evaluated)
    assert one.lower == other.lower
    assert one.least_bad == other.least_bad


def test_what_was_found_is_what_the_simulator_says():
    question = CASES["three devices"]
    found = search(question)
    for item in found.found:
        assert item.outline == outline(item.plan, question.laws)
        assert item.cost == question.true_cost(item.plan, item.outline.step_s)
    assert [item.cost for item in found.found] == sorted(item.cost for item in found.found)


@pytest.mark.parametrize("name", ["three devices", "nothing fits", "a node"])
def test_without_time_the_best_so_far_is_returned(name):
    found = search(CASES[name], time_limit_s=0.0)
    best = search(CASES[name])
    assert found.gap > 0 or found.found[0].cost == pytest.approx(best.found[0].cost, rel=2e-8)
    if best.found:
        assert found.lower <= best.found[0].cost


@pytest.mark.parametrize("name", ["three devices", "nothing fits", "a node"])
def test_who_watches_hears_where_it_stands_and_changes_nothing(name, monkeypatch):
    monkeypatch.setattr("wavetrain.planner.search.TOLD_EVERY_S", 0.0)
    told = []
    watched, alone = search(CASES[name], watch=told.append), search(CASES[name])
    assert watched == alone
    assert told[0].deciding == "listing degrees"
    assert any(item.deciding == "degrees and options" and item.total > 1 for item in told)
    assert [item.evaluated for item in told] == sorted(item.evaluated for item in told)
    if alone.found:
        assert told[-1].evaluated <= alone.evaluated
        assert "best step" in str(told[-1])


def test_ctrl_c_gives_the_best_so_far_or_ends_it(monkeypatch):
    question = CASES["a node"]
    cost = search(question).found[0].cost

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("wavetrain.planner.search._State.drain", interrupted)
    assert search(question).lower <= cost
    with pytest.raises(KeyboardInterrupt):
        search(question, interruptible=False)


def test_below_a_bound_only_better_plans_are_looked_for():
    question = CASES["a node"]
    cost = search(question).found[0].cost
    proof = search(question, below=cost)
    assert proof.lower >= cost * TIE
    assert proof.evaluated <= search(question).evaluated
    assert search(question, below=cost * 1.01).found[0].cost == cost
    assert search(question, below=cost * 0.9).lower == pytest.approx(cost * 0.9)


def test_a_space_without_plans():
    found = search(replace(CASES["two devices"], pins=Pins(tp=3)))
    assert found.found == ()
    assert found.least_bad is None


# --- more is never worse ---


@st.composite
def questions(draw):
    model = draw(st.sampled_from(("tiny-gpt", "tiny-moe", "gpt3-125m", "gpt3-1.3b", "two kinds")))
    cluster = part(draw(st.sampled_from(("dgx-a100", "osdp-titan", "p4d"))), draw(st.integers(1, 4)))
    memory_bytes = draw(st.sampled_from((2.5e9, 4e9, 6e9, 20e9)))
    return question_of(
        model,
        with_device(cluster, memory_bytes=int(memory_bytes)),
        batch=draw(st.sampled_from((2, 4, 6, 8))),
        blocks=draw(st.integers(2, 6)),
        stack=draw(st.sampled_from((Stack(), UNFUSED, Stack(message_overlap=True)))),
    )


def cost_of(question):
    found = search(question).found
    return found[0].cost if found else float("inf")


@settings(max_examples=25)
@given(questions(), st.sampled_from((1.1, 1.5, 4)))
def test_more_memory_is_never_worse(question, factor):
    larger = with_device(question.cluster, memory_bytes=int(question.cluster.device.memory_bytes * factor))
    assert cost_of(replace(question, cluster=larger)) <= cost_of(question)


@settings(max_examples=25)
@given(questions(), st.sampled_from((1.2, 2, 10)))
def test_faster_links_are_never_worse(question, factor):
    faster = better(question.cluster, "rate", factor)
    assert cost_of(replace(question, cluster=faster)) <= cost_of(question) * (1 + 1e-12)


@settings(max_examples=15)
@given(questions(), st.sampled_from(("gb200-nvl72", "dgx-a100")), st.sampled_from((2, 4)))
def test_more_nodes_are_never_worse(question, name, count):
    few, many = load_cluster(name), load_cluster(f"{name}:{count}")
    pins = Pins(recompute="none", cp=1)
    few, many = (replace(question, cluster=cluster, pins=pins) for cluster in (few, many))
    assert cost_of(many) <= cost_of(few)
