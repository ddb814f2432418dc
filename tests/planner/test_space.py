"""The space holds every legal layout and nothing else; pins and families narrow it down."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from questions import every_layout, every_plan, listed, question_of

from wavetrain.cluster import load_cluster
from wavetrain.model.limits import divisors
from wavetrain.plan.check import check
from wavetrain.plan.stack import AttentionImpl, Stack
from wavetrain.planner.question import FAMILIES, Pins
from wavetrain.planner.space import node_group

UNFUSED = Stack(attention=AttentionImpl.UNFUSED)


def key(plan):
    return plan.layout, plan.recompute, plan.choice


def part(cluster, devices):
    return load_cluster(cluster).part(devices)


SMALL = {
    "one device": question_of("tiny-gpt", part("dgx-a100", 1), batch=6, blocks=3),
    "two devices": question_of("tiny-gpt", part("dgx-a100", 2), batch=4, blocks=3, stack=UNFUSED),
    "three devices": question_of("tiny-llama", part("dgx-a100", 3), batch=6, blocks=5),
    "four devices": question_of("tiny-moe", part("dgx-a100", 4), batch=2, blocks=6, seq_len=6),
    "a node": question_of("tiny-gpt", "dgx-a100", batch=2, blocks=4),
    "two nodes": question_of("tiny-llama", "gb200-nvl72:2", batch=2, blocks=3),
    "few heads": question_of("gpt3-125m", part("dgx-a100", 6), batch=3, blocks=2, seq_len=100),
    "many stages": question_of("tiny-gpt", part("dgx-a100", 2), batch=2, blocks=14),
}


@pytest.mark.parametrize("name", SMALL)
def test_nothing_legal_is_missing_and_nothing_else_is_there(name):
    question = SMALL[name]
    tried = [key(plan) for plan in every_layout(question)]
    found = [key(plan) for plan in listed(question)]
    assert len(set(tried)) == len(tried)
    assert set(found) - set(tried) == set()
    assert set(tried) - set(found) == set()


@pytest.mark.parametrize("name", ["one device", "two devices", "three devices"])
def test_cuts_are_even_or_balanced(name):
    question = SMALL[name]
    tried, found = ([(*key(plan), plan.cut) for plan in some] for some in (every_plan(question), listed(question)))
    assert set(tried) == set(found)
    assert len(tried) == len(found)


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "blocks"),
    [
        ("tiny-gpt", "dgx-a100:2", 24, 4),
        ("tiny-moe", "dgx-h100:2", 16, 6),
        ("gpt3-1.3b", "gb200-nvl72:20", 160, 24),
        ("llama2-7b", "p4d:4", 96, 32),
        ("two kinds", "osdp-titan", 12, 9),
        ("gpt3-125m", "g5-48xlarge:3", 72, 12),
    ],
)
def test_every_plan_is_legal(model, cluster, batch, blocks):
    question = question_of(model, cluster, batch=batch, blocks=blocks, stack=UNFUSED)
    plans = listed(question, 300)
    assert len(plans) >= 300
    for plan in plans:
        assert check(plan) == []


# --- pins ---

PINS = {
    "tp": (1, 2, 4),
    "sequence_parallel": (True, False),
    "cp": (1, 2),
    "pp": (1, 2, 3),
    "dp": (1, 2, 4),
    "microbatch": (1, 2),
    "schedule": ("1f1b", "wave", "interleaved", "zb-h2", "wave-zb"),
    "waves": (1, 2),
    "chunks": (1, 2),
    "recompute": ("none", "selective", "full"),
    "shard": (1, 2, "dp", "node", "none"),
    "keep": (True, False),
    "shard_optimizer": (True, False),
    "pp_inside": (True, False),
    "devices": (2, 4, 8),
}


def values_of(plan):
    own = {"recompute": plan.recompute, "shard": plan.choice.shard, "keep": plan.choice.keep}
    return own | {"devices": plan.layout.num_devices} | vars(plan.layout)


def has(plan, name, value):
    layout = plan.layout
    if name == "shard" and isinstance(value, str):
        node = plan_node_group(plan)
        value = {"dp": layout.dp, "node": node, "none": 1}[value]
    return values_of(plan)[name] == value


def plan_node_group(plan, node=8):
    layout = plan.layout
    most = max(1, min(layout.dp, node // (layout.tp * layout.cp)))
    return max(group for group in divisors(layout.dp) if group <= most)


FREE = question_of("tiny-gpt", "dgx-a100", batch=4, blocks=6, stack=UNFUSED)


@pytest.fixture(scope="module")
def free():
    return listed(FREE)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in PINS.items() for value in values])
def test_a_pin_leaves_exactly_the_plans_that_have_its_value(free, name, value):
    pinned = listed(replace(FREE, pins=Pins(**{name: value})))
    assert pinned == [plan for plan in free if has(plan, name, value)]
    assert pinned


def test_all_pins_together(free):
    for plan in free[:: len(free) // 40]:
        values = {name: value for name, value in values_of(plan).items() if name in Pins.__dataclass_fields__}
        found = listed(replace(FREE, pins=Pins(**values)))
        assert plan in found
        assert {key(other) for other in found} == {key(plan)}


def test_pins_may_go_beyond_what_is_searched():
    """What is pinned need only be legal."""
    wide = question_of("tiny-gpt", "dgx-a100", batch=384, blocks=2, seq_len=126)
    assert {p.layout.microbatch for p in listed(replace(wide, pins=Pins(microbatch=96, pp=1)))} == {96}
    assert {p.layout.cp for p in listed(replace(wide, pins=Pins(cp=3, pp=1)))} == {3}
    flash = question_of("tiny-gpt", "dgx-a100", batch=2, blocks=2)
    assert {str(p.recompute) for p in listed(replace(flash, pins=Pins(recompute="selective")))} == {"selective"}


def test_pins_that_nothing_has_leave_nothing():
    for pins in (Pins(tp=3), Pins(dp=5), Pins(shard=3), Pins(devices=9), Pins(pp=7), Pins(keep=True, shard=1)):
        assert listed(replace(FREE, pins=pins)) == []


# --- families ---


def belongs(plan, family, node=8):
    layout, choice = plan.layout, plan.choice
    plain, group = layout.tp == layout.cp == layout.pp == 1, choice.shard
    return {
        "ddp": plain and group == 1 and not layout.shard_optimizer,
        "zero1": plain and group == 1 and (layout.shard_optimizer or layout.dp == 1),
        "zero2": plain and group == layout.dp and (choice.keep or layout.dp == 1),
        "fsdp": plain and group == layout.dp and not choice.keep,
        "hsdp": plain and group == plan_node_group(plan, node) and not choice.keep,
        "megatron": group == 1,
        "wave": layout.pp > 1 and layout.schedule in ("wave", "wave-zb"),
        "no-pipeline": layout.pp == 1,
        "no-tensor": layout.tp == 1,
    }[family]


@pytest.mark.parametrize(
    "only",
    [
        *((name,) for name in FAMILIES),
        *(("wave", "megatron"), ("wave", "no-tensor"), ("wave", "no-pipeline"), ("ddp", "wave"), ("fsdp", "zero1")),
        *(("megatron", "no-pipeline"), ("hsdp", "no-tensor", "wave")),
    ],
)
def test_families_leave_exactly_their_plans(free, only):
    found = listed(replace(FREE, only=only))
    wanted = [plan for plan in free if any(belongs(plan, name) for name in only)]
    assert {(*key(plan), plan.cut) for plan in found} == {(*key(plan), plan.cut) for plan in wanted}
    assert found


def test_the_group_of_a_node():
    assert node_group(8, 2, 1, 16) == 4
    assert node_group(8, 8, 2, 16) == 1
    assert node_group(8, 1, 1, 6) == 6
    assert node_group(8, 1, 1, 12) == 6
    assert node_group(4, 1, 1, 9) == 3
