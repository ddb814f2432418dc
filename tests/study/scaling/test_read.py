"""Study files: what they may say, and everything that is wrong with one at once, with its line."""

import pytest

from wavetrain.base.document import parse_yaml
from wavetrain.base.errors import InputError
from wavetrain.base.units import GIB
from wavetrain.planner.question import FAMILIES
from wavetrain.study.scaling.points import points
from wavetrain.study.scaling.read import (
    MOST_POINTS,
    default_failures,
    load_study,
    num_points,
    read_study,
    ready_names,
)
from wavetrain.study.scaling.spec import Batch, Strategy

PLAIN = """
study: plain
model: llama2-7b
node: dgx-h100
devices: [8, 16]
batch: {per_device: 2}
"""


def study_of(text):
    return read_study(parse_yaml(text, file="study.yaml"))


def problems_of(text):
    with pytest.raises(InputError) as caught:
        study_of(text)
    return caught.value.problems


def test_the_least_that_a_study_says():
    found = study_of(PLAIN)
    assert found.models == ("llama2-7b",)
    assert found.devices == (8, 16)
    assert found.batches == (Batch(per_device=2.0),)
    assert found.strategies == (Strategy("free"),)
    assert found.failures == default_failures()
    assert found.stop_below == 0.5
    assert found.tokens is None


def test_default_failures_are_of_the_cited_run():
    """419 unexpected interruptions in 54 days on 16,384 devices."""
    assert default_failures().device_hours == pytest.approx(54 * 24 * 16384 / 419, rel=1e-3)


def test_all_that_a_study_may_say():
    found = study_of("""
study: everything
title: all keys
model: [llama2-7b, llama2-13b]
seq_len: [2048, 4096]
node: [dgx-a100, dgx-h100]
device: [a100-sxm-80gb, h200]
memory_gib: [40, 80]
devices: {from: 8, to: 32, factor: 2}
batch: [{per_device: 0.5}, {total: 256}]
strategies:
  - fsdp
  - {name: two, tp: 2, shard: dp, recompute: full, keep: true, schedule: 1f1b}
  - {grid: {tp: [1, 2], pp: [1, 2]}, cp: 1, only: [megatron]}
  - free
objective: [throughput, cost]
tokens: 1.5T
stop_below: 60%
failures: {device_hours: 1000, asynchronous: false}
what_if: [network_bandwidth x2]
published:
  - {name: theirs, source: a paper, quantity: mfu, points: {8: 0.5, 16: 0.4}}
time_limit_s: 5
precision: bf16
""")
    assert found.memories == (40 * GIB, 80 * GIB)
    assert found.devices == (8, 16, 32)
    assert [one.name for one in found.strategies][2:] == [
        *("tp 1, pp 1", "tp 1, pp 2", "tp 2, pp 1", "tp 2, pp 2"),
        "free",
    ]
    assert found.strategies[1].pins == {
        "tp": 2,
        "shard": "dp",
        "recompute": "full",
        "keep": True,
        "schedule": "1f1b",
    }
    assert found.strategies[3].pins == {"cp": 1, "tp": 1, "pp": 2}
    assert found.tokens == 1.5e12
    assert found.stop_below == pytest.approx(0.6)
    assert found.failures.device_hours == 1000
    assert found.failures.restart_s == default_failures().restart_s
    assert not found.failures.asynchronous
    assert found.published[0].points == ((8, 0.5), (16, 0.4))
    assert num_points(found) == 2 * 2 * 2 * 2 * 2 * 3 * 2 * 7 * 2
    assert num_points(found) == len(list(points(found)))


def test_every_problem_is_named_with_its_line():
    text = """study: bad
model: [llama2-7b, lama2-13b]
seq_len: many
node: dgx-h200x
devices: [8, 12, 8]
batch: {per_device: 1, total: 2}
strategies:
  - fsdpp
  - {tp: zero, shard: rows}
objective: speed
tokens: lots
stop_below: 150%
failures: {device_hours: -1, restarts: 3}
what_if: [gravity x2]
speed: 3
"""
    found = {(problem.where, problem.key) for problem in problems_of(text)}
    assert found == {
        ("study.yaml:2", "model"),
        ("study.yaml:3", "seq_len"),
        ("study.yaml:4", "node"),
        ("study.yaml:5", "devices"),
        ("study.yaml:6", "batch[0].per_device"),
        ("study.yaml:8", "strategies"),
        ("study.yaml:9", "strategies[1].tp"),
        ("study.yaml:9", "strategies[1].shard"),
        ("study.yaml:10", "objective"),
        ("study.yaml:11", "tokens"),
        ("study.yaml:12", "stop_below"),
        ("study.yaml:13", "failures.device_hours"),
        ("study.yaml:13", "failures.restarts"),
        ("study.yaml:14", "what_if"),
        ("study.yaml:15", "speed"),
    }


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("devices: [8, 16]", "devices: [8, 12]", "nearest: 8 or 16"),
        ("devices: [8, 16]", "devices: {from: 8, to: 16}", "a factor or a step"),
        ("devices: [8, 16]", "devices: {from: 16, to: 8, factor: 2}", "must not be below from"),
        ("devices: [8, 16]", "devices: []", "1 to"),
        ("node: dgx-h100", "node: osdp-titan", "no network"),
        ("model: llama2-7b", "model: llama2-7c", "nearest: llama2-7b"),
        ("batch: {per_device: 2}", "batch: {}", "one of them"),
        ("batch: {per_device: 2}", "batch: 4", "must be a mapping"),
        ("batch: {per_device: 2}", "batch: {per_device: 2}\nobjective: devices", "states devices and batch"),
        ("batch: {per_device: 2}", "batch: {per_device: 2}\nstrategies: [fsdp, fsdp]", "called fsdp"),
        ("batch: {per_device: 2}", "batch: {per_device: 2}\nprecision: fp5", "possible: bf16"),
        ("batch: {per_device: 2}\n", "", "missing"),
        ("study: plain", "study: a/b", "plain name"),
        ("study: plain", "study: ..", "plain name"),
        ("study: plain", "study: 'a\\b'", "plain name"),
    ],
)
def test_what_is_wrong_is_said(old, new, word):
    assert word in "\n".join(map(str, problems_of(PLAIN.replace(old, new))))


