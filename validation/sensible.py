"""Is the planner sensible? Published layouts against its own, and the waves it picks against Hanayo's.

    python validation/sensible.py TABLE.csv... [--rows sc21 ...] [--llama3] [--waves] [--markdown docs/sensible.md]

Layouts: of every workload the fastest that was measured. The search is free within what the published run used: tensor,
pipeline and data parallelism of any degree, 1F1B or chunks as in the run, any microbatch; context parallelism,
recomputation, sequence parallelism, sharded optimizer states, attention and precision as in the run. A further column
lets it choose anything. `--llama3` adds the layouts of the Llama 3 paper, `--waves` the number of waves by link.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from wavetrain.base.units import format_seconds
from wavetrain.plan.cut import counted_cut, even_cut
from wavetrain.plan.layout import Layout
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.planner.explain import Compared, compare, own_question, with_links, with_memory
from wavetrain.planner.question import Pins, Question
from wavetrain.planner.search import Answer, search
from wavetrain.show.plan import terms_words
from wavetrain.sim.predict import outline
from wavetrain.study.claims.hanayo import FIGURE_9, MICROBATCH, SCHEMES, SEQ_LEN, halved, hanayo_plan, timed_seconds
from wavetrain.study.claims.series import LLAMA_3
from wavetrain.study.rows import Inexpressible, plan_of, read_rows

NEAR = 0.05
ROUNDED_UP = 1 + 1e-9
NOTE = """
Workload: layers, hidden, length, devices, batch, format. "Slower by" is what the simulator says of the published layout
against the planner's, not a measurement; beside it the terms of the step that are larger in the published layout.
Where the published layout would not fit by the simulator (it did), both get as much memory as it needs.
"""
LLAMA_NOTE = """
`(llama3)` are the rows of the Llama 3 paper's Table 4, which does not state everything. Assumed are microbatches of 1,
8 chunks, sharded optimizer states (gradients were sharded too, hence the memory) and a network without its
oversubscribed spine.
"""
WAVES = (1, 2, 4, 8)
PLANNED_WAVES = (1, 2, 4)  # of those that are compared
SLOWER_LINKS = (1, 16, 64, 128, 256, 512)


# --- layouts ---


@dataclass(frozen=True)
class Judged:
    """A published layout, what the planner would run with the same means, and with any."""

    row_id: str
    workload: str
    published: Plan
    same: Answer
    free: Answer
    beside: Compared  # the published layout beside the planner's of the same means
    memory: float  # times a device's that was granted to both, so that the published layout fits
    within: Answer | None  # the planner's without that

    @property
    def slower(self) -> float:
        """Of the published layout than the planner's, by the simulator."""
        return self.beside.slower

    @property
    def is_near(self) -> bool:
        return self.slower <= NEAR


def fastest(tables: list[Path], prefixes: tuple[str, ...]) -> dict[str, tuple[str, Plan]]:
    """Of every workload the fastest measured layout."""
    best: dict[str, tuple[float, str, Plan]] = {}
    for row in (row for table in tables for row in read_rows(table)):
        measured = row.number("measured_step_time_s")
        if measured is None or row.text("status") not in ("", "ok") or not row.text("row_id").startswith(prefixes):
            continue
        same = ("model", "layers", "hidden", "seq", "n_gpu", "global_batch", "gpu", "precision")
        workload = " ".join(filter(None, (row.text(column) for column in same)))
        try:
            plan, _ = plan_of(row)
        except Inexpressible:
            continue
        if workload not in best or measured < best[workload][0]:
            best[workload] = (measured, row.text("row_id"), plan)
    return {workload: (row_id, plan) for workload, (_, row_id, plan) in best.items()}


def llama3() -> dict[str, tuple[str, Plan]]:
    """The three layouts of the Llama 3 paper's Table 4 (arXiv 2407.21783): 405B, sequences of 8K and of 128K."""
    made = {"llama3-1": LLAMA_3.plan(8192), "llama3-2": LLAMA_3.plan(16384)}
    long = replace(LLAMA_3, seq_len=131072, global_batch=128, layout=replace(LLAMA_3.layout, cp=16))
    made["llama3-3"] = long.plan(16384)
    cut = counted_cut(126, num_stages(LLAMA_3.layout))  # a block less at either end, as the paper says
    made = {row_id: replace(plan, cut=cut) for row_id, plan in made.items()}
    words = "126 16384 {0.seq_len} {0.layout.num_devices} {0.layout.global_batch} bf16 (llama3)"
    return {words.format(plan): (row_id, plan) for row_id, plan in made.items()}


