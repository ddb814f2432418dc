import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.plan.cut import counted_cut, even_cut

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
