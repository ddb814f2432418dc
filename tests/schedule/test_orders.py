"""Orders against the reference, closed forms and published drawings (hanayo-and-pipelines 1.5 to 2.5)."""

import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import reference

from wavetrain.schedule import SCHEDULES, Costs, Shape, evaluate, orders
from wavetrain.schedule.listing import wave_zb


def rows(actions):
    return [[(a.kind.value, a.stage, a.microbatch) for a in row] for row in actions.ranks]


def evaluated(actions, **times):
    return evaluate(actions, Costs.uniform(actions.placement.num_stages, **times))


@pytest.mark.parametrize("P", range(2, 9))
@pytest.mark.parametrize("W", range(1, 5))
def test_the_wave_is_the_reference_operation_for_operation(P, W):
    for M in sorted({1, 2, 3, P - 1, P, P + 1, 2 * P, 3 * P + 2}):
        place, expected = reference.wave_orders(P, W, M)
        wave = orders.wave(P, W, M)
        assert rows(wave) == expected
        assert list(wave.placement.ranks) == place


@pytest.mark.parametrize("P", range(2, 17))
@pytest.mark.parametrize("W", range(1, 5))
def test_bubble_and_peak_of_the_wave(P, W):
    for k in (1, 2, 3) if P <= 8 else (1, 2):
        B = k * P
        found = evaluated(orders.wave(P, W, B))
        assert found.bubble_fraction == Fraction(2 * P - 2, 3 * W * B + 2 * P - 2)
        if k == 1:
            assert found.peak_in_flight == tuple(Fraction((2 * W - 1) * P + 1 + d, 2 * W) for d in range(P))
        else:
            assert found.peak_in_flight == (P,) * P


TABLE_1_6 = {
    (4, 1): (Fraction(1, 3), Fraction(1, 5), Fraction(1, 9)),
    (4, 2): (Fraction(1, 5), Fraction(1, 9), Fraction(1, 17)),
    (4, 4): (Fraction(1, 9), Fraction(1, 17), Fraction(1, 33)),
    (8, 1): (Fraction(7, 19), Fraction(7, 31), Fraction(7, 55)),
    (8, 2): (Fraction(7, 31), Fraction(7, 55), Fraction(7, 103)),
    (8, 4): (Fraction(7, 55), Fraction(7, 103), Fraction(7, 199)),
}


@pytest.mark.parametrize(("P", "W"), TABLE_1_6)
def test_the_fractions_of_table_1_6(P, W):
    found = tuple(evaluated(orders.wave(P, W, k * P)).bubble_fraction for k in (1, 2, 4))
    assert found == TABLE_1_6[P, W]


def test_makespans_of_the_drawings():
    """Figure 6: 60 for P=4 W=2, 108 for P=4 W=4, 124 for P=8 W=2, with B = P and a backward of two forwards."""
    assert [evaluated(orders.wave(P, W, P)).makespan for P, W in ((4, 2), (4, 4), (8, 2))] == [60, 108, 124]


@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))
def test_idle_time_of_the_wave_for_any_durations(P, W, k, tf, tb):
    found = evaluated(orders.wave(P, W, k * P), f=tf, i=Fraction(tb, 2), w=Fraction(tb, 2))
    assert set(found.bubble_by_rank) == {2 * (P - 1) * max(tf, tb)}


@pytest.mark.parametrize("P", [2, 4, 8, 16])
@pytest.mark.parametrize("W", [1, 2, 4])
def test_latency_lengthens_the_wave_as_derived(P, W):
    small = Fraction(1, 1000)
    for k, turns in ((1, P - 2), (2, P - 1)):
        order = orders.wave(P, W, k * P)
        growth = evaluated(order, transfer=small).makespan - evaluated(order).makespan
        assert growth == (4 * W * (P - 1) + 2 * turns) * small


@pytest.mark.parametrize("P", [2, 3, 4, 8])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_closed_forms_of_the_others(P, k):
    B = k * P
    plain = Fraction(P - 1, B + P - 1)
    assert evaluated(orders.gpipe(P, B)).bubble_fraction == plain
    assert evaluated(orders.gpipe(P, B)).peak_in_flight == (B,) * P
    assert evaluated(orders.one_f_one_b(P, B)).bubble_fraction == plain
    assert evaluated(orders.one_f_one_b(P, B)).peak_in_flight == tuple(min(B, P - d) for d in range(P))
    for v in (2, 3, 4):
        looped = Fraction(P - 1, v * B + P - 1)
        assert evaluated(orders.interleaved(P, v, B)).bubble_fraction == looped
        assert evaluated(orders.looped_bfs(P, v, B)).bubble_fraction == looped
        split = evaluated(orders.interleaved_zb(P, v, B))
        assert split.bubble_fraction == Fraction(P - 1, 3 * v * B + P - 1)
        assert split.peak_in_flight_max <= P
        if k > 1:
            peaks = evaluated(orders.interleaved(P, v, B)).peak_in_flight
            assert (peaks[0], peaks[-1]) == (P + Fraction(P - 1, v), Fraction((v - 1) * P + 1, v))
    assert evaluated(orders.zb_h1(P, B)).bubble_fraction == Fraction(P - 1, 3 * B + P - 1)
    assert evaluated(orders.zb_h1(P, B)).peak_in_flight_max == min(B, P)


