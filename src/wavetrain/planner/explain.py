"""Why a plan is as it is: decision by decision, against others, and what would have to change for another to win."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from wavetrain.cluster.cluster import Cluster, Group
from wavetrain.model.limits import MOST_SEQ_LEN
from wavetrain.plan.check import check
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.planner.question import Pins, Question
from wavetrain.planner.search import Answer, Found, search
from wavetrain.planner.space import playable
from wavetrain.sim.predict import Prediction, simulate

SHOWN = 1e-3  # of a step: smaller changes of a term are not named
MOST_SIDE_S = 10.0  # of one search that only explains
FLIPS_S = 15.0  # of all searches for what would change a plan
SCORE_S = 5.0  # of the search that a plan from elsewhere is scored against
FINEST = 0.5  # doublings: how fine the factor of a change is sought
LARGEST = 3  # doublings: the largest factor that is tried
MOST_MEMORY = 1024.0  # times what a device has: beyond, a plan is not sought
NEARLY = 1.01  # how exactly the memory that a plan needs is sought


# --- two plans beside each other ---


@dataclass(frozen=True)
class Compared:
    """Another plan beside the one that is explained."""

    name: str
    plan: Plan | None  # None where no layout is legal
    step_s: float = 0.0
    needed_bytes: float = 0.0
    too_much_bytes: float = 0.0  # where it does not fit
    slower: float = 0.0  # share of the step that it takes longer
    worse: float = 0.0  # the same of what the objective makes least
    terms: dict[str, float] | None = None  # seconds that each term grew, the largest change first


def needed_bytes(prediction: Prediction) -> float:
    return prediction.peak_bytes + prediction.reserve_bytes


def term_changes(before: Prediction, after: Prediction) -> dict[str, float]:
    """Seconds by which terms of the step grew, the largest change first; tiny ones are left out."""
    names = dict.fromkeys((*before.breakdown, *after.breakdown))
    changes = {name: after.breakdown.get(name, 0.0) - before.breakdown.get(name, 0.0) for name in names}
    shown = {name: value for name, value in changes.items() if abs(value) > SHOWN * before.step_s}
    return dict(sorted(shown.items(), key=lambda item: (-abs(item[1]), item[0])))


def compare(question: Question, plan: Plan, other: Plan, name: str) -> Compared:
    """Another plan beside a plan, both simulated."""
    own, its = simulate(plan, question.laws), simulate(other, question.laws)
    costs = [question.true_cost(p, seen.step_s) for p, seen in ((plan, own), (other, its))]
    bytes_ = needed_bytes(its)
    return Compared(
        name=name,
        plan=other,
        step_s=its.step_s,
        needed_bytes=bytes_,
        too_much_bytes=max(0.0, bytes_ - question.capacity_bytes),
        slower=its.step_s / own.step_s - 1,
        worse=costs[1] / costs[0] - 1 if costs[0] and math.isfinite(costs[0] + costs[1]) else 0.0,
        terms=term_changes(own, its),
    )


def kind_of(plan: Plan) -> tuple[object, ...]:
    """What sort of plan it is: which axes are cut, and how parameters are held."""
    layout = plan.layout
    return layout.tp > 1, layout.cp > 1, layout.pp > 1, sharding_of(plan)


def sharding_of(plan: Plan) -> str:
    """How parameters are held, in a word."""
    if plan.choices:
        return "mixed"
    if plan.choice.shard > 1:
        return "kept" if plan.choice.keep else "sharded"
    return "zero1" if plan.layout.shard_optimizer else "replicated"


# --- others that were nearly as good ---

FSDP: dict[str, object] = {"tp": 1, "cp": 1, "pp": 1, "shard": "dp", "keep": False, "shard_optimizer": False}
VARIANTS: tuple[dict[str, object], ...] = (FSDP, {"tp": 2}, {"pp": 2})


def runner_ups(answer: Answer, *, most: int = 2, time_limit_s: float | None = None) -> list[Compared]:
    """The best plans of other kinds than the best: of what was simulated, or else of a search for each kind."""
    best, question = answer.found[0], answer.question
    chosen = _other_kinds(answer.rejected, [best], most)
    if len(chosen) < most:
        asked = [narrowed(question, pins) for pins in VARIANTS]
        limit = min(MOST_SIDE_S, MOST_SIDE_S if time_limit_s is None else time_limit_s)
        found = [search(item, time_limit_s=limit).found for item in asked if item is not None]
        others = sorted((item[0] for item in found if item), key=lambda item: item.cost)
        chosen += _other_kinds(others, [best, *chosen], most - len(chosen))
    chosen.sort(key=lambda item: item.cost)
    return [compare(question, best.plan, item.plan, "") for item in chosen]


def _other_kinds(found: tuple[Found, ...] | list[Found], known: list[Found], most: int) -> list[Found]:
    seen = {kind_of(item.plan) for item in known}
    kept: list[Found] = []
    for item in found:
        if kind_of(item.plan) not in seen and len(kept) < most:
            seen.add(kind_of(item.plan))
            kept.append(item)
    return kept


def narrowed(question: Question, pins: dict[str, object]) -> Question | None:
    """The question with more pins; None where it says something else already. Uniform plans only: quick to search."""
    stated = {item.name: getattr(question.pins, item.name) for item in fields(Pins)}
    if any(stated[name] not in (None, value) for name, value in pins.items()):
        return None
    made = replace(question, pins=replace(question.pins, **pins), mixed=False)  # type: ignore[arg-type]
    return None if is_empty(made) else made


def is_empty(question: Question) -> bool:
    """Whether no layout is legal at all, whatever it needs."""
    return not len(playable(question))


# --- decision by decision ---


@dataclass(frozen=True)
class Step:
    """A plan on the way from a plain one, after one more decision."""

    words: str
    plan: Plan
    step_s: float
    needed_bytes: float
    terms: dict[str, float]  # seconds that each term grew by this decision


def walk(question: Question, plan: Plan) -> list[Step]:
    """From plain sharded data parallelism to the plan, one decision at a time, each simulated."""
    steps: list[Step] = []
    last: Prediction | None = None
    for words, made in _stations(plan):
        if check(made) or (steps and made == steps[-1].plan):
            continue
        seen = simulate(made, question.laws)
        terms = term_changes(last, seen) if last is not None else {}
        steps.append(Step(words, made, seen.step_s, needed_bytes(seen), terms))
        last = seen
    return steps


def _stations(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans that take over one more decision of a plan each; some may be illegal."""
    layout = plan.layout
    plain = replace(plan, choices=(), recompute=Recompute.NONE)
    devices = layout.num_devices
    if layout.global_batch % devices == 0:
        size = math.gcd(layout.microbatch, layout.global_batch // devices)
        flat = Layout(global_batch=layout.global_batch, microbatch=size, dp=devices)
        yield f"sharded data parallel over {devices}, nothing else", _uncut(plain, flat)
    degrees = Layout(
        global_batch=layout.global_batch,
        microbatch=layout.microbatch,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        dp=layout.dp,
        pp=layout.pp,
    )
    named = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp, "microbatch": layout.microbatch}
    words = ", ".join(f"{name} {value}" for name, value in named.items() if value > 1 or name == "microbatch")
    yield words, _uncut(plain, degrees)
    scheduled = replace(layout, shard_optimizer=False)
    cut = replace(plain, layout=scheduled, choice=Choice(shard=layout.dp))
    yield f"schedule {layout.schedule}, cut {'/'.join(map(str, plan.cut[:8]))}", cut
    held = {
        "replicated": "parameters replicated",
        "zero1": "parameters replicated, optimizer states sharded",
        "sharded": f"parameters sharded over {plan.choice.shard}",
        "kept": f"parameters sharded over {plan.choice.shard}, kept for the backward",
    }
    uniform = replace(plan, choices=(), recompute=Recompute.NONE)
    yield held[sharding_of(uniform)], uniform
    yield f"{plan.recompute.value} recompute", replace(plan, choices=())
    yield "blocks and operators chosen one by one", plan


