"""`wavetrain compare`, as users call it, on a run that really happened."""

import json
from dataclasses import replace

import pytest
from tests.runtime.plans import small_plan

from wavetrain.cluster import load_cluster
from wavetrain.plan import write_plan


@pytest.fixture
def trained(run, tmp_path):
    plan = small_plan(pp=2, schedule="1f1b", microbatches=4, blocks=4)
    (tmp_path / "plan.json").write_text(write_plan(plan))
    ran = run("train", str(tmp_path / "plan.json"), "--local", "2", "--steps", "4", "-o", str(tmp_path / "run"))
    assert ran.code == 0, ran.err
    return plan, tmp_path


def test_a_run_is_compared_and_refitted(run, trained):
    plan, folder = trained
    files = str(folder / "plan.json"), str(folder / "run")
    more = ("--refit", "-o", str(folder / "cluster.yaml"), "--html", str(folder / "page.html"))
    ran = run("compare", *files, *more, "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    measured = json.loads((folder / "run" / "run.json").read_text())
    assert document["step_s"]["measured"] == measured["step_s"]
    assert sum(pair["measured"] for pair in document["terms"].values()) == pytest.approx(measured["step_s"])
    assert document["same_order"]
    assert document["memory"]["optimizer"]["difference"] == 0
    assert (folder / "page.html").read_text().startswith("<!DOCTYPE html>")

    refitted = replace(plan, cluster=load_cluster(str(folder / "cluster.yaml")))
    (folder / "refitted.json").write_text(write_plan(refitted))
    again = json.loads(run("compare", str(folder / "refitted.json"), files[1], "--json").out)
    for name in ("compute", "transfer", "optimizer", "host"):
        assert again["terms"][name]["predicted"] == pytest.approx(document["terms"][name]["measured"], rel=0.02)

    shown = run("compare", files[0], f"{files[1]}/run.json")
    assert shown.code == 0
    assert "every rank computed its actions in the predicted order" in shown.out


def test_what_does_not_belong_together_is_refused(run, trained):
    _, folder = trained
    other = small_plan(pp=2, schedule="gpipe", microbatches=4, blocks=4)
    (folder / "other.json").write_text(write_plan(other))
    ran = run("compare", str(folder / "other.json"), str(folder / "run"))
    assert ran.code == 2
    assert "layout.schedule" in ran.err
    assert "another plan was run" in ran.err


def test_bad_arguments_are_refused(run, tmp_path):
    (tmp_path / "plan.json").write_text(write_plan(small_plan()))
    plan = str(tmp_path / "plan.json")
    for arguments, word in (
        ((plan, str(tmp_path)), "run.json"),
        ((str(tmp_path / "none.json"), str(tmp_path)), "none.json"),
        ((plan, str(tmp_path), "-o", "x.yaml"), "--refit"),
    ):
        ran = run("compare", *arguments)
        assert ran.code == 2
        assert word in ran.err


def test_a_spoilt_run_is_an_error_and_no_traceback(run, trained):
    _, folder = trained
    measured, document = ((folder / "run" / name).read_text() for name in ("measured.json", "run.json"))
    huge = json.loads(document) | {"step_s": 10**400}
    spoilt = [
        ("measured.json", measured.replace('"name": "0F0"', '"name": 5')),
        ("measured.json", measured.replace('"pid": 0', '"pid": [0]')),
        ("measured.json", measured.replace('"traceEvents": [', '"traceEvents": ' + "[" * 100_000)),
        ("run.json", json.dumps(huge)),
        ("run.json", "[" * 100_000),
    ]
    for name, text in spoilt:
        whole = {"measured.json": measured, "run.json": document}
        assert text != whole[name]
        for file, content in (whole | {name: text}).items():
            (folder / "run" / file).write_text(content)
        ran = run("compare", str(folder / "plan.json"), str(folder / "run"))
        assert ran.code == 2
        assert name in "".join(ran.err.split())
