"""The closed form: sums, limits, monotony, and the event simulation wherever its assumptions hold."""

import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from plans import BETTER, CHUNKED, IDEAL, LAWS, WAVED, better, blocks_only, model_of, plan_of, plans, priced, with_links

from wavetrain.cluster import load_cluster
from wavetrain.cost.layers import layer_seconds
from wavetrain.plan.layout import Choice, Recompute
from wavetrain.plan.stack import Stack
from wavetrain.schedule import SCHEDULES, Costs, Shape, evaluate
from wavetrain.sim.breakdown import TERMS
from wavetrain.sim.estimate import SCHEDULE_KINDS, BlockTimes, block_times, bubble_seconds, estimate
from wavetrain.sim.gather import gather
from wavetrain.sim.predict import simulate

CLOSED = ("1f1b", "gpipe", "interleaved", "looped-bfs", "wave", "zb-h1", "zb-h2", "interleaved-zb")
WHOLE = tuple(name for name in SCHEDULE_KINDS if not SCHEDULES[name].split)
SPLIT = tuple(name for name in SCHEDULE_KINDS if SCHEDULES[name].split)
SLACK = 1 + 1e-9


def instant(link):
    """A link without latency on which any message is there at once."""
    rate = {"nic_bytes_per_s": 1e30} if hasattr(link, "nic_bytes_per_s") else {"bytes_per_s": 1e30}
    return replace(link, latency_s=0.0, start_s=0.0, ramp_s=0.0, **rate)


INSTANT = with_links(load_cluster("dgx-a100"), instant)


@st.composite
def even_plans(draw, schedules, cluster, **options):
    """Equal stages, microbatches in whole rounds, at least two of them."""
    schedule, pp = draw(st.sampled_from(schedules)), draw(st.sampled_from((2, 4, 8)))
    per_rank = draw(st.sampled_from((1, 2)))
    return plan_of(
        blocks_only("gpt3-1.3b", 64),
        cluster,
        seq_len=1024,
        pp=pp,
        schedule=schedule,
        chunks=2 * per_rank if schedule in CHUNKED else 1,
        waves=per_rank if schedule in WAVED else 1,
        global_batch=pp * draw(st.sampled_from((2, 3, 4))),
        recompute=draw(st.sampled_from(Recompute)),
        **options,
    )


# --- sums ---


@settings(max_examples=80)
@given(plans())
def test_terms_are_not_negative_and_sum_to_the_step(plan):
    found = priced(plan)
    assert set(found.terms) == set(TERMS)
    assert np.isclose(sum(value[0] for value in found.terms.values()), found.step_s[0], rtol=1e-12, atol=0)
    for name, value in found.terms.items():
        assert np.isfinite(value[0]), name
        assert value[0] >= 0, name
    for item in fields(BlockTimes):
        assert getattr(found.block, item.name)[0] >= 0, item.name


# --- against executed orders, and against the event simulation ---


def single(value):
    return np.array([float(value)])


def block_of(f, i, w):
    nothing = {item.name: single(0) for item in fields(BlockTimes)}
    return BlockTimes(**nothing | {"forward_s": single(f), "input_s": single(i), "weight_s": single(w)})


def formula(plan, f, i, w):
    """The bubble of a plan with one block per stage that takes f, i and w."""
    batch = gather([plan])
    whole_s, slowest_s = (f + i + w) * batch.num_blocks, (f + i + w) * batch.first
    return float(bubble_seconds(batch, block_of(f, i, w), whole_s, slowest_s)[0])


def executed(plan, f, i, w):
    shape = plan.shape
    costs = Costs.uniform(plan.placement.num_stages, f=f, i=i, w=w)
    return evaluate(SCHEDULES[plan.layout.schedule].order(replace(shape, costs=costs)), costs)


@st.composite
def one_block_each(draw, schedules):
    schedule, pp = draw(st.sampled_from(schedules)), draw(st.integers(2, 6))
    per_rank = draw(st.integers(1, 3))
    layout = {"chunks": per_rank if schedule in CHUNKED else 1, "waves": per_rank if schedule in WAVED else 1}
    depth = SCHEDULES[schedule].placement(Shape(pp, 1, **layout)).depth
    rounds = draw(st.integers(1, 4))
    model = blocks_only("tiny-gpt", depth)
    return plan_of(model, "dgx-a100", global_batch=pp * rounds, pp=pp, schedule=schedule, **layout)


lengths = st.integers(1, 40)


