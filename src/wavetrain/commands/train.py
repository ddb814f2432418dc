"""`wavetrain train`: run a plan with PyTorch, here or under torchrun or Slurm."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavetrain.base.errors import InputError, Problem
from wavetrain.commands.replan import gather
from wavetrain.commands.shared import AsJson, one_of, refuse_beside, refuse_without, show
from wavetrain.commands.train_run import job_of, run

if TYPE_CHECKING:
    from wavetrain.plan import Plan

MOST_LOCAL = 512
MOST_STEPS = 1_000_000
CLIP = 1.0


def train(  # noqa: PLR0913, PLR0917 - one option each, as users type them
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    local: Annotated[int | None, typer.Option(help="Start this many processes here.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 10,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Wait as long as predicted instead of computing; messages are real.")
    ] = False,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Emulated ranks on virtual hosts, one per node of the plan; needs root.")
    ] = False,
    transport: Annotated[str, typer.Option(help="Between stages: memory (one host), gloo, or auto.")] = "auto",
    data: Annotated[
        Path | None, typer.Option(help="Tokens (.bin) or any file, as bytes; sequences that count without it.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json: transformers' own modules instead of the built-in ones.")
    ] = None,
    module: Annotated[
        str | None, typer.Option(help="package:function that builds the model: a module that makes logits of tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial values and data; 0.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="AdamW's, at its peak; 0.001.")] = None,
    lr_schedule: Annotated[str | None, typer.Option(help="After warmup: constant, linear or cosine, to 0.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps in which the learning rate rises; 0.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's, of matrices; 0.01.")] = None,
    clip: Annotated[float | None, typer.Option(help="Most that the norm of all gradients may be; 1. 0: any.")] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(help="GiB for a rank's states, gathered parameters, activations; more is an error."),
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Directory where the run's state is kept; a run goes on from the newest there.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: after the last only.")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep; 2.")] = None,
    memory_every: Annotated[
        int | None, typer.Option(help="Steps between copies of the state in this host's and the next one's memory.")
    ] = None,
    memory_dir: Annotated[Path | None, typer.Option(help="Where those are, on each host; /dev/shm.")] = None,
    restarts: Annotated[int, typer.Option(help="Times to start again, from the newest checkpoint, after a fault.")] = 0,
    replan: Annotated[
        bool, typer.Option("--replan", help="With another number of ranks than the plan's: plan again, same batch.")
    ] = False,
    inject: Annotated[
        list[str] | None, typer.Option(help="A fault on purpose: KIND:RANK:STEP:WHEN[:ATTEMPT], as kill:1:3:backward.")
    ] = None,
    hang_floor: Annotated[
        float | None, typer.Option(help="Least seconds without progress that count as a hang; 60, emulated 10.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Directory of a model to begin with, as safetensors that transformers writes.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Directory for the trained model, as safetensors that transformers reads.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Directory for plan, logs and traces.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan: real processes, real messages, the plan's own order of actions."""
    from wavetrain.plan import read_plan

    learning = {"learning_rate": learning_rate, "warmup": warmup, "weight_decay": weight_decay, "clip": clip}
    kept = {"save_every": save_every, "keep": keep, "memory_every": memory_every, "restarts": restarts}
    told = {"local": local, "steps": steps, "seed": seed, "hang_floor": hang_floor, "memory_limit": memory_limit}
    _refuse_numbers(**told, **learning, **kept)
    wanted = read_plan(plan)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported; its warnings are not for users
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # AMX kills processes that may not use it
    _refuse_layout(wanted, emulate=emulate, module=module)
    real = {"data": data, "config": config, "module": module, "seed": seed, "lr_schedule": lr_schedule, **learning}
    real |= {"memory_limit": memory_limit, "load": load, "save": save}
    real |= {"checkpoints": checkpoints, "save_every": save_every, "keep": keep, "replan": replan or None}
    real |= {"memory_every": memory_every, "memory_dir": memory_dir}
    if checkpoints is None:
        refuse_without("--checkpoints", {"--save-every": save_every, "--keep": keep})
    if memory_every is None:
        refuse_without("--memory-every", {"--memory-dir": memory_dir})
    if checkpoints is None and memory_every is None:
        refuse_without("--checkpoints", {"--restarts": restarts or None})
    _refuse_virtual(wanted, local, virtual=virtual, emulate=emulate)
    if emulate:
        refuse_beside("--emulate", {f"--{name.replace('_', '-')}": value for name, value in real.items()})
    from wavetrain.runtime.inject import parse_fault
    from wavetrain.runtime.job import CARRIERS
    from wavetrain.runtime.report import Limits

    carrier = one_of("--transport", transport, CARRIERS)
    wanted, world = gather(wanted, local, restarts=restarts, replan=replan, kept=checkpoints, one_pipeline=emulate)
    ranks = local if world is None else world.size
    more = {"every_rank": ranks != wanted.layout.pp} if emulate else _options(wanted, steps, real)
    faults = tuple(parse_fault(text, where="--inject") for text in inject or ())
    job = job_of(wanted, emulate=emulate, steps=steps, transport=carrier, logs=output, faults=faults, **more)
    if not emulate:
        _refuse_model(wanted, job)
    limits = Limits(step_s=job.step_s, floor_s=hang_floor or (10.0 if emulate else 60.0))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    document = run(job, world, limits, output, restarts=restarts, virtual=virtual)
    if document is None:  # another rank shows it
        return
    from wavetrain.show.train import card

    show(document, card(document), as_json)


