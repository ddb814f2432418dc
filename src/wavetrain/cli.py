"""The command line: commands, no logic. `--json` prints one document on stdout; errors go to stderr."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavetrain import __version__
from wavetrain.base.errors import InputError, Problem, WavetrainError, nearest, unknown_name
from wavetrain.base.units import DType, printable
from wavetrain.commands.compare import compare
from wavetrain.commands.demo import demo
from wavetrain.commands.explain import explain
from wavetrain.commands.export import export
from wavetrain.commands.measure import measure
from wavetrain.commands.plan import plan as plan_command
from wavetrain.commands.progress import progress
from wavetrain.commands.shared import CHECK_FAILED, MOST_DEGREE, AsJson, one_of, refuse_beside, show, write, writing
from wavetrain.commands.study import study
from wavetrain.commands.train import train

if TYPE_CHECKING:
    from fractions import Fraction

    from rich.console import RenderableType

    from wavetrain.base.document import Node
    from wavetrain.cluster import Cluster
    from wavetrain.model import Model
    from wavetrain.plan import Plan
    from wavetrain.schedule.request import Times

app = typer.Typer(
    name="wavetrain",
    help="Plan, simulate and run the training of large models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a name outside the terminal's encoding must not end in a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=arguments, prog_name="wavetrain")
    except SystemExit as done:  # how typer ends, also after it has explained a wrong option
        return done.code if isinstance(done.code, int) else 0
    except WavetrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wavetrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Plan, simulate and run the training of large models."""


