"""`wavetrain demo`: all of it at once on this machine. Measure, plan, predict, train, compare, report."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavetrain.commands.measure import write_measured
from wavetrain.commands.shared import AsJson, show, write, writing
from wavetrain.commands.train_run import job_of, run

if TYPE_CHECKING:
    from wavetrain.cluster import Cluster
    from wavetrain.plan import Plan
    from wavetrain.study.compare import Comparison

RANKS = 4
GLOBAL_BATCH = 16
STEPS = 12
MODEL = "{name: demo-gpt, family: gpt, layers: 8, hidden: 192, heads: 4, vocab: 512, seq_len: 64}"
PINS: dict[str, Any] = {"tp": 1, "cp": 1, "pp": 2, "dp": 2, "schedule": "wave", "shard_optimizer": False, "shard": 1}
FILES = ("cluster.yaml", "plan.json", "report.html", "timelines.svg", "predicted.json")
SHARDED = ("up", "down")  # of every block, the operators that are cut over the replicas; all others are replicated


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for everything.")] = Path("out/demo"),
    as_json: AsJson = False,
) -> None:
    """Measure this machine, plan for four ranks, predict, train, compare, and write a report."""
    from wavetrain.cluster import load_cluster
    from wavetrain.show.compare_html import page
    from wavetrain.show.demo import card, document, picture
    from wavetrain.sim.predict import simulate
    from wavetrain.study.compare import compare
    from wavetrain.study.measured import read_run
    from wavetrain.timeline.chrome import write_chrome

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # these two as in `train`
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    begun = time.monotonic()
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    files = {
        name: output / name for name in ("cluster.yaml", "plan.json", "report.html", "timelines.svg", "predicted.json")
    }
    _say(as_json, 1, f"measures this machine with {RANKS} ranks at once")
    write_measured(files["cluster.yaml"], local=RANKS, quick=True, device="cpu")  # where it trains
    _say(as_json, 2, "plans a small GPT: a wave over two stages' ranks, two replicas, the MLPs sharded over them")
    plan = _plan(load_cluster(files["cluster.yaml"]), files["plan.json"])
    predicted = simulate(plan)
    write_chrome(predicted.timeline, files["predicted.json"])
    _say(as_json, 3, f"predicts {predicted.step_s * 1e3:.0f} ms a step; trains {STEPS} steps in {RANKS} processes")
    _train(plan, output / "run")
    _say(as_json, 4, "compares")
    found: Comparison = compare(plan, predicted, read_run(output / "run"))
    write(files["report.html"], page(found))
    write(files["timelines.svg"], picture(found))
    paths = {
        "report": files["report.html"],
        "timeline, for ui.perfetto.dev": output / "run" / "measured.json",
        "picture": files["timelines.svg"],
        "plan": files["plan.json"],
        "this machine": files["cluster.yaml"],
    }
    shown = document(found, paths, seconds=time.monotonic() - begun)
    show(shown, card(shown), as_json)


def _say(silent: bool, number: int, text: str) -> None:
    if not silent:
        print(f"{number} of 4: {text}", flush=True)


def _plan(cluster: Cluster, path: Path) -> Plan:
    """The planner's best wave for two replicas; then some operators by a choice of their own."""
    from wavetrain.base.document import parse_yaml
    from wavetrain.model.read import read_model
    from wavetrain.plan import write_plan
    from wavetrain.plan.layout import Choice
    from wavetrain.plan.plan import OperatorChoice
    from wavetrain.planner.ask import search

    model = read_model(parse_yaml(MODEL, file="demo"))
    best = search(model, cluster, global_batch=GLOBAL_BATCH, precision="fp32", **PINS).best
    assert best is not None, "a model of a few megabytes fits"
    (layer,) = (layer for layer in model.layers if layer.name not in {end.name for end in model.ends})
    names = [o.name for o in layer.operators if o.parameters and o.name.rpartition(".")[2] in SHARDED]
    choices = tuple(OperatorChoice(layer.name, name, Choice(shard=best.layout.dp)) for name in names)
    plan = replace(best, choices=choices)
    write(path, write_plan(plan))
    return plan


def _train(plan: Plan, output: Path) -> dict[str, Any] | None:
    from wavetrain.runtime.report import Limits

    job = job_of(plan, steps=STEPS, logs=output, clip=1.0)
    return run(job, None, Limits(step_s=job.step_s, floor_s=60.0), output)
