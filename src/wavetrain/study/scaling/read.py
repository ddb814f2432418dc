"""A study from its file, or by the name of a ready one; everything that is wrong with it at once, with its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from wavetrain.base.document import Node, exists, parse_yaml, read_document
from wavetrain.base.errors import InputError, nearest, one_line, unknown_name
from wavetrain.base.fields import Fields
from wavetrain.base.units import GIB, GIGA, amount
from wavetrain.cluster.cluster import Cluster
from wavetrain.cluster.read import device_names, load_cluster
from wavetrain.model.model import Model
from wavetrain.model.read import load_model, with_length
from wavetrain.plan.layout import Recompute
from wavetrain.plan.request import SHARD_WORDS
from wavetrain.planner.question import FAMILIES, KINDS, OF_ALL_BLOCKS, Objective, Pins
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.spec import Batch, Failures, Published, Strategy, Study
from wavetrain.study.scaling.whatif import CHANGES

MOST_POINTS = 20_000
MOST_LISTED = 10_000
MOST_DEVICES = 10_000_000
MOST_GRID = 400
FREE = "free"
TOKENS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
SHARES = {"": 1.0, "%": 0.01}
WHOLE_PINS = ("tp", "cp", "pp", "dp", "microbatch", "waves", "chunks")
FLAG_PINS = ("sequence_parallel", "keep", "shard_optimizer", "pp_inside")
PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
QUANTITIES = tuple(item.name for item in fields(Record) if str(item.type) == "float | None")


@cache
def ready_names() -> tuple[str, ...]:
    """The studies that come with the package."""
    files = resources.files("wavetrain.study.scaling").joinpath("ready").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def load_study(name_or_path: str | Path) -> Study:
    """A ready study by its name, or one from a file."""
    name = str(name_or_path)
    if name in ready_names():
        file = resources.files("wavetrain.study.scaling").joinpath(f"ready/{name}.yaml")
        return read_study(parse_yaml(file.read_text(encoding="utf-8"), file=f"{name}.yaml"))
    if not exists(Path(name)):
        raise InputError(unknown_name(name, "ready study", ready_names()))
    return read_study(read_document(Path(name)))


def read_study(node: Node) -> Study:
    """A study from a parsed document."""
    f = Fields(node)
    clusters = dict(_named(f, "node", load_cluster))
    models = dict(_named(f, "model", load_model))
    kinds = dict(_named(f, "device", _device)) if f.has("device") else {None: None}
    made = Study(
        name=_name(f),
        title=f.text("title", default=""),
        models=tuple(models),
        seq_lens=_wholes(f, "seq_len", most=2**24) if f.has("seq_len") else (None,),
        nodes=tuple(clusters),
        device_kinds=tuple(kinds),
        memories=_memories(f) if f.has("memory_gib") else (None,),
        devices=_devices(f),
        batches=tuple(_batches(f)),
        strategies=_strategies(f),
        objectives=_words(f, "objective", tuple(Objective)) if f.has("objective") else (Objective.THROUGHPUT,),
        tokens=_amount(f, "tokens", TOKENS),
        stop_below=_share(f, "stop_below", 0.5),
        failures=_failures(f),
        what_if=_words(f, "what_if", tuple(CHANGES)) if f.has("what_if") else (),
        published=tuple(_published(f)),
        time_limit_s=f.number("time_limit_s", least=0.1, most=86400, default=60.0),
        precision=f.choice("precision", PRECISIONS, default=None),
    )
    if Objective.BATCH in made.objectives or Objective.DEVICES in made.objectives:
        f.complain("objective", "a study states devices and batch", legal=("throughput", "cost", "energy"))
    _check_size(f, made)
    _check_lengths(f, made, models)
    _check_nodes(f, made, {name: cluster for name, cluster in clusters.items() if cluster is not None})
    f.finish()
    return made


def _name(f: Fields) -> str:
    """The name of a study, which its folder gets."""
    name = f.text("study", default=Path(f.node.file).stem)
    if name in (".", "..") or set("/\\") & set(name):
        f.complain("study", "must be a plain name, without / and \\: a folder gets it", remedy="where to: -o FOLDER")
    return name


# --- one value or a list of them ---


def _items(f: Fields, key: str) -> list[Node]:
    """The values of a key that takes one or a list."""
    node = f.items.get(key)
    if f.has(key) and node is not None and isinstance(node.value, tuple):
        return list(f.list_of(key, most=MOST_LISTED))
    return [node] if f.has(key) and node is not None else []


def _each(f: Fields, key: str, convert: Callable[[Node], Any]) -> Iterator[Any]:
    """Every value of a key, converted; each that can't be is a problem on its own line."""
    if not f.has(key):
        f.complain(key, "missing")
    seen = set()
    for node in _items(f, key):
        one = Fields(Node({key: node}, node.file, node.line), parent=f, key=f.key)
        try:
            value = convert(node)
        except InputError as error:
            for problem in error.problems:
                one.complain(key, one_line(problem.rule), legal=problem.legal, near=problem.nearest)
            f.bad.add(key)
            continue
        except ValueError as error:
            one.complain(key, str(error))
            f.bad.add(key)
            continue
        if node.value in seen:
            one.complain(key, "given twice")
            f.bad.add(key)
        seen.add(node.value)
        yield value


