"""A study is carried out point by point; what is known is never computed again, whatever interrupted it."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest

from wavetrain.base.document import parse_yaml
from wavetrain.base.errors import InputError
from wavetrain.plan import read_plan
from wavetrain.sim.predict import simulate
from wavetrain.study.scaling import run as run_module
from wavetrain.study.scaling.points import cluster_of, key_of, points, question_of
from wavetrain.study.scaling.read import read_study
from wavetrain.study.scaling.record import Record, flat, record_of
from wavetrain.study.scaling.run import run_study
from wavetrain.study.scaling.store import LINES

TEXT = """
study: small
model: gpt3-125m
seq_len: 1024
node: dgx-a100
devices: [4, 8, 16]
batch: {per_device: 2}
strategies: [fsdp, {name: too deep, pp: 64}]
tokens: 1B
"""


@pytest.fixture(scope="module")
def study():
    return read_study(parse_yaml(TEXT, file="study.yaml"))


@pytest.fixture(scope="module")
def done(study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return run_study(study, folder), folder


def test_records_are_in_the_order_of_points(study, done):
    found, _ = done
    assert [(one.strategy, one.devices) for one in found.records] == [
        (point.strategy.name, point.devices) for point in points(study)
    ]
    assert (found.computed, found.reused) == (6, 0)


def test_a_record_says_what_the_plan_beside_it_does(done):
    found, folder = done
    for record in found.records[:3]:
        plan = read_plan(folder / record.plan_file)
        seen = simulate(plan)
        assert record.fits
        assert plan.layout.num_devices == record.devices
        assert record.global_batch == plan.layout.global_batch == 2 * record.devices
        assert (record.step_s, record.tokens_per_s, record.mfu) == (seen.step_s, seen.tokens_per_s, seen.mfu)
        assert record.train_s == pytest.approx(1e9 / seen.tokens_per_s)
        assert record.train_mwh == pytest.approx(record.train_s * record.power_w / 3.6e9)
        assert sum(record.terms.values()) == pytest.approx(record.step_s)
        assert 0 < record.goodput_share < 1
        assert record.goodput_tokens_per_s == pytest.approx(record.goodput_share * record.tokens_per_s)


def test_what_can_not_be_says_why(done):
    found, _ = done
    assert [one.fits for one in found.records[3:]] == [False] * 3
    assert all("pp 64" in one.why for one in found.records[3:])
    assert all(one.plan_file == "" for one in found.records[3:])


def test_a_model_that_is_too_large_says_by_how_much(tmp_path):
    text = TEXT.replace("gpt3-125m", "gpt3-175b").replace("1024", "2048").replace("[4, 8, 16]", "[8]")
    found = run_study(read_study(parse_yaml(text, file="study.yaml")), tmp_path)
    assert "80 GiB" in found.records[0].why


def test_nothing_is_computed_twice(study, done, monkeypatch):
    found, folder = done

    def refuse(point):
        raise AssertionError(f"{point} was computed again")

    monkeypatch.setattr(run_module, "solve", refuse)
    again = run_study(study, folder)
    assert again.records == found.records
    assert (again.computed, again.reused) == (0, 6)


def test_only_what_changed_is_computed(study, done):
    found, folder = done
    wider = replace(study, devices=(4, 8, 16, 32))
    renamed = replace(wider, strategies=(replace(wider.strategies[0], name="sharded"), wider.strategies[1]))
    again = run_study(renamed, folder)
    assert (again.computed, again.reused) == (2, 6)
    assert {one.strategy for one in again.records} == {"sharded", "too deep"}
    assert [replace(one, strategy="fsdp") for one in again.records[:3]] == list(found.records[:3])
    with_other_failures = replace(study, failures=replace(study.failures, device_hours=100.0))
    assert not {key_of(point) for point in points(with_other_failures)} & {key_of(point) for point in points(study)}


def test_a_line_cut_short_or_a_plan_that_is_gone_is_computed_again(study, done, tmp_path):
    found, folder = done
    lines = (folder / LINES).read_text().splitlines()[:6]
    (tmp_path / "plans").mkdir()
    for record in found.records[:2]:
        (tmp_path / record.plan_file).write_bytes((folder / record.plan_file).read_bytes())
    kept = [line for line in lines if json.loads(line)["record"]["devices"] != 16 or "too deep" in line]
    (tmp_path / LINES).write_text("\n".join([*kept, "not json", lines[0][:50]]))
    again = run_study(study, tmp_path)
    assert again.computed == 1
    assert again.records == found.records
    assert run_study(study, tmp_path).computed == 0


def test_two_studies_in_one_folder_at_once_are_refused(study, done):
    _, folder = done

    def told(_):
        with pytest.raises(InputError, match="another study"):
            run_study(study, folder)

    run_study(study, folder, told=told)


def test_cores_share_the_points(study, done, tmp_path):
    heard = []
    found = run_study(study, tmp_path, jobs=2, told=heard.append)
    assert found.records == done[0].records
    assert [status.done for status in heard] == list(range(7))
    assert heard[-1].left_s == 0
    assert "6 of 6 points" in str(heard[-1])


def test_a_killed_study_goes_on(study, tmp_path):
    """Killed after its first points; what they gave is used, and no worker is left."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_study, args=(study, tmp_path), kwargs={"jobs": 1})
    process.start()
    lines = tmp_path / LINES
    while not lines.exists() or lines.read_text().count("\n") < 2:
        time.sleep(0.01)
        assert process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    known = sum(line.endswith("}") for line in lines.read_text().splitlines())
    again = run_study(study, tmp_path)
    assert 1 <= again.reused <= known
    assert again.computed == 6 - again.reused


def test_less_memory_and_other_devices(study):
    changed = replace(study, device_kinds=("h200",), memories=(2.0**34,))
    point = next(iter(points(changed)))
    device = cluster_of(point).device
    assert device.memory_bytes == 2**34
    assert device.name.lower().startswith("h200")
    assert point.node_words == "dgx-a100 with h200 and 16 GiB"
    assert question_of(point).cluster.num_devices == 4


def test_records_are_read_as_written(done):
    for record in done[0].records:
        assert record_of(json.loads(json.dumps(record.as_json()))) == record
        assert not any(isinstance(value, dict) for value in flat(record).values())
    with pytest.raises(ValueError, match="unknown keys: colour"):
        record_of({"colour": 1})


def test_what_if_is_planned_again(study, tmp_path):
    asked = replace(study, devices=(16,), strategies=study.strategies[:1], what_if=("peak x2", "price /2", "memory x2"))
    (record,) = run_study(asked, tmp_path).records
    assert isinstance(record, Record)
    assert 1 < record.what_if["peak x2"] <= 2
    assert record.what_if["price /2"] == pytest.approx(2)
    assert record.what_if["memory x2"] >= 1
