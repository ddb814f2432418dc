"""The search against what people run today, on random models, clusters, batches and memory limits: it never loses.

The result is docs/never-worse.md. The exit code is 1 if a family has a better plan in any case.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from wavetrain.cluster import load_cluster
from wavetrain.model import load_model
from wavetrain.plan.check import check
from wavetrain.plan.plan import Plan
from wavetrain.planner.families import FAMILY_PLANS
from wavetrain.planner.question import Question, precision_for
from wavetrain.planner.search import search
from wavetrain.sim.predict import outline

PAGE = Path(__file__).parents[1] / "docs" / "never-worse.md"
TOLERANCE = 1e-9
SECONDS = 8.0  # of a search; what is found by then counts

SMALL_MODELS = ("tiny-gpt", "small-llama", "gpt3-125m", "bert-large", "gpt3-350m", "gpt2-xl", "opt-1.3b")
MODELS = (
    *SMALL_MODELS,
    *("osdp-gpt-48x1536", "osdp-gpt-48x2048", "gpt3-760m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b"),
    *("opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "bloom-7b1", "bloom-176b", "gpt-neox-20b", "gpt3-175b"),
    *("llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "gemma2-9b", "mixtral-8x7b", "megatron-39b"),
)
NODES = ("osdp-titan", "dgx-a100", "dgx-h100", "p4d", "g5-48xlarge", "dgx-1-v100")
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of nodes
MEMORY = (0.3, 0.5, 0.75, 1.0)  # share of a device's that may be used
BATCHES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_SEQ_LEN = 8192
SHORT = 256  # sequences that are not shortened further
STATE_BYTES = 16  # of a parameter, at the least

WHAT = {
    "ddp": "replicas",
    "zero2": "all sharded over all replicas, gathered parameters kept until the backward",
    "zero3": "all sharded over all replicas, gathered again for the backward (FSDP)",
    "hsdp": "sharded inside the node, replicated across",
    "deepcompile": "zero3 with blocks kept gathered, greedily (DeepSpeed)",
    "megatron": "tensor parallelism up to the node, then pipelines; distributed optimizer",
    "osdp": "blocks replicated or sharded, by OSDP's own search and model",
}


@dataclass(frozen=True)
class Case:
    """A question in short."""

    model: str
    node: str
    count: int
    memory: float
    global_batch: int
    seq_len: int

    def __str__(self) -> str:
        where = f"{self.node}:{self.count} with {self.memory:.0%} of its memory"
        return f"{self.model} on {where}, batch {self.global_batch} of {self.seq_len}"

    @property
    def question(self) -> Question:
        cluster = load_cluster(self.node if self.count == 1 else f"{self.node}:{self.count}")
        return Question(
            model=load_model(self.model, seq_len=self.seq_len),
            cluster=cluster,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            headroom=1 - self.memory,
            precision=precision_for(cluster.device),
        )


@dataclass(frozen=True)
class Result:
    """Seconds per step, and what it took to find them."""

    case: Case
    best_s: float | None  # None where nothing fits
    families_s: dict[str, float]  # of those that fit
    search_s: float
    families_took_s: float

    @property
    def gains(self) -> dict[str, float]:
        """What the search gains over each family; all is lost where only the family fits."""
        best_s = self.best_s
        return {name: own_s / best_s - 1 if best_s else -1.0 for name, own_s in self.families_s.items()}

    @property
    def worse(self) -> dict[str, float]:
        return {name: gain for name, gain in self.gains.items() if gain < -TOLERANCE}


def cases(number: int, *, seed: int, models: Sequence[str] = MODELS, counts: Sequence[int] = COUNTS) -> Iterator[Case]:
    """Random cases; where the states alone do not fit into all devices, most are drawn again."""
    draw = random.Random(seed)
    for _ in range(number):
        case = _case(draw, models, counts)
        while _is_hopeless(case) and draw.random() < 0.9:
            case = _case(draw, models, counts)
        yield case


def _case(draw: random.Random, models: Sequence[str], counts: Sequence[int]) -> Case:
    model, node = draw.choice(models), draw.choice(NODES)
    longest = min(load_model(model).seq_len, MOST_SEQ_LEN)
    count = draw.choice(counts) if load_cluster(node).node.network else 1
    even = [batch for batch in BATCHES if (batch % 3 == 0) == (count % 3 == 0)]
    return Case(
        model=model,
        node=node,
        count=count,
        memory=draw.choice(MEMORY),
        # mostly batches that all devices share in powers of two, as people choose them
        global_batch=draw.choice(even if draw.random() < 0.8 else BATCHES),
        seq_len=longest // draw.choice((1, 1, 2, 4)) if longest >= SHORT else longest,
    )


def _is_hopeless(case: Case) -> bool:
    question = case.question
    return STATE_BYTES * question.model.num_parameters > question.capacity_bytes * question.cluster.num_devices


def run(case: Case) -> Result:
    """Search, and what every family finds."""
    question = case.question
    started = time.perf_counter()
    found = search(question, time_limit_s=SECONDS).found
    searched = time.perf_counter()
    families_s = {}
    for name, family in FAMILY_PLANS.items():
        plan = family(question)
        if plan is not None:
            families_s[name] = priced(question, plan)
    best_s = priced(question, found[0].plan) if found else None
    return Result(case, best_s, families_s, searched - started, time.perf_counter() - searched)


def priced(question: Question, plan: Plan) -> float:
    """Seconds per step of a plan that is legal and fits."""
    assert check(plan) == [], f"{plan.layout} is not legal"
    seen = outline(plan, question.laws)
    assert seen.needed_bytes <= question.capacity_bytes, f"{plan.layout} does not fit"
    return seen.step_s


def run_all(wanted: Sequence[Case], jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(run, wanted)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, wanted)


def progress(number: int, total: int, result: Result) -> str:
    took = f"search {result.search_s:.1f} s, families {result.families_took_s:.1f} s"
    if result.best_s is None and not result.families_s:
        return f"{number}/{total} {result.case}: nothing fits ({took})"
    gains = ", ".join(f"{name} {gain:+.1%}" for name, gain in result.gains.items())
    worse = " WORSE than " + ", ".join(result.worse) if result.worse else ""
    return f"{number}/{total} {result.case}: {result.best_s or 0:.3f} s; {gains or 'no family fits'} ({took}){worse}"


def table(results: Sequence[Result]) -> list[str]:
    """Lines of the table in Markdown."""
    rows = [
        "| family | what it is | fits | mean gain | median | most | is itself the best |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in FAMILY_PLANS:
        gains = [result.gains[name] for result in results if name in result.gains]
        if not gains:
            rows.append(f"| {name} | {WHAT[name]} | 0 | | | | |")
            continue
        mean, median, most = statistics.mean(gains), statistics.median(gains), max(gains)
        best = sum(gain <= TOLERANCE for gain in gains)
        rows.append(f"| {name} | {WHAT[name]} | {len(gains)} | {mean:.1%} | {median:.1%} | {most:.0%} | {best} |")
    return rows


def summary(results: Sequence[Result]) -> list[str]:
    """What the table leaves out."""
    some = [result for result in results if result.best_s is not None]
    alone = sum(not result.families_s for result in some)
    worse = [result for result in results if result.worse]
    nearest = [min(result.gains.values()) for result in some if result.families_s]
    mean, median = (statistics.mean(nearest), statistics.median(nearest)) if nearest else (0.0, 0.0)
    return [
        f"The search is worse than a family in {len(worse)} of {len(results)} cases.",
        f"Nothing fits in {len(results) - len(some)} cases; in {alone} only the search finds a plan that fits.",
        f"Over the best family of each case it gains {mean:.1%} on average, {median:.1%} in the median.",
    ]


def page(results: Sequence[Result], command: str, took_s: float) -> str:
    lines = [
        "# Never worse",
        "",
        f"The plan of the search against the plans that people run today, under the simulator; `{command}`, "
        f"{datetime.now(tz=UTC):%Y-%m-%d}, {took_s:.0f} s:",
        "",
        *table(results),
        "",
        *summary(results),
        "",
        "A gain is the family's step over the search's, less one, in cases where the family fits. Cases are random:",
        f"{len(MODELS)} models from {MODELS[0]} to 175B, 1 to {COUNTS[-1]} nodes of {', '.join(NODES)},",
        f"{MEMORY[0]:.0%} to 100% of their memory, batches of {BATCHES[0]} to {BATCHES[-1]} sequences.",
        "The families are in `src/wavetrain/planner/families.py`; each may use what the simulator says of memory.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    started = time.perf_counter()
    wanted = list(cases(options.cases, seed=options.seed))
    results = []
    for number, result in enumerate(run_all(wanted, options.jobs), start=1):
        print(progress(number, len(wanted), result), file=sys.stderr, flush=True)
        results.append(result)
    took_s = time.perf_counter() - started
    print(*table(results), "", *summary(results), sep="\n")
    print(f"{took_s:.0f} s, of which {sum(result.search_s for result in results):.0f} s searching")
    shown = {"cases": options.cases, "seed": options.seed}
    changed = "".join(f" --{name} {value}" for name, value in shown.items() if value != parser.get_default(name))
    PAGE.write_text(page(results, f"python benchmarks/never_worse.py{changed}", took_s), encoding="utf-8")
    worse = [result for result in results if result.worse]
    for result in worse:
        print(f"WORSE: {result.case}: {result.worse}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
