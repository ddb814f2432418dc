"""A certificate proven in limited time: what is wrong with it, what could be shown again, and what could not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wavetrain.plan.plan import Plan
from wavetrain.planner.certificate import Json, question_of, reasons_against
from wavetrain.planner.search import TIE, search

OPEN_LIMIT_S = 60.0  # for a certificate that was itself not finished


@dataclass(frozen=True)
class Proof:
    """What became of a certificate."""

    reasons: tuple[str, ...] = ()  # to reject it: something that it says is wrong
    not_shown: tuple[str, ...] = ()  # what it says that could be neither shown nor refuted
    gap: float | None = None  # that was shown again; None where it was rejected before
    search_s: float = 0.0

    @property
    def is_proven(self) -> bool:
        return not self.reasons and not self.not_shown


def prove(plan: Plan, made: Json, *, time_limit_s: float | None = None) -> Proof:
    """Prove a certificate: its figures and the choices in integers, then, by a search, that no plan is below its bound.

    Without a limit a certificate of gap 0 gets all the time it needs, another one a minute.
    """
    try:
        found = (*reasons_against(plan, made), *_bound_reasons(made))
        if found:
            return Proof(found)
        limit = OPEN_LIMIT_S if time_limit_s is None and made["gap"] != 0 else time_limit_s
        return _searched(plan, made, limit)  # the long part last
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        return Proof((f"the certificate can't be read: {type(error).__name__} {error}",))


def _bound_reasons(made: Json) -> Iterator[str]:
    gap = 1 - made["lower"] / made["cost"]
    if not abs(made["gap"] - gap) <= 1 - TIE:  # so that what is no number is rejected too
        yield f"the gap is said to be {made['gap']:.3g}, but cost and bound are {gap:.3g} apart"
    if not made["lower"] * TIE <= made["cost"]:
        yield f"the bound {made['lower']:.9g} is above the plan's cost {made['cost']:.9g}"


def _searched(plan: Plan, made: Json, limit: float | None) -> Proof:
    """The search again: it knows the question and the bound, and looks for plans below the bound only."""
    lower, reasons, not_shown = made["lower"], [], []
    again = search(question_of(plan, made), time_limit_s=limit, below=lower)
    if again.space != made["space"]:
        reasons.append(f"the space has {again.space:,} layouts, not {made['space']:,}")
    if again.found and again.found[0].cost < lower * TIE:
        reasons.append(f"another plan costs {again.found[0].cost:.9g}, less than the bound {lower:.9g}")
    gap = max(0.0, 1 - again.lower / made["cost"])
    gap = gap if gap > 1 - TIE else 0.0
    if not reasons and not again.lower >= lower * TIE:
        said = f"{made['gap']:.2%}" if made["gap"] else "0"
        not_shown.append(f"a gap of {said}: in {again.search_s:.0f} s a gap of {gap:.2%} could be shown")
    return Proof(tuple(reasons), tuple(not_shown), gap, again.search_s)
