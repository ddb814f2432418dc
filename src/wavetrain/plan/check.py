"""`check`: every rule that a plan breaks, at once, with what would be legal.

Sizes, the cluster and the schedule's name are looked at first; a rule that builds on one of them that is wrong is left
out, so that nobody reads about the consequences of an error. Whether a plan fits into memory is no rule: it is priced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

from wavetrain.base.errors import Problem, nearest
from wavetrain.base.units import DType
from wavetrain.cluster.cluster import MOST_NODES, Cluster
from wavetrain.model.limits import MOST_LAYERS, MOST_SEQ_LEN, closest, divisors
from wavetrain.model.model import Model
from wavetrain.model.operator import Attention, Experts, Operator, slice_counts
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedules import SCHEDULES, Shape

MOST_SIZE = 2**31
MOST_STATE_BYTES = 64
LEAST, MOST = 1e-12, 1e30  # of any number in a cluster, but for these
MOST_OF = {"count": MOST_NODES, "num_devices": 1_000_000, "size": 1_000_000}
MAY_BE_0 = (
    *("host_w", "idle_w", "busy_w", "limit_w", "usd_per_hour", "inner_half"),
    *("latency_s", "start_s", "ramp_s", "congestion", "multicast"),
)
MOST_LISTED = 4096  # tensor-parallel degrees tried for the list of legal ones
MOST_STAGES = 4 * (MOST_LAYERS + 2)  # beyond, a placement is not even drawn up
DEGREES = ("tp", "cp", "dp", "pp")
SIZES = ("global_batch", "microbatch", *DEGREES, "chunks", "waves")
SHAPE = ("layout.pp", "layout.chunks", "layout.waves", "layout.schedule")
TRAINING = tuple(name for name in SCHEDULES if name != "forward-only")
GRADIENTS = (DType.FP32, DType.BF16, DType.FP16, DType.FP64)


@dataclass(frozen=True)
class _Checked:
    """A plan, and the keys that can't be built upon."""

    plan: Plan
    bad: frozenset[str]

    def good(self, *keys: str) -> bool:
        return not self.bad.intersection(keys)

    @cached_property
    def placement(self) -> Placement | None:
        """Where the stages go; None where that is unknown, or too much to write down."""
        if not self.good(*SHAPE) or self.plan.layout.pp * _stages_per_rank(self.plan) > MOST_STAGES:
            return None
        return _placement(self.plan.layout)


Rule = Callable[[_Checked], Iterator[Problem]]


def check(plan: Plan) -> list[Problem]:
    """All that is wrong with a plan; nothing if it can be priced and run."""
    found = [*_sizes(plan), *_cluster(plan), *_schedule(plan)]
    roots = (re.split(r"[.\[]", problem.key)[0] for problem in found)
    checked = _Checked(plan, frozenset([*roots, *(problem.key for problem in found)]))
    return [*found, *(problem for rule in RULES for problem in rule(checked))]


def _problem(
    key: str,
    value: object,
    rule: str,
    *,
    legal: Sequence[object] = (),
    near: Sequence[object] = (),
    remedy: str = "",
) -> Problem:
    return Problem(
        where="plan",
        key=key,
        value=value,
        rule=rule,
        legal=tuple(map(str, legal)),
        nearest=tuple(map(str, near)),
        remedy=remedy,
    )


def _whole(key: str, value: object, *, least: int = 1, most: int = MOST_SIZE, near: int = 1) -> Iterator[Problem]:
    if type(value) is not int or not least <= value <= most:
        yield _problem(key, value, f"must be a whole number from {least} to {most:,}", near=(near,))


def _multiples(value: int, unit: int, *, most: int) -> tuple[int, ...]:
    """The multiples of `unit` just below and just above a value."""
    below = value // unit * unit
    return tuple(number for number in (below, below + unit) if 0 < number <= most)


# --- each value by itself ---

