"""What an order would take with the times its actions were measured to take: all that is left over is the runtime's."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.sim import engine
from wavetrain.sim.engine import Result, StageTimes
from wavetrain.trace.timeline import Timeline


def replay(actions: Actions, measured: Timeline) -> Result:
    """Simulate the order without any transfer, each stage's actions at the median of what they took."""
    seconds: dict[tuple[int, Kind], list[float]] = {}
    for event in measured.events:
        if event.lane == "compute":
            stage, kind, _ = Action.parse(event.name)
            seconds.setdefault((stage, kind), []).append(event.duration_s)
    times = [_times(seconds, stage) for stage in range(actions.placement.num_stages)]
    return engine.run(engine.compile(actions), times)


def _times(seconds: dict[tuple[int, Kind], list[float]], stage: int) -> StageTimes:
    def of(kind: Kind) -> float:
        return _median(seconds.get((stage, kind), ()))

    half = of(Kind.B) / 2  # a whole backward takes the sum of its parts
    return StageTimes(f=of(Kind.F), i=of(Kind.I) or half, w=of(Kind.W) or half, recompute=of(Kind.RECOMPUTE))


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
