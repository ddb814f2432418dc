"""Every target on several plans, read by the target's own parser where there is one; nothing is dropped silently."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent))
from valid import a_plan, cluster, model, named, plans

from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.model import Run, load_model
from wavetrain.plan import EVERY, Choice, OperatorChoice, Precision, Recompute, Stack, write_plan
from wavetrain.plan.check import check
from wavetrain.plan.export import EXPORTERS, export
from wavetrain.plan.export.features import FEATURES
from wavetrain.plan.flags.words import NO_BEARING, READ
from wavetrain.plan.stack import AttentionImpl, Fusion
from wavetrain.schedule.schedules import SCHEDULES

Q, UP = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.up_proj"
FLAT = {"tp": 1, "pp": 1, "dp": 32}
PLANS = {
    "fsdp": a_plan(**FLAT, choice=Choice(shard=32)),
    "zero2": a_plan(**FLAT, choice=Choice(shard=32, keep=True), recompute=Recompute.FULL),
    "hsdp": a_plan(**FLAT, choice=Choice(shard=8)),
    "plain": a_plan(**FLAT),
    "zero1": a_plan(shard_optimizer=True, sequence_parallel=True, recompute=Recompute.SELECTIVE),
    "interleaved": a_plan(schedule="interleaved", chunks=2, tp=4, dp=2, shard_optimizer=True),
    "waves": a_plan(schedule="wave", waves=2),
    "one wave": a_plan(schedule="wave", choice=Choice(shard=4)),
    "mixed": a_plan(
        **FLAT,
        choice=Choice(shard=32),
        choices=(
            OperatorChoice("decoder", Q, Choice(shard=1), first=0, count=16),
            OperatorChoice("decoder", UP, Choice(shard=8, keep=True, slices=4)),
            OperatorChoice("decoder", EVERY, Choice(shard=8), first=20, count=2),
        ),
    ),
    "uneven": a_plan(cut=(7, 9, 9, 7)),
    "very uneven": a_plan(schedule="interleaved", chunks=2, cut=(5, 4, 4, 3, 4, 4, 4, 4)),
    "inside": a_plan(pp_inside=True),
    "few microbatches": a_plan(schedule="interleaved", chunks=2, global_batch=24),
    "fewer": a_plan(global_batch=16),
    "odd rounds": a_plan(schedule="interleaved", chunks=2, global_batch=72),
    "context": a_plan(cp=2, dp=2, pp_inside=True, choice=Choice(shard=2)),
    "zero bubble": a_plan(schedule="zb-h1", precision=Precision(products=DType.FP8, gradients=DType.BF16)),
    "chimera": a_plan(schedule="chimera"),
    "gpt": a_plan(model=load_model("gpt3-125m"), **FLAT, seq_len=2048, stack=Stack(attention=AttentionImpl.TRITON)),
    "experts": a_plan(model=load_model("mixtral-8x7b"), stack=Stack(elementwise=Fusion.EAGER, norm=Fusion.EAGER)),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def notes(plan, target):
    return " | ".join(export(plan, target).not_expressed)


@every_plan
def test_the_plans_are_sound(plan):
    assert check(plan) == []


@every_plan
@pytest.mark.parametrize("target", EXPORTERS)
def test_what_is_not_expressed_is_in_the_text_where_it_has_comments(plan, target):
    found = export(plan, target)
    assert found.target == target
    assert found.text.endswith("\n")
    assert len(set(found.not_expressed)) == len(found.not_expressed)
    if target not in ("deepspeed", "pytorch-pipeline-csv"):
        assert re.findall(r"^# not expressed: (.*)$", found.text, re.MULTILINE) == list(found.not_expressed)


@given(plans())
@settings(max_examples=25)
def test_any_plan_can_be_exported_and_features_never_fail(plan):
    if plan.layout.num_microbatches * len(plan.cut) < 2000:  # a schedule is written out action by action
        for target in EXPORTERS:
            assert export(plan, target).text
    assert all(isinstance(said(plan), str) for said in FEATURES.values())


@pytest.mark.parametrize("target", EXPORTERS)
def test_models_that_are_no_transformer_of_ours_are_exported_too(target):
    traced = replace(model(), architecture=None)
    assert export(a_plan(model=traced), target).text
    whole = replace(traced, layers=model().layers[1:2], order=(Run("decoder", 32),))  # it has no ends
    assert export(a_plan(model=whole, **FLAT, choice=Choice(shard=32)), target).text


def test_a_name_with_a_line_break_stays_a_comment():
    plan = a_plan(model=replace(model(), name="a\n--evil"))
    for target in ("megatron", "torchtitan", "slurm", "accelerate", "fsdp2"):
        assert not [line for line in export(plan, target).text.splitlines() if line.startswith("--evil")]


SAID = {
    ("waves", "megatron"): "Megatron-LM has no wave schedule, nearest is interleaved, 4 stages per rank",
    ("waves", "torchtitan"): "places stages in a loop or in one V, nearest is Interleaved1F1B",
    ("one wave", "torchtitan"): "it is in schedule.csv",
    ("one wave", "megatron"): "Megatron-FSDP does not promise",
    ("mixed", "deepspeed"): "q_proj of blocks 0 to 15: shard 1; model.layers.{}.mlp.up_proj: shard 8, kept, 4 slices",
    ("mixed", "fsdp2"): "up to 4 slices",
    ("hsdp", "deepspeed"): "groups of 8 replicas exactly",
    ("zero2", "megatron"): "optim_grads has them whole",
    ("zero2", "deepspeed"): "stage 2 has them whole",
    ("uneven", "deepspeed"): "layers per stage 7, 9, 9, 7",
    ("uneven", "accelerate"): "a pipeline of 4 ranks",
    ("inside", "torchtitan"): "ranks numbered tp, pp, cp, dp",
    ("context", "megatron"): "--use-tp-pp-dp-mapping numbers tp, cp, pp, dp",
    ("zero bubble", "megatron"): "schedule zb-h1; Megatron-LM has no such schedule, nearest is 1F1B",
    ("zero bubble", "torchtitan"): "gradients in bf16; torchtitan reduces in float32",
    ("odd rounds", "torchtitan"): "the order interleaved in this file; it is in schedule.csv",
    ("fewer", "torchtitan"): "the order 1f1b in this file",
    (
        "few microbatches",
        "megatron",
    ): "3 microbatches in an interleaved schedule; Megatron-LM asks for a multiple of pp 4",
    ("one wave", "deepspeed"): "stage 3 in a pipeline; DeepSpeed's run with stages 0 and 1",
    ("zero1", "torchtitan"): "ZeRO-1",
    ("zero1", "accelerate"): "selective recomputation",
    ("chimera", "torchtitan"): "no second copy of the model",
    ("chimera", "pytorch-pipeline-csv"): "2 copies of the model",
    ("gpt", "megatron"): "attention kernel flash-triton",
    ("waves", "accelerate"): "they are replicas here",
    ("plain", "slurm"): "time limit, partition and account",
}


@pytest.mark.parametrize(("name", "target"), list(SAID))
def test_what_a_target_lacks_is_said(name, target):
    assert SAID[name, target] in notes(PLANS[name], target)


def test_what_is_expressed_is_not_said():
    assert notes(PLANS["interleaved"], "megatron") == ""
    assert notes(PLANS["inside"], "megatron") == ""
    assert notes(PLANS["uneven"], "megatron") == ""
    assert notes(PLANS["waves"], "torchrun") == ""
    assert "accumulation" not in notes(PLANS["fsdp"], "accelerate")


# --- each target ---


def toml(name):
    return tomllib.loads(export(PLANS[name], "torchtitan").text)


# job_config.py of torchtitan 0.2.2, whose own ConfigManager has read these files
TITAN = {
    "training": "local_batch_size global_batch_size seq_len mixed_precision_param mixed_precision_reduce",
    "parallelism": """data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward
        tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree
        module_fqns_per_model_part pipeline_parallel_schedule pipeline_parallel_schedule_csv
        pipeline_parallel_microbatch_size context_parallel_degree""",
    "activation_checkpoint": "mode selective_ac_option",
    "model": "converters",
    "quantize": "linear",
    "compile": "enable components",
}


@pytest.mark.parametrize("name", PLANS)
def test_torchtitan_knows_every_key(name):
    for section, values in toml(name).items():
        assert set(values) <= set(TITAN[section].split())


@pytest.mark.parametrize("name", PLANS)
def test_torchtitan_gets_degrees_that_fill_the_world_and_every_layer_once(name):
    plan, found = PLANS[name], toml(name)["parallelism"]
    degrees = [value for key, value in found.items() if key.endswith("_degree")]
    product = 1
    for degree in degrees:
        product *= degree
    assert product == plan.layout.num_devices
    if plan.layout.pp > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        assert get_schedule_class(found["pipeline_parallel_schedule"])
        parts = [name for part in found["module_fqns_per_model_part"] for name in part]
        layers = [f"layers.{number}" for number in range(plan.model.num_blocks)]
        assert parts == ["tok_embeddings", *layers, "norm", "output"]


def test_torchtitan_in_full():
    found = toml("one wave")
    assert found["parallelism"]["pipeline_parallel_schedule_csv"] == "schedule.csv"
    assert found["parallelism"]["pipeline_parallel_schedule"] == "ZBVZeroBubble"  # placed as a V
    assert found["training"]["local_batch_size"] == 16
    assert found["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert toml("hsdp")["parallelism"]["data_parallel_replicate_degree"] == 4
    assert toml("hsdp")["training"]["local_batch_size"] == 2
    assert toml("zero2")["parallelism"]["fsdp_reshard_after_forward"] == "never"
    assert toml("zero2")["activation_checkpoint"] == {"mode": "full"}
    assert toml("zero bubble")["quantize"]["linear"]["float8"] == {"recipe_name": "tensorwise"}


def megatron_flags(plan):
    text = export(plan, "megatron").text
    words = shlex.split(text, comments=True)
    begin = words.index("MEGATRON_ARGS=(")
    assert words[:begin] in ([], ["export", "CUDA_DEVICE_MAX_CONNECTIONS=1"])
    assert words[-1] == ")"
    return words[begin + 1 : -1]


@every_plan
def test_megatron_has_only_flags_it_knows_and_bash_reads_them(plan):
    flags = [word.removeprefix("--") for word in megatron_flags(plan) if word.startswith("--")]
    assert len(set(flags)) == len(flags)
    assert set(flags) <= {*READ, *NO_BEARING}
    subprocess.run(["bash", "-n"], input=export(plan, "megatron").text, text=True, check=True)


def test_megatron_cuts():
    def flag(name, of):
        words = megatron_flags(PLANS[of])
        return words[words.index(f"--{name}") + 1]

    assert flag("decoder-first-pipeline-num-layers", "uneven") == "7"
    assert flag("num-virtual-stages-per-pipeline-rank", "interleaved") == "2"
    assert flag("pipeline-model-parallel-layout", "very uneven") == "Et*5|t*4|t*4|t*3|t*4|t*4|t*4|t*4L"
    assert flag("num-distributed-optimizer-instances", "hsdp") == "4"


@every_plan
def test_deepspeed_reads_its_config(plan, monkeypatch):
    import deepspeed.comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: plan.layout.dp)  # it checks the batch against it
    found = DeepSpeedConfig(json.loads(export(plan, "deepspeed").text))
    assert found.world_size == plan.layout.dp
    assert found.train_batch_size == plan.layout.global_batch
    assert found.gradient_accumulation_steps == plan.layout.num_microbatches
    assert found.bfloat16_config.enabled


def test_deepspeed_stages():
    stages = {name: json.loads(export(PLANS[name], "deepspeed").text)["zero_optimization"] for name in PLANS}
    found = {name: zero["stage"] for name, zero in stages.items()}
    assert (found["plain"], found["zero1"], found["zero2"], found["fsdp"], found["hsdp"]) == (0, 1, 2, 3, 3)
    assert stages["hsdp"]["zero_hpz_partition_size"] == 8


@every_plan
def test_accelerate_reads_its_config(plan, tmp_path):
    from accelerate import ParallelismConfig
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = tmp_path / "accelerate.yaml"
    path.write_text(export(plan, "accelerate").text, encoding="utf-8")
    found = load_config_from_file(str(path))
    assert found.num_processes == plan.layout.num_devices
    options = vars(launch_command_parser().parse_args(["script.py"]))
    assert {*found.fsdp_config, *found.parallelism_config} <= set(options)
    if found.parallelism_config:
        prefix = "parallelism_config_"
        sizes = {key.removeprefix(prefix): value for key, value in found.parallelism_config.items()}
        sizes.pop("cp_comm_strategy", None)
        assert ParallelismConfig(**sizes).total_size == found.num_processes


def test_accelerate_in_full():
    found = yaml.safe_load(export(PLANS["hsdp"], "accelerate").text)
    assert (found["distributed_type"], found["mixed_precision"], found["num_machines"]) == ("FSDP", "bf16", 4)
    assert found["parallelism_config"]["parallelism_config_dp_replicate_size"] == 4
    assert yaml.safe_load(export(PLANS["plain"], "accelerate").text)["distributed_type"] == "MULTI_GPU"
    assert not yaml.safe_load(export(PLANS["zero2"], "accelerate").text)["fsdp_config"]["fsdp_reshard_after_forward"]


@every_plan
def test_pytorch_reads_the_schedule(plan, tmp_path):
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _simulate_comms_compute

    path = tmp_path / "schedule.csv"
    path.write_text(export(plan, "pytorch-pipeline-csv").text, encoding="utf-8")
    placement = SCHEDULES[plan.layout.schedule].placement(plan.shape)
    if placement.chains > 1:  # PyTorch has no word for two copies of a model
        return
    runtime = object.__new__(_PipelineScheduleRuntime)  # stages need processes; parsing, checking and lowering do not
    runtime.pipeline_order, runtime._stages, runtime._defer_pp_recv = {}, [], False
    runtime._num_stages, runtime.pp_group_size = placement.num_stages, plan.layout.pp
    runtime._n_microbatches = plan.layout.num_microbatches
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == dict(enumerate(placement.ranks))
    written = [[str(action) for action in row] for row in SCHEDULES[plan.layout.schedule].order(plan.shape).ranks]
    assert [[str(action) for action in row] for row in runtime.pipeline_order.values()] == written
    sharding = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # the dry run knows computing and messages
    lowered = {
        rank: [action for action in row if not str(action).endswith(sharding)]
        for rank, row in runtime.pipeline_order_with_comms.items()
    }
    _simulate_comms_compute(lowered, runtime.stage_index_to_group_rank.__getitem__, placement.num_stages)


@every_plan
def test_torchrun_reads_its_command(plan):
    from torch.distributed.run import get_args_parser

    words = shlex.split(export(plan, "torchrun").text, comments=True)
    assert words[:2] == ["OMP_NUM_THREADS=1", "torchrun"]
    found = get_args_parser().parse_args(words[2:])
    assert int(found.nnodes) * int(found.nproc_per_node) == plan.layout.num_devices
    assert (found.module, found.training_script, found.training_script_args) == (
        True,
        "wavetrain",
        ["train", "plan.json"],
    )
    assert found.rdzv_backend == "c10d"


def test_one_node_meets_itself():
    plan = a_plan(cluster=cluster("dgx-h100:1"), tp=1, pp=1, dp=8)
    assert "--standalone" in export(plan, "torchrun").text
    assert "scontrol" not in export(plan, "slurm").text


@every_plan
def test_slurm_is_a_script(plan):
    text = export(plan, "slurm").text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in text


def test_slurm_asks_for_no_gpus_where_there_are_none():
    on = cluster("cpu-host:1")
    plan = a_plan(cluster=on, tp=1, pp=1, dp=on.num_devices)
    assert "gpus" not in export(plan, "slurm").text


# --- fully_shard, run with collectives that do nothing ---


@pytest.fixture
def fake_world():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=32)
    yield
    dist.destroy_process_group()


def sharded(plan, layers):
    """The tiny Llama, sharded by the script of a plan whose blocks are cut to as many."""
    from tiny import Llama

    scope = {"__name__": "sharded"}
    exec(compile(export(plan, "fsdp2").text, "sharded.py", "exec"), scope)
    return scope["shard"](Llama(layers), device_type="cpu"), scope


SHARDED = ("fsdp", "zero2", "hsdp", "plain", "mixed")


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", SHARDED)
def test_fully_shard_does_as_the_plan_says(name):
    import torch

    plan = replace(PLANS[name], precision=Precision(compute=DType.FP32, products=DType.FP32))
    module, _ = sharded(plan, plan.model.num_blocks)
    for path, parameter in module.named_parameters():
        assert group_of(parameter) == expected_group(plan, path), path
    module(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    state = module.model.layers[0]._get_fsdp_state()._fsdp_param_group
    assert (state.post_forward_mesh_info is None) == plan.blocks[0].choice.keep


def group_of(parameter):
    mesh = parameter.device_mesh
    return mesh.size(mesh.ndim - 1)


def expected_group(plan, path):
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", path)
    if found is None:
        return plan.choice.shard
    return plan.blocks[int(found[1])].of(f"model.layers.{{}}.{found[2]}").shard


@pytest.mark.usefixtures("fake_world")
def test_fully_shard_takes_a_stage_of_a_pipeline():
    plan = replace(PLANS["one wave"], precision=Precision(compute=DType.FP32, products=DType.FP32))
    module, scope = sharded(plan, 3)
    assert scope["DEGREES"] == {"pp": 4, "dp": 4, "cp": 1, "tp": 2}
    assert {group_of(parameter) for parameter in module.parameters()} == {4}


@every_plan
def test_the_script_compiles_and_names_parameters_that_exist(plan):
    scope = {"__name__": "sharded"}
    exec(compile(export(plan, "fsdp2").text, "sharded.py", "exec"), scope)
    names = {p.name for layer in plan.model.layers for o in layer.operators for p in o.parameters}
    for modules, blocks, group, _ in scope["UNITS"]:
        assert plan.layout.dp % group == 0
        assert blocks
        assert all(any(name.startswith(f"{path}.") for name in names) for path in modules)


def test_tied_weights_stay_in_one_unit():
    units = export(PLANS["gpt"], "fsdp2").text
    assert "embedding.tokens" not in units


def test_recomputed_operators_are_named():
    plan = a_plan(**FLAT, choices=named(Q, shard=1, recompute=True))
    assert "(('model.layers.{}.self_attn.q_proj',), range(0, 32))" in export(plan, "fsdp2").text


# --- the command ---


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(write_plan(PLANS["waves"]), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("target", EXPORTERS)
def test_the_command_prints_text_and_says_the_rest(run, file, target):
    ran = run("export", file, "--to", target)
    found = export(PLANS["waves"], target)
    assert (ran.code, ran.out) == (0, found.text)
    assert ran.err.splitlines() == [f"not expressed: {note}" for note in found.not_expressed]


def test_the_command_writes_a_file_and_a_document(run, file, tmp_path):
    path = tmp_path / "train.toml"
    ran = run("export", file, "--to", "torchtitan", "-o", str(path), "--json")
    document = json.loads(ran.out)
    assert document["schema"] == "wavetrain.export/1"
    assert document["target"] == "torchtitan"
    assert document["text"] == path.read_text()
    assert document["not_expressed"] == list(export(PLANS["waves"], "torchtitan").not_expressed)


def test_bad_input_ends_in_2(run, file, tmp_path):
    ran = run("export", file, "--to", "megatrn")
    assert ran.code == 2
    assert "nearest: megatron" in ran.err
    assert run("export", str(tmp_path / "none.json"), "--to", "megatron").code == 2
    assert run("export", file, "--to", "slurm", "-o", str(tmp_path / "no" / "such")).code == 2
    assert run("export", file).code == 2


def test_an_unknown_target_is_an_input_error():
    with pytest.raises(InputError):
        export(PLANS["plain"], "nothing")