@settings(max_examples=150)
@given(one_block_each(CLOSED), lengths, lengths, lengths)
def test_bubbles_are_those_of_executed_orders(plan, f, i, w):
    found = executed(plan, f, i, w)
    assert formula(plan, f, i, w) == found.makespan - max(found.busy)


@settings(max_examples=80)
@given(one_block_each(("1f1b", "zb-h1", "zb-h2", "interleaved-zb")), lengths, lengths, lengths)
def test_bubbles_without_a_barrier_are_the_longest_span(plan, f, i, w):
    """Ranks that start later may end later: what counts is how long one of them takes (Qi et al. 2023, section 4)."""
    found = executed(plan, f, i, w)
    spans = [end - start for start, end in zip(found.first_start, found.last_end, strict=True)]
    free = replace(plan, stack=Stack(barrier=False))
    assert formula(free, f, i, w) == max(spans) - max(found.busy)


@settings(max_examples=30)
@given(one_block_each(("wave-zb",)), lengths)
def test_the_split_wave_with_equal_parts(plan, unit):
    """Its order fills gaps greedily: on five ranks it misses the formula by one part."""
    found = executed(plan, unit, unit, unit)
    idle = found.makespan - max(found.busy)
    assert formula(plan, unit, unit, unit) <= idle <= formula(plan, unit, unit, unit) + unit


@settings(max_examples=40)
@given(one_block_each(("wave-zb",)), lengths, lengths, lengths)
def test_the_split_wave_is_never_better_than_its_formula(plan, f, i, w):
    found = executed(plan, f, i, w)
    assert formula(plan, f, i, w) <= found.makespan - max(found.busy)


@settings(max_examples=40)
@given(even_plans(CLOSED, INSTANT))
def test_equal_to_the_events_without_messages(plan):
    assert priced(plan, IDEAL).step_s[0] == pytest.approx(simulate(plan, IDEAL).step_s, rel=1e-12)


@settings(max_examples=20)
@given(even_plans(("1f1b", "zb-h1", "zb-h2", "interleaved-zb"), INSTANT, stack=Stack(barrier=False)))
def test_equal_to_the_events_without_messages_and_barrier(plan):
    assert priced(plan, IDEAL).step_s[0] == pytest.approx(simulate(plan, IDEAL).step_s, rel=1e-12)


@settings(max_examples=30)
@given(even_plans(CLOSED, "dgx-a100"))
def test_close_to_the_events_with_messages(plan):
    assert priced(plan).step_s[0] == pytest.approx(simulate(plan).step_s, rel=0.02)


@settings(max_examples=30)
@given(even_plans(CLOSED, "dgx-a100", stack=Stack(message_overlap=True)))
def test_close_to_the_events_with_messages_beside_compute(plan):
    assert priced(plan).step_s[0] == pytest.approx(simulate(plan).step_s, rel=0.02)


def test_chimera_is_close_to_the_events():
    plan = plan_of(blocks_only("gpt3-1.3b", 64), "dgx-a100", seq_len=1024, pp=8, schedule="chimera", global_batch=16)
    assert priced(plan).step_s[0] == pytest.approx(simulate(plan).step_s, rel=0.02)


@settings(max_examples=20)
@given(plans(schedules=("1f1b",)).filter(lambda plan: plan.layout.pp == 1))
def test_equal_to_the_events_without_a_pipeline(plan):
    assert priced(plan).step_s[0] == pytest.approx(simulate(plan).step_s, rel=1e-12)


# --- limits ---


@settings(max_examples=40)
@given(plans())
def test_groups_of_one_send_nothing(plan):
    alone = replace(plan.layout, tp=1, sequence_parallel=False, cp=1, dp=1, global_batch=plan.layout.num_microbatches)
    alone = replace(alone, microbatch=1)
    terms = priced(replace(plan, layout=alone, choice=Choice())).terms
    for name in ("tensor", "context", "sharding", "reduction", "gather", "stragglers"):
        assert terms[name][0] == 0, name


@settings(max_examples=40)
@given(plans(), st.booleans())
def test_sharding_over_one_rank_is_replication(plan, keep):
    found = [priced(replace(plan, choice=Choice(1, keep=kept))).step_s[0] for kept in (keep, False)]
    assert found[0] == found[1]
    assert priced(replace(plan, choice=Choice(1, keep=keep))).terms["sharding"][0] == 0


