"""From a table of published runs to plans: what a row states, and nothing else, decides what is predicted.

The schema is that of the tables in the field (model, layout, batch, software columns; see docs/validate.md). Text in a
number's cell keeps its leading number ("6 (interleaved)"). What a row leaves open and the prediction needs is either
assumed, and said so, or the row can't be expressed, and the column is named. Never looked at: source, notes, row_id.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from wavetrain.base.document import read_text
from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.base.units import DType
from wavetrain.cluster.cluster import Cluster, Node
from wavetrain.cluster.laws import load_laws
from wavetrain.cluster.read import device_names, load_cluster, node_names
from wavetrain.model.architecture import Architecture, Stretch
from wavetrain.model.model import Model
from wavetrain.model.transformer import build
from wavetrain.plan.check import check
from wavetrain.plan.cut import counted_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.plan.stack import AttentionImpl, Fusion, Precision, Stack
from wavetrain.sim.estimate import estimate
from wavetrain.sim.gather import gather_all
from wavetrain.sim.memory import memory
from wavetrain.study.outcome import Outcome

NEEDED = ("row_id", "layers", "hidden", "heads", "seq", "device", "n_gpu", "global_batch", "measured_step_time_s")
DEFAULT_VOCAB = 51200
MOST_ROWS = 1_000_000
LIMITS = {"layers": 10_000, "hidden": 10**6, "heads": 10_000, "ffn": 10**7, "vocab": 10**8, "seq": 10**8}
SCHEDULES = {"": "1f1b", "1f1b": "1f1b", "interleaved": "interleaved", "gpipe": "gpipe", "zb-1p": "zb-h1"}
SCHEDULES |= {"zb-2p": "zb-h2", "wave": "wave"}
_NUMBER = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)(?=$|[\s(]|-[a-z])")
UNSTATED = ("", "nan", "not stated")


class Inexpressible(Exception):  # noqa: N818 - a result for one row, never an error for the user
    """A row states something that can't be priced; the text names the columns."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    file: str
    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """The leading number of a cell; None where it is empty or has none."""
        match = _NUMBER.match(self.text(column))
        value = float(match[1]) if match else None
        return value if value is None or math.isfinite(value) else None


@dataclass
class _Reader:
    """Cells of one row read as the model needs them; collects what is wrong and what was assumed."""

    row: Row
    problems: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    def whole(self, column: str, default: int | None = None, *, assumed: bool = False) -> int:
        value, text = self.row.number(column), self.row.text(column).lower()
        if value is None:
            if text not in UNSTATED:
                self.problems.append(self._odd(column))
                return default or 1
            if default is None:
                self.problems.append(f"{column}: missing")
                return 1
            if assumed:
                self.assumptions.append(f"{column} {default}")
            return default
        most = LIMITS.get(column, 10**7)
        if value != int(value) or not 1 <= value <= most:
            self.problems.append(self._odd(column, f"a whole number from 1 to {most:,}"))
            return 1
        return int(value)

    def yes(self, column: str, *, default: bool = False) -> bool:
        text = self.row.text(column).lower()
        if text in ("", "nan"):
            return default
        if text not in ("yes", "no", "true", "false"):
            self.problems.append(self._odd(column, "yes or no"))
        return text in ("yes", "true")

    def choice(self, column: str, legal: dict[str, str]) -> str:
        text = self.row.text(column).lower()
        if text not in legal:
            self.problems.append(self._odd(column, "one of " + ", ".join(filter(None, legal))))
            return next(iter(legal.values()))
        return legal[text]

    def positive(self, column: str) -> None:
        """A measured number must be one, if it is there."""
        value = self.row.number(column)
        if self.row.text(column).lower() not in UNSTATED and (value is None or not 0 < value < 1e15):
            self.problems.append(self._odd(column, "a number above 0"))

    def _odd(self, column: str, rule: str = "a number") -> str:
        return f"{column}: must be {rule}, not {self.row.text(column)[:40]!r}"


