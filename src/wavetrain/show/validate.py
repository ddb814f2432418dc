"""Predictions against measurements, described: the sets, what can't be expressed, the worst rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wavetrain.base.codec import encode
from wavetrain.base.units import format_seconds, printable
from wavetrain.show.tables import facts, grid
from wavetrain.study.outcome import Outcome
from wavetrain.study.validate import CAVEAT, SetSummary, Unexpressed, Validation, finite, place, unexpressed, worst

Json = dict[str, Any]
SCHEMA = "wavetrain.validation/1"
MOST_REASONS = 10
COLUMNS = ("set", ">rows", ">can't", ">mean", ">med.", ">p90", ">bias", ">mem.", ">OOM", ">Spear\nman", ">regret")


def document(validation: Validation) -> Json:
    """The sets and the rows, for machines; errors in percent."""
    return {
        "schema": SCHEMA,
        "sets": [encode(item) for item in validation.sets],
        "rows": [_row_document(row) for row in validation.outcomes],
    }


def _row_document(row: Outcome) -> Json:
    data = {
        "row_id": row.row_id,
        "file": row.file,
        "line": row.line,
        "status": row.status,
        "scored": bool(row.scored),
        "measured_step_s": finite(row.measured_step_s),
        "predicted_step_s": finite(row.predicted_step_s),
        "measured_peak_bytes": finite(row.measured_peak_bytes),
        "predicted_peak_bytes": finite(row.predicted_peak_bytes),
        "fits": None if row.fits is None else bool(row.fits),
        "assumptions": list(row.assumptions),
    }
    return data if row.expressible else {**data, "reason": row.reason}


def card(validation: Validation) -> RenderableType:
    """The same for people."""
    if not validation.outcomes:
        return Text("no rows")
    parts: list[RenderableType] = [_set_table(validation.sets), "", facts("how to read it", _legend(validation))]
    reasons = _reason_table(validation)
    if reasons.row_count:
        parts += ["", reasons]
    largest = _worst_table(validation)
    if largest.row_count:
        parts += ["", largest]
    return Group(*parts)


def _set_table(sets: tuple[SetSummary, ...]) -> Table:
    table = grid(*COLUMNS)
    table.padding = (0, 1, 0, 0)  # eleven columns in eighty characters
    table.columns[0].min_width = 16
    for column in table.columns[1:]:
        column.no_wrap = True
    for item in sets:
        table.add_row(
            _name(item),
            str(item.rows),
            str(item.rows - item.expressible),
            _percent(item.mape),
            _percent(item.median_ape),
            _percent(item.p90_ape),
            _percent(item.bias, sign="+"),
            _percent(item.memory_mape),
            _percent(item.oom_accuracy),
            "-" if item.spearman is None else f"{item.spearman:.2f}",
            _percent(item.regret),
        )
    return table


def _name(item: SetSummary) -> Text:
    if item.is_file:
        return Text(printable(item.name, most=60) + ("" if item.counts else " *"), style="bold")
    title = " ".join(filter(None, (item.family, item.source))) or "no source"
    return Text(f"{'-' if item.counts else '*'} {printable(title, most=44)}")


def _percent(value: float | None, *, sign: str = "") -> str:
    if value is None:
        return "-"
    if abs(value) > 99999:
        return ">99999" if value > 0 else "<-99999"
    return f"{value:{sign}z.{1 if abs(value) < 99.95 else 0}f}"


def _legend(validation: Validation) -> Iterator[tuple[str, str]]:
    yield "can't", "rows that can't be expressed; the reasons are below"
    yield "mean ... bias", "error of the step time in %: mean, median, 90th percentile; signed mean"
    yield "mem.", "mean error of the peak memory in %"
    yield "OOM", "% of runs rightly predicted to fit or to run out of memory"
    yield "Spearman", "rank correlation of the layouts of a workload: 1 is the same order"
    yield "regret", "% of time lost by running the layout predicted fastest"
    yield "mind", CAVEAT
    if not all(item.counts for item in validation.sets):
        yield "*", "no row of this set counts; errors are over all its rows"
    unpriced = sum(item.unpriced for item in validation.sets if item.is_file)
    if unpriced:
        yield "left out", f"{unpriced} rows have no finite prediction"


def _reason_table(validation: Validation) -> Table:
    found = unexpressed(validation.outcomes)
    table = grid(">rows", "can't be expressed because", "for example")
    for item in found[:MOST_REASONS]:
        table.add_row(str(item.rows), _plain(item.reason, 200), _examples(item))
    rest = found[MOST_REASONS:]
    if rest:
        table.add_row(str(sum(item.rows for item in rest)), f"{len(rest)} more reasons; --json has all", "")
    return table


def _examples(item: Unexpressed) -> Text:
    return Text("\n".join(printable(example, most=60) for example in item.examples[:2]))


def _worst_table(validation: Validation) -> Table:
    table = grid("largest errors", ">measured", ">predicted", ">error %")
    for row, error in worst(validation):
        times = (format_seconds(row.measured_step_s or 0), format_seconds(row.predicted_step_s or 0))
        table.add_row(_plain(place(row), 60), *times, _percent(error, sign="+"))
    return table


def _plain(text: str, most: int) -> Text:
    return Text(printable(text, most=most))