def _uncut(plan: Plan, layout: Layout) -> Plan:
    """A layout fully sharded, its stages cut evenly."""
    blocks = plan.model.num_blocks
    return replace(plan, layout=layout, cut=even_cut(blocks, num_stages(layout)), choice=Choice(shard=layout.dp))


# --- why not another ---


def alternatives(question: Question, plan: Plan, *, time_limit_s: float = MOST_SIDE_S) -> list[Compared]:
    """The best plans of three other kinds; a kind that the plan is of is turned around."""
    layout = plan.layout
    asked: list[tuple[str, dict[str, object]]] = [
        ("no tensor parallelism", {"tp": 1}) if layout.tp > 1 else ("tensor parallel 2", {"tp": 2}),
        ("no pipeline", {"pp": 1}) if layout.pp > 1 else ("pipelines of 2", {"pp": 2}),
    ]
    if kind_of(plan) != (False, False, False, "sharded"):
        asked.append(("pure FSDP", FSDP))
    made = [instead(question, plan, name, pins, time_limit_s=time_limit_s) for name, pins in asked]
    return [item for item in made if item.plan is not None]


def instead(
    question: Question, plan: Plan, name: str, pins: dict[str, object], *, time_limit_s: float = MOST_SIDE_S
) -> Compared:
    """The best plan under pins beside a plan."""
    asked = narrowed(question, pins)
    if asked is None:
        return Compared(name, None)
    answer = search(asked, time_limit_s=time_limit_s)
    other = answer.found[0] if answer.found else least_bad(asked, answer, time_limit_s=time_limit_s)
    return compare(question, plan, other.plan, name) if other else Compared(name, None)


