"""Every rule is broken once, alone; plans that break none have no problems."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from valid import ATTENTION, Q_PROJ, a_plan, cluster, model, named, plans

from wavetrain.base.units import DType
from wavetrain.cluster import Group
from wavetrain.model import Run
from wavetrain.plan.check import TRAINING, check
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan
from wavetrain.plan.stack import Precision, Stack
from wavetrain.schedule.schedules import SCHEDULES, Shape
from wavetrain.schedule.verify import verify

EVEN = "[8, 8, 8, 8]"
EVERY_COUNT = tuple(str(2**k) for k in range(7))


def only(plan: Plan):
    """The one problem of a plan."""
    problems = check(plan)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def test_the_plan_to_start_from_is_valid():
    assert check(a_plan()) == []


@given(plans())
@settings(max_examples=150)
def test_plans_of_valid_degrees_have_no_problems(plan):
    assert check(plan) == []


@pytest.mark.parametrize("name", ["tp", "cp", "dp", "pp", "global_batch", "microbatch", "chunks", "waves"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, 2**31 + 1])
def test_sizes_are_whole_numbers_and_nothing_follows_from_a_wrong_one(name, value):
    problem = only(replace(a_plan(), layout=replace(a_plan().layout, **{name: value})))
    assert (problem.where, problem.key, problem.value, problem.nearest) == ("plan", f"layout.{name}", value, ("1",))
    assert "whole number from 1" in problem.rule


DECODER_ONLY = replace(model(), name="stub", layers=model().layers[1:2], order=(Run("decoder", 32),))
LONELY = replace(cluster(), groups=(Group(replace(cluster().node, network=None), 4),))
TWO_KINDS = replace(cluster(), groups=(Group(cluster().node, 2), Group(cluster("dgx-a100:1").node, 2)))
SEVENTHS = {"model": model("qwen2-7b"), "cluster": cluster("dgx-h100:7"), "pp": 1}
TRACED = {"fixed_length": True, "seq_len": 1024}
ALL_FALSE = ("false",)

# what is changed; then the key, a part of the rule, the legal values and the nearest that the problem must name
BROKEN = {
    "fewer devices than there are": ({"dp": 2}, "layout.dp", "is 16 devices, but the cluster has 32", ["4"], ["4"]),
    "more devices than there are": ({"dp": 8}, "layout.dp", "is 64 devices, but the cluster has 32", ["4"], ["4"]),
    "degrees that can't make it": ({"pp": 3, "dp": 4}, "layout.dp", "no dp mends that, since tp 2 x cp 1", [], []),
    "batch": ({"global_batch": 60}, "layout.global_batch", "dp 4 x microbatch 2 = 8", ["multiples of 8"], ["56", "64"]),
    "small batch": ({"global_batch": 3}, "layout.global_batch", "a multiple of dp", ["multiples of 8"], ["8"]),
    "one microbatch for two copies": (
        *({"schedule": "chimera", "global_batch": 8}, "layout.global_batch", "2 copies of the model"),
        *(["16 or more"], ["16"]),
    ),
    "heads": (
        *({"tp": 5, "pp": 2, "cluster": cluster("dgx-h100:5")}, "layout.tp", "divide the 32 attention heads"),
        *(["1", "2", "4", "8"], ["4", "8"]),
    ),
    "key-value heads": (
        *({**SEVENTHS, "tp": 7, "dp": 8, "global_batch": 64}, "layout.tp", "divide the 4 key-value heads, or be"),
        *(["1", "2", "4"], ["4"]),
    ),
    "sequence parallelism of one": (
        *({"tp": 1, "dp": 8, "sequence_parallel": True}, "layout.sequence_parallel", "and there is one", ["false"], []),
    ),
    "sequence over tp x cp": (
        *({"cp": 2, "dp": 2, "sequence_parallel": True, "seq_len": 4094}, "seq_len", "multiple of tp 2 x cp 2 = 4"),
        *(["multiples of 4"], ["4092", "4096"]),
    ),
    "sequence over cp": (
        *({"cp": 4, "dp": 1, "seq_len": 4094}, "seq_len", "multiple of cp 4", ["multiples of 4"], ["4092", "4096"]),
    ),
    "no length": ({"seq_len": 0}, "seq_len", "whole number from 1", [], ["4096"]),
    "learned positions": (
        *({"model": model("gpt3-125m"), "seq_len": 4096}, "seq_len", "positions gpt3-125m has learned"),
        *(["1 to 2048"], ["2048"]),
    ),
    "traced length": (
        *({"model": replace(model(), **TRACED), "seq_len": 512}, "seq_len", "fixes its length", ["1024"], ["1024"]),
    ),
    "shard": ({"choice": Choice(shard=3)}, "choice.shard", "must divide dp (4)", ["1", "2", "4"], ["2", "4"]),
    "no shard": ({"choice": Choice(shard=0)}, "choice.shard", "whole number from 1", [], ["1"]),
    "shard of one operator": (
        *({"choices": named(shard=8)}, "choices[0].choice.shard", "must divide dp (4)", ["1", "2", "4"], ["4"]),
    ),
    "keep": ({"choice": Choice(keep=True)}, "choice.keep", "shard 1 gathers none", ALL_FALSE, []),
    "keep of one operator": (
        *({"choice": Choice(shard=4), "choices": named(keep=True)}, "choices[0].choice.keep", "gathers none"),
        *(ALL_FALSE, []),
    ),
    "layer": (
        *({"choices": named(layer="decodr")}, "choices[0].layer", "llama2-7b has no such layer"),
        *(["embedding", "decoder", "head"], ["decoder"]),
    ),
    "operator of another layer": (
        *({"choices": named(layer="head")}, "choices[0].operator", "head has no such operator"),
        *(["model.norm", "lm_head", "loss"], []),
    ),
    "operator twice": ({"choices": named() * 2}, "choices[1].operator", "already, choices[0]", [], []),
    "slices": ({"choices": named(slices=3)}, "choices[0].choice.slices", "so many slices", EVERY_COUNT, ["2", "4"]),
    "slices of what has no product": (
        *({"choices": named(ATTENTION, slices=2)}, "choices[0].choice.slices", "so many slices", ["1"], ["1"]),
    ),
    "slices of all": ({"choice": Choice(slices=128)}, "choice.slices", "every operator", EVERY_COUNT, ["64"]),
    "a bucket of nothing": (
        *({"stack": Stack(bucket_bytes=0.0)}, "stack.bucket_bytes", "must be a number from 1000", [], []),
    ),
    "a message that takes back time": (
        *({"stack": Stack(message_s=-1.0)}, "stack.message_s", "must be a number from 0", [], []),
    ),
    "experts in pieces": (
        *({"model": model("mixtral-8x7b"), "seq_len": 4096, "tp": 16, "pp": 1, "dp": 2}, "layout.tp"),
        *("must divide the 8 experts", ["1", "2", "4", "8"], ["8"]),
    ),
    "no slices": ({"choice": Choice(slices=0)}, "choice.slices", "whole number from 1", [], ["1"]),
    "recompute of one": (
        *({"choices": named(recompute=True), "recompute": Recompute.SELECTIVE}, "choices[0].choice.recompute"),
        *("its recompute is selective", ALL_FALSE, []),
    ),
    "unknown schedule": ({"schedule": "interleave"}, "layout.schedule", "unknown", TRAINING, None),
    "evaluation": ({"schedule": "forward-only"}, "layout.schedule", "has no backward", TRAINING, ["wave"]),
    "odd ranks": (
        *({"schedule": "chimera", "pp": 1, "dp": 16}, "layout.pp", "even number of ranks", ["even numbers"], ["2"]),
    ),
    "chunks of 1f1b": ({"chunks": 2}, "layout.chunks", "1f1b has no chunks", ["1"], ["1"]),
    "chunks of a wave": ({"schedule": "wave", "chunks": 2}, "layout.chunks", "wave has no chunks", ["1"], ["1"]),
    "waves of a loop": (
        *({"schedule": "interleaved", "waves": 2}, "layout.waves", "interleaved has no waves", ["1"], ["1"]),
    ),
    "waves of zb-v": ({"schedule": "zb-v", "waves": 2}, "layout.waves", "zb-v has no waves", ["1"], ["1"]),
    "ranks without blocks": (
        *({"model": model("gpt3-125m"), "seq_len": 2048, "tp": 1, "pp": 16, "dp": 2, "cut": ()},),
        *("layout.pp", "at most the 12 blocks of gpt3-125m", ["1 to 12"], ["12"]),
    ),
    "too many chunks": (
        *({"schedule": "interleaved", "chunks": 9}, "layout.chunks", "36 stages are more than 32 blocks"),
        *(["1 to 8"], ["8"]),
    ),
    "too many waves": (
        *({"schedule": "wave", "waves": 5}, "layout.waves", "40 stages are more than 32 blocks", ["1 to 4"], ["4"]),
    ),
    "too many ranks for two stages each": (
        *({"schedule": "zb-v", "pp": 32, "tp": 1, "dp": 1}, "layout.pp", "64 stages are more", ["1 to 17"], ["17"]),
    ),
    "a model that can't be cut": (
        *({"model": DECODER_ONLY, "cut": (0, 0)}, "layout.pp", "it stays in one stage, not 4", ["1"], ["1"]),
    ),
    "a short cut": ({"cut": (11, 11, 10)}, "cut", "each of the 4 stages, not 3", [], [EVEN]),
    "a cut of too few blocks": ({"cut": (8, 8, 8, 7)}, "cut", "adds up to 31, but llama2-7b has 32", [], [EVEN]),
    "an empty stage": ({"cut": (16, 0, 8, 8)}, "cut[1]", "only the first and the last", ["1 or more"], [EVEN]),
    "less than a block": ({"cut": (16, -1, 9, 8)}, "cut[1]", "from 0 to", [], ["0"]),
    "no unit for compute": (
        *({"precision": Precision(compute=DType.FP4)}, "precision.compute", "h100-sxm-80gb has no unit for it"),
        *(["fp64", "fp32", "tf32", "fp16", "bf16", "fp8"], ["fp8"]),
    ),
    "no unit for products": (
        *({"precision": Precision(products=DType.INT8)}, "precision.products", "no unit for it"),
        *(["fp64", "fp32", "tf32", "fp16", "bf16", "fp8"], ["fp8"]),
    ),
    "gradients": (
        *({"precision": Precision(gradients=DType.FP8)}, "precision.gradients", "can't be summed in it"),
        *(["fp32", "bf16", "fp16", "fp64"], ["bf16"]),
    ),
    "state": ({"precision": Precision(state_bytes=-1)}, "precision.state_bytes", "from 0 to 64", [], ["12"]),
    "two kinds of nodes": ({"cluster": TWO_KINDS}, "cluster", "has 2 kinds of nodes", ["dgx-h100", "dgx-a100"], []),
    "no nodes": ({"cluster": replace(cluster(), groups=())}, "cluster", "must have a node", [], []),
    "no network": ({"cluster": LONELY}, "cluster", "no network that joins all of its 32 devices", [], []),
    "no devices": (
        *({"cluster": replace(cluster(), groups=(Group(replace(cluster().node, num_devices=0), 4),))},),
        *("cluster.groups[0].node.num_devices", "must be a number from", [], []),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_one_problem(name):
    changes, key, rule, legal, near = BROKEN[name]
    plan = a_plan(**changes)
    problem = only(plan)
    assert problem.where == "plan"
    assert problem.key == key
    assert rule in problem.rule
    assert problem.legal == tuple(legal)
    assert near is None or problem.nearest == tuple(near)
    assert key in str(problem)


def test_an_unknown_schedule_has_its_nearest_names():
    assert only(a_plan(schedule="interleave")).nearest[0] == "interleaved"
    assert "zb-h1" in only(a_plan(schedule="zb-h3")).nearest


def test_a_misspelt_operator_has_its_nearest_names():
    problem = only(a_plan(choices=named("self_attn.q_prj")))
    assert problem.key == "choices[0].operator"
    assert problem.nearest[0] == Q_PROJ
    assert Q_PROJ in problem.legal


def test_what_is_wrong_comes_out_together():
    plan = a_plan(
        tp=3,
        global_batch=63,
        cp=0,
        seq_len=10**10,
        schedule="1f1b",
        waves=4,
        cut=(1, 0, 2, 3),
        choice=Choice(shard=3, keep=True),
        choices=(*named(layer="nothing", shard=5), *named(slices=5, recompute=True)),
        precision=Precision(compute=DType.INT8, products=DType.FP4),
    )
    keys = [problem.key for problem in check(plan)]
    expected = [
        *("layout.cp", "seq_len", "layout.global_batch", "layout.tp", "layout.waves", "cut", "cut[1]"),
        *("choice.shard", "choices[0].layer", "choices[0].choice.shard", "choices[1].choice.slices"),
        *("precision.compute", "precision.products"),
    ]
    assert sorted(keys) == sorted(expected)


def test_a_model_that_cannot_be_cut_runs_in_one_stage():
    one = partial(a_plan, model=DECODER_ONLY, pp=1, dp=16)
    assert check(one()) == []
    assert check(one(cut=(32,))) == []
    assert [problem.key for problem in check(one(cut=(0,)))] == ["cut"]
    wave = check(one(schedule="wave", cut=(0, 0)))
    assert [problem.key for problem in wave] == ["layout.schedule"]
    assert "1f1b" in wave[0].legal
    assert "wave" not in wave[0].legal
    chunked = check(one(schedule="interleaved", chunks=2, cut=(0, 0)))
    assert [(problem.key, problem.legal) for problem in chunked] == [("layout.chunks", ("1",))]


def test_operators_may_recompute_by_choice_or_what_the_plan_recomputes():
    assert check(a_plan(choices=named(recompute=True), recompute=Recompute.FULL)) == []
    assert check(a_plan(choices=named(recompute=True))) == []
    assert check(a_plan(choice=Choice(recompute=True))) == []
    assert check(a_plan(choices=named(ATTENTION, recompute=True), recompute=Recompute.SELECTIVE)) == []


def test_the_ends_of_a_pipeline_may_be_without_blocks():
    assert check(a_plan(cut=(0, 16, 16, 0))) == []
    assert check(a_plan(cut=(1, 20, 11, 0))) == []
    small = model("gpt3-125m")
    assert small.num_blocks == 12
    on = {"model": small, "cluster": cluster("dgx-h100:7"), "seq_len": 2048}
    assert check(a_plan(**on, schedule="interleaved", pp=7, chunks=2, tp=2, cut=(0, *[1] * 12, 0))) == []


def test_a_device_without_bf16_is_told_fp16():
    problems = check(a_plan(cluster=cluster("dgx-1-v100:4")))
    assert [problem.key for problem in problems] == ["precision.compute", "precision.products"]
    assert all(problem.nearest == ("fp16",) for problem in problems)


@pytest.mark.parametrize("field", ["pp", "chunks", "waves"])
def test_an_absurd_size_is_answered_at_once(field):
    schedule = {"pp": "1f1b", "chunks": "interleaved", "waves": "wave"}[field]
    layout = replace(a_plan().layout, schedule=schedule, **{field: 2**31})
    assert f"layout.{field}" in {problem.key for problem in check(replace(a_plan(), layout=layout))}


@given(st.sampled_from(TRAINING), st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_check_accepts_exactly_the_pipelines_that_can_be_drawn_up(schedule, pp, microbatches, chunks, waves):
    """A schedule that passes is ordered and proven, one that does not names a size of its own."""
    of = model("llama2-70b")
    layout = Layout(global_batch=microbatches, pp=pp, schedule=schedule, chunks=chunks, waves=waves)
    depth = SCHEDULES[schedule].placement(Shape(pp, 1, chunks=chunks, waves=waves)).depth
    plan = a_plan(model=of, cluster=cluster("dgx-h100:1"), cut=even_cut(of.num_blocks, depth))
    plan = replace(plan, layout=layout, cluster=_of_size(pp))
    problems, entry = check(plan), SCHEDULES[schedule]
    odd = entry.even_ranks and pp % 2
    untaken = (chunks > 1 and not entry.chunked) + (waves > 1 and not entry.waved)
    lonely = schedule == "chimera" and microbatches < 2
    assert len(problems) == bool(odd) + untaken + lonely
    if not problems:
        actions = entry.order(plan.shape)
        verify(actions, microbatches=microbatches)
        assert actions.placement == plan.placement


def _of_size(devices: int):
    """A cluster of so many nodes with one device each."""
    node = replace(cluster().node, num_devices=1, tiers=())
    return replace(cluster(), groups=(Group(node, devices),))
