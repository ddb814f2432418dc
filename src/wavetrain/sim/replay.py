"""What an order would take with the times its actions were measured to take: all that is left over is the runtime's."""

from __future__ import annotations

from wavetrain.schedule.action import COMPUTE, Action, Actions, Kind
from wavetrain.schedule.evaluate import needed
from wavetrain.timeline.timeline import Event, Timeline


def replay(actions: Actions, measured: Timeline) -> Timeline:
    """Every compute action as long as it was, as soon as its rank is free and what it needs is there: no transfer."""
    took = {event.name: event.duration_s for event in measured.events if event.lane == "compute"}
    placement = actions.placement
    rows = [[a for a in row if a.kind in COMPUTE or a.kind is Kind.RECOMPUTE] for row in actions.ranks]
    done: dict[Action, float] = {}  # a backward stands under I, whole or not
    at, clock, events = [0] * len(rows), [0.0] * len(rows), []
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                needs = needed(placement, action) if action.kind in COMPUTE else ()
                if any(need not in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = start + took[str(action)]
                done[action._replace(kind=Kind.I) if action.kind is Kind.B else action] = clock[rank]
                events.append(Event(start, clock[rank], rank, "compute", str(action)))
                at[rank] += 1
                moved = True
    assert len(events) == sum(map(len, rows)), "an order that was run can be run"
    return Timeline(tuple(events))


def idle_share(timeline: Timeline) -> float:
    """Of all ranks' time, the share in which nothing is computed."""
    if not timeline.duration_s:
        return 0.0
    busy = sum(timeline.busy_s(rank, "compute") for rank in timeline.ranks)
    return 1 - busy / (len(timeline.ranks) * timeline.duration_s)
