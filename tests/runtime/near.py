"""How near tensors of a layout are to those of one process, and pieces of whole ones."""

import torch


def close(value, expected, what, *, floor=1e-16):
    """Equal to 1e-12 of the largest element; `floor` is for what is zero but for roundings (the bias of keys)."""
    if expected is None or value is None:
        assert value is expected, what
        return
    assert value.shape == expected.shape, what
    worst = (value - expected).abs().max().item()
    assert worst <= 1e-12 * expected.abs().max().item() + floor, f"{what}: off by {worst}"


def at(whole, place):
    """What of a whole tensor is at a place: for each dimension, index ranges."""
    for dim, ranges in enumerate(place):
        indices = [torch.arange(first, last) for first, last in ranges]
        whole = whole.index_select(dim, torch.cat([torch.arange(0), *indices]))
    return whole
