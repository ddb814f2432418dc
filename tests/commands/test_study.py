"""`wavetrain study` as users type it."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from tests.study.scaling.made import record

from wavetrain.cli import main
from wavetrain.commands import study as study_command
from wavetrain.study.scaling.run import Done

STUDY = """
study: mine
title: a small study
model: gpt3-125m
seq_len: 1024
node: dgx-a100
devices: [8, 16]
batch: {per_device: 2}
strategies: [fsdp, ddp]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(STUDY)
    return path


def test_a_study_writes_tables_findings_and_plans(file, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["study", str(file), "-o", str(folder), "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "4 points: 4 computed, 0 known" in said
    for name in ("records.csv", "study.json", "summary.md", "report.html"):
        assert (folder / name).stat().st_size > 500
        assert str(folder / name) in said.replace("\n", "").replace(" ", "") or name in said
    assert main(["study", str(file), "-o", str(folder), "--jobs", "1", "--no-report", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["computed"], found["reused"]) == (0, 4)
    plan = folder / found["records"][0]["plan_file"]
    assert main(["simulate", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(found["records"][0]["step_s"])


def test_what_is_missing_is_said_before_the_work(file, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "out"
    monkeypatch.setenv("PATH", "")
    assert main(["study", str(file), "-o", str(folder), "--pictures"]) == 2
    assert "Chromium" in capsys.readouterr().err
    assert not folder.exists()
    monkeypatch.setattr(study_command, "find_spec", lambda _: None)
    assert main(["study", str(file), "-o", str(folder), "--jobs", "1"]) == 0
    assert "pip install 'wavetrain[report]'" in capsys.readouterr().err
    assert not (folder / "report.html").exists()
    assert (folder / "summary.md").exists()


def test_ready_studies_are_listed(capsys):
    assert main(["study", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "weak-scaling" in [one["name"] for one in found["studies"]]
    assert main(["study", "--list"]) == 0
    assert "weak-scaling" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "possible: context-length"),
        (["nothing.yaml"], "no such file"),
        (["weak-scalin"], "nearest: weak-scaling"),
        (["--list", "weak-scaling"], "means nothing beside --list"),
        (["--validate-claims", "weak-scaling"], "means nothing beside --validate-claims"),
        (["weak-scaling", "--markdown", "x.md"], "means nothing beside a study file"),
        (["weak-scaling", "--jobs", "0"], "must be from 1"),
        (["weak-scaling", "-o", "/dev/null/x"], "can't be written"),
    ],
)
def test_wrong_options(arguments, word, capsys):
    assert main(["study", *arguments]) == 2
    assert word in capsys.readouterr().err


def test_wrong_files_end_with_their_lines(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(STUDY.replace("gpt3-125m", "gpt3-126m").replace("fsdp", "fdsp"))
    assert main(["study", str(path)]) == 2
    said = capsys.readouterr().err
    assert "bad.yaml:4" in said
    assert "bad.yaml:9" in said
    assert "nearest: fsdp" in said


def test_ctrl_c_keeps_what_is_known(file, tmp_path):
    """All processes of a terminal get the signal; the same command goes on afterwards."""
    folder = tmp_path / "out"
    file.write_text(STUDY.replace("[8, 16]", "{from: 8, to: 256, factor: 2}"))
    command = [sys.executable, "-m", "wavetrain", "study", str(file), "-o", str(folder), "--no-report", "--jobs", "2"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **piped)
    lines = folder / "records.jsonl"
    while not lines.exists() or lines.read_text().count("\n") < 2:
        time.sleep(0.02)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    known = lines.read_text().count("\n")
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["reused"] >= min(known, 2)


def test_ctrl_c_of_one_process_keeps_no_half_answer(file, tmp_path):
    """The search that is interrupted is not answered with the best so far: a study would keep that for good."""
    folder = tmp_path / "out"
    file.write_text(STUDY.replace("[8, 16]", "[512, 1024, 2048]").replace("[fsdp, ddp]", "[free]"))
    command = [sys.executable, "-m", "wavetrain", "study", str(file), "-o", str(folder), "--no-report", "--jobs", "1"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    lines = folder / "records.jsonl"
    while not lines.exists():
        time.sleep(0.02)
        assert process.poll() is None
    time.sleep(0.5)
    known = lines.read_text().count("\n")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert lines.read_text().count("\n") <= min(known + 1, 2)  # one may have ended meanwhile, not all three


def test_steps_are_drawn_of_one_setting(tmp_path, monkeypatch):
    """The smallest, a middle and the largest scale of the setting that has most, whichever comes first."""
    records = [
        *(record(devices, 1.0, plan_file="p", model="small") for devices in (8, 16, 32)),
        *(record(devices, 1.0, plan_file="p", model="wide") for devices in (8, 16, 32, 64, 128)),
        *(record(devices, 1.0, plan_file="p", model="last") for devices in (8, 16)),
    ]
    monkeypatch.setattr("wavetrain.plan.read_plan", lambda _: None)
    monkeypatch.setattr("wavetrain.sim.predict.simulate", lambda _: SimpleNamespace(timeline="step"))
    found = study_command._timelines(Done(tuple(records), 0, 0, 0.0), tmp_path)
    assert [name.split(", ")[0] for name in found] == ["wide"] * 3
    assert [name.split(", ")[2].split()[0] for name in found] == ["8", "32", "128"]
    assert study_command._timelines(Done((), 0, 0, 0.0), tmp_path) == {}