def _options(plan: Plan, steps: int, given: dict[str, Any]) -> dict[str, Any]:
    """What users state about learning, as a `Job` has it."""
    from wavetrain.runtime.build import builder
    from wavetrain.runtime.job import NEVER
    from wavetrain.runtime.learn import SCHEDULES, AdamW, Rate

    stated = {name: value for name, value in given.items() if value is not None}
    schedule = one_of("--lr-schedule", stated.get("lr_schedule", "constant"), tuple(SCHEDULES))
    warmup = stated.get("warmup", 0)
    if warmup > steps:
        raise InputError(Problem(where="--warmup", rule=f"{warmup}: must be at most the {steps} steps of the run"))
    limit = stated.get("memory_limit")
    return {
        "seed": stated.get("seed", 0),
        "data": stated.get("data"),
        "load": stated.get("load"),
        "save": stated.get("save"),
        "config": stated.get("config"),
        "source": str(stated.get("config") or stated.get("module") or ""),
        "build": builder(plan, config=stated.get("config"), module=stated.get("module"), seed=stated.get("seed", 0)),
        "rate": Rate(peak=stated.get("learning_rate", 1e-3), schedule=schedule, warmup=warmup, steps=steps),
        "adamw": AdamW(weight_decay=stated.get("weight_decay", AdamW().weight_decay)),
        "clip": stated.get("clip", CLIP) or NEVER,
        "memory_limit": None if limit is None else int(limit * 2**30),
        "checkpoints": stated.get("checkpoints"),
        "save_every": stated.get("save_every", 0),
        "keep": stated.get("keep", 2),
        "memory_every": stated.get("memory_every", 0),
        "memory_dir": stated.get("memory_dir"),
    }


