"""`Claim`: what a published work says, what we find, and whether the two agree by a rule that is stated beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Work = Literal["Hanayo", "OSDP", "Hardware scaling"]
WORKS: tuple[Work, ...] = get_args(Work)
ROUNDING = 1e-9  # a number at a bound is inside


@dataclass(frozen=True)
class Bounds:
    """From where to where a number may be for a claim to hold; both ends are inside."""

    least: float = -math.inf
    most: float = math.inf

    def missed(self, value: float) -> float:
        """How far outside a number is, with its sign; 0 inside, infinite for what is no number."""
        if math.isnan(value):
            return math.inf
        if value < self.least - ROUNDING:
            return value - self.least
        return value - self.most if value > self.most + ROUNDING else 0.0

    @property
    def words(self) -> str:
        if math.isinf(self.least):
            return f"at most {self.most:.4g}"
        return f"at least {self.least:.4g}" if math.isinf(self.most) else f"{self.least:.4g} to {self.most:.4g}"


def near(published: float, tolerance: float) -> Bounds:
    return Bounds(published - tolerance, published + tolerance)


@dataclass(frozen=True)
class Executed:
    """A number that was measured by running, and how to measure it again."""

    value: float
    how: str
    command: str
    date: str


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and by how much in words; the same of what was executed, where something was."""

    holds: bool
    words: str
    executed_holds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published statement as a number, and the same number as we simulate it, in `unit`."""

    work: Work
    text: str
    source: str  # the figure, table or section, and how the number was read
    published: float | tuple[float, float] | None  # None: the work states no number
    ours: float | None  # None: there is nothing to judge by, as `missing` says
    unit: str
    bounds: Bounds
    assumption: str = ""
    executed: Executed | None = None
    missing: str = ""

    @property
    def holds(self) -> bool:
        return self.ours is not None and self.bounds.missed(self.ours) == 0

    @property
    def difference(self) -> float | None:
        """Ours minus the published number; 0 inside a published range."""
        if self.ours is None or self.published is None:
            return None
        if isinstance(self.published, tuple):
            return Bounds(*self.published).missed(self.ours)
        return self.ours - self.published

    @property
    def verdict(self) -> Verdict:
        words = self._judged(self.ours)
        if self.executed is None:
            return Verdict(self.holds, words)
        also = self.bounds.missed(self.executed.value) == 0
        return Verdict(self.holds, f"{words}; executed: {self._judged(self.executed.value)}", also)

    def _judged(self, value: float | None) -> str:
        if value is None:
            return f"can't be judged: {self.missing or 'no number'}"
        missed = self.bounds.missed(value)
        if missed == 0:
            return "holds"
        where = "above" if missed > 0 else "below"
        return f"does not hold: {abs(missed):.3g} {where} {self.bounds.words}"
