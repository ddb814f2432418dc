"""Numbers that were measured by running, in `executed.yaml`; benchmarks write them there with `--record`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import yaml

from wavetrain.base.document import parse_yaml, read_text
from wavetrain.base.fields import Fields
from wavetrain.study.claims.claim import Executed

HEAD = "# What was measured by running, by run; each is written by the command that it states (docs/claims.md).\n"


@dataclass(frozen=True)
class Measurement:
    """One run of a benchmark: what it measured, by name."""

    command: str
    date: str
    how: str
    values: Mapping[str, float]


def read_measurements(text: str, file: str) -> dict[str, Measurement]:
    """All runs of a file; what is wrong with it at once, with lines."""
    f = Fields(parse_yaml(text, file=file))
    found = {name: _measurement(f.section(name)) for name in f.items}
    f.finish()
    return found


def _measurement(f: Fields) -> Measurement:
    command, date, how, values = f.text("command"), f.text("date"), f.text("how"), f.section("values")
    numbers = {name: values.number(name, least=-1e30) for name in values.items}
    f.check_unknown()
    return Measurement(command, date, how, numbers)


def record(path: Path, name: str, command: str, how: str, values: Mapping[str, float]) -> None:
    """Put one run in a file, today, in the place of what the file has of it; other runs stay."""
    runs = read_measurements(read_text(path), str(path)) if path.exists() else {}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    rounded = {key: float(f"{value:.4g}") for key, value in values.items()}
    runs[name] = Measurement(command, today, how, rounded)
    data = {key: asdict(run) for key, run in sorted(runs.items())}
    text = HEAD + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
    read_measurements(text, str(path))  # what could not be read again is not written
    path.write_text(text, encoding="utf-8")


@cache
def _shipped() -> dict[str, Measurement]:
    file = resources.files("wavetrain.study.claims").joinpath("executed.yaml")
    return read_measurements(file.read_text(encoding="utf-8"), "executed.yaml")


def executed(run: str, name: str) -> Executed | None:
    """What a run measured under a name; None where nothing was."""
    found = _shipped().get(run)
    if found is None or name not in found.values:
        return None
    return Executed(found.values[name], found.how, found.command, found.date)


def measured(run: str, name: str) -> float | None:
    found = executed(run, name)
    return found.value if found else None
