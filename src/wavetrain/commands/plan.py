"""`wavetrain plan`: search, print a card, write the plan; or prove the certificate of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavetrain.base.errors import InputError, Problem
from wavetrain.commands.progress import progress
from wavetrain.commands.shared import CHECK_FAILED, INFEASIBLE, AsJson, options_given, refuse_beside, show, write

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wavetrain.plan import Plan
    from wavetrain.planner.question import Question
    from wavetrain.planner.search import Answer

LEAST_RESCUE_S = 2.0  # a search that was cut short must not be mistaken for one that found nothing


def plan(  # noqa: PLR0913, PLR0917 - one option each, as users type them
    model: Annotated[str | None, typer.Argument(help="Model: a name or a file.")] = None,
    cluster: Annotated[str | None, typer.Argument(help="Cluster: dgx-h100:4, or a file.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Sequence length; the model's own.")] = None,
    objective: Annotated[str | None, typer.Option(help="throughput, cost, energy, devices or batch.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on: 1T, 300B.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Time for them: 30d, 12h.")] = None,
    headroom: Annotated[str | None, typer.Option(help="Share of memory to leave free: 10%.")] = None,
    power_cap: Annotated[str | None, typer.Option(help="Most that all devices may draw: 500kW.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Families: ddp, zero1, zero2, fsdp, hsdp, megatron, wave ...")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    sequence_parallel: Annotated[bool | None, typer.Option(help="Cut the rest along the sequence too.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks.")] = None,
    devices: Annotated[int | None, typer.Option(help="Devices to use.")] = None,
    microbatch: Annotated[int | None, typer.Option(help="Sequences per microbatch.")] = None,
    schedule: Annotated[str | None, typer.Option(help="1f1b, gpipe, interleaved, wave, zb-h1 ...")] = None,
    waves: Annotated[int | None, typer.Option(help="Waves of a wave schedule.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages per rank of an interleaved one.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full.")] = None,
    shard: Annotated[str | None, typer.Option(help="Shard parameters over N replicas, dp, node or none.")] = None,
    keep: Annotated[bool | None, typer.Option(help="Keep gathered parameters until the backward.")] = None,
    zero1: Annotated[bool | None, typer.Option("--zero1/--no-zero1", help="Shard optimizer states only.")] = None,
    attention: Annotated[str | None, typer.Option(help="flash2, flash-cudnn, unfused-torch ...; flash2.")] = None,
    elementwise: Annotated[str | None, typer.Option(help="fused, compiled or eager; fused.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp8; what the device has.")] = None,
    gradients: Annotated[str | None, typer.Option(help="Format gradients are reduced in; fp32.")] = None,
    overlap: Annotated[
        str | None, typer.Option(help="Of gradients,tensor,messages or none; as the cluster has it.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds; then the best so far, as after Ctrl-C.")] = None,
    no_mix: Annotated[bool | None, typer.Option("--no-mix", help="The same choice for all blocks.")] = None,
    frontier: Annotated[bool | None, typer.Option("--frontier", help="Also plans that need less.")] = None,
    verify: Annotated[Path | None, typer.Option(help="Prove the certificate of a plan file instead.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the best plan for a model on a cluster, and prove that it is."""
    given = options_given(locals(), without=("model", "cluster", "verify", "as_json"))
    named = {"MODEL": model, "CLUSTER": cluster}
    from wavetrain.commands.asked import question_of, seconds_of

    if verify is not None:
        refuse_beside("--verify", {**named, **{name: value for name, value in given.items() if name != "--timeout"}})
        _verify(verify, seconds_of("--timeout", timeout), as_json)
        return
    missing = [name for name, value in named.items() if value is None]
    if missing:
        raise InputError([Problem(where=name, rule="missing: a plan is for a model on a cluster") for name in missing])
    limit = seconds_of("--timeout", timeout)
    question = question_of({**given, "model": model, "cluster": cluster})
    with progress("best plan") as heard:
        answer = _answer(question, limit)
        heard.now("runner-ups" if answer.found else "what would fit")
        if answer.found:
            document, card = _planned(answer, limit, output=output, frontier=bool(frontier))
        else:
            document, card = _infeasible(answer, limit)
    show(document, card, as_json)
    if not answer.found:
        raise typer.Exit(INFEASIBLE)


def _answer(question: Question, limit: float | None) -> Answer:
    from wavetrain.planner.largest import largest_batch
    from wavetrain.planner.question import Objective
    from wavetrain.planner.search import search

    if question.objective is Objective.BATCH:
        return largest_batch(question, time_limit_s=limit)
    return search(question, time_limit_s=limit)


def _planned(
    answer: Answer, limit: float | None, *, output: Path | None, frontier: bool
) -> tuple[dict[str, Any], RenderableType]:
    from wavetrain.plan import write_plan
    from wavetrain.planner.explain import runner_ups
    from wavetrain.show.plan import planned_card, planned_document
    from wavetrain.sim.predict import simulate

    best = answer.found[0].plan
    seen = simulate(best, answer.question.laws)
    others = runner_ups(answer, time_limit_s=limit)
    document = planned_document(answer, seen, others, frontier=frontier)
    if output is not None:
        beside = {name: document[name] for name in ("prediction", "certificate")}
        write(output, write_plan(best, **beside))
    file = str(output) if output is not None else None
    return document, planned_card(answer, seen, others, file=file, frontier=frontier)


def _infeasible(answer: Answer, limit: float | None) -> tuple[dict[str, Any], RenderableType]:
    from wavetrain.planner.explain import MOST_SIDE_S
    from wavetrain.planner.rescue import rescue
    from wavetrain.show.plan import infeasible_card, infeasible_document

    found = rescue(answer, time_limit_s=MOST_SIDE_S if limit is None else min(MOST_SIDE_S, max(limit, LEAST_RESCUE_S)))
    return infeasible_document(answer, found), infeasible_card(answer, found)


def _verify(file: Path, limit: float | None, as_json: bool) -> None:
    from wavetrain.planner.prove import prove
    from wavetrain.show.plan import verified_card, verified_document

    made, certificate = read_with_certificate(file)
    if certificate is None:
        rule = "has no certificate: it was written by hand, or by simulate"
        remedy = "wavetrain plan MODEL CLUSTER ... -o FILE writes one"
        raise InputError(Problem(where=str(file), key="certificate", rule=rule, remedy=remedy))
    with progress("proof"):
        proof = prove(made, certificate, time_limit_s=limit)
    show(verified_document(made, certificate, proof), verified_card(made, certificate, proof), as_json)
    if not proof.is_proven:
        raise typer.Exit(CHECK_FAILED)


def read_with_certificate(file: Path) -> tuple[Plan, dict[str, Any] | None]:
    """A plan file's plan, and its certificate where it has one."""
    from wavetrain.base.document import read_document
    from wavetrain.plan import read_plan

    node = read_document(file)
    made = read_plan(node)
    held = node.value.get("certificate") if isinstance(node.value, dict) else None
    plain = held.plain() if held is not None else None
    return made, plain if isinstance(plain, dict) else None
