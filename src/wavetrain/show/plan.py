"""What a search found, shown: the plan in a sentence, what it will do, what lost to it and why, and the proof."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from wavetrain.base.units import format_bytes, format_count, format_seconds
from wavetrain.plan.plan import Plan
from wavetrain.plan.read import write_plan
from wavetrain.plan.words import sentence
from wavetrain.planner.explain import Compared
from wavetrain.planner.prove import Proof
from wavetrain.planner.question import Objective, Question
from wavetrain.planner.rescue import Rescue
from wavetrain.planner.search import Answer, Found
from wavetrain.show.prediction import prediction_document
from wavetrain.show.tables import facts, grid
from wavetrain.sim.breakdown import TERMS
from wavetrain.sim.predict import Prediction

Json = dict[str, Any]
SCHEMA = "wavetrain.planned/1"
VERIFIED = "wavetrain.verified/1"
BAR = 20
TRILLION = 1e12
DAY_S = 86400


# --- for machines ---


def planned_document(answer: Answer, seen: Prediction, others: Sequence[Compared], *, frontier: bool = False) -> Json:
    """A plan that was found, with its prediction and its proof."""
    best = answer.found[0]
    document: Json = {
        "schema": SCHEMA,
        "plan": plan_data(best.plan),
        "words": sentence(best.plan),
        "prediction": prediction_document(best.plan, seen, []),
        "certificate": answer.certificate,
        "search_s": answer.search_s,
        "runner_ups": [compared_data(item) for item in others],
    }
    return document | ({"frontier": [_found_data(item) for item in answer.frontier]} if frontier else {})


def plan_data(plan: Plan) -> Json:
    """A plan as its file has it."""
    data: Json = json.loads(write_plan(plan))
    return data


def compared_data(item: Compared) -> Json:
    """Another plan beside the best."""
    if item.plan is None:
        return {"name": item.name, "words": None, "fits": False}
    return {
        "name": item.name,
        "words": sentence(item.plan),
        "step_s": item.step_s,
        "slower": item.slower,
        "worse": item.worse,
        "needed_bytes": round(item.needed_bytes),
        "fits": not item.too_much_bytes,
        "too_much_bytes": round(item.too_much_bytes),
        "terms": item.terms,
    }


def _found_data(item: Found) -> Json:
    return {
        "words": sentence(item.plan),
        "devices": item.plan.layout.num_devices,
        "step_s": item.outline.step_s,
        "needed_bytes": round(item.outline.needed_bytes),
        "plan": plan_data(item.plan),
    }


def infeasible_document(answer: Answer, found: Rescue) -> Json:
    """What is in the way of a plan, and what helps."""
    nearest, question = found.least_bad, answer.question
    least_bad: Json | None = None
    if nearest is not None:
        least_bad = {
            "plan": plan_data(nearest.plan),
            "words": sentence(nearest.plan),
            "needed_bytes": round(nearest.outline.needed_bytes),
            "capacity_bytes": round(question.capacity_bytes),
            "too_much_bytes": round(found.too_much_bytes),
        }
    return {
        "schema": SCHEMA,
        "plan": None,
        "reasons": list(found.reasons),
        "least_bad": least_bad,
        "changes": [
            {
                "change": change.words,
                "usd_per_million_tokens": change.usd_per_million_tokens,
                "step_s": change.step_s,
                "needed_bytes": round(change.needed_bytes),
                "words": sentence(change.plan),
            }
            for change in found.changes
        ],
        "space": answer.space,
        "evaluated": answer.evaluated,
        "search_s": answer.search_s,
    }


# --- for people ---


def planned_card(
    answer: Answer, seen: Prediction, others: Sequence[Compared], *, file: str | None, frontier: bool = False
) -> RenderableType:
    """The same for people, in about twenty lines."""
    question, best = answer.question, answer.found[0]
    title = f"{question.model.name} on {question.cluster.name}"
    parts: list[RenderableType] = [facts(title, _facts(question, best.plan, seen))]
    lost = [(f"{number}.", lost_words(question, item)) for number, item in enumerate(others, 2)]
    if lost:
        parts.append(facts("what lost, and why", lost))
    proof = f"{search_words(answer)}; {answer.search_s:.1f} s"
    parts.append(facts("how sure, what next", [("proof", proof), *_next(file)]))
    if frontier:
        parts += ["", _frontier(answer.frontier)]
    return Group(*parts)


def _facts(question: Question, plan: Plan, seen: Prediction) -> Iterator[tuple[str, str]]:
    layout = plan.layout
    low, high = seen.error_band
    yield "plan", sentence(plan)
    yield "batch", f"{layout.global_batch:,} x {plan.seq_len:,} tokens"
    yield "tokens/s", f"{seen.tokens_per_s:,.0f}, {seen.tokens_per_s_per_device:,.0f} per device; MFU {seen.mfu:.1%}"
    yield "step", f"{format_seconds(seen.step_s)}, likely {format_seconds(low)} to {format_seconds(high)}"
    needed = seen.peak_bytes + seen.reserve_bytes
    filled = round(needed / seen.capacity_bytes * BAR)
    bar = f"[{'#' * filled}{'.' * (BAR - filled)}]"
    yield "memory", f"{bar} {format_bytes(needed)} of {format_bytes(seen.capacity_bytes)}, fullest rank"
    kilowatts = seen.power_w_per_device * layout.num_devices / 1e3
    yield "power", f"{kilowatts:,.1f} kW, {seen.power_w_per_device:,.0f} W per device"
    tokens = question.tokens or TRILLION
    usd = seen.usd_per_million_tokens / 1e6 * tokens
    yield "price", f"${usd:,.0f} for {_amount(tokens)} tokens, in {_duration(tokens / seen.tokens_per_s)}"
    yield "slowed by", _bottleneck(seen)


def _bottleneck(seen: Prediction) -> str:
    """The largest term that is not the model's own work, in words."""
    others = {name: value for name, value in seen.breakdown.items() if name != "compute"}
    if not others:
        return "nothing but its own kernels"
    name = max(others, key=lambda key: others[key])
    return f"{TERMS[name]}: {format_seconds(others[name])}, {others[name] / seen.step_s:.1%} of the step"


