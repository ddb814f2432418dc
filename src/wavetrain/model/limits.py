"""The largest sizes we accept, far beyond any model, and the rules that sizes obey among each other.

A typing error gets an answer, not an endless computation.
"""

from __future__ import annotations

from wavetrain.base.fields import Fields

MOST_LAYERS = 10_000
MOST_HIDDEN = 10_000_000
MOST_HEADS = 1_000_000
MOST_FFN = 100_000_000
MOST_VOCAB = 1_000_000_000
MOST_SEQ_LEN = 1_000_000_000
MOST_EXPERTS = 1_000_000


def check_divides(f: Fields, part: str, whole: str, values: tuple[int, int], *, otherwise: str = "") -> None:
    """Complain where the first value does not divide the second."""
    number, total = values
    if f.good(part, whole) and total % number:
        legal = divisors(total)
        f.complain(part, f"must divide {whole} ({total}){otherwise}", legal=legal, near=closest(number, legal))


def check_at_most(f: Fields, part: str, whole: str, values: tuple[int, int]) -> None:
    """Complain where the first value exceeds the second."""
    if f.good(part, whole) and values[0] > values[1]:
        f.complain(part, f"must be at most {whole} ({values[1]})")


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return tuple(sorted({*small, *(number // k for k in small)}))


def closest(number: int, legal: tuple[int, ...]) -> tuple[int, ...]:
    """The legal values just below and just above a number."""
    below = [value for value in legal if value <= number][-1:]
    above = [value for value in legal if value > number][:1]
    return tuple(below + above)
