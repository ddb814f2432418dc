"""Where a model is cut into stages."""

from __future__ import annotations


def even_cut(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, as even as can be.

    If blocks, embedding and head together divide evenly, the first and the last stage have a block less each, as
    Llama 3 was trained (126 layers over 128 places); else earlier stages take what is left over: 30 over 4 is 8 8 7 7.
    """
    each, left = divmod(num_blocks, num_stages)
    if left and num_stages > 1 and (num_blocks + 2) % num_stages == 0:
        full = (num_blocks + 2) // num_stages
        return (full - 1, *([full] * (num_stages - 2)), full - 1)
    return tuple(each + (stage < left) for stage in range(num_stages))
