"""List scheduling under a memory cap: a free rank takes the most urgent action that is ready and safe to start.

Safe means: after it, every microbatch in the pipeline can still get all the room it needs on this rank, in the order in
which they entered (the banker's rule). That order is one for all ranks, so the microbatch that entered first can always
finish, and no cap that holds one microbatch ends in a dead stop. Plain greedy admission fills a rank with first legs.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.schedule.evaluate import Costs, Time
from wavetrain.schedule.orders import wave_slot
from wavetrain.schedule.placement import Placement, snake

Priority = Callable[[Action], Time]  # less is more urgent


def list_schedule(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    *,
    priority: Priority,
    caps: tuple[int, ...],
    split: bool,
    window: int | None = None,
) -> Actions:
    """An order for every rank; `caps` are stage activations each rank may hold at once.

    `window` is how many microbatches may be in the pipeline at once; fewer leave room for later legs.
    """
    entered: list[int] = []  # microbatches in the order in which they entered the pipeline
    in_flight = 0
    ranks = [_Rank(placement, rank, microbatches, caps[rank], entered) for rank in range(placement.num_ranks)]
    events: list[tuple[Time, int, Action | None]] = []  # (when, rank, what arrives; None: the rank is free again)
    for m in range(microbatches):
        stage = placement.chain_of(m) * placement.depth
        events.append((0, placement.ranks[stage], Action(stage, Kind.F, m)))
    ties = count()  # events of one instant in the order they were made
    queue = [(when, next(ties), rank, action) for when, rank, action in events]
    while queue:
        now = queue[0][0]
        touched = set()
        while queue and queue[0][0] == now:  # everything of this instant before anybody chooses
            _, _, number, action = heappop(queue)
            touched.add(number)
            if action is None:
                ranks[number].busy = False
            else:
                ranks[number].arrive(action, priority(action))
        for number in sorted(touched):
            may_enter = window is None or in_flight < window
            chosen = None if ranks[number].busy else ranks[number].choose(may_enter)
            if chosen is None:
                continue
            if placement.is_first(chosen.stage):
                if chosen.kind is Kind.F:
                    entered.append(chosen.microbatch or 0)
                in_flight += (chosen.kind is Kind.F) - (chosen.kind in (Kind.B, Kind.I))
            ranks[number].busy = True
            end = now + costs.by_kind[chosen.kind][chosen.stage]
            heappush(queue, (end, next(ties), number, None))
            follower = _follower(placement, chosen, split)
            if follower is not None:
                peer = placement.ranks[follower.stage]
                heappush(queue, (end + costs.link(number, peer), next(ties), peer, follower))
    return Actions(tuple(tuple(rank.row) for rank in ranks))


def wave_zb(ranks: int, waves: int, microbatches: int, costs: Costs | None = None) -> Actions:
    """The wave with split backward at the wave's own memory: weight gradients fill the gaps (hanayo-and-pipelines 2.4).

    `costs` are what the order is built for; without them all three parts take the same time. One wave is ZB-V.
    """
    placement = snake(ranks, waves)
    priority = wave_priority(placement)
    caps = (2 * waves * min(ranks, microbatches),) * ranks
    return list_schedule(
        placement,
        microbatches,
        costs or Costs.uniform(placement.num_stages),
        priority=priority,
        caps=caps,
        split=True,
    )


def wave_priority(placement: Placement) -> Priority:
    """Urgency by the slots of the wave."""
    depth, unit = placement.depth, placement.num_ranks

    def priority(action: Action) -> Time:
        assert action.microbatch is not None
        return wave_slot(action.stage % depth, action.kind, action.microbatch, depth=depth, unit=unit)

    return priority


def _follower(placement: Placement, action: Action, split: bool) -> Action | None:
    """What an action makes ready: the next stage, and behind the last stage the backward."""
    stage, kind, m = action
    backward = Kind.I if split else Kind.B
    if kind is Kind.F:
        return Action(stage, backward, m) if placement.is_last(stage) else Action(stage + 1, Kind.F, m)
    if kind is Kind.W or placement.is_first(stage):
        return None
    return Action(stage - 1, backward, m)


class _Rank:
    """What one rank has done, holds and could do next."""

    def __init__(self, placement: Placement, rank: int, microbatches: int, cap: int, entered: list[int]) -> None:
        self.row: list[Action] = []
        self.depth = placement.depth
        self.busy = False
        self.free = cap
        self.forwards: list[tuple[Time, Action]] = []
        self.backwards: list[tuple[Time, Action]] = []
        self.weights: list[Action] = []
        local = placement.local[rank]
        counts = [sum(s // placement.depth == chain for s in local) for chain in range(placement.chains)]
        self.needs = [counts[placement.chain_of(m)] for m in range(microbatches)]  # slots still to be taken
        self.held = [0] * microbatches
        self.entered = entered
        self.finished = 0  # so many of the entered ones, from the first, need and hold nothing here any more
        self.total_needs = sum(self.needs)

    def arrive(self, action: Action, urgency: Time) -> None:
        heappush(self.forwards if action.kind is Kind.F else self.backwards, (urgency, action))

    def choose(self, may_enter: bool) -> Action | None:
        """Take the most urgent safe forward or backward; a weight gradient where there is none."""
        forward = self._safe_forward(may_enter)
        if self.backwards and (forward is None or self.backwards[0][0] < forward[0]):
            action = heappop(self.backwards)[1]
        elif forward is not None:
            self.forwards.remove(forward)
            heapify(self.forwards)
            action = forward[1]
        elif self.weights:
            action = self.weights.pop(0)
        else:
            return None
        self._account(action)
        self.row.append(action)
        return action

    def _safe_forward(self, may_enter: bool) -> tuple[Time, Action] | None:
        for candidate in sorted(self.forwards):
            entering = candidate[1].stage % self.depth == 0
            if (may_enter or not entering) and self._is_safe(candidate[1].microbatch or 0):
                return candidate
        return None

    def _is_safe(self, wanting: int) -> bool:
        """Whether everybody in the pipeline can still finish, in order, after one more slot for `wanting`."""
        room = self.free - 1
        if room >= self.total_needs - 1:
            return True
        new = wanting not in self.entered[self.finished :]
        for m in [*self.entered[self.finished :], *([wanting] if new else [])]:
            extra = m == wanting
            if self.needs[m] - extra > room:
                return False
            room += self.held[m] + extra
        return room >= 0

    def _account(self, action: Action) -> None:
        m = action.microbatch or 0
        if action.kind is Kind.F:
            self.free -= 1
            self.needs[m] -= 1
            self.total_needs -= 1
            self.held[m] += 1
        elif action.kind is Kind.I:
            self.weights.append(Action(action.stage, Kind.W, m))
        else:
            self.free += 1
            self.held[m] -= 1
        while self.finished < len(self.entered) and not self._pending(self.entered[self.finished]):
            self.finished += 1

    def _pending(self, m: int) -> bool:
        return bool(self.held[m] or self.needs[m])
