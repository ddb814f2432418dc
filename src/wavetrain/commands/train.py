"""`wavetrain train`: run a plan with PyTorch, here or under torchrun or Slurm."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavetrain.base.errors import InputError, Problem
from wavetrain.commands.shared import AsJson, one_of, refuse_beside, show, write, writing

if TYPE_CHECKING:
    from wavetrain.plan import Plan
    from wavetrain.runtime.trainer import Job
    from wavetrain.trace.timeline import Timeline

MOST_LOCAL = 512
MOST_STEPS = 1_000_000


def train(  # noqa: PLR0913, PLR0917 - one option each, as users type them
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    local: Annotated[int | None, typer.Option(help="Start this many processes here.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 10,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Wait as long as predicted instead of computing; messages are real.")
    ] = False,
    transport: Annotated[str, typer.Option(help="Between stages: memory (one host), gloo, or auto.")] = "auto",
    data: Annotated[
        Path | None, typer.Option(help="Tokens (.bin) or any file, as bytes; sequences that count without it.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial values and data; 0.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="AdamW's; 0.001.")] = None,
    hang_floor: Annotated[
        float | None, typer.Option(help="Least seconds without progress that count as a hang; 60, emulated 10.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Directory for plan, trace and report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan: real processes, real messages, the plan's own order of actions."""
    from wavetrain.plan import read_plan

    _refuse_numbers(local=local, steps=steps, seed=seed, hang_floor=hang_floor, learning_rate=learning_rate)
    wanted = read_plan(plan)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported; its warnings are not for users
    _refuse_layout(wanted, emulate=emulate)
    if emulate:
        refuse_beside("--emulate", {"--data": data, "--learning-rate": learning_rate, "--seed": seed})
    else:
        _refuse_model(wanted, data)
    from wavetrain.runtime.report import Limits
    from wavetrain.runtime.trainer import CARRIERS

    carrier = one_of("--transport", transport, CARRIERS)
    stated = {"seed": seed, "learning_rate": learning_rate, "data": data}
    more = {name: value for name, value in stated.items() if value is not None}
    job = job_of(wanted, emulate=emulate, steps=steps, transport=carrier, **more)
    limits = Limits(step_s=job.step_s, floor_s=hang_floor or (10.0 if emulate else 60.0))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if output is not None:
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
    document = _run(job, local, limits, output)
    if document is None:  # another rank shows it
        return
    from wavetrain.show.train import card

    show(document, card(document), as_json)


def job_of(plan: Plan, *, emulate: bool = False, **more: Any) -> Job:
    """What the ranks need to know, predictions included; `more` is what `Job` has beside them."""
    from wavetrain.plan.layout import Recompute
    from wavetrain.runtime.chunk import Durations
    from wavetrain.runtime.trainer import Job
    from wavetrain.schedule import add_communication, add_recomputation
    from wavetrain.sim.predict import simulate, to_run

    actions, times = to_run(plan)
    if plan.recompute is Recompute.FULL and not emulate:
        actions = add_recomputation(actions, range(actions.placement.num_stages))
    return Job(
        plan=plan,
        actions=add_communication(actions),
        emulated=tuple(Durations(t.f, t.i, t.w) for t in times) if emulate else None,
        step_s=simulate(plan).step_s,
        **more,
    )


def _run(job: Job, local: int | None, limits: Any, output: Path | None) -> dict[str, Any] | None:
    """The document of a run that ended well, on the rank or in the process that is to show it."""
    from wavetrain.runtime.launch import run_local, run_rank
    from wavetrain.runtime.trainer import train as train_rank
    from wavetrain.runtime.world import World, place_from_environment

    made: dict[str, Any] = {}

    def work(world: World) -> None:
        records = train_rank(job, world)
        if world.rank == 0:
            made.update(_document(job, records, output))
            world.give(json.dumps(made).encode())

    ranks = job.actions.num_ranks
    place = None if local is not None else place_from_environment(os.environ)
    given = local if local is not None else place.size if place else None
    if given is None:
        rule, remedy = "missing, and neither torchrun nor Slurm has started this process", f"--local {ranks}"
        raise InputError(Problem(where="--local", rule=rule, remedy=remedy))
    if given != ranks:
        rule = f"{given}: the plan runs on {ranks} ranks"
        raise InputError(Problem(where="--local" if local else "WORLD_SIZE", rule=rule, legal=(str(ranks),)))
    if place is not None:
        code = run_rank(work, place, limits=limits, actions=job.actions, report_dir=output)
    else:
        outcome = run_local(work, ranks, limits=limits, actions=job.actions, report_dir=output)
        code = outcome.exit_code
        made.update(json.loads(outcome.results[0] or b"{}"))
    if code:
        raise SystemExit(code)
    return made or None


