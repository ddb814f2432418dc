"""Random problems and their best by trying everything, vectorized."""

import random
from dataclasses import replace
from itertools import product

import numpy as np

from wavetrain.planner.problem import MILLION, Option, Problem, Unit, bundle, load_of

SHARES = (0, 100_000, 333_333, MILLION)


def option(draw, size):
    def amount(most=size):
        return draw.choice((0, draw.randrange(most + 1), draw.randrange(most + 1)))

    return Option(
        fixed=amount(), forward=amount(), backward=amount(), hides=amount(size // 3), reduction=amount(), held=amount(),
        saved=amount(), left=amount(), beside=amount(), own=amount(),
    )  # fmt: skip


def problem_of(seed, *, operators, options, units=3, counts=(1,), bundles=2, size=20, exactly=False):  # noqa: PLR0913
    """A problem with that many operators in all; `exactly` so many options each, else up to so many."""
    draw = random.Random(seed)
    sizes = [0] * draw.randint(1, units)
    for _ in range(operators):
        sizes[draw.randrange(len(sizes))] += 1
    made = []
    for num in sizes:
        rows = tuple(
            tuple(option(draw, size) for _ in range(options if exactly else draw.randint(1, options)))
            for _ in range(num)
        )
        packs = tuple(option(draw, 2 * size) for _ in range(draw.randint(0, bundles)))
        compute = draw.randrange(2 * size), draw.randrange(2 * size)
        made.append(
            Unit(forward=compute[0], backward=compute[1], operators=rows, bundles=packs, count=draw.choice(counts))
        )
    return Problem(
        units=tuple(made),
        limit=0,
        microbatches=draw.randint(1, 3),
        forward_share=draw.choice(SHARES),
        backward_share=draw.choice(SHARES),
        reduction_share=draw.choice(SHARES),
        fixed=draw.randrange(5),
    )


def choices_of(unit):
    listed = [bundle(index) for index in range(len(unit.bundles))]
    if unit.operators or not unit.bundles:
        listed += product(*(range(len(options)) for options in unit.operators))
    return listed


def num_selections(problem):
    total = 1
    for unit in problem.units:
        combinations = len(unit.bundles)
        combinations += int(np.prod([len(options) for options in unit.operators])) if unit.operators else 0
        total *= max(1, combinations) ** unit.count
    return total


def loads_table(problem, unit):
    """Time, reduction, hides, held, saved, left, running of every choice: by `load_of` where few, else in numpy."""
    listed = choices_of(unit)
    if len(listed) <= 600:
        return np.array([load_of(problem, unit, picks) for picks in listed], dtype=np.int64)
    names = ("fixed", "forward", "backward", "hides", "reduction", "held", "saved", "left", "beside")
    sums = {name: np.zeros(1, dtype=np.int64) for name in (*names, "own")}
    for options in unit.operators:
        for name in names:
            column = np.array([getattr(each, name) for each in options])
            sums[name] = (sums[name][:, None] + column).ravel()
        column = np.array([each.own for each in options])
        sums["own"] = np.maximum(sums["own"][:, None], column).ravel()
    shown = shows(sums["forward"], unit.forward, problem.forward_share)
    shown = shown + shows(sums["backward"], unit.backward + sums["hides"], problem.backward_share)
    spent = MILLION * sums["fixed"] + problem.microbatches * shown
    running = sums["beside"] + sums["own"]
    rest = [sums[name] for name in ("reduction", "hides", "held", "saved", "left")]
    combined = np.stack([spent, *rest, running], axis=1)
    packs = [load_of(problem, unit, bundle(index)) for index in range(len(unit.bundles))]
    return np.concatenate([np.array(packs, dtype=np.int64).reshape(-1, 7), combined])


def shows(communication, compute, share):
    return np.maximum(share * communication, MILLION * communication - (MILLION - share) * compute)


def all_times_and_peaks(problem):
    """Time and peak of every selection, copies in every order: copy by copy, the highest rise so far carried along."""
    zero = np.zeros(1, dtype=np.int64)
    spent, reduction, hides, base, level, top = zero, zero, zero, zero, zero, None
    for unit in problem.units:
        table = loads_table(problem, unit)
        for _ in range(unit.count):
            spent, reduction, hides, base = (
                (sums[:, None] + column).ravel()
                for sums, column in (
                    (spent, table[:, 0]),
                    (reduction, table[:, 1]),
                    (hides, table[:, 2]),
                    (base, table[:, 3] + table[:, 5]),
                )
            )
            after = level[:, None] + (table[:, 4] - table[:, 5])
            rise = after + table[:, 6]
            top = (rise if top is None else np.maximum(top[:, None], rise)).ravel()
            level = after.ravel()
    compute = sum(unit.count * unit.backward for unit in problem.units) + hides
    return MILLION * problem.fixed + spent + shows(reduction, compute, problem.reduction_share), base + top


def limits(peaks):
    """None fits, only the least does, some do, half do, all do."""
    low, high = int(peaks.min()), int(peaks.max())
    quantiles = [int(np.quantile(peaks, share, method="lower")) for share in (0.02, 0.5)]
    return sorted({limit for limit in (low - 1, low, *quantiles, high) if limit >= 0})


def cases_of(problem, which=None):
    """The problem under several limits, with the least time of each, None where nothing fits, and the least peak."""
    times, peaks = all_times_and_peaks(problem)
    chosen = limits(peaks)
    for limit in chosen if which is None else [chosen[which % len(chosen)]]:
        fits = peaks <= limit
        yield replace(problem, limit=limit), int(times[fits].min()) if fits.any() else None, int(peaks.min())