def _named(f: Fields, key: str, load: Callable[[str], Any]) -> list[tuple[str, Any]]:
    """Names that must mean something, and what they mean."""

    def convert(node: Node) -> tuple[str, Any]:
        if not isinstance(node.value, str) or not node.value.isprintable():
            raise ValueError(f"must be a name or a file, not {node.what}")
        return node.value, load(node.value)

    return list(_each(f, key, convert))


def _device(name: str) -> object:
    if name not in device_names():
        raise InputError(unknown_name(name, "device", device_names()))
    return load_cluster(name).device


def _wholes(f: Fields, key: str, *, most: int) -> tuple[int, ...]:
    def convert(node: Node) -> int:
        if isinstance(node.value, bool) or not isinstance(node.value, int) or not 1 <= node.value <= most:
            raise ValueError(f"must be a whole number from 1 to {most:,}")
        return node.value

    return tuple(_each(f, key, convert))


def _memories(f: Fields) -> tuple[float, ...]:
    def convert(node: Node) -> float:
        number = node.value
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= 1e6:
            raise ValueError("must be a number of GiB above 0")
        return number * GIB

    return tuple(_each(f, "memory_gib", convert))


def _words(f: Fields, key: str, legal: tuple[str, ...]) -> tuple[str, ...]:
    def convert(node: Node) -> str:
        if node.value not in legal:
            near = nearest(str(node.value), legal)
            raise ValueError(f"must be one of {', '.join(legal)}" + (f"; nearest: {near[0]}" if near else ""))
        return str(node.value)

    return tuple(_each(f, key, convert))


def _amount(f: Fields, key: str, units: dict[str, float]) -> float | None:
    """A number, plain or with a unit."""
    node = f.items.get(key)
    if not f.has(key) or node is None:
        return None
    value = amount(node.value, units) if isinstance(node.value, str) else node.value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        words = ", ".join(unit for unit in units if unit)
        f.complain(key, f"must be a number above 0, plain or with {words}")
        return None
    return float(value)


def _share(f: Fields, key: str, default: float) -> float:
    value = _amount(f, key, SHARES)
    if value is not None and value >= 1:
        f.complain(key, "must be a share between 0 and 1, like 50%")
    return default if value is None else value


# --- devices and batches ---


def _devices(f: Fields) -> tuple[int, ...]:
    """Numbers of devices: a list, or from, to and a factor or step."""
    node = f.items.get("devices")
    if node is None or not isinstance(node.value, dict):
        return tuple(sorted(_wholes(f, "devices", most=MOST_DEVICES)))
    own = f.section("devices")
    first, last = (own.whole(key, most=MOST_DEVICES) for key in ("from", "to"))
    factor = own.number("factor", least=1.01, most=1e6, default=None)
    step = own.whole("step", most=MOST_DEVICES, default=None)
    own.check_unknown()
    if (factor is None) == (step is None):
        own.complain("factor", "give a factor or a step, one of them")
        return (first,)
    if last < first:
        own.complain("to", f"must not be below from, {first}")
    if step is not None and (last - first) // step >= MOST_POINTS:
        own.complain("step", f"makes {(last - first) // step + 1:,} numbers of devices; at most {MOST_POINTS:,}")
        return (first,)
    return tuple(range(first, last + 1, step)) if step is not None else _powers(first, last, factor or 2.0)


def _powers(first: int, last: int, factor: float) -> tuple[int, ...]:
    found, size = [first], float(first)
    while (size := size * factor) <= last * (1 + 1e-9):
        found.append(max(found[-1] + 1, round(size)))
    return tuple(size for size in found if size <= last)


