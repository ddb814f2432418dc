"""Fit the constants of software and devices to published step times, all sources together.

    python validation/fit.py TABLE.csv... [--without SOURCE_TEXT] [--leave-out] [--write]

What it uses: the scored and timed rows of the tables given, priced by `sim.estimate` as `wavetrain validate` prices
them. It minimises the mean over sets (see `set_name`) of the mean absolute logarithmic
error in percent, plus a penalty for leaving the starting values, which were measured on single kernels or published:
(log(value / start) / spread)^2 each. Sets are weights only; no constant belongs to one. `--leave-out` repeats the fit
without each source in turn and prints the error on what was left out. `--write` puts the values into
`cluster/laws.yaml` and the device files.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wavetrain.cluster.cluster import Device
from wavetrain.cluster.laws import TRAFFICS, Laws, load_laws
from wavetrain.plan.plan import Plan
from wavetrain.sim.batch import Batch
from wavetrain.sim.estimate import estimate
from wavetrain.sim.gather import gather_all
from wavetrain.study.rows import Inexpressible, Row, plan_of, read_rows

SMOOTH = 0.02  # errors below this count as squares
PENALTY = 0.03  # percent per squared spread
FEW_ROWS = 8  # smaller sets count less
LONG = 4096

# start, spread of the logarithm
SOFTWARE: dict[str, tuple[float, float]] = {
    "eager_factor": (2.0, 0.3),
    "attention_backward": (3.0, 0.15),
    "accumulation": (2.0, 0.25),
    "optimizer_bytes": (40.0, 0.3),
    "gap_s": (4e-6, 0.5),
    "launch_s": (15e-6, 0.5),
    "tensor_host_s": (0.2e-3, 0.5),
    "recompute_host_s": (0.7e-3, 0.5),
    "message_s": (80e-6, 0.7),
    "step_s": (3e-3, 0.5),
    "link_exposed": (0.6, 0.3),
    "network_exposed": (0.5, 0.3),
    "gradient_exposed": (0.5, 0.5),
    "tensor_exposed": (0.15, 0.5),
    "context_exposed": (0.3, 0.4),
    "doubling": (0.009, 0.4),
}
TRAFFIC: dict[str, tuple[float, float, float]] = {  # forward, backward, spread
    "norm": (6.0, 16.0, 0.3),
    "norm-eager": (40.0, 70.0, 0.6),
    "activation": (5.3, 9.2, 0.2),
    "gated": (8.0, 13.0, 0.3),
    "residual": (10.0, 8.0, 0.4),
    "residual-eager": (60.0, 60.0, 0.6),
    "dropout": (11.0, 8.0, 0.3),
    "rotary": (6.0, 6.0, 0.3),
    "softmax": (6.0, 7.0, 0.25),
    "softmax-eager": (24.0, 20.0, 0.4),
    "score-dropout": (6.7, 5.6, 0.2),
    "lookup": (6.0, 10.0, 0.3),
    "logits": (12.0, 12.0, 0.3),
    "cast": (3.0, 3.0, 0.3),
}
CHIPS: dict[str, dict[str, tuple[float, float]]] = {  # by family
    "a100": {
        "matmul_efficiency": (0.85, 0.07),
        "inner_half": (179.0, 0.5),
        "flash1": (0.32, 0.2),
        "flash2": (0.6, 0.15),
        "triton": (0.4, 0.2),
    },
    "h100": {
        "matmul_efficiency": (0.7, 0.07),
        "fp8_efficiency": (0.62, 0.1),
        "inner_half": (179.0, 0.5),
        "flash2": (0.35, 0.15),
        "triton": (0.25, 0.2),
        "cudnn": (0.5, 0.2),
    },
    "v100": {"matmul_efficiency": (0.75, 0.1)},
}


@dataclass
class Rows:
    """Rows that share a node type, stack and precision, ready to be priced."""

    batch: Batch
    family: str
    numbers: list[int]


@dataclass
class Data:
    groups: list[Rows]
    measured_s: np.ndarray
    sets: list[str]


def start_values() -> dict[str, tuple[float, float]]:
    """Every constant that is fitted, under one name, with its start and spread."""
    found = {f"law.{name}": value for name, value in SOFTWARE.items()}
    for name, (forward, backward, spread) in TRAFFIC.items():
        found |= {f"forward.{name}": (forward, spread), f"backward.{name}": (backward, spread)}
    for family, values in CHIPS.items():
        found |= {f"chip.{family}.{name}": value for name, value in values.items()}
    return found


def set_name(path: Path, row: Row, plan: Plan) -> str:
    """Runs weighed together: of one source and device family, on one node or several, at a short or a long sequence."""
    family = row.text("device").split("-")[0]
    nodes = "nodes" if plan.layout.num_devices > plan.cluster.node.num_devices else "node"
    length = "long" if plan.seq_len > LONG else "short"
    return f"{path.stem}/{row.text('source')[:24]}/{family} {nodes} {length}"


def load(paths: list[Path]) -> Data:
    """Scored and timed rows of the tables, grouped for pricing."""
    plans: list[Plan] = []
    measured, sets = [], []
    for path in paths:
        for row in read_rows(path):
            time = row.number("measured_step_time_s")
            if row.text("score") == "0" and "MegaScale NSDI24 Table 2" not in row.text("source"):
                continue
            if time is None or row.text("status") != "ok":
                continue
            try:
                plan, _ = plan_of(row)
            except Inexpressible as reason:
                print(f"{path.name}:{row.line} left out: {reason}")
                continue
            plans.append(plan)
            measured.append(time)
            sets.append(set_name(path, row, plan))
    groups = [Rows(batch, batch.device.name.split("-")[0], numbers) for batch, numbers in gather_all(plans)]
    return Data(groups, np.array(measured), sets)


def with_values(laws: Laws, values: dict[str, float]) -> Laws:
    forward = tuple(values.get(f"forward.{n.value}", v) for n, v in zip(TRAFFICS, laws.forward_bytes, strict=True))
    backward = tuple(values.get(f"backward.{n.value}", v) for n, v in zip(TRAFFICS, laws.backward_bytes, strict=True))
    scalars = {name: values[f"law.{name}"] for name in SOFTWARE if f"law.{name}" in values}
    return replace(laws, forward_bytes=forward, backward_bytes=backward, **scalars)


def chip(device: Device, family: str, values: dict[str, float]) -> Device:
    own = {name.split(".")[2]: v for name, v in values.items() if name.startswith(f"chip.{family}.")}
    rates = {name: own.pop(name) for name in list(own) if hasattr(device.attention, name)}
    return replace(device, attention=replace(device.attention, **rates), **own)


def predict(data: Data, values: dict[str, float]) -> np.ndarray:
    laws = with_values(load_laws(), values)
    out = np.zeros(len(data.measured_s))
    for group in data.groups:
        batch = replace(group.batch, device=chip(group.batch.device, group.family, values))
        out[group.numbers] = estimate(batch, laws).step_s
    return out


def fit(data: Data, *, without: str = "", values: dict[str, float] | None = None, rounds: int = 30) -> dict[str, float]:
    """Levenberg-Marquardt on logarithms, reweighted toward absolute errors."""
    start = start_values()
    names = list(start)
    origin = np.log([start[name][0] for name in names])
    spread = np.array([start[name][1] for name in names])
    x = origin.copy() if values is None else np.log([values[name] for name in names])
    used = np.array([not without or without not in name for name in data.sets])
    weight = weights(data, used)

    def residual(x: np.ndarray) -> np.ndarray:
        return np.log(predict(data, dict(zip(names, np.exp(x), strict=True)))[used] / data.measured_s[used])

    def loss(r: np.ndarray, x: np.ndarray) -> float:
        return float(np.sum(weight * np.hypot(r, SMOOTH)) + PENALTY * np.sum(((x - origin) / spread) ** 2))

    r = residual(x)
    best, damping = loss(r, x), 1e-2
    for _ in range(rounds):
        jacobian = np.stack([(residual(x + 1e-3 * unit) - r) / 1e-3 for unit in np.eye(len(x))], axis=1)
        w = weight / np.hypot(r, SMOOTH)
        normal = (jacobian * w[:, None]).T @ jacobian + np.diag(2 * PENALTY / spread**2)
        slope = (jacobian * w[:, None]).T @ r + 2 * PENALTY * (x - origin) / spread**2
        before = best
        for _ in range(6):
            step = np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope), -0.4, 0.4)
            tried = residual(x + step)
            if loss(tried, x + step) < best:
                x, r, best, damping = x + step, tried, loss(tried, x + step), max(damping / 4, 1e-6)
                break
            damping *= 5
        if before - best < 2e-4 * best:
            break
    return {name: float(value) for name, value in zip(names, np.exp(x), strict=True)}


def weights(data: Data, used: np.ndarray) -> np.ndarray:
    """Every set counts alike, whatever its rows; very small ones less."""
    sets = np.array(data.sets)[used]
    names = list(dict.fromkeys(sets))
    weight = np.zeros(len(sets))
    for name in names:
        rows = sets == name
        weight[rows] = 100 / len(names) / rows.sum() * min(1.0, rows.sum() / FEW_ROWS)
    return weight


def report(data: Data, values: dict[str, float], *, only: str = "") -> list[float]:
    error = predict(data, values) / data.measured_s - 1
    found = []
    for name in dict.fromkeys(data.sets):
        if only and only not in name:
            continue
        e = 100 * error[[n == name for n in data.sets]]
        found.append(float(np.mean(np.abs(e))))
        print(
            f"{name:60} rows {len(e):4} error {found[-1]:5.1f} bias {np.mean(e):+6.1f} worst {np.max(np.abs(e)):4.0f}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--markdown", type=Path, help="write the result of --leave-out as a page")
    parser.add_argument("--check", action="store_true", help="report the values in the catalog, fit nothing")
    options = parser.parse_args()
    data = load(options.tables)
    print(f"{len(data.measured_s)} rows in {len(set(data.sets))} sets, {len(data.groups)} groups")
    if options.check:
        report(data, {})
        return
    values = fit(data)
    report(data, values)
    start = start_values()
    for name, value in values.items():
        moved = np.log(value / start[name][0]) / start[name][1]
        print(f"{name:32} {value:10.4g}  start {start[name][0]:10.4g}  moved {moved:+.1f} spreads")
    if options.write:
        write(values)
    if options.leave_out:
        sources = list(dict.fromkeys(name.split("/")[1] for name in data.sets))
        left_out = {s: left_out_error(data, values, s) for s in sources}
        print(f"left out: mean over sources {np.mean([error.mean() for error in left_out.values()]):.1f}")
        every = np.concatenate(list(left_out.values()))
        print(
            f"80 % of {len(every)} rows within {np.percentile(every, 80):.1f} %; {np.mean(every <= 15):.0%} within 15 %"
        )
        if options.markdown:
            options.markdown.write_text(left_out_page(data, values, left_out, options.tables), encoding="utf-8")


def left_out_error(data: Data, values: dict[str, float], source: str) -> np.ndarray:
    """Absolute errors on a source's rows when it takes no part in the fit, percent."""
    found = fit(data, without=f"/{source}/", values=values, rounds=8)
    report(data, found, only=f"/{source}/")
    rows = [f"/{source}/" in name for name in data.sets]
    return np.asarray(np.abs(predict(data, found) / data.measured_s - 1)[rows] * 100)


