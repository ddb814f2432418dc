"""The simulator against hand-computed cases, the evaluation of orders, and a plain simulator that walks the lists."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from walk import Walk

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
    evaluate,
    orders,
)
from wavetrain.schedule import Costs as OrderCosts
from wavetrain.schedule.action import COMPUTE
from wavetrain.schedule.evaluate import Stuck
from wavetrain.sim import engine
from wavetrain.sim.engine import Messages, Rules, StageBytes, StageTimes, run

BLOCKING = Rules(Messages.BLOCKING)


def listed(*rows):
    return Actions(tuple(tuple(map(Action.parse, row.split())) for row in rows))


TWO = listed(
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
)
SHARDED = listed(
    "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD",
)


def spans(result, rank, lane):
    return {e.name: (e.start_s, e.end_s) for e in result.timeline.events if e.rank == rank and e.lane == lane}


# --- by hand ---


@pytest.mark.parametrize("actions", [TWO, orders.gpipe(2, 2)])
def test_messages_beside_compute(actions):
    """F 1 s, B 2 s, transfer 0.5 s: rank 1 is 1.5 s behind, rank 0 has its first gradient at 6."""
    found = run(actions, [StageTimes(1, 1, 1, send_f=0.5, send_b=0.5)] * 2)
    assert found.makespan_s == 10
    assert found.starts_s == ((0, 1, 6, 8), (1.5, 2.5, 3.5, 5.5))
    assert found.busy_s == ({"F": 2, "B": 4}, {"F": 2, "B": 4})
    assert found.waiting_transfer_s == (0.5, 0.5)
    assert found.waiting_s == (3.5, 3.5)
    assert spans(found, 0, "send to 1") == {"0SEND_F0": (1, 1.5), "0SEND_F1": (2, 2.5)}
    assert spans(found, 1, "send to 0") == {"1SEND_B0": (5.5, 6), "1SEND_B1": (7.5, 8)}


def test_messages_queue_on_their_link():
    """A transfer of 3 s: the second leaves at 4, when the first has arrived, and not at 2."""
    found = run(orders.gpipe(2, 2), [StageTimes(1, 1, 1, send_f=3, send_b=3)] * 2)
    assert spans(found, 0, "send to 1") == {"0SEND_F0": (1, 4), "0SEND_F1": (4, 7)}
    assert spans(found, 1, "send to 0") == {"1SEND_B0": (10, 13), "1SEND_B1": (13, 16)}
    assert found.starts_s == ((0, 1, 13, 16), (4, 7, 8, 10))
    assert found.makespan_s == 18
    assert found.waiting_transfer_s == (3 + 1, 3 + 2)
    assert found.waiting_s == (8, 1 + 6)


def test_a_send_leaves_at_its_place_in_the_list():
    late = listed("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1")
    found = run(late, [StageTimes(1, 1, 1, send_f=0.5)] * 2)
    assert spans(found, 0, "send to 1") == {"0SEND_F0": (2, 2.5), "0SEND_F1": (2.5, 3)}


def test_blocking_messages_occupy_both_ends():
    found = run(TWO, [StageTimes(1, 1, 1, send_f=0.5, send_b=0.5)] * 2, rules=BLOCKING)
    assert found.makespan_s == 11
    assert found.starts_s == ((0, 1.5, 6.5, 9), (1.5, 3, 4, 6.5))
    assert found.busy_s[0] == {"F": 2, "B": 4, "SEND_F": 1, "RECV_B": 1}
    assert found.busy_s[1] == {"F": 2, "B": 4, "RECV_F": 1, "SEND_B": 1}
    assert found.waiting_s == (3, 3)
    assert found.waiting_transfer_s == (0, 0)
    assert spans(found, 0, "compute")["0RECV_B0"] == spans(found, 1, "compute")["1SEND_B0"] == (6, 6.5)


def test_launches_occupy_the_compute_lane():
    """0.25 s for each send and each receive; the first gradient leaves at 6.25 and is there at 6.75."""
    found = run(TWO, [StageTimes(1, 1, 1, send_f=0.5, send_b=0.5, message_s=0.25)] * 2)
    assert found.starts_s == ((0, 1.25, 6.75, 9), (1.75, 3, 4, 6.25))
    assert found.makespan_s == 11
    assert found.busy_s[0] == {"F": 2, "B": 4, "SEND_F": 0.5, "RECV_B": 0.5}
    assert found.waiting_transfer_s == (0.5, 0.5)


def test_gathers_run_ahead_by_one_compute_action():
    times, sizes = [StageTimes(1, 1, 1, unshard=3, reduce=2)] * 2, [StageBytes(gathered=10)] * 2
    found = run(SHARDED, times, sizes, tail=[[("optimizer", 1.0)]])
    shard = [(e.name, e.start_s, e.end_s) for e in found.timeline.events if e.lane == "shard"]
    gathers = [("0UNSHARD", 0, 3), ("1UNSHARD", 3, 6), ("0UNSHARD", 11, 14)]
    assert shard == sorted([*gathers, ("1REDUCE_GRAD", 9, 11), ("0REDUCE_GRAD", 16, 18)], key=lambda e: e[1])
    assert found.starts_s == ((3, 6, 7, 14),)
    assert found.makespan_s == 19
    assert found.busy_s == ({"F": 2, "B": 4, "optimizer": 1},)
    assert found.waiting_s == (12,)
    assert found.waiting_unshard_s == (3 + 2 + 5,)
    assert found.waiting_reduce_s == (2,)
    assert (found.peak_bytes, found.peak_at_s) == ((20,), (3,))


def test_gathers_in_place_keep_to_one_stage():
    times, sizes = [StageTimes(1, 1, 1, unshard=3, reduce=2)] * 2, [StageBytes(gathered=10)] * 2
    found = run(SHARDED, times, sizes, rules=Rules(prefetch=0))
    assert found.starts_s == ((3, 7, 8, 15),)
    assert found.peak_bytes == (10,)


def test_memory_of_a_split_backward():
    sizes = StageBytes(saved=10, saved_for_w=4, transient_f=1, transient_b=2)
    found = run(listed("0F0 0F1 0I0 0I1 0W0 0W1"), [StageTimes(1, 1, 1)], [sizes], static_bytes=[100])
    counters = [(c.time_s, c.value) for c in found.timeline.counters]
    assert counters == [(0, 111), (1, 121), (2, 122), (3, 116), (4, 110), (5, 106), (6, 100)]
    assert (found.peak_bytes, found.peak_at_s) == ((122,), (2,))


def test_memory_of_recomputation_and_messages():
    """Rank 1 holds a message from 1 to 1.5, what it recomputes from 2.5 to the end of its backward at 5.5."""
    actions = add_recomputation(orders.gpipe(2, 1), [1])
    sizes = [StageBytes(saved=1), StageBytes(saved=1, recomputed=10, message=3)]
    times = [StageTimes(1, 1, 1, recompute=1, send_f=0.5, send_b=0.5)] * 2
    found = run(actions, times, sizes)
    counters = [(c.time_s, c.value) for c in found.timeline.counters if c.rank == 1]
    assert counters == [(0, 0), (1, 3), (1.5, 1), (2.5, 11), (5.5, 0)]


def test_of_two_gathers_in_a_row_one_copy_is_held():
    actions = listed("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD")
    assert run(actions, [StageTimes(1, 1, 1, unshard=1)], [StageBytes(gathered=5)]).peak_bytes == (5,)


def test_a_gather_that_nobody_uses_is_freed_when_it_is_there():
    """The second begins at 4, beside the backward, and ends at 7, after it."""
    actions = listed("0UNSHARD 0F0 0B0 0UNSHARD 0RESHARD")
    found = run(actions, [StageTimes(1, 1, 1, unshard=3)], [StageBytes(gathered=5)])
    assert [(c.time_s, c.value) for c in found.timeline.counters] == [(0, 5), (7, 0)]
    assert found.makespan_s == 7


def test_a_gather_can_not_begin_behind_its_place():
    with pytest.raises(ValueError, match="prefetch"):
        Rules(prefetch=-1)


def test_nothing_to_do():
    found = run(Actions(((), ())), [], static_bytes=[7, 8], tail=[(), (("optimizer", 2.0),)])
    assert found.makespan_s == 2
    assert found.waiting_s == (2, 0)
    assert found.peak_bytes == (7, 8)
    assert [c.value for c in found.timeline.counters] == [7, 8]


# --- what must not run ---


def test_a_circle_is_reported_as_by_the_evaluation():
    actions = listed("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    with pytest.raises(Stuck) as expected:
        evaluate(actions, OrderCosts.uniform(2))
    with pytest.raises(Stuck) as found:
        engine.compile(actions)
    assert found.value.waiting == expected.value.waiting


def test_sends_that_face_each_other_only_hang_when_blocking():
    facing = listed("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")
    actions = Actions((TWO.ranks[0], facing.ranks[0]))
    assert run(actions, [StageTimes(1, 1, 1)] * 2).makespan_s > 0
    with pytest.raises(Stuck) as found:
        run(actions, [StageTimes(1, 1, 1)] * 2, rules=BLOCKING)
    assert found.value.waiting == {0: (3, Action(1, Kind.RECV_F, 1)), 1: (3, Action(0, Kind.RECV_B, 0))}


@pytest.mark.parametrize(
    "rows",
    [
        ("0F0 0B0", "1B0 1F0"),  # a backward before its forward
        ("0F0 0B0", "1F0 1F0 1B0"),  # twice
        ("0F0 0B0", "1F0"),  # a gradient that nobody makes
        ("0F0 0I0", "1F0 1W0 1I0"),  # its halves in the wrong order
        ("0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1"),  # a stage on two ranks
        ("0F0 0SEND_F0", "1F0 1RECV_F0"),  # used before it is received
        ("0SEND_F0 0F0", "1RECV_F0 1F0"),  # sent before it is there
        ("0F0 0SEND_F0", "1F0"),  # never received
        ("0F0 0RESHARD 0B0",),  # frees what is not gathered
        ("0F0 0B0 7UNSHARD",),  # a stage that nobody computes
    ],
)
def test_what_is_missing_or_out_of_place_is_refused_with_a_reason(rows):
    with pytest.raises(ScheduleError):
        engine.compile(listed(*rows))


@pytest.mark.parametrize(
    ("times", "others"),
    [
        ([StageTimes(1, 1, 1)], {}),
        ([StageTimes(-1, 1, 1)] * 2, {}),
        ([StageTimes(float("nan"), 1, 1)] * 2, {}),
        ([StageTimes(1, 1, 1)] * 2, {"static_bytes": [1]}),
        ([StageTimes(1, 1, 1)] * 2, {"sizes": [StageBytes()]}),
        ([StageTimes(1, 1, 1)] * 2, {"sizes": [StageBytes(saved=1, saved_for_w=2)] * 2}),
        ([StageTimes(1, 1, 1)] * 2, {"tail": [(("optimizer", -1.0),), ()]}),
    ],
)
def test_costs_that_make_no_sense(times, others):
    with pytest.raises(ValueError, match="must"):
        run(orders.gpipe(2, 2), times, **others)


# --- for any schedule and costs ---


@st.composite
def drawn_orders(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw(st.integers(1, 3)) * 2 if SCHEDULES[name].even_ranks else draw(st.integers(2, 5))
    shape = Shape(ranks, draw(st.integers(1, 7)), chunks=draw(st.integers(1, 3)), waves=draw(st.integers(1, 2)))
    return SCHEDULES[name].order(shape)


@st.composite
def drawn_actions(draw):
    """With any passes, in either order."""
    actions = draw(drawn_orders())
    if actions.is_split or any(action.kind is Kind.B for _, action in actions.compute()):
        actions = add_recomputation(actions, draw(st.sets(st.integers(0, actions.placement.num_stages - 1))))
        actions = add_reduction(actions) if draw(st.booleans()) else actions
    communicates_first = draw(st.booleans())
    actions = add_communication(actions) if communicates_first else actions
    resident = draw(st.sampled_from([0, 1, 2, None]))
    actions = actions if resident == 0 else add_sharding(actions, resident=resident)
    return actions if communicates_first else add_communication(actions)


TIME = st.floats(0.125, 10)
SHORT = st.floats(0, 0.125)
SOME = st.one_of(st.just(0.0), st.floats(0, 10))
BYTES = st.integers(0, 1000)


@st.composite
def drawn_times(draw, actions, short=False):
    some = SHORT if short else SOME
    fields = [TIME, TIME, TIME, some, some, some, some, some, st.just(0.0) if draw(st.booleans()) else SHORT]
    return [StageTimes(*map(draw, fields)) for _ in range(actions.placement.num_stages)]


@st.composite
def drawn_sizes(draw, actions):
    rows = []
    for _ in range(actions.placement.num_stages):
        for_w, more, *others = (draw(BYTES) for _ in range(7))
        rows.append(StageBytes(for_w + more, for_w, *others))
    return rows


def order_costs(times, transfer):
    f, i, w = (tuple(getattr(stage, name) for stage in times) for name in "fiw")
    return OrderCosts(f, i, w, transfer)


def plain(times, transfer):
    """The costs that the evaluation of orders knows."""
    return [StageTimes(t.f, t.i, t.w, recompute=t.f, send_f=transfer, send_b=transfer) for t in times]


@given(st.data())
def test_equal_to_the_evaluation_where_messages_never_queue(data):
    order = data.draw(drawn_orders())
    times, transfer = data.draw(drawn_times(order)), data.draw(SHORT)  # shorter than any action
    expected = evaluate(order, order_costs(times, transfer))
    for actions in (order, add_communication(order)):
        found = run(actions, plain(times, transfer))
        assert found.makespan_s == expected.makespan
        assert found.starts_s == expected.starts


@given(st.data())
def test_never_before_the_evaluation(data):
    order = data.draw(drawn_orders())
    times, transfer = data.draw(drawn_times(order)), data.draw(st.floats(0, 30))
    expected = evaluate(order, order_costs(times, transfer))
    for rules in (Rules(), BLOCKING):
        found = run(order, plain(times, transfer), rules=rules)
        assert found.makespan_s >= expected.makespan
        for row, least in zip(found.starts_s, expected.starts, strict=True):
            assert all(start >= bound for start, bound in zip(row, least, strict=True))


RULES = st.builds(Rules, st.sampled_from(Messages), st.integers(0, 2))
TAIL = (("clip", 0.1), ("optimizer", 0.7))


@given(st.data(), RULES)
def test_equal_to_a_plain_simulator(data, rules):
    actions = data.draw(drawn_actions())
    times, sizes = data.draw(drawn_times(actions)), data.draw(drawn_sizes(actions))
    found = run(actions, times, sizes, rules=rules)
    expected = Walk(actions, times, sizes, rules)
    assert found.starts_s == tuple(tuple(start for start, _ in row) for row in expected.computed)
    assert found.makespan_s == expected.makespan
    assert found.peak_bytes == tuple(map(expected.peak, range(actions.num_ranks)))


@given(st.data(), RULES)
def test_busy_and_waiting_add_up_to_the_makespan(data, rules):
    actions = data.draw(drawn_actions())
    times, tail = data.draw(drawn_times(actions)), [TAIL] * actions.num_ranks
    found = run(actions, times, tail=tail, rules=rules)
    for rank in range(actions.num_ranks):
        busy = sum(found.busy_s[rank].values())
        parts = (found.waiting_transfer_s[rank], found.waiting_s[rank])
        assert busy + sum(parts) == pytest.approx(found.makespan_s, rel=1e-9)
        assert min(parts) >= 0
        assert busy == pytest.approx(found.timeline.busy_s(rank, "compute"), rel=1e-9)
        shard = found.waiting_unshard_s[rank] + found.waiting_reduce_s[rank]
        assert min(found.waiting_unshard_s[rank], found.waiting_reduce_s[rank]) >= 0
        assert shard <= found.waiting_s[rank] * (1 + 1e-9) + 1e-9
        assert found.waiting_transfer_s[rank] == pytest.approx(in_flight(found, actions, rank), rel=1e-9, abs=1e-9)
    assert found.timeline.end_s == found.makespan_s


def in_flight(result, actions, rank):
    """Idle time before each use of a message while that is on its link, from the events alone."""
    placement, total, free = actions.placement, 0.0, 0.0
    sent = {e.name: e for e in result.timeline.events if e.lane.startswith("send")}
    lane = [e for e in result.timeline.events if e.rank == rank and e.lane == "compute"]
    for event in lane:
        action = None if event.name in dict(TAIL) else Action.parse(event.name)
        if action is not None and action.kind in COMPUTE and action.kind is not Kind.W:
            ahead = action.kind is Kind.F
            stage, kind = (action.stage - 1, Kind.SEND_F) if ahead else (action.stage + 1, Kind.SEND_B)
            first = placement.is_first(action.stage) if ahead else placement.is_last(action.stage)
            message = None if first else sent.get(str(Action(stage, kind, action.microbatch)))
            if message is not None:
                total += max(0.0, min(event.start_s, message.end_s) - max(free, message.start_s))
        free = max(free, event.end_s)
    return total


@given(st.data(), RULES)
def test_the_peak_is_the_highest_value_of_the_timeline(data, rules):
    actions = data.draw(drawn_actions())
    static = data.draw(st.lists(st.floats(0, 1000), min_size=actions.num_ranks, max_size=actions.num_ranks))
    sizes = [replace(s, saved=s.saved + 0.1, message=s.message / 3) for s in data.draw(drawn_sizes(actions))]
    found = run(actions, data.draw(drawn_times(actions)), sizes, static_bytes=static, rules=rules)
    for rank in range(actions.num_ranks):
        assert found.timeline.peak(rank, "memory_bytes") == found.peak_bytes[rank]
        moments = [c.time_s for c in found.timeline.counters if c.rank == rank and c.value == found.peak_bytes[rank]]
        assert found.peak_at_s[rank] == min(moments)
        assert len({c.time_s for c in found.timeline.counters if c.rank == rank}) == sum(
            c.rank == rank for c in found.timeline.counters
        )


@given(st.data(), RULES)
def test_the_peak_counts_microbatches_in_flight(data, rules):
    order = data.draw(drawn_orders())
    size = StageBytes(saved=3, saved_for_w=3)
    found = run(order, data.draw(drawn_times(order)), [size] * order.placement.num_stages, rules=rules)
    in_flight = evaluate(order, OrderCosts.uniform(order.placement.num_stages)).peak_in_flight
    assert found.peak_bytes == tuple(3 * peak * order.placement.chunks(r) for r, peak in enumerate(in_flight))


@given(st.data(), RULES)
def test_nothing_gets_shorter_when_something_takes_longer(data, rules):
    actions = data.draw(drawn_actions())
    times = data.draw(drawn_times(actions))
    program = engine.compile(actions)
    before = run(program, times, rules=rules)
    stage = data.draw(st.integers(0, len(times) - 1))
    name = data.draw(st.sampled_from(sorted(StageTimes.__dataclass_fields__)))
    times[stage] = replace(times[stage], **{name: getattr(times[stage], name) + data.draw(st.floats(0, 10))})
    after = run(program, times, rules=rules)
    assert after.makespan_s >= before.makespan_s
    for late, early in zip(after.starts_s, before.starts_s, strict=True):
        assert all(a >= b for a, b in zip(late, early, strict=True))


@given(st.data(), RULES)
def test_the_same_again_and_from_the_program(data, rules):
    actions = data.draw(drawn_actions())
    times, sizes = data.draw(drawn_times(actions)), data.draw(drawn_sizes(actions))
    program = engine.compile(actions)
    once, again = (run(subject, times, sizes, rules=rules) for subject in (program, Actions(actions.ranks)))
    assert once == again == run(program, times, sizes, rules=rules)
    assert once.timeline == again.timeline


def test_a_large_pipeline_takes_well_under_a_second():
    """16 ranks, 4 waves, 128 stages, 64 microbatches: 47,104 actions, of which 200,000 a second are promised."""
    actions = add_communication(orders.wave(16, 4, 64))
    times, sizes = [StageTimes(1, 1, 1, send_f=0.01)] * 128, [StageBytes(saved=1, transient_f=1, message=1)] * 128
    start = time.perf_counter()
    run(Actions(actions.ranks), times, sizes)
    assert time.perf_counter() - start < 0.7
