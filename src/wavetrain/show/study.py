"""A study on the terminal, as JSON, CSV and Markdown: what each scale gives, and what follows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from wavetrain.base.units import format_count, printable
from wavetrain.show.tables import facts, grid
from wavetrain.study.scaling.findings import findings
from wavetrain.study.scaling.read import num_points
from wavetrain.study.scaling.record import Record, flat
from wavetrain.study.scaling.returns import Return, Setting, best, crossovers, knee, marginal, series, setting_of
from wavetrain.study.scaling.run import Done
from wavetrain.study.scaling.spec import Study

Json = dict[str, Any]
SCHEMA = "wavetrain.study/1"
READY_SCHEMA = "wavetrain.studies/1"
COLUMNS = (">devices", "best", ">tokens/s", ">each", ">MFU", ">next", ">W", ">$/Mtok", ">goodput", "slowed by")
MOST_SETTINGS = 12  # tables on a terminal; files have all
SPREADSHEET = ("=", "+", "-", "@", "\t", "\r")  # what a cell must not begin with: spreadsheets take it for a formula


# --- for machines ---


def study_document(study: Study, done: Done) -> Json:
    """All of a study: what was asked, its records, and what follows from them."""
    lines = series(done.records)
    knees = [(line, knee(line, study.stop_below)) for line in lines]
    return {
        "schema": SCHEMA,
        "study": asdict(study) | {"num_points": num_points(study)},
        "computed": done.computed,
        "reused": done.reused,
        "findings": list(findings(study, done.records)),
        "best": [_best_data(record) for record in best(done.records)],
        "marginal": [_line_data(line.setting, line.strategy) | {"steps": _steps(marginal(line))} for line in lines],
        "knees": [_line_data(one.setting, one.strategy) | asdict(found) for one, found in knees if found],
        "crossovers": [asdict(one) for one in crossovers(done.records)],
        "records": [record.as_json() for record in done.records],
    }


def _line_data(setting: Setting, strategy: str) -> Json:
    return asdict(setting) | {"strategy": strategy}


def _steps(returns: Iterable[Return]) -> list[Json]:
    return [asdict(one) for one in returns]


def _best_data(record: Record) -> Json:
    return asdict(setting_of(record)) | {
        "devices": record.devices,
        "strategy": record.strategy,
        "plan": record.plan,
        "tokens_per_s": record.tokens_per_s,
    }


def records_csv(records: Sequence[Record]) -> str:
    """One line per point, one column per number; the same columns in every line."""
    rows = [flat(record) for record in records]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    columns.sort(key=lambda name: "." in name)  # what only some points have comes last
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])
    return out.getvalue()


def _cell(value: str | float | bool | None) -> str | float | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}" if isinstance(value, str) and value.startswith(SPREADSHEET) else value


# --- for people ---


def study_card(study: Study, done: Done, written: Sequence[Path]) -> RenderableType:
    """A table per setting of the best strategy at each scale, what follows, and where the rest is."""
    title = printable(study.title or study.name, most=200)
    parts: list[RenderableType] = [Text(title, style="bold"), Text(_counted(done)), Text("")]
    settings = list(dict.fromkeys(setting_of(record) for record in done.records))
    for setting in settings[:MOST_SETTINGS]:
        own = [record for record in done.records if setting_of(record) == setting]
        parts += [Text(_setting_words(setting)), _table(own), *_overtaking(own), Text("")]
    if len(settings) > MOST_SETTINGS:
        parts.append(Text(f"and {len(settings) - MOST_SETTINGS} more settings, in the files"))
    parts += [Text(f"- {printable(sentence, most=600)}") for sentence in findings(study, done.records)]
    parts += [Text(""), facts("files", [(path.name, str(path)) for path in written])]
    return Group(*parts)


def _counted(done: Done) -> str:
    return f"{len(done.records):,} points: {done.computed:,} computed, {done.reused:,} known; {done.seconds:.0f} s"


def _setting_words(setting: Setting) -> str:
    return printable(
        f"{setting.model}, {setting.seq_len:,} tokens, {setting.node}, {setting.batch}, best for {setting.objective}",
        most=200,
    )


def _table(records: Sequence[Record]) -> RenderableType:
    table = grid(*COLUMNS)
    for row in _rows(records):
        table.add_row(*map(Text, row))
    return table


def _rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """The best strategy at each number of devices; where nothing fits, that."""
    found = {record.devices: record for record in best(records)}
    further = _further(tuple(found.values()))
    for devices in sorted({record.devices for record in records}):
        record = found.get(devices)
        if record is None:
            yield (f"{devices:,}", _nothing(records, devices), *[""] * (len(COLUMNS) - 2))
            continue
        yield (
            f"{devices:,}",
            printable(record.strategy, most=24),
            format_count(record.tokens_per_s or 0.0).replace(" ", ""),
            f"{record.tokens_per_s_per_device:,.0f}",
            f"{record.mfu:.1%}",
            further.get(devices, ""),
            f"{record.power_w_per_device:,.0f}",
            f"{record.usd_per_million_tokens:.3g}",
            "" if record.goodput_share is None else f"{record.goodput_share:.1%}",
            record.bound_by,
        )


def _nothing(records: Sequence[Record], devices: int) -> str:
    """Nothing fits, or nothing was found in time."""
    unknown = any(record.ran_out for record in records if record.devices == devices)
    return "no plan found" if unknown else "nothing fits"


def _overtaking(records: Sequence[Record]) -> Iterator[Text]:
    """From which scale on one strategy is better than another."""
    for one in crossovers(records):
        fits = "" if one.fits else ", where the other does not fit"
        words = f"{one.second} is better than {one.first} from about {one.devices:,.0f} devices on{fits}"
        yield Text(f"{printable(words, most=160)} (computed at {one.before:,} and {one.after:,})")


def _further(records: Sequence[Record]) -> dict[int, str]:
    """What a device of the step to each scale gives, as a share of the first ones."""
    if not records:
        return {}
    (line,) = series(replace(record, strategy="best") for record in records)  # whichever that is at each
    return {step.after: f"{step.share:.0%}" for step in marginal(line)}


def study_markdown(study: Study, done: Done) -> str:
    """A summary with the findings in sentences and a table per setting."""
    lines = [f"# {_plain(study.title or study.name)}", "", "## Findings", ""]
    lines += [f"- {_plain(sentence)}" for sentence in findings(study, done.records)]
    for setting in dict.fromkeys(setting_of(record) for record in done.records):
        own = [record for record in done.records if setting_of(record) == setting]
        heads = [name.removeprefix(">") for name in COLUMNS]
        lines += ["", f"## {_plain(_setting_words(setting))}", "", f"| {' | '.join(heads)} |"]
        lines.append("|" + "|".join("---:" if name.startswith(">") else "---" for name in COLUMNS) + "|")
        lines += [f"| {' | '.join(map(_plain, row))} |" for row in _rows(own)]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text in which Markdown and HTML see nothing."""
    shown = printable(text, most=2000)
    for character in "\\`*_[]<>|#":
        shown = shown.replace(character, f"\\{character}")
    return shown


# --- ready studies ---


def ready_document(found: Sequence[Study]) -> Json:
    return {
        "schema": READY_SCHEMA,
        "studies": [{"name": one.name, "title": one.title, "num_points": num_points(one)} for one in found],
    }


def ready_table(found: Sequence[Study]) -> RenderableType:
    table = grid("study", ">points", "what it asks")
    for one in found:
        table.add_row(Text(one.name), Text(f"{num_points(one):,}"), Text(one.title))
    return table
