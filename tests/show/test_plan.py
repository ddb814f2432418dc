"""A plan in a sentence, and the words beside it."""

from dataclasses import replace

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan import Choice, OperatorChoice, Request, plan_of
from wavetrain.plan.words import sentence
from wavetrain.show.plan import best_document, best_words, layouts, terms_words

MODEL, CLUSTER = load_model("gpt3-1.3b"), load_cluster("dgx-a100:2")


def plan(**layout):
    return plan_of(Request(model=MODEL, cluster=CLUSTER, global_batch=64, **layout))


def test_a_pipeline_in_a_sentence():
    made = plan(tp=2, pp=4, waves=2, sequence_parallel=True, zero1=True, recompute="full")
    assert sentence(made) == (
        "16 devices as 2 pipelines of 4 ranks in two waves (wave), tensor parallel 2 with sequence parallelism, "
        "optimizer states sharded, full recompute, 32 microbatches of 1"
    )
    assert "4 ranks (interleaved, 2 stages each)" in sentence(plan(pp=4, chunks=2))
    assert "(1f1b)" in sentence(plan(pp=4))


def test_replicas_in_a_sentence():
    assert sentence(plan(microbatch=4)) == "16 devices as 16 replicas, 1 microbatch of 4"
    assert "parameters sharded over all replicas, kept" in sentence(plan(shard="dp", keep=True))
    assert "parameters sharded in groups of 8" in sentence(plan(shard="node"))


def test_blocks_that_differ_are_counted():
    layer = MODEL.blocks[0].layer
    mixed = replace(
        plan(),
        choices=(
            OperatorChoice(layer, "*", Choice(shard=16), first=0, count=6),
            OperatorChoice(layer, "*", Choice(shard=16, keep=True), first=6, count=5),
        ),
    )
    assert "of 24 blocks 13 replicated, 6 gathered twice, 5 kept" in sentence(mixed)


def test_numbers_in_words():
    assert layouts(73_208) == "73,208"
    assert layouts(23_000_000) == "23.0 million"
    assert terms_words({"sharding": 0.12, "bubble": -0.1}, most=2) == ", +120 ms gather and scatter"


def test_nothing_to_compare_with():
    assert best_document(None) is None
    assert str(best_words(None)) == "best plan found: none fits"