def least_bad(question: Question, answer: Answer, *, time_limit_s: float = MOST_SIDE_S) -> Found | None:
    """The plan that comes nearest to fitting: of what the search saw, and of what fits into a larger device."""
    found = least_memory(question, time_limit_s=time_limit_s)
    seen = [item for item in (answer.least_bad, found and found[1]) if item is not None]
    return min(seen, key=_needed, default=None)


def least_memory(question: Question, *, time_limit_s: float = MOST_SIDE_S) -> tuple[float, Found] | None:
    """The least memory that some plan fits in, as a multiple of what a device has, and that plan."""
    low, high, found = 1.0, 1.0, None
    while found is None and high < MOST_MEMORY:
        low, high = high, 2 * high
        found = min(search(with_memory(question, high), time_limit_s=time_limit_s).found, key=_needed, default=None)
    if found is None:
        return None
    high = max(low, _needed(found) / question.capacity_bytes)
    while high / low > NEARLY:
        middle = math.sqrt(low * high)
        fitting = search(with_memory(question, middle), time_limit_s=time_limit_s).found
        if fitting:
            found = min(fitting, key=_needed)
            high = max(low, _needed(found) / question.capacity_bytes)
        else:
            low = middle
    return high, found


def _needed(found: Found) -> float:
    return found.outline.needed_bytes


# --- what would change it ---


@dataclass(frozen=True)
class Flip:
    """The smallest change of one thing, in one direction, that another layout wins with."""

    what: str  # network, links, memory, batch, seq_len
    factor: float | None  # None: none up to the largest that was tried
    tried: float  # the largest factor, or the smallest
    words: str = ""  # what differs then
    plan: Plan | None = None
    is_known: bool = True  # False: there was no time to look, or to look whether less is enough


def with_links(question: Question, factor: float) -> Question:
    """Faster links: the network between nodes, or those inside where there is one node."""
    node = question.cluster.node
    if question.cluster.num_nodes > 1:
        tiers = tuple(replace(t, bytes_per_s=t.bytes_per_s * (factor if t.across_nodes else 1)) for t in node.tiers)
        network = node.network
        faster = network and replace(network, nic_bytes_per_s=network.nic_bytes_per_s * factor)
        node = replace(node, tiers=tiers, network=faster)
    else:
        node = replace(node, tiers=tuple(replace(t, bytes_per_s=t.bytes_per_s * factor) for t in node.tiers))
    return _with_node(question, node=node, count=question.cluster.num_nodes)


def with_memory(question: Question, factor: float) -> Question:
    node = question.cluster.node
    device = replace(node.device, memory_bytes=round(node.device.memory_bytes * factor))
    return _with_node(question, node=replace(node, device=device), count=question.cluster.num_nodes)


def _with_node(question: Question, *, node: object, count: int) -> Question:
    cluster = question.cluster
    return replace(question, cluster=Cluster(cluster.name, (Group(node, count),), cluster.sources))  # type: ignore[arg-type]


def with_batch(question: Question, factor: float) -> Question | None:
    batch = question.global_batch * factor
    return replace(question, global_batch=int(batch)) if batch.is_integer() and batch >= 1 else None


def with_length(question: Question, factor: float) -> Question | None:
    length = question.seq_len * factor
    legal = length.is_integer() and 1 <= length <= MOST_SEQ_LEN
    return replace(question, seq_len=int(length)) if legal else None


Change = Callable[[Question, float], Question | None]


def changes(question: Question) -> dict[str, tuple[Change, float]]:
    """What may change, how, and in how small a part of a doubling."""
    links = "network" if question.cluster.num_nodes > 1 else "links"
    return {
        links: (with_links, FINEST),
        "memory": (with_memory, FINEST),
        "seq_len": (with_length, 1.0),
        "batch": (with_batch, 1.0),
    }


def flips(question: Question, *, time_limit_s: float = MOST_SIDE_S, mixed: bool = False) -> list[Flip]:
    """Of each thing that may change, the smallest factors, up and down, that another layout is best with.

    Sought by halving a geometric grid, among uniform plans unless mixed ones are asked for, which takes longer.
    """
    until = time.perf_counter() + time_limit_s
    asked = replace(question, mixed=mixed)
    now = search(asked, time_limit_s=time_limit_s).best
    if now is None:
        return []
    seeks = [
        (what, _Seek(asked, change, now, direction * step, until), round(LARGEST / step))
        for what, (change, step) in changes(asked).items()
        for direction in (-1, 1)
    ]
    return [seek.flip(what, most) for what, seek, most in seeks]


