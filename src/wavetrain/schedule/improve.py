"""Improving an order by tabu search over swaps on the critical path, as for job shops (Nowicki and Smutnicki 1996).

Two neighbours in a rank's row may trade places only where both lie on a critical path: no other swap shortens anything.
The memory cap is a property of each row alone, so it is checked there.
"""

from __future__ import annotations

import random

from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.schedule.evaluate import Costs, Time
from wavetrain.schedule.placement import Placement

TENURE = (8, 16)  # steps for which a swap may not be taken back
PATIENCE = 150  # steps without progress before going back to the best
MOST_SWAPS = 60  # tried in one step; of more, a sample
SHAKE = (2, 10)  # random swaps before the next try
SEED = 20231112  # the same input gives the same order


def improve(actions: Actions, costs: Costs, *, caps: tuple[int, ...], effort: int, goal: Time) -> Actions:
    """A shorter order of the same actions within the same caps; `effort` counts evaluated actions.

    When the search gets no further it goes back to the best order, shakes it a little and tries again.
    """
    shop = _Shop(actions, costs, caps)
    rng = random.Random(SEED)  # noqa: S311 - a search, not a secret
    best, best_rows = shop.run(), [list(row) for row in shop.rows]
    assert best is not None
    budget = effort
    while budget > 0 and best > goal:
        length, rows, spent = _search(shop, rng, budget, goal)
        budget -= max(spent, shop.size)
        if length < best:
            best, best_rows = length, rows
        shop.rows = [list(row) for row in best_rows]
        shop.run()
        for _ in range(rng.randint(*SHAKE)):
            swaps = shop.critical_swaps()
            shaken = rng.choice(swaps) if swaps else None
            if shaken:
                shop.swap(*shaken)
            if shaken and shop.run() is None:  # only where something takes no time
                shop.swap(*shaken)
                shop.run()
    return shop.as_actions(best_rows)


