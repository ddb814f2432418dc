"""Records of a study by what may be compared: a group differs in devices and strategy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from wavetrain.base.units import format_bytes, format_count
from wavetrain.show.page import clean
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.returns import Series, Setting, best, series, setting_of
from wavetrain.study.scaling.spec import Study


@dataclass(frozen=True)
class Group:
    """Points of one model, length, node, objective and way to grow the batch."""

    number: int
    setting: Setting
    words: str  # what sets it apart from the other groups
    strategies: tuple[str, ...]
    records: tuple[Record, ...]

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({record.devices for record in self.records}))

    @cached_property
    def _by_place(self) -> dict[tuple[str, int], Record]:
        return {(record.strategy, record.devices): record for record in self.records}

    def at(self, strategy: str, devices: int) -> Record | None:
        """The record there, whether anything fits or not."""
        return self._by_place.get((strategy, devices))

    def line(self, strategy: str) -> tuple[Record, ...]:
        """What a strategy does at every scale at which it fits."""
        found = (self.at(strategy, devices) for devices in self.devices)
        return tuple(record for record in found if record is not None and record.fits)

    @cached_property
    def best(self) -> tuple[Record, ...]:
        """The best of all strategies at every scale at which any fits, by the objective; the first named of equals."""
        ordered = sorted(self.records, key=lambda record: self.strategies.index(record.strategy))
        return best(ordered)

    @cached_property
    def series(self) -> tuple[Series, ...]:
        """Every strategy's, in their order."""
        by_name = {line.strategy: line for line in series(self.records)}
        return tuple(by_name[name] for name in self.strategies)


def groups_of(study: Study, records: Iterable[Record]) -> tuple[Group, ...]:
    """All groups, in the order of their first records; strategies in the order of the study."""
    by_setting: dict[Setting, dict[tuple[str, int], Record]] = {}
    for record in records:  # of equal points the first counts
        by_setting.setdefault(setting_of(record), {}).setdefault((record.strategy, record.devices), record)
    ordered = [strategy.name for strategy in study.strategies]
    names = words_of(tuple(by_setting))
    made = []
    for number, (setting, own) in enumerate(by_setting.items()):
        used = dict.fromkeys(strategy for strategy, _ in own)
        strategies = tuple(name for name in dict.fromkeys((*ordered, *used)) if name in used)
        made.append(Group(number, setting, names[number], strategies, tuple(own.values())))
    return tuple(made)


def words_of(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Names of groups: what differs between them; all there is where there is one."""
    shown = [
        (
            clean(setting.model, 60),
            f"{setting.seq_len:,} tokens",
            clean(setting.node, 60),
            f"best {clean(setting.objective, 30)}",
            f"batch {clean(setting.batch, 40)}",
        )
        for setting in settings
    ]
    alone = (True, True, True, False, True)
    differ = [len({words[i] for words in shown}) > 1 for i in range(5)] if len(settings) > 1 else alone
    return tuple(", ".join(word for word, told in zip(words, differ, strict=True) if told) for words in shown)


def chosen(records: Sequence[Record], most: int = 3) -> tuple[Record, ...]:
    """Some of them, evenly: the first, the last and between."""
    if len(records) <= most:
        return tuple(records)
    return tuple(records[round(i * (len(records) - 1) / (most - 1))] for i in range(most))


# --- numbers in words ---


def finite(value: float | None) -> float | None:
    """A number to draw, in as many digits as an eye sees."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def said(value: float | None, unit: str = "", *, spec: str = ".3g") -> str:
    """A number in a table."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:{spec}}{unit}"


def percent(value: float | None, digits: int = 1) -> str:
    return said(None if value is None else 100 * value, " %", spec=f".{digits}f")


def counted(value: float | None) -> str:
    return format_count(value) if value is not None and math.isfinite(value) else "-"


def sized(value: float | None) -> str:
    return format_bytes(value) if value is not None and math.isfinite(value) else "-"


def spaced(seconds: float | None) -> str:
    """A long time in the unit that fits it."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for size, unit in ((365.25 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def money(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"${value:,.0f}" if value >= 1000 else f"${value:.4g}"
