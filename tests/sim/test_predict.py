"""Predictions: totals that must agree with each other, monotony, and that nothing is left to chance."""

import math
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from plans import BETTER, GREEDY, LAWS, better, model_of, plan_of, plans, priced

from wavetrain.model.operator import Attention, Work
from wavetrain.plan.layout import Recompute
from wavetrain.schedule import SCHEDULES, verify
from wavetrain.sim.estimate import SCHEDULE_KINDS
from wavetrain.sim.gather import gather
from wavetrain.sim.predict import Prediction, plan_actions, simulate, step_flops
from wavetrain.sim.stages import stage_times

SLACK = 1 + 1e-9
FIXED = tuple(name for name in SCHEDULE_KINDS if name not in GREEDY)
WHOLE = tuple(name for name in FIXED if not SCHEDULES[name].split)
NUMBERS = [item.name for item in fields(Prediction) if item.type == "float"]


@settings(max_examples=60)
@given(plans())
def test_totals_agree(plan):
    found = simulate(plan)
    tokens, devices = plan.layout.global_batch * plan.seq_len, plan.layout.num_devices
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s, rel=1e-9)
    assert all(value >= 0 for value in found.breakdown.values())
    assert sum(found.memory.values()) == pytest.approx(found.peak_bytes, rel=1e-9)
    assert found.tokens_per_s * found.step_s == pytest.approx(tokens)
    assert found.tokens_per_s_per_device * devices == pytest.approx(found.tokens_per_s)
    assert found.tokens_per_joule * found.power_w_per_device == pytest.approx(found.tokens_per_s_per_device)
    assert found.usd_per_hour == pytest.approx(plan.cluster.device.usd_per_hour * devices)
    assert found.usd_per_million_tokens == pytest.approx(found.usd_per_hour / 3600 * 1e6 / found.tokens_per_s)
    assert all(math.isfinite(getattr(found, name)) and getattr(found, name) >= 0 for name in NUMBERS)
    assert 0 < found.mfu <= found.hfu < 1
    assert found.error_band[0] < found.step_s < found.error_band[1]


@settings(max_examples=30)
@given(plans())
def test_the_peak_is_that_of_the_timeline(plan):
    found = simulate(plan)
    peaks = [found.timeline.peak(rank, "memory_bytes") for rank in range(plan.layout.pp)]
    assert found.peak_bytes in peaks
    assert found.peak_bytes + found.reserve_bytes >= max(peaks)
    if plan.stack.barrier:
        assert found.timeline.end_s == pytest.approx(found.step_s, rel=1e-9)


@settings(max_examples=20)
@given(plans())
def test_deterministic(plan):
    one, other = simulate(plan), simulate(replace(plan))
    assert one == other
    assert one.timeline == other.timeline


@settings(max_examples=40)
@given(plans())
def test_actions_are_proven(plan):
    actions = plan_actions(plan, stage_times(plan, gather([plan]), priced(plan)))
    assert actions.num_ranks == plan.layout.pp
    verify(actions, microbatches=plan.layout.num_microbatches)


# --- work ---


@settings(max_examples=40)
@given(plans())
def test_full_recomputation_repeats_the_blocks_forward(plan):
    plan = replace(plan, recompute=Recompute.FULL)
    work = Work(plan.seq_len, plan.layout.microbatch, plan.precision.compute)
    needed, again = step_flops(plan)
    number = plan.layout.num_microbatches * plan.layout.dp
    model = plan.model
    ends = sum(o.forward_flops(work) for layer in (model.layers[0], model.layers[-1]) for o in layer.operators)
    assert needed == number * (model.forward_flops(work) + model.backward_flops(work))
    assert again == number * (model.forward_flops(work) - ends)
    found = simulate(plan)
    assert found.hfu / found.mfu == pytest.approx(1 + again / needed)


