"""Tensors cut into parts, and whole again."""

import torch

from wavetrain.runtime.cuts import Cut, Segment, joined_parts, part_of, ranges_of


def test_values_are_cut_and_joined():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 6, generator=generator)
    cut = Cut((7, 6), 1, (((0, 2), (4, 5)), ((2, 4), (4, 5)), ((5, 6),), ()))
    parts = [part_of(cut, values, part) for part in range(4)]
    assert [part.shape[1] for part in parts] == [3, 3, 1, 0]
    assert torch.equal(parts[0], values[:, [0, 1, 4]])
    assert torch.equal(joined_parts(cut, parts), values)
    assert torch.equal(joined_parts(cut, [*parts[:3], None]), values)
    everywhere = Cut(())
    assert torch.equal(joined_parts(everywhere, [part_of(everywhere, torch.tensor(3.0), 1)] * 2), torch.tensor(3.0))


def test_shares_are_those_of_dtensor():
    for units, parts in ((8, 4), (61, 4), (5, 4), (3, 4), (1, 2)):
        chunks = list(torch.arange(units).chunk(parts))
        for part in range(parts):
            first, last = Segment(2 * units, units).range(part, parts)
            expected = chunks[part].tolist() if part < len(chunks) else []
            assert list(range(first // 2, last // 2)) == expected


def test_copied_units_go_to_neighbours():
    assert [Segment(6, 2, copied=True).range(part, 4) for part in range(4)] == [(0, 3), (0, 3), (3, 6), (3, 6)]


def test_segments_follow_each_other():
    fused = (Segment(8, 4), Segment(4, 2), Segment(4, 2))
    assert ranges_of(fused, 2) == (((0, 4), (8, 10), (12, 14)), ((4, 8), (10, 12), (14, 16)))
