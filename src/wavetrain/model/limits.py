"""The largest sizes we accept, far beyond any model: a typing error gets an answer, not an endless computation."""

from __future__ import annotations

MOST_LAYERS = 100_000
MOST_HIDDEN = 10_000_000
MOST_HEADS = 1_000_000
MOST_FFN = 100_000_000
MOST_VOCAB = 1_000_000_000
MOST_SEQ_LEN = 1_000_000_000
MOST_EXPERTS = 1_000_000


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return tuple(sorted({*small, *(number // k for k in small)}))


def closest(number: int, legal: tuple[int, ...]) -> tuple[int, ...]:
    """The legal values just below and just above a number."""
    below = [value for value in legal if value <= number][-1:]
    above = [value for value in legal if value > number][:1]
    return tuple(below + above)