def read_rows(path: Path) -> list[Row]:
    """The rows of a table; a file that is no such table is an error with its reason."""
    lines = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        table = list(lines)
    except csv.Error as error:
        raise InputError(Problem(where=str(path), rule=f"is no CSV table: {error}")) from None
    header = [name.strip().lstrip("\ufeff") for name in table[0]] if table else []
    missing = [name for name in NEEDED if name not in header]
    if missing:
        rule = f"is no table of runs: it lacks the columns {', '.join(missing)}"
        raise InputError(Problem(where=f"{path}:1", rule=rule, remedy="the columns are described in docs/validate.md"))
    doubled = sorted({name for name in header if name and header.count(name) > 1})
    if doubled:
        raise InputError(Problem(where=f"{path}:1", rule=f"has columns twice: {', '.join(doubled)}"))
    ragged = [i for i, cells in enumerate(table) if cells and len(cells) != len(header)]
    if ragged:
        rule = f"has {len(table[ragged[0]])} cells where the header has {len(header)}"
        raise InputError(Problem(where=f"{path}:{ragged[0] + 1}", rule=rule))
    if len(table) > MOST_ROWS:
        raise InputError(Problem(where=str(path), rule=f"has {len(table):,} rows; at most {MOST_ROWS:,} are read"))
    return [
        Row(path.name, i + 1, dict(zip(header, cells, strict=True))) for i, cells in enumerate(table) if i and cells
    ]


def plan_of(row: Row) -> tuple[Plan, tuple[str, ...]]:
    """The plan that a row states, and what was assumed; raises `Inexpressible` with every column that is wrong."""
    reader = _Reader(row)
    for column in ("measured_step_time_s", "peak_mem_gb"):
        reader.positive(column)
    reader.choice("score", {"": "1", "0": "0", "1": "1"})
    model = _model(reader)
    layout, choice = _layout(reader)
    stack, recompute = _stack(reader), _recompute(reader)
    cluster = _cluster(reader)
    precision = _precision(reader, cluster)
    if not reader.problems and layout.num_devices != reader.whole("n_gpu"):
        degrees = f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} x dp {layout.dp}"
        reader.problems.append(f"n_gpu: {degrees} is {layout.num_devices} devices, not {row.text('n_gpu')}")
    if reader.problems:
        raise Inexpressible("; ".join(dict.fromkeys(reader.problems)))
    plan = Plan(
        model=model,
        cluster=cluster,
        layout=layout,
        cut=counted_cut(model.num_blocks, num_stages(layout)) if layout.pp <= model.num_layers else (),
        seq_len=model.seq_len,
        recompute=recompute,
        choice=choice,
        stack=stack,
        precision=precision,
    )
    broken = check(plan)
    if broken:
        raise Inexpressible("; ".join(f"{COLUMNS.get(p.key, p.key)}: {p.value}: {p.rule}" for p in broken))
    return plan, tuple(reader.assumptions)


COLUMNS = {  # where a plan's keys come from
    "layout.dp": "dp",
    "layout.tp": "tp",
    "layout.pp": "pp",
    "layout.cp": "cp",
    "layout.chunks": "vpp",
    "layout.waves": "vpp",
    "layout.global_batch": "global_batch",
    "layout.schedule": "schedule",
    "layout.sequence_parallel": "seq_parallel",
    "seq_len": "seq",
    "choice.shard": "shard_group",
    "choice.keep": "zero_stage",
    "precision.compute": "precision",
    "precision.products": "fp8",
    "precision.gradients": "grad_dtype",
}


# --- parts of a plan ---


