"""A certificate is proven in limited time, or it is said what was not shown; nothing that was changed passes."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))
sys.path.insert(0, str(Path(__file__).parent))
from plans import model_of, with_device
from test_certificate import TAMPERINGS, sealed

from wavetrain.cluster import load_cluster
from wavetrain.planner.ask import question
from wavetrain.planner.certificate import certificate
from wavetrain.planner.prove import prove
from wavetrain.planner.search import search


@pytest.fixture(scope="module")
def mixed():
    cluster = with_device(load_cluster("dgx-a100:1"), memory_bytes=int(16e9))
    asked = question(model_of("gpt3-1.3b", 24), cluster, global_batch=64, seq_len=2048, tp=1, cp=1, pp=1)
    answer = search(asked)
    return answer.best, certificate(answer)


@pytest.fixture(scope="module")
def unfinished():
    """A certificate that time was up for: its gap says so."""
    asked = question(model_of("gpt3-1.3b", 24), load_cluster("g5-48xlarge:2"), global_batch=16, mixed=False)
    answer = search(asked, time_limit_s=0.0)
    assert answer.gap > 0
    return asked, answer.best, certificate(answer)


def resealed(plan, made, **values):
    return sealed(plan, made | values)


def test_what_is_best_is_proven(mixed):
    proof = prove(*mixed)
    assert proof.is_proven
    assert proof.gap == 0
    assert prove(*mixed).is_proven


def test_a_measured_cluster_is_proven_by_its_own_laws():
    """Of a cluster with laws, rates and overlap of its own, no other plan is said to be better."""
    known = load_cluster("dgx-a100:2")
    laws = replace(known.laws, step_s=0.05, message_s=0.002, gradient_exposed=1.0, link_exposed=1.0)
    cluster = replace(known, own_laws=laws, overlap=())
    for options in ({}, {"objective": "devices"}, {"devices": 8}):
        asked = question(model_of("gpt3-125m", 12), cluster, global_batch=32, seq_len=1024, mixed=False, **options)
        answer = search(asked)
        assert prove(answer.best, certificate(answer)).is_proven
        assert asked.laws == laws


@pytest.mark.parametrize("name", TAMPERINGS)
def test_what_was_changed_is_rejected(mixed, name):
    """Also by one who seals it anew, and with little time."""
    plan, made = TAMPERINGS[name](*mixed)
    assert prove(plan, made).reasons
    if "cost" in made:
        assert not prove(plan, sealed(plan, made), time_limit_s=5.0).is_proven


@pytest.mark.parametrize("key", ["lower", "gap", "cost"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "much", None])
def test_what_is_no_number_is_not_proven(mixed, key, value):
    plan, made = mixed
    assert not prove(plan, resealed(plan, made, **{key: value}), time_limit_s=5.0).is_proven


def test_an_unfinished_search_is_proven_as_far_as_it_says(unfinished):
    _, plan, made = unfinished
    proof = prove(plan, made)
    assert proof.is_proven
    assert proof.gap == pytest.approx(made["gap"])


def test_an_unfinished_search_cannot_claim_more(unfinished):
    """A bound that is higher than what was shown: refuted where a plan is below it, not shown where time is up."""
    asked, plan, made = unfinished
    best = search(asked).found[0].cost
    assert best < made["cost"]
    claimed = resealed(plan, made, lower=made["cost"], gap=0.0)
    assert any("another plan costs" in reason for reason in prove(plan, claimed).reasons)
    hurried = prove(plan, resealed(plan, made, lower=best, gap=1 - best / made["cost"]), time_limit_s=0.0)
    assert not hurried.reasons
    assert not hurried.is_proven
    assert "could be shown" in hurried.not_shown[0]
    assert hurried.gap >= made["gap"]
    assert prove(plan, resealed(plan, made, lower=best, gap=1 - best / made["cost"])).is_proven