def test_every_model_takes_every_length():
    text = PLAIN.replace("model: llama2-7b", "model: [llama2-7b, gpt3-125m, gpt3-1.3b]\nseq_len:\n  - 2048\n  - 4096")
    found = problems_of(text.replace("study: plain", "study: a/b"))
    assert [(problem.where, problem.key) for problem in found] == [
        ("study.yaml:2", "study"),
        ("study.yaml:6", "seq_len"),
        ("study.yaml:6", "seq_len"),
    ]
    assert found[1].rule.startswith("gpt3-125m: must be a whole number from 1 to 2,048")


def test_a_grid_has_its_name_and_is_mixed_as_said():
    found = study_of(f"{PLAIN}strategies:\n  - {{name: mine, mixed: true, grid: {{tp: [1, 2], pp: [1]}}}}\n").strategies
    assert [(one.name, one.mixed) for one in found] == [("mine, tp 1, pp 1", True), ("mine, tp 2, pp 1", True)]


@pytest.mark.parametrize(
    "beside", ["only: [fsdp]", "shard: dp", "keep: true", "recompute: full", "shard_optimizer: true", "pp: 2"]
)
def test_operators_are_not_chosen_one_by_one_beside_what_holds_for_all(beside):
    (problem,) = problems_of(f"{PLAIN}strategies:\n  - {{mixed: true, {beside}}}\n")
    assert (problem.where, problem.key) == ("study.yaml:8", "strategies[0].mixed")
    assert f"means nothing beside {beside.partition(':')[0]}" in problem.rule
    assert study_of(f"{PLAIN}strategies:\n  - {{mixed: false, {beside}}}\n")


@pytest.mark.parametrize("key", ["\u00b2", "9" * 5000, "0", "many", "\u0663"])
def test_published_points_are_at_numbers_of_devices(key):
    text = f"{PLAIN}published:\n  - name: a\n    source: b\n    quantity: mfu\n    points:\n"
    (problem,) = problems_of(f"{text}      ? '{key}'\n      : 0.5\n")
    assert problem.rule == "must be a number of devices"


@pytest.mark.parametrize(
    "devices",
    ["{from: 1, to: 10000000, step: 1}", "{from: 8, to: 8000000, step: 8}"],
)
def test_a_sweep_that_is_too_large_is_refused_before_it_is_drawn_out(devices):
    text = "\n".join(map(str, problems_of(PLAIN.replace("[8, 16]", devices))))
    assert "1,000,000" in text or "10,000,000" in text


def test_a_thousand_million_points_are_refused_with_their_number():
    """Every list is short, their product is not."""
    lengths = ", ".join(str(128 * number) for number in range(1, 1001))
    numbers = ", ".join(str(8 * number) for number in range(1, 1001))
    batches = ", ".join(f"{{total: {number}}}" for number in range(1, 1001))
    text = f"study: huge\nmodel: llama2-7b\nnode: dgx-h100\nseq_len: [{lengths}]\ndevices: [{numbers}]\n"
    (problem,) = problems_of(f"{text}batch: [{batches}]\n")
    assert f"the sweep has 1,000,000,000 points; a study may have {MOST_POINTS:,}" in problem.rule


def test_ready_studies_are_read():
    asked = {"weak-scaling", "strong-scaling", "model-size", "context-length", "hardware", "crossover"}
    assert asked | {"hanayo-clusters", "osdp-memory", "llama3-405b"} == set(ready_names())
    for name in ready_names():
        found = load_study(name)
        assert found.name == name
        assert found.title


def test_a_name_that_is_no_study():
    with pytest.raises(InputError, match="nearest: weak-scaling"):
        load_study("weak-scalin")


def test_families_are_strategies():
    words = "".join(f"  - {name}\n" for name in FAMILIES)
    found = study_of(f"{PLAIN}strategies:\n{words}")
    assert [one.only for one in found.strategies] == [(name,) for name in FAMILIES]