@pytest.mark.parametrize("P", [2, 4, 8])
def test_zb_h2_is_never_idle_between_its_ends(P):
    found = evaluated(orders.zb_h2(P, 4 * P))
    assert set(found.inner_idle) == {0}
    assert found.peak_in_flight_max == 2 * P - 1


@pytest.mark.parametrize("D", [2, 4, 6, 8])
def test_chimera_has_its_published_bubble(D):
    """(D - 2) / (3N/2 + D - 2), Li and Hoefler 2021, for N a multiple of D."""
    for N in (D, 2 * D, 4 * D):
        found = evaluated(orders.chimera(D, N))
        assert found.bubble_fraction == Fraction(D - 2, 3 * N // 2 + D - 2)
        assert found.peak_in_flight_max <= D


@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_wave_with_split_backward_at_equal_times(P, W, k):
    found = evaluated(wave_zb(P, W, k * P))
    assert found.bubble_fraction == Fraction(P - 1, 6 * W * k * P + P - 1)
    assert found.peak_in_flight_max <= P
    if W >= 2 and k >= 2:
        assert set(found.inner_idle) == {0}


def test_a_split_wave_is_built_for_the_times_it_will_meet():
    times = {"f": Fraction(1), "i": Fraction(7, 5), "w": Fraction(3, 5)}
    costs = Costs.uniform(32, **times)
    assert evaluate(wave_zb(8, 2, 32, costs), costs).bubble_fraction <= Fraction(25, 1000)
    naive = evaluate(wave_zb(8, 2, 32), costs).bubble_fraction
    assert float(naive) == pytest.approx(0.174, abs=0.001)


def test_messages_between_two_nodes_of_four():
    """Section 2.5: loop against snake, B = 8: 48 against 32, 112 against 64, 240 against 128."""
    for v, loop, snake in ((2, 48, 32), (4, 112, 64), (8, 240, 128)):
        for order, expected in ((orders.interleaved(8, v, 8), loop), (orders.wave(8, v // 2, 8), snake)):
            crossing = [n for (a, b), n in evaluated(order).messages.items() if (a < 4) != (b < 4)]
            assert sum(crossing) == expected


def test_first_and_last_stage_of_a_wave_share_a_rank():
    for W in (1, 2, 3):
        placement = orders.wave(4, W, 4).placement
        assert placement.ranks[0] == placement.ranks[-1] == 0


def test_every_schedule_of_the_table_is_used_by_name():
    names = (
        "gpipe 1f1b interleaved looped-bfs chimera wave zb-h1 zb-h2 zb-v interleaved-zb wave-zb forward-only".split()
    )
    assert list(SCHEDULES) == names
    for name, schedule in SCHEDULES.items():
        shape = Shape(4, 6, chunks=2 if schedule.chunked else 1, waves=2 if schedule.waved else 1)
        order = schedule.order(shape)
        assert order.placement == schedule.placement(shape)
        assert order.is_split == schedule.split, name


@pytest.mark.parametrize(("P", "W", "M"), [(4, 1, 4), (8, 1, 32), (8, 2, 32), (3, 2, 5)])
def test_forward_only_is_a_pipeline_and_keeps_nothing(P, W, M):
    found = evaluated(orders.forward_only(P, W, M))
    assert found.peak_in_flight_max == 0
    assert found.makespan <= 2 * W * M + 2 * W * (P - 1) + 2 * P * W


@pytest.mark.parametrize("P", range(2, 9))
@pytest.mark.parametrize("v", [2, 3])
def test_interleaving_is_never_worse_than_gpipe_whatever_the_number_of_microbatches(P, v):
    for M in range(1, 3 * P + 2):
        looped = evaluated(orders.interleaved(P, v, M)).makespan
        plain = evaluated(orders.gpipe(P, M), f=v, i=v, w=v).makespan
        assert looped <= plain, M


def test_h2_is_never_worse_than_h1():
    for P in range(2, 9):
        for M in range(1, 4 * P):
            assert evaluated(orders.zb_h2(P, M)).makespan <= evaluated(orders.zb_h1(P, M)).makespan, (P, M)
