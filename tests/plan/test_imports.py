"""Flags and configs of other programs become plans; what they mean differently or wrongly is said by name."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from valid import a_plan, cluster, model, plans

from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.model import load_model
from wavetrain.plan import Choice, Precision, Recompute, Stack
from wavetrain.plan.check import check
from wavetrain.plan.export import export
from wavetrain.plan.flags import plan_of_deepspeed, plan_of_megatron
from wavetrain.plan.flags.words import NO_BEARING, READ, UNPRICED
from wavetrain.plan.stack import AttentionImpl, Fusion

GPT3 = """
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --max-position-embeddings 2048 --seq-length 2048
    --vocab-size 50257 --micro-batch-size 1 --global-batch-size 1536 --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16 --fp16 --lr 0.6e-4 --data-path /data/my-gpt_text_document --split 98,2,0
"""
FLAT = {"tp": 1, "pp": 1, "dp": 32}
EAGER = Stack(elementwise=Fusion.EAGER, norm=Fusion.EAGER, attention=AttentionImpl.UNFUSED, gradient_overlap=False)
SAME = {
    "plain": a_plan(**FLAT),
    "full sharding": a_plan(**FLAT, choice=Choice(shard=32)),
    "groups": a_plan(**FLAT, choice=Choice(shard=8)),
    "kept": a_plan(**FLAT, choice=Choice(shard=32, keep=True)),
    "zero1": a_plan(shard_optimizer=True, sequence_parallel=True, recompute=Recompute.SELECTIVE),
    "interleaved": a_plan(schedule="interleaved", chunks=2, recompute=Recompute.FULL),
    "ends": a_plan(cut=(7, 9, 9, 7)),
    "written cut": a_plan(cut=(9, 8, 8, 7)),
    "empty ends": a_plan(cut=(0, 16, 16, 0)),
    "interleaved and uneven": a_plan(schedule="interleaved", chunks=2, cut=(5, 4, 4, 3, 4, 4, 4, 4)),
    "inside": a_plan(pp_inside=True, shard_optimizer=True),
    "context": a_plan(cp=2, dp=2),
    "fp8": a_plan(precision=Precision(products=DType.FP8)),
    "fp16": a_plan(precision=Precision(compute=DType.FP16, products=DType.FP16, gradients=DType.FP16)),
    "bf16 gradients": a_plan(precision=Precision(gradients=DType.BF16)),
    "eager": a_plan(stack=EAGER),
    "overlap": a_plan(sequence_parallel=True, stack=Stack(tensor_overlap=True, attention=AttentionImpl.CUDNN)),
    "gpt": a_plan(model=load_model("gpt3-125m"), **FLAT, seq_len=1024),
    "grouped queries": a_plan(model=load_model("llama3-8b"), seq_len=2048),
    "experts": a_plan(model=load_model("mixtral-8x7b")),
}


def problems_of(text, **others):
    with pytest.raises(InputError) as caught:
        plan_of_megatron(text, **{"cluster": cluster("dgx-h100:16"), **others})
    return {problem.key or problem.where: problem for problem in caught.value.problems}


@pytest.mark.parametrize("plan", SAME.values(), ids=SAME)
def test_flags_we_write_are_read_back_as_the_plan(plan):
    assert check(plan) == []
    back, ignored = plan_of_megatron(export(plan, "megatron").text, cluster=plan.cluster)
    assert ignored == []
    assert replace(back, model=plan.model) == plan
    ours, theirs = plan.model.architecture, back.model.architecture
    for name in (
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "positions",
        "norm",
        "mlp",
        "tied",
        "experts",
        "vocab",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert back.model.num_parameters == plan.model.num_parameters


@given(plans())
@settings(max_examples=40)
def test_any_layout_that_megatron_has_words_for_is_read_back(plan):
    plan = replace(plan, choices=(), choice=replace(plan.choice, slices=1, recompute=False))
    found = export(plan, "megatron")
    if any("asks for a multiple of" in note for note in found.not_expressed):
        with pytest.raises(InputError, match="a multiple of"):
            plan_of_megatron(found.text, model=plan.model, cluster=plan.cluster)
        return
    back, _ = plan_of_megatron(found.text, model=plan.model, cluster=plan.cluster)
    layout = plan.layout
    for name in ("tp", "cp", "pp", "dp", "global_batch", "microbatch", "sequence_parallel"):
        assert getattr(back.layout, name) == getattr(layout, name)
    assert back.recompute is plan.recompute
    assert back.choice.shard == plan.choice.shard
    assert back.choice.keep == plan.choice.keep
    if layout.schedule in ("1f1b", "interleaved") and layout.pp > 1:
        assert back.cut == plan.cut


def test_a_published_command_line():
    plan, ignored = plan_of_megatron(GPT3, cluster=cluster("dgx-a100:128"))
    layout = plan.layout
    assert ignored == []
    assert (layout.tp, layout.pp, layout.dp, layout.num_microbatches) == (8, 16, 8, 192)
    assert (plan.model.num_blocks, plan.cut) == (96, (6,) * 16)
    assert plan.model.architecture.vocab == 51200  # padded to a multiple of 128 x 8
    assert plan.model.architecture.ffn == 4 * 12288
    assert plan.model.num_parameters == pytest.approx(175e9, rel=0.01)
    assert (plan.precision.compute, plan.precision.gradients) == (DType.FP16, DType.FP16)
    assert not plan.layout.shard_optimizer
    assert not plan.stack.gradient_overlap


def test_the_flags_may_stand_behind_their_script():
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py \\\n {GPT3} # as published"
    assert plan_of_megatron(text, cluster=cluster("dgx-a100:128")) == plan_of_megatron(
        GPT3, cluster=cluster("dgx-a100:128")
    )


def test_a_model_stands_in_for_the_shape():
    text = "--micro-batch-size 2 --tensor-model-parallel-size 2 --bf16"
    plan, _ = plan_of_megatron(text, model=model(), cluster=cluster())
    assert plan.model == model()
    assert (plan.layout.global_batch, plan.layout.dp, plan.seq_len) == (32, 16, 4096)  # Megatron's: one microbatch


CUTS = {
    "--num-layers-per-virtual-pipeline-stage 2": (2,) * 16,
    "--num-virtual-stages-per-pipeline-rank 2": (4,) * 8,
    "--decoder-first-pipeline-num-layers 5": (5, 9, 9, 9),
    "--decoder-last-pipeline-num-layers 2": (10, 10, 10, 2),
    "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6 "
    "--num-virtual-stages-per-pipeline-rank 2": (3, 5, 5, 3, 3, 5, 5, 3),
    "--pipeline-model-parallel-layout 'Et*7|(t*9|)*2,t*7L'": (7, 9, 9, 7),
}


@pytest.mark.parametrize("flags", CUTS)
def test_cuts(flags):
    text = f"--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 4 --bf16 {flags}"
    plan, _ = plan_of_megatron(text, model=model(), cluster=cluster())
    assert plan.cut == CUTS[flags]
    assert plan.layout.schedule == ("interleaved" if len(plan.cut) > 4 else "1f1b")


def test_embedding_and_loss_may_count_as_layers():
    flags = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    text = f"{GPT3.replace('96 --hidden', '94 --hidden')} {flags}"
    plan, _ = plan_of_megatron(text, cluster=cluster("dgx-a100:128"))
    assert plan.cut == (5, *[6] * 14, 5)


def test_what_is_not_looked_at_is_named():
    extra = "--tensor-parallel-size 4 --moe-grouped-gemm --save checkpoints --sequence-paralel --log-interval 10"
    _, ignored = plan_of_megatron(f"{GPT3} {extra}", cluster=cluster("dgx-a100:128"))
    assert len(ignored) == 3
    assert "--tensor-parallel-size: not a flag" in ignored[0]
    assert "nearest is --tensor-model-parallel-size" in ignored[0]
    assert "--moe-grouped-gemm: known to Megatron-LM, but not priced" in ignored[1]
    assert "nearest is --sequence-parallel" in ignored[2]


def test_no_flag_is_in_two_lists():
    listed = [*READ, *NO_BEARING, *UNPRICED]
    assert len(set(listed)) == len(listed)


BAD = {
    "--bf16 yes": ("--bf16", "takes no value"),
    "--num-layers many": ("--num-layers", "must be a whole number from 1"),
    "--num-layers": ("--num-layers", "takes one value"),
    "--tensor-model-parallel-size 0": ("--tensor-model-parallel-size", "must be a whole number from 1"),
    "--hidden-dropout x": ("--hidden-dropout", "must be a number"),
    "--recompute-granularity ful": ("--recompute-granularity", "unknown value"),
    "--recompute-granularity full": ("--recompute-method", "missing"),
    "--pipeline-model-parallel-size 5": ("--pipeline-model-parallel-size", "can't be dealt out to 5 ranks evenly"),
    "--pipeline-model-parallel-layout Et|x|L": ("--pipeline-model-parallel-layout", "must be stages of E, t and L"),
    "--pipeline-model-parallel-layout (t*9999)*9999": ("--pipeline-model-parallel-layout", "at most 20,000 letters"),
    "--pipeline-model-parallel-layout Et*3|t*4L": (
        "--pipeline-model-parallel-layout",
        "has 7 layers, and the model 96",
    ),
    "--num-layers-per-virtual-pipeline-stage 4": (
        "--num-layers-per-virtual-pipeline-stage",
        "must divide the 6 layers",
    ),
    "--num-virtual-stages-per-pipeline-rank 4": ("--num-virtual-stages-per-pipeline-rank", "to 4 stages evenly"),
    "--bf16": ("--bf16", "means nothing beside --fp16"),
    "--use-torch-fsdp2": ("--use-torch-fsdp2", "does not run it in a pipeline"),
    "--tp-comm-overlap": ("--tp-comm-overlap", "with --sequence-parallel only"),
    "--tensor-model-parallel-size 7": ("--tensor-model-parallel-size", "must divide the 96 attention heads"),
    "--global-batch-size 100": ("--global-batch-size", "must be a multiple of dp 8"),
    "--num-attention-heads 97": ("--num-attention-heads", "divide"),
    "--context-parallel-size 3 --seq-length 2046": ("--tensor-model-parallel-size", "does not divide the 1024 devices"),
    "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 1544": (
        "--global-batch-size",
        "193 microbatches; interleaving needs a multiple of the 16",
    ),
    "--seq-length 4096": ("--seq-length", "must be at most --max-position-embeddings 2048"),
    "--seq-length 2046 --context-parallel-size 2": ("--seq-length", "multiple of 2 x --context-parallel-size = 4"),
    "--swiglu --squared-relu": ("--swiglu", "means nothing beside another activation"),
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_named_with_their_rule(flags):
    name, rule = BAD[flags]
    on = cluster("dgx-h100:14") if "size 7" in flags else cluster("dgx-a100:128")
    with pytest.raises(InputError) as caught:
        plan_of_megatron(f"{GPT3} {flags}", cluster=on)
    assert any(rule in problem.rule for problem in caught.value.problems if problem.key == name)


def test_bad_values_come_with_legal_and_nearest_ones():
    problem = problems_of(f"{GPT3} --recompute-granularity ful")["--recompute-granularity"]
    assert (problem.where, problem.value) == ("--megatron", "ful")
    assert problem.legal == ("full", "selective")
    assert problem.nearest == ("full",)


def test_all_that_is_missing_is_named_at_once_and_what_was_meant_for_it():
    found = problems_of("--bf16 --hidden-sz 4096")
    assert {"--num-layers", "--hidden-size", "--vocab-size", "--micro-batch-size"} <= set(found)
    assert found["--hidden-size"].remedy == "rename --hidden-sz to --hidden-size"


@pytest.mark.parametrize("text", ["", "   ", "num-layers 3", "--num-layers '3", "# nothing"])
def test_text_that_is_no_flags(text):
    assert "--megatron" in problems_of(text)


def test_a_model_and_flags_may_not_contradict():
    found = problems_of("--micro-batch-size 1 --num-layers 30 --hidden-size 4096", model=model())
    assert list(found) == ["--num-layers"]
    assert found["--num-layers"].nearest == ("32",)


@given(
    st.lists(
        st.sampled_from([*GPT3.split(), "--bf16", "-1", "(", "'", "=", "--", "--a=b", "E|*", "9" * 30]), max_size=12
    )
)
@settings(max_examples=80)
def test_any_words_are_a_plan_or_an_input_error(words):
    try:
        plan, _ = plan_of_megatron(" ".join(words), cluster=cluster("dgx-a100:128"))
    except InputError:
        return
    assert check(plan) == []


# --- DeepSpeed ---


@pytest.fixture
def config(tmp_path):
    def write(**values):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(values, indent=1), encoding="utf-8")
        return path

    return write


def deepspeed(path, on="dgx-h100:4", **options):
    return plan_of_deepspeed(path, model=model(), cluster=cluster(on), options=options)


@pytest.mark.parametrize("name", ["plain", "full sharding", "kept", "zero1", "fp16", "bf16 gradients"])
def test_configs_we_write_are_read_back_as_the_plan(name, tmp_path):
    plan = SAME[name]
    path = tmp_path / "ds.json"
    path.write_text(export(plan, "deepspeed").text, encoding="utf-8")
    others = {
        "pp": plan.layout.pp,
        "recompute": plan.recompute.value,
        "sequence_parallel": plan.layout.sequence_parallel,
    }
    back, ignored = deepspeed(path, **others)
    assert ignored == []
    overlap = plan.stack.gradient_overlap and name not in ("plain", "fp16", "bf16 gradients")  # ZeRO alone overlaps
    assert back == replace(plan, stack=replace(plan.stack, gradient_overlap=overlap))


def test_what_a_hugging_face_config_leaves_open_comes_from_options(config):
    path = config(
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        zero_optimization={"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
        bf16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
    )
    plan, ignored = deepspeed(path, global_batch=64, microbatch=2)
    assert ignored == []
    assert (plan.layout.global_batch, plan.layout.microbatch, plan.choice.shard) == (64, 2, 32)
    assert plan.precision.compute is DType.FP32


BATCHES = [
    ({"train_batch_size": 64}, (64, 2)),
    ({"train_micro_batch_size_per_gpu": 4}, (128, 4)),
    ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, (384, 4)),
    ({"train_batch_size": 192, "train_micro_batch_size_per_gpu": 2}, (192, 2)),
    ({"train_batch_size": 192, "gradient_accumulation_steps": 2}, (192, 3)),
]


@pytest.mark.parametrize(("values", "batch"), BATCHES)
def test_two_of_three_numbers_give_the_third(values, batch, config):
    plan, _ = deepspeed(config(**values))
    assert (plan.layout.global_batch, plan.layout.microbatch) == batch


def test_deepspeed_would_give_the_same_batch(monkeypatch):
    import deepspeed.comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 32)
    for values, batch in BATCHES:
        theirs = DeepSpeedConfig(dict(values))
        assert (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu) == batch


ONE = {"train_micro_batch_size_per_gpu": 1}
WRONG = {
    "product": (
        {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
        ("train_batch_size", "2 x gradient_accumulation_steps 1 x 32 replicas = 64"),
    ),
    "no multiple": (ONE | {"train_batch_size": 100}, ("train_batch_size", "x some gradient_accumulation_steps x 32")),
    "nothing": ({}, ("train_micro_batch_size_per_gpu", "missing")),
    "stage": (ONE | {"zero_optimization": {"stage": 4}}, ("zero_optimization.stage", "from 0 to 3")),
    "formats": (ONE | {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ("fp16", "refuses both")),
    "words": (ONE | {"communication_data_type": "fp23"}, ("communication_data_type", "one of the possible values")),
    "groups": (
        ONE | {"zero_optimization": {"stage": 3, "mics_shard_size": 5}},
        ("zero_optimization.mics_shard_size", "must divide the 32 replicas"),
    ),
    "true": ({"train_batch_size": True}, ("train_batch_size", "must be a whole number")),
    "shape": ({"zero_optimization": 3, **ONE}, ("zero_optimization", "must be a mapping")),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_configs_are_named_with_line_and_rule(name, config):
    values, (key, rule) = WRONG[name]
    with pytest.raises(InputError) as caught:
        deepspeed(config(**values))
    found = {problem.key: problem for problem in caught.value.problems}
    assert key in found
    assert rule in found[key].rule
    assert "ds.json:" in found[key].where


def test_options_may_not_contradict_a_config(config):
    with pytest.raises(InputError, match="--global-batch says 64"):
        deepspeed(config(train_batch_size=128), global_batch=64)
    with pytest.raises(InputError, match="--tp says 4"):
        deepspeed(config(tensor_parallel={"autotp_size": 2}, **ONE), tp=4)


def test_a_pipeline_takes_no_stage_above_1(config):
    with pytest.raises(InputError, match="pipelines run with stages 0 and 1"):
        deepspeed(config(zero_optimization={"stage": 2}, **ONE), pp=4)


def test_groups_and_offloading(config):
    zero = {"stage": 3, "mics_shard_size": 8, "offload_optimizer": {"device": "cpu"}, "zero_hpz_partition_size": 1}
    plan, ignored = deepspeed(config(zero_optimization=zero, zero_optimisation={}, **ONE))
    assert plan.choice.shard == 8
    assert len(ignored) == 2
    assert "nearest is zero_optimization" in ignored[0]
    assert "zero_optimization.offload_optimizer" in ignored[1]


# --- the command ---


def said(ran):
    """What stands on stderr, without the progress that a slow machine makes a search tell."""
    return [line for line in ran.err.splitlines() if not line.startswith("progress: ")]


def test_megatron_flags_are_priced(run):
    text = f"{GPT3} --moe-grouped-gemm"
    ran = run("simulate", "--megatron", text, "--cluster", "dgx-a100:128", "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert (found["model"], found["devices"]) == ("megatron-96x12288", 1024)
    assert said(ran) == ["ignored: --moe-grouped-gemm: known to Megatron-LM, but not priced here"]


def test_a_deepspeed_config_is_priced(run, config):
    path = str(config(zero_optimization={"stage": 3}, bf16={"enabled": True}, **ONE))
    options = ("--model", "llama2-7b", "--cluster", "dgx-h100:4", "--seq-len", "2048", "--recompute", "full")
    ran = run("simulate", "--deepspeed", path, *options, "--json")
    assert (ran.code, said(ran)) == (0, [])
    assert json.loads(ran.out)["algorithms"] == {"sharding": "ring"}


REFUSED = [
    (("--megatron", GPT3), "--cluster"),
    (("--megatron", GPT3, "--cluster", "dgx-a100:128", "--tp", "4"), "--tp"),
    (("--megatron", GPT3, "--cluster", "dgx-a100:128", "--deepspeed", "ds.json"), "--deepspeed"),
    (("--deepspeed", "ds.json", "--cluster", "dgx-a100:128"), "--model"),
    (("--deepspeed", "none.json", "--cluster", "dgx-a100:128", "--model", "llama2-7b"), "none.json"),
    (("--deepspeed", "ds.json", "--cluster", "dgx-a100:1", "--model", "llama2-7b", "--zero1"), "--zero1"),
    (("--deepspeed", "ds.json", "--cluster", "dgx-a100:1", "--model", "llama2-7b", "--pp", "0"), "--pp"),
    (("--deepspeed", "ds.json", "--cluster", "dgx-a100:1", "--model", "llama2-7b", "--cut", "a"), "--cut"),
]


@pytest.mark.parametrize(("options", "blamed"), REFUSED)
def test_options_that_mean_nothing_there_are_refused(options, blamed, run):
    ran = run("simulate", *options)
    assert ran.code == 2
    assert ran.err.startswith(f"error: {blamed}")
