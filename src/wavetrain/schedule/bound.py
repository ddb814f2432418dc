"""A makespan no order can beat, for given stages, costs and number of microbatches (memory only makes it worse)."""

from __future__ import annotations

from collections.abc import Mapping

from wavetrain.schedule.action import Kind
from wavetrain.schedule.evaluate import Costs, Time
from wavetrain.schedule.placement import Placement


def lower_bound(placement: Placement, microbatches: int, costs: Costs, *, split: bool) -> Time:
    """What an order of all microbatches, forward and backward, must at least take."""
    own = {stage: len(range(stage // placement.depth, microbatches, placement.chains)) for stage in _stages(placement)}
    return bound_for(placement, own, costs, split=split, backward=True)


def bound_for(placement: Placement, own: Mapping[int, int], costs: Costs, *, split: bool, backward: bool) -> Time:
    """Each rank's work, plus the least time before its first action and after its last; and one microbatch's own path.

    `own` is how many microbatches each stage runs. Before a rank's first action, a microbatch must come down to its
    earliest stage. After its last one, a gradient must go on from its earliest stage to the beginning, unless that last
    action is a weight gradient, which nobody awaits.
    """
    forward, back = costs.by_kind[Kind.F], costs.by_kind[Kind.I if split else Kind.B]
    down, up = _prefix(placement, forward, costs), _prefix(placement, back, costs, back=True)
    whole = costs.by_kind[Kind.B]
    bounds: list[Time] = []
    for stages in placement.local:
        used = [stage for stage in stages if own.get(stage)]
        if used:
            work = sum(own[stage] * (forward[stage] + (whole[stage] if backward else 0)) for stage in used)
            tail = min(up[stage] for stage in used) if backward and not split else 0
            bounds.append(min(down[stage] for stage in used) + work + tail)
    for first in range(0, placement.num_stages, placement.depth):
        last = first + placement.depth - 1
        if own.get(first):
            path = down[last] + forward[last]
            way_back = up[last] + back[last] + (costs.w[first] if split else 0)
            bounds.append(path + way_back if backward else path)
    return max(bounds, default=0)


def _stages(placement: Placement) -> range:
    return range(placement.num_stages)


def _prefix(placement: Placement, times: tuple[Time, ...], costs: Costs, *, back: bool = False) -> list[Time]:
    """For every stage, the time all earlier stages of its chain and the hops between take, in the given direction."""
    total: list[Time] = []
    for stage in range(placement.num_stages):
        if placement.is_first(stage):
            total.append(0)
            continue
        here, before = placement.ranks[stage], placement.ranks[stage - 1]
        hop = costs.link(here, before) if back else costs.link(before, here)
        total.append(total[-1] + times[stage - 1] + hop)
    return total