@app.command()
def describe(
    target: Annotated[str, typer.Argument(help="A model or cluster: a name, a file, or a node type with a count.")],
    seq_len: Annotated[int | None, typer.Option(help="Sequence length; default: the model's own.")] = None,
    microbatch: Annotated[int | None, typer.Option(min=1, max=10**9, help="Sequences in a microbatch; 1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Number format of the activations; bf16.")] = None,
    attention: Annotated[str | None, typer.Option(help="fused or unfused; fused.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what was understood from a model or a cluster."""
    from wavetrain.cluster import Cluster
    from wavetrain.model import AttentionKernel, Work
    from wavetrain.show.cluster import cluster_card, cluster_document
    from wavetrain.show.model import model_card, model_document

    kernel = AttentionKernel(one_of("--attention", attention or "fused", tuple(AttentionKernel)))
    number_format = DType(one_of("--dtype", dtype or "bf16", tuple(DType)))
    described = load(target, seq_len=seq_len)
    if isinstance(described, Cluster):
        options = {"--seq-len": seq_len, "--microbatch": microbatch, "--dtype": dtype, "--attention": attention}
        given = [option for option, value in options.items() if value is not None]
        if given:
            raise InputError(Problem(where=given[0], rule=f"{target} is a cluster; this is an option for models"))
        show(cluster_document(described), cluster_card(described), as_json)
        return
    work = Work(described.seq_len, microbatch or 1, number_format, kernel)
    show(model_document(described, work), model_card(described, work), as_json)


@app.command()
def schedule(  # noqa: PLR0913, PLR0917 - one option each, as users type them
    kind: Annotated[str | None, typer.Option(help="gpipe, 1f1b, interleaved, wave-zb, derived ...; wave.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of the pipeline; 4.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches in a step; 8.")] = None,
    waves: Annotated[
        int | None, typer.Option(help="Waves of a snake; 1. A derived order then runs on a snake.")
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages per rank of a loop; 2. As above, on a loop.")] = None,
    f: Annotated[str | None, typer.Option("--f", help="Time of a stage's forward; 1.")] = None,
    i: Annotated[str | None, typer.Option("--i", help="Time of its input gradient; 1.")] = None,
    w: Annotated[str | None, typer.Option("--w", help="Time of its weight gradient; 1.")] = None,
    b: Annotated[str | None, typer.Option("--b", help="Time of its whole backward, halved; 2.")] = None,
    transfer: Annotated[str | None, typer.Option(help="Time of a message between ranks; 0.")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="Most microbatches of activations on a rank.")] = None,
    verify: Annotated[Path | None, typer.Option(help="Prove a schedule file (also PyTorch's CSV) instead.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a Gantt chart.")] = None,
    text: Annotated[Path | None, typer.Option(help="Write the actions, communication included.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw up a pipeline schedule, prove it and say what it costs."""
    from wavetrain.base.document import read_text
    from wavetrain.schedule import ScheduleError, add_communication, parse_text, write_text
    from wavetrain.schedule.picture import MOST_BARS
    from wavetrain.schedule.picture import svg as chart
    from wavetrain.schedule.request import Request, answer, prove
    from wavetrain.show.schedule import rejection_document, schedule_card, schedule_document

    times = _times({"--f": f, "--i": i, "--w": w, "--b": b, "--transfer": transfer})
    cap = _positive("--memory-cap", memory_cap) if memory_cap is not None else None
    name = verify.name if verify is not None else kind or "wave"
    try:
        if verify is not None:
            refuse_beside("--verify", {"--kind": kind, "--ranks": ranks, "--waves": waves, "--chunks": chunks})
            read = parse_text(read_text(verify), file=str(verify))
            found = prove(read, times, cap=cap, microbatches=microbatches)
        else:
            sizes = (4 if ranks is None else ranks, 8 if microbatches is None else microbatches)
            found = answer(Request(name, *sizes, waves, chunks, times, cap, split=b is None))
    except ScheduleError as error:
        if as_json:
            show(rejection_document(name, error.reasons), "", as_json)
        raise
    if svg is not None:
        if found.proof.num_compute > MOST_BARS:
            rule = f"{found.proof.num_compute:,} actions are too many for a chart; at most {MOST_BARS:,}"
            raise InputError(Problem(where="--svg", rule=rule, remedy="fewer microbatches, ranks or waves"))
        title = f"{name}: {found.actions.num_ranks} ranks, {found.actions.num_microbatches} microbatches"
        write(svg, chart(found.actions, found.evaluation, found.costs, title=title))
    if text is not None:
        complete = found.actions if found.actions.has_communication else add_communication(found.actions, found.costs)
        write(text, write_text(complete))
    show(schedule_document(name, found), schedule_card(name, found, width=_width()), as_json)


@app.command()
def simulate(  # noqa: PLR0913, PLR0917 - one option each, as users type them
    plan: Annotated[Path | None, typer.Argument(help="A plan file; or give the layout with options.")] = None,
    model: Annotated[str | None, typer.Option(help="Model: a name or a file.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster: dgx-h100:4, or a file.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    microbatch: Annotated[int | None, typer.Option(help="Sequences per microbatch; 1.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Sequence length; the model's own.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks; 1.")] = None,
    sequence_parallel: Annotated[bool | None, typer.Option(help="Cut the rest along the sequence too; no.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks; 1.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks; 1.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks; all that are left.")] = None,
    shard: Annotated[str | None, typer.Option(help="Shard parameters over N replicas, dp, node or none; none.")] = None,
    keep: Annotated[bool | None, typer.Option(help="Keep gathered parameters until the backward; no.")] = None,
    zero1: Annotated[bool | None, typer.Option("--zero1/--no-zero1", help="Shard optimizer states only; no.")] = None,
    schedule: Annotated[str | None, typer.Option(help="1f1b, gpipe, interleaved, wave, zb-h1 ...; 1f1b.")] = None,
    waves: Annotated[int | None, typer.Option(help="Waves; the schedule is then wave.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages per rank; the schedule is then interleaved.")] = None,
    cut: Annotated[str | None, typer.Option(help="Layers per stage, 8,8,7,7; even.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full; none.")] = None,
    attention: Annotated[str | None, typer.Option(help="flash2, flash-cudnn, unfused-torch ...; flash2.")] = None,
    elementwise: Annotated[str | None, typer.Option(help="fused, compiled or eager; fused.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp8; bf16.")] = None,
    gradients: Annotated[str | None, typer.Option(help="Format gradients are reduced in; fp32.")] = None,
    overlap: Annotated[
        str | None, typer.Option(help="Of gradients,tensor,messages or none; as the cluster has it.")
    ] = None,
    megatron: Annotated[str | None, typer.Option(help="Flags of a Megatron-LM run, quoted.")] = None,
    deepspeed: Annotated[Path | None, typer.Option(help="A DeepSpeed config file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline for Perfetto.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what a plan, or a layout given by hand, will do."""
    stated = {name: value for name, value in locals().items() if name not in ("plan", "trace", "output", "as_json")}
    from wavetrain.plan import read_plan, write_plan
    from wavetrain.show.prediction import prediction_card, prediction_document
    from wavetrain.sim.advice import remedies
    from wavetrain.sim.predict import simulate as predicted
    from wavetrain.timeline import write_chrome

    given = {f"--{name.replace('_', '-')}": value for name, value in stated.items() if value is not None}
    if plan is not None:
        refuse_beside("a plan file", given)
        made = read_plan(plan)
    elif megatron is not None or deepspeed is not None:
        made = _imported(given)
    else:
        made = _requested(given)
    found = predicted(made)
    advice = [] if found.fits else remedies(made)
    if output is not None:
        write(output, write_plan(made))
    if trace is not None:
        with writing(trace):
            write_chrome(found.timeline, trace)
    document, card = prediction_document(made, found, advice), prediction_card(made, found, advice)
    if megatron is not None or deepspeed is not None:
        document, card = _scored(made, document, card)
    show(document, card, as_json)


app.command("plan")(plan_command)
app.command("explain")(explain)
app.command("measure")(measure)
app.command("train")(train)
app.command("compare")(compare)
app.command("demo")(demo)
app.command("export")(export)
app.command("study")(study)


@app.command()
def validate(
    tables: Annotated[list[Path], typer.Argument(help="Tables of published runs, CSV.")],
    html: Annotated[Path | None, typer.Option(help="Write a report with predicted against measured.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as a page of Markdown.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict published runs from what they state, and say how far off the predictions are."""
    from wavetrain.show.validate import card, document
    from wavetrain.show.validate_html import report_page
    from wavetrain.study.accuracy import accuracy_page
    from wavetrain.study.rows import price_tables
    from wavetrain.study.validate import summarize

    found = summarize(price_tables(tables))
    if html is not None:
        write(html, report_page(found))
    if markdown is not None:
        write(markdown, accuracy_page(found))
    show(document(found), card(found), as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine and say what to fix."""
    from wavetrain.base.codec import encode
    from wavetrain.doctor import State, examine
    from wavetrain.show.tables import grid

    checks = examine()
    table = grid("check", "", "found", "remedy")
    for check in checks:
        table.add_row(check.name, check.state, check.found, check.remedy)
    bad = any(check.state is State.BAD for check in checks)
    document = {"schema": "wavetrain.doctor/1", "ok": not bad, "checks": [encode(check) for check in checks]}
    show(document, table, as_json)
    if bad:
        raise typer.Exit(CHECK_FAILED)


def _imported(given: dict[str, Any]) -> Plan:
    """The plan that another program's flags or config mean."""
    from wavetrain.plan.flags import plan_of_given

    plan, ignored = plan_of_given(given)
    for line in ignored:
        print(f"ignored: {printable(line, most=400)}", file=sys.stderr)
    return plan


def _scored(plan: Plan, document: dict[str, Any], card: RenderableType) -> tuple[dict[str, Any], RenderableType]:
    """A prediction for a plan that somebody runs, with the best plan for the same beside it."""
    from rich.console import Group

    from wavetrain.planner.explain import SCORE_S, best_beside, own_question
    from wavetrain.show.plan import best_document, best_words

    if not plan.cluster.is_uniform:
        return document, card
    with progress("best plan for the same"):
        best, _ = best_beside(own_question(plan), plan, time_limit_s=SCORE_S)
    return document | {"best": best_document(best)}, Group(card, "", best_words(best))


def _requested(given: dict[str, Any]) -> Plan:
    """The plan that options describe."""
    from wavetrain.cluster import load_cluster
    from wavetrain.model import load_model
    from wavetrain.plan import Request, plan_of

    missing = [option for option in ("--model", "--cluster", "--global-batch") if option not in given]
    if missing:
        rule = "missing: a plan file, or a model, a cluster and a global batch"
        raise InputError([Problem(where=option, rule=rule) for option in missing])
    wholes = ("--global-batch", "--microbatch", "--seq-len", "--tp", "--cp", "--pp", "--dp", "--waves", "--chunks")
    bad = [option for option in wholes if option in given and not 1 <= given[option] <= MOST_DEGREE]
    if bad:
        rule = f"must be from 1 to {MOST_DEGREE:,}"
        raise InputError([Problem(where=option, rule=f"{given[option]}: {rule}") for option in bad])
    values = {option.removeprefix("--").replace("-", "_"): value for option, value in given.items()}
    values["model"] = load_model(values["model"], seq_len=values.pop("seq_len", None))
    values["cluster"] = load_cluster(values["cluster"])
    if "cut" in values:
        values["cut"] = _numbers("--cut", values["cut"])
    if "overlap" in values:
        values["overlap"] = tuple(values["overlap"].split(","))
    return plan_of(Request(**values))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise InputError(Problem(where=option, rule=f"{printable(text)}: must be layers per stage, like 8,8,7,7"))
    return tuple(map(int, words))


def load(target: str, *, seq_len: int | None = None) -> Model | Cluster:
    """Read a target that may be a model or a cluster, by name or by what its file says."""
    from wavetrain.base.document import exists, read_document
    from wavetrain.cluster import device_names, load_cluster, node_names, read_cluster
    from wavetrain.cluster.read import IDENTIFYING as CLUSTER_KEYS
    from wavetrain.model import load_model, presets, read_model
    from wavetrain.model.short import IDENTIFYING as MODEL_KEYS

    kind = target.partition(":")[0]
    if kind in node_names() or kind in device_names():
        return load_cluster(target)
    path = Path(target)
    if target in presets() or (exists(path) and path.is_dir()):
        return load_model(target, seq_len=seq_len)
    if not exists(path):
        names = (*presets(), *node_names(), *device_names())
        raise InputError(unknown_name(target, "model, node type or device", names))
    node = read_document(path)
    keys = set(node.value) if isinstance(node.value, dict) else set()
    if _is_ours(node) or "model_type" in keys or (keys & set(MODEL_KEYS) and not keys & set(CLUSTER_KEYS)):
        return read_model(node, seq_len=seq_len)
    if keys & set(CLUSTER_KEYS):
        return read_cluster(node)
    raise _neither(node.where, keys, (*MODEL_KEYS, *CLUSTER_KEYS, "schema", "model_type"))


def _is_ours(node: Node) -> bool:
    """Whether a document says that Wavetrain wrote it."""
    schema = node.value.get("schema") if isinstance(node.value, dict) else None
    return schema is not None and isinstance(schema.value, str) and schema.value.startswith("wavetrain.")


def _neither(where: str, keys: set[str], legal: tuple[str, ...]) -> InputError:
    shown = sorted(keys)[:5]
    rule = "neither a model (layers, hidden, heads, vocab ...; or model_type) nor a cluster (node, nodes ...)"
    near = ((key, nearest(key, legal)) for key in shown)
    problems = [Problem(where=where, key=key, rule="unknown key", nearest=n) for key, n in near if n]
    return InputError([Problem(where=where, key=", ".join(shown), rule=rule), *problems])


def _times(given: dict[str, str | None]) -> Times:
    """Durations from options; a backward given whole is halved, as exact fractions."""
    from wavetrain.schedule.request import Times

    known = {option: _positive(option, value) for option, value in given.items() if value is not None}
    if "--b" in known and ("--i" in known or "--w" in known):
        raise InputError(Problem(where="--b", rule="is the sum of --i and --w; give the sum or the parts"))
    half = known["--b"] / 2 if "--b" in known else None
    values = {name: known.get(f"--{name}") for name in ("f", "i", "w", "transfer")}
    values["i"], values["w"] = values["i"] or half, values["w"] or half
    return Times(**{name: value for name, value in values.items() if value is not None})


def _positive(option: str, value: str) -> Fraction:
    """A number as an exact fraction; a transfer alone may be zero."""
    import re
    from fractions import Fraction

    least = 0 if option == "--transfer" else Fraction(1, 10**9)
    written = re.fullmatch(r"\d{0,12}\.?\d{0,12}(e[-+]?\d)?|\d{1,12}/\d{1,12}", value)
    try:
        number = Fraction(value) if written else None
    except (ValueError, ZeroDivisionError):
        number = None
    if number is None or not least <= number <= 10**9:
        raise InputError(Problem(where=option, rule=f"{printable(value)}: must be a number from {least} to 1000000000"))
    return number


def _width() -> int:
    from shutil import get_terminal_size

    return get_terminal_size((80, 24)).columns
