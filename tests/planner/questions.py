"""Small questions and random layouts of them, with what every bound says: for the tests of the search."""

import sys
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))
from plans import model_of, stacks

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.model.model import Run
from wavetrain.plan.check import check
from wavetrain.plan.cut import balanced_cut, even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.plan.stack import Precision
from wavetrain.planner.bounds import BELOW, degree_bounds, least_bytes, option_bounds, price, schedule
from wavetrain.planner.question import Question
from wavetrain.planner.search import Candidate, cuts, placed
from wavetrain.planner.space import degrees, options
from wavetrain.planner.waits import order_bound, order_bytes, placed_bound, stage_seconds
from wavetrain.sim.estimate import estimate
from wavetrain.sim.gather import gather

HALF = Precision(compute=DType.FP16, products=DType.FP16)
MODELS = ("tiny-gpt", "tiny-llama", "tiny-moe", "tiny-bert", "gpt3-125m", "gpt3-1.3b", "llama2-7b", "two kinds")
CLUSTERS = (
    *("dgx-a100", "dgx-a100:2", "dgx-a100:3", "dgx-a100:4", "dgx-h100:2", "p4d:2"),
    *("osdp-titan", "g5-48xlarge:2", "dgx-1-v100:2", "gb200-nvl72:2", "gb200-nvl72:20"),
)
BATCHES = (1, 2, 3, 6, 8, 9, 12, 16, 18, 24, 36, 40, 48, 64, 96, 192)


@cache
def two_kinds(blocks):
    """A model whose blocks differ: two of a plain kind, then one with experts, and so on."""
    plain, experts = load_model("tiny-llama"), load_model("tiny-moe")
    first, block, last = plain.order
    other = replace(experts.by_name[experts.order[1].layer], name="experts")
    kinds = [Run("experts", 1) if number % 3 == 2 else replace(block, count=1) for number in range(blocks)]
    layers = (*plain.layers, other) if blocks > 2 else plain.layers
    return replace(plain, layers=layers, order=(first, *kinds, last))


def question_of(model, cluster, *, batch, seq_len=128, blocks=None, **others):
    """A question; `model` and `cluster` by name or themselves."""
    cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
    if isinstance(model, str):
        model = two_kinds(blocks) if model == "two kinds" else model_of(model, blocks)
    precision = others.pop("precision", Precision() if cluster.device.peak.bf16 else HALF)
    others = {"mixed": False, "precision": precision, **others}
    return Question(model=model, cluster=cluster, global_batch=batch, seq_len=seq_len, **others)


@cache
def degrees_of(question, most_microbatches):
    """Legal degrees of a question that are quick to simulate."""
    found = degrees(question)
    return found.take(np.flatnonzero(found.microbatches <= most_microbatches))


@dataclass(frozen=True)
class Bounded:
    """A plan of the space, and what bounds say of it."""

    plan: Plan
    seconds: dict[str, float]
    bytes: dict[str, float]

    @property
    def name(self):
        layout = self.plan.layout
        return f"{layout} cut {self.plan.cut} {self.plan.recompute} {self.plan.choice}"


def bounded(question, picks, most_microbatches=48):
    """One layout, picked by shares of one: degrees, option, schedule, cut; None where there is none."""
    known = degrees_of(question, most_microbatches)
    if not len(known):
        return None
    known = known.take(np.array([int(picks[0] * len(known))]))
    every = options(question, known)
    if not len(every):
        return None
    every = every.take(np.array([int(picks[1] * len(every))]))
    priced = price(question, known, every)
    rows = schedule(question, known, every, priced)
    if not len(rows):
        return None
    row = int(picks[2] * len(rows))
    order = rows.orders[int(rows.order[row])]
    shape = tuple(int(getattr(known, item.name)[0]) for item in fields(known))
    chosen = tuple(int(getattr(every, item.name)[0]) for item in fields(every)[1:])
    pp, microbatches = shape[2], shape[5]
    ends = [float(part[0].sum() / priced.block_s[0]) for part in (priced.first_s, priced.last_s)]
    found = cuts(question.model.num_blocks, pp, order, *ends)
    if not found:
        return None
    cut = found[int(picks[3] * len(found))]
    stages = stage_seconds(question, priced, 0, cut, placed(order.name, pp, order.chunks, order.waves).ranks)
    tail_s, slower = float(priced.tail_s[0]), float(priced.slower[0]) * BELOW
    seconds = {
        "degrees": float(degree_bounds(question, known)[0]),
        "options": float(option_bounds(question, known, every, priced)[0]),
        "scheduled": float(rows.bound_s[row]),
        "placed": (placed_bound(order, pp, microbatches, stages) + tail_s) * slower,
        "order": (order_bound(order, pp, microbatches, stages) + tail_s) * slower,
    }
    held = {
        "options": float(least_bytes(question, known.pp, priced)[0]) * BELOW,
        "scheduled": float(rows.least_bytes[row]) * BELOW,
        "order": order_bytes(order, pp, microbatches, cut, priced, 0),
    }
    return Bounded(Candidate(0.0, shape, chosen, order, cut).plan(question), seconds, held)


# --- every layout there is, found by trying ---

