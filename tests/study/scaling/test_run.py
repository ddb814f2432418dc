"""A study is carried out point by point; what is known is never computed again, whatever interrupted it."""

import json
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import replace

import pytest

from wavetrain.base.document import parse_yaml
from wavetrain.base.errors import InputError, RunError
from wavetrain.plan import read_plan
from wavetrain.sim.predict import simulate
from wavetrain.study.scaling import run as run_module
from wavetrain.study.scaling.points import cluster_of, key_of, points, question_of
from wavetrain.study.scaling.read import read_study
from wavetrain.study.scaling.record import Record, flat, record_of
from wavetrain.study.scaling.run import run_study
from wavetrain.study.scaling.solve import Solved
from wavetrain.study.scaling.store import LINES, opened

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


# --- what must not be kept, or said ---


def asked_of(text):
    return read_study(parse_yaml(text, file="study.yaml"))


def test_an_interrupted_search_is_no_answer(study, tmp_path, monkeypatch):
    """In one process Ctrl-C comes to the search itself, which would answer with the best so far."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("wavetrain.planner.search._State.drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(replace(study, strategies=study.strategies[:1]), tmp_path, jobs=1)
    assert (tmp_path / LINES).read_text() == ""
    monkeypatch.undo()
    assert run_study(study, tmp_path).computed == 6


def test_a_schedule_that_no_layout_has_is_blamed(tmp_path):
    text = TEXT.replace("[4, 8, 16]", "[8]").replace("{name: too deep, pp: 64}", "{name: flat, pp: 1, schedule: wave}")
    _, record = run_study(asked_of(text), tmp_path).records
    assert "schedule wave: no layout has it beside the rest" in record.why
    assert "possible: 2, " in record.why  # as pp
    assert "bound alone" not in record.why


def test_without_time_nothing_is_said_of_memory_and_nothing_kept(study, tmp_path):
    hurried = replace(study, time_limit_s=0.0, strategies=study.strategies[:1], what_if=("memory x2",))
    found = run_study(hurried, tmp_path)
    assert {one.why for one in found.records} == {"no plan was found in 0 s; more time with time_limit_s"}
    assert not any(one.fits for one in found.records)
    assert (tmp_path / LINES).read_text() == ""
    again = run_study(hurried, tmp_path)
    assert (again.computed, again.reused) == (3, 0)


def test_what_does_not_fit_says_which_change_would_make_it(tmp_path):
    text = TEXT.replace("gpt3-125m", "gpt3-1.3b").replace("[4, 8, 16]", "[8]").replace("fsdp", "ddp")
    narrow = f"{text}memory_gib: 16\nwhat_if: [peak x2, memory x2]\n"
    small, deep = run_study(asked_of(narrow), tmp_path).records
    assert small.why.startswith("the plan that comes nearest needs")
    assert small.why.endswith("; fits with memory x2")
    assert "fits with" not in deep.why
    hopeless, _ = run_study(asked_of(narrow.replace("memory_gib: 16", "memory_gib: 4")), tmp_path).records
    assert "fits with" not in hopeless.why


def test_what_costs_nothing_has_no_price_to_halve(tmp_path):
    cluster = tmp_path / "gift.yaml"
    cluster.write_text("name: gift\nnode: {like: dgx-a100, device: {like: a100-sxm-80gb, usd_per_hour: 0}}\n")
    text = TEXT.replace("dgx-a100", str(cluster)).replace("[4, 8, 16]", "[8]").replace(", {name: too deep, pp: 64}", "")
    asked = asked_of(f"{text}what_if: [price /2, peak x2]\nobjective: [throughput, cost]\n")
    found = run_study(asked, tmp_path / "out").records
    assert [set(one.what_if) for one in found] == [{"peak x2"}] * 2
    assert [one.gap for one in found] == [0.0, 0.0]


def test_bytes_that_are_no_text_are_computed_again(study, done, tmp_path):
    found, folder = done
    (tmp_path / "plans").mkdir()
    for record in found.records[:3]:
        (tmp_path / record.plan_file).write_bytes((folder / record.plan_file).read_bytes())
    (tmp_path / LINES).write_bytes(b"\xff\xfe{\n" + (folder / LINES).read_bytes())
    assert run_study(study, tmp_path).computed == 0


@pytest.fixture
def full_disk():
    """Files can't grow beyond some bytes, from when it is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_with_what_to_do(done, tmp_path, full_disk):
    def kept():
        with opened(tmp_path) as store:
            full_disk()
            store.keep(Solved("key", done[0].records[-1]))

    with pytest.raises(RunError, match=r"can't be kept: .*; run again to continue"):
        kept()


def test_a_worker_that_is_killed_is_told_with_what_to_do(study, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "_begin", os._exit)
    with pytest.raises(RunError, match=r"was killed.*; run again to continue"):
        run_study(study, tmp_path, jobs=2)


def test_a_file_that_changes_while_a_study_runs_is_named(study, tmp_path, monkeypatch):
    """Another process reads it again, and what it answers is another question."""
    answer = run_module.solve
    monkeypatch.setattr(run_module, "solve", lambda point: replace(answer(point), key="another"))
    with pytest.raises(InputError, match=r"gpt3-125m, dgx-a100\n *changed while the study ran"):
        run_study(study, tmp_path)
    assert (tmp_path / LINES).read_text() == ""
