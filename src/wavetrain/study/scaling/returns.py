"""What a further device gives, the scale where that stops paying, and the scale where a strategy overtakes another.

All is arithmetic on records. Between scales that were computed, values are taken to be straight lines over the
logarithm of the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, dropwhile, pairwise
from math import log, sqrt

from wavetrain.study.scaling.record import Record

SECONDS_PER_HOUR = 3600.0
SAME = 1e-9  # values that differ by less of themselves are equal: rounding, not a difference


@dataclass(frozen=True, order=True)
class Setting:
    """What strategies are compared within."""

    model: str
    seq_len: int
    node: str
    objective: str
    batch: str


@dataclass(frozen=True)
class Series:
    """Records of one strategy that differ in the number of devices only."""

    setting: Setting
    strategy: str
    records: tuple[Record, ...]  # those that fit, fewest devices first
    missing: tuple[Record, ...] = ()  # those that do not


@dataclass(frozen=True)
class Return:
    """What the step from `before` to `after` devices gives.

    Per device: further tokens/s over further devices. Per joule: further tokens/s over further watts. Per dollar:
    further tokens/s over further dollars per second. Shares are of what the smallest size that fits has per device, per
    joule, per dollar. None where that many devices draw or cost no more, or nothing is known of it.
    """

    before: int
    after: int
    tokens_per_s: float  # per further device
    share: float
    tokens_per_joule: float | None = None
    joule_share: float | None = None
    tokens_per_usd: float | None = None
    usd_share: float | None = None


@dataclass(frozen=True)
class Knee:
    """Where a further device begins to give less than a share of what each of the first ones does.

    All steps up to `before` pay, the one to `after` does not: both were computed. A step's return is that of a device
    in its middle (the geometric mean of its ends); `devices` is where the line through these falls to `stop_below`, so
    it lies between the middle of the last step that pays and that of the first that does not.
    """

    stop_below: float
    devices: float
    before: int
    after: int


@dataclass(frozen=True)
class Crossover:
    """From `devices` on `second` is better than `first`, which was better before, or equal since the smallest scale.

    `before` and `after` were computed. Where both strategies fit at both, `devices` is where the logarithm of their
    ratio is zero. Else one of them begins or ceases to fit between: `fits` is False and `devices` is `after`.
    """

    setting: Setting
    first: str
    second: str
    devices: float
    before: int
    after: int
    fits: bool = True  # both do, on both sides


# --- series ---


def setting_of(record: Record) -> Setting:
    return Setting(record.model, record.seq_len, record.node, record.objective, record.batch)


def series(records: Iterable[Record]) -> tuple[Series, ...]:
    """Records by setting and strategy, in the order in which these first appear; of equal points the first counts."""
    found: dict[tuple[Setting, str], dict[int, Record]] = {}
    for record in records:
        found.setdefault((setting_of(record), record.strategy), {}).setdefault(record.devices, record)
    return tuple(_series(setting, strategy, list(points.values())) for (setting, strategy), points in found.items())


def _series(setting: Setting, strategy: str, points: list[Record]) -> Series:
    points.sort(key=lambda record: record.devices)
    fitting = tuple(record for record in points if _value(record, "tokens_per_s") is not None)
    missing = tuple(record for record in points if _value(record, "tokens_per_s") is None)
    return Series(setting, strategy, fitting, missing)


def _value(record: Record, quantity: str) -> float | None:
    """A number of a record that fits; None where there is none, or none that could be compared."""
    value = getattr(record, quantity) if record.fits else None
    return float(value) if value is not None and value > 0 else None


# --- marginal returns ---


def marginal(line: Series, *, failures: bool = False) -> tuple[Return, ...]:
    """What each step to more devices gives; with `failures` in tokens that need not be trained on again.

    Scales at which nothing fits are stepped over. Nothing where fewer than two scales are known.
    """
    quantity = "goodput_tokens_per_s" if failures else "tokens_per_s"
    stated = [record for record in line.records if getattr(record, quantity) is not None]
    known = list(dropwhile(lambda record: _value(record, quantity) is None, stated))  # a share of nothing is none
    return tuple(_return(known[0], before, after, quantity) for before, after in pairwise(known))


def _return(first: Record, before: Record, after: Record, quantity: str) -> Return:
    gained, rate = getattr(after, quantity) - getattr(before, quantity), getattr(first, quantity)

    def further(price: str, scale: float = 1.0) -> tuple[float | None, float | None]:
        """Further tokens for each further unit of `price`, and as a share of what the first size has."""
        start, low, high = (_value(record, price) for record in (first, before, after))
        if start is None or low is None or high is None or high - low <= SAME * high:
            return None, None
        return scale * gained / (high - low), gained / (high - low) / (rate / start)

    per_device = gained / (after.devices - before.devices)
    share = per_device / (rate / first.devices)
    per_joule, per_usd = further("power_w"), further("usd_per_hour", SECONDS_PER_HOUR)
    return Return(before.devices, after.devices, per_device, share, *per_joule, *per_usd)


def knee(line: Series, stop_below: float, *, failures: bool = False) -> Knee | None:
    """Where a further device begins to give less than `stop_below` of what each of the first ones does.

    The first step that pays less decides, whatever comes after it. None where every step pays.
    """
    place: float | None = None
    share = 1.0
    for step in marginal(line, failures=failures):
        middle = sqrt(step.before * step.after)
        if step.share < stop_below - SAME:
            start = float(step.before) if place is None else place
            part = (share - stop_below) / (share - step.share) if share > stop_below else 0.0
            return Knee(stop_below, _between(start, middle, part), step.before, step.after)
        place, share = middle, step.share
    return None


def _between(low: float, high: float, part: float) -> float:
    """A number of devices between two others, on a logarithmic scale."""
    return float(low * (high / low) ** part)


# --- strategies against each other ---


def quantity_of(setting: Setting) -> str:
    """What the best strategy of a setting has most of; at one scale all cost the same per hour, so cost is speed."""
    return "tokens_per_joule" if setting.objective == "energy" else "tokens_per_s"


def best(records: Iterable[Record]) -> tuple[Record, ...]:
    """The best strategy at every scale of every setting where any fits; of equals the first that was named."""
    found: dict[tuple[Setting, int], Record] = {}
    values: dict[tuple[Setting, int], float] = {}
    places: dict[Setting, int] = {}
    for record in records:
        setting = setting_of(record)
        place, value = (setting, record.devices), _value(record, quantity_of(setting))
        places.setdefault(setting, len(places))
        if value is not None and value > values.get(place, 0.0) * (1 + SAME):
            found[place], values[place] = record, value
    return tuple(found[place] for place in sorted(found, key=lambda place: (places[place[0]], place[1])))


def crossovers(records: Iterable[Record]) -> tuple[Crossover, ...]:
    """Every scale at which a strategy overtakes another of its setting, by setting, pair and scale.

    A strategy that fits is better than one that does not. Strategies that are equal at first and part later cross once,
    where they part; ones that are equal at all scales do not.
    """
    by_setting: dict[Setting, list[Series]] = {}
    for line in series(records):
        by_setting.setdefault(line.setting, []).append(line)
    return tuple(
        crossing
        for lines in by_setting.values()
        for first, second in combinations(lines, 2)
        for crossing in _crossings(first, second)
    )


@dataclass(frozen=True)
class _Compared:
    """Two strategies at one scale: the logarithm of second over first, infinite where only one fits."""

    devices: int
    log_ratio: float

    @property
    def sign(self) -> int:
        return 0 if abs(self.log_ratio) <= SAME else 1 if self.log_ratio > 0 else -1


def _crossings(first: Series, second: Series) -> Iterable[Crossover]:
    compared = _compared(first, second)
    leader: int | None = None
    for number, now in enumerate(compared):
        if now.sign and leader is not None and now.sign != leader:
            names = (first.strategy, second.strategy)[:: now.sign]
            yield _crossing(first.setting, names, compared[number - 1], now)
        if now.sign or leader is None:
            leader = now.sign


def _crossing(setting: Setting, names: Sequence[str], before: _Compared, after: _Compared) -> Crossover:
    fits = abs(before.log_ratio) < float("inf") and abs(after.log_ratio) < float("inf")
    devices = float(after.devices)
    if fits:
        part = before.log_ratio / (before.log_ratio - after.log_ratio) if before.sign else 0.0
        devices = _between(before.devices, after.devices, part)
    return Crossover(setting, names[0], names[1], devices, before.devices, after.devices, fits)


def _compared(first: Series, second: Series) -> list[_Compared]:
    """Both strategies at every scale that was computed for both and where at least one fits."""
    quantity = quantity_of(first.setting)
    ones, others = (
        {record.devices: _value(record, quantity) for record in (*line.records, *line.missing)}
        for line in (first, second)
    )
    found = []
    for devices in sorted(ones.keys() & others.keys()):
        one, other = ones[devices], others[devices]
        if one is not None and other is not None:
            found.append(_Compared(devices, log(other) - log(one)))
        elif one is not None or other is not None:
            found.append(_Compared(devices, float("-inf") if other is None else float("inf")))
    return found
