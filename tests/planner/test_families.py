"""What people run today: each family's own rules, and that a search never loses to any of them."""

import importlib.util
import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan.check import check
from wavetrain.plan.layout import Choice, Recompute
from wavetrain.planner.families import (
    FAMILY_PLANS,
    MB,
    Link,
    Unit,
    chosen_blocks,
    ddp,
    decide,
    deepcompile,
    fits,
    hsdp,
    megatron,
    megatron_degrees,
    microbatch_sizes,
    most_replicas,
    osdp,
    osdp_units,
    slowest_first,
    zero2,
    zero3,
)
from wavetrain.planner.question import Question
from wavetrain.sim.predict import outline

ROOT = Path(__file__).parents[2]


def question_of(model="gpt3-1.3b", cluster="dgx-a100:2", *, global_batch=64, seq_len=2048, memory=1.0):
    return Question(
        model=load_model(model, seq_len=seq_len),
        cluster=load_cluster(cluster),
        global_batch=global_batch,
        seq_len=seq_len,
        headroom=1 - memory,
    )


def sharded_with(question, *, keep):
    """Memory that lets ZeRO-3 run and leaves room for so much of the parameters to stay gathered."""
    plan = zero3(question)
    blocks = sum(size for _, size in slowest_first(plan))
    wanted = outline(plan, question.laws).needed_bytes + keep * blocks
    return replace(question, headroom=1 - wanted / 0.9 / question.cluster.device.memory_bytes)


# --- what all of them do ---


@pytest.mark.parametrize("name", FAMILY_PLANS)
@pytest.mark.parametrize(
    "question",
    [
        question_of(),
        question_of("llama2-7b", "dgx-a100:3", global_batch=96, memory=0.5),
        question_of("gemma2-9b", "p4d:4", global_batch=128, seq_len=4096),
        question_of("tiny-moe", "dgx-h100", global_batch=8, seq_len=128),
        question_of("tiny-gpt", "cpu-host", global_batch=4, seq_len=64),
    ],
    ids=lambda question: question.model.name,
)
def test_a_plan_is_legal_and_fits(name, question):
    plan = FAMILY_PLANS[name](question)
    if plan is None:
        assert question.model.num_parameters > 5e9
        return
    assert check(plan) == []
    assert outline(plan, question.laws).needed_bytes <= question.capacity_bytes
    assert plan.layout.global_batch == question.global_batch


@pytest.mark.parametrize("name", FAMILY_PLANS)
def test_nothing_fits(name):
    assert FAMILY_PLANS[name](question_of("gpt3-175b", "dgx-a100", memory=0.3)) is None


@pytest.mark.parametrize(("batch", "ranks", "replicas"), [(64, 1, 16), (96, 1, 24), (64, 8, 2), (4, 1, 4), (64, 48, 0)])
def test_replicas_share_the_batch_on_whole_nodes(batch, ranks, replicas):
    assert most_replicas(question_of(cluster="dgx-a100:3", global_batch=batch), ranks) == replicas


def test_microbatches_are_powers_of_two_that_divide_the_share_of_a_replica():
    question = question_of(global_batch=96)
    assert microbatch_sizes(question, 8) == [4, 2, 1]
    assert microbatch_sizes(question, 8, most=2) == [2, 1]
    assert microbatch_sizes(question, 32) == [1]


# --- data parallelism ---


@pytest.mark.parametrize(
    ("family", "choice"),
    [
        (ddp, Choice()),
        (zero2, Choice(shard=16, keep=True)),
        (zero3, Choice(shard=16)),
        (hsdp, Choice(shard=8)),
    ],
)
def test_data_parallel_families_have_one_choice_for_all(family, choice):
    plan = family(question_of())
    assert (plan.choice, plan.choices) == (choice, ())
    assert (plan.layout.dp, plan.layout.tp, plan.layout.pp) == (16, 1, 1)
    assert not plan.layout.shard_optimizer


def test_the_largest_microbatch_that_fits_is_chosen():
    question = question_of(global_batch=1024, memory=0.5)
    plan = zero3(question)
    assert plan.layout.microbatch < 64
    larger = replace(plan, layout=replace(plan.layout, microbatch=2 * plan.layout.microbatch))
    assert not fits(question, larger)


def test_activations_are_recomputed_only_where_nothing_fits_otherwise():
    question = question_of("llama2-7b", "dgx-a100:4", seq_len=4096)
    assert zero3(question).recompute is Recompute.NONE
    tight = replace(question, headroom=0.75)
    plan = zero3(tight)
    assert plan.recompute is Recompute.FULL
    assert not fits(tight, replace(plan, recompute=Recompute.NONE, layout=replace(plan.layout, microbatch=1)))


def test_one_device_shards_nothing():
    question = question_of("tiny-gpt", global_batch=4, seq_len=64)
    question = replace(question, cluster=question.cluster.part(1))
    assert {FAMILY_PLANS[name](question).choice for name in ("ddp", "zero2", "zero3", "hsdp", "osdp")} == {Choice()}


# --- DeepCompile ---


def test_kept_blocks_grow_with_memory():
    question = question_of("llama2-7b", "dgx-a100:8", global_batch=64, seq_len=1024)
    shares = (0.0, 0.1, 0.3, 0.5, 0.8, 1.0, 2.0)
    kept = []
    for share in shares:
        plan = deepcompile(sharded_with(question, keep=share))
        assert plan.choice == Choice(shard=64)
        kept.append(sum(variant.choice.keep for variant in plan.blocks))
    assert kept == sorted(kept)
    assert kept == [min(32, int(32 * share + 1e-6)) for share in shares]