STACK_LIMITS = {"message_s": (0.0, 1e3), "bucket_bytes": (1e3, 1e15), "kept_copies": (0.0, 100.0)}


def _sizes(plan: Plan) -> Iterator[Problem]:
    for name in SIZES:
        yield from _whole(f"layout.{name}", getattr(plan.layout, name))
    yield from _whole("seq_len", plan.seq_len, most=MOST_SEQ_LEN, near=plan.model.seq_len)
    yield from _whole("precision.state_bytes", plan.precision.state_bytes, least=0, most=MOST_STATE_BYTES, near=12)
    for key, choice in _each_choice(plan):
        yield from _whole(f"{key}.shard", choice.shard)
        yield from _whole(f"{key}.slices", choice.slices)
    for stage, count in enumerate(plan.cut):
        yield from _whole(f"cut[{stage}]", count, least=0, near=0)
    for name, (least, most) in STACK_LIMITS.items():
        value = getattr(plan.stack, name)
        if value is not None and not least <= value <= most:
            yield _problem(f"stack.{name}", value, f"must be a number from {least:g} to {most:g}")


def _each_choice(plan: Plan) -> Iterator[tuple[str, Choice]]:
    yield "choice", plan.choice
    for position, item in enumerate(plan.choices):
        yield f"choices[{position}].choice", item.choice


def _schedule(plan: Plan) -> Iterator[Problem]:
    name = plan.layout.schedule
    if name not in SCHEDULES:
        near = nearest(str(name), TRAINING)
        yield _problem("layout.schedule", name, "unknown schedule", legal=TRAINING, near=near)
    elif name not in TRAINING:
        rule = "has no backward: it evaluates, it does not train"
        yield _problem("layout.schedule", name, rule, legal=TRAINING, near=("wave",))


def _cluster(plan: Plan) -> Iterator[Problem]:
    """Clusters we read are sound; one that was written by hand into a plan may not be."""
    cluster = plan.cluster
    unsound = [problem for i, group in enumerate(cluster.groups) for problem in _unsound(group, f"cluster.groups[{i}]")]
    if unsound:
        yield from unsound
    elif not cluster.groups:
        yield _problem("cluster", cluster.name, "must have a node")
    elif not cluster.is_uniform:
        kinds = tuple(dict.fromkeys(group.node.name for group in cluster.groups))
        rule = f"has {cluster.num_kinds} kinds of nodes; a plan is for equal ones"
        yield _problem("cluster", cluster.name, rule, legal=kinds, remedy="a plan for one group of nodes")
    elif cluster.num_devices > 1 and (not cluster.tiers or cluster.tiers[-1].size < cluster.num_devices):
        rule = f"has no network that joins all of its {cluster.num_devices:,} devices"
        yield _problem("cluster", cluster.name, rule)


def _unsound(value: Any, key: str) -> Iterator[Problem]:
    """Numbers inside a group of nodes that no machine has."""
    for name, inner in ((item.name, getattr(value, item.name)) for item in fields(value)):
        if is_dataclass(inner):
            yield from _unsound(inner, f"{key}.{name}")
        elif isinstance(inner, tuple):
            for position, part in enumerate(inner):
                yield from _unsound(part, f"{key}.{name}[{position}]")
        elif isinstance(inner, int | float) and not isinstance(inner, bool):
            least, most = 0.0 if name in MAY_BE_0 else LEAST, MOST_OF.get(name, MOST)
            if not least <= inner <= most:
                yield _problem(f"{key}.{name}", inner, f"must be a number from {least:g} to {most:g}")


# --- devices and batch ---


