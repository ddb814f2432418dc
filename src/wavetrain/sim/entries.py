"""Every rank's list as arrays, complete with its messages; refused where something is missing or out of place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.schedule.evaluate import Stuck
from wavetrain.schedule.passes import add_communication
from wavetrain.schedule.table import CODE, Ints, Table
from wavetrain.schedule.verify import verify

Bools: TypeAlias = NDArray[np.bool_]

KINDS = tuple(Kind)
F, B, I, W, RECOMPUTE, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE = (CODE[kind] for kind in KINDS)  # noqa: E741
LAUNCHING = len(KINDS)  # launches' row in a table of seconds, after the kinds


class Messages(Enum):
    """How messages are carried."""

    OVERLAPPED = "overlapped"  # on a lane per directed link, beside compute
    BLOCKING = "blocking"  # on the compute lanes of both ends


@dataclass(frozen=True)
class Entries:
    """All actions, rank after rank, and for each message the entries that use, send and receive it."""

    actions: Actions
    table: Table
    user: Ints
    send: Ints
    receive: Ints

    @cached_property
    def found(self) -> dict[int, Ints]:
        """By kind (I also means B), the entry of each cell; -1: none."""
        return _found(self.actions, self.table)

    @cached_property
    def cell(self) -> Ints:
        """The stage and microbatch of each entry as one number."""
        return _cells(self.table)

    def action(self, entry: int) -> Action:
        m = int(self.table.microbatch[entry])
        return Action(int(self.table.stage[entry]), KINDS[self.table.kind[entry]], None if m < 0 else m)

    def of(self, *kinds: int) -> Bools:
        return of_kind(self.table.kind, *kinds)


def of_kind(kind: Ints, *kinds: int) -> Bools:
    """Where the kind is one of these."""
    chosen = np.zeros(LAUNCHING, dtype=np.bool_)
    chosen[list(kinds)] = True
    return chosen[kind]


def _reject(actions: Actions) -> NoReturn:
    """Actions that can't be run: the verifier says why."""
    verify(actions)
    raise Stuck({})


def _per_stage(table: Table) -> int:
    return int(table.microbatch.max(initial=0)) + 1


def _cells(table: Table) -> Ints:
    return table.stage * _per_stage(table) + table.microbatch


def _found(actions: Actions, table: Table) -> dict[int, Ints]:
    cell, size = _cells(table), actions.placement.num_stages * _per_stage(table)
    found = {}
    for kinds in ((F,), (I, B), (W,), (SEND_F,), (RECV_F,), (SEND_B,), (RECV_B,)):
        entries = np.flatnonzero(of_kind(table.kind, *kinds))
        places = np.full(size, -1, dtype=np.int64)
        places[cell[entries]] = entries
        if np.count_nonzero(places >= 0) != len(entries):
            _reject(actions)
        found[kinds[0]] = places
    return found


def complete(actions: Actions, messages: Messages) -> Entries:
    """The entries with their messages. Blocking messages that are not there are placed by the pass."""
    if messages is Messages.BLOCKING and not actions.has_communication:
        return complete(add_communication(actions), messages)
    table = Table.of(actions)
    ranks = np.array(actions.placement.ranks, dtype=np.int64)
    if (table.stage >= len(ranks)).any() or (ranks[table.stage] != table.rank).any():
        _reject(actions)
    found, cell = _found(actions, table), _cells(table)
    user, source = _uses(actions, table, found, cell)
    if not actions.has_communication:
        return _with_messages(actions, table, user, source)
    ahead = table.kind[user] == F
    send = np.where(ahead, found[SEND_F][cell[source]], found[SEND_B][cell[source]])
    receive = np.where(ahead, found[RECV_F][cell[user]], found[RECV_B][cell[user]])
    ends = np.count_nonzero(of_kind(table.kind, SEND_F, SEND_B, RECV_F, RECV_B))
    if ends != 2 * len(user) or (send < source).any() or ((receive < 0) | (receive > user)).any():
        _reject(actions)
    return Entries(actions, table, user, send, receive)


def _uses(actions: Actions, table: Table, found: dict[int, Ints], cell: Ints) -> tuple[Ints, Ints]:
    """Each entry that uses the result of another rank, and the entry that makes it; all else must be in order."""
    depth, step = max(1, actions.placement.depth), _per_stage(table)
    forward = np.flatnonzero((table.kind == F) & (table.stage % depth > 0))
    weights = np.flatnonzero(table.kind == W)
    backward = np.flatnonzero(of_kind(table.kind, B, I))
    gradient = backward[(table.stage[backward] + 1) % depth > 0]
    user = np.concatenate([forward, gradient])
    source = np.concatenate([found[F][cell[forward] - step], found[I][cell[gradient] + step]])
    if (source < 0).any():
        _reject(actions)
    apart = table.rank[source] != table.rank[user]
    pairs = [(found[F][cell[backward]], backward), (found[I][cell[weights]], weights), (source[~apart], user[~apart])]
    if any(((before < 0) | (before > after)).any() for before, after in pairs):
        _reject(actions)
    return user[apart], source[apart]


def _with_messages(actions: Actions, table: Table, user: Ints, source: Ints) -> Entries:
    """Each send right after what makes its message, each receive right before what uses it."""
    size, extra = len(table.kind), len(user)
    base = np.concatenate([np.arange(size), source, user])
    kind = np.where(table.kind[user] == F, SEND_F, SEND_B)
    order = np.argsort(3 * base + np.repeat([1, 2, 0], [size, extra, extra]))
    place = np.empty(len(base), dtype=np.int64)
    place[order] = np.arange(len(base))
    base = base[order]
    kinds = np.concatenate([table.kind, kind, kind + (RECV_F - SEND_F)])[order]
    columns = (table.stage[base], kinds, table.microbatch[base], table.rank[base], table.position[base])
    return Entries(actions, Table(*columns), place[user], place[size : size + extra], place[size + extra :])


def of_same_stage(entries: Entries, chosen: Ints, asking: Ints, *, after: bool) -> Ints:
    """The nearest chosen entry of the stage of each asking entry, after it or before it; -1: none."""
    stage, size = entries.table.stage, len(entries.cell)
    keys = np.sort(stage[chosen] * size + chosen)
    index = np.searchsorted(keys, stage[asking] * size + asking) - (not after)
    inside = (index >= 0) & (index < len(keys))
    near = np.where(inside, np.append(keys, -1)[np.where(inside, index, -1)], -1)
    return np.where(inside & (near // size == stage[asking]), near % size, -1)


def undone(entries: Entries) -> tuple[Ints, Ints]:
    """Each entry that frees a stage, and the gather that it undoes."""
    free = np.flatnonzero(entries.of(RESHARD))
    change = of_same_stage(entries, np.flatnonzero(entries.of(UNSHARD, RESHARD)), free, after=False)
    if (change < 0).any() or (entries.table.kind[change] != UNSHARD).any():
        _reject(entries.actions)
    return free, change