def _batches(f: Fields) -> Iterator[Batch]:
    if not f.has("batch"):
        f.complain("batch", "missing: per_device (weak scaling) or total (strong scaling)")
    for number, node in enumerate(_items(f, "batch")):
        own = f.item("batch", number, node)
        per_device = own.number("per_device", least=1e-6, most=1e6, default=None)
        total = own.whole("total", most=2**31, default=None)
        own.check_unknown()
        if isinstance(node.value, dict) and (per_device is None) == (total is None):
            own.complain("per_device", "give per_device (weak scaling) or total (strong scaling), one of them")
            f.bad.add("batch")
        else:
            yield Batch(per_device, total)


# --- strategies ---


def _strategies(f: Fields) -> tuple[Strategy, ...]:
    if not f.has("strategies"):
        return (Strategy(FREE),)
    made = [one for number, node in enumerate(_items(f, "strategies")) for one in _strategy(f, number, node)]
    for name, count in Counter(one.name for one in made).items():
        if count > 1:
            f.complain("strategies", f"two are called {name}")
    return tuple(made)


def _strategy(f: Fields, number: int, node: Node) -> Iterator[Strategy]:
    """A family by its name; or a mapping of pins, with `only` for families, `grid` for several."""
    if isinstance(node.value, str):
        if node.value == FREE:
            yield Strategy(FREE)
        elif node.value in FAMILIES:
            yield Strategy(node.value, only=(node.value,))
        else:
            own = Fields(Node({"strategies": node}, node.file, node.line), parent=f)
            legal = (*FAMILIES, FREE)
            own.complain("strategies", "unknown strategy", legal=legal, near=nearest(node.value, legal))
        return
    own = f.item("strategies", number, node)
    only = _words(own, "only", tuple(FAMILIES)) if own.has("only") else ()
    pins = _pins(own)
    made = Strategy(own.text("name", default=""), only, pins, _mixed(own, only, pins))
    if own.has("grid"):
        yield from _grid(own, made)
    else:
        said = ", ".join((*only, *(f"{name} {value}" for name, value in pins.items())))
        yield replace(made, name=made.name or said or FREE)
    own.check_unknown()


def _mixed(own: Fields, only: tuple[str, ...], pins: Mapping[str, Any]) -> bool:
    """Whether operators are chosen one by one, which nothing may be in the way of."""
    mixed = own.flag("mixed", default=False)
    beside = [*(["only"] if only else []), *(name for name in OF_ALL_BLOCKS if name in pins)]
    beside += ["pp"] if pins.get("pp", 1) > 1 else []
    if mixed and beside:
        rule = f"means nothing beside {', '.join(beside)}: it is for plans without a pipeline"
        own.complain("mixed", f"{rule}, of which nothing is said that holds for all operators")
    return mixed


def _pins(own: Fields) -> dict[str, Any]:
    """Values that a strategy pins, under the names of `Pins`."""
    stated: dict[str, Any] = {name: own.whole(name, most=MOST_DEVICES, default=None) for name in WHOLE_PINS}
    stated |= {name: own.flag(name, default=None) for name in FLAG_PINS}
    stated["schedule"] = own.choice("schedule", KINDS, default=None)
    stated["recompute"] = own.choice("recompute", tuple(Recompute), default=None)
    shard = own.items.get("shard")
    if own.has("shard") and shard is not None:
        whole = isinstance(shard.value, int) and not isinstance(shard.value, bool) and shard.value >= 1
        if whole or shard.value in SHARD_WORDS:
            stated["shard"] = shard.value
        else:
            own.complain("shard", "must be a number of replicas, or a word", legal=SHARD_WORDS)
    return {name: value for name, value in stated.items() if value is not None}


def _grid(own: Fields, base: Strategy) -> Iterator[Strategy]:
    """Every combination of the values of some whole-numbered pins; a name goes before them."""
    grid = own.section("grid")
    lists = {name: _wholes(grid, name, most=MOST_DEVICES) for name in WHOLE_PINS if grid.has(name)}
    grid.check_unknown()
    size = prod(map(len, lists.values()))
    if not lists or size > MOST_GRID:
        own.complain("grid", f"must have values of 1 to {MOST_GRID} combinations, has {size:,}", legal=WHOLE_PINS)
        return
    for values in product(*lists.values()):
        named = dict(zip(lists, values, strict=True))
        words = (*([base.name] if base.name else []), *(f"{name} {value}" for name, value in named.items()))
        yield replace(base, name=", ".join(words), pins={**base.pins, **named})


# --- failures and published series ---


