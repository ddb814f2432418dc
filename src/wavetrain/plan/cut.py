"""Where a model is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


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


def balanced_cut(num_blocks: int, ranks: Sequence[int], *, first: float, last: float) -> tuple[int, ...]:
    """Blocks per stage such that the fullest rank has least to do, embedding and head counted in blocks' time.

    `ranks` is the rank of every stage. Blocks go to the rank that has least so far, the latest of equals; a rank deals
    its own out evenly, with fewer where an end is. Stages between the ends get one at least.
    """
    stages, num_ranks = len(ranks), max(ranks) + 1
    cut = [0 if stage in (0, stages - 1) else 1 for stage in range(stages)] if stages > 1 else [0]
    ends = [first * (stage == 0) + last * (stage == stages - 1) for stage in range(stages)]
    own = [[stage for stage in range(stages) if ranks[stage] == rank] for rank in range(num_ranks)]
    loads = [(sum(cut[s] + ends[s] for s in mine), -rank) for rank, mine in enumerate(own)]
    heapify(loads)
    left = num_blocks - sum(cut)
    for _ in range(left):
        load, rank = heappop(loads)
        stage = min(own[-rank], key=lambda s: (cut[s] + ends[s], s))
        cut[stage] += 1
        heappush(loads, (load + 1, rank))
    return tuple(cut) if left >= 0 else ()
