"""Orders that repeat: every microbatch does the same, one period after the one before.

With little memory the length of a microbatch's way through the pipeline decides how many are in flight, so each goes as
straight as it can: every action takes the earliest slot that is free in its rank's timetable, which repeats with the
period. A longer period means fewer in flight; the shortest that keeps within the caps is taken (after the building
blocks of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").
"""

from __future__ import annotations

from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.schedule.evaluate import Costs, Time, peak_in_flight
from wavetrain.schedule.placement import Placement

TRIES = 40  # periods tried, each this much longer than the last
STEP = 0.04


def periodic(
    placement: Placement, microbatches: int, costs: Costs, *, caps: tuple[int, ...], split: bool
) -> Actions | None:
    """The repeating order with the shortest period that keeps within the caps, or None if none of those tried does."""
    if placement.chains > 1:
        return None
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    work = [sum(float(costs.by_kind[kind][s]) for s in stages for kind in kinds) for stages in placement.local]
    shortest = max(work, default=0.0)
    if not shortest:
        return None
    for number in range(TRIES):
        period = shortest * (1 + STEP * number)
        offsets = _straight(placement, costs, period, split)
        order = _repeated(placement, microbatches, offsets, period)
        peaks = enumerate(peak_in_flight(order))
        if all(peak * placement.chunks(rank) <= caps[rank] for rank, peak in peaks):
            return order
    return None


def _straight(placement: Placement, costs: Costs, period: float, split: bool) -> dict[tuple[int, Kind], float]:
    """When one microbatch does what, as early as its rank's repeating timetable has room."""
    taken: list[list[tuple[float, float]]] = [[] for _ in range(placement.num_ranks)]
    offsets: dict[tuple[int, Kind], float] = {}
    now = 0.0
    backward = Kind.I if split else Kind.B
    way = [(stage, Kind.F) for stage in range(placement.depth)]
    way += [(stage, backward) for stage in reversed(range(placement.depth))]
    before = placement.ranks[0] if placement.ranks else 0
    for stage, kind in way:
        rank = placement.ranks[stage]
        duration = float(costs.by_kind[kind][stage])
        start = _free(taken[rank], now + float(costs.link(before, rank)), duration, period)
        taken[rank].append((start % period, duration))
        offsets[stage, kind] = start
        now, before = start + duration, rank
    if split:
        for stage in reversed(range(placement.depth)):
            rank, duration = placement.ranks[stage], float(costs.w[stage])
            ready = offsets[stage, Kind.I] + float(costs.i[stage])
            start = _free(taken[rank], ready, duration, period)
            taken[rank].append((start % period, duration))
            offsets[stage, Kind.W] = start
    return offsets


def _free(taken: list[tuple[float, float]], ready: float, duration: float, period: float) -> float:
    """The earliest time from `ready` on at which a repeating timetable has room; `ready` itself where it never has."""
    candidates = [ready]
    for start, length in taken:
        end = (start + length) % period
        candidates.append(ready + (end - ready) % period)
    tiny = 1e-9 * period
    for time in sorted(candidates):
        phase = time % period
        clear = all(
            (start - phase) % period >= duration - tiny and (phase - start) % period >= length - tiny
            for start, length in taken
        )
        if clear:
            return time
    return ready


def _repeated(
    placement: Placement, microbatches: int, offsets: dict[tuple[int, Kind], float], period: float
) -> Actions:
    timed: list[list[tuple[Time, int, Action]]] = [[] for _ in range(placement.num_ranks)]
    for m in range(microbatches):
        for number, ((stage, kind), offset) in enumerate(offsets.items()):
            timed[placement.ranks[stage]].append((m * period + offset, number, Action(stage, kind, m)))
    return Actions(tuple(tuple(action for _, _, action in sorted(row)) for row in timed))
