"""What the actions of each stage take and hold."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent))
from plans import LAWS, model_of, plan_of, plans, priced

from wavetrain.plan.stack import Stack
from wavetrain.sim.estimate import SCHEDULE_KINDS
from wavetrain.sim.gather import gather
from wavetrain.sim.memory import memory, saved_bytes
from wavetrain.sim.predict import play
from wavetrain.sim.stages import (
    fullest_rank,
    peak_parts,
    rank_places,
    running_at,
    stage_bytes,
    stage_times,
    static_bytes,
)

PLAN = plan_of(model_of("gpt3-125m", 14), "dgx-a100", global_batch=16, pp=4, seq_len=1024, cut=(3, 4, 4, 3))


def timed(plan, found):
    return stage_times(plan, gather([plan]), found)


def test_a_stage_is_its_blocks_and_the_ends():
    found, times = priced(PLAN), timed(PLAN, priced(PLAN))
    f, i, w = (float(value[0]) for value in (found.block.f_s, found.block.i_s, found.block.weight_s))
    assert (times[1].f, times[1].i, times[1].w) == pytest.approx((4 * f, 4 * i, 4 * w))
    assert times[0].f == pytest.approx(3 * f + found.embedding.f_s[0])
    assert times[3].i == pytest.approx(3 * i + found.head.i_s[0])
    assert times[3].w == pytest.approx(3 * w + found.head.w_s[0])


@settings(max_examples=40)
@given(plans())
def test_all_stages_together_are_the_model(plan):
    found, times = priced(plan), timed(plan, priced(plan))
    copies = plan.placement.num_stages // plan.placement.depth
    blocks = sum(plan.cut)
    whole = blocks * (found.block.f_s + found.block.b_s)[0] + (found.embedding.total_s + found.head.total_s)[0]
    assert sum(t.f + t.i + t.w for t in times) == pytest.approx(copies * whole, rel=1e-12)


def test_messages_beside_compute_or_on_both_ends():
    apart = timed(PLAN, priced(PLAN))
    beside = timed(replace(PLAN, stack=Stack(message_overlap=True)), priced(PLAN))
    message = priced(PLAN).message
    assert apart[0].send_f == apart[0].send_b == 0
    assert 2 * apart[0].message_s == pytest.approx((message.wire_s + message.host_s)[0])
    assert (beside[1].send_f, beside[1].send_b) == pytest.approx((message.wire_s[0],) * 2)
    assert beside[0].send_b == beside[3].send_f == 0  # the ends have one neighbour
    assert 2 * beside[0].message_s == pytest.approx(message.host_s[0])


def test_bytes_of_a_stage():
    batch = gather([PLAN])
    saved, sizes = saved_bytes(batch, LAWS), stage_bytes(PLAN, batch, LAWS)
    assert sizes[1].saved == pytest.approx(4 * saved.block[0])
    assert sizes[0].saved == pytest.approx(3 * saved.block[0] + saved.embedding[0])
    assert sizes[3].saved == pytest.approx(3 * saved.block[0] + saved.head[0])
    assert sizes[3].transient_f == saved.logits[0] > 0
    assert sizes[0].transient_f == 0


@pytest.mark.parametrize("schedule", SCHEDULE_KINDS)
def test_places_hold_every_block_and_both_ends(schedule):
    chunks = 2 if schedule in ("interleaved", "looped-bfs", "interleaved-zb") else 1
    plan = plan_of(model_of("tiny-gpt", 16), "dgx-a100", global_batch=16, pp=4, schedule=schedule, chunks=chunks)
    place, copies = rank_places(plan), 2 if schedule == "chimera" else 1
    assert place.blocks.sum() == 16 * copies
    assert place.has_first.sum() == place.has_last.sum() == copies


@settings(max_examples=40)
@given(plans(schedules=tuple(name for name in SCHEDULE_KINDS if name != "chimera")))
def test_static_bytes_of_a_rank_are_those_of_the_closed_form(plan):
    """The closed form looks at three kinds of ranks; what it says of the fullest is there among all of them."""
    batch = gather([plan])
    by_rank = static_bytes(plan, batch, LAWS)
    parts = memory(batch, LAWS).parts
    rows = np.array([by_rank[name] for name in by_rank])
    chosen = np.array([parts[name][0] for name in by_rank])
    assert np.isclose(rows, chosen[:, None], rtol=1e-9, atol=1.0).all(axis=0).any()


@settings(max_examples=30)
@given(plans())
def test_parts_of_the_peak_sum_to_it(plan):
    batch, found = gather([plan]), priced(plan)
    run = play(plan, batch, found, LAWS)
    rank, reserve = fullest_rank(run.static, run.result, LAWS)
    parts = peak_parts(rank, run.static, run.result, run.program.actions, run.sizes)
    assert sum(parts.values()) == pytest.approx(run.result.peak_bytes[rank], rel=1e-12)
    assert all(value >= -1e-3 for value in parts.values())
    assert reserve >= LAWS.reserve_bytes
    assert running_at(rank, run.result, run.program.actions) is not None
