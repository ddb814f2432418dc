"""What a study found, in sentences computed from its records. Names are passed on as they are: who shows them escapes.

Of every setting first: which strategy is best where, what failures cost at the largest scale, what would help there.
Then of every strategy: how per-device throughput, power and tokens per joule change, how far more devices pay, where
nothing fits; of the first one and of the best at the largest scale also what the last step gives and what binds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from wavetrain.base.units import format_bytes
from wavetrain.sim.breakdown import TERMS
from wavetrain.study.scaling.goodput import mtbi_seconds
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.returns import Knee, Series, Setting, best, crossovers, knee, marginal, quantity_of, series
from wavetrain.study.scaling.spec import Study

BINDS = 0.02  # of a step: a term that costs less does not bind
HELPS = 1.005  # throughput over the present: less is not worth a sentence
UNCHANGED = 0.0005  # shares that are shown as 0.0 %
COMPUTE = "compute"
EXPOSED = ("tensor", "context", "sharding", "transfer", "reduction", "gather")
MOST_SETTINGS = 24  # told one by one
MOST_SCALES = 6  # listed in a sentence
BEST = {"tokens_per_joule": "gives most tokens per joule", "tokens_per_s": "is the fastest"}  # `quantity_of` in words


# --- what a record says of itself ---


def binding(terms: Mapping[str, float]) -> str:
    """The term that costs most beside computing; "compute" where none costs 2 % of a step."""
    step_s = sum(terms.values())
    others = {name: seconds for name, seconds in terms.items() if name != COMPUTE and seconds > 0}
    largest = max(others, key=lambda name: others[name], default=COMPUTE)
    return largest if largest != COMPUTE and others[largest] >= BINDS * step_s else COMPUTE


def exposed_share(terms: Mapping[str, float]) -> float:
    """Share of a step in which something is communicated and nothing computed beside it."""
    step_s = sum(terms.values())
    return sum(terms.get(name, 0.0) for name in EXPOSED) / step_s if step_s else 0.0


# --- sentences ---


def findings(study: Study, records: Sequence[Record]) -> tuple[str, ...]:
    """What the records show, setting by setting in their order."""
    by_setting: dict[Setting, list[Series]] = {}
    for line in series(records):
        by_setting.setdefault(line.setting, []).append(line)
    said: list[str] = []
    for setting, lines in list(by_setting.items())[:MOST_SETTINGS]:
        head = _head(setting, list(by_setting))
        said += (_sentence(head, text) for text in _setting(study, lines))
    untold = len(by_setting) - MOST_SETTINGS
    if untold > 0:
        said.append(f"{untold:,} further settings are in the records only.")
    return tuple(said)


def _head(setting: Setting, every: Sequence[Setting]) -> str:
    """What tells a setting from the others."""
    words = {
        "model": setting.model,
        "seq_len": f"{setting.seq_len:,} tokens",
        "node": setting.node,
        "objective": setting.objective,
        "batch": setting.batch,
    }
    return ", ".join(text for name, text in words.items() if len({getattr(other, name) for other in every}) > 1)


def _sentence(head: str, text: str) -> str:
    return f"{head}: {text}." if head else f"{text}."


def _setting(study: Study, lines: Sequence[Series]) -> Iterator[str]:
    winners = best(_records(lines))
    last = winners[-1] if winners else None
    if len(lines) > 1:
        yield from _winners(lines, winners)
        yield from _at_best(study, lines, winners)
    if last is not None:
        yield from _failures(study, last)
        yield from _help(last)
    for number, line in enumerate(lines):
        told = number == 0 or (last is not None and line.strategy == last.strategy)
        yield from (f"{line.strategy}: {text}" for text in _line(study, line, told=told))


def _records(lines: Iterable[Series]) -> list[Record]:
    return [record for line in lines for record in (*line.records, *line.missing)]


# --- of one strategy ---


def _line(study: Study, line: Series, *, told: bool) -> Iterator[str]:
    yield from _missing(line)
    if len(line.records) > 1:
        yield _change(line)
        yield _paying(study, line)
    if told:
        yield from _last_step(line)
        yield from _bound(line)


def _missing(line: Series) -> Iterator[str]:
    unknown = [record for record in line.missing if record.ran_out]
    unfit = [record for record in line.missing if not record.ran_out]
    if unfit and (line.records or unknown):
        yield f"nothing fits on {_scales(unfit)}"
    elif unfit:
        yield f"nothing fits at any scale ({_scales(unfit)})"
    if unknown:
        yield f"time ran out before a plan was found on {_scales(unknown)}"


def _scales(records: Sequence[Record]) -> str:
    shown = [f"{record.devices:,}" for record in records[:MOST_SCALES]]
    rest = len(records) - len(shown)
    return f"{_and([*shown, f'{rest:,} further numbers of'] if rest else shown)} {_plural(records[-1].devices)}"


def _change(line: Series) -> str:
    """Per-device throughput, power and tokens per joule, from the smallest to the largest scale that fits."""
    first, last = line.records[0], line.records[-1]
    at_first, at_last = ((record.tokens_per_s or 0.0) / record.devices for record in (first, last))
    parts = [f"tokens/s per device {_moved(at_first, at_last, 'fall')}"]
    if first.power_w_per_device and last.power_w_per_device:
        parts.append(f"power per device {_moved(first.power_w_per_device, last.power_w_per_device, 'falls', ' W')}")
    if first.tokens_per_joule and last.tokens_per_joule:
        parts.append(f"tokens per joule {_moved(first.tokens_per_joule, last.tokens_per_joule, 'fall')}")
    return f"from {first.devices:,} to {last.devices:,} devices {_and(parts)}"


def _moved(first: float, last: float, falls: str, unit: str = "") -> str:
    """`falls` is the verb, of one thing or of several."""
    share = last / first - 1
    verb = falls if share < 0 else falls.replace("fall", "rise")
    if abs(share) < UNCHANGED:
        return f"{falls.replace('fall', 'stay')} the same ({_number(last)}{unit})"
    return f"{verb} by {_tenths(abs(share))} ({_number(first)} to {_number(last)}{unit})"


def _paying(study: Study, line: Series) -> str:
    """How far more devices pay, and how far with failures where those are known."""
    stop, first = study.stop_below, line.records[0].devices
    found, failing = (knee(line, stop, failures=failures) for failures in (False, True))
    start = "one device gives" if first == 1 else f"each of the first {first:,} devices gives"
    if found is None:
        least = min(step.share for step in marginal(line))
        text = f"every step up to {line.records[-1].devices:,} devices pays: the least that a further device gives is "
        text += f"{_percent(least)} of what {start}"
        return text if failing is None else f"{text}, but with failures less than {_percent(stop)} {_from(failing)}"
    text = f"{_from(found)} a further device gives less than {_percent(stop)} of what {start}"
    steps = f"the step from {found.before:,} to {found.after:,} is the first that does not pay"
    text = f"{text}; {steps}"
    if failing is None or _about(failing.devices) == _about(found.devices):
        return text
    return f"{text}; with failures this begins at about {_about(failing.devices)}"


def _from(found: Knee) -> str:
    return f"from about {_about(found.devices)} devices on"


def _last_step(line: Series) -> Iterator[str]:
    steps = marginal(line)
    if not steps:
        return
    last = steps[-1]
    shares = {"per device": last.share, "per watt": last.joule_share, "per dollar": last.usd_share}
    parts = [f"{_percent(share)} {name}" for name, share in shares.items() if share is not None]
    start = line.records[0].devices
    yield (
        f"the last step, from {last.before:,} to {last.after:,} devices, gives {_and(parts)} "
        f"of what the first {'device gives' if start == 1 else f'{start:,} devices give'}"
    )


def _bound(line: Series) -> Iterator[str]:
    """The term that costs most beside compute at the largest scale, and at the smallest."""
    known = [record for record in line.records if sum(record.terms.values()) > 0]
    if not known:
        return
    last, at = known[-1], f"at {known[-1].devices:,} {_plural(known[-1].devices)}"
    term = binding(last.terms)
    if term == COMPUTE:
        yield f"{at} nothing beside compute costs {_percent(BINDS)} of a step"
        return
    words = f"{term} ({TERMS[term]})" if term in TERMS else term
    text = f"{at} {words} costs most beside compute, {_percent(_part(last, term))} of a step"
    first = known[0]
    yield text if first is last else f"{text}; at {first.devices:,} it is {_percent(_part(first, term))}"


def _part(record: Record, term: str) -> float:
    return record.terms.get(term, 0.0) / sum(record.terms.values())


# --- of all strategies of a setting ---


def _winners(lines: Sequence[Series], winners: Sequence[Record]) -> Iterator[str]:
    """Which strategy is best where, and where the best one changes."""
    if not winners:
        return
    words = BEST[quantity_of(lines[0].setting)]
    runs = [(name, list(records)) for name, records in groupby(winners, key=lambda record: record.strategy)]
    parts = [f"{name} {words} {_span(records)}" for name, records in runs]
    yield f"{_and(parts)} {_plural(winners[-1].devices)}"
    found = crossovers(_records(lines))
    for (name, records), (other, after) in pairwise(runs):
        before, now = records[-1].devices, after[0].devices
        for crossing in found:
            if (crossing.first, crossing.second) != (name, other) or not before <= crossing.before < now:
                continue
            if crossing.fits:
                computed = f"computed at {crossing.before:,} and {crossing.after:,}"
                yield f"{other} overtakes {name} at about {_about(crossing.devices)} devices ({computed})"
            else:
                unfit = other if _fails(lines, other, crossing.before) else name
                where = crossing.before if unfit == other else crossing.after
                yield f"{other} takes over from {name} at {crossing.after:,} devices: {unfit} does not fit on {where:,}"


def _at_best(study: Study, lines: Sequence[Series], winners: tuple[Record, ...]) -> Iterator[str]:
    """What more devices give if the strategy may change with the scale."""
    if len({record.strategy for record in winners}) > 1:
        line = Series(lines[0].setting, "", winners)
        yield from (f"with the best strategy at each scale: {text}" for text in (_change(line), _paying(study, line)))


def _fails(lines: Sequence[Series], strategy: str, devices: int) -> bool:
    return any(line.strategy == strategy and devices in {r.devices for r in line.missing} for line in lines)


def _span(records: Sequence[Record]) -> str:
    first, last = records[0].devices, records[-1].devices
    return f"at {first:,}" if first == last else f"from {first:,} to {last:,}"


def _failures(study: Study, record: Record) -> Iterator[str]:
    """What failures cost at one scale."""
    if study.failures is None or record.goodput_share is None:
        return
    mtbi_s = mtbi_seconds(record.devices, study.failures.device_hours)
    text = (
        f"{record.strategy}: on {record.devices:,} {_plural(record.devices)} failures cost "
        f"{_tenths(1 - record.goodput_share)} of the time, with one every {_duration(mtbi_s)} on average"
    )
    if record.interval_s is not None and record.checkpoint_bytes is not None:
        text += f" and a checkpoint ({format_bytes(record.checkpoint_bytes)}) every {_duration(record.interval_s)}"
    yield text


def _help(record: Record) -> Iterator[str]:
    """Which parameter throughput depends on most, and which change of the hardware would help most."""
    at = f"{record.strategy}: on {record.devices:,} {_plural(record.devices)}"
    sizes = {name: abs(value) for name, value in record.elasticity.items()}
    most = max(sizes, key=lambda name: sizes[name], default=None)
    if most is not None and sizes[most] > 0:
        way = "more" if record.elasticity[most] > 0 else "less"
        gained = f"1 % {way} gives {sizes[most]:.2f} % more tokens/s with the same plan"
        yield f"{at} throughput depends most on {most}: {gained}"
    changes = {name: ratio for name, ratio in record.what_if.items() if not name.startswith("price")}
    most = max(changes, key=lambda name: changes[name], default=None)
    if most is None:
        return
    if changes[most] > HELPS:
        yield f"{at} {most} would help most of the changes tried: {changes[most]:.2f} times the tokens/s, planned again"
    else:
        yield f"{at} none of the changes tried would help: {_and(list(changes))}"


# --- words ---


def _and(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def _plural(devices: int) -> str:
    return "device" if devices == 1 else "devices"


def _percent(share: float) -> str:
    """Whole percents, and tenths where there are few."""
    shown = f"{100 * share:.0f}" if abs(share) >= 0.095 else f"{100 * share:.1f}".removesuffix(".0")
    return f"{shown} %"


def _tenths(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _about(devices: float) -> str:
    """Two digits: what lies between computed scales is no better known."""
    return f"{float(f'{devices:.1e}'):,.0f}"


def _duration(seconds: float) -> str:
    for scale, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * scale:
            return f"{_number(float(f'{seconds / scale:.3g}'))} {unit}"
    return f"{seconds:.3g} s"
