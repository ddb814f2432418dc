"""What of a communication stays visible beside the compute that should hide it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def exposed(communication_s: Floats, compute_s: Floats, share: Floats | float) -> Floats:
    """Seconds that a communication adds to the compute it runs beside.

    What is longer than the compute shows in full; of the shorter of the two a `share` shows, because both use the same
    memory and processors. Source: GEMM with all-gather measured together, 0.5 inside a node and 0.01 to 0.09 across
    (overlap_interference); whole FSDP steps show more, which the fit of `Laws` finds.
    """
    beside = np.minimum(communication_s, compute_s)
    return np.maximum(communication_s - compute_s, 0.0) + share * beside