def _document(job: Job, records: dict[int, Any], output: Path | None) -> dict[str, Any]:
    """What happened, beside what was predicted; the files of the run where they are wanted."""
    from wavetrain.base.codec import dumps
    from wavetrain.runtime.record import timeline_of
    from wavetrain.sim.predict import simulate
    from wavetrain.sim.replay import idle_share, replay

    measured = timeline_of(
        {rank: record.moments for rank, record in records.items()},
        static_bytes={rank: record.static_bytes for rank, record in records.items()},
    )
    predicted, ideal = simulate(job.plan), replay(job.actions, measured)
    seconds = step_seconds([record.step_ends_s for record in records.values()]) or measured.duration_s
    tokens = job.plan.layout.global_batch * job.plan.seq_len
    parts = [record.losses for record in records.values() if record.losses]  # two copies of a model, two ranks
    losses = [sum(step) for step in zip(*parts, strict=True)]
    document = {
        "schema": "wavetrain.train/1",
        "ranks": len(records),
        "steps": job.steps,
        "emulated": job.emulated is not None,
        "step_s": seconds,
        "timeline_s": measured.duration_s,
        "tokens_per_s": tokens / seconds,
        "losses": losses,
        "bubble_fraction": idle_share(measured),
        "peak_bytes": [int(measured.peak(rank, "memory_bytes")) for rank in measured.ranks],
        "predicted": {
            "step_s": pipeline_seconds(job) or predicted.step_s,
            "bubble_fraction": predicted.bubble_fraction,
        },
        "replayed": {"step_s": ideal.duration_s, "bubble_fraction": idle_share(ideal)},
        "files": [],
    }
    if output is not None:
        expected = predicted.timeline if job.emulated else ideal
        document["files"] = _write_files(output, job, measured, expected)
        write(output / "run.json", dumps(document))
    return document


def _write_files(output: Path, job: Job, measured: Timeline, expected: Timeline) -> list[str]:
    """The files of a run; `expected` is what was predicted or, of a real run, follows from its own action times."""
    from wavetrain.plan.read import write_plan
    from wavetrain.schedule import write_text
    from wavetrain.trace.chrome import write_chrome
    from wavetrain.trace.picture import svg

    names = ("predicted" if job.emulated else "replayed", "measured")
    write(output / "plan.json", write_plan(job.plan))
    write(output / "actions.txt", write_text(job.actions))
    for name, timeline in zip(names, (expected, measured), strict=True):
        write_chrome(timeline, output / f"{name}.json")
    title = f"{job.plan.model.name}, {job.plan.layout.schedule}: one step on {job.actions.num_ranks} ranks"
    write(output / "timelines.svg", svg(expected, measured, names=names, title=title))
    written = ("plan.json", "actions.txt", *(f"{name}.json" for name in names), "timelines.svg")
    return [str(output / name) for name in written]


def pipeline_seconds(job: Job) -> float | None:
    """What the pipeline alone takes with the times that are emulated: no optimizer, no other replicas."""
    from wavetrain.schedule import Costs, evaluate

    if job.emulated is None:
        return None
    f, i, w = (tuple(getattr(durations, kind) for durations in job.emulated) for kind in "fiw")
    return float(evaluate(job.actions, Costs(f, i, w)).makespan)


def step_seconds(ends: list[list[float]]) -> float | None:
    """From one step to the next, by when the last rank ended each: the median; None of a single step."""
    from itertools import pairwise
    from statistics import median

    latest = [max(step) for step in zip(*ends, strict=True)]
    return median(b - a for a, b in pairwise(latest)) if len(latest) > 1 else None


def _refuse_numbers(**given: float | None) -> None:
    """Numbers out of range, all at once."""
    most = {"local": MOST_LOCAL, "steps": MOST_STEPS, "seed": 2**31 - 1, "hang_floor": 86_400.0, "learning_rate": 10.0}
    least = {"local": 1, "steps": 1, "seed": 0, "hang_floor": 0.5, "learning_rate": 0.0}
    problems = [
        Problem(where=f"--{name.replace('_', '-')}", rule=f"{value}: must be from {least[name]} to {most[name]:,}")
        for name, value in given.items()
        if value is not None and not least[name] <= value <= most[name]
    ]
    if problems:
        raise InputError(problems)


def _refuse_model(plan: Plan, data: Path | None) -> None:
    """A model that the runtime has no modules for, or data it can't read, is refused here, not by a rank."""
    from wavetrain.base.units import DType
    from wavetrain.runtime.data import open_dataset
    from wavetrain.runtime.transformer import parts_of

    parts = parts_of(plan.model)
    if data is not None:
        open_dataset(data, vocab=parts.vocab, seq_len=plan.seq_len)
    if plan.precision.compute is not DType.FP32:
        print(f"computes in fp32, not {plan.precision.compute.value} as the plan says", file=sys.stderr)


def _refuse_layout(plan: Plan, *, emulate: bool) -> None:
    """What the runtime does not do yet is refused before any process starts."""
    from wavetrain.plan.layout import Recompute

    if plan.model.architecture is None:
        rule = "is a traced module, which the runtime can't build again"
        raise InputError(Problem(where="plan", key="model", value=plan.model.name, rule=rule))
    if emulate:
        return
    layout, rule = plan.layout, "the runtime runs pipelines so far: this must be 1"
    problems = [
        Problem(where="plan", key=f"layout.{name}", value=value, rule=rule)
        for name, value in (("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp))
        if value != 1
    ]
    if plan.recompute is Recompute.SELECTIVE:
        rule = "the runtime recomputes nothing or whole stages so far"
        problems.append(Problem(where="plan", key="recompute", value="selective", rule=rule, legal=("none", "full")))
    if problems:
        raise InputError(problems)
