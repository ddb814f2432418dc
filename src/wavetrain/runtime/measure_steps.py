"""Whole steps of small models through the runtime itself: what no operator and no collective takes alone.

By itself each rank trains models of several sizes: what actions take where every operator meets cold caches, and what a
step takes around them, with a batch, a loss, an optimizer. Together ranks send nothing but messages, reduce gradients
and shard, which shows what is left to say of their collectives, beside the same models on each rank alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from wavetrain.runtime.chunk import Durations
from wavetrain.runtime.emulator import Emulator
from wavetrain.runtime.executor import Moment
from wavetrain.runtime.job import Job
from wavetrain.runtime.learner import Learner
from wavetrain.runtime.samples import (
    AGAIN,
    BACKWARD,
    EMPTY,
    FEW,
    FORWARD,
    OPTIMIZER,
    RECOMPUTED,
    REST,
    Sample,
    StepCase,
)
from wavetrain.runtime.settle import settle
from wavetrain.runtime.spent import ACCOUNT
from wavetrain.runtime.turns import Told, lower_quartile
from wavetrain.runtime.world import World, gloo_group
from wavetrain.schedule import SCHEDULES, Shape, add_communication
from wavetrain.schedule.action import Action, Kind

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore
else:
    from torch.distributed import PrefixStore

FIRST = 1  # steps that do not count: memory is found, kernels are chosen
STEPS = ((64, 16), (128, 10), (512, 3))  # that count in a turn, of models up to a width
STEPS_TOGETHER = ((64, 48), (512, 9))  # of those that are compared with steps of several ranks too
PATIENCE_S = 300.0
WHOLE = ""


def step_samples(world: World, told: Told, *, cases: Sequence[StepCase]) -> list[Sample]:
    """Of each phase the median over ranks, of whole steps the slowest rank's; all ranks return the same."""
    settle(world.place)
    found: dict[tuple[StepCase, str], float] = {}
    for at, case in enumerate(cases):
        told(case.what, at / len(cases))
        own = _own(world, case, f"steps/{at}")
        with gloo_group(own, timeout_s=PATIENCE_S):
            found |= {(case, phase): lower_quartile(seconds) for phase, seconds in _phases(case, own).items()}
    world.store.set(f"steps-took/{world.rank}", json.dumps(list(found.values())))
    rows = [json.loads(world.store.get(f"steps-took/{rank}")) for rank in range(world.size)]
    columns = zip(found, zip(*rows, strict=True), strict=True)
    return [_sample(case, phase, column) for (case, phase), column in columns]


def _sample(case: StepCase, phase: str, column: Sequence[float]) -> Sample:
    if phase != WHOLE:
        return case.small.sample(phase, median(column))
    return Sample(case.what, case.sizes, max(column), ranks=case.ranks)


def _own(world: World, case: StepCase, name: str) -> World:
    """The world of a case, with a part of the store for itself; alone, a rank has a world of one."""
    if case.ranks > 1:
        return replace(world, store=PrefixStore(name, world.store))
    alone = replace(world.place, rank=0, size=1)
    return replace(world, place=alone, store=PrefixStore(f"{name}/{world.rank}", world.store))


class _Step(NamedTuple):
    """One step as it happened."""

    moments: list[Moment]
    seconds: float
    learning_s: float  # in the optimizer


def _phases(case: StepCase, world: World) -> dict[str, list[float]]:
    """Seconds of all steps that count, on this rank: whole, or where each rank is alone by phase."""
    plan = case.plan()
    layout = plan.layout
    order = SCHEDULES[layout.schedule].order(Shape(layout.pp, layout.num_microbatches))
    job, nothing = Job(plan=plan, actions=add_communication(order), steps=1, clip=1.0), Durations(0.0, 0.0, 0.0)
    idle = replace(job, emulated=(nothing,) * order.placement.num_stages)
    runner = Emulator(idle, world) if case.what == EMPTY else Learner(job, world)
    counts = STEPS if case.microbatches == FEW else STEPS_TOGETHER
    count = next(count for width, count in counts if case.small.hidden <= width)
    steps, ended_s = list[_Step](), 0.0
    for number in range(FIRST + count):
        ACCOUNT.take()
        moments, begun_s = runner.step(number).moments, ended_s
        ended_s = time.perf_counter()
        steps.append(_Step(moments, ended_s - begun_s, ACCOUNT.take().get(OPTIMIZER, 0.0)))
    rows = [_by_phase(case, step) for step in steps[FIRST:]]
    return {phase: [row[phase] for row in rows] for phase in rows[0]}


def _by_phase(case: StepCase, step: _Step) -> dict[str, float]:
    if case.microbatches != FEW:
        return {WHOLE: step.seconds}
    forward_s, backward_s = (
        mean(moment.end_s - moment.start_s for moment in step.moments if Action.parse(moment.name).kind is kind)
        for kind in (Kind.F, Kind.B)
    )
    both_s = forward_s + backward_s
    if case.what == RECOMPUTED:
        return {AGAIN: both_s}
    rest_s = step.seconds - case.microbatches * both_s - step.learning_s
    return {FORWARD: forward_s, BACKWARD: backward_s, OPTIMIZER: step.learning_s, REST: rest_s}