def _model(reader: _Reader) -> Model:
    hidden, heads = reader.whole("hidden"), reader.whole("heads")
    gated = reader.choice("mlp", {"": "", "gelu": "", "relu": "", "plain": "", "gated": "gated"}) == "gated"
    norm = reader.choice("norm", {"": "layernorm", "layernorm": "layernorm", "rmsnorm": "rmsnorm"})
    dropout = reader.yes("dropout")
    kv_heads = reader.whole("kv_heads", heads)
    if heads % kv_heads:
        reader.problems.append(f"kv_heads: {heads} heads can't be divided by {kv_heads}")
    return _built(
        Architecture(
            family="llama" if gated else "gpt2",
            layers=(Stretch(reader.whole("layers")),),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=max(1, hidden // heads),
            ffn=reader.whole("ffn", 4 * hidden, assumed=True),
            vocab=reader.whole("vocab", DEFAULT_VOCAB, assumed=True),
            seq_len=reader.whole("seq"),
            positions="rotary" if gated else "learned",
            position_rows=reader.whole("seq"),
            norm="rmsnorm" if norm == "rmsnorm" else "layernorm",
            norm_bias=norm == "layernorm",
            mlp="gated" if gated else "plain",
            activation="silu" if gated else "gelu",
            qkv_bias=not gated,
            out_bias=not gated,
            mlp_bias=not gated,
            tied=not gated,
            dropout=dropout,
            attention_dropout=dropout,
        )
    )


@cache
def _built(architecture: Architecture) -> Model:
    return build(architecture, name=f"{architecture.num_layers} x {architecture.hidden}")


def _layout(reader: _Reader) -> tuple[Layout, Choice]:
    tp, pp, dp = reader.whole("tp"), reader.whole("pp"), reader.whole("dp")
    schedule = reader.choice("schedule", SCHEDULES)
    vpp = reader.whole("vpp", 1)
    chunks = vpp if schedule == "interleaved" else 1
    if schedule == "interleaved" and chunks == 1:
        schedule = "1f1b"
    layout = Layout(
        global_batch=reader.whole("global_batch"),
        microbatch=reader.whole("microbatch", 1, assumed=True),
        tp=tp,
        sequence_parallel=reader.yes("seq_parallel", default=reader.yes("tp_overlap")) and tp > 1,
        cp=reader.whole("cp", 1),
        dp=dp,
        pp=pp,
        schedule=schedule,
        chunks=chunks,
        waves=vpp if schedule == "wave" else 1,
        shard_optimizer=reader.yes("shard_optimizer") and not reader.yes("shard_params"),
    )
    group = reader.whole("shard_group", dp)
    sharded = reader.yes("shard_params")
    keep = "zero2" in reader.row.text("zero_stage").lower().replace(" ", "").replace("-", "")
    return layout, Choice(shard=group if sharded else 1, keep=keep and sharded and group > 1)


def _stack(reader: _Reader) -> Stack:
    fusions = {"": Fusion.FUSED.value} | {item.value: item.value for item in Fusion}
    kernels = {"": AttentionImpl.FLASH2.value} | {item.value: item.value for item in AttentionImpl}
    return Stack(
        attention=AttentionImpl(reader.choice("attention", kernels)),
        elementwise=Fusion(reader.choice("elementwise", fusions)),
        norm=Fusion(reader.choice("norm_kernel", fusions)),
        logits_parallel=reader.yes("logits_parallel", default=True),
        gradient_overlap=reader.yes("grad_overlap"),
        tensor_overlap=reader.yes("tp_overlap"),
        barrier=not reader.row.text("schedule").startswith("zb-"),
    )


def _precision(reader: _Reader, cluster: Cluster) -> Precision:
    text = reader.row.text("precision").lower()
    if text in UNSTATED:
        half = next((dtype for dtype in HALVES if cluster.device.peak.of(dtype)), DType.FP32)
        compute = DType.BF16 if reader.yes("fp8") else half
        reader.assumptions.append(f"precision {compute.value}")
    else:
        compute = next((dtype for word, dtype in FORMATS.items() if word in text), DType.BF16)
        if not any(word in text for word in FORMATS):
            reader.problems.append(f"precision: must be bf16, fp16, fp32 or fp8, not {text[:40]!r}")
    products = DType.FP8 if reader.yes("fp8") else compute
    formats = {"": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
    return Precision(compute=compute, products=products, gradients=DType(reader.choice("grad_dtype", formats)))


HALVES = (DType.BF16, DType.FP16)
FORMATS = {"fp16": DType.FP16, "bf16": DType.BF16, "fp8": DType.BF16, "fp4": DType.BF16, "fp32": DType.FP32}


def _recompute(reader: _Reader) -> Recompute:
    text = reader.row.text("recompute").lower()
    for kind in (Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE):
        if text.startswith(kind.value):
            return kind
    if text in ("", "not stated", "nan"):
        reader.assumptions.append("recompute none")
    else:
        reader.problems.append(f"recompute: must be none, selective or full, not {text[:40]!r}")
    return Recompute.NONE


# --- the cluster ---


def _cluster(reader: _Reader) -> Cluster:
    device, devices = reader.row.text("device"), reader.whole("n_gpu")
    per_node = reader.whole("gpus_per_node", 8, assumed=True)
    nic = reader.row.number("nic_gb_per_s_per_device")
    if nic is not None and not 1e-3 <= nic <= 1e6:
        reader.problems.append(f"nic_gb_per_s_per_device: must be a number from 0.001 to 1e6, not {nic:g}")
        nic = None
    if device not in device_names():
        near = nearest(device, device_names())
        what = f"unknown device {device[:40]!r}" + (f", nearest {near[0]}" if near else "")
        reader.problems.append(f"device: {what if device else 'missing'}")
        device = device_names()[0]
    if not _has_node(device):
        reader.problems.append(f"device: no node type of the catalog has {device}")
        return load_cluster(node_names()[0])
    return _cluster_of(device, per_node, nic, devices)


@cache
def _has_node(device: str) -> bool:
    return next(_nodes_with(device), None) is not None


@cache
def _cluster_of(device: str, per_node: int, nic_gb_per_s: float | None, devices: int) -> Cluster:
    size = max(n for n in range(1, min(per_node, devices) + 1) if devices % n == 0)
    node = _node_of(device, per_node, size)
    if nic_gb_per_s is not None and node.network is not None:
        rate = nic_gb_per_s * 1e9 * node.num_devices / node.network.nics
        node = replace(node, network=replace(node.network, nic_bytes_per_s=rate))
    count = -(-devices // node.num_devices)
    return Cluster(f"{node.name}:{count}", (replace(load_cluster(node.name).groups[0], node=node, count=count),))


@cache
def _node_of(device: str, per_node: int, size: int) -> Node:
    """The catalog's node type with this device, preferably with so many; cut or grown to `size` of them."""
    nodes = sorted(_nodes_with(device), key=lambda n: (n.num_devices != per_node, not n.name.startswith("dgx"), n.name))
    node = nodes[0]
    if node.num_devices == size or any(tier.across_nodes for tier in node.tiers):
        return node
    tiers = tuple(replace(t, size=size) for t in node.tiers if t.size == node.num_devices and size > 1)
    network = node.network
    if network is not None:
        network = replace(network, nics=max(1, network.nics * size // node.num_devices))
    return replace(node, num_devices=size, tiers=tiers, network=network)


def _nodes_with(device: str) -> Iterator[Node]:
    for name in node_names():
        node = load_cluster(name).node
        if node.device.name == device:
            yield node


# --- predictions ---


def price_tables(paths: Sequence[Path]) -> list[Outcome]:
    """Predict every row of every table, by the closed form; rows that can't be expressed say why."""
    names = [path.name for path in paths]
    told_apart = [path.name if names.count(path.name) == 1 else path.as_posix() for path in paths]
    rows = [replace(row, file=name) for path, name in zip(paths, told_apart, strict=True) for row in read_rows(path)]
    plans: dict[int, tuple[Plan, tuple[str, ...]]] = {}
    reasons: dict[int, str] = {}
    for number, row in enumerate(rows):
        try:
            plans[number] = plan_of(row)
        except Inexpressible as reason:
            reasons[number] = str(reason)
    priced = _priced({number: plan for number, (plan, _) in plans.items()})
    return [_outcome(row, plans.get(n), priced.get(n), reasons.get(n, "")) for n, row in enumerate(rows)]


@dataclass(frozen=True)
class _Price:
    step_s: float
    peak_bytes: float
    fits: bool


def _priced(plans: dict[int, Plan]) -> dict[int, _Price]:
    rows, found, laws = list(plans), {}, load_laws()
    for batch, numbers in gather_all(list(plans.values())):
        step_s, held = estimate(batch, laws).step_s, memory(batch, laws)
        needed = held.peak_bytes + held.reserve_bytes
        for k, number in enumerate(numbers):
            fits = bool(needed[k] <= batch.device.memory_bytes)
            found[rows[number]] = _Price(float(step_s[k]), float(held.peak_bytes[k]), fits)
    return found


def _outcome(row: Row, planned: tuple[Plan, tuple[str, ...]] | None, price: _Price | None, reason: str) -> Outcome:
    same = ("model", "layers", "hidden", "seq", "n_gpu", "global_batch", "device", "precision")
    peak_gb = row.number("peak_mem_gb")
    return Outcome(
        row_id=row.text("row_id"),
        file=row.file,
        line=row.line,
        source=row.text("source"),
        device=row.text("device") or row.text("gpu"),
        workload=" ".join(row.text(column) for column in same),
        scored=row.text("score") != "0",
        status=row.text("status") or "ok",
        measured_step_s=row.number("measured_step_time_s"),
        measured_peak_bytes=None if peak_gb is None else peak_gb * 1e9,
        predicted_step_s=price.step_s if price else None,
        predicted_peak_bytes=price.peak_bytes if price else None,
        fits=price.fits if price else None,
        reason=reason,
        assumptions=planned[1] if planned else (),
    )
