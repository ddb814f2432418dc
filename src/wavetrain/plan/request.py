"""A plan from the flags that people give their training scripts; what is not stated is chosen and can be seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.base.units import DType
from wavetrain.cluster.cluster import Cluster
from wavetrain.cluster.read import OVERLAPS
from wavetrain.model.limits import divisors
from wavetrain.model.model import Model
from wavetrain.plan.check import check
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.plan.stack import AttentionImpl, Fusion, Precision, stack_with
from wavetrain.schedule.schedules import SCHEDULES

SHARD_WORDS = ("dp", "node", "none")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A layout as given by hand; None where nothing was said."""

    model: Model
    cluster: Cluster
    global_batch: int
    microbatch: int = 1
    seq_len: int | None = None
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    dp: int | None = None  # None: all devices that the other degrees leave
    shard: str | None = None  # a group size, or dp, node, none
    keep: bool = False
    zero1: bool = False
    schedule: str | None = None  # None: waves or chunks say it, else 1f1b
    waves: int | None = None
    chunks: int | None = None
    cut: tuple[int, ...] | None = None
    recompute: str = "none"
    attention: str = "flash2"
    elementwise: str = "fused"
    precision: str = "bf16"
    gradients: str = "fp32"
    overlap: tuple[str, ...] | None = None  # None: what the cluster's software does


def plan_of(request: Request) -> Plan:
    """The plan that a request means; every rule it breaks at once otherwise."""
    problems: list[Problem] = []
    layout = _layout(request, problems)
    recompute = _word("--recompute", request.recompute, tuple(Recompute), problems)
    attention = _word("--attention", request.attention, tuple(AttentionImpl), problems)
    elementwise = _word("--elementwise", request.elementwise, tuple(Fusion), problems)
    products = _word("--precision", request.precision, ("bf16", "fp16", "fp32", "fp8"), problems)
    gradients = _word("--gradients", request.gradients, ("fp32", "bf16", "fp16"), problems)
    overlap = request.cluster.overlap if request.overlap is None else request.overlap
    for word in overlap:
        _word("--overlap", word, (*OVERLAPS, "none"), problems)
    if "none" in overlap and len(overlap) > 1:
        problems.append(Problem(where="--overlap", rule="none means nothing beside other words"))
    group = _group(request, layout, problems)
    if layout.pp > request.model.num_layers:
        rule = f"{layout.pp} stages are more than the {request.model.num_layers} layers of {request.model.name}"
        problems.append(Problem(where="--pp", rule=rule))
    if problems:
        raise InputError(problems)
    compute = DType.BF16 if products == "fp8" else DType(products)
    plan = Plan(
        model=request.model,
        cluster=request.cluster,
        layout=layout,
        cut=request.cut or even_cut(request.model.num_blocks, num_stages(layout)),
        seq_len=request.seq_len or request.model.seq_len,
        recompute=Recompute(recompute),
        choice=Choice(shard=group, keep=request.keep),
        stack=stack_with(
            overlap,
            attention=AttentionImpl(attention),
            elementwise=Fusion(elementwise),
            norm=Fusion(elementwise),
        ),
        precision=Precision(compute=compute, products=DType(products), gradients=DType(gradients)),
    )
    broken = check(plan)
    if broken:
        raise InputError([_as_option(problem) for problem in broken])
    return plan


OPTIONS = {"layout.shard_optimizer": "--zero1", "precision.products": "--precision", "precision.compute": "--precision"}


def _as_option(problem: Problem) -> Problem:
    """A rule that a plan breaks, under the option that said it."""
    option = OPTIONS.get(problem.key, f"--{problem.key.rpartition('.')[2].replace('_', '-')}")
    value = "" if problem.value is None else f"{problem.value}: "
    return replace(problem, where=option, key="", value=None, rule=f"{value}{problem.rule}")


def _layout(request: Request, problems: list[Problem]) -> Layout:
    schedule = request.schedule
    if schedule is None:
        schedule = "wave" if request.waves else "interleaved" if request.chunks else "1f1b"
    kinds = tuple(name for name in SCHEDULES if name != "forward-only")
    schedule = _word("--schedule", schedule, kinds, problems)
    return Layout(
        global_batch=request.global_batch,
        microbatch=request.microbatch,
        tp=request.tp,
        sequence_parallel=request.sequence_parallel,
        cp=request.cp,
        dp=request.dp or _remaining(request, problems),
        pp=request.pp,
        schedule=schedule,
        chunks=request.chunks or (2 if SCHEDULES[schedule].chunked else 1),
        waves=request.waves or 1,
        shard_optimizer=request.zero1,
    )


def _remaining(request: Request, problems: list[Problem]) -> int:
    """Replicas that use every device."""
    devices, others = request.cluster.num_devices, request.tp * request.cp * request.pp
    if devices % others:
        rule = f"tp {request.tp} x cp {request.cp} x pp {request.pp} = {others} does not divide the {devices} devices"
        legal = tuple(map(str, divisors(devices)))
        problems.append(Problem(where="--tp, --pp, --cp", rule=rule, legal=legal))
        return 1
    return devices // others


def _group(request: Request, layout: Layout, problems: list[Problem]) -> int:
    text = request.shard
    if text is None or text == "none":
        return 1
    if text == "dp":
        return layout.dp
    if text == "node":
        return max(1, min(layout.dp, request.cluster.node.num_devices // (layout.tp * layout.cp)))
    if text.isascii() and text.isdigit() and 1 <= int(text) <= layout.dp and layout.dp % int(text) == 0:
        return int(text)
    legal = (*map(str, divisors(layout.dp)), *SHARD_WORDS)
    problems.append(Problem(where="--shard", rule=f"{text}: must divide dp {layout.dp}, or be a word", legal=legal))
    return 1


def _word(option: str, value: str, legal: tuple[str, ...], problems: list[Problem]) -> str:
    if value in legal:
        return value
    words = tuple(map(str, legal))
    problems.append(Problem(where=option, rule=f"unknown value {value}", legal=words, nearest=nearest(value, words)))
    return words[0]
