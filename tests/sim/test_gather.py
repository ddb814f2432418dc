"""From plans to columns: what a batch says of each plan, and that plans in a batch don't disturb each other."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from plans import FOLDED, LAWS, model_of, plan_of, plans

from wavetrain.model import load_model
from wavetrain.model.model import Run
from wavetrain.plan.layout import Choice
from wavetrain.plan.plan import OperatorChoice
from wavetrain.sim.estimate import SCHEDULE_KINDS, estimate
from wavetrain.sim.gather import gather
from wavetrain.sim.memory import memory


@st.composite
def groups(draw):
    """Plans that may share a batch: one cluster, stack and precision."""
    first, *others = (draw(plans(clusters=("dgx-a100:4",))) for _ in range(5))
    return [first, *(replace(plan, stack=first.stack) for plan in others)]


@settings(max_examples=25)
@given(groups())
def test_a_batch_equals_its_plans_one_by_one(group):
    batch = gather(group)
    found, held = estimate(batch, LAWS), memory(batch, LAWS)
    for number, plan in enumerate(group):
        alone = gather([plan])
        one = estimate(alone, LAWS)
        assert found.step_s[number] == pytest.approx(one.step_s[0], rel=1e-12)
        for name, value in one.terms.items():
            assert found.terms[name][number] == pytest.approx(value[0], rel=1e-9, abs=1e-15)
        parts = memory(alone, LAWS)
        assert held.peak_bytes[number] == pytest.approx(parts.peak_bytes[0], rel=1e-12)
        assert held.reserve_bytes[number] == pytest.approx(parts.reserve_bytes[0], rel=1e-12)


def test_equal_layers_are_one_case():
    plan = plan_of(model_of("tiny-gpt", 8), "dgx-a100", global_batch=8)
    batch = gather([plan, plan])
    assert batch.facts.table.num_cases == 3
    assert len(set(batch.blocks.ravel())) == 1
    assert batch.num_blocks.tolist() == [8, 8]


@pytest.mark.parametrize("schedule", SCHEDULE_KINDS)
def test_where_the_ends_are(schedule):
    chunks = 2 if schedule in ("interleaved", "looped-bfs", "interleaved-zb") else 1
    plan = plan_of(
        model_of("tiny-gpt", 16), "dgx-a100", global_batch=16, pp=4, schedule=schedule, chunks=chunks, waves=1
    )
    batch = gather([plan])
    stages = chunks * (2 if schedule in FOLDED else 1)
    assert batch.stages[0] == stages
    assert batch.folded[0] == (schedule in FOLDED or schedule == "chimera")
    assert batch.copies[0] == (2 if schedule == "chimera" else 1)
    assert batch.microbatches[0] == 16
    assert batch.most[0] == max(plan.blocks_by_rank)


def test_an_uneven_cut_is_kept():
    plan = plan_of(model_of("tiny-gpt", 14), "dgx-a100", global_batch=8, pp=4, cut=(3, 4, 4, 3))
    batch = gather([plan])
    assert (batch.first[0], batch.most[0], batch.last[0]) == (3, 4, 3)


def test_a_named_operator_is_a_part_by_itself():
    """What is replicated is in none."""
    model = model_of("tiny-gpt", 4)
    block = model.layers[1]
    linears = [o.name for o in block.operators if o.kind == "linear"]
    choices = tuple(OperatorChoice(block.name, name, Choice(8)) for name in linears[:2])
    choices += tuple(OperatorChoice(block.name, name, Choice(4, keep=True)) for name in linears[2:])
    plan = plan_of(model, "dgx-a100", global_batch=8, dp=8, choices=choices)
    batch = gather([plan])
    found = sorted((float(p.group[0, 0]), bool(p.keep[0, 0]), bool(p.named[0, 0])) for p in batch.sharded)
    assert found == [(4.0, True, True)] * (len(linears) - 2) + [(8.0, False, True)] * 2
    cut = sum(o.inputs * o.outputs + o.outputs for o in block.operators if o.kind == "linear")
    assert batch.sharded_parameters[0, 0] == cut
    assert batch.mean_block(batch.facts.parameters)[0] > cut


def test_blocks_of_two_kinds_are_averaged():
    """Of nine blocks three are of another kind: the average block is two thirds the one and a third the other."""
    model = load_model("tiny-llama")
    first, block, last = model.order
    twin = replace(model.layers[1], name="twin", operators=model.layers[1].operators[:2])
    order = (first, replace(block, count=4), Run("twin", 3), replace(block, count=2), last)
    mixed = replace(model, layers=(*model.layers, twin), order=order)
    batch = gather([plan_of(mixed, "dgx-a100", global_batch=8), plan_of(model, "dgx-a100", global_batch=8)])
    assert batch.block_counts.tolist() == [[6, 3], [4, 0]]
    facts = batch.facts.parameters[batch.blocks[0]]
    assert batch.mean_block(batch.facts.parameters)[0] == pytest.approx((6 * facts[0] + 3 * facts[1]) / 9)
