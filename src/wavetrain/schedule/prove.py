"""The verifier's rules on arrays: yes for a right schedule of any size in seconds; no means `verify` looks for why.

The same rules as in `verify.py`, which words the reasons; a test holds the two together on every mutant it makes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wavetrain.schedule.action import Actions, Kind
from wavetrain.schedule.table import CODE, Ints, Table

Bools = NDArray[np.bool_]
PLAIN = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


def is_proven(actions: Actions, microbatches: int | None) -> bool:
    """Whether a schedule of compute and communication actions is right; other kinds are for `verify` to judge."""
    placement = actions.placement
    table = Table.of(actions)
    plain = [CODE[kind] for kind in PLAIN]
    if placement.chains > 1 or -1 in placement.ranks or not np.isin(table.kind, plain).all():
        return False
    count = int(table.microbatch.max(initial=-1)) + 1
    if (microbatches or count) != count or count == 0:
        return False
    ranks = np.array(placement.ranks)
    if (table.stage >= placement.num_stages).any() or not (ranks[table.stage] == table.rank).all():
        return False
    at = {kind: table.positions(kind, placement.num_stages, count) for kind in PLAIN}
    known = {kind: found for kind, found in at.items() if found is not None}
    if len(known) < len(PLAIN):
        return False
    backward = _backward(known)
    if backward is None:
        return False
    crossing = ranks[1:] != ranks[:-1]
    in_order = _in_order(known, backward, crossing) and _messages_are_right(known, backward, crossing)
    return in_order and _links_agree(table, ranks, placement.num_ranks) and _never_circles(table, ranks)


def _backward(at: dict[Kind, Ints]) -> Ints | None:
    """Where the gradient of each stage's input is made, by a full backward or its first half; None where incomplete."""
    forward, full, first, second = (at[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    if (forward < 0).any():
        return None
    if (full < 0).all() and (first < 0).all() and (second < 0).all():
        return full  # evaluation: no backward at all
    whole, parted = full >= 0, (first >= 0) & (second >= 0)
    if not (whole ^ parted).all() or ((first >= 0) != (second >= 0)).any():
        return None
    if (parted & (second < first)).any():
        return None
    return np.where(whole, full, first)


def _in_order(at: dict[Kind, Ints], backward: Ints, crossing: Bools) -> bool:
    """A stage's backward after its forward; hand-overs on one rank in the direction of the data."""
    forward = at[Kind.F]
    local = ~crossing
    has_backward = bool((backward >= 0).any())
    if has_backward and (backward < forward).any():
        return False
    if (forward[1:][local] < forward[:-1][local]).any():
        return False
    return not (has_backward and (backward[:-1][local] < backward[1:][local]).any())


def _messages_are_right(at: dict[Kind, Ints], backward: Ints, crossing: Bools) -> bool:
    """Each result that crosses ranks sent after it is made and received before it is used, and nothing else."""
    forward, has_backward = at[Kind.F], bool((backward >= 0).any())
    edges = [(at[Kind.SEND_F][:-1], forward[:-1], at[Kind.RECV_F][1:], forward[1:])]
    if has_backward:
        edges.append((at[Kind.SEND_B][1:], backward[1:], at[Kind.RECV_B][:-1], backward[:-1]))
    for send, made, receive, used in edges:
        if (send[crossing] < made[crossing]).any() or (send[crossing] < 0).any():
            return False
        if (receive[crossing] > used[crossing]).any() or (receive[crossing] < 0).any():
            return False
    expected = int(crossing.sum()) * forward.shape[1] * len(edges)
    sends = np.count_nonzero(at[Kind.SEND_F] >= 0) + np.count_nonzero(at[Kind.SEND_B] >= 0)
    receives = np.count_nonzero(at[Kind.RECV_F] >= 0) + np.count_nonzero(at[Kind.RECV_B] >= 0)
    return bool(sends == receives == expected)


def _ends(table: Table, ranks: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Of every send and receive: sender, receiver, the message's number, and whether it is the send."""
    kinds = {kind: CODE[kind] for kind in PLAIN}
    is_send = (table.kind == kinds[Kind.SEND_F]) | (table.kind == kinds[Kind.SEND_B])
    is_forward = (table.kind == kinds[Kind.SEND_F]) | (table.kind == kinds[Kind.RECV_F])
    step = np.where(is_forward == is_send, 1, -1)
    chosen = is_send | np.isin(table.kind, (kinds[Kind.RECV_F], kinds[Kind.RECV_B]))
    stage, peer = table.stage[chosen], table.stage[chosen] + step[chosen]
    sending, receiving = np.where(is_send[chosen], stage, peer), np.where(is_send[chosen], peer, stage)
    size = int(table.microbatch.max(initial=0)) + 1
    number = (is_forward[chosen] * len(ranks) + sending) * size + table.microbatch[chosen]
    return ranks[sending], ranks[receiving], number, np.flatnonzero(chosen)


def _links_agree(table: Table, ranks: Ints, num_ranks: int) -> bool:
    """Both ends of each link have its messages in the same order."""
    sender, receiver, number, where = _ends(table, ranks)
    link = sender * num_ranks + receiver
    is_send = np.isin(table.kind[where], (CODE[Kind.SEND_F], CODE[Kind.SEND_B]))
    orders = []
    for side in (is_send, ~is_send):
        order = np.lexsort((table.position[where][side], link[side]))
        orders.append((link[side][order], number[side][order]))
    (links, sent), (others, received) = orders
    return bool(np.array_equal(links, others) and np.array_equal(sent, received))


def _never_circles(table: Table, ranks: Ints) -> bool:
    """All messages get through where a send waits for its receive and each rank takes its own in order."""
    _, _, number, where = _ends(table, ranks)
    _, dense = np.unique(number, return_inverse=True)
    rank_of_end = table.rank[where]
    rows = [dense[rank_of_end == rank].tolist() for rank in range(int(table.rank.max(initial=-1)) + 1)]
    ends: list[list[int]] = [[] for _ in range(int(dense.max(initial=-1)) + 1)]
    for rank, row in enumerate(rows):
        for message in row:
            ends[message].append(rank)
    heads = [0] * len(rows)
    waiting = [0] * len(ends)
    left = len(ends)
    ready: list[int] = []

    def look(rank: int) -> None:
        if heads[rank] < len(rows[rank]):
            message = rows[rank][heads[rank]]
            waiting[message] += 1
            if waiting[message] == 2:
                ready.append(message)

    for rank in range(len(rows)):
        look(rank)
    while ready:
        message = ready.pop()
        left -= 1
        for rank in ends[message]:
            heads[rank] += 1
        for rank in ends[message]:
            look(rank)
    return left == 0
