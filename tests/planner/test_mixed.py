"""Blocks and operators chosen one by one: priced as the simulator prices them, better than any uniform choice."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))
sys.path.insert(0, str(Path(__file__).parent))
from plans import model_of, with_device

from wavetrain.cluster import load_cluster
from wavetrain.plan.check import check
from wavetrain.plan.layout import Layout
from wavetrain.planner.certificate import certificate
from wavetrain.planner.choose import choose
from wavetrain.planner.mixed import instance, plan_of
from wavetrain.planner.problem import Run, bundle, peak, time
from wavetrain.planner.prove import prove
from wavetrain.planner.question import Pins, Question
from wavetrain.planner.search import _State, search
from wavetrain.planner.space import degrees, end_groups
from wavetrain.sim.predict import outline

CASES = (
    ("gpt3-1.3b", 24, "dgx-a100:2", {"global_batch": 64, "dp": 16}, 16),
    ("gpt3-1.3b", 5, "dgx-a100:2", {"global_batch": 64, "microbatch": 4, "dp": 16, "shard_optimizer": True}, 1),
    ("gpt3-1.3b", 3, "dgx-a100:2", {"global_batch": 16, "dp": 16}, 8),
    ("tiny-llama", 6, "dgx-a100:2", {"global_batch": 32, "microbatch": 2, "tp": 2, "dp": 8}, 1),
    ("llama2-7b", 1, "dgx-h100:1", {"global_batch": 32, "microbatch": 2, "dp": 8, "cp": 1}, 8),
    ("tiny-moe", 4, "p4d:2", {"global_batch": 32, "dp": 16}, 16),
)


def asked(model, cluster, *, batch, memory=None, seq_len=1024, **options):
    cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
    cluster = with_device(cluster, memory_bytes=int(memory)) if memory else cluster
    return Question(model=model, cluster=cluster, global_batch=batch, seq_len=seq_len, **options)


def drawn(problem, rng):
    """Any selection: bundles and single options, in runs of any length."""
    made = []
    for unit in problem.units:
        runs, left = [], unit.count
        while left:
            count = rng.randint(1, left)
            left -= count
            single = tuple(rng.randrange(len(options)) for options in unit.operators)
            whole = unit.bundles and (not unit.operators or rng.random() < 0.5)
            runs.append(Run(count, bundle(rng.randrange(len(unit.bundles))) if whole else single))
        made.append(tuple(runs))
    return tuple(made)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} x{case[1]} {case[3]['dp']}")
def test_a_selection_takes_what_the_simulator_says_and_holds_no_less(case):
    name, blocks, cluster, layout, end_shard = case
    question = asked(model_of(name, blocks), cluster, batch=layout["global_batch"])
    made = instance(question, Layout(**layout), end_shard, sliced=True)
    rng = random.Random(7)
    for _ in range(15):
        selection = drawn(made.problem, rng)
        plan = plan_of(made, selection)
        assert check(plan) == []
        seen = outline(plan, question.laws)
        assert made.step_s(time(made.problem, selection)) == pytest.approx(seen.step_s, rel=1e-8)
        assert seen.needed_bytes - 2 <= peak(made.problem, selection) <= 1.12 * seen.needed_bytes


@pytest.mark.parametrize("share", [0.2, 0.25, 0.3, 0.4])
def test_no_mixture_is_better_than_its_bound(share):
    cluster = load_cluster("dgx-a100:1")
    memory = share * cluster.device.memory_bytes
    pins = Pins(tp=1, cp=1, pp=1, microbatch=2, dp=8)
    question = asked(model_of("gpt3-1.3b", 12), cluster, batch=32, memory=memory, pins=pins)
    state = _State(question, float("inf"))
    state.expand(degrees(question))
    ((_, bound_s, layout),) = state.mixtures
    found = []
    for zero1 in (False, True):
        for group in end_groups(question, layout):
            made = instance(question, replace(layout, shard_optimizer=zero1), group)
            chosen = choose(made.problem)
            found += [made.step_s(chosen.time)] if chosen.selection else []
    assert bound_s <= min(found, default=float("inf"))


@pytest.fixture(scope="module")
def mixed():
    """A model that fits replicated in no way, and sharded with room to spare."""
    pins = Pins(tp=1, cp=1, pp=1)
    question = asked(model_of("gpt3-1.3b", 24), "dgx-a100:1", batch=64, memory=16e9, seq_len=2048, pins=pins)
    return search(question), search(replace(question, mixed=False))


def test_a_mixture_is_faster_than_any_uniform_choice_and_fits(mixed):
    best, uniform = mixed
    assert best.gap == uniform.gap == 0
    assert best.best.choices
    assert best.found[0].cost < 0.997 * uniform.found[0].cost
    assert best.found[0].outline.needed_bytes <= best.question.capacity_bytes


def test_its_certificate_is_proven(mixed):
    best, _ = mixed
    assert prove(best.best, certificate(best)).is_proven


def test_splitting_makes_a_plan_feasible_that_is_not_without():
    """Of few, wide blocks the gathered copy of one operator alone is too much; in slices it is not."""
    wide = replace(model_of("gpt3-175b", 2), name="wide")
    pins = Pins(tp=1, cp=1, pp=1, microbatch=1)
    question = asked(wide, "dgx-a100:8", batch=64, seq_len=128, pins=pins)
    layout = Layout(global_batch=64, dp=64)
    made = instance(question, layout, 64, sliced=True)
    whole = instance(question, layout, 64).problem
    least = {
        "sliced": choose(replace(made.problem, limit=0)).tightest,
        "whole": choose(replace(whole, limit=0)).tightest,
    }
    assert least["sliced"].peak < 0.9 * least["whole"].peak
    limit = (least["sliced"].peak + least["whole"].peak) // 2
    assert choose(replace(whole, limit=limit)).selection is None
    chosen = choose(replace(made.problem, limit=limit))
    plan = plan_of(made, chosen.selection)
    assert any(item.choice.slices > 1 for item in plan.choices)
    assert outline(plan, question.laws).needed_bytes <= limit
