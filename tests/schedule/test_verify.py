"""The verifier: it accepts every order of ours and of PyTorch's, and names the culprit in every broken one."""

import random
import sys
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import reference

from wavetrain.base.errors import InputError
from wavetrain.schedule import (
    SCHEDULES,
    Action,
    Actions,
    Kind,
    ScheduleError,
    Shape,
    add_communication,
    add_recomputation,
    add_reduction,
    add_sharding,
    orders,
    parse_text,
    verify,
    write_text,
)
from wavetrain.schedule.prove import PLAIN, is_proven
from wavetrain.schedule.verify import _find_reason


def shapes(P, M, *, most_waves=3):
    """Every schedule of the table at this size."""
    for name, schedule in SCHEDULES.items():
        if schedule.even_ranks and P % 2:
            continue
        for chunks in range(1, most_waves + 1) if schedule.chunked else (1,):
            for waves in range(1, most_waves + 1) if schedule.waved else (1,):
                yield name, schedule.order(Shape(P, M, chunks=chunks, waves=waves))


@pytest.mark.parametrize("P", [2, 3, 4])
@pytest.mark.parametrize("M", range(1, 9))
def test_every_kind_is_proven_exhaustively(P, M):
    for name, order in shapes(P, M):
        proof = verify(order)
        assert proof.capacities == ("0", "1", "unbounded"), name
        complete = add_sharding(add_reduction(add_communication(order)))
        assert verify(complete).num_messages == proof.num_messages
        text = [[(a.stage, a.kind.value, a.microbatch) for a in row] for row in complete.ranks]
        assert reference.runs_to_the_end(text, order.placement.depth)


