"""A comparison, shown: eighty columns, every term, nothing that the reader must work out."""

import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.runtime.plans import small_plan
from tests.study.runs import run_of

from wavetrain.show.compare import card, document
from wavetrain.sim.predict import simulate
from wavetrain.study.compare import compare
from wavetrain.study.refit import refit
from wavetrain.timeline import Timeline


def found(**over):
    plan = small_plan(pp=2, schedule="1f1b", microbatches=4)
    prediction = simulate(plan)
    terms = {name: seconds * (2 if name == "compute" else 1) for name, seconds in prediction.breakdown.items()}
    values = {"terms": (terms,) * 2, "step_s": sum(terms.values())} | over
    return plan, compare(plan, prediction, run_of(plan, prediction, **values))


def text(renderable) -> str:
    console = Console(width=80, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_card_is_eighty_columns_wide_and_has_all():
    plan, comparison = found()
    shown = text(card(comparison, refit(plan, comparison)))
    assert max(map(len, shown.splitlines())) <= 80
    for words in ("compute", "transfer", "bubble", "optimizer", "host", "activations", "not measured", "old"):
        assert words in shown
    assert "compute takes 2.00 times as long as predicted" in shown
    assert "every rank computed its actions in the predicted order" in shown
    assert "device.memory_gb_per_s" in shown


def test_another_order_is_said():
    _, comparison = found()
    events = tuple(event for event in comparison.measured_timeline.events if event.name != "1B3")
    _, other = found(timeline=Timeline(events))
    assert "1 actions were not run" in text(card(other))
    assert not document(other)["same_order"]


def test_the_document_has_numbers():
    plan, comparison = found()
    data = json.loads(json.dumps(document(comparison, refit(plan, comparison)), allow_nan=False))
    assert data["schema"] == "wavetrain.comparison/1"
    compute = data["terms"]["compute"]
    assert compute["measured"] == pytest.approx(2 * compute["predicted"])
    assert compute["difference"] == pytest.approx(compute["predicted"])
    assert data["memory"]["working"]["measured"] is None
    assert data["step_s"]["difference"] == pytest.approx(compute["difference"])
    assert {"name", "old", "new"} == set(data["refit"]["changes"][0])
    assert "refit" not in document(comparison)


def test_what_is_equal_differs_by_nothing():
    plan, _ = found()
    prediction = simulate(plan)
    terms = {name: seconds * (1 + 1e-12) for name, seconds in prediction.breakdown.items()}
    same = compare(plan, prediction, run_of(plan, prediction, terms=(terms,) * 2))
    shown = text(card(replace(same)))
    assert "-0.0%" not in shown
    assert "e-" not in shown