def _amount(tokens: float) -> str:
    return format_count(tokens).replace(" ", "")


def _duration(seconds: float) -> str:
    for size, name in ((365.25 * DAY_S, "years"), (DAY_S, "days"), (3600, "hours")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {name}"
    return format_seconds(seconds)


def lost_words(question: Question, item: Compared) -> str:
    """Another plan, how much worse it is, and which terms made it so."""
    if item.plan is None:
        return "no layout is legal"
    words = sentence(item.plan)
    if item.too_much_bytes:
        return f"{words}: does not fit, {format_bytes(item.too_much_bytes)} too much"
    return f"{words}: {worse_words(question, item)}{terms_words(item.terms or {}, most=1)}"


def worse_words(question: Question, item: Compared) -> str:
    if question.objective in (Objective.THROUGHPUT, Objective.BATCH):
        return f"{abs(item.slower):.1%} {'slower' if item.slower >= 0 else 'faster'}"
    return f"{item.worse:.1%} worse by {question.objective}, {item.slower:+.1%} step time"


def terms_words(terms: dict[str, float], *, most: int) -> str:
    """Terms that grew most, in words: `, +0.12 s gather and scatter`."""
    grown = [(name, value) for name, value in terms.items() if value > 0][:most]
    return "".join(f", +{format_seconds(value)} {TERMS[name]}" for name, value in grown)


def search_words(answer: Answer) -> str:
    """How large the space was and what is proven of it."""
    looked = f"best of {layouts(answer.space)} layouts: {answer.evaluated:,} simulated"
    if answer.gap:
        return f"{looked}, none can be better by more than {answer.gap:.1%}"
    return f"{looked}, the rest ruled out by bounds; gap 0"


def layouts(number: int) -> str:
    """How many, in words where there are many."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:,.1f} {name}"
    return f"{number:,}"


def _next(file: str | None) -> Iterator[tuple[str, str]]:
    name = file or "plan.json"
    if file is None:
        yield "keep it", "the same command with -o plan.json"
    yield "look", f"wavetrain simulate {name} --trace step.json"
    yield "ask", f"wavetrain explain {name}"
    yield "use", f"wavetrain export {name} --to torchtitan"


def _frontier(found: Sequence[Found]) -> RenderableType:
    table = grid("no plan beats these at once", ">devices", ">step", ">memory")
    for item in found:
        step, memory = format_seconds(item.outline.step_s), format_bytes(item.outline.needed_bytes)
        table.add_row(sentence(item.plan), f"{item.plan.layout.num_devices:,}", step, memory)
    return table


def infeasible_card(answer: Answer, found: Rescue) -> RenderableType:
    question, nearest = answer.question, found.least_bad
    rows = [("why", reason) for reason in found.reasons]
    if nearest is not None:
        rows.append(("nearest", sentence(nearest.plan)))
    if nearest is not None and found.too_much_bytes:
        needed, there = format_bytes(nearest.outline.needed_bytes), format_bytes(question.capacity_bytes)
        rows.append(("memory", f"{needed} of {there}: {format_bytes(found.too_much_bytes)} too much"))
    title = f"no plan for {question.model.name} on {question.cluster.name}, batch {question.global_batch:,}"
    parts: list[RenderableType] = [facts(title, rows)]
    if found.changes:
        table = grid("what would help", ">per million tokens", ">step", ">memory")
        for change in found.changes:
            usd, step = f"${change.usd_per_million_tokens:,.3f}", format_seconds(change.step_s)
            table.add_row(change.words, usd, step, format_bytes(change.needed_bytes))
        parts += ["", table]
    return Group(*parts)


# --- a certificate that was checked ---


def verified_document(plan: Plan, certificate: Json, proof: Proof) -> Json:
    figures = {key: certificate.get(key) for key in ("space", "evaluated", "pruned", "gap", "cost", "lower", "step_s")}
    return {
        "schema": VERIFIED,
        "proven": proof.is_proven,
        "rejected": bool(proof.reasons),
        "reasons": [*proof.reasons, *(f"not shown: {words}" for words in proof.not_shown)],
        "shown_gap": proof.gap,
        "search_s": proof.search_s,
        "words": sentence(plan),
        **figures,
    }


def verified_card(plan: Plan, certificate: Json, proof: Proof) -> RenderableType:
    if proof.reasons:
        return facts("NOT proven", [("because", reason) for reason in proof.reasons])
    rows = [("plan", sentence(plan)), ("step", format_seconds(certificate["step_s"]))]
    if certificate["inner"] is not None:
        rows.append(("choices", "of blocks and operators: proof checked in integers"))
    if proof.not_shown:
        rows.append(("shown", "digest, step, memory and counts"))
        return facts("NOT proven", [*rows, *(("not shown", words) for words in proof.not_shown)])
    better = f"better by more than {certificate['gap']:.2%}" if certificate["gap"] else "better"
    rows.append(("space", f"{certificate['space']:,} layouts searched again, none is {better}"))
    rows.append(("gap", f"{certificate['gap']:.2%}" if certificate["gap"] else "0"))
    return facts("proven", rows)


def best_document(best: Compared | None) -> Json | None:
    """The best plan that was found, and how much slower than it a plan is that somebody runs."""
    if best is None or best.plan is None:
        return None
    return {"step_s": best.step_s, "plan_words": sentence(best.plan), "slower": 1 / (1 + best.slower) - 1}


def best_words(best: Compared | None) -> RenderableType:
    if best is None or best.plan is None:
        return Text("best plan found: none fits")
    if best.slower >= 0:
        return Text("best plan found: none is faster than this one")
    faster = 1 / (1 + best.slower) - 1
    return Text(f"best plan found: {format_seconds(best.step_s)} ({faster:.1%} faster): {sentence(best.plan)}")
