"""What a run measured, and what is wrong with its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.plans import small_plan

from wavetrain.base.errors import InputError
from wavetrain.plan import write_plan
from wavetrain.sim.breakdown import TERMS
from wavetrain.study.measured import measured_terms, read_run
from wavetrain.timeline import Event, Timeline, write_chrome

SPENT = {
    "compute": 6.0,
    "tensor": 1.0,
    "sharding": 0.0,
    "sending": 0.5,
    "waiting": 2.0,
    "optimizer": 0.25,
    "host": 0.25,
}


def test_terms_sum_to_the_step():
    terms = measured_terms(SPENT, step_s=20.0, idle_share=0.75)
    assert sum(terms.values()) == pytest.approx(20.0)
    assert terms["compute"] == 12.0
    assert terms["bubble"] == 3.0
    assert terms["transfer"] == 2.0  # sending, and what is waited for beyond the bubble
    assert "sharding" not in terms
    assert list(terms) == [name for name in TERMS if name in terms]


def test_without_a_pipeline_nobody_waits_for_messages():
    terms = measured_terms(SPENT, step_s=10.0, idle_share=None)
    assert terms["host"] == 2.75
    assert {"bubble", "transfer"}.isdisjoint(terms)


@pytest.fixture
def folder(tmp_path):
    plan = small_plan(pp=2, schedule="1f1b")
    (tmp_path / "plan.json").write_text(write_plan(plan))
    document = {
        "schema": "wavetrain.train/1",
        "steps": 4,
        "step_s": 1.0,
        "bubble_fraction": 0.25,
        "terms_by_rank": [{"compute": 0.75, "bubble": 0.25}, {"compute": 0.5, "bubble": 0.5}],
        "stage_ranks": [0, 1],
        "memory": {"parameters": 1000, "activations": 500},
    }
    (tmp_path / "run.json").write_text(json.dumps(document))
    events = (Event(0.0, 0.5, 0, "compute", "0F0"), Event(0.5, 1.0, 1, "compute", "1F0"))
    write_chrome(Timeline(events), tmp_path / "measured.json")
    (tmp_path / "environment.json").write_text(json.dumps({"cpu": "some", "packages": {"torch": "2"}, "x": [1]}))
    return tmp_path


def test_a_directory_or_its_document_are_read(folder):
    run = read_run(folder)
    assert replace(read_run(folder / "run.json"), where=run.where) == run
    assert run.terms[1] == {"compute": 0.5, "bubble": 0.5}
    assert run.memory == {"parameters": 1000.0, "activations": 500.0}
    assert run.environment == {"cpu": "some", "packages": "torch 2"}
    assert run.timeline.order(1, "compute") == ("1F0",)
    assert run.longest(1) == 1


def test_of_several_replicas_the_first_pipeline_is_read(folder):
    plan = small_plan(pp=2, schedule="1f1b")
    layout = replace(plan.layout, dp=2, global_batch=8)
    cluster = replace(plan.cluster, groups=(replace(plan.cluster.groups[0], count=2),))
    (folder / "plan.json").write_text(write_plan(replace(plan, layout=layout, cluster=cluster)))
    document = json.loads((folder / "run.json").read_text())
    rows = [{"compute": seconds} for seconds in (1.0, 2.0, 3.0, 2.5)]
    document |= {"terms_by_rank": rows, "stage_ranks": [0, 0, 1, 1]}
    (folder / "run.json").write_text(json.dumps(document))
    events = tuple(Event(0.0, 1.0 + rank, rank, "compute", f"{rank // 2}F0") for rank in range(4))
    write_chrome(Timeline(events), folder / "measured.json")
    run = read_run(folder)
    assert run.timeline.ranks == (0, 1)
    assert [event.duration_s for event in run.timeline.events] == [1.0, 3.0]
    assert (run.longest(0), run.longest(1)) == (1, 2)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("schema", "wavetrain.plan/1", "schema"),
        ("step_s", 0, "step_s"),
        ("step_s", float("nan"), "step_s"),
        ("step_s", True, "step_s"),
        ("step_s", "1", "step_s"),
        pytest.param("step_s", 10**400, "step_s", id="400 digits"),
        ("steps", -1, "steps"),
        ("bubble_fraction", 2, "bubble_fraction"),
        ("terms_by_rank", {}, "terms_by_rank"),
        ("terms_by_rank", [{"compute": -1}, {}], r"terms_by_rank\.compute"),
        ("terms_by_rank", [{"magic": 1}, {}], r"terms_by_rank\.magic"),
        ("terms_by_rank", [[], []], "terms_by_rank"),
        ("stage_ranks", [0], "stage_ranks"),
        ("stage_ranks", [0, 7], "stage_ranks"),
        ("memory", {"parameters": 10**400}, r"memory\.parameters"),
        ("memory", [], "memory"),
        ("memory", {"parameters": "all"}, r"memory\.parameters"),
    ],
)
def test_what_is_no_measurement_is_refused(folder, key, value, word):
    document = json.loads((folder / "run.json").read_text()) | {key: value}
    (folder / "run.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=word):
        read_run(folder)


def test_a_run_of_before_says_so(folder):
    document = json.loads((folder / "run.json").read_text())
    del document["terms_by_rank"]
    (folder / "run.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="train again"):
        read_run(folder)


@pytest.mark.parametrize("name", ["run.json", "plan.json", "measured.json"])
def test_files_that_are_missing_or_broken_are_named(folder: Path, name: str):
    (folder / name).write_text("{")
    with pytest.raises(InputError, match=name):
        read_run(folder)
    (folder / name).write_text("[]")
    with pytest.raises(InputError, match=name):
        read_run(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=name):
        read_run(folder)
