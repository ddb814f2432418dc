"""What a run measured, in the simulator's terms, and how it is read back from the files that `train -o` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wavetrain.base.errors import InputError, Problem
from wavetrain.plan.plan import Plan
from wavetrain.plan.read import read_plan
from wavetrain.sim.breakdown import TERMS
from wavetrain.timeline.chrome import read_chrome
from wavetrain.timeline.timeline import Timeline

SCHEMA = "wavetrain.train/1"
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations")  # of memory


def measured_terms(spent: Mapping[str, float], *, step_s: float, idle_share: float | None) -> dict[str, float]:
    """Seconds by term, from the medians of what a rank spent (`runtime.spent`).

    Medians of terms do not quite sum to the median step: all are scaled to it. `idle_share` is what the rank would wait
    if messages took no time (`sim.replay`), over what it waited; the rest is for messages. None: there is no pipeline,
    and what passes between actions is the host's.
    """
    total = sum(spent.values())
    scaled = {name: seconds * step_s / total for name, seconds in spent.items()} if total else {}
    waiting, sending = scaled.pop("waiting", 0.0), scaled.pop("sending", 0.0)
    if idle_share is None:
        found = scaled | {"host": scaled.get("host", 0.0) + waiting + sending}
    else:
        bubble = waiting * idle_share
        found = scaled | {"bubble": bubble, "transfer": sending + waiting - bubble}
    return {name: found[name] for name in TERMS if found.get(name)}


@dataclass(frozen=True)
class Run:
    """A run as it happened. Its timeline has the first pipeline's ranks, numbered within it."""

    where: str
    plan: Plan
    ranks: int
    steps: int
    step_s: float
    bubble_fraction: float
    terms: tuple[dict[str, float], ...]  # by rank
    stage_ranks: tuple[int, ...]  # by rank
    memory: dict[str, float]  # of the fullest rank
    timeline: Timeline
    environment: dict[str, str]

    def longest(self, stage_rank: int) -> int:
        """Of the ranks that run the same stages, the one that computes longest: the others wait for it."""
        alike = [rank for rank, own in enumerate(self.stage_ranks) if own == stage_rank]
        return max(alike, key=lambda rank: (self.terms[rank].get("compute", 0.0), -rank))


def read_run(path: Path) -> Run:
    """Read the directory that `train -o` wrote, or its run.json."""
    file = path if path.name == "run.json" else path / "run.json"
    data, folder = _mapping(file), file.parent
    read = _Reader(str(file), data)
    if data.get("schema") != SCHEMA:
        raise read.wrong("schema", f"must be {SCHEMA}: a run that `wavetrain train -o` wrote")
    if "terms_by_rank" not in data:
        raise read.wrong("terms_by_rank", "missing: this run did not measure where its steps went", "train again")
    rows = read.items("terms_by_rank")
    places = tuple(read.whole(own, "stage_ranks") for own in read.items("stage_ranks"))
    if not rows or len(rows) != len(places):
        raise read.wrong("stage_ranks", "must have one entry for every rank of terms_by_rank")
    plan = read_plan(folder / "plan.json")
    if set(places) != set(range(plan.layout.pp)):
        raise read.wrong("stage_ranks", f"must name the {plan.layout.pp} ranks of the plan's pipeline")
    return Run(
        where=str(path),
        plan=plan,
        ranks=len(rows),
        steps=read.whole(data.get("steps"), "steps"),
        step_s=read.number(data.get("step_s"), "step_s", least=1e-12),
        bubble_fraction=read.number(data.get("bubble_fraction"), "bubble_fraction", most=1.0),
        terms=tuple(read.numbers(row, "terms_by_rank", TERMS) for row in rows),
        stage_ranks=places,
        memory=read.numbers(data.get("memory"), "memory", KINDS),
        timeline=_first_pipeline(_timeline(folder / "measured.json"), plan, len(rows)),
        environment=_environment(folder / "environment.json"),
    )


@dataclass(frozen=True)
class _Reader:
    """Values of a document, of which each is what it should be or an error."""

    where: str
    data: dict[str, Any]

    def wrong(self, key: str, rule: str, remedy: str = "") -> InputError:
        return InputError(Problem(where=self.where, key=key, rule=rule, remedy=remedy))

    def items(self, key: str) -> list[Any]:
        found = self.data.get(key)
        if not isinstance(found, list):
            raise self.wrong(key, "must be a list")
        return found

    def whole(self, value: object, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.wrong(key, "must be a whole number, 0 or more")
        return value

    def number(self, value: object, key: str, *, least: float = 0.0, most: float = 1e30) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # type: ignore[operator]  # NaN is not; any int can be compared
            raise self.wrong(key, f"must be a number from {least:g} to {most:g}")
        return float(value)  # type: ignore[arg-type]

    def numbers(self, value: object, key: str, names: Mapping[str, object] | tuple[str, ...]) -> dict[str, float]:
        if not isinstance(value, dict):
            raise self.wrong(key, "must be a mapping of names to numbers")
        unknown = [name for name in value if name not in names]
        if unknown:
            raise self.wrong(f"{key}.{unknown[0]}", "is none of the names that are known")
        return {name: self.number(value[name], f"{key}.{name}") for name in names if name in value}


def _mapping(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        remedy = "the directory that `wavetrain train -o` wrote, or its run.json"
        rule = f"can't be read: {error.strerror or error}"
        raise InputError(Problem(where=str(path), rule=rule, remedy=remedy)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(Problem(where=str(path), rule=f"is not JSON: {error}")) from None
    if not isinstance(found, dict):
        raise InputError(Problem(where=str(path), rule="must be a mapping of keys to values"))
    return found


def _timeline(path: Path) -> Timeline:
    try:
        return read_chrome(path)
    except OSError as error:
        raise InputError(Problem(where=str(path), rule=f"can't be read: {error.strerror or error}")) from None


def _first_pipeline(timeline: Timeline, plan: Plan, ranks: int) -> Timeline:
    """Ranks are numbered among all where there are replicas or parts; an emulated run has one pipeline only."""
    stride = 1 if ranks == plan.layout.pp else plan.layout.stage_stride
    numbers = {stage_rank * stride: stage_rank for stage_rank in range(plan.layout.pp)}
    own = (event for event in timeline.events if event.rank in numbers)
    return Timeline(tuple(replace(event, rank=numbers[event.rank]) for event in own))


def _environment(path: Path) -> dict[str, str]:
    """What the run says of its machine, in words; nothing where it says nothing."""
    if not path.is_file():
        return {}
    found = _mapping(path)
    packages = found.pop("packages", {})
    rows = {key: value for key, value in found.items() if key != "schema" and isinstance(value, str | int | float)}
    if isinstance(packages, dict):
        known = {name: version for name, version in packages.items() if isinstance(version, str)}
        rows["packages"] = ", ".join(f"{name} {version}" for name, version in known.items())
    if isinstance(found.get("accelerators"), list):
        rows["accelerators"] = ", ".join(name for name in found["accelerators"] if isinstance(name, str)) or "none"
    return {str(key).replace("_", " "): str(value) for key, value in rows.items()}