def judged(workload: str, row_id: str, plan: Plan, timeout_s: float) -> Judged:
    question = own_question(plan)
    more, within = outline(plan, question.laws).needed_bytes / question.capacity_bytes, None
    if more > 1:  # it ran, so memory is overestimated: for the planner's layouts as well
        within = with_same_means(question, plan, timeout_s)
        question = with_memory(question, more * ROUNDED_UP)
    same = with_same_means(question, plan, timeout_s)
    free = search(replace(question, mixed=False), time_limit_s=timeout_s)
    beside = compare(question, same.found[0].plan, plan, row_id)
    return Judged(row_id, workload, plan, same, free, beside, max(more, 1.0), within)


def with_same_means(question: Question, plan: Plan, timeout_s: float) -> Answer:
    """What the planner picks within what a published run used."""
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
    return min((a for a in answers if a.found), key=lambda a: a.found[0].cost)


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


HEAD = (
    "| workload | published | planner, same means | slower by | | because of | planner, any means: slower by |",
    "|---|---|---|---|---|---|---|",
)


def line(item: Judged) -> str:
    free = item.free.found[0] if item.free.found else item.same.found[0]  # time was up
    faster = item.beside.step_s / free.outline.step_s - 1
    why = "" if item.is_near else terms_words(item.beside.terms or {}, most=2).removeprefix(", ")
    if item.within is not None:
        lost = item.within.found[0].outline.step_s / item.beside.step_s - 1
        granted = f"both get {item.memory:.2f} x the memory; without, the planner's is slower by {lost:.0%}"
        why = f"{why}; {granted} ({short(item.within.found[0].plan)})".removeprefix("; ")
    unsure = f" (gap {item.same.gap:.1%})" if item.same.gap else ""
    cells = (
        item.workload,
        short(item.published),
        short(item.same.found[0].plan) + unsure,
        f"{item.slower:+.1%}",
        "near" if item.is_near else "far",
        why,
        f"{faster:+.1%} ({short(free.plan)})",
    )
    return "| " + " | ".join(cells) + " |"


# --- waves ---


