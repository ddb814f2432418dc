"""A schedule, described: its numbers, its grid."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from wavetrain.schedule.evaluate import Time
from wavetrain.schedule.picture import grid
from wavetrain.schedule.request import Answer
from wavetrain.show.tables import facts

Json = dict[str, Any]
SCHEMA = "wavetrain.schedule/1"


def schedule_document(name: str, answer: Answer) -> Json:
    """The numbers of a proven schedule, for machines. Times are in the unit they were given in."""
    evaluation, actions = answer.evaluation, answer.actions
    bubble = evaluation.bubble_fraction
    return {
        "schema": SCHEMA,
        "kind": name,
        "valid": True,
        "ranks": actions.num_ranks,
        "stages": actions.placement.num_stages,
        "microbatches": actions.num_microbatches,
        "split_backward": actions.is_split,
        "placement": list(actions.placement.ranks),
        "makespan": float(evaluation.makespan),
        "lower_bound": float(answer.lower_bound),
        "gap": max(0.0, float(evaluation.makespan / answer.lower_bound - 1)) if answer.lower_bound else 0.0,
        "bubble_fraction": float(bubble),
        "bubble_exact": str(Fraction(bubble)) if not isinstance(bubble, float) else None,
        "bubble": [float(idle) for idle in evaluation.bubble_by_rank],
        "peak_in_flight_max": float(evaluation.peak_in_flight_max),
        "peak_in_flight": [float(peak) for peak in evaluation.peak_in_flight],
        "messages": {f"{a}->{b}": count for (a, b), count in evaluation.messages.items()},
        "num_messages": sum(evaluation.messages.values()),
        "num_actions": answer.proof.num_compute,
        "deadlock_free_at_capacity": list(answer.proof.capacities),
    }


def rejection_document(name: str, reasons: tuple[str, ...]) -> Json:
    """The same keys for a schedule that must not run, without its numbers."""
    numbers = ("makespan", "lower_bound", "bubble_fraction", "peak_in_flight_max", "peak_in_flight", "messages")
    return {"schema": SCHEMA, "kind": name, "valid": False, "reasons": list(reasons), **dict.fromkeys(numbers)}


def schedule_card(name: str, answer: Answer, *, width: int) -> RenderableType:
    """The same for people, with the grid where it fits."""
    lines = grid(answer.actions, answer.evaluation, answer.costs, width=width - 9)
    picture = Text("\n".join(lines), no_wrap=True, overflow="crop")
    return Group(facts(name, _facts(answer)), "", picture)


def _facts(answer: Answer) -> Iterator[tuple[str, str]]:
    actions, evaluation = answer.actions, answer.evaluation
    placement = actions.placement
    copies = f", {placement.chains} copies of the model" if placement.chains > 1 else ""
    yield "pipeline", f"{actions.num_ranks} ranks, {placement.num_stages} stages{copies}"
    parted = "backward split in two" if actions.is_split else "full backward"
    yield "microbatches", f"{actions.num_microbatches}, {parted}"
    yield "makespan", f"{_shown(evaluation.makespan)}, no order can take less than {_shown(answer.lower_bound)}"
    bubble = evaluation.bubble_fraction
    yield "idle", f"{float(bubble):.2%}" + ("" if isinstance(bubble, float) else f" = {Fraction(bubble)}")
    peaks = ", ".join(f"{float(peak):g}" for peak in evaluation.peak_in_flight[:16])
    more = " ..." if len(evaluation.peak_in_flight) > 16 else ""
    yield "in flight", f"{float(evaluation.peak_in_flight_max):g} microbatches at most; by rank {peaks}{more}"
    total = sum(evaluation.messages.values())
    yield "messages", f"{total} on {len(evaluation.messages)} links"
    proof = answer.proof
    capacities = ", ".join(proof.capacities)
    yield "proof", f"{proof.num_compute} actions complete, in order, no deadlock at channel capacity {capacities}"


def _shown(time: Time) -> str:
    return f"{float(time):g}"
