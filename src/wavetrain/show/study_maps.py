"""Maps of a study: a cell per strategy and scale (or per tensor and pipeline degree), how good it is, and why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wavetrain.show.page import clean, label
from wavetrain.show.study_bars import ink_on
from wavetrain.show.study_groups import Group
from wavetrain.show.study_lines import NEUTRAL, Figure, Json
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.returns import quantity_of
from wavetrain.study.scaling.spec import Study

SHADES = ("#F1F4F8", "#E2EAF3", "#CFDDEC", "#B8CFE4", "#9CBEDA", "#7CA9CF", "#5C93C1", "#3F7CB2", "#23659F", "#0B4A86")
BEST = 0.9995  # of the best: the same


@dataclass(frozen=True)
class Cell:
    """One place of a map: a record, if it was computed, and how near it comes to the best beside it."""

    record: Record | None
    share: float | None = None

    @property
    def shade(self) -> int:
        """A number in SHADES."""
        return min(int((self.share or 0.0) * len(SHADES)), len(SHADES) - 1)

    @property
    def state(self) -> str:
        """A class of the style sheet."""
        if self.record is None:
            return "none"
        if self.share is None:
            return "out"
        return f"h{self.shade}" + (" best" if self.share >= BEST else "")

    @property
    def text(self) -> str:
        if self.record is None:
            return ""
        return "-" if self.share is None else f"{100 * self.share:.0f}"

    @property
    def spoken(self) -> str:
        """What a screen reader says of it."""
        if self.record is None:
            return "not computed"
        where = f"{clean(self.record.strategy)}, {self.record.devices:,} devices"
        return f"{where}: does not fit" if self.share is None else f"{where}: {100 * self.share:.0f} % of the best"


@dataclass(frozen=True)
class Map:
    """Rows and columns of cells."""

    name: str
    title: str
    note: str
    group: int
    corner: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]

    @property
    def id(self) -> str:
        return f"{self.name}-{self.group + 1}"


def maps(study: Study, group: Group) -> tuple[Map, ...]:
    """Strategies against devices; and where tensor and pipeline degrees are pinned, these at the largest scale."""
    found = (strategy_map(group), degrees_map(study, group))
    return tuple(each for each in found if each is not None)


def strategy_map(group: Group) -> Map:
    best = {record.devices: _value(group, record) for record in group.best}
    return Map(
        name="strategies",
        title="Strategies by scale",
        note=f"{_quantity_words(group)} as percent of the best strategy at that scale. Hatched: does not fit. "
        "Press a cell to see the plan, or why there is none.",
        group=group.number,
        corner="strategy",
        row_names=tuple(clean(name, 60) for name in group.strategies),
        column_names=tuple(f"{devices:,}" for devices in group.devices),
        cells=tuple(
            tuple(_cell(group, group.at(name, devices), best.get(devices)) for devices in group.devices)
            for name in group.strategies
        ),
    )


def _quantity_words(group: Group) -> str:
    return "Tokens per joule" if quantity_of(group.setting) == "tokens_per_joule" else "Throughput"


def _value(group: Group, record: Record | None) -> float | None:
    """What the objective wants most of; None where nothing fits."""
    value: float | None = getattr(record, quantity_of(group.setting)) if record is not None and record.fits else None
    return value


def _cell(group: Group, record: Record | None, best: float | None) -> Cell:
    value = _value(group, record)
    return Cell(record, value / best if value is not None and best else None)


def degrees_map(study: Study, group: Group) -> Map | None:
    """Tensor degrees down, pipeline degrees across, the best of the strategies that pin both, at the largest scale."""
    devices = group.devices[-1]
    places: dict[tuple[int, int], list[Record]] = {}
    for strategy in study.strategies:
        record = group.at(strategy.name, devices)
        if record is not None and {"tp", "pp"} <= strategy.pins.keys():
            places.setdefault((int(strategy.pins["tp"]), int(strategy.pins["pp"])), []).append(record)
    rows, columns = (tuple(sorted({place[i] for place in places})) for i in (0, 1))
    if min(len(rows), len(columns)) < 2 or 2 * len(places) < len(rows) * len(columns):
        return None  # a list, or a few cells far apart
    most = {place: max(found, key=lambda r: _value(group, r) or 0.0) for place, found in places.items()}
    best = max(_value(group, record) or 0.0 for record in most.values())
    return Map(
        name="degrees",
        title=f"Tensor and pipeline degrees at {devices:,} devices",
        note=f"{_quantity_words(group)} as percent of the best of these, the rest of each plan as the search chose it.",
        group=group.number,
        corner="TP \\ PP",
        row_names=tuple(f"TP {tp}" for tp in rows),
        column_names=tuple(f"PP {pp}" for pp in columns),
        cells=tuple(tuple(_cell(group, most.get((tp, pp)), best) for pp in columns) for tp in rows),
    )


def map_figure(shown: Map) -> Figure:
    """A map as a picture: cells are bars, which plotly can hatch."""
    height = len(shown.row_names)
    data = []
    for down, cells in enumerate(shown.cells):
        there = [(across, cell) for across, cell in enumerate(cells) if cell.record is not None]
        colours = [SHADES[cell.shade] if cell.share is not None else "#D9DDE2" for _, cell in there]
        data.append(
            {
                "type": "bar",
                "x": [across for across, _ in there],
                "y": [0.94] * len(there),
                "base": height - 1 - down + 0.03,
                "width": 0.96,
                "marker": {
                    "color": colours,
                    "pattern": {
                        "shape": _each(there, lambda c: "" if c.share is not None else "/"),
                        "fgcolor": NEUTRAL,
                        "size": 7,
                        "solidity": 0.25,
                    },
                    "line": {"width": _each(there, lambda c: 2.5 if "best" in c.state else 0), "color": "#D55E00"},
                },
                "text": _each(there, lambda c: c.text),
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "textfont": {"color": [ink_on(colour) for colour in colours], "size": 12},
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    layout = {
        "barmode": "overlay",
        "xaxis": _ticks(shown.column_names, range(len(shown.column_names)))
        | {"title": {"text": "devices"} if shown.name == "strategies" else {}},
        "yaxis": _ticks(shown.row_names, [height - 0.5 - down for down in range(height)]) | {"range": [0, height]},
        "height": 110 + 34 * height,
        "showlegend": False,
    }
    return Figure(
        name=f"map-{shown.name}",
        section="strategies",
        title=shown.title,
        note=shown.note,
        data=data,
        layout=layout,
        columns=(shown.corner, *shown.column_names),
        rows=tuple(
            (name, *(cell.text for cell in cells)) for name, cells in zip(shown.row_names, shown.cells, strict=True)
        ),
        group=shown.group,
    )


def _each(there: Sequence[tuple[int, Cell]], what: Callable[[Cell], str | float]) -> list[str | float]:
    return [what(cell) for _, cell in there]


def _ticks(names: Sequence[str], places: Sequence[float]) -> Json:
    shown = [label(name, 32) for name in names]
    return {"tickvals": list(places), "ticktext": shown, "showgrid": False, "zeroline": False}
