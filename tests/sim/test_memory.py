"""The closed form of memory: parts, what each choice holds, and the peak of the event simulation."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from plans import CHUNKED, LAWS, WAVED, blocks_only, model_of, plan_of, plans

from wavetrain.plan.layout import Choice, Recompute
from wavetrain.schedule import SCHEDULES, Costs, evaluate
from wavetrain.sim.estimate import SCHEDULE_KINDS
from wavetrain.sim.gather import gather
from wavetrain.sim.memory import in_flight, memory, saved_bytes
from wavetrain.sim.predict import simulate

CLOSED = tuple(name for name in SCHEDULE_KINDS if name != "chimera")


def held(plan):
    return memory(gather([plan]), LAWS)


def peak(plan):
    return float(held(plan).peak_bytes[0])


@st.composite
def even_plans(draw, *, whole=False):
    schedule, pp = draw(st.sampled_from(CLOSED)), draw(st.sampled_from((2, 4, 8)))
    per_rank = draw(st.sampled_from((1, 2)))
    return plan_of(
        model_of("megatron-1.7b", 64) if whole else blocks_only("gpt3-1.3b", 64),
        "dgx-a100",
        seq_len=1024,
        pp=pp,
        schedule=schedule,
        chunks=2 * per_rank if schedule in CHUNKED else 1,
        waves=per_rank if schedule in WAVED else 1,
        global_batch=pp * draw(st.integers(2, 4)),
        recompute=draw(st.sampled_from(Recompute)),
    )


@settings(max_examples=60)
@given(plans())
def test_parts_are_not_negative_and_sum_to_the_peak(plan):
    found = held(plan)
    assert np.isclose(sum(value[0] for value in found.parts.values()), found.peak_bytes[0], rtol=1e-12, atol=0)
    assert all(value[0] >= 0 for value in found.parts.values())
    assert found.reserve_bytes[0] >= LAWS.reserve_bytes


@settings(max_examples=60)
@given(even_plans())
def test_microbatches_in_flight_are_those_of_executed_orders(plan):
    """On the first, the fullest middle and the last rank; microbatches in whole rounds, at least two."""
    batch, placement = gather([plan]), plan.placement
    formula = in_flight(batch)[:, 0] / batch.stages[0]
    costs = Costs.uniform(placement.num_stages)
    order = SCHEDULES[plan.layout.schedule].order(replace(plan.shape, costs=costs))
    counted = [float(number) for number in evaluate(order, costs).peak_in_flight]
    assert formula[0] == counted[0]
    assert formula[2] == counted[placement.ranks[placement.depth - 1]]
    if plan.layout.pp > 2:
        assert formula[1] == max(counted[1:-1])


@settings(max_examples=30)
@given(even_plans())
def test_equal_to_the_peak_of_the_events(plan):
    assert peak(plan) == pytest.approx(simulate(plan).peak_bytes, rel=1e-9)


@settings(max_examples=30)
@given(even_plans(whole=True))
def test_close_to_the_peak_of_the_events_for_whole_models(plan):
    """Embedding and head make ranks differ: the form looks at three of them, each at its own peak."""
    events = simulate(plan).peak_bytes
    assert events * 0.99 <= peak(plan) <= events * 1.1


def test_chimera():
    plan = plan_of(blocks_only("gpt3-1.3b", 64), "dgx-a100", pp=8, schedule="chimera", global_batch=16)
    assert peak(plan) == pytest.approx(simulate(plan).peak_bytes, rel=0.02)


@settings(max_examples=40)
@given(plans())
def test_recomputation_never_holds_more_between_the_passes(plan):
    kept = [saved_bytes(gather([replace(plan, recompute=kind)]), LAWS).block[0] for kind in Recompute]
    none, selective, full = kept
    assert full <= none
    assert selective <= none


@settings(max_examples=40)
@given(plans())
def test_sharding_over_one_rank_holds_the_same(plan):
    assert peak(replace(plan, choice=Choice(1, keep=True))) == peak(replace(plan, choice=Choice(1)))


@settings(max_examples=40)
@given(plans(schedules=("1f1b",)))
def test_keeping_gathered_parameters_never_holds_less(plan):
    shard = plan.layout.dp
    assert peak(replace(plan, choice=Choice(shard, keep=True))) >= peak(replace(plan, choice=Choice(shard)))


def test_states_by_hand():
    """GPT on one device: 2, 4 and 12 bytes per parameter, nothing else static."""
    plan = plan_of(model_of("gpt3-125m", 12), "dgx-a100", global_batch=1, seq_len=128)
    parts, number = held(plan).parts, plan.model.num_parameters
    assert parts["parameters"][0] == 2 * number
    assert parts["gradients"][0] == 4 * number
    assert parts["optimizer"][0] == 12 * number
    assert parts["gathered"][0] == parts["buffers"][0] == 0


def test_zero1_and_sharded_states_by_hand():
    plan = plan_of(model_of("gpt3-125m", 12), "dgx-a100", global_batch=8, dp=8, seq_len=128, shard_optimizer=True)
    parts, number = held(plan).parts, plan.model.num_parameters
    assert parts["optimizer"][0] == pytest.approx(12 * number / 8)
    assert parts["gradients"][0] == pytest.approx((2 + 2 / 8) * number)
    sharded = plan_of(model_of("gpt3-125m", 12), "dgx-a100", global_batch=16, dp=8, seq_len=128, choice=Choice(8))
    parts = held(sharded).parts
    assert parts["parameters"][0] == pytest.approx(4 * number / 8)
    assert parts["gradients"][0] == pytest.approx(4 * number / 8)
    assert parts["optimizer"][0] == pytest.approx(8 * number / 8)
    block = sum(p.num_elements for o in plan.model.layers[1].operators for p in o.parameters)
    assert parts["gathered"][0] == 0
    assert parts["working"][0] >= (3 * 2 + 4) * block


def test_a_tied_head_on_another_rank_holds_a_copy():
    one, two = (plan_of(model_of("gpt3-125m", 12), "dgx-a100", global_batch=8, pp=pp) for pp in (1, 2))
    batch = gather([two])
    vocabulary = 50257 * 768
    assert one.model.num_parameters * 2 == held(one).parts["parameters"][0]
    last = held(replace(two, cut=(1, 11))).parts["parameters"][0] / 2
    block = batch.mean_block(batch.facts.parameters)[0]
    positions = 2048 * 768  # of the embedding too, which the head does not need: at most this much too many
    assert 0 <= last - (11 * block + vocabulary + 2 * 768) <= positions
