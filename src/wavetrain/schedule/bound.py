"""A makespan no order can beat, for given stages, costs and number of microbatches (memory only makes it worse)."""

from __future__ import annotations

from wavetrain.schedule.action import Kind
from wavetrain.schedule.evaluate import Costs, Time
from wavetrain.schedule.placement import Placement


def lower_bound(placement: Placement, microbatches: int, costs: Costs, *, split: bool) -> Time:
    """Each rank's work, plus the least time before its first action and after its last; and one microbatch's own path.

    Before a rank's first action, a microbatch must come down to its earliest stage. After its last one, a gradient must
    go on from its earliest stage to the beginning, unless that last action is a weight gradient, which nobody awaits.
    """
    forward, backward = costs.by_kind[Kind.F], costs.by_kind[Kind.I if split else Kind.B]
    down, up = _prefix(placement, forward, costs), _prefix(placement, backward, costs, back=True)
    bounds: list[Time] = []
    for rank, stages in enumerate(placement.local):
        work: Time = 0
        for stage in stages:
            own = len(range(stage // placement.depth, microbatches, placement.chains))
            work += own * (forward[stage] + costs.by_kind[Kind.B][stage])
        if work:
            tail = 0 if split else min(up[stage] for stage in stages)
            bounds.append(min(down[stage] for stage in placement.local[rank]) + work + tail)
    for chain in range(min(placement.chains, microbatches)):
        last = (chain + 1) * placement.depth - 1
        first_weight = costs.w[chain * placement.depth] if split else 0
        bounds.append(down[last] + forward[last] + up[last] + backward[last] + first_weight)
    return max(bounds, default=0)


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
