"""`wavetrain demo`: everything at once; here on a machine that is described instead of measured."""

import json

import pytest

from wavetrain.cli import main
from wavetrain.cluster import load_cluster, write_cluster
from wavetrain.commands import demo as command
from wavetrain.plan import read_plan
from wavetrain.sim.predict import simulate


@pytest.fixture
def described(monkeypatch):
    """Two hosts of two cores, as in the catalog."""

    def written(path, *, local, quick, device):
        assert (local, quick, device) == (command.RANKS, True, "cpu")
        write_cluster(load_cluster("cpu-host:2"), path)

    monkeypatch.setattr(command, "write_measured", written)


@pytest.mark.usefixtures("described")
def test_it_plans_trains_compares_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "STEPS", 4)
    assert main(["demo", "-o", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "wavetrain.demo/1"
    assert found["same_order"]
    for side in ("predicted", "measured"):
        assert found["step_s"][side] == pytest.approx(sum(pair[side] or 0.0 for pair in found["terms"].values()))
    shown = json.loads((tmp_path / "run" / "run.json").read_text())["memory"]
    assert found["memory_bytes"]["measured"] == pytest.approx(sum(shown.values()))
    predicted = simulate(read_plan(tmp_path / "plan.json")).memory
    assert found["memory_bytes"]["predicted"] == pytest.approx(sum(predicted.get(kind, 0.0) for kind in shown))
    assert all(
        (tmp_path / name).stat().st_size for name in ("report.html", "timelines.svg", "plan.json", "run/measured.json")
    )
    assert set(found["files"].values()) <= {str(path) for path in tmp_path.rglob("*")}
    plan = read_plan(tmp_path / "plan.json")
    shards = {choice.choice.shard for choice in plan.choices}
    assert (plan.layout.schedule, plan.layout.pp, plan.layout.dp) == ("wave", 2, 2)
    assert shards == {2}
    assert plan.choice.shard == 1


def test_a_directory_that_cant_be_written_is_said_at_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "-o", str(tmp_path / "file")]) == 2
    assert "can't be written" in capsys.readouterr().err
