"""`check`: every rule that a plan breaks, at once, with what would be legal.

Sizes, the cluster and the schedule's name are looked at first; a rule that builds on one of them that is wrong is left
out, so that nobody reads about the consequences of an error. Whether a plan fits into memory is no rule: it is priced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from wavetrain.base.errors import Problem, nearest
from wavetrain.base.units import DType
from wavetrain.cluster.cluster import MOST_NODES, Cluster
from wavetrain.cluster.laws import MOST as MOST_LAW
from wavetrain.cluster.laws import TRAFFICS, Laws
from wavetrain.model.limits import MOST_SEQ_LEN, closest, divisors
from wavetrain.model.model import Model
from wavetrain.model.operator import Attention, Experts
from wavetrain.plan.check_choices import CHOICE_RULES
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Layout
from wavetrain.plan.plan import Plan
from wavetrain.plan.rules import MOST_SIZE, SHAPE, Checked, broken, each_choice, placement, stages_per_rank, whole
from wavetrain.schedule.schedules import SCHEDULES

MOST_STATE_BYTES = 64
LEAST, MOST = 1e-12, 1e30  # of any number in a cluster, but for these
MOST_OF = {"count": MOST_NODES, "num_devices": 1_000_000, "size": 1_000_000, "hidden": 1.0}
MAY_BE_0 = (
    *("host_w", "idle_w", "busy_w", "limit_w", "usd_per_hour", "inner_half", "vector_inner_half"),
    *("latency_s", "start_s", "ramp_s", "congestion", "pair_loss", "hidden", "multicast"),
)
MOST_LISTED = 4096  # tensor-parallel degrees tried for the list of legal ones
DEGREES = ("tp", "cp", "dp", "pp")
SIZES = ("global_batch", "microbatch", *DEGREES, "chunks", "waves")
TRAINING = tuple(name for name in SCHEDULES if name != "forward-only")
GRADIENTS = (DType.FP32, DType.BF16, DType.FP16, DType.FP64)


Rule = Callable[[Checked], Iterator[Problem]]


def check(plan: Plan) -> list[Problem]:
    """All that is wrong with a plan; nothing if it can be priced and run."""
    found = [*_sizes(plan), *_cluster(plan), *_schedule(plan)]
    roots = (re.split(r"[.\[]", problem.key)[0] for problem in found)
    checked = Checked(plan, frozenset([*roots, *(problem.key for problem in found)]))
    return [*found, *(problem for rule in RULES for problem in rule(checked))]


def _multiples(value: int, unit: int, *, most: int) -> tuple[int, ...]:
    """The multiples of `unit` just below and just above a value."""
    below = value // unit * unit
    return tuple(number for number in (below, below + unit) if 0 < number <= most)


# --- each value by itself ---

STACK_LIMITS = {"message_s": (0.0, 1e3), "bucket_bytes": (1e3, 1e15), "kept_copies": (0.0, 100.0)}


def _sizes(plan: Plan) -> Iterator[Problem]:
    for name in SIZES:
        yield from whole(f"layout.{name}", getattr(plan.layout, name))
    yield from whole("seq_len", plan.seq_len, most=MOST_SEQ_LEN, near=plan.model.seq_len)
    yield from whole("precision.state_bytes", plan.precision.state_bytes, least=0, most=MOST_STATE_BYTES, near=12)
    for key, choice in each_choice(plan):
        yield from whole(f"{key}.shard", choice.shard)
        yield from whole(f"{key}.slices", choice.slices)
    for position, item in enumerate(plan.choices):
        yield from whole(f"choices[{position}].first", item.first, least=0, near=0)
        if item.count is not None:
            yield from whole(f"choices[{position}].count", item.count)
    for stage, count in enumerate(plan.cut):
        yield from whole(f"cut[{stage}]", count, least=0, near=0)
    for name, (least, most) in STACK_LIMITS.items():
        value = getattr(plan.stack, name)
        if value is not None and not least <= value <= most:
            yield broken(f"stack.{name}", value, f"must be a number from {least:g} to {most:g}")


def _schedule(plan: Plan) -> Iterator[Problem]:
    name = plan.layout.schedule
    if name not in SCHEDULES:
        near = nearest(str(name), TRAINING)
        yield broken("layout.schedule", name, "unknown schedule", legal=TRAINING, near=near)
    elif name not in TRAINING:
        rule = "has no backward: it evaluates, it does not train"
        yield broken("layout.schedule", name, rule, legal=TRAINING, near=("wave",))


def _cluster(plan: Plan) -> Iterator[Problem]:
    """Clusters we read are sound; one that was written by hand into a plan may not be."""
    cluster = plan.cluster
    unsound = [problem for i, group in enumerate(cluster.groups) for problem in _unsound(group, f"cluster.groups[{i}]")]
    unsound += _unsound_laws(cluster.own_laws)
    if unsound:
        yield from unsound
    elif not cluster.groups:
        yield broken("cluster", cluster.name, "must have a node")
    elif not cluster.is_uniform:
        kinds = tuple(dict.fromkeys(group.node.name for group in cluster.groups))
        rule = f"has {cluster.num_kinds} kinds of nodes; a plan is for equal ones"
        yield broken("cluster", cluster.name, rule, legal=kinds, remedy="a plan for one group of nodes")
    elif cluster.num_devices > 1 and (not cluster.tiers or cluster.tiers[-1].size < cluster.num_devices):
        rule = f"has no network that joins all of its {cluster.num_devices:,} devices"
        yield broken("cluster", cluster.name, rule)


def _unsound_laws(laws: Laws | None) -> Iterator[Problem]:
    """Constants of software that none has."""
    for item in () if laws is None else fields(laws):
        value = getattr(laws, item.name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(0.0 <= number <= MOST_LAW for number in numbers):
            yield broken(f"cluster.own_laws.{item.name}", None, f"must be from 0 to {MOST_LAW:g}")
        elif isinstance(value, tuple) and len(value) != len(TRAFFICS):
            yield broken(f"cluster.own_laws.{item.name}", None, f"must be {len(TRAFFICS)} numbers")


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
                yield broken(f"{key}.{name}", inner, f"must be a number from {least:g} to {most:g}")


# --- devices and batch ---


def _world(checked: Checked) -> Iterator[Problem]:
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
        yield broken("layout.dp", layout.dp, rule, legal=legal, near=legal)
    else:
        rule += f"; no dp mends that, since {degrees} = {others:,} does not divide {devices:,}"
        fewer = devices // others * others
        cluster = f", or a cluster of {fewer:,} or {fewer + others:,}" if fewer else ""
        yield broken("layout.dp", layout.dp, rule, remedy=f"degrees whose product is {devices:,}{cluster}")


def _batch(checked: Checked) -> Iterator[Problem]:
    if not checked.good("layout.global_batch", "layout.microbatch", "layout.dp"):
        return
    layout = checked.plan.layout
    unit = layout.dp * layout.microbatch
    if layout.global_batch % unit:
        rule = f"must be a multiple of dp {layout.dp} x microbatch {layout.microbatch} = {unit}"
        near = _multiples(layout.global_batch, unit, most=MOST_SIZE)
        yield broken("layout.global_batch", layout.global_batch, rule, legal=(f"multiples of {unit}",), near=near)
        return
    copies = checked.placement.chains if checked.placement else 1
    if layout.num_microbatches < copies:
        rule = f"{layout.schedule} runs {copies} copies of the model: it needs {copies} microbatches at least"
        least = copies * unit
        yield broken("layout.global_batch", layout.global_batch, rule, legal=(f"{least} or more",), near=(least,))


# --- tensors and sequence ---


def _heads(checked: Checked) -> Iterator[Problem]:
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
            yield broken("layout.tp", tp, rule, legal=legal, near=closest(tp, legal))


def _experts(checked: Checked) -> Iterator[Problem]:
    """Each rank has whole experts."""
    model, tp = checked.plan.model, checked.plan.layout.tp
    found = {o.experts for layer in model.layers for o in layer.operators if isinstance(o, Experts)}
    if checked.good("layout.tp") and any(number % tp for number in found):
        legal = tuple(k for k in divisors(min(found)) if all(number % k == 0 for number in found))
        rule = f"must divide the {' and '.join(map(str, sorted(found)))} experts of a layer"
        yield broken("layout.tp", tp, rule, legal=legal, near=closest(tp, legal))


def _deals(kv_heads: int, tp: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _domain(cluster: Cluster) -> int:
    """Devices of a node, or of the links that reach over nodes: tensor parallelism beyond is legal, but not advised."""
    nodes = [group.node for group in cluster.groups]
    return max([1, *(size for node in nodes for size in (node.num_devices, *(tier.size for tier in node.tiers)))])


def _sequence(checked: Checked) -> Iterator[Problem]:
    plan, layout = checked.plan, checked.plan.layout
    if checked.good("layout.tp") and layout.sequence_parallel and layout.tp == 1:
        rule = "sequence parallelism cuts over the tensor-parallel ranks, and there is one"
        yield broken("layout.sequence_parallel", True, rule, legal=("false",), remedy="false, or tp of 2 or more")
    if not checked.good("layout.tp", "layout.cp", "seq_len"):
        return
    unit = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    if plan.seq_len % unit:
        cut = f"tp {layout.tp} x cp {layout.cp} = {unit}" if layout.sequence_parallel else f"cp {unit}"
        near = _multiples(plan.seq_len, unit, most=_longest(plan.model))
        rule = f"must be a multiple of {cut}, which cut the sequence"
        yield broken("seq_len", plan.seq_len, rule, legal=(f"multiples of {unit}",), near=near)


def _longest(model: Model) -> int:
    if model.fixed_length:
        return model.seq_len
    learned = model.architecture is not None and model.architecture.positions == "learned"
    return model.architecture.seq_len if model.architecture and learned else MOST_SEQ_LEN


def _length(checked: Checked) -> Iterator[Problem]:
    model, seq_len = checked.plan.model, checked.plan.seq_len
    if not checked.good("seq_len"):
        return
    longest = _longest(model)
    if model.fixed_length and seq_len != longest:
        remedy = "trace it again with a sample of that length"
        rule = f"must be {longest}: the traced module fixes its length"
        yield broken("seq_len", seq_len, rule, legal=(longest,), near=(longest,), remedy=remedy)
    elif seq_len > longest:
        rule = f"must be at most {longest:,}: that is how many positions {model.name} has learned"
        yield broken("seq_len", seq_len, rule, legal=(f"1 to {longest}",), near=(longest,))


# --- pipeline ---


def _pipeline(checked: Checked) -> Iterator[Problem]:
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
            yield broken(f"layout.{name}", value, rule, legal=(1,), near=(1,), remedy=f"1, or a schedule of {having}")
    if checked.good("layout.pp") and schedule.even_ranks and layout.pp % 2:
        near = tuple(number for number in (layout.pp - 1, layout.pp + 1) if number)
        rule = f"{layout.schedule} needs an even number of ranks"
        yield broken("layout.pp", layout.pp, rule, legal=("even numbers",), near=near)


def _stages(checked: Checked) -> Iterator[Problem]:
    plan, layout, blocks = checked.plan, checked.plan.layout, checked.plan.model.num_blocks
    if not checked.good(*SHAPE):
        return
    depth = checked.placement.depth if checked.placement else layout.pp * stages_per_rank(plan)
    if not plan.model.can_be_cut:
        if depth > 1:
            yield _uncut(plan, depth)
    elif layout.pp > blocks:
        rule = f"must be at most the {blocks} blocks of {plan.model.name}"
        yield broken("layout.pp", layout.pp, rule, legal=(f"1 to {blocks}",), near=(blocks,))
    elif depth > blocks + 2:
        schedule = SCHEDULES[layout.schedule]
        name = "chunks" if schedule.chunked else "waves" if schedule.waved and layout.waves > 1 else "pp"
        value = getattr(layout, name)
        most = (blocks + 2) * value // depth
        legal = (f"1 to {most}",) if most else ()
        rule = f"{depth} stages are more than {blocks} blocks, an embedding and a head"
        yield broken(f"layout.{name}", value, rule, legal=legal, near=(most,) if most else ())


def _uncut(plan: Plan, depth: int) -> Problem:
    layout = plan.layout
    rule = f"{plan.model.name} is not an embedding, blocks and a head: it stays in one stage, not {depth}"
    name = "pp" if layout.pp > 1 else "chunks" if SCHEDULES[layout.schedule].chunked else ""
    if name:
        return broken(f"layout.{name}", getattr(layout, name), rule, legal=(1,), near=(1,))
    depths = {name: placement(Layout(global_batch=1, schedule=name)).depth for name in TRAINING}
    flat = tuple(name for name, depth in depths.items() if depth == 1 and not SCHEDULES[name].even_ranks)
    return broken("layout.schedule", layout.schedule, rule, legal=flat)


def _cut(checked: Checked) -> Iterator[Problem]:
    plan, placement, blocks = checked.plan, checked.placement, checked.plan.model.num_blocks
    if placement is None or not checked.good("cut"):
        return
    cut, depth = plan.cut, placement.depth
    if depth > (blocks + 2 if plan.model.can_be_cut else 1):
        return  # no cut would be right
    near = (_listed(even_cut(blocks, depth)),)
    if len(cut) != depth:
        rule = f"must have one entry for each of the {depth} stages, not {len(cut)}"
        yield broken("cut", _listed(cut), rule, near=near)
    if sum(cut) != blocks:
        rule = f"adds up to {sum(cut)}, but {plan.model.name} has {blocks} blocks"
        yield broken("cut", _listed(cut), rule, near=near)
    empty = [stage for stage, count in enumerate(cut[1:-1], start=1) if count == 0]
    if empty:
        rule = "only the first and the last stage, with embedding and head, may be without a block"
        yield broken(f"cut[{empty[0]}]", 0, rule, legal=("1 or more",), near=near)


def _listed(cut: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, cut)) + "]"


# --- number formats ---


def _precision(checked: Checked) -> Iterator[Problem]:
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
            yield broken(f"precision.{name}", str(dtype), rule, legal=legal, near=near)


RULES: tuple[Rule, ...] = (
    *(_world, _batch, _heads, _experts, _sequence, _length),
    *CHOICE_RULES,
    *(_pipeline, _stages, _cut, _precision),
)