PLAIN = ("gpipe", "1f1b", "zb-h1", "zb-h2")
CHUNKED = ("interleaved", "looped-bfs", "interleaved-zb")
WAVED = ("wave", "wave-zb")
SCHEDULES = (
    *((name, 1, 1) for name in PLAIN),
    *((name, chunks, 1) for name in CHUNKED for chunks in range(2, 9)),
    *((name, 1, waves) for name in WAVED for waves in range(1, 5)),
)


def some_cut(blocks, stages):
    """A cut without empty stages between the ends, however lopsided; None where there is none."""
    if stages == 1:
        return (blocks,)
    inner = [1] * (stages - 2)
    return (blocks - len(inner), *inner, 0) if blocks >= len(inner) else None


def every_layout(question):
    """Every legal plan, cut anyhow: all degrees, options and schedules are tried one after the other."""
    total, node = question.cluster.num_devices, question.cluster.node.num_devices
    for tp, cp, pp, dp in product(range(1, total + 1), repeat=4):
        used = tp * cp * pp * dp
        if used > total or not (used % node == 0 or used < node) or cp not in (1, 2, 4, 8, 16, 32, 64):
            continue
        for microbatch in range(1, 65):
            if question.global_batch % (dp * microbatch) == 0:
                yield from _of_degrees(question, tp, cp, pp, dp, microbatch)


def _of_degrees(question, tp, cp, pp, dp, microbatch):
    node, flags = question.cluster.node.num_devices, (False, True)
    for schedule_of, sequence, inside, zero1 in product(SCHEDULES, flags, flags, flags):
        name, chunks, waves = schedule_of
        if pp == 1 and name != "1f1b":
            continue
        if inside and (pp == 1 or dp * cp == 1 or not (node % (tp * pp) == 0 or (tp * pp) % node == 0)):
            continue
        layout = Layout(
            global_batch=question.global_batch,
            microbatch=microbatch,
            tp=tp,
            sequence_parallel=sequence,
            cp=cp,
            dp=dp,
            pp=pp,
            schedule=name,
            chunks=chunks,
            waves=waves,
            pp_inside=inside,
            shard_optimizer=zero1,
        )
        cut = some_cut(question.model.num_blocks, num_stages(layout))
        base = cut and _plan(question, layout, cut)
        if not base or check(base):
            continue
        for recompute, shard, keep in product(Recompute, range(1, dp + 1), flags):
            if zero1 and (shard > 1 or dp * cp == 1):
                continue
            if recompute is Recompute.SELECTIVE and not question.stack.attention.keeps_scores:
                continue
            plan = replace(base, recompute=recompute, choice=Choice(shard, keep=keep))
            if dp % shard == 0 and not (keep and shard == 1):
                yield plan


def _plan(question, layout, cut):
    return Plan(
        model=question.model,
        cluster=question.cluster.part(layout.num_devices),
        layout=layout,
        cut=cut,
        seq_len=question.seq_len,
        stack=question.stack,
        precision=question.precision,
    )


def every_cut(plan, laws):
    """The plan with an even cut, and with one that counts the time of embedding and head."""
    blocks, placement = plan.model.num_blocks, plan.placement
    found = estimate(gather([plan]), laws)
    block_s = float(found.block.f_s[0] + found.block.b_s[0])
    first, last = (float(end.total_s[0]) / block_s for end in (found.embedding, found.head))
    made = {even_cut(blocks, placement.depth), balanced_cut(blocks, placement.ranks, first=first, last=last)}
    return [replace(plan, cut=cut) for cut in sorted(made) if cut and all(cut[1:-1])]


def every_plan(question):
    return [plan for layout in every_layout(question) for plan in every_cut(layout, question.laws)]


def listed(question, most=None):
    """Plans of the space as the search finds them: degrees, options, schedules, cuts."""
    known = degrees(question)
    every = options(question, known)
    if not len(every):
        return []
    priced = price(question, known, every)
    rows = schedule(question, known, every, priced)
    picked = np.arange(len(rows))
    if most is not None and len(rows) > most:
        picked = np.sort(np.random.default_rng(0).choice(len(rows), most, replace=False))
    made = []
    for row in picked.tolist():
        option, order = int(rows.option[row]), rows.orders[int(rows.order[row])]
        shape = tuple(int(getattr(known, item.name)[every.row[option]]) for item in fields(known))
        chosen = tuple(int(getattr(every, item.name)[option]) for item in fields(every)[1:])
        ends = [float(part[option].sum() / priced.block_s[option]) for part in (priced.first_s, priced.last_s)]
        found = cuts(question.model.num_blocks, shape[2], order, *ends)
        made += [Candidate(0.0, shape, chosen, order, cut).plan(question) for cut in found]
    return made


@st.composite
def random_questions(draw, models=MODELS, clusters=CLUSTERS, batches=BATCHES, most_blocks=14):
    stack = replace(
        draw(stacks),
        bucket_bytes=draw(st.sampled_from((None, None, 25e6, 1e9))),
        message_s=draw(st.sampled_from((None, None, 0.0, 1e-3))),
    )
    return question_of(
        draw(st.sampled_from(models)),
        draw(st.sampled_from(clusters)),
        batch=draw(st.sampled_from(batches)),
        blocks=draw(st.integers(1, most_blocks)),
        seq_len=draw(st.sampled_from((16, 120, 128))),
        stack=stack,
    )
