"""Passes over compute actions: communication, recomputation, sharding with residency, gradient reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from wavetrain.schedule.action import COMPUTE, Action, Actions, Kind
from wavetrain.schedule.evaluate import Costs, Time, evaluate
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.table import uncollected

_BACKWARD = (Kind.B, Kind.I)
_LAST = (Kind.B, Kind.W)


def add_communication(actions: Actions, costs: Costs | None = None) -> Actions:
    """Sends and receives, both ends of each placed at the moment the sender has the result.

    Every rank's row is then a part of one global order in which a send and its receive stand together. So no rank can
    wait in a circle, whether a channel holds any number of messages, one, or none (a send that waits for its receive).
    """
    placement = actions.placement
    costs = costs or Costs.uniform(placement.num_stages)
    with uncollected():
        starts = evaluate(actions, costs).starts
        groups = [_with_what_precedes(row) for row in actions.ranks]
        events: list[tuple[Time, bool, int, tuple[Action, ...]]] = []  # (when, whether it starts then, rank, actions)
        for rank, (row, times) in enumerate(zip(groups, starts, strict=True)):
            events += ((start, True, rank, group) for group, start in zip(row, times, strict=False))
            events += (
                (start + costs.by_kind[group[-1].kind][group[-1].stage], False, rank, group)
                for group, start in zip(row, times, strict=False)
                if receiver(placement, group[-1]) is not None
            )
        events.sort(key=itemgetter(0, 1))  # what arrives at an instant comes before what starts then
        rows: list[list[Action]] = [[] for _ in actions.ranks]
        for _, starting, rank, group in events:
            if starting:
                rows[rank] += group
                continue
            send, receive = message(group[-1])
            rows[rank].append(send)
            rows[placement.ranks[receive.stage]].append(receive)
        for rank, (row, times) in enumerate(zip(groups, starts, strict=True)):
            rows[rank] += (action for group in row[len(times) :] for action in group)
    return Actions(tuple(map(tuple, rows)))


def _with_what_precedes(row: Sequence[Action]) -> list[tuple[Action, ...]]:
    """Each timed action with the untimed ones (gathers, reductions) since the last; what is left stands at the end."""
    groups: list[tuple[Action, ...]] = []
    waiting: list[Action] = []
    for action in row:
        waiting.append(action)
        if action.kind in COMPUTE or action.kind is Kind.RECOMPUTE:
            groups.append(tuple(waiting))
            waiting = []
    return [*groups, tuple(waiting)] if waiting else groups


def receiver(placement: Placement, action: Action) -> int | None:
    """The rank that an action's result must be sent to, if any."""
    stage, kind, _ = action
    if kind is Kind.F:
        target = None if placement.is_last(stage) else placement.ranks[stage + 1]
    elif kind in _BACKWARD:
        target = None if placement.is_first(stage) else placement.ranks[stage - 1]
    else:
        return None
    return None if target == placement.ranks[stage] else target


def message(action: Action) -> tuple[Action, Action]:
    """The send and the receive of a forward's or a backward's result."""
    stage, kind, m = action
    if kind is Kind.F:
        return Action(stage, Kind.SEND_F, m), Action(stage + 1, Kind.RECV_F, m)
    return Action(stage, Kind.SEND_B, m), Action(stage - 1, Kind.RECV_B, m)


def add_recomputation(actions: Actions, stages: Iterable[int]) -> Actions:
    """Before each backward of the given stages, their forward once more."""
    chosen = frozenset(stages)
    rows = []
    for row in actions.ranks:
        new: list[Action] = []
        for action in row:
            if action.kind in _BACKWARD and action.stage in chosen:
                new.append(action._replace(kind=Kind.RECOMPUTE))
            new.append(action)
        rows.append(tuple(new))
    return Actions(tuple(rows))


def add_sharding(actions: Actions, *, resident: int | None = None) -> Actions:
    """Gather a stage's parameters before they are used and free them after; `resident` stages fit on a rank at once.

    With room for all (None) each stage is gathered once per step. With less, the stage that is needed last makes room
    (Belady's rule, which gathers least often).
    """
    return Actions(tuple(tuple(_sharded(row, resident)) for row in actions.ranks))


def _sharded(row: Sequence[Action], resident: int | None) -> list[Action]:
    uses: dict[int, list[int]] = {}
    for at, action in enumerate(row):
        if action.kind in COMPUTE or action.kind is Kind.RECOMPUTE:
            uses.setdefault(action.stage, []).append(at)
    room = max(1, len(uses) if resident is None else resident)
    ahead = {stage: iter(positions) for stage, positions in uses.items()}
    next_use = {stage: next(positions) for stage, positions in ahead.items()}
    gathered: set[int] = set()
    new: list[Action] = []
    for at, action in enumerate(row):
        stage = action.stage
        if next_use.get(stage) != at:
            new.append(action)
            continue
        if stage not in gathered:
            if len(gathered) == room:
                leaving = max(gathered, key=lambda other: next_use[other])
                gathered.remove(leaving)
                new.append(Action(leaving, Kind.RESHARD))
            gathered.add(stage)
            new.append(Action(stage, Kind.UNSHARD))
        new.append(action)
        next_use[stage] = next(ahead[stage], len(row))
        if next_use[stage] == len(row):
            gathered.remove(stage)
            new.append(Action(stage, Kind.RESHARD))
    return new


def add_reduction(actions: Actions) -> Actions:
    """Reduce a stage's gradients over its replicas once, right after its last weight gradient."""
    rows = []
    for row in actions.ranks:
        last = {action.stage: at for at, action in enumerate(row) if action.kind in _LAST}
        new: list[Action] = []
        for at, action in enumerate(row):
            new.append(action)
            if last.get(action.stage) == at:
                new.append(Action(action.stage, Kind.REDUCE_GRAD))
        rows.append(tuple(new))
    return Actions(tuple(rows))