@cache
def default_failures() -> Failures:
    """What interrupts a run unless a study says otherwise (`failures.yaml` has the sources)."""
    file = resources.files("wavetrain.study.scaling").joinpath("failures.yaml")
    f = Fields(parse_yaml(file.read_text(encoding="utf-8"), file="failures.yaml"))
    made = _failures_of(f, None)
    f.finish()
    return made


def _failures(f: Fields) -> Failures | None:
    if not f.has("failures"):
        return default_failures()
    if f.items["failures"].value is False:
        return None
    own = f.section("failures")
    made = _failures_of(own, default_failures())
    own.check_unknown()
    return made


def _failures_of(own: Fields, known: Failures | None) -> Failures:
    def number(key: str, name: str, scale: float = 1.0, least: float = 1e-9) -> float:
        if known is None:
            return scale * own.number(key, least=least, most=1e12)
        found = own.number(key, least=least, most=1e12, default=None)
        return float(getattr(known, name)) if found is None else scale * found

    return Failures(
        device_hours=number("device_hours", "device_hours"),
        detection_s=number("detection_s", "detection_s", least=0.0),
        restart_s=number("restart_s", "restart_s", least=0.0),
        write_bytes_per_s=number("write_gb_per_s", "write_bytes_per_s", GIGA),
        read_bytes_per_s=number("read_gb_per_s", "read_bytes_per_s", GIGA),
        copy_bytes_per_s=number("copy_gb_per_s", "copy_bytes_per_s", GIGA),
        asynchronous=own.flag("asynchronous", default=known is None or known.asynchronous),
    )


def _published(f: Fields) -> Iterator[Published]:
    for number, node in enumerate(_items(f, "published")):
        own = f.item("published", number, node)
        points = own.section("points")
        made = {}
        for key in points.items:
            plain = key.isascii() and key.isdigit() and len(key) <= len(str(MOST_DEVICES))
            if not plain or not 1 <= int(key) <= MOST_DEVICES:
                points.complain(key, "must be a number of devices")
            else:
                made[int(key)] = points.number(key, least=-1e30)
        yield Published(
            name=own.text("name"),
            source=own.text("source"),
            quantity=own.choice("quantity", QUANTITIES),
            points=tuple(sorted(made.items())),
            relative_to=own.whole("relative_to", most=MOST_DEVICES, default=None),
        )
        own.check_unknown()


# --- rules of the whole ---


def num_points(study: Study) -> int:
    hardware = (study.nodes, study.device_kinds, study.memories, study.devices)
    asked = (study.models, study.seq_lens, study.batches, study.strategies, study.objectives)
    return prod(map(len, (*hardware, *asked)))


def _check_size(f: Fields, study: Study) -> None:
    count = num_points(study)
    if count > MOST_POINTS:
        rule = f"the sweep has {count:,} points; a study may have {MOST_POINTS:,}"
        f.complain("study", rule, remedy="fewer devices, models or strategies, or several studies")


def _check_lengths(f: Fields, study: Study, models: Mapping[str, Model]) -> None:
    """Every model must take every length."""
    if num_points(study) > MOST_POINTS or not f.good("seq_len"):
        return
    given = zip(_items(f, "seq_len"), study.seq_lens, strict=False)  # where none is given, it is the model's own
    for (node, length), (name, model) in product(given, models.items()):
        try:
            with_length(model, length)
        except InputError as error:
            one = Fields(Node({"seq_len": node}, node.file, node.line), parent=f)
            for problem in error.problems:
                one.complain("seq_len", f"{name}: {one_line(problem.rule)}")


def _check_nodes(f: Fields, study: Study, clusters: dict[str, Cluster]) -> None:
    """Devices must be whole nodes, or a part of one; a study's nodes are of one kind each."""
    for name, cluster in clusters.items():
        if not cluster.groups or not cluster.is_uniform:
            f.complain("node", f"{name} has {cluster.num_kinds} kinds of nodes; a study is of equal ones")
            continue
        size = cluster.node.num_devices
        wrong = [number for number in study.devices if number > size and number % size]
        if wrong:
            rule = f"{wrong[0]:,} devices are not whole nodes of {size}, which {name} has"
            f.complain("devices", rule, near=[wrong[0] // size * size, -(-wrong[0] // size) * size])
        if cluster.node.network is None and any(number > size for number in study.devices):
            f.complain("devices", f"nodes of type {name} have no network, so there can be only one, of {size} devices")


assert set(WHOLE_PINS) | set(FLAG_PINS) | {"schedule", "recompute", "shard", "devices"} == {
    item.name for item in fields(Pins)
}
