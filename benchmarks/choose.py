"""Exact choices per second: a model of equal blocks, a thousand different operators, and OSDP's published table.

Absolute figures depend on the machine; the ratios do not much.
"""

from __future__ import annotations

import csv
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from wavetrain.planner.choose import Chosen, choose
from wavetrain.planner.leaves import verify
from wavetrain.planner.price import Weights, cheapest, kinds_of
from wavetrain.planner.problem import Option, Problem, Run, Unit, peak

TABLE = Path(__file__).parents[1] / "tests" / "planner" / "osdp_table.csv"
DEVICES = 64
BYTES_PER_S = 40e9  # of one device, in a ring over all
FLOPS = 4e14
ALPHA_PS = 20_000_000
TOKENS = 8192


def ps(seconds: float) -> int:
    return round(seconds * 1e12)


def ring(size: int, group: int, rounds: float = 1.0) -> int:
    return round(rounds * (ALPHA_PS * (group - 1) + ps(size * (group - 1) / group / BYTES_PER_S)))


def operator_options(parameters: int, activations: int = 0) -> tuple[Option, ...]:
    """Replicated; states sharded and parameters kept; parameters sharded in groups or wholly, in 1 to 8 slices."""
    weights, states = 2 * parameters, 12 * parameters
    reduced = ring(weights, DEVICES)
    gathered = ring(weights, DEVICES)
    found = [
        Option(label="replicate", reduction=2 * reduced, held=weights + states, saved=activations, left=weights),
        Option(
            label="keep",
            reduction=reduced,
            forward=gathered,
            held=states // DEVICES,
            saved=weights + activations,
            left=weights // DEVICES,
            own=weights,
        ),
    ]
    for group in (8, DEVICES):
        for slices in (1, 2, 8):
            gather = ring(weights, group) + (slices - 1) * group * ALPHA_PS
            found.append(
                Option(
                    label=f"shard {group} / {slices}",
                    fixed=ALPHA_PS * slices,
                    forward=gather,
                    backward=gather,
                    reduction=reduced,
                    held=(weights + states) // group,
                    saved=activations,
                    left=weights // group,
                    own=2 * weights // slices,
                )
            )
    return tuple(found)


def together(columns: list[Option], *, recompute: int, dropped: int) -> Option:
    """One option for a whole unit: all operators alike, with or without recomputation of its activations."""
    names = [name for name in Option.__dataclass_fields__ if name not in ("label", "own")]
    sums = {name: sum(getattr(option, name) for option in columns) for name in names}
    sums |= {"saved": sums["saved"] - dropped, "beside": dropped, "hides": recompute}
    return Option(**sums | {"fixed": sums["fixed"] + recompute}, own=max(option.own for option in columns))


