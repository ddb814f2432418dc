from itertools import product

import pytest

from wavetrain.schedule import Action, Actions, Kind, add_communication, add_reduction, add_sharding, orders, verify
from wavetrain.schedule.passes import _sharded


def gathers(actions):
    return [sum(action.kind is Kind.UNSHARD for action in row) for row in actions.ranks]


@pytest.mark.parametrize("W", [1, 2, 4])
def test_with_room_each_stage_is_gathered_once_a_step(W):
    """PyTorch, which looks three stages ahead, gathers 2, 21 and 61 times here (hanayo-and-pipelines 3.1)."""
    sharded = add_sharding(orders.wave(4, W, 8))
    assert gathers(sharded) == [2 * W] * 4
    verify(sharded)


def test_with_less_room_it_gathers_more_often_but_stays_within():
    order = orders.wave(4, 2, 8)
    for resident in (1, 2, 3, 4):
        sharded = add_sharding(order, resident=resident)
        verify(sharded)
        for row in sharded.ranks:
            held = most = 0
            for action in row:
                held += (action.kind is Kind.UNSHARD) - (action.kind is Kind.RESHARD)
                most = max(most, held)
            assert held == 0
            assert most <= resident
    counts = [sum(gathers(add_sharding(order, resident=r))) for r in (1, 2, 3, 4)]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("stages", list(product(range(3), repeat=6))[::7])
def test_no_choice_of_what_to_free_gathers_less(stages):
    row = [Action(stage, Kind.F, m) for m, stage in enumerate(stages)]
    ours = sum(action.kind is Kind.UNSHARD for action in _sharded(row, 2))
    assert ours == fewest(stages, frozenset(), 2)


def fewest(stages, held, room):
    if not stages:
        return 0
    first, rest = stages[0], stages[1:]
    if first in held:
        return fewest(rest, held, room)
    if len(held) < room:
        return 1 + fewest(rest, held | {first}, room)
    return 1 + min(fewest(rest, held - {out} | {first}, room) for out in held)


def test_gradients_are_reduced_once_after_the_last_weight_gradient():
    for order in (orders.wave(2, 2, 4), orders.zb_h1(4, 6)):
        reduced = add_reduction(order)
        verify(reduced)
        for row in reduced.ranks:
            reductions = [a for a in row if a.kind is Kind.REDUCE_GRAD]
            assert len(reductions) == len({a.stage for a in row})
            for action in reductions:
                after = row[row.index(action) + 1 :]
                assert not any(a.stage == action.stage and a.kind in (Kind.B, Kind.W) for a in after)


def test_messages_are_placed_around_gathers_and_reductions():
    order = orders.wave(3, 1, 4)
    first = add_communication(add_reduction(add_sharding(order)))
    verify(first)
    assert sum(map(len, first.ranks)) == sum(map(len, add_sharding(add_reduction(add_communication(order))).ranks))


def test_an_empty_rank_stays_empty():
    assert add_sharding(Actions(((),))).ranks == ((),)