def _refuse_numbers(**given: float | None) -> None:
    """Numbers out of range, all at once."""
    most = {"local": MOST_LOCAL, "steps": MOST_STEPS, "seed": 2**31 - 1, "hang_floor": 86_400.0, "learning_rate": 10.0}
    most |= {"save_every": MOST_STEPS, "keep": 10_000, "memory_every": MOST_STEPS, "restarts": 10_000}
    most |= {"warmup": MOST_STEPS, "weight_decay": 10.0, "clip": 1e9, "memory_limit": 1e6}
    least = {"local": 1, "steps": 1, "seed": 0, "hang_floor": 0.5, "learning_rate": 0.0}
    least |= {"save_every": 0, "keep": 1, "memory_every": 1, "restarts": 0}
    least |= {"warmup": 0, "weight_decay": 0.0, "clip": 0.0, "memory_limit": 1e-6}
    problems = [
        Problem(where=f"--{name.replace('_', '-')}", rule=f"{value}: must be from {least[name]} to {most[name]:,}")
        for name, value in given.items()
        if value is not None and not least[name] <= value <= most[name]
    ]
    if problems:
        raise InputError(problems)


def _refuse_model(plan: Plan, job: Any) -> None:
    """A model that the runtime has no modules for, or data it can't read, is refused here, not by a rank."""
    from wavetrain.base.units import DType
    from wavetrain.runtime.checkpoint import glance
    from wavetrain.runtime.data import open_dataset
    from wavetrain.runtime.imported import check_load
    from wavetrain.runtime.saving import last_step, run_id
    from wavetrain.runtime.units import check_parameters

    done = last_step(job.checkpoints) if job.checkpoints is not None else 0
    if done > job.steps:
        rule = f"{job.steps}: {job.checkpoints} has {done} steps already"
        raise InputError(Problem(where="--steps", rule=rule, remedy=f"--steps {done} or more"))
    parts = job.parts()
    check_parameters({name: tuple(p.shape) for name, p in parts.references()}, plan)
    if job.data is not None:
        open_dataset(job.data, vocab=parts.vocab, seq_len=plan.seq_len)
    if job.checkpoints is not None:
        glance(job.checkpoints, run=run_id(job), tolerant=job.memory_every > 0)
    for note in check_load(job, parts):
        print(note, file=sys.stderr)
    if plan.precision.products is DType.FP8:
        print(f"multiplies in {plan.precision.compute.value}, not in fp8 as the plan says", file=sys.stderr)


def _refuse_virtual(plan: Plan, local: int | None, *, virtual: bool, emulate: bool) -> None:
    """Virtual hosts have all ranks of a plan, as many on each as a node has devices."""
    if not virtual:
        return
    if not emulate:
        refuse_without("--emulate", {"--virtual": virtual})
    needed = plan.layout.num_devices
    if local != needed:
        rule = "virtual hosts have all ranks of a plan, started here"
        raise InputError(Problem(where="--virtual", rule=rule, remedy=f"--local {needed}"))
    if not plan.cluster.is_uniform:
        rule = "virtual hosts are alike, the nodes of the plan's cluster are not"
        raise InputError(Problem(where="--virtual", rule=rule))


def _refuse_layout(plan: Plan, *, emulate: bool, module: str | None) -> None:
    """What the runtime does not do is refused before any process starts."""
    from wavetrain.base.units import DType

    if plan.model.architecture is None and module is None:
        rule, remedy = (
            "is a traced module, which can't be built again from its description",
            "--module package:function",
        )
        raise InputError(Problem(where="plan", key="model", value=plan.model.name, rule=rule, remedy=remedy))
    if emulate:
        return
    layout, problems = plan.layout, []
    if layout.cp != 1:
        rule = "the runtime does not cut sequences over devices"
        problems.append(Problem(where="plan", key="layout.cp", value=layout.cp, rule=rule, legal=("1",)))
    if layout.shard_optimizer:
        rule = "the runtime shards optimizer states with their parameters only"
        remedy = "false, and a choice with a shard above 1"
        problems.append(Problem(where="plan", key="layout.shard_optimizer", value=True, rule=rule, remedy=remedy))
    if plan.precision.compute is DType.FP16:
        rule = "the runtime has no loss scaling, without which fp16 underflows"
        legal = ("bf16", "fp32")
        problems.append(Problem(where="plan", key="precision.compute", value="fp16", rule=rule, legal=legal))
    if problems:
        raise InputError(problems)