def block(sizes: list[int], *, count: int = 1, bundles: bool = True) -> Unit:
    forward = ps(2 * sum(sizes) * TOKENS / FLOPS)
    saved = 34 * TOKENS * round((sum(sizes) / 12) ** 0.5)
    operators = tuple(operator_options(size, saved // len(sizes)) for size in sizes)
    alike = [list(column) for column in zip(*operators, strict=True)] if bundles else []
    recomputed = [(0, 0), (forward, saved // 2), (2 * forward, saved * 9 // 10)]
    packs = [together(column, recompute=time, dropped=less) for column in alike for time, less in recomputed]
    return Unit(forward=forward, backward=2 * forward, operators=operators, bundles=tuple(packs), count=count)


def blocks_problem(count: int = 80, width: int = 8192) -> Problem:
    """Embedding, equal blocks of eight operators, head: what a layout search asks again and again."""
    square = width * width
    sizes = [square, square // 8, square // 8, square, 7 * square // 2, 7 * square // 2, 7 * square // 2, width]
    ends = Unit(forward=0, backward=0, operators=(operator_options(32000 * width),))
    return limited((ends, block(sizes, count=count), ends))


def bundled(problem: Problem) -> Problem:
    """The same with nothing but bundles where there are any."""
    units = (replace(unit, operators=() if unit.bundles else unit.operators) for unit in problem.units)
    return replace(problem, units=tuple(units))


def hidden(problem: Problem) -> Problem:
    """The same with so much backward that every reduction hides behind it."""
    return replace(problem, units=tuple(replace(unit, backward=20 * unit.backward) for unit in problem.units))


def many_problem(units: int, operators: int, *, seed: int = 0) -> Problem:
    """Units that all differ."""
    draw = random.Random(seed)
    made = []
    for _ in range(units):
        sizes = [draw.randrange(4_000_000, 200_000_000) for _ in range(operators)]
        unit = block(sizes, bundles=False)
        made.append(
            Unit(forward=unit.forward, backward=unit.backward, operators=tuple(row[:6] for row in unit.operators))
        )
    return limited(tuple(made))


def limited(units: tuple[Unit, ...], *, share: float = 0.3) -> Problem:
    """A limit between the least and what the fastest needs."""
    free = Problem(units=units, limit=0, microbatches=4, forward_share=50_000, backward_share=50_000,
                   reduction_share=100_000)  # fmt: skip
    ends = [
        peak(free, tuple((Run(kind.unit.count, cheapest([(kind, weights)])[0][1]),) for kind in kinds_of(free)))
        for weights in (Weights(held=1, saved=1, left=1, running=1), Weights(time=1))
    ]
    limit = round(ends[0] + share * (ends[1] - ends[0]))
    return Problem(units=units, limit=limit, microbatches=4, forward_share=50_000, backward_share=50_000,
                   reduction_share=100_000)  # fmt: skip


def timed(problem: Problem, repeats: int, time_limit_s: float | None = None) -> tuple[float, Chosen]:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        found = choose(problem, time_limit_s=time_limit_s)
        best = min(best, time.perf_counter() - start)
    return best, found


def report(name: str, problem: Problem, repeats: int = 1, time_limit_s: float | None = None) -> None:
    seconds, found = timed(problem, repeats, time_limit_s)
    start = time.perf_counter()
    reasons = verify(problem, found.certificate)
    checked = time.perf_counter() - start
    assert not reasons, reasons
    gap = "proven best" if found.gap == 0 else f"gap {float(found.gap or 0):.1e}"
    cases = len(found.certificate.cases)
    print(f"{name}: {1000 * seconds:,.1f} ms, {gap}, {cases} cases, checked in {1000 * checked:,.0f} ms")


def osdp_rows(hidden: int, batch: int) -> tuple[list[float], list[int]]:
    """Seconds and whole MB of the four levels, as the artifact reads its own table."""
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    chosen = [row for row in rows if (int(row["hidden"]), int(row["batch"])) == (hidden, batch)]
    return [float(row["time_s"]) for row in chosen], [int(float(row["memory_mb"])) for row in chosen]


def osdp_problem(hidden: int, batch: int, *, layers: int = 48, limit: int = 8192 - 800) -> Problem:
    seconds, megabytes = osdp_rows(hidden, batch)
    levels = tuple(Option(fixed=ps(a), held=b) for a, b in zip(seconds, megabytes, strict=True))
    return Problem(units=(Unit(operators=(levels,), count=layers),), limit=limit)


def forward_program(seconds: list[float], megabytes: list[int], *, layers: int, limit: int) -> float:
    """The artifact's search: least time for every whole MB and last level, layer by layer, in plain loops."""
    levels = len(seconds)
    least = np.zeros((limit + 1, levels))
    for _ in range(layers):
        for memory in range(limit, -1, -1):
            for level in range(levels):
                if memory < megabytes[level]:
                    least[memory, level] = np.inf
                    continue
                before = [least[memory - megabytes[level], other] for other in range(levels)]
                candidates = np.array(before) + seconds[level]
                least[memory, level] = candidates[np.argmin(candidates)]
    return float(least[limit].min())


def against_osdp() -> None:
    problem = osdp_problem(1536, 1)
    ours, found = timed(problem, 10)
    start = time.perf_counter()
    theirs = forward_program(*osdp_rows(1536, 1), layers=48, limit=problem.limit)
    seconds = time.perf_counter() - start
    assert found.time is not None
    print(f"OSDP table: {found.time / 1e18:.6f} s per step, theirs {theirs:.6f} s")
    print(f"  ours {1000 * ours:.2f} ms, their forward program {seconds:.2f} s: {seconds / ours:,.0f} times as long")


def main() -> None:
    for count in (32, 80, 126):
        problem = blocks_problem(count)
        report(f"embedding, {count} equal blocks, head", problem, repeats=10)
        report("  with bundles only", bundled(problem), repeats=10)
        report("  with no limit to speak of", replace(problem, limit=20 * problem.limit), repeats=10)
        report("  nor reduction that shows", hidden(replace(problem, limit=20 * problem.limit)), repeats=10)
    report("125 units of 8 operators, all different", many_problem(125, 8), time_limit_s=8.0)
    report("1,000 units of one operator, all different", many_problem(1000, 1), time_limit_s=8.0)
    if "--fast" not in sys.argv:
        against_osdp()


if __name__ == "__main__":
    main()
