import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.plan.cut import balanced_cut, counted_cut, even_cut
from wavetrain.schedule.placement import linear, loop, snake

sizes = st.integers(1, 300).flatmap(lambda blocks: st.tuples(st.just(blocks), st.integers(1, blocks)))


@pytest.mark.parametrize(
    ("blocks", "stages", "cut"),
    [
        (29, 3, (10, 10, 9)),
        (30, 4, (8, 8, 7, 7)),
        (31, 4, (8, 8, 8, 7)),
        (32, 4, (8, 8, 8, 8)),
        (4, 3, (2, 1, 1)),
        (5, 1, (5,)),
        (0, 1, (0,)),
    ],
)
def test_even_cuts(blocks, stages, cut):
    assert even_cut(blocks, stages) == cut


@pytest.mark.parametrize(
    ("blocks", "stages", "cut"),
    [
        (30, 4, (7, 8, 8, 7)),  # 32 places over 4
        (126, 16, (7, *[8] * 14, 7)),  # Llama 3 405B
        (6, 8, (0, 1, 1, 1, 1, 1, 1, 0)),  # embedding and head alone
        (7, 8, (1, 1, 1, 1, 1, 1, 1, 0)),
        (31, 4, (8, 8, 8, 7)),
        (32, 4, (8, 8, 8, 8)),
        (5, 1, (5,)),
    ],
)
def test_cuts_that_count_embedding_and_head(blocks, stages, cut):
    assert counted_cut(blocks, stages) == cut


@given(sizes)
def test_a_cut_deals_out_every_block_evenly(size):
    blocks, stages = size
    for cut in (even_cut(blocks, stages), counted_cut(blocks, stages)):
        assert len(cut) == stages
        assert sum(cut) == blocks
        assert max(cut) - min(cut) <= 1
        assert max(cut) == -(-blocks // stages)


@given(sizes)
def test_ends_are_relieved_only_where_that_makes_all_places_equal(size):
    """Counting embedding and head as a block each, either all stages are equal or earlier ones take what is left."""
    blocks, stages = size
    cut = counted_cut(blocks, stages)
    places = [count + (stage == 0) + (stage == stages - 1) for stage, count in enumerate(cut)]
    assert len(set(places)) == 1 or cut == even_cut(blocks, stages)


@pytest.mark.parametrize(
    ("blocks", "placement", "first", "last", "cut"),
    [
        (8, linear(4), 0.0, 0.0, (2, 2, 2, 2)),
        (9, linear(4), 0.0, 0.0, (2, 2, 2, 3)),  # the latest of equals takes what is left
        (8, linear(4), 0.0, 2.0, (2, 2, 3, 1)),
        (8, linear(4), 0.5, 5.0, (2, 3, 3, 0)),
        (6, linear(1), 0.5, 5.0, (6,)),
        (6, loop(2, 2), 0.0, 0.0, (2, 2, 1, 1)),
        (8, snake(2, 1), 1.0, 1.0, (2, 3, 2, 1)),
        (2, linear(4), 1.0, 1.0, (0, 1, 1, 0)),
        (1, linear(4), 1.0, 1.0, ()),  # a stage between the ends would be empty
    ],
)
def test_balanced_cuts(blocks, placement, first, last, cut):
    assert balanced_cut(blocks, placement.ranks, first=first, last=last) == cut


placements = st.one_of(
    st.builds(linear, st.integers(1, 8)),
    st.builds(loop, st.integers(1, 5), st.integers(1, 4)),
    st.builds(snake, st.integers(1, 5), st.integers(1, 3)),
)
ends = st.floats(0, 12)


@given(st.integers(0, 60), placements, ends, ends)
def test_a_balanced_cut_deals_out_every_block_and_leaves_no_stage_empty(blocks, placement, first, last):
    cut = balanced_cut(blocks, placement.ranks, first=first, last=last)
    if blocks < placement.num_stages - 2:
        assert cut == ()
    else:
        assert len(cut) == placement.num_stages
        assert sum(cut) == blocks
        assert all(cut[1:-1])


@given(st.integers(1, 60), placements, ends, ends)
def test_no_move_of_a_block_relieves_the_fullest_rank(blocks, placement, first, last):
    cut = balanced_cut(blocks, placement.ranks, first=first, last=last)
    if not cut:
        return
    loads, movable = [0.0] * placement.num_ranks, [0] * placement.num_ranks
    for stage, count in enumerate(cut):
        rank, is_first, is_last = placement.ranks[stage], stage == 0, stage == len(cut) - 1
        loads[rank] += count + first * is_first + last * is_last
        movable[rank] += count if is_first or is_last else count - 1
    for rank, load in enumerate(loads):
        if movable[rank]:
            assert load - 1 <= min(loads) + 1e-9
