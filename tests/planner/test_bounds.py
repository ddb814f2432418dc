"""A bound never exceeds what the simulator says; and it is near enough to leave little to simulate."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))
sys.path.insert(0, str(Path(__file__).parent))
from plans import better, with_links
from questions import CLUSTERS, MODELS, bounded, listed, question_of, random_questions

from wavetrain.cluster import load_cluster
from wavetrain.cluster.cluster import Achieved, Cluster
from wavetrain.cluster.read import KINDS
from wavetrain.plan.stack import AttentionImpl, Fusion, Stack
from wavetrain.planner.bounds import closed_form, degree_bounds, price, schedule
from wavetrain.planner.question import Pins
from wavetrain.planner.search import placed
from wavetrain.planner.space import degrees, options, orders
from wavetrain.planner.waits import known_microbatches, warm_ups
from wavetrain.schedule.schedules import Shape
from wavetrain.sim.predict import drawn_up, outline

shares = st.floats(0, 1, exclude_max=True, width=32)
picks = st.tuples(shares, shares, shares, shares)


def exceeded(question, found):
    """The bounds of a layout that exceed what the simulator says, with what they and it say."""
    seen = outline(found.plan, question.laws)
    pairs = [(name, value, seen.step_s) for name, value in found.seconds.items()]
    pairs += [(f"{name} bytes", value, seen.needed_bytes) for name, value in found.bytes.items()]
    return [pair for pair in pairs if not pair[1] <= pair[2]]


@settings(max_examples=300)
@given(random_questions(), picks)
def test_bounds_never_exceed_the_simulator(question, picked):
    found = bounded(question, picked)
    if found is not None:
        assert exceeded(question, found) == [], found.name


@settings(max_examples=200)
@given(random_questions(batches=(12, 27, 30, 40, 64, 96, 192)), st.integers(2, 6), picks)
def test_bounds_of_pipelines_never_exceed_the_simulator(question, pp, picked):
    question = replaced(question, pp=min(pp, question.model.num_blocks), microbatch=1)
    found = bounded(question, picked, most_microbatches=100)
    if found is not None:
        assert exceeded(question, found) == [], found.name


def replaced(question, **pins):
    return question_of(
        question.model,
        question.cluster,
        batch=question.global_batch,
        seq_len=question.seq_len,
        stack=question.stack,
        pins=Pins(**pins),
    )


@settings(max_examples=100)
@given(random_questions(clusters=("g5-48xlarge:2", "dgx-a100:2")), picks, st.booleans())
def test_bounds_hold_where_the_network_is_faster_than_the_links_of_a_node(question, picked, inside):
    slow = better(question.cluster, "rate", 0.01)
    cluster = with_links(slow, lambda link: better_network(link) if hasattr(link, "nics") else link)
    pins = Pins(cp=2, pp_inside=inside)
    question = question_of(question.model, cluster, batch=24, seq_len=128, stack=question.stack, pins=pins)
    found = bounded(question, picked)
    if found is not None:
        assert exceeded(question, found) == [], found.name


rates = st.tuples(
    st.sampled_from([0.1, 0.8, 3.0]),
    st.sampled_from([0.0, 1e-4]),
    st.sampled_from([0.0, 0.5, 4.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
)


@settings(max_examples=100)
@given(random_questions(), picks, st.lists(rates, min_size=5, max_size=5))
def test_bounds_hold_where_kinds_of_collectives_differ(question, picked, drawn):
    """As on a measured cluster: each kind has a rate and a latency of its own, may lose rate in a pair, and hide."""
    kinds = tuple(
        Achieved(kind, efficiency, latency_s, 1e-5, 0.0, pair_loss, hidden)
        for kind, (efficiency, latency_s, pair_loss, hidden) in zip(KINDS, drawn, strict=True)
    )
    cluster = with_links(question.cluster, lambda link: replace(link, kinds=kinds))
    found = bounded(replace(question, cluster=cluster), picked)
    if found is not None:
        assert exceeded(question, found) == [], found.name


def better_network(network):
    return replace(network, nic_bytes_per_s=network.nic_bytes_per_s * 1e4)


# --- what once exceeded ---

EAGER = Stack(norm=Fusion.EAGER, elementwise=Fusion.COMPILED, message_s=1e-3)
OVERLAPPED = Stack(barrier=False, message_overlap=True, attention=AttentionImpl.FUSED_SOFTMAX)
ZB_H1 = {"pp": 3, "dp": 1, "tp": 1, "cp": 2, "microbatch": 3, "schedule": "zb-h1", "recompute": "none"}
WAVE_ZB = {"pp": 3, "dp": 1, "tp": 1, "cp": 1, "microbatch": 32, "schedule": "wave-zb", "recompute": "none"}
REGRESSIONS = {
    # the rank with most blocks is at an end: it has fewer messages than the average rank
    "messages of an end": ("tiny-llama", "dgx-1-v100:2", 36, 4, EAGER, ZB_H1),
    # a tied head is where the embedding is, and holds no copy
    "tied head of a wave": ("gpt3-1.3b", "dgx-a100", 8, 6, Stack(), {"pp": 4, "dp": 1, "tp": 1, "schedule": "wave"}),
    # stage 0 holds 2 pp microbatches at once, which are not all of them
    "microbatches of a wave": ("tiny-llama", "dgx-a100", 24, 8, Stack(), {"pp": 4, "dp": 1, "schedule": "wave"}),
    # units of more than pp microbatches: more forwards before the first backward than with 2 pp
    "uneven units": ("tiny-llama", "dgx-a100", 11, 8, Stack(), {"pp": 4, "dp": 1, "schedule": "interleaved"}),
    # without a barrier, what other ranks do before and after does not count
    "no barrier": ("gpt3-1.3b", "dgx-1-v100:2", 96, 8, OVERLAPPED, WAVE_ZB),
    # blocks that differ: a stage is not so many average ones
    "two kinds": ("two kinds", "dgx-a100", 8, 6, Stack(), {"pp": 3, "dp": 1, "tp": 1}),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_once_exceeded(name):
    model, cluster, batch, blocks, stack, pins = REGRESSIONS[name]
    question = question_of(model, cluster, batch=batch, blocks=blocks, stack=stack, pins=Pins(**pins))
    rng = random.Random(0)
    some = [bounded(question, [rng.random() for _ in range(4)]) for _ in range(25)]
    assert any(some)
    assert {pair[0]: found.name for found in some for pair in exceeded(question, found)} == {}


def test_context_parallel_ranks_may_be_faster_far_apart():
    """With stages as neighbours, the exchange of keys and values crosses nodes, which may be the faster way."""
    group = load_cluster("dgx-a100").groups[0]
    tier = replace(group.node.tiers[0], size=2, bytes_per_s=1e9)
    node = replace(group.node, num_devices=2, tiers=(tier,))
    pins = Pins(cp=2, pp=2, tp=1, dp=1, pp_inside=True, microbatch=1, recompute="none", schedule="1f1b")
    cluster = Cluster("pairs", (replace(group, node=node, count=2),))
    question = question_of("llama2-7b", cluster, batch=32, blocks=4, seq_len=4096, pins=pins)
    found = bounded(question, (0.0, 0.0, 0.0, 0.0))
    assert exceeded(question, found) == [], found.name


# --- how near they are ---


def test_bounds_are_near():
    rng, found, ratios = random.Random(11), 0, {}
    while found < 50:
        question = question_of(
            rng.choice([name for name in MODELS if not name.startswith("tiny")]),
            rng.choice(CLUSTERS),
            batch=rng.choice((16, 32, 48)),
            blocks=rng.randint(4, 14),
            pins=Pins(pp=rng.choice((2, 3, 4))),
        )
        layout = bounded(question, [rng.random() for _ in range(4)])
        if layout is None:
            continue
        found += 1
        seen = outline(layout.plan, question.laws)
        assert exceeded(question, layout) == [], layout.name
        for name, value in layout.seconds.items():
            ratios.setdefault(name, []).append(value / seen.step_s)
        for name, value in layout.bytes.items():
            ratios.setdefault(f"{name} bytes", []).append(value / seen.needed_bytes)
    middle = {name: float(np.median(values)) for name, values in ratios.items()}
    assert middle["order"] > 0.95
    assert middle["placed"] > 0.95
    assert middle["scheduled"] > 0.75
    assert middle["options"] > 0.75
    assert middle["degrees"] > 0.4
    assert middle["order bytes"] > 0.97
    assert np.percentile(ratios["order"], 10) > 0.85


def test_a_single_rank_is_bounded_by_what_it_takes():
    question = question_of("gpt3-125m", "dgx-a100:2", batch=16, blocks=6, pins=Pins(pp=1))
    for number in range(20):
        layout = bounded(question, (number / 20, (7 * number) % 20 / 20, 0.0, 0.0))
        seen = outline(layout.plan, question.laws)
        for name in ("options", "scheduled", "placed", "order"):
            assert layout.seconds[name] == pytest.approx(seen.step_s, rel=1e-7)


# --- parts ---


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(1, 60), st.data())
def test_some_microbatches_show_what_many_do(pp, microbatches, data):
    """Forwards before the first backward are the same, and nothing more is held at once than with all of them."""
    order = data.draw(st.sampled_from(orders(pp, microbatches, 100, Pins())))
    some = known_microbatches(order, pp, microbatches)
    (few, *_), (many, *_) = (warm_ups(order.name, pp, m, order.chunks, order.waves) for m in (some, microbatches))
    replaced = np.where(few.forwards == some, microbatches, few.forwards)
    assert (many.forwards == (replaced if order.name in ("gpipe", "looped-bfs") else few.forwards)).all()
    for rank in range(pp):
        every = many.alive[many.owner == rank]
        for moment in few.alive[few.owner == rank]:
            assert (every >= moment).all(axis=1).any()


def test_orders_that_look_at_times_are_all_looked_at():
    assert len(warm_ups("wave-zb", 4, 8, 1, 1)) == len(drawn_up("wave-zb", Shape(4, 8)))


def test_no_rows_are_priced_as_nothing():
    question = question_of("tiny-gpt", "dgx-a100", batch=8, blocks=2)
    known = degrees(question)
    every = options(question, known)
    made = schedule(question, known, every, price(question, known, every))
    none = np.zeros(0, dtype=np.intp)
    assert [len(part) for part in closed_form(question, known, every, made, none)] == [0, 0]
    assert len(degree_bounds(question, known.take(none))) == 0


def test_a_row_is_bounded_the_same_alone_and_among_others():
    question = question_of("gpt3-125m", "dgx-a100:2", batch=12, blocks=5)
    known = degrees(question)
    together = degree_bounds(question, known)
    for row in range(0, len(known), 17):
        assert degree_bounds(question, known.take(np.array([row])))[0] == together[row]


def test_stages_lie_where_the_plan_has_them():
    question = question_of("tiny-gpt", "dgx-a100", batch=8, blocks=4)
    for plan in listed(question, 40):
        layout = plan.layout
        assert placed(layout.schedule, layout.pp, layout.chunks, layout.waves) == plan.placement