def _world(checked: _Checked) -> Iterator[Problem]:
    if not checked.good("cluster", *(f"layout.{name}" for name in DEGREES)):
        return
    layout, devices = checked.plan.layout, checked.plan.cluster.num_devices
    if layout.num_devices == devices:
        return
    others = layout.tp * layout.cp * layout.pp
    degrees = f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp}"
    rule = f"{degrees} x dp {layout.dp} is {layout.num_devices:,} devices, but the cluster has {devices:,}"
    if devices % others == 0:
        legal = (devices // others,)
        yield _problem("layout.dp", layout.dp, rule, legal=legal, near=legal)
    else:
        rule += f"; no dp mends that, since {degrees} = {others:,} does not divide {devices:,}"
        fewer = devices // others * others
        cluster = f", or a cluster of {fewer:,} or {fewer + others:,}" if fewer else ""
        yield _problem("layout.dp", layout.dp, rule, remedy=f"degrees whose product is {devices:,}{cluster}")


def _batch(checked: _Checked) -> Iterator[Problem]:
    if not checked.good("layout.global_batch", "layout.microbatch", "layout.dp"):
        return
    layout = checked.plan.layout
    unit = layout.dp * layout.microbatch
    if layout.global_batch % unit:
        rule = f"must be a multiple of dp {layout.dp} x microbatch {layout.microbatch} = {unit}"
        near = _multiples(layout.global_batch, unit, most=MOST_SIZE)
        yield _problem("layout.global_batch", layout.global_batch, rule, legal=(f"multiples of {unit}",), near=near)
        return
    copies = checked.placement.chains if checked.placement else 1
    if layout.num_microbatches < copies:
        rule = f"{layout.schedule} runs {copies} copies of the model: it needs {copies} microbatches at least"
        least = copies * unit
        yield _problem("layout.global_batch", layout.global_batch, rule, legal=(f"{least} or more",), near=(least,))


# --- tensors and sequence ---


def _heads(checked: _Checked) -> Iterator[Problem]:
    """Each rank has whole heads; keys and values are dealt out, or copied where there are fewer of them than ranks."""
    model, tp = checked.plan.model, checked.plan.layout.tp
    if not checked.good("layout.tp"):
        return
    operators = (operator for layer in model.layers for operator in layer.operators)
    pairs = dict.fromkeys((o.heads, o.kv_heads) for o in operators if isinstance(o, Attention))
    rules = []
    for heads, kv_heads in pairs:
        if heads % tp:
            rules.append(f"must divide the {heads} attention heads")
        elif not _deals(kv_heads, tp):
            rules.append(f"must divide the {kv_heads} key-value heads, or be a multiple of them")
    if rules:
        most = min([MOST_LISTED, _domain(checked.plan.cluster), *(heads for heads, _ in pairs)])
        legal = tuple(k for k in range(1, most + 1) if all(h % k == 0 and _deals(kv, k) for h, kv in pairs))
        for rule in dict.fromkeys(rules):
            yield _problem("layout.tp", tp, rule, legal=legal, near=closest(tp, legal))


def _experts(checked: _Checked) -> Iterator[Problem]:
    """Each rank has whole experts."""
    model, tp = checked.plan.model, checked.plan.layout.tp
    found = {o.experts for layer in model.layers for o in layer.operators if isinstance(o, Experts)}
    if checked.good("layout.tp") and any(number % tp for number in found):
        legal = tuple(k for k in divisors(min(found)) if all(number % k == 0 for number in found))
        rule = f"must divide the {' and '.join(map(str, sorted(found)))} experts of a layer"
        yield _problem("layout.tp", tp, rule, legal=legal, near=closest(tp, legal))


def _deals(kv_heads: int, tp: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _domain(cluster: Cluster) -> int:
    """Devices of a node, or of the links that reach over nodes: tensor parallelism beyond is legal, but not advised."""
    nodes = [group.node for group in cluster.groups]
    return max([1, *(size for node in nodes for size in (node.num_devices, *(tier.size for tier in node.tiers)))])


def _sequence(checked: _Checked) -> Iterator[Problem]:
    plan, layout = checked.plan, checked.plan.layout
    if checked.good("layout.tp") and layout.sequence_parallel and layout.tp == 1:
        rule = "sequence parallelism cuts over the tensor-parallel ranks, and there is one"
        yield _problem("layout.sequence_parallel", True, rule, legal=("false",), remedy="false, or tp of 2 or more")
    if not checked.good("layout.tp", "layout.cp", "seq_len"):
        return
    unit = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    if plan.seq_len % unit:
        cut = f"tp {layout.tp} x cp {layout.cp} = {unit}" if layout.sequence_parallel else f"cp {unit}"
        near = _multiples(plan.seq_len, unit, most=_longest(plan.model))
        rule = f"must be a multiple of {cut}, which cut the sequence"
        yield _problem("seq_len", plan.seq_len, rule, legal=(f"multiples of {unit}",), near=near)


def _longest(model: Model) -> int:
    if model.fixed_length:
        return model.seq_len
    learned = model.architecture is not None and model.architecture.positions == "learned"
    return model.architecture.seq_len if model.architecture and learned else MOST_SEQ_LEN


def _length(checked: _Checked) -> Iterator[Problem]:
    model, seq_len = checked.plan.model, checked.plan.seq_len
    if not checked.good("seq_len"):
        return
    longest = _longest(model)
    if model.fixed_length and seq_len != longest:
        remedy = "trace it again with a sample of that length"
        rule = f"must be {longest}: the traced module fixes its length"
        yield _problem("seq_len", seq_len, rule, legal=(longest,), near=(longest,), remedy=remedy)
    elif seq_len > longest:
        rule = f"must be at most {longest:,}: that is how many positions {model.name} has learned"
        yield _problem("seq_len", seq_len, rule, legal=(f"1 to {longest}",), near=(longest,))


# --- choices ---


def _shards(checked: _Checked) -> Iterator[Problem]:
    dp = checked.plan.layout.dp
    for key, choice in _each_choice(checked.plan):
        if not checked.good(f"{key}.shard", "layout.dp"):
            continue
        if dp % choice.shard:
            legal = divisors(dp)
            rule = f"must divide dp ({dp})"
            yield _problem(f"{key}.shard", choice.shard, rule, legal=legal, near=closest(choice.shard, legal))
        if choice.keep and choice.shard == 1:
            rule = "keeps gathered parameters, but shard 1 gathers none"
            remedy = f"false, or a shard of {dp}" if dp > 1 else "false"
            yield _problem(f"{key}.keep", True, rule, legal=("false",), remedy=remedy)


def _operator(plan: Plan, position: int) -> Operator | None:
    """The operator that a choice names, if there is one."""
    item = plan.choices[position]
    layer = plan.model.by_name.get(item.layer)
    return next((o for o in layer.operators if o.name == item.operator), None) if layer else None


def _names(checked: _Checked) -> Iterator[Problem]:
    model, first = checked.plan.model, dict[tuple[str, str], int]()
    for position, item in enumerate(checked.plan.choices):
        key, layer = f"choices[{position}]", model.by_name.get(item.layer)
        before = first.setdefault((item.layer, item.operator), position)
        if layer is None:
            names = tuple(model.by_name)
            near = nearest(item.layer, names)
            yield _problem(f"{key}.layer", item.layer, f"{model.name} has no such layer", legal=names, near=near)
        elif _operator(checked.plan, position) is None:
            names = tuple(operator.name for operator in layer.operators)
            rule, near = f"{item.layer} has no such operator", _nearest_path(item.operator, names)
            yield _problem(f"{key}.operator", item.operator, rule, legal=names, near=near)
        elif before != position:
            rule = f"has a choice already, choices[{before}]"
            yield _problem(f"{key}.operator", item.operator, rule, remedy="one choice for each operator")


def _nearest_path(name: str, legal: Sequence[str]) -> tuple[str, ...]:
    """Names meant by a dotted one: those that end like it first, since all of a layer's begin alike."""
    by_end = {path.rpartition(".")[2]: path for path in legal}
    ends = [by_end[end] for end in nearest(name.rpartition(".")[2], by_end)]
    return tuple(dict.fromkeys([*ends, *nearest(name, legal)]))[:3]


def _slices(checked: _Checked) -> Iterator[Problem]:
    plan = checked.plan
    for position, item in enumerate(plan.choices):
        key, operator = f"choices[{position}].choice.slices", _operator(plan, position)
        if operator is not None and checked.good(key):
            yield from _sliced(key, item.choice.slices, slice_counts(operator), item.operator)
    if checked.good("choice.slices"):
        yield from _sliced("choice.slices", plan.choice.slices, _common_slices(plan), "every operator with a product")


def _sliced(key: str, slices: int, legal: tuple[int, ...], what: str) -> Iterator[Problem]:
    if slices not in legal:
        rule = f"{what} can't be cut into so many slices"
        yield _problem(key, slices, rule, legal=legal, near=closest(slices, legal))


def _common_slices(plan: Plan) -> tuple[int, ...]:
    """Slices that all operators without a choice of their own allow, of those that can be sliced at all."""
    pairs = ((layer.name, operator) for layer in plan.model.layers for operator in layer.operators)
    free = [o for layer, o in pairs if o.slice_dims and (layer, o.name) not in plan.by_operator]
    return tuple(sorted(set.intersection(*(set(slice_counts(o)) for o in free)))) if free else (1,)


def _recompute(checked: _Checked) -> Iterator[Problem]:
    """Operators are chosen one by one, or the plan says for all what is computed again; not both."""
    plan = checked.plan
    if plan.recompute is not Recompute.SELECTIVE:
        return
    for position, (key, choice) in enumerate(_each_choice(plan)):
        operator = _operator(plan, position - 1) if position else None
        if choice.recompute and not isinstance(operator, Attention):
            rule = "goes beyond what the plan computes again: its recompute is selective"
            remedy = "false, or recompute: none and every operator by its own choice, or recompute: full"
            yield _problem(f"{key}.recompute", True, rule, legal=("false",), remedy=remedy)


# --- pipeline ---


def _placement(layout: Layout) -> Placement:
    return SCHEDULES[layout.schedule].placement(Shape(layout.pp, 1, chunks=layout.chunks, waves=layout.waves))


def _stages_per_rank(plan: Plan) -> int:
    """Stages per rank, without drawing up where they lie: a wave runs down and up."""
    schedule = SCHEDULES[plan.layout.schedule]
    return (plan.layout.chunks if schedule.chunked else 1) * (2 * plan.layout.waves if schedule.waved else 1)


def _pipeline(checked: _Checked) -> Iterator[Problem]:
    """What the schedule takes. Only chimera is choosy: all others draw up any ranks, chunks, waves and microbatches."""
    layout = checked.plan.layout
    if not checked.good("layout.schedule"):
        return
    schedule = SCHEDULES[layout.schedule]
    for name, taken, has in (("chunks", schedule.chunked, "chunked"), ("waves", schedule.waved, "waved")):
        value = getattr(layout, name)
        if checked.good(f"layout.{name}") and value != 1 and not taken:
            having = ", ".join(kind for kind in TRAINING if getattr(SCHEDULES[kind], has))
            rule = f"{layout.schedule} has no {name}"
            yield _problem(f"layout.{name}", value, rule, legal=(1,), near=(1,), remedy=f"1, or a schedule of {having}")
    if checked.good("layout.pp") and schedule.even_ranks and layout.pp % 2:
        near = tuple(number for number in (layout.pp - 1, layout.pp + 1) if number)
        rule = f"{layout.schedule} needs an even number of ranks"
        yield _problem("layout.pp", layout.pp, rule, legal=("even numbers",), near=near)


def _stages(checked: _Checked) -> Iterator[Problem]:
    plan, layout, blocks = checked.plan, checked.plan.layout, checked.plan.model.num_blocks
    if not checked.good(*SHAPE):
        return
    depth = checked.placement.depth if checked.placement else layout.pp * _stages_per_rank(plan)
    if not plan.model.can_be_cut:
        if depth > 1:
            yield _uncut(plan, depth)
    elif layout.pp > blocks:
        rule = f"must be at most the {blocks} blocks of {plan.model.name}"
        yield _problem("layout.pp", layout.pp, rule, legal=(f"1 to {blocks}",), near=(blocks,))
    elif depth > blocks + 2:
        schedule = SCHEDULES[layout.schedule]
        name = "chunks" if schedule.chunked else "waves" if schedule.waved and layout.waves > 1 else "pp"
        value = getattr(layout, name)
        most = (blocks + 2) * value // depth
        legal = (f"1 to {most}",) if most else ()
        rule = f"{depth} stages are more than {blocks} blocks, an embedding and a head"
        yield _problem(f"layout.{name}", value, rule, legal=legal, near=(most,) if most else ())


def _uncut(plan: Plan, depth: int) -> Problem:
    layout = plan.layout
    rule = f"{plan.model.name} is not an embedding, blocks and a head: it stays in one stage, not {depth}"
    name = "pp" if layout.pp > 1 else "chunks" if SCHEDULES[layout.schedule].chunked else ""
    if name:
        return _problem(f"layout.{name}", getattr(layout, name), rule, legal=(1,), near=(1,))
    depths = {name: _placement(Layout(global_batch=1, schedule=name)).depth for name in TRAINING}
    flat = tuple(name for name, depth in depths.items() if depth == 1 and not SCHEDULES[name].even_ranks)
    return _problem("layout.schedule", layout.schedule, rule, legal=flat)


def _cut(checked: _Checked) -> Iterator[Problem]:
    plan, placement, blocks = checked.plan, checked.placement, checked.plan.model.num_blocks
    if placement is None or not checked.good("cut"):
        return
    cut, depth = plan.cut, placement.depth
    if depth > (blocks + 2 if plan.model.can_be_cut else 1):
        return  # no cut would be right
    near = (_listed(even_cut(blocks, depth)),)
    if len(cut) != depth:
        rule = f"must have one entry for each of the {depth} stages, not {len(cut)}"
        yield _problem("cut", _listed(cut), rule, near=near)
    if sum(cut) != blocks:
        rule = f"adds up to {sum(cut)}, but {plan.model.name} has {blocks} blocks"
        yield _problem("cut", _listed(cut), rule, near=near)
    empty = [stage for stage, count in enumerate(cut[1:-1], start=1) if count == 0]
    if empty:
        rule = "only the first and the last stage, with embedding and head, may be without a block"
        yield _problem(f"cut[{empty[0]}]", 0, rule, legal=("1 or more",), near=near)


def _listed(cut: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, cut)) + "]"


# --- number formats ---


def _precision(checked: _Checked) -> Iterator[Problem]:
    plan = checked.plan
    if not checked.good("cluster"):
        return
    device = plan.cluster.device
    known = tuple(DType(name) for name in device.peak.known())
    summing = tuple(dtype for dtype in GRADIENTS if dtype is DType.FP32 or dtype in known)
    for name, legal in (("compute", known), ("products", known), ("gradients", summing)):
        dtype = getattr(plan.precision, name)
        if dtype not in legal:
            rule = f"{device.name} has no unit for it" if dtype not in known else "gradients can't be summed in it"
            near = sorted(legal, key=lambda other: abs(other.num_bytes - dtype.num_bytes))[:1]
            yield _problem(f"precision.{name}", str(dtype), rule, legal=legal, near=near)


RULES: tuple[Rule, ...] = (
    *(_world, _batch, _heads, _experts, _sequence, _length),
    *(_names, _shards, _slices, _recompute),
    *(_pipeline, _stages, _cut, _precision),
)
