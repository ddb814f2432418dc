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
    ALONE,
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
STEPS_TOGETHER = ((64, 48), (512, 5))  # of those that are compared with steps of several ranks too
PATIENCE_S = 300.0
WHOLE = ""


class StepTurns:
    """The steps of some cases. All ranks take turns together, and have the same samples in the end."""

    def __init__(self, world: World, name: str, cases: Sequence[StepCase]) -> None:
        self._world, self._name, self._cases = world, name, cases
        self._found: dict[tuple[StepCase, str], list[list[float]]] = {}
        self._number = 0

    def turn(self, told: Told) -> None:
        settle()
        for at, case in enumerate(self._cases):
            told(case.what, at / len(self._cases))
            self._number += 1
            world = self._own(case)
            with gloo_group(world, timeout_s=PATIENCE_S):
                for phase, seconds in _phases(case, world).items():
                    self._found.setdefault((case, phase), []).append(seconds)

    def samples(self) -> list[Sample]:
        """Of phases the median over ranks, of whole steps the slowest."""
        world, key = self._world, f"steps-took/{self._name}"
        own = [self._typical(case, phase) for case, phase in self._found]
        world.store.set(f"{key}/{world.rank}", json.dumps(own))
        rows = [json.loads(world.store.get(f"{key}/{rank}")) for rank in range(world.size)]
        found = []
        for (case, phase), column in zip(self._found, zip(*rows, strict=True), strict=True):
            if phase != WHOLE:
                found.append(case.small.sample(phase, median(column)))
            else:
                found.append(Sample(case.what, case.sizes, max(column), ranks=case.ranks))
        return found

    def _typical(self, case: StepCase, phase: str) -> float:
        """On this rank; a model that each rank trained alone as well takes so much longer together."""
        turns = self._found[case, phase]
        alone = self._found.get((case._replace(what=ALONE, ranks=1), phase))
        return _quickest(turns) if alone is None or alone is turns else _quickest(alone) + _beyond(turns, alone)

    def _own(self, case: StepCase) -> World:
        """The world of a case, with a part of the store for itself; alone, a rank has a world of one."""
        world, name = self._world, f"steps/{self._name}/{self._number}"
        if case.ranks > 1:
            return replace(world, store=PrefixStore(name, world.store))
        alone = replace(world.place, rank=0, size=1)
        return replace(world, place=alone, store=PrefixStore(f"{name}/{world.rank}", world.store))


def _quickest(turns: Sequence[Sequence[float]]) -> float:
    """The lower quartile of the quickest turn's steps: neighbours that fill the caches may stay for several turns."""
    return min(map(lower_quartile, turns))


def _beyond(turns: Sequence[Sequence[float]], alone: Sequence[Sequence[float]]) -> float:
    """What steps of all ranks took longer than those of each alone right after them, in the lesser half of turns."""
    longer = sorted(lower_quartile(one) - lower_quartile(other) for one, other in zip(turns, alone, strict=True))
    return mean(longer[: -(-len(longer) // 2)])


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