def test_what_is_gathered_slowest_per_byte_is_kept_first():
    question = question_of("gemma2-9b", "dgx-a100:8", global_batch=64, seq_len=1024)
    plan = zero3(question)
    model = plan.model
    fat = replace(model.layers[1], operators=model.layers[1].operators * 2)
    uneven = replace(model, layers=(model.layers[0], fat, *model.layers[2:]))
    names = [variant.layer for variant in replace(plan, model=uneven).blocks]
    found = slowest_first(replace(plan, model=uneven))
    small = names.count(next(name for name in set(names) if name != fat.name))
    assert all(names[number] != fat.name for number, _ in found[:small])
    assert [number for number, _ in found[:small]] == sorted(number for number, _ in found[:small])


def test_neighbours_of_a_kind_are_named_together():
    plan = zero3(question_of("gemma2-9b", "dgx-a100:8", seq_len=1024))
    names = [variant.layer for variant in plan.blocks]
    made = chosen_blocks(plan, [0, 1, 2, 5], Choice())
    assert sum(item.count for item in made) == 4
    assert {item.layer for item in made} == {names[number] for number in (0, 1, 2, 5)}
    changed = replace(plan, choices=made)
    assert check(changed) == []
    assert [n for n, variant in enumerate(changed.blocks) if variant.choice == Choice()] == [0, 1, 2, 5]


# --- Megatron-LM ---


def test_tensor_parallelism_goes_up_to_the_node_before_pipelines():
    degrees = list(megatron_degrees(question_of("gpt3-175b", "dgx-a100:8")))
    assert degrees[:4] == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert degrees[4:8] == [(8, 2), (8, 3), (8, 4), (8, 6)]


def test_a_small_model_has_replicas_and_a_large_one_an_interleaved_pipeline():
    small = megatron(question_of("gpt3-125m"))
    assert (small.layout.tp, small.layout.pp, small.layout.dp, small.layout.shard_optimizer) == (1, 1, 16, True)
    large = megatron(question_of("gpt3-175b", "dgx-a100:32", global_batch=1536))
    layout = large.layout
    assert (layout.tp, layout.sequence_parallel, layout.schedule, layout.chunks) == (8, True, "interleaved", 2)
    assert large.recompute is Recompute.NONE
    assert 96 % (2 * layout.pp) == layout.num_microbatches % layout.pp == 0


# --- OSDP ---


def some_units(seed):
    draw = random.Random(seed)
    made = []
    for _ in range(6):
        shard, gathered = draw.randrange(1, 20), draw.randrange(0, 30)
        whole_s = draw.uniform(0.5, 2.0)
        made.append(Unit(shard + draw.randrange(0, 60), shard, gathered, whole_s, whole_s + draw.uniform(-0.1, 1.0)))
    return made


def by_brute_force(units, limit_mb):
    """The least time of all 64 selections that fit by OSDP's own account."""
    found = []
    for sharded in itertools.product((False, True), repeat=len(units)):
        pairs = list(zip(units, sharded, strict=True))
        held = sum(unit.shard_mb if cut else unit.whole_mb for unit, cut in pairs)
        gathered = max((unit.gathered_mb for unit, cut in pairs if cut), default=0)
        if held + gathered <= limit_mb:
            found.append((sum(unit.shard_s if cut else unit.whole_s for unit, cut in pairs), sharded))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_osdp_is_the_best_of_its_own_model(seed):
    units = some_units(seed)
    for limit_mb in (0, 20, 60, 100, 150, 200, 300, 1000):
        found, best = decide(units, limit_mb), by_brute_force(units, limit_mb)
        if best is None:
            assert found is None
            continue
        assert found.time_s == pytest.approx(best[0], rel=1e-12)
        assert found.sharded == best[1]


def test_its_formulas_count_two_rounds_replicated_and_three_sharded():
    question = question_of()
    plan = zero3(question)
    unit, *_, ends = osdp_units(question, plan)
    link = Link.measured(16, plan.cluster.tiers)
    block = sum(p.num_elements for o in plan.model.by_name["decoder"].operators for p in o.parameters)
    assert unit.shard_s - unit.whole_s == pytest.approx(15 * (link.alpha_s + 2 * block * link.beta_s / 16))
    assert unit.gathered_mb == int(2 * block / MB)
    assert unit.whole_mb - unit.shard_mb == pytest.approx(18 * block * 15 / 16 / MB, abs=1)  # 2 + 4 + 12 bytes each
    assert ends.gathered_mb > unit.gathered_mb
    assert link.alpha_s > 0


def test_osdp_replicates_all_with_much_memory_and_nothing_with_little():
    question = question_of("gpt3-1.3b", "dgx-a100:2", seq_len=256)
    counts = []
    for memory in (0.1, 0.15, 0.2, 0.3, 1.0):
        plan = osdp(replace(question, headroom=1 - memory))
        counts.append(sum(variant.choice.shard == 1 for variant in plan.blocks) if plan else -1)
    assert counts[-1] == 24
    assert 0 in counts or any(0 < count < 24 for count in counts)


# --- never worse ---


def never_worse():
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("never_worse", ROOT / "benchmarks" / "never_worse.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BENCHMARK = never_worse()
CASES = list(BENCHMARK.cases(12, seed=7, models=BENCHMARK.SMALL_MODELS, counts=(1, 2, 3)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_search_is_never_worse_than_a_family(case):
    result = BENCHMARK.run(case)
    assert not result.worse
    assert result.best_s is not None or not result.families_s


def test_every_family_is_described():
    assert set(BENCHMARK.WHAT) == set(FAMILY_PLANS)
