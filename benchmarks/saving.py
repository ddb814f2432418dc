"""What saving beside the steps costs them: runs that save every k-th step against runs that don't, in turns.

With one rank a core is free for the thread that saves, as beside an accelerator; with two nothing is. Every step of a
run counts, those beside a save and those without; the save after the last step, which no step is beside, does not.
`python benchmarks/saving.py [--repeats 7] [--steps 40] [--every 10] [--markdown FILE]`
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from wavetrain.base.units import DType, format_bytes, format_seconds
from wavetrain.cluster import load_cluster
from wavetrain.commands.train_run import job_of
from wavetrain.model import load_model
from wavetrain.plan import Choice, Layout, Plan, Precision
from wavetrain.runtime.job import Job
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.trainer import train
from wavetrain.runtime.world import World

MODEL = "family: gpt\nlayers: 4\nhidden: 256\nheads: 4\nvocab: 2048\nseq_len: 128\n"
MOST = 1.05


def job_for(ranks: int, steps: int) -> Job:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(MODEL)
        file.flush()
        model = load_model(file.name)
    plan = Plan(
        model=model,
        cluster=load_cluster("dgx-h100:1").part(ranks),
        layout=Layout(global_batch=4 * ranks, microbatch=4, dp=ranks),
        cut=(4,),
        seq_len=128,
        choice=Choice(ranks),
        precision=Precision(compute=DType.FP32, products=DType.FP32, state_bytes=8),
    )
    return job_of(plan, steps=steps)


def seconds(job: Job, ranks: int) -> float:
    """Of all steps after the first."""

    def work(world: World) -> None:
        records = train(job, world)
        if world.rank == 0:
            first, *_, last = records[0].step_ends_s
            world.give(str(last - first).encode())

    return float(run_local(work, ranks).check().results[0])


def measure(ranks: int, given: argparse.Namespace) -> tuple[str, ...]:
    plain = job_for(ranks, given.steps)
    ratios, steps, size = [], [], 0
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory(dir=given.directory) as folder:
            saving = replace(plain, checkpoints=Path(folder), save_every=given.every)
            without, beside = seconds(plain, ranks), seconds(saving, ranks)
            size = sum(file.stat().st_size for file in max(Path(folder).glob("step-*")).iterdir())
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
        ratios.append(beside / without)
        steps.append(without / (given.steps - 1))
    ratio = statistics.median(ratios)
    step = format_seconds(statistics.median(steps))
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return (
        str(ranks),
        step,
        format_bytes(size),
        f"{given.every}",
        f"{ratio:.3f}",
        spread,
        "yes" if ratio < MOST else "no",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--markdown", type=Path, help="append the table to this file")
    given = parser.parse_args()
    header = ("ranks", "step", "checkpoint", "every", "ratio (median)", "range", f"below {MOST}")
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    print("\n".join(lines))
    for ranks in (1, 2):
        lines.append(f"| {' | '.join(measure(ranks, given))} |")
        print(lines[-1], flush=True)
    if given.markdown:
        with given.markdown.open("a", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
