"""Small plans for the tests of prices: builders, better hardware, and a strategy of random ones."""

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.cluster.cluster import Cluster, Rates
from wavetrain.cluster.laws import load_laws
from wavetrain.model import load_model
from wavetrain.model.model import Layer, Model
from wavetrain.model.operator import NOTHING, Elementwise
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.plan.stack import AttentionImpl, Fusion, Precision, Stack
from wavetrain.sim.estimate import SCHEDULE_KINDS, estimate
from wavetrain.sim.gather import gather

LAWS = load_laws()
# Without the host and without gaps between kernels: a layer of no elements takes no time at all.
IDEAL = replace(LAWS, launch_s=0.0, gap_s=0.0, message_s=0.0, tensor_host_s=0.0, recompute_host_s=0.0, step_s=0.0)
CHUNKED = ("interleaved", "looped-bfs", "interleaved-zb")
WAVED = ("wave", "wave-zb")
FOLDED = (*WAVED, "zb-v")  # first and last stage on one rank
GREEDY = ("wave-zb", "zb-v")  # orders that are drawn up by looking at times


@cache
def model_of(name, blocks):
    """A preset's model with another number of blocks (of its first kind)."""
    model = load_model(name)
    first, block, *_, last = model.order
    return replace(model, order=(first, replace(block, count=blocks), last))


@cache
def blocks_only(name, blocks):
    """The same with an embedding and a head that do nothing: the stages of an even cut are alike."""
    model = model_of(name, blocks)
    empty = Elementwise("nothing", "add", 1, NOTHING)
    ends = Layer("embedding", "", (empty,)), Layer("head", "", (empty,))
    layers = (ends[0], model.by_name[model.order[1].layer], ends[1])
    return Model(model.name, model.seq_len, layers, model.order, model.architecture)


def plan_of(model, cluster, *, seq_len=512, cut=None, fp16=False, precision=None, **options):
    """A plan; options are those of `Layout`, and of `Plan` where it has them."""
    model = load_model(model) if isinstance(model, str) else model
    cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
    own = {name: options.pop(name) for name in ("recompute", "choice", "choices", "stack") if name in options}
    layout = Layout(**options)
    blocks = sum(run.count for run in model.order[1:-1])
    half = Precision(compute=DType.FP16, products=DType.FP16)
    return Plan(
        model=model,
        cluster=cluster,
        layout=layout,
        cut=cut or even_cut(blocks, num_stages(layout)),
        seq_len=seq_len,
        precision=precision or (half if fp16 else Precision()),
        **own,
    )


def priced(plan, laws=LAWS):
    return estimate(gather([plan]), laws)


# --- other hardware ---


def with_device(cluster, **changes):
    group = cluster.groups[0]
    node = replace(group.node, device=replace(group.node.device, **changes))
    return Cluster(cluster.name, (replace(group, node=node),))


def with_links(cluster, change):
    """Every tier of the node and its network changed by a function of one of them."""
    group = cluster.groups[0]
    network = group.node.network
    node = replace(group.node, tiers=tuple(map(change, group.node.tiers)), network=network and change(network))
    return Cluster(cluster.name, (replace(group, node=node),))


def _rate(factor):
    def change(link):
        if hasattr(link, "nic_bytes_per_s"):
            return replace(link, nic_bytes_per_s=link.nic_bytes_per_s * factor)
        pair = link.pair_bytes_per_s
        return replace(link, bytes_per_s=link.bytes_per_s * factor, pair_bytes_per_s=pair and pair * factor)

    return change


def better(cluster, what, factor):
    """A cluster that is better in one respect."""
    device = cluster.device
    if what == "memory":
        return with_device(cluster, memory_bytes_per_s=device.memory_bytes_per_s * factor)
    if what == "peak":
        return with_device(cluster, peak=Rates(**{name: rate * factor for name, rate in device.peak.known().items()}))
    if what == "rate":
        return with_links(cluster, _rate(factor))
    if what == "latency":
        return with_links(cluster, lambda link: replace(link, latency_s=link.latency_s / factor))
    if what == "start":
        return with_links(cluster, lambda link: replace(link, start_s=link.start_s / factor))
    assert what == "ramp"
    return with_links(cluster, lambda link: replace(link, ramp_s=link.ramp_s / factor))


BETTER = ("memory", "peak", "rate", "latency", "start", "ramp")

# --- random plans ---

CLUSTERS = ("dgx-a100:4", "dgx-h100:4", "dgx-1-v100:4", "p4d:4", "osdp-titan", "g5-48xlarge:4", "gb200-nvl72:8")
MODELS = ("gpt3-125m", "gpt3-1.3b", "tiny-llama", "llama2-7b", "tiny-moe", "megatron-1.7b")
stacks = st.builds(
    Stack,
    attention=st.sampled_from(AttentionImpl),
    elementwise=st.sampled_from(Fusion),
    norm=st.sampled_from(Fusion),
    logits_parallel=st.booleans(),
    gradient_overlap=st.booleans(),
    tensor_overlap=st.booleans(),
    message_overlap=st.booleans(),
    barrier=st.booleans(),
)


@st.composite
def plans(draw, schedules=SCHEDULE_KINDS, clusters=CLUSTERS, models=MODELS, most=32):
    """A legal plan of at most `most` devices, of any kind that can be priced."""
    cluster = load_cluster(draw(st.sampled_from(clusters)))
    pp = draw(st.sampled_from((1, 2, 4)))
    tp = draw(st.sampled_from((1, 2, 4)))
    cp = draw(st.sampled_from((1, 1, 2)))
    room = min(most, cluster.num_devices) // (pp * tp * cp)
    if not room:
        pp = tp = cp = 1
        room = min(most, cluster.num_devices)
    dp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= room]))
    schedule = draw(st.sampled_from(schedules)) if pp > 1 else "1f1b"
    layout = {
        "tp": tp,
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "cp": cp,
        "dp": dp,
        "pp": pp,
        "schedule": schedule,
        "chunks": 2 if schedule in CHUNKED else 1,
        "microbatch": draw(st.sampled_from((1, 2))),
        "shard_optimizer": draw(st.booleans()),
    }
    microbatches = pp * draw(st.integers(1, 4))
    shard = draw(st.sampled_from([n for n in (1, 2, 4, 8) if dp % n == 0]))
    blocks = draw(st.sampled_from((8, 9, 14, 16)))
    return plan_of(
        model_of(draw(st.sampled_from(models)), blocks),
        cluster,
        seq_len=draw(st.sampled_from((128, 1024))),
        fp16=cluster.device.peak.bf16 is None,
        global_batch=microbatches * dp * layout["microbatch"],
        recompute=draw(st.sampled_from(Recompute)),
        choice=Choice(shard, keep=draw(st.booleans()), slices=draw(st.sampled_from((1, 2)))),
        stack=draw(stacks),
        **layout,
    )
