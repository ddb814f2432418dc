"""Measurements that stand beside claims, in their file."""

import datetime

import pytest

from wavetrain.base.errors import InputError
from wavetrain.study.claims.executed import executed, measured, read_measurements, record


def test_a_run_is_written_and_read_back(tmp_path):
    path = tmp_path / "executed.yaml"
    record(path, "waves", "python waves.py", "two ranks: real, on a quiet machine", {"bubble wave 2": 23.456789})
    record(path, "osdp", "python osdp.py", "no", {"a": 1.0, "b, c": -2})
    found = read_measurements(path.read_text(), str(path))
    assert found["waves"].values == {"bubble wave 2": 23.46}
    assert found["waves"].how == "two ranks: real, on a quiet machine"
    assert found["osdp"].how == "no"
    assert found["osdp"].values == {"a": 1.0, "b, c": -2.0}
    assert datetime.date.fromisoformat(found["osdp"].date)


def test_a_run_replaces_what_was_there_of_it_and_nothing_else(tmp_path):
    path = tmp_path / "executed.yaml"
    for value in (1.0, 2.0):
        record(path, "waves", "w", "w", {"x": value})
        record(path, "osdp", "o", "o", {"y": 3.0})
    record(path, "waves", "w", "w", {"z": 4.0})
    found = read_measurements(path.read_text(), str(path))
    assert {name: dict(run.values) for name, run in found.items()} == {"osdp": {"y": 3.0}, "waves": {"z": 4.0}}


def test_a_file_that_is_wrong_is_not_written_over(tmp_path):
    path = tmp_path / "executed.yaml"
    path.write_text("waves: {command: a, date: b, how: c, values: {x: fast}}\n")
    with pytest.raises(InputError) as caught:
        record(path, "osdp", "o", "o", {"y": 3.0})
    assert "waves.values.x" in str(caught.value)
    assert "fast" in path.read_text()


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "executed.yaml"
    with pytest.raises(InputError):
        record(path, "waves", "w" * 1000, "w", {"x": 1.0})
    assert not path.exists()


def test_what_ships_says_how_it_was_measured():
    found = executed("waves emulated", "bubble wave 2")
    assert found.command.startswith("python benchmarks/waves.py")
    assert datetime.date.fromisoformat(found.date)
    assert measured("osdp", "mixture over FSDP") > 0


def test_what_was_never_run_is_absent():
    assert executed("waves emulated", "no such") is None
    assert executed("nothing", "bubble wave 2") is None
    assert measured("nothing", "x") is None