def wave_plan(cluster: str, ranks: int, waves: int) -> Plan:
    """Hanayo's BERT in so many waves on pipelines of so many ranks, as its claims run it."""
    size = MICROBATCH
    layout = Layout(global_batch=8 * size, microbatch=size, dp=8 // ranks, pp=ranks, schedule="wave", waves=waves)
    return hanayo_plan(halved("hanayo-bert", SEQ_LEN), "tacc:4" if cluster == "tacc" else cluster, layout)


def wave_seconds(plan: Plan) -> dict[int, float]:
    """Seconds of the timed part of a step, by waves."""
    return {waves: timed_seconds(with_waves(plan, waves)) for waves in WAVES}


def with_waves(plan: Plan, waves: int) -> Plan:
    layout = replace(plan.layout, waves=waves)
    return replace(plan, layout=layout, cut=even_cut(plan.model.num_blocks, num_stages(layout)))


def picked_waves(question: Question, plan: Plan) -> int:
    """The waves that the planner picks; it looks at one to four, and at the whole step."""
    layout = plan.layout
    pins = Pins(
        tp=1,
        cp=1,
        pp=layout.pp,
        dp=layout.dp,
        microbatch=layout.microbatch,
        schedule="wave",
        recompute=plan.recompute,
        shard="none",
        shard_optimizer=False,
        pp_inside=False,
    )
    found = search(replace(question, pins=pins, mixed=False)).best
    return found.layout.waves if found else 0


def figure_9_lines() -> Iterator[str]:
    """Hanayo's clusters: the waves that were measured fastest, and those that we find fastest."""
    yield "| cluster | P | measured best W | simulated best W | measured best is slower by | planner's W of 1 to 4 |"
    yield "|---|---|---|---|---|---|"
    for (cluster, replicas), row in FIGURE_9.items():
        rates = dict(zip(SCHEMES, row, strict=True))
        measured = max(WAVES[1:], key=lambda waves: rates[f"wave {waves}"])
        plan = wave_plan(cluster, 8 // replicas, 1)
        seconds = wave_seconds(plan)
        best = min(seconds, key=lambda waves: seconds[waves])
        slower = seconds[measured] / seconds[best] - 1
        question = own_question(plan)
        needed = max(outline(with_waves(plan, waves), question.laws).needed_bytes for waves in PLANNED_WAVES)
        words = f"{picked_waves(question, plan)}{' (more do not fit)' if needed > question.capacity_bytes else ''}"
        yield f"| {cluster} | {8 // replicas} | {measured} | {best} | {slower:+.1%} | {words} |"


def link_lines() -> Iterator[str]:
    """The same model and pipeline on ever slower links."""
    yield "| links, GB/s | " + " | ".join(f"W = {waves}" for waves in WAVES) + " | best W | planner's W of 1 to 4 |"
    yield "|---" * (len(WAVES) + 3) + "|"
    plan = wave_plan("fc", 8, 1)
    for slower in SLOWER_LINKS:
        question = with_links(own_question(plan), 1 / slower)
        slow = replace(plan, cluster=question.cluster)
        seconds = wave_seconds(slow)
        best = min(seconds, key=lambda waves: seconds[waves])
        rate = question.cluster.node.tiers[0].bytes_per_s / 1e9
        cells = [f"{rate:.3g}", *map(format_seconds, seconds.values()), str(best), str(picked_waves(question, slow))]
        yield "| " + " | ".join(cells) + " |"


WAVES_NOTE = """
## Waves and links

Hanayo's Figure 9 (BERT of 64 layers, eight devices, B = P): W = 2 to 4 was fastest where messages are slow (`tacc`),
4 to 8 on NVLink. The rates of `pc` and `tacc` in the catalog, and what a message costs its host, were fitted to that
very figure, so the first table shows consistency more than foresight. "Slower by" is what the simulator says of the
waves that were measured fastest. The planner looks at one to four waves, at the whole step, and at memory.
"""
LINKS_NOTE = """
The same model on eight ranks of `fc`, with its links slowed down and nothing else changed: step time without optimizer
and reduction.
"""


# --- all of it ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rows", nargs="*", default=[""], help="beginnings of row ids")
    parser.add_argument("--llama3", action="store_true", help="the Llama 3 paper's layouts too")
    parser.add_argument("--waves", action="store_true", help="waves by link too")
    parser.add_argument("--timeout", type=float, default=20.0)
    asked = parser.parse_args()
    items, lines = [], list(HEAD)
    for workload, (row_id, plan) in (
        fastest(asked.tables, tuple(asked.rows)) | (llama3() if asked.llama3 else {})
    ).items():
        item = judged(workload, row_id, plan, asked.timeout)
        items.append(item)
        lines.append(line(item))
        print(lines[-1], flush=True)
    near = [item for item in items if item.is_near]
    said = f"{len(near)} of {len(items)} published layouts are within {NEAR:.0%} of the planner's by the simulator"
    said += f", {sum(item.memory > 1 for item in near)} of them given more memory than a device has."
    print(said)
    page = [f"# Published layouts and the planner's\n\n{said} Made by `{_command(asked)}`.\n{NOTE}"]
    page += [LLAMA_NOTE] if asked.llama3 else []
    page += lines
    if asked.waves:
        page += [WAVES_NOTE, *figure_9_lines(), LINKS_NOTE, *link_lines()]
        print("\n".join(page[-len(SLOWER_LINKS) - len(FIGURE_9) - 5 :]))
    if asked.markdown:
        asked.markdown.write_text("\n".join([*page, ""]), encoding="utf-8")


def _command(asked: argparse.Namespace) -> str:
    words = ["python validation/sensible.py", *map(str, asked.tables)]
    words += ["--rows", *asked.rows] if any(asked.rows) else []
    words += [f"--{name}" for name in ("llama3", "waves") if getattr(asked, name)]
    return " ".join(words)


if __name__ == "__main__":
    main()
