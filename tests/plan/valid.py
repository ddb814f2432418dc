"""Plans that break no rule: one to start from, and any number of them for properties."""

from dataclasses import fields, replace
from functools import cache

from hypothesis import strategies as st

from wavetrain.base.units import DType
from wavetrain.cluster import Cluster, load_cluster
from wavetrain.model import Model, load_model, slice_counts
from wavetrain.model.limits import divisors
from wavetrain.model.operator import Experts
from wavetrain.plan.check import TRAINING
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import OperatorChoice, Plan, num_stages
from wavetrain.plan.stack import AttentionImpl, Precision, Stack
from wavetrain.schedule.schedules import SCHEDULES

LAYOUT = Layout(global_batch=64, microbatch=2, tp=2, dp=4, pp=4)
Q_PROJ = "model.layers.{}.self_attn.q_proj"
ATTENTION = "model.layers.{}.self_attn"


@cache
def model(name: str = "llama2-7b") -> Model:
    return load_model(name)


@cache
def cluster(name: str = "dgx-h100:4") -> Cluster:
    return load_cluster(name)


def a_plan(**changes: object) -> Plan:
    """llama2-7b over 32 H100, with keys of the layout or the plan changed; the cut is even unless it is given."""
    names = {item.name for item in fields(Layout)}
    layout = replace(LAYOUT, **{key: value for key, value in changes.items() if key in names})
    own = {key: value for key, value in changes.items() if key not in names}
    plan = Plan(model=model(), cluster=cluster(), layout=layout, cut=(), seq_len=4096)
    plan = replace(plan, **own)
    if "cut" in own:
        return plan
    sound = layout.schedule in SCHEDULES and layout.pp > 0 and layout.chunks > 0 and layout.waves > 0
    return replace(plan, cut=even_cut(plan.model.num_blocks, num_stages(layout) if sound else 4))


def named(operator: str = Q_PROJ, *, layer: str = "decoder", **choice: object) -> tuple[OperatorChoice, ...]:
    return (OperatorChoice(layer, operator, Choice(**choice)),)


def _fitting_tp(of: Model, most: int) -> list[int]:
    assert of.architecture is not None
    heads, kv_heads = of.architecture.heads, of.architecture.kv_heads
    return [k for k in divisors(heads) if most % k == 0 and (kv_heads % k == 0 or k % kv_heads == 0)]


@st.composite
def _choices(draw: st.DrawFn, *, dp: int, recompute: bool) -> Choice:
    shard = draw(st.sampled_from(divisors(dp)))
    return Choice(shard=shard, keep=shard > 1 and draw(st.booleans()), recompute=recompute and draw(st.booleans()))


@st.composite
def _layouts(draw: st.DrawFn, of: Model, on: Cluster, *, most_stages: int) -> Layout:
    experts = {o.experts for layer in of.layers for o in layer.operators if isinstance(o, Experts)}
    tp = draw(st.sampled_from([k for k in _fitting_tp(of, on.num_devices) if not any(n % k for n in experts)]))
    pp = draw(st.sampled_from([k for k in divisors(on.num_devices // tp) if k <= of.num_blocks]))
    cp = draw(st.sampled_from([k for k in divisors(on.num_devices // tp // pp) if k <= 8]))
    dp, microbatch = on.num_devices // tp // pp // cp, draw(st.integers(1, 5))
    names = [name for name in TRAINING if not (SCHEDULES[name].even_ranks and pp % 2)]
    fits = [n for n in names if num_stages(Layout(global_batch=1, pp=pp, schedule=n)) <= most_stages]
    schedule = draw(st.sampled_from(fits))
    entry = SCHEDULES[schedule]
    return Layout(
        global_batch=dp * microbatch * draw(st.integers(2 if schedule == "chimera" else 1, 40)),
        microbatch=microbatch,
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        cp=cp,
        dp=dp,
        pp=pp,
        schedule=schedule,
        chunks=draw(st.integers(1, most_stages // pp)) if entry.chunked else 1,
        waves=draw(st.integers(1, most_stages // (2 * pp))) if entry.waved else 1,
        shard_optimizer=draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that breaks no rule, of a few models and clusters."""
    of = model(draw(st.sampled_from(["llama2-7b", "llama3-8b", "gemma2-9b", "mixtral-8x7b", "gpt3-125m"])))
    on = cluster(draw(st.sampled_from(["dgx-h100:1", "dgx-h100:4", "dgx-a100:6", "gb200-nvl72:36", "dgx-1-v100:2"])))
    blocks = of.num_blocks
    layout = draw(_layouts(of, on, most_stages=blocks + 2))
    cut = list(even_cut(blocks, num_stages(layout)))
    for _ in range(draw(st.integers(0, 3))):  # uneven is allowed: move a block somewhere else
        giver, taker = (draw(st.integers(0, len(cut) - 1)) for _ in range(2))
        least = 0 if giver in (0, len(cut) - 1) else 1
        if cut[giver] > least:
            cut[giver] -= 1
            cut[taker] += 1
    recompute = draw(st.sampled_from(Recompute))
    full = recompute is Recompute.FULL
    every = [(layer.name, operator) for layer in of.layers for operator in layer.operators]
    chosen = draw(st.lists(st.sampled_from(every), unique_by=lambda pair: (pair[0], pair[1].name), max_size=4))
    choices = []
    for layer, operator in chosen:
        choice = draw(_choices(dp=layout.dp, recompute=full))
        slices = draw(st.sampled_from(slice_counts(operator)))
        choices.append(OperatorChoice(layer, operator.name, replace(choice, slices=slices)))
    formats = [DType(name) for name in on.device.peak.known()]
    unit = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    return Plan(
        model=of,
        cluster=on,
        layout=layout,
        cut=tuple(cut),
        seq_len=unit * draw(st.integers(1, 2048 // unit)),
        recompute=recompute,
        choice=draw(_choices(dp=layout.dp, recompute=full)),
        choices=tuple(choices),
        stack=Stack(attention=draw(st.sampled_from(AttentionImpl)), barrier=draw(st.booleans())),
        precision=Precision(
            compute=draw(st.sampled_from(formats)),
            products=draw(st.sampled_from(formats)),
            gradients=draw(st.sampled_from([DType.FP32, DType.FP16])),
            state_bytes=draw(st.integers(0, 16)),
        ),
    )