@dataclass(frozen=True)
class _Seek:
    """One thing that changes in one direction, in steps of a part of a doubling."""

    question: Question
    change: Change
    now: Plan
    doublings: float
    until: float

    def flip(self, what: str, most: int) -> Flip:
        """The first step that another layout wins at; a step that can't be taken ends the grid before it."""
        while most and self.change(self.question, self.factor(most)) is None:
            most -= 1
        tried = self.factor(most)
        if time.perf_counter() > self.until:
            return Flip(what, None, tried, is_known=False)
        other = self.change_at(most) if most else None
        if other is None:
            return Flip(what, None, tried)
        low, high = 0, most
        while high - low > 1 and time.perf_counter() < self.until:
            middle = (low + high) // 2
            found = self.change_at(middle)
            low, high, other = (low, middle, found) if found is not None else (middle, high, other)
        return Flip(what, self.factor(high), tried, *other, is_known=high - low == 1)

    def factor(self, steps: int) -> float:
        return float(2.0 ** (steps * self.doublings))

    def change_at(self, steps: int) -> tuple[str, Plan | None] | None:
        """What is different then: another layout is best, or nothing fits; None where the same layout is best."""
        asked = self.change(self.question, self.factor(steps))
        best = search(asked, time_limit_s=MOST_SIDE_S).best if asked is not None else None
        if best is None:
            return "nothing fits", None
        words = difference(self.now, best)
        return (words, best) if words else None


def traits(plan: Plan) -> dict[str, object]:
    """What makes a layout another one; microbatches and cuts do not."""
    layout = plan.layout
    axes: dict[str, object] = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp")}
    pipeline = layout.pp > 1
    axes["schedule"] = layout.schedule if pipeline else "none"
    axes["waves"] = layout.waves if pipeline else 1
    axes["chunks"] = layout.chunks if pipeline else 1
    return axes | {"parameters": sharding_of(plan), "recompute": plan.recompute.value}


def difference(plan: Plan, other: Plan) -> str:
    """What another layout has instead, in words; nothing if it is the same."""
    own, its = traits(plan), traits(other)
    return ", ".join(f"{name} {its[name]} instead of {own[name]}" for name in own if own[name] != its[name])


# --- all of it ---


@dataclass(frozen=True)
class Explanation:
    """All that is said of a plan."""

    question: Question
    plan: Plan
    prediction: Prediction
    gap: float | None  # None where the search that would say it was not finished
    better: Compared | None  # a plan that is better than the one explained
    steps: tuple[Step, ...]
    others: tuple[Compared, ...]
    flips: tuple[Flip, ...]

    def tells_apart(self, other: Compared) -> bool:
        """Whether two plans differ by more than predictions err."""
        return abs(other.slower) > self.prediction.error_share


def own_question(plan: Plan) -> Question:
    """The question that a plan without a certificate answers: the same model, devices, batch and software."""
    return Question(
        model=plan.model,
        cluster=plan.cluster,
        global_batch=plan.layout.global_batch,
        seq_len=plan.seq_len,
        stack=plan.stack,
        precision=plan.precision,
    )


def best_beside(question: Question, plan: Plan, *, time_limit_s: float = MOST_SIDE_S) -> tuple[Compared | None, float]:
    """The best uniform plan for a question beside a plan (None where nothing fits), and the gap it is known to."""
    answer = search(replace(question, mixed=False), time_limit_s=time_limit_s)
    return (compare(question, plan, answer.best, "best") if answer.best else None), answer.gap


def explain(
    question: Question,
    plan: Plan,
    *,
    gap: float | None = None,
    pins: dict[str, object] | None = None,
    name: str = "",
    time_limit_s: float = MOST_SIDE_S,
    flips_limit_s: float = FLIPS_S,
) -> Explanation:
    """Everything at once; `gap` where a certificate says it, `pins` for an alternative that was asked for."""
    better: Compared | None = None
    if gap is None:
        beside, known = best_beside(question, plan, time_limit_s=time_limit_s)
        if beside is not None and beside.worse < -SHOWN:
            better = beside
        else:
            gap = known
    if pins is None:
        others = alternatives(question, plan, time_limit_s=time_limit_s)
    else:
        others = [instead(question, plan, name, pins, time_limit_s=time_limit_s)]
    return Explanation(
        question=question,
        plan=plan,
        prediction=simulate(plan, question.laws),
        gap=gap,
        better=better,
        steps=tuple(walk(question, plan)),
        others=tuple(others),
        flips=tuple(flips(question, time_limit_s=flips_limit_s, mixed=bool(plan.choices))) if pins is None else (),
    )
