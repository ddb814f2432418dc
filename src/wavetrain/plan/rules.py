"""What the rules of a plan share: the plan with the keys that can't be built upon, and how a problem is worded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from wavetrain.base.errors import Problem
from wavetrain.model.limits import MOST_LAYERS
from wavetrain.plan.layout import Choice, Layout
from wavetrain.plan.plan import Plan
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedules import SCHEDULES, Shape

MOST_SIZE = 2**31
MOST_STAGES = 4 * (MOST_LAYERS + 2)  # beyond, a placement is not even drawn up
SHAPE = ("layout.pp", "layout.chunks", "layout.waves", "layout.schedule")


@dataclass(frozen=True)
class Checked:
    """A plan, and the keys that can't be built upon."""

    plan: Plan
    bad: frozenset[str]

    def good(self, *keys: str) -> bool:
        return not self.bad.intersection(keys)

    @cached_property
    def placement(self) -> Placement | None:
        """Where the stages go; None where that is unknown, or too much to write down."""
        if not self.good(*SHAPE) or self.plan.layout.pp * stages_per_rank(self.plan) > MOST_STAGES:
            return None
        return placement(self.plan.layout)


def placement(layout: Layout) -> Placement:
    return SCHEDULES[layout.schedule].placement(Shape(layout.pp, 1, chunks=layout.chunks, waves=layout.waves))


def stages_per_rank(plan: Plan) -> int:
    """Stages per rank, without drawing up where they lie: a wave runs down and up."""
    schedule = SCHEDULES[plan.layout.schedule]
    return (plan.layout.chunks if schedule.chunked else 1) * (2 * plan.layout.waves if schedule.waved else 1)


def broken(
    key: str,
    value: object,
    rule: str,
    *,
    legal: Sequence[object] = (),
    near: Sequence[object] = (),
    remedy: str = "",
) -> Problem:
    return Problem(
        where="plan",
        key=key,
        value=value,
        rule=rule,
        legal=tuple(map(str, legal)),
        nearest=tuple(map(str, near)),
        remedy=remedy,
    )


def whole(key: str, value: object, *, least: int = 1, most: int = MOST_SIZE, near: int = 1) -> Iterator[Problem]:
    if type(value) is not int or not least <= value <= most:
        yield broken(key, value, f"must be a whole number from {least} to {most:,}", near=(near,))


def each_choice(plan: Plan) -> Iterator[tuple[str, Choice]]:
    yield "choice", plan.choice
    for position, item in enumerate(plan.choices):
        yield f"choices[{position}].choice", item.choice
