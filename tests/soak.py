"""`make soak` runs every case (WAVETRAIN_SOAK=1), `make test` a seeded sample of them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
SOAK = bool(int(os.environ.get("WAVETRAIN_SOAK", "0")))


def sample(cases: Iterable[T], count: int, *, seed: int = 8) -> list[T]:
    """All cases, or so many of them."""
    every = list(cases)
    return every if SOAK else random.Random(seed).sample(every, count)


def often(soak: int, test: int) -> int:
    """How many, or how often."""
    return soak if SOAK else test