def _search(shop: _Shop, rng: random.Random, effort: int, goal: Time) -> tuple[Time, list[list[int]], int]:
    """One tabu search from the shop's present rows: the best length and rows met, and what it cost."""
    best, best_rows = shop.run(), [list(row) for row in shop.rows]
    assert best is not None
    tabu: dict[tuple[int, int], int] = {}
    step = since = spent = 0
    while spent < effort and since < PATIENCE and best > goal:
        step += 1
        since += 1
        chosen: tuple[Time, float, int, int] | None = None
        swaps = shop.critical_swaps()
        most = max(1, min(MOST_SWAPS, (effort - spent) // shop.size))
        for rank, at in swaps if len(swaps) <= most else rng.sample(swaps, most):
            u, v = shop.rows[rank][at], shop.rows[rank][at + 1]
            shop.swap(rank, at)
            length = shop.run()
            shop.swap(rank, at)
            spent += shop.size
            if length is None or (tabu.get((v, u), -1) >= step and length >= best):
                continue
            candidate = (length, rng.random(), rank, at)
            chosen = min(chosen, candidate) if chosen else candidate
        if chosen is None:
            break
        length, _, rank, at = chosen
        u, v = shop.rows[rank][at], shop.rows[rank][at + 1]
        shop.swap(rank, at)
        shop.run()
        tabu[u, v] = step + rng.randint(*TENURE)
        if length < best:
            best, best_rows, since = length, [list(row) for row in shop.rows], 0
    return best, best_rows, spent


class _Shop:
    """The actions as numbers: what each needs, how long it takes, in which row it stands."""

    def __init__(self, actions: Actions, costs: Costs, caps: tuple[int, ...]) -> None:
        self.caps = caps
        placement = actions.placement
        self.actions = [action for row in actions.ranks for action in row]
        self.size = len(self.actions)
        number = {action: i for i, action in enumerate(self.actions)}
        self.rank = [rank for rank, row in enumerate(actions.ranks) for _ in row]
        self.rows = [[number[action] for action in row] for row in actions.ranks]
        self.duration = [costs.by_kind[a.kind][a.stage] for a in self.actions]
        self.change = [1 if a.kind is Kind.F else -1 if a.kind in (Kind.B, Kind.W) else 0 for a in self.actions]
        self.need: list[int] = []  # the action before it in the chain of its microbatch, or -1
        self.lag: list[Time] = []
        self.own: list[int] = []  # the action of the same stage that must come first, or -1
        for action in self.actions:
            need, lag, own = _needs(placement, action, number, costs)
            self.need.append(need)
            self.lag.append(lag)
            self.own.append(own)
        self.start: list[Time] = [0] * self.size
        self.end: list[Time | None] = [None] * self.size

    def as_actions(self, rows: list[list[int]]) -> Actions:
        return Actions(tuple(tuple(self.actions[i] for i in row) for row in rows))

    def swap(self, rank: int, at: int) -> None:
        row = self.rows[rank]
        row[at], row[at + 1] = row[at + 1], row[at]

    def run(self) -> Time | None:
        """The makespan of the present rows, or None if they wait for each other."""
        rows, need, lag, duration, start = self.rows, self.need, self.lag, self.duration, self.start
        end: list[Time | None] = [None] * self.size
        waiter: dict[int, int] = {}
        clock: list[Time] = [0] * len(rows)
        position = [0] * len(rows)
        todo = list(range(len(rows)))
        left = self.size
        while todo:
            rank = todo.pop()
            row, now, at = rows[rank], clock[rank], position[rank]
            while at < len(row):
                op = row[at]
                before = need[op]
                if before >= 0:
                    ready = end[before]
                    if ready is None:
                        waiter[before] = rank
                        break
                    ready = ready + lag[op]
                    now = max(now, ready)
                start[op] = now
                now = now + duration[op]
                end[op] = now
                at += 1
                left -= 1
                if op in waiter:
                    todo.append(waiter.pop(op))
            clock[rank], position[rank] = now, at
        if left:
            return None
        self.end = end
        return max(clock)

    def critical_swaps(self) -> list[tuple[int, int]]:
        """(rank, position) of neighbours on one critical path of the last run that may trade places."""
        where = {op: (rank, at) for rank, row in enumerate(self.rows) for at, op in enumerate(row)}
        op = max((row[-1] for row in self.rows if row), key=lambda last: (self.end[last], last))
        swaps = []
        while True:
            rank, at = where[op]
            previous = self.rows[rank][at - 1] if at else -1
            if previous >= 0 and self.end[previous] == self.start[op]:
                if self._may_swap(rank, at - 1):
                    swaps.append((rank, at - 1))
                op = previous
            elif self.need[op] >= 0 and self.start[op] > 0:
                op = self.need[op]
            else:
                return swaps

    def _may_swap(self, rank: int, at: int) -> bool:
        row = self.rows[rank]
        u, v = row[at], row[at + 1]
        if self.need[v] == u or self.own[v] == u:
            return False
        if self.change[v] <= 0 or self.change[u] > 0:
            return True
        live = sum(self.change[op] for op in row[:at])
        return live + self.change[v] <= self.caps[rank]


def _needs(placement: Placement, action: Action, number: dict[Action, int], costs: Costs) -> tuple[int, Time, int]:
    stage, kind, m = action
    own = Action(stage, Kind.I, m) if kind is Kind.W else Action(stage, Kind.F, m)
    own_number = number[own] if kind is not Kind.F else -1
    ahead = kind is Kind.F
    if kind is Kind.W or (placement.is_first(stage) if ahead else placement.is_last(stage)):
        return -1, 0, own_number
    other = stage - 1 if ahead else stage + 1
    before = Action(other, Kind.F, m) if ahead else Action(other, Kind.I, m)
    if before not in number:
        before = Action(other, Kind.B, m)
    return number[before], costs.link(placement.ranks[other], placement.ranks[stage]), own_number
