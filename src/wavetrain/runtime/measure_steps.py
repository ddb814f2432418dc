"""Whole steps of small models through the runtime itself: what no operator and no collective takes alone.

Beside compute and messages a step makes a batch, agrees on a loss, hands results from action to action; FSDP2 prepares
each gather. Those are told from the rest when the laws of operators and collectives are known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from wavetrain.runtime.chunk import Durations
from wavetrain.runtime.emulator import Emulator
from wavetrain.runtime.job import Job
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.measure_compute import Told, lower_quartile
from wavetrain.runtime.samples import EMPTY, TINY, WIDE, Sample, StepCase, step_cases
from wavetrain.runtime.settle import settle
from wavetrain.runtime.world import World, gloo_group
from wavetrain.schedule import SCHEDULES, Shape, add_communication

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore
else:
    from torch.distributed import PrefixStore

PASSES = 5
STEPS = {TINY.hidden: 36, WIDE.hidden: 10}  # a tiny step takes some ten milliseconds, and varies more
QUICK_STEPS = 6
PATIENCE_S = 300.0


def step_samples(world: World, *, quick: bool, told: Told) -> list[Sample]:
    """Every case's step, from the end of one to the end of the next. All ranks call this together and get the same."""
    settle()
    cases, passes = step_cases(world.size), 1 if quick else PASSES
    found: dict[StepCase, list[float]] = {}
    for number, case in enumerate(cases * passes):  # in turns: what disturbs one pass of a case does not disturb all
        told(case.what, number / len(cases) / passes)
        with _own_keys(world, f"steps/{number}") as own, gloo_group(own, timeout_s=PATIENCE_S):
            found.setdefault(case, []).extend(_seconds(case, own, QUICK_STEPS if quick else STEPS[case.small.hidden]))
    world.store.set(f"steps-took/{world.rank}", json.dumps([lower_quartile(took) for took in found.values()]))
    rows = [json.loads(world.store.get(f"steps-took/{rank}")) for rank in range(world.size)]
    slowest = (float(max(column)) for column in zip(*rows, strict=True))
    return [Sample(case.what, case.sizes, took, ranks=world.size) for case, took in zip(found, slowest, strict=True)]


@contextmanager
def _own_keys(world: World, name: str) -> Iterator[World]:
    """The same world with a part of the store for itself."""
    yield replace(world, store=PrefixStore(name, world.store))


def _seconds(case: StepCase, world: World, steps: int) -> list[float]:
    """Of all steps after the second, on this rank."""
    plan = case.plan()
    layout = plan.layout
    order = SCHEDULES[layout.schedule].order(Shape(layout.pp, layout.num_microbatches))
    job, nothing = Job(plan=plan, actions=add_communication(order), steps=steps, clip=1.0), Durations(0.0, 0.0, 0.0)
    idle = replace(job, emulated=(nothing,) * order.placement.num_stages)
    runner, ends = Emulator(idle, world) if case.what == EMPTY else Learner(job, world), []
    for step in range(steps):
        runner.step(step)
        ends.append(time.perf_counter())
    return [b - a for a, b in pairwise(ends)][1:]
