"""From a point to its record: search, simulate, and what failures and other hardware would make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from wavetrain.base.errors import InputError, one_line
from wavetrain.base.units import format_bytes
from wavetrain.plan import write_plan
from wavetrain.plan.plan import Plan
from wavetrain.plan.words import sentence
from wavetrain.planner.explain import is_empty
from wavetrain.planner.question import Question
from wavetrain.planner.rescue import broken_rules
from wavetrain.planner.search import Answer, search
from wavetrain.sim.predict import Prediction, simulate
from wavetrain.study.scaling.findings import binding, exposed_share
from wavetrain.study.scaling.goodput import goodput
from wavetrain.study.scaling.points import Point, cluster_of, key_of, question_of
from wavetrain.study.scaling.record import RAN_OUT, Record
from wavetrain.study.scaling.whatif import CHANGES, elasticities

JOULES_PER_MWH = 3.6e9
STATE_BYTES = 12  # of a parameter in a checkpoint: itself and two moments, in fp32


@dataclass(frozen=True)
class Solved:
    """A record under its key, and the plan it is about as text ("" where nothing fits)."""

    key: str
    record: Record
    plan: str = ""
    is_final: bool = True  # False where time ran out before anything was found: another run may find something


def solve(point: Point) -> Solved:
    """The answer of a point."""
    key = key_of(point)
    try:
        question = question_of(point)
    except InputError as error:  # a file may be right and a combination not, such as a model without a length
        return Solved(key, _empty(point, "; ".join(one_line(problem.rule) for problem in error.problems)))
    answer = _searched(point, question)
    if answer.best is None:
        why = why_nothing(answer, point.alike.time_limit_s) + _fitting_with(point, answer)
        return Solved(key, _empty(point, why, seq_len=question.seq_len), is_final=not ran_out(answer))
    plan = answer.best
    seen = simulate(plan)
    record = replace(_planned(point, answer, plan, seen), plan_file=f"plans/{key}.json")
    return Solved(key, record, write_plan(plan))


def _searched(point: Point, question: Question) -> Answer:
    """The answer to a question in the time of one search; Ctrl-C ends the study, not the search alone."""
    return search(question, time_limit_s=point.alike.time_limit_s, interruptible=False)


def _empty(point: Point, why: str, *, seq_len: int | None = None) -> Record:
    return Record(
        model=point.model,
        seq_len=seq_len or point.seq_len or 0,
        node=point.node_words,
        devices=point.devices,
        strategy=point.strategy.name,
        objective=point.objective,
        batch=point.batch.words,
        global_batch=point.batch.at(point.devices),
        fits=False,
        why=why,
        capacity_bytes=float(cluster_of(point).device.memory_bytes),
    )


def ran_out(answer: Answer) -> bool:
    """Whether nothing was found although plans were left to look at."""
    return answer.best is None and math.isfinite(answer.lower)


def why_nothing(answer: Answer, limit_s: float) -> str:
    """Why there is no plan: a rule that none keeps, too little time, or how much memory the nearest needs for what."""
    question, nearest = answer.question, answer.least_bad
    if is_empty(question):
        return "; ".join(broken_rules(question))
    if ran_out(answer):
        return f"{RAN_OUT} {limit_s:g} s; more time with time_limit_s"
    if nearest is None:
        return f"every plan needs more than the {format_bytes(question.capacity_bytes)} of a device, by its bound alone"
    held = simulate(nearest.plan).memory
    largest = sorted(held.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    needed, there = format_bytes(nearest.outline.needed_bytes), format_bytes(question.capacity_bytes)
    return f"the plan that comes nearest needs {needed} of {there} ({parts}): {sentence(nearest.plan)}"


def _fitting_with(point: Point, answer: Answer) -> str:
    """Which of the changes asked for would make a plan fit; only more memory can."""
    if ran_out(answer) or is_empty(answer.question):
        return ""
    present, fitting = cluster_of(point), []
    for name in point.alike.what_if:
        changed = CHANGES[name](present)
        larger = changed.device.memory_bytes > present.device.memory_bytes
        if larger and _searched(point, question_of(point, changed)).best is not None:
            fitting.append(name)
    return f"; fits with {', '.join(fitting)}" if fitting else ""


def _planned(point: Point, answer: Answer, plan: Plan, seen: Prediction) -> Record:
    layout, devices = plan.layout, plan.layout.num_devices
    return replace(
        _empty(point, "", seq_len=plan.seq_len),
        fits=True,
        plan=sentence(plan),
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        dp=layout.dp,
        schedule=layout.schedule if layout.pp > 1 else "",
        microbatch=layout.microbatch,
        num_microbatches=layout.num_microbatches,
        shard=plan.choice.shard,
        recompute=plan.recompute.value,
        step_s=seen.step_s,
        tokens_per_s=seen.tokens_per_s,
        tokens_per_s_per_device=seen.tokens_per_s_per_device,
        mfu=seen.mfu,
        hfu=seen.hfu,
        exposed_share=exposed_share(seen.breakdown),
        bubble_share=seen.breakdown.get("bubble", 0.0) / seen.step_s,
        needed_bytes=seen.peak_bytes + seen.reserve_bytes,
        power_w_per_device=seen.power_w_per_device,
        power_w=seen.power_w_per_device * devices,
        tokens_per_joule=seen.tokens_per_joule,
        usd_per_hour=seen.usd_per_hour,
        usd_per_million_tokens=seen.usd_per_million_tokens,
        bound_by=binding(seen.breakdown),
        terms=seen.breakdown,
        memory=seen.memory,
        elasticity=elasticities(plan),
        what_if=_what_if(point, seen),
        gap=answer.gap,
        space=answer.space,
        error_share=seen.error_share,
        **_whole_run(point, seen, devices),
        **_interrupted(point, plan, seen),
    )


def _whole_run(point: Point, seen: Prediction, devices: int) -> dict[str, Any]:
    """Time, money and energy for the target number of tokens."""
    if point.alike.tokens is None:
        return {}
    seconds = point.alike.tokens / seen.tokens_per_s
    return {
        "train_s": seconds,
        "train_usd": seconds / 3600 * seen.usd_per_hour,
        "train_mwh": seconds * seen.power_w_per_device * devices / JOULES_PER_MWH,
    }


def _interrupted(point: Point, plan: Plan, seen: Prediction) -> dict[str, Any]:
    """What failures leave of the throughput."""
    if point.alike.failures is None:
        return {}
    held = seen.memory.get("parameters", 0.0) + seen.memory.get("optimizer", 0.0)
    found = goodput(
        state_bytes=STATE_BYTES * plan.model.num_parameters,
        rank_state_bytes=held,
        devices=plan.layout.num_devices,
        node_devices=plan.cluster.node.num_devices,
        failures=point.alike.failures,
        step_s=seen.step_s,
    )
    return {
        "checkpoint_bytes": found.checkpoint_bytes,
        "checkpoint_s": found.checkpoint_s,
        "interval_s": found.interval_s,
        "goodput_share": found.share,
        "goodput_tokens_per_s": found.share * seen.tokens_per_s,
    }


def _what_if(point: Point, seen: Prediction) -> dict[str, float]:
    """Throughput over the present (tokens per dollar where prices change) on other hardware, planned again."""
    found = {}
    for name in point.alike.what_if:
        question = question_of(point, CHANGES[name](cluster_of(point)))
        best = _searched(point, question).best
        if best is None:
            continue
        other = simulate(best)
        if not name.startswith("price"):
            found[name] = other.tokens_per_s / seen.tokens_per_s
        elif other.usd_per_million_tokens:  # what costs nothing has no tokens per dollar
            found[name] = seen.usd_per_million_tokens / other.usd_per_million_tokens
    return found
