"""Are published layouts among the planner's near-best? Each table's fastest layout of a workload against the search.

    python validation/sensible.py TABLE.csv... [--rows sc21 ...] [--markdown docs/sensible.md]

The search is free within what the published run used: tensor, pipeline and data parallelism of any degree, 1F1B or
chunks as in the run, any microbatch; recomputation, sequence parallelism, sharded optimizer states, attention and
precision as in the run. The last column lets it choose anything.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from wavetrain.plan.plan import Plan
from wavetrain.planner.explain import own_question
from wavetrain.planner.question import Pins
from wavetrain.planner.search import Answer, search
from wavetrain.sim.predict import outline
from wavetrain.study.rows import Inexpressible, plan_of, read_rows

NEAR = 0.05
NOTE = """
Layers, hidden, length, devices, batch and format of each workload; "slower by" is what the simulator says of the
published layout against the planner's, not a measurement.
"""


@dataclass(frozen=True)
class Judged:
    """A published layout, what the planner would run with the same means, and with any."""

    row_id: str
    workload: str
    published: Plan
    published_s: float
    same: Answer
    free: Answer

    @property
    def slower(self) -> float:
        """Of the published layout than the planner's, by the simulator."""
        return self.published_s / self.same.found[0].outline.step_s - 1


def fastest(tables: list[Path], prefixes: tuple[str, ...]) -> dict[str, tuple[str, Plan]]:
    """Of every workload the fastest measured layout."""
    best: dict[str, tuple[float, str, Plan]] = {}
    for row in (row for table in tables for row in read_rows(table)):
        measured = row.number("measured_step_time_s")
        if measured is None or row.text("status") not in ("", "ok") or not row.text("row_id").startswith(prefixes):
            continue
        same = ("model", "layers", "hidden", "seq", "n_gpu", "global_batch", "gpu", "precision")
        workload = " ".join(row.text(column) for column in same)
        try:
            plan, _ = plan_of(row)
        except Inexpressible:
            continue
        if workload not in best or measured < best[workload][0]:
            best[workload] = (measured, row.text("row_id"), plan)
    return {workload: (row_id, plan) for workload, (_, row_id, plan) in best.items()}


def judged(workload: str, row_id: str, plan: Plan, timeout_s: float) -> Judged:
    question = own_question(plan)
    layout = plan.layout
    kinds = (layout.schedule,) if layout.pp > 1 else ("1f1b", "interleaved")
    answers = []
    for kind in kinds:
        pins = Pins(
            cp=layout.cp,
            schedule=kind,
            pp_inside=False,
            devices=layout.num_devices,
            recompute=plan.recompute,
            sequence_parallel=None if layout.sequence_parallel else False,
            shard_optimizer=None if layout.shard_optimizer else False,
        )
        family = ("megatron",) if plan.choice.shard == 1 else ()
        answers.append(search(replace(question, pins=pins, only=family, mixed=False), time_limit_s=timeout_s))
    same = min((a for a in answers if a.found), key=lambda a: a.found[0].cost)
    free = search(replace(question, mixed=False), time_limit_s=timeout_s)
    return Judged(row_id, workload, plan, outline(plan, question.laws).step_s, same, free)


def short(plan: Plan) -> str:
    layout = plan.layout
    words = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp") if getattr(layout, name) > 1]
    if layout.pp > 1:
        words.append(layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else ""))
        words += [f"{layout.waves} waves"] if layout.waves > 1 else []
    words.append(f"mb {layout.microbatch}")
    if plan.recompute != "none":
        words.append(f"{plan.recompute} recompute")
    if plan.choice.shard > 1:
        words.append(f"shard {plan.choice.shard}")
    return ", ".join(words)


def line(item: Judged) -> str:
    verdict = "near" if item.slower <= NEAR else "far"
    free = item.free.found[0] if item.free.found else item.same.found[0]  # time was up
    faster = item.published_s / free.outline.step_s - 1
    cells = (
        item.workload,
        short(item.published),
        short(item.same.found[0].plan),
        f"{item.slower:+.1%}",
        verdict,
        f"{faster:+.1%} ({short(free.plan)})",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rows", nargs="*", default=[""], help="beginnings of row ids")
    parser.add_argument("--timeout", type=float, default=20.0)
    asked = parser.parse_args()
    head = "| workload | published | planner, same means | slower by | | planner, any means: slower by |"
    lines = [head, "|---|---|---|---|---|---|"]
    near = total = 0
    for workload, (row_id, plan) in fastest(asked.tables, tuple(asked.rows)).items():
        item = judged(workload, row_id, plan, asked.timeout)
        total, near = total + 1, near + (item.slower <= NEAR)
        lines.append(line(item))
        print(lines[-1], flush=True)
    said = f"{near} of {total} published layouts are within {NEAR:.0%} of the planner's by the simulator."
    print(said)
    if asked.markdown:
        rows = " --rows " + " ".join(asked.rows) if any(asked.rows) else ""
        command = "`python validation/sensible.py " + " ".join(map(str, asked.tables)) + rows + "`"
        text = "\n".join([f"# Published layouts and the planner's\n\n{said} Made by {command}.\n{NOTE}", *lines, ""])
        asked.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
