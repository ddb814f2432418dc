"""The executor against one process, bit for bit; memory by the schedule's count; order as planned; mutants caught."""

import random

import pytest
import torch

from tests.runtime.pipeline import BUILT_IN, FROM_TRANSFORMERS, Case, assert_equal, batch_of, live_counts, reference, run_threads, small
from wavetrain.plan.cut import even_cut
from wavetrain.schedule import SCHEDULES, Actions, Shape, add_communication, add_recomputation, parse_text, verify

KINDS = [name for name in SCHEDULES if name != "forward-only"]


def case(family, kind, ranks, microbatches, *, chunks=1, waves=1, tied=False, recompute=False, uneven=False):
    schedule = SCHEDULES[kind]
    chunks = max(2, chunks) if schedule.chunked else 1
    actions = schedule.order(Shape(ranks, microbatches, chunks=chunks, waves=waves))
    depth = actions.placement.depth
    cut = list(even_cut(depth + 3 if uneven else depth, depth))
    if uneven and depth > 2:
        cut[0], cut[1] = 0, cut[1] + cut[0]  # a stage with nothing but the embedding
    if recompute:
        actions = add_recomputation(actions, range(0, actions.placement.num_stages, 2))
    sizes = [1 + (m % 2) for m in range(microbatches)]
    return Case(small(family, sum(cut), tied), tuple(cut), actions, batch_of(sizes))


@pytest.mark.parametrize("family", (*BUILT_IN, *FROM_TRANSFORMERS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_and_model(family, kind):
    c = case(family, kind, 2, 4, tied=True, uneven=True)
    assert_equal(run_threads(c), reference(c))
