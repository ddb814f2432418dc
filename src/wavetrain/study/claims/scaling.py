"""What the study of hardware scaling (arXiv 2411.13055, TMLR 2025) claims, asked of the records of our ready studies.

Every number is computed from records; no record is treated unlike another. Where the work states no number, the rule
is the direction that it states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import exp, log
from statistics import mean

from wavetrain.study.claims.claim import Bounds, Claim, near
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.returns import Series, crossovers, knee, marginal, series

Records = Callable[[str], Sequence[Record]]

START, END = 128, 2048  # the work's range of weak scaling
TOLERANCE = 5.0  # percent or points: the same as of all published series
STOP_BELOW = 0.5  # of what each of the first devices gives
# Less is no difference, where the work says only that there is one.
LEAST_GAIN = 1.0  # percent or points
LEAST_SHIFT = 1.01  # of a knee, times
MOST_RISE = 2.0  # percent, of what is said to fall
WORK = "arXiv 2411.13055"
PER_DEVICE = "tokens_per_s_per_device"
scaling_claim = partial(Claim, work="Hardware scaling")


def scaling_claims(records: Records) -> Iterator[Claim]:
    """`records(name)` are those of the ready study of that name."""
    weak = records("weak-scaling")
    yield from weak_claims(weak)
    yield from bound_claims(weak)
    yield from preferable_claims(weak)
    yield from utilization_claims(records("hardware"))
    yield from strong_claims(records("strong-scaling"))
    yield from knee_claims(records("context-length"), "seq_len", "context length")
    yield from knee_claims(records("model-size"), "model", "model size")


# --- records ---


def line_of(records: Sequence[Record], strategy: str, **where: object) -> Series | None:
    """The first series of a strategy whose records have these values."""
    chosen = [r for r in records if r.strategy == strategy and all(getattr(r, k) == v for k, v in where.items())]
    found = series(chosen)
    return found[0] if found else None


def value_at(line: Series | None, devices: int, quantity: str) -> float | None:
    for record in line.records if line else ():
        if record.devices == devices:
            value = getattr(record, quantity)
            return None if value is None else float(value)
    return None


def change(line: Series | None, quantity: str, start: int, end: int) -> float | None:
    """Percent that a quantity changes from one number of devices to another; None where one is not known."""
    first, last = value_at(line, start, quantity), value_at(line, end, quantity)
    return 100 * (last / first - 1) if first and last is not None else None


# --- weak scaling with FSDP ---

# Quantity of a record, in words, published, bounds, how the number was read.
LOST = (
    (PER_DEVICE, "throughput per device", -37.22, Bounds(-45.0, -30.0), "stated, second-hand"),
    ("power_w_per_device", "power per device", -5.87, Bounds(-9.0, -3.0), "stated, 658 to 620 W, second-hand"),
    ("tokens_per_joule", "tokens per joule", -33.3, near(-33.3, TOLERANCE), "derived from the two above"),
)


def weak_claims(records: Sequence[Record]) -> Iterator[Claim]:
    line = line_of(records, "fsdp")
    for quantity, words, published, bounds, read in LOST:
        yield scaling_claim(
            text=f"7B with FSDP on H100: {words}, {START:,} to {END:,} devices",
            source=f"{WORK}, weak scaling: {read}",
            published=published,
            ours=change(line, quantity, START, END),
            unit="%",
            bounds=bounds,
            assumption="study weak-scaling, strategy fsdp: the best plan that shards over all devices, at every scale",
            missing=f"no plan for {START:,} or {END:,} devices",
        )


def bound_claims(records: Sequence[Record]) -> Iterator[Claim]:
    yield scaling_claim(
        text="7B with FSDP becomes bound by communication on H100: devices",
        source=f"{WORK}: about 128, second-hand",
        published=128.0,
        ours=lost_at(line_of(records, "fsdp"), TOLERANCE),
        unit="devices",
        bounds=Bounds(64.0, 256.0),
        assumption=f"study weak-scaling: where throughput per device is {TOLERANCE:g} % below its best; about is taken"
        " for half to twice",
        missing=f"nowhere {TOLERANCE:g} % below its best",
    )


def lost_at(line: Series | None, percent: float) -> float | None:
    """From how many devices on throughput per device stays so far below its best; over the logarithm of devices."""
    points = [(r.devices, value) for r in line.records if (value := getattr(r, PER_DEVICE))] if line else []
    if not points:
        return None
    limit = (1 - percent / 100) * max(value for _, value in points)
    below = [number for number, (_, value) in enumerate(points) if value > limit]
    last = below[-1]  # the best itself at least
    if last == len(points) - 1:
        return None
    (n1, v1), (n2, v2) = points[last], points[last + 1]
    return exp(log(n1) + (v1 - limit) / (v1 - v2) * (log(n2) - log(n1)))


# --- what becomes preferable ---

OTHERS = {
    "Tensor parallelism of 2 or 4": ("tp 2", "tp 4"),
    "Pipeline parallelism of 2 or 4": ("pp 2", "pp 4"),
    "Sharding inside the node only": ("hsdp",),
}


def preferable_claims(records: Sequence[Record]) -> Iterator[Claim]:
    """From how many devices on something else than FSDP over all devices is faster."""
    objected = "left out, as its reviewers object"
    for words, names in OTHERS.items():
        found = {name: overtakes(records, "fsdp", name) for name in names}
        scales = [scale for scale in found.values() if scale is not None]
        told = ", ".join(f"{name} {'never' if at is None else f'from {at:,.0f} on'}" for name, at in found.items())
        yield scaling_claim(
            text=f"{words} becomes faster than FSDP for a 7B on H100: devices",
            source=f"{WORK}: {objected if names == ('hsdp',) else 'claim 1; no number'}",
            published=None,
            ours=min(scales, default=None),
            unit="devices",
            bounds=Bounds(most=float(END)),
            assumption=f"study weak-scaling; {told}",
            missing=f"FSDP is the fastest of them up to the largest scale ({told})",
        )
    for words, names in {**OTHERS, "The best of all plans": ("free",)}.items():
        gains = [gain for name in names if (gain := gain_at(records, "fsdp", name, END)) is not None]
        yield scaling_claim(
            text=f"{words} over FSDP at {END:,} devices, 7B on H100",
            source=f"{WORK}: claim 1; no number",
            published=None,
            ours=max(gains, default=None),
            unit="%",
            bounds=Bounds(least=LEAST_GAIN),
            assumption=f"study weak-scaling, the fastest of: {', '.join(names)}",
            missing=f"no plan for {END:,} devices",
        )


def overtakes(records: Sequence[Record], first: str, second: str) -> float | None:
    """From how many devices on `second` is the faster one, for good; None where it is not at the largest scale."""
    lines = [line_of(records, first), line_of(records, second)]
    if None in lines:
        return None
    pair = [record for line in lines if line for record in (*line.records, *line.missing)]
    last = max(record.devices for record in pair)
    gain = gain_at(records, first, second, last)
    if gain is None or gain <= 0:
        return None
    found = [crossing.devices for crossing in crossovers(pair) if crossing.second == second]
    return max(found, default=float(min(record.devices for record in pair)))


def gain_at(records: Sequence[Record], first: str, second: str, devices: int) -> float | None:
    """Percent that `second` is faster."""
    one, other = (value_at(line_of(records, name), devices, "tokens_per_s") for name in (first, second))
    return 100 * (other / one - 1) if one and other else None


# --- generations of hardware ---


def utilization_claims(records: Sequence[Record]) -> Iterator[Claim]:
    """MFU from A100 to H100 at every scale that both have."""
    falls = utilization_falls(records, "dgx-a100", "dgx-h100")
    read = "59.67 to 40.77 %, second-hand, devices not said"
    rows = (
        ("at the scale where it falls least", max(falls, default=None), Bounds(most=-LEAST_GAIN)),
        ("mean over all scales", mean(falls) if falls else None, near(-18.9, TOLERANCE)),
    )
    for words, ours, bounds in rows:
        yield scaling_claim(
            text=f"MFU of the same 7B workload from A100 to H100, FSDP, {words}",
            source=f"{WORK}: {read}",
            published=-18.9,
            ours=ours,
            unit="points",
            bounds=bounds,
            assumption="study hardware, strategy fsdp, dgx-a100 and dgx-h100",
            missing="no scale that both have",
        )


def utilization_falls(records: Sequence[Record], before: str, after: str) -> list[float]:
    """Points of MFU that one node has less than another, with its sign, by scale."""
    old, new = (line_of(records, "fsdp", node=node) for node in (before, after))
    pairs = [(r.mfu, value_at(new, r.devices, "mfu")) for r in (old.records if old else ())]
    return [100 * (later - earlier) for earlier, later in pairs if earlier is not None and later is not None]


# --- strong scaling ---

MARGINAL = {"share": "device", "joule_share": "joule", "usd_share": "dollar"}


def strong_claims(records: Sequence[Record]) -> Iterator[Claim]:
    """A fixed batch on more devices, with the best of all plans."""
    line = line_of(records, "free")
    known = line.records if line else ()
    rates = [value for record in known if (value := getattr(record, PER_DEVICE)) is not None]
    strong = partial(
        scaling_claim,
        source=f"{WORK}: claim 2, strong scaling; no number",
        published=None,
        unit="%",
        assumption="study strong-scaling, strategy free",
        missing="fewer than two scales fit",
    )
    enough = len(rates) > 1
    scales = f", {known[0].devices:,} to {known[-1].devices:,} devices" if known else ""
    yield strong(
        text=f"Strong scaling of a 7B, best plan: throughput per device{scales}",
        ours=100 * (rates[-1] / rates[0] - 1) if enough else None,
        bounds=Bounds(most=-TOLERANCE),
    )
    yield strong(
        text="The same: most that throughput per device rises from one scale to the next",
        ours=max(100 * (later / earlier - 1) for earlier, later in pairwise(rates)) if enough else None,
        bounds=Bounds(most=MOST_RISE),
    )
    steps = marginal(line) if line else ()
    for quantity, words in MARGINAL.items():
        share = getattr(steps[-1], quantity) if steps else None
        yield strong(
            text=f"The same: what the last step gives per further {words}, of what the first scale gives",
            ours=None if share is None else 100 * share,
            bounds=Bounds(most=100 - TOLERANCE),
        )


# --- knees ---


def knee_claims(records: Sequence[Record], by: str, words: str) -> Iterator[Claim]:
    """For each value of `by` and the next, in the order of the study: where a further device stops paying."""
    for before, after in pairwise(dict.fromkeys(getattr(record, by) for record in records)):
        yield shift_claim(records, by, words, (before, after))


def shift_claim(records: Sequence[Record], by: str, words: str, values: tuple[object, object]) -> Claim:
    """Two series at the scales that both have. Where neither has a knee, what is lost says which is to the right.

    Lost over the work's own range: at the smallest scales a series may recompute for want of memory, and be slow for a
    reason that is not scale.
    """
    lines = common([line_of(records, "fsdp", **{by: value}) for value in values])
    small, large = (f"{value:,} tokens" if isinstance(value, int) else str(value) for value in values)
    shift = partial(
        scaling_claim,
        source=f"{WORK}: {words} ablation; no number",
        published=None,
        assumption=f"study {words.replace(' ', '-')}, strategy fsdp, at the scales where both fit; the knee is where a"
        f" further device gives less than {STOP_BELOW:.0%} of what each of the first does; where neither has one, what"
        f" is lost over the work's range (small scales may be slow because they recompute for want of memory)",
        missing="too few scales where both fit",
    )
    text = f"The knee shifts right from {small} to {large}"
    if not lines or len(lines[0].records) < 2:
        return shift(text=text, ours=None, unit="x", bounds=Bounds(least=LEAST_SHIFT))
    last = lines[0].records[-1].devices
    knees = [knee(line, STOP_BELOW) for line in lines]
    if knees == [None, None]:
        lost = [change(line, PER_DEVICE, START, END) for line in lines]
        return shift(
            text=f"Neither {small} nor {large} have a knee; the latter lose less, {START:,} to {END:,} devices",
            ours=None if lost[0] is None or lost[1] is None else lost[1] - lost[0],
            unit="points",
            bounds=Bounds(least=LEAST_GAIN),
        )
    one, other = (found.devices if found else float(last) for found in knees)
    beyond = "" if knees[1] else f" (beyond {last:,} devices)"
    return shift(text=f"{text}{beyond}", ours=other / one, unit="x", bounds=Bounds(least=LEAST_SHIFT))


def common(lines: Sequence[Series | None]) -> list[Series]:
    """Series at the scales that all of them have; none where one is missing."""
    there = [line for line in lines if line]
    if len(there) < len(lines):
        return []
    shared = set.intersection(*({record.devices for record in line.records} for line in there))
    return [replace(line, records=tuple(r for r in line.records if r.devices in shared)) for line in there]