def left_out_page(data: Data, values: dict[str, float], left_out: dict[str, np.ndarray], tables: list[Path]) -> str:
    """The result of leaving out each source in turn, as a page."""
    error = np.abs(predict(data, values) / data.measured_s - 1) * 100
    lines = [
        "# Errors on sources that took no part in the fit",
        "",
        f"Generated by `python validation/fit.py {' '.join(map(str, tables))} --leave-out` (`make accuracy`).",
        "Constants are fitted anew without each source in turn, from the same starting values, then asked for it.",
        "",
        "| source | rows | error in the fit, % | error left out, % |",
        "|---|---|---|---|",
    ]
    for source, without in left_out.items():
        rows = [source in name for name in data.sets]
        lines.append(f"| {source.strip()} | {sum(rows)} | {error[rows].mean():.1f} | {without.mean():.1f} |")
    lines.append(f"| mean over sources | {len(error)} | | {np.mean([e.mean() for e in left_out.values()]):.1f} |")
    return "\n".join(lines) + "\n"


def write(values: dict[str, float]) -> None:
    """Put fitted values where the package reads them; each keeps its place in the file."""
    package = Path(__file__).parent.parent / "src" / "wavetrain"
    path = package / "cluster" / "laws.yaml"
    lines, section = path.read_text(encoding="utf-8").splitlines(), ""
    for i, line in enumerate(lines):
        key = line.split(":")[0].strip()
        if line and not line.startswith(" "):
            section = key.removesuffix("_bytes") if key in ("forward_bytes", "backward_bytes") else "law"
        if (name := f"{section}.{key}") in values:
            lines[i] = re.sub(r": .*", f": {values[name]:.4g}", line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for family, names in CHIPS.items():
        for file in sorted((package / "cluster" / "catalog" / "devices").glob(f"{family}-*.yaml")):
            text = file.read_text(encoding="utf-8")
            for name in names:
                key = name.removesuffix("_efficiency")
                found = f"\\g<1>{values[f'chip.{family}.{name}']:.3g}, source: wavetrain-fit"
                text = re.sub(rf"(\n  {key}: {{value: )[\d.]+, source: wavetrain-fit", found, text)
            file.write_text(text, encoding="utf-8")
    print("wrote laws.yaml and the device files")


if __name__ == "__main__":
    main()
