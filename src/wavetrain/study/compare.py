"""A prediction beside a measurement of the same plan: step, terms, memory, order; and which law is off most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import format_seconds
from wavetrain.plan.plan import Plan
from wavetrain.sim.breakdown import TERMS
from wavetrain.sim.predict import Prediction
from wavetrain.study.measured import Run
from wavetrain.timeline.difference import Difference, difference
from wavetrain.timeline.timeline import Timeline

FREE = ("cluster", "stack")  # what a prediction may differ in from the plan that was run
LEAST_SHARE = 0.005  # of the step: what is off by less is not worth a sentence
MOST_SENTENCES = 4
LONGER, SHORTER = 1.1, 0.9  # an event that took more or less than this of what was predicted is marked
_ACTION = re.compile(r"\d+(RECOMPUTE|[FBIW])\d+")

CONSTANTS = {  # of each term's law: docs/laws.md
    "compute": "the device's peak_tflops, efficiency.matmul and memory_gb_per_s; forward_bytes, gap_s, launch_s",
    "recompute": "those of compute; recompute_host_s, recompute_gap_s, recompute_tail",
    "tensor": "the links' collectives.all_reduce; tensor_exposed, tensor_host_s",
    "context": "the links' collectives.all_gather; context_exposed",
    "sharding": "the links' collectives.all_gather and reduce_scatter; link_exposed, network_exposed, head_exposed",
    "transfer": "the links' collectives.send; message_s",
    "bubble": "none of its own; it follows from the times of the stages",
    "reduction": "the links' collectives.all_reduce; gradient_exposed",
    "gather": "the links' collectives.all_gather; gradient_exposed",
    "optimizer": "optimizer_bytes, tensor_step_s; the device's memory_gb_per_s",
    "host": "step_s",
    "stragglers": "doubling",
}


@dataclass(frozen=True)
class Pair:
    """Something that was predicted and measured; None where one of them says nothing of it."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def difference(self) -> float | None:
        """By how much more was measured."""
        return None if self.predicted is None or self.measured is None else self.measured - self.predicted

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.predicted and self.measured is not None else None


@dataclass(frozen=True)
class Comparison:
    """What differs between a prediction and a run, in seconds and bytes."""

    model: str
    cluster: str
    steps: int
    step: Pair
    terms: tuple[Pair, ...]  # of the rank that is predicted to compute longest; they sum to the step
    rank: int  # whose measured terms they are
    memory: tuple[Pair, ...]  # of the fullest rank
    bubble: Pair  # share of the ranks' time
    moved: Difference  # of the pipeline's compute actions
    sentences: tuple[str, ...]
    environment: dict[str, str]
    predicted_timeline: Timeline = field(repr=False)
    measured_timeline: Timeline = field(repr=False)

    @property
    def is_same_order(self) -> bool:
        """Whether every rank computed its actions in the order that was predicted, and none that was not.

        What is computed again in an action of its own is no other order.
        """
        extra = (event for event in self.moved.only_second if "RECOMPUTE" not in event.name)
        return not self.moved.reordered and not self.moved.only_first and not any(extra)


def compare(plan: Plan, prediction: Prediction, run: Run) -> Comparison:
    """A prediction for a plan beside a run of it; another plan's run is an error."""
    check_same(plan, run)
    predicted, measured = computed(prediction.timeline), computed(run.timeline)
    busy = {rank: predicted.busy_s(rank, "compute") for rank in predicted.ranks}
    rank = run.longest(max(busy, key=lambda own: (busy[own], -own)))
    terms = term_pairs(prediction.breakdown, run.terms[rank])
    step = Pair("step", prediction.step_s, run.step_s)
    names = dict.fromkeys([*prediction.memory, *run.memory])
    return Comparison(
        model=plan.model.name,
        cluster=plan.cluster.name,
        steps=run.steps,
        step=step,
        terms=terms,
        rank=rank,
        memory=tuple(Pair(name, prediction.memory.get(name, 0.0), run.memory.get(name)) for name in names),
        bubble=Pair("bubble", prediction.bubble_fraction, run.bubble_fraction),
        moved=difference(predicted, measured),
        sentences=tuple(_sentences(step, terms)),
        environment=run.environment,
        predicted_timeline=predicted,
        measured_timeline=measured,
    )


def term_pairs(predicted: dict[str, float], measured: dict[str, float]) -> tuple[Pair, ...]:
    """Every term that either has. A runtime does not tell recomputation from the compute that asks for it."""
    predicted = merged(predicted) if "recompute" not in measured else predicted
    names = [name for name in TERMS if name in predicted or name in measured]
    return tuple(Pair(name, predicted.get(name, 0.0), measured.get(name, 0.0)) for name in names)


def merged(terms: dict[str, float]) -> dict[str, float]:
    """Terms with recomputation as a part of compute."""
    rest = {name: seconds for name, seconds in terms.items() if name != "recompute"}
    return rest | {"compute": terms.get("compute", 0.0) + terms.get("recompute", 0.0)}


def computed(timeline: Timeline) -> Timeline:
    """The compute actions alone: what ends a step is in its terms."""
    is_action = _ACTION.fullmatch
    return Timeline(tuple(e for e in timeline.events if e.lane == "compute" and is_action(e.name)))


def check_same(plan: Plan, run: Run) -> None:
    """Refuse a run of another plan; it may be predicted for another cluster or software."""
    problems = [
        Problem(where=run.where, key=key, value=theirs, rule=f"another plan was run: this one has {ours}")
        for item in fields(Plan)
        if item.name not in FREE and item.init
        for key, ours, theirs in _differing(item.name, getattr(plan, item.name), getattr(run.plan, item.name))
    ]
    if problems:
        raise InputError(problems)


def _differing(key: str, ours: object, theirs: object) -> Iterator[tuple[str, object, object]]:
    if ours == theirs:
        return
    if key == "model":
        names = getattr(ours, "name", ""), getattr(theirs, "name", "")
        yield (key, *(names if names[0] != names[1] else (f"another {names[0]}", names[1])))
    elif key in ("layout", "precision", "choice"):
        for item in fields(ours):  # type: ignore[arg-type]
            yield from _differing(f"{key}.{item.name}", getattr(ours, item.name), getattr(theirs, item.name))
    else:
        yield key, ours, theirs


# --- words ---


def _sentences(step: Pair, terms: tuple[Pair, ...]) -> Iterator[str]:
    """How far the step is off, then the laws behind it, the one that is off most first."""
    assert step.predicted
    assert step.measured
    yield (
        f"The step takes {_times(step)} as long as predicted: {format_seconds(step.measured)}, "
        f"not {format_seconds(step.predicted)}."
    )
    off = sorted(terms, key=lambda pair: -abs(pair.difference or 0.0))
    worth = [pair for pair in off if abs(pair.difference or 0.0) >= LEAST_SHARE * step.measured]
    if not worth:
        yield f"No term is off by {LEAST_SHARE:.1%} of the step."
    for pair in worth[:MOST_SENTENCES]:
        share = f"{(pair.difference or 0.0) / step.measured:+z.1%} of the step"
        how = f"takes {_times(pair)} as long as predicted" if pair.ratio else f"was {_missing(pair)}"
        yield f"{pair.name} {how}: {share}. Constants: {CONSTANTS[pair.name]}."


def _times(pair: Pair) -> str:
    ratio = pair.ratio or 0.0
    return f"{ratio:.2f} times" if ratio < 100 else f"{ratio:,.0f} times"


def _missing(pair: Pair) -> str:
    return "measured but not predicted" if pair.measured else "predicted but not measured"
