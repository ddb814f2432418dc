"""Where a model is cut into stages."""

from __future__ import annotations


def even_cut(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, as even as can be; earlier stages take what is left over: 30 over 4 is 8 8 7 7."""
    each, left = divmod(num_blocks, num_stages)
    return tuple(each + (stage < left) for stage in range(num_stages))


def counted_cut(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage with embedding and head counted as a block each, where that divides evenly and blocks do not.

    Llama 3 was trained so (126 layers over 128 places), and the published zero-bubble runs.
    """
    full, left = divmod(num_blocks + 2, num_stages)
    if num_blocks % num_stages == 0 or left or num_stages < 2:
        return even_cut(num_blocks, num_stages)
    return (full - 1, *([full] * (num_stages - 2)), full - 1)