@settings(max_examples=40)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 64), st.integers(1, 40), st.integers(1, 4))
def test_large_ones_too(name, P, M, more):
    schedule = SCHEDULES[name]
    P += P % 2 if schedule.even_ranks else 0
    more = min(more, max(1, 6000 // (2 * P * M)))
    order = schedule.order(Shape(P, M, chunks=more, waves=more))
    verify(order)


# --- mutations ---

SMALL = [
    orders.one_f_one_b(2, 3),
    orders.wave(2, 1, 2),
    orders.interleaved(2, 2, 2),
    orders.zb_h1(3, 3),
    orders.chimera(2, 2),
    add_communication(orders.one_f_one_b(3, 2)),
    add_communication(orders.wave(2, 2, 2)),
    add_reduction(add_sharding(add_communication(orders.zb_h1(2, 3)))),
]


def mutants(actions):
    """Every swap of two, drop of one and duplicate of one action, with the actions touched."""
    for rank, row in enumerate(actions.ranks):
        for i, j in combinations(range(len(row)), 2):
            new = list(row)
            new[i], new[j] = new[j], new[i]
            yield "swap", _with(actions, rank, new), {row[i], row[j]}
        for i in range(len(row)):
            yield "drop", _with(actions, rank, [*row[:i], *row[i + 1 :]]), {row[i]}
            for j in range(len(row) + 1):
                yield "duplicate", _with(actions, rank, [*row[:j], row[i], *row[j:]]), {row[i]}


def _with(actions, rank, row):
    return Actions((*actions.ranks[:rank], tuple(row), *actions.ranks[rank + 1 :]))


@pytest.mark.parametrize("number", range(len(SMALL)))
def test_every_mutant_is_harmless_or_rejected_for_what_was_done(number):
    original = SMALL[number]
    depth = original.placement.depth
    verify(original)
    rejected = 0
    for what, mutant, touched in mutants(original):
        text = [[(a.stage, a.kind.value, a.microbatch) for a in row] for row in mutant.ranks]
        try:
            verify(mutant)
        except ScheduleError as error:
            rejected += 1
            named = str(error)
            assert any(str(action) in named for action in touched), (what, touched, named)
            continue
        harmless_drop = what != "swap" and all(a.kind in (Kind.UNSHARD, Kind.RESHARD) for a in touched)
        assert what == "swap" or harmless_drop, (what, touched)
        assert reference.runs_to_the_end(text, depth), (what, touched)
    assert rejected > 10


@pytest.mark.parametrize("number", range(len(SMALL)))
def test_the_fast_proof_and_the_one_with_reasons_agree(number):
    """On every mutant that has only what the fast one judges: compute, sends and receives of one model."""
    original = SMALL[number]
    for _, mutant, _ in mutants(add_communication(original) if not original.has_communication else original):
        kinds = {action.kind for row in mutant.ranks for action in row}
        if mutant.placement.chains > 1 or not kinds <= set(PLAIN):
            continue
        try:
            _find_reason(mutant, None)
            right = True
        except ScheduleError:
            right = False
        assert is_proven(mutant, None) == right, write_text(mutant)


def broken(text):
    with pytest.raises(ScheduleError) as caught:
        verify(parse_text(text, file="s.csv"))
    return str(caught.value)


def test_a_circle_is_shown_with_ranks_positions_and_actions():
    message = broken("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n2F0,2F1,2B0,2B1\n")
    assert message.splitlines() == [
        "ranks wait for each other in a circle:",
        "rank 0 position 1: 0B0 needs 1B0, which rank 1 has at position 2, behind 1F1 (position 0)",
        "rank 1 position 0: 1F1 needs 0F1, which rank 0 has at position 2, behind 0B0 (position 1)",
        "  rank 0: 0F0 >0B0< 0F1 0B1",
        "  rank 1: >1F1< 1F0 1B0 1B1",
    ]


def test_a_circle_of_messages_says_at_which_capacity():
    crossed = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    message = broken(crossed)
    assert "rank 0 position 3: 0SEND_F1 waits for rank 1, which is in 1SEND_B0 (position 3)" in message
    assert "capacity 0)" in message
    assert "rank 0: 0F0 0SEND_F0 0F1 >0SEND_F1< 0RECV_B0" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n1F0\n", "1B0 is missing"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "0B0 is there 2 times: rank 0 position 1 and rank 0 position 2"),
        ("0F0,0F2,0B0,0B2\n1F0,1F2,1B0,1B2\n", "0F1 is missing"),
        ("0B0,0F0\n1F0,1B0\n", "0B0 needs 0F0, which only comes at position 1"),
        ("0F0,0W0,0I0\n1F0,1I0,1W0\n", "0W0 needs 0I0"),
        ("0F0,0F1,0B0,0B1\n0F2,0B2\n", "stage 0 is on two ranks"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no forward"),
        ("0F0,0B0,0I0,0W0\n1F0,1B0\n", "repeats its own halves"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n", "1RECV_F0 comes after 1F0"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n", "1SEND_B0 is missing"),
        ("0F0,0SEND_F0,0SEND_B0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "0SEND_B0 is a message nobody needs"),
        ("0UNSHARD,0F0,0RESHARD,0B0\n", "0B0 uses a stage that is not gathered"),
        ("0F0,0REDUCE_GRAD,0B0\n", "0REDUCE_GRAD comes before 0B0"),
        ("0F0,0RESHARD,0B0\n", "frees a stage that is not gathered"),
        ("0F0,0F1,0B0,0B1,0REDUCE_GRAD,0REDUCE_GRAD\n", "0REDUCE_GRAD is there 2 times"),
        ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", "1REDUCE_GRAD is missing"),
        ("0F0,0B0,0RECOMPUTE0\n", "0B0 needs 0RECOMPUTE0"),
        ("0F0,0RECOMPUTE0,0RECOMPUTE0,0B0\n", "0RECOMPUTE0 is there 2 times"),
        ("0UNSHARD,0F0,0RESHARD,0RECOMPUTE0,0UNSHARD,0B0\n", "0RECOMPUTE0 uses a stage that is not gathered"),
        ("0F0,0B0\n7UNSHARD\n", "7UNSHARD names stage 7, which nobody computes"),
        ("5SEND_F0,0F0,0B0\n", "5SEND_F0 names stage 5"),
        ("0SEND_F0\n1RECV_F0\n", "0SEND_F0 names stage 0"),
        ("999999999F0\n", "stage 0 has no forward"),
        ("0F999999999,0B999999999\n", "names microbatch 999999999"),
        ("0F0,0B0\n1F0,1B0\n2F1,2B1\n", "0F1 is missing"),
        ("0F0,0B0\n1F1,1B1\n", "0F1 is missing"),
        ("2F0,3F1,4B1,0B0\n1F0,1B0,2B1\n", "stage 2 is on two ranks"),
        ("0F1,0B1\n1F1,1B1\n", "microbatch 0 is nowhere"),
    ],
)
def test_reasons(text, says):
    assert says in broken(text)


def test_both_ends_of_a_link_must_agree_on_the_order():
    rows = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    message = broken(rows + "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n")
    assert "rank 0 sends 0SEND_F0 (position 1) where rank 1 expects 1RECV_F1 (position 0)" in message


def test_a_cap_on_memory():
    assert verify(orders.one_f_one_b(4, 8), cap=Fraction(4)).peak_in_flight == (4, 3, 2, 1)
    with pytest.raises(ScheduleError) as caught:
        verify(orders.one_f_one_b(4, 8), cap=Fraction(7, 2))
    assert "rank 0 position 3: 0F3 takes it over the cap of 7/2" in str(caught.value)
    assert ">0F3<" in str(caught.value)


def test_a_number_of_microbatches_can_be_asked_for():
    with pytest.raises(ScheduleError, match="0F2 is missing"):
        verify(orders.gpipe(2, 2), microbatches=3)
    partial = Actions(tuple(tuple(a for a in row if a.microbatch != 7) for row in orders.chimera(4, 8).ranks))
    with pytest.raises(ScheduleError, match="microbatch 7 is nowhere"):
        verify(partial, microbatches=8)


@pytest.mark.parametrize("seed", range(4))
def test_foreign_files_never_end_in_a_traceback(seed):
    """Letters and numbers of valid files changed at random: proven, rejected or refused, nothing else."""
    rng = random.Random(seed)
    texts = [write_text(schedule) for schedule in SMALL]
    messages = []
    for _ in range(800):
        text = list(rng.choice(texts))
        for _ in range(rng.randint(1, 4)):
            spot = rng.randrange(len(text))
            text[spot] = rng.choice("0123456789FBIW,\n") if rng.random() < 0.8 else ""
        try:
            verify(parse_text("".join(text), file="s.csv"))
        except (ScheduleError, InputError) as error:
            messages.append(str(error))
    assert len(messages) > 200
    assert all(messages)


def test_recomputation_stands_between_forward_and_backward():
    order = add_recomputation(orders.wave(2, 1, 2), [0, 3])
    verify(order)
    counts = [action for row in order.ranks for action in row if action.kind is Kind.RECOMPUTE]
    assert len(counts) == 2 * 2
    early = Actions(((Action(0, Kind.RECOMPUTE, 0), Action(0, Kind.F, 0), Action(0, Kind.B, 0)),))
    with pytest.raises(ScheduleError, match="0RECOMPUTE0 needs 0F0"):
        verify(early)
