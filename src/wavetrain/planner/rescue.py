"""When no plan answers a question: what is in the way, by how much, and the cheapest changes that help.

Every change is verified by a search among uniform plans; its price is that of a token with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from wavetrain.base.units import DType
from wavetrain.cluster.cluster import Cluster, Group
from wavetrain.model.limits import divisors
from wavetrain.plan.plan import Plan
from wavetrain.planner.explain import MOST_SIDE_S, is_empty, least_memory
from wavetrain.planner.question import Pins, Question
from wavetrain.planner.search import Answer, Found, search
from wavetrain.planner.space import legal_tp, playable
from wavetrain.sim.predict import simulate

MOST_DOUBLINGS = 6
DAY_S = 86400
STATES = {8: "Adam's moments in bf16", 6: "Adam's moments in 8 bits"}  # bytes per parameter beside an fp32 master copy


@dataclass(frozen=True)
class Change:
    """A change that makes a plan possible, the plan, and what a token costs with it."""

    words: str
    usd_per_million_tokens: float
    step_s: float
    needed_bytes: float
    plan: Plan


@dataclass(frozen=True)
class Rescue:
    """What is in the way of a plan, and what helps."""

    reasons: tuple[str, ...]
    least_bad: Found | None  # the nearest plan; None where no layout is legal
    too_much_bytes: float  # that it needs beyond what is there; 0 where something else is in the way
    changes: tuple[Change, ...]  # the cheapest first


def rescue(answer: Answer, *, most: int = 3, time_limit_s: float = MOST_SIDE_S) -> Rescue:
    """Why nothing was found, and what would help."""
    question = replace(answer.question, mixed=False)
    if is_empty(question):
        found = _cheapest(_other_wishes(question), time_limit_s, most)
        return Rescue(tuple(broken_rules(question)), None, 0.0, found)
    free = search(_without_limits(question), time_limit_s=time_limit_s).found
    least = least_memory(_without_limits(question), time_limit_s=time_limit_s) if not free else None
    seen = [*free[:1]] or [item for item in (answer.least_bad, least and least[1]) if item is not None]
    nearest = min(seen, key=lambda item: item.outline.needed_bytes, default=None)
    too_much = max(0.0, nearest.outline.needed_bytes - question.capacity_bytes) if nearest else 0.0
    larger = [_larger_device(question, *least)] if least else []
    found = _cheapest(_all_changes(question, time_limit_s), time_limit_s, most, larger)
    return Rescue(tuple(_reasons(question, nearest, too_much)), nearest, too_much, found)


def _without_limits(question: Question) -> Question:
    return replace(question, deadline_s=None, power_w=None)


def _reasons(question: Question, nearest: Found | None, too_much: float) -> Iterator[str]:
    if nearest is None:
        yield "no layout fits, whatever the memory of a device"
        return
    if too_much:
        yield "the plan that comes nearest to fitting needs more memory than a device has"
        return
    seen, devices, limits = nearest.outline.step_s, nearest.plan.layout.num_devices, []
    if seen > question.longest_step_s:
        limit = (question.deadline_s or 0) / DAY_S
        days = seen / question.longest_step_s * limit
        limits.append(f"the best plan takes {days:,.1f} days, the deadline is {limit:,.1f}")
    watts = simulate(nearest.plan, question.laws).power_w_per_device * devices
    if question.power_w is not None and watts > question.power_w:
        limits.append(f"the best plan draws {watts / 1e3:,.1f} kW, the cap is {question.power_w / 1e3:,.1f}")
    yield from limits or ["time was up before a plan was found, although some fit"]


# --- no layout is legal: which rule ---


def broken_rules(question: Question) -> Iterator[str]:
    """What was asked for that rules out every layout: each pin without which some are left, or all together."""
    stated = {item.name: getattr(question.pins, item.name) for item in fields(Pins)}
    stated = {name: value for name, value in stated.items() if value is not None}
    blamed = [name for name in stated if not is_empty(replace(question, pins=replace(question.pins, **{name: None})))]
    for name in blamed:
        yield f"{name} {stated[name]}: {_rule(question, name)}"
    if question.only and not is_empty(replace(question, only=())):
        yield f"only {', '.join(question.only)}: none has a layout on {question.cluster.num_devices} devices"
        blamed.append("only")
    if not blamed:
        said = ", ".join(f"{name} {value}" for name, value in stated.items())
        yield f"no layout has {said} together, with a batch of {question.global_batch}"


def _rule(question: Question, name: str) -> str:
    """The rule that a pinned value breaks, with the values that do not where they are few."""
    free = replace(question, pins=replace(question.pins, **{name: None}))
    known = playable(free)
    if name == "tp" and question.pins.tp not in legal_tp(free):
        return (
            f"must deal out whole heads on {question.cluster.num_devices} devices; possible: {_listed(legal_tp(free))}"
        )
    if name in ("tp", "cp", "pp", "dp", "microbatch", "devices"):
        values = sorted({int(value) for value in getattr(known, name)})
        return f"with a batch of {question.global_batch} and the rest that was said, possible: {_listed(values)}"
    if name == "shard":
        return f"must divide the replicas; possible: {_listed(divisors(question.cluster.num_devices))}, dp, node, none"
    return "no layout has it beside the rest that was said"


def _listed(values: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:12])) + (", ..." if len(values) > 12 else "")


# --- what would help ---


Asked = tuple[str, list[Question]]  # words, and questions of which the first that has an answer is the change


def _cheapest(
    asked: Iterable[Asked], time_limit_s: float, most: int, known: list[Change] | None = None
) -> tuple[Change, ...]:
    tried = (_tried(words, questions, time_limit_s) for words, questions in asked)
    found = [*(known or []), *(change for change in tried if change is not None)]
    return tuple(sorted(found, key=lambda change: (change.usd_per_million_tokens, change.words))[:most])


def _all_changes(question: Question, time_limit_s: float) -> Iterator[Asked]:
    yield from _other_wishes(question)
    yield from _other_numbers(question)
    yield "{0.cluster.num_nodes} nodes" + f" instead of {question.cluster.num_nodes}", list(_more_nodes(question))
    shorter = list(_shorter(question))
    if shorter and search(shorter[-1], time_limit_s=time_limit_s).found:  # else none is short enough
        yield "sequences of {0.seq_len}" + f" instead of {question.seq_len}", shorter


def _other_wishes(question: Question) -> Iterator[Asked]:
    """Without what was asked for beyond the model, the cluster and the batch."""
    for item in fields(Pins):
        if getattr(question.pins, item.name) is not None:
            words = f"{item.name} free instead of {getattr(question.pins, item.name)}"
            yield words, [replace(question, pins=replace(question.pins, **{item.name: None}))]
    if question.only:
        yield "plans of every family", [replace(question, only=())]
    if question.headroom:
        yield "no headroom", [replace(question, headroom=0.0)]
    if question.deadline_s is not None:
        yield "no deadline", [replace(question, deadline_s=None)]
    if question.power_w is not None:
        yield "no power cap", [replace(question, power_w=None)]


def _other_numbers(question: Question) -> Iterator[Asked]:
    precision = question.precision
    if precision.gradients.num_bytes > DType.BF16.num_bytes:
        yield "gradients in bf16", [replace(question, precision=replace(precision, gradients=DType.BF16))]
    for size, words in STATES.items():
        if precision.state_bytes > size:
            yield words, [replace(question, precision=replace(precision, state_bytes=size))]


def _more_nodes(question: Question) -> Iterator[Question]:
    cluster = question.cluster
    if cluster.node.network is None or question.pins.devices is not None:
        return
    base = cluster.name.partition(":")[0]
    for doublings in range(1, MOST_DOUBLINGS + 1):
        count = cluster.num_nodes * 2**doublings
        larger = Cluster(f"{base}:{count}", (Group(cluster.node, count),), cluster.sources)
        yield replace(question, cluster=larger)


def _shorter(question: Question) -> Iterator[Question]:
    """As many tokens in shorter sequences."""
    for doublings in range(1, MOST_DOUBLINGS + 1):
        parts = 2**doublings
        if question.seq_len % parts == 0:
            yield replace(question, seq_len=question.seq_len // parts, global_batch=question.global_batch * parts)


def _tried(words: str, asked: list[Question], time_limit_s: float) -> Change | None:
    for item in asked:
        found = search(item, time_limit_s=time_limit_s).found if not is_empty(item) else ()
        if found:
            return _change(words.format(item), item, found[0])
    return None


def _change(words: str, asked: Question, found: Found, *, dearer: float = 1.0) -> Change:
    seconds = found.outline.step_s * found.plan.layout.num_devices
    usd = seconds / 3600 * asked.cluster.device.usd_per_hour / asked.step_tokens * 1e6
    return Change(words, usd * dearer, found.outline.step_s, found.outline.needed_bytes, found.plan)


def _larger_device(question: Question, factor: float, found: Found) -> Change:
    """A device with as much memory as some plan needs; it is taken to be as much dearer."""
    needed_gib = math.ceil(question.cluster.device.memory_bytes * factor / 2**30)
    return _change(f"a device with at least {needed_gib} GiB", question, found, dearer=factor)