@settings(max_examples=20)
@given(plans())
def test_selective_recomputation_repeats_attention(plan):
    plan = replace(plan, recompute=Recompute.SELECTIVE)
    work = Work(plan.seq_len, plan.layout.microbatch, plan.precision.compute)
    attention = plan.model.total(lambda o: o.forward_flops(work) if isinstance(o, Attention) else 0)
    assert step_flops(plan)[1] == plan.layout.num_microbatches * plan.layout.dp * attention
    none = simulate(replace(plan, recompute=Recompute.NONE))
    assert none.hfu == none.mfu


# --- monotony ---


@settings(max_examples=60)
@given(plans(schedules=WHOLE), st.sampled_from(BETTER), st.sampled_from((1.01, 2.0, 50.0)))
def test_better_hardware_is_never_slower(plan, what, factor):
    faster = replace(plan, cluster=better(plan.cluster, what, factor))
    assert simulate(faster).step_s <= simulate(plan).step_s * SLACK


SPLIT = tuple(name for name in FIXED if SCHEDULES[name].split)


@settings(max_examples=20)
@given(plans(schedules=SPLIT), st.sampled_from(BETTER), st.sampled_from((1.01, 2.0, 50.0)))
def test_better_hardware_never_slows_a_split_backward(plan, what, factor):
    """Where the host sets the pace, a backward is parted in the ratio of its kernels: a shorter W fills less."""
    faster = replace(plan, cluster=better(plan.cluster, what, factor))
    assert simulate(faster).step_s <= simulate(plan).step_s * (1 + 1e-9)


@settings(max_examples=40)
@given(plans(schedules=FIXED), st.integers(1, 2))
def test_more_microbatches_are_never_faster(plan, rounds):
    layout = plan.layout
    more = layout.dp * layout.microbatch * layout.pp * rounds
    larger = replace(plan, layout=replace(layout, global_batch=layout.global_batch + more))
    assert simulate(plan).step_s <= simulate(larger).step_s * SLACK


@settings(max_examples=30)
@given(plans(schedules=FIXED))
def test_never_faster_than_the_work_at_peak(plan):
    """A rank has at least its blocks' work to do, whatever the order."""
    found = priced(plan)
    block_s = (found.block.f_s + found.block.b_s)[0]
    copies = plan.placement.num_stages // plan.placement.depth
    least_s = max(plan.blocks_by_rank) / copies * plan.layout.num_microbatches * block_s
    assert simulate(plan).step_s >= least_s * (1 - 1e-9)


# --- single plans ---


def test_it_fits_or_not():
    small = plan_of(model_of("gpt3-1.3b", 8), "dgx-a100", global_batch=8, seq_len=1024)
    assert simulate(small).fits
    large = plan_of(model_of("llama2-7b", 32), "dgx-a100", global_batch=8, seq_len=1024, fp16=True)
    found = simulate(large)
    assert found.peak_bytes > 16 * large.model.num_parameters
    assert not found.fits


def test_laws_may_be_given():
    plan = plan_of(model_of("gpt3-1.3b", 8), "dgx-a100", global_batch=8, seq_len=1024)
    later = simulate(plan, replace(LAWS, step_s=LAWS.step_s + 1.0))
    assert later.step_s == pytest.approx(simulate(plan).step_s + 1.0)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULE_KINDS if name != "chimera"])
def test_closed_form_and_events_name_the_same_terms(schedule):
    chunks = 2 if schedule in ("interleaved", "looped-bfs", "interleaved-zb") else 1
    plan = plan_of(
        model_of("gpt3-1.3b", 16), "dgx-a100", global_batch=16, pp=4, schedule=schedule, chunks=chunks, seq_len=1024
    )
    found, simulated = priced(plan), simulate(plan)
    named = {name for name, value in found.terms.items() if value[0]}
    assert set(simulated.breakdown) == named
    assert simulated.breakdown["recompute" if "recompute" in named else "compute"] > 0
    assert gather([plan]).stages[0] == plan.placement.num_stages / 4