@settings(max_examples=40)
@given(plans())
def test_full_recomputation_is_one_more_forward(plan):
    once, again = (replace(plan, recompute=kind) for kind in (Recompute.NONE, Recompute.FULL))
    batch = gather([again])
    times = layer_seconds(batch.facts.table, batch.device, batch.stack, batch.precision, LAWS)
    kernels_s = batch.mean_block(times.kernels_s[:, 0])[0]
    host_s = batch.mean_block(times.launches[:, 0])[0] * LAWS.launch_s + LAWS.recompute_host_s
    found = priced(again).block
    assert found.recompute_s[0] == pytest.approx(max(kernels_s, host_s), rel=1e-12)
    assert priced(once).block.recompute_s[0] == 0
    if kernels_s > host_s:
        assert found.recompute_s[0] == pytest.approx(found.forward_s[0], rel=1e-12) or plan.layout.tp > 1


@settings(max_examples=40)
@given(plans())
def test_more_recomputation_is_never_faster(plan):
    kinds = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    steps = [priced(replace(plan, recompute=kind)).step_s[0] for kind in kinds]
    assert steps[0] <= steps[1] * SLACK
    assert steps[0] <= steps[2] * SLACK


# --- monotony ---


@settings(max_examples=150)
@given(plans(schedules=WHOLE), st.sampled_from(BETTER), st.sampled_from((1.01, 2.0, 50.0)))
def test_better_hardware_is_never_slower(plan, what, factor):
    faster = replace(plan, cluster=better(plan.cluster, what, factor))
    assert priced(faster).step_s[0] <= priced(plan).step_s[0] * SLACK


@settings(max_examples=60)
@given(plans(schedules=SPLIT), st.sampled_from(BETTER), st.sampled_from((1.01, 2.0, 50.0)))
def test_better_hardware_never_slows_a_split_backward(plan, what, factor):
    """Where the host sets the pace, a backward is parted in the ratio of its kernels: a shorter W fills less."""
    faster = replace(plan, cluster=better(plan.cluster, what, factor))
    assert priced(faster).step_s[0] <= priced(plan).step_s[0] * (1 + 1e-9)


@settings(max_examples=60)
@given(plans(), st.integers(1, 3))
def test_more_microbatches_are_never_faster(plan, rounds):
    layout = plan.layout
    more = layout.dp * layout.microbatch * layout.pp * rounds
    larger = replace(plan, layout=replace(layout, global_batch=layout.global_batch + more))
    assert priced(plan).step_s[0] <= priced(larger).step_s[0] * SLACK


@settings(max_examples=60)
@given(plans(most=16, clusters=("dgx-a100:16", "p4d:16", "g5-48xlarge:16")), st.sampled_from((2, 4)))
def test_more_replicas_never_raise_the_tokens_of_a_device(plan, times):
    """Weak scaling: each replica has as much to do, and more of them to wait for.

    Not so where switches reduce: each port then sends 1 + 1 / ranks of the tensor (H100: eight beat four).
    """
    layout = replace(plan.layout, shard_optimizer=False)
    plan = replace(plan, layout=layout, choice=Choice())
    wider = replace(layout, dp=layout.dp * times, global_batch=layout.global_batch * times)
    assert priced(plan).step_s[0] <= priced(replace(plan, layout=wider)).step_s[0] * SLACK


def test_a_step_by_hand():
    """One device, one microbatch, nothing hidden: compute, the optimizer and the host are all there is."""
    plan = plan_of(model_of("gpt3-1.3b", 8), "dgx-a100", seq_len=2048, global_batch=1)
    found = estimate(gather([plan]), LAWS)
    named = {name for name, value in found.terms.items() if value[0]}
    assert named == {"compute", "optimizer", "host"}
    block = found.block
    compute_s = 8 * (block.forward_s + block.input_s + block.weight_s)[0]
    assert found.terms["compute"][0] == pytest.approx(compute_s + (found.embedding.total_s + found.head.total_s)[0])
    assert found.terms["host"][0] == LAWS.step_s


def test_a_recomputation_that_stops_early_is_shorter_by_the_last_product():
    plan = plan_of(model_of("llama2-7b", 8), "dgx-a100", seq_len=2048, global_batch=1)
    plan = replace(plan, recompute=Recompute.FULL)
    batch, no_host = gather([plan]), replace(LAWS, recompute_host_s=0.0, launch_s=0.0)
    times = layer_seconds(batch.facts.table, batch.device, batch.stack, batch.precision, no_host)
    whole, early = (block_times(batch, times, replace(no_host, recompute_tail=share)) for share in (1.0, 0.0))
    shorter_s = whole.recompute_s - early.recompute_s
    assert shorter_s == pytest.approx(times.tail_s[batch.blocks])
    assert np.all(shorter_s > 0)
