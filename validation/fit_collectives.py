"""Fit the collective constants of tiers to published measurements: `python validation/fit_collectives.py GROUNDTRUTH`.

Reads collectives.csv and collectives_aceso.csv of that folder, prints the constants and the residuals; writes nothing.
Four constants are fitted, and none belongs to a source: the start of a collective, the ramp of a transfer, the step
over NVLink, the congestion between nodes. All others are the catalog's, which cites them. The measure is the mean of
|log(predicted / measured)|, rounded at 0.05, with equal weight per series (system, collective, ranks, nodes); the
method is a pattern search over the logarithms of the constants. Only all-reduces (and the ring all-gather and
reduce-scatter of nccl-tests) are fitted; profiles of the other collectives are predictions.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster import load_cluster
from wavetrain.cluster.cluster import Cluster, Tier
from wavetrain.cost.collective import Collective, Span, seconds

load = cache(load_cluster)
Constants = dict[str, float]
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}
BUS = {Collective.ALL_REDUCE: 2.0}  # bus bandwidth = this x (n - 1) / n x bytes / seconds; 1 for the others
SYSTEMS = {  # what each system of the tables is in the catalog
    "A100 single node NVLink": "dgx-a100",
    "NVLink3 A100 intra-node": "dgx-a100",
    "A100 8-GPU node NVLink3": "dgx-a100",
    "A100-40GB-SXM": "dgx-a100-40gb",
    "V100 single node NVLink": "dgx-1-v100",
    "NVLink2 V100 intra-node": "dgx-1-v100",
    "V100-32GB-SXM2": "dgx-1-v100",
    "H200 8-GPU node NVLS/SHARP": "dgx-h200",
    "H200 8-GPU node": "dgx-h200",
    "NVLink4 SHARP H100 intra-node": "dgx-h100",
    "B200-class 8-GPU node (NVLink5), 1 node": "dgx-b200",
    "B200-class, 4 nodes over 400 Gb/s per GPU": "dgx-b200",
    "DGX H100, 8 GPU/node + IB": "dgx-h100",
    "DGX H100": "dgx-h100",
    "L4": "g6-48xlarge",
    "A10G": "g5-48xlarge",
}
NAMED = {"all_reduce ring": ("ring",), "all_reduce NVLS": ("nvls",), "all_reduce NVLSTree": ("nvls_tree",)}
LEFT_OUT = """\
left out: Jean Zay rows (mis-tuned, 5-7 GB/s of 50), slide rows without a number of nodes (some are checks below), PCIe
slide rows (no such node in the catalog), ring-only H100 slide row (H200 ring rows are in), V100 groups of 3, 5, 6, 7
(no ring in the cube mesh), messages below 256 KiB over four B200 nodes (warm-up: 6 ms for 32 KiB).
not fitted, only predicted: all Aceso profiles but the all-reduces of A100 and V100. Those of all-gather and
reduce-scatter are taken to time PyTorch's list calls, which copy the full tensor once more: 2 x bytes / memory rate is
added to the prediction."""


@dataclass(frozen=True)
class Series:
    """Measurements of one collective on one group over message sizes."""

    system: str
    kind: Collective
    ranks: int
    nodes: int
    algorithms: tuple[str, ...] | None
    copies: bool  # the profile includes a copy of the tensor in memory
    num_bytes: NDArray[np.float64]
    measured_s: NDArray[np.float64]


# --- reading ---


def read_series(folder: Path) -> list[Series]:
    """All usable series of both tables."""
    points: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for key, size, time_s in [*_published(folder / "collectives.csv"), *_profiles(folder / "collectives_aceso.csv")]:
        points[key].append((size, time_s))
    made = []
    for (system, kind, ranks, nodes, algorithms, copies), found in points.items():
        size, time_s = np.array(sorted(found)).T
        made.append(Series(system, kind, ranks, nodes, algorithms, copies, size, time_s))  # type: ignore[arg-type]
    return made


def _published(path: Path) -> Iterator[tuple[tuple[object, ...], float, float]]:
    for row in csv.DictReader(path.open()):
        if row["system"] not in SYSTEMS or not row["n_gpu"]:
            continue
        ranks, nodes = int(row["n_gpu"]), int(row["n_nodes"])
        size, kind = _bytes(row["message_size"]), Collective(row["collective"].split()[0])
        if row["system"].startswith("V100") and ranks not in (2, 4, 8):
            continue
        if row["system"].startswith("B200-class, 4") and size < 2**18:
            continue
        moved = BUS.get(kind, 1.0) * (ranks - 1) / ranks * size
        key = (row["system"], kind, ranks, nodes, NAMED.get(row["collective"]), False)
        yield key, size, moved / (float(row["value"]) * 1e9)


def _profiles(path: Path) -> Iterator[tuple[tuple[object, ...], float, float]]:
    for row in csv.DictReader(path.open()):
        kind, ranks = Collective(row["collective"]), int(row["n_gpu"])
        shards = ranks if row["size_semantics"].startswith("per-rank input") else 1
        copies = kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        size = float(row["size_MiB"]) * 2**20 * shards
        yield (row["gpu"], kind, ranks, int(row["nodes"]), None, copies), size, float(row["time_ms"]) * 1e-3


def _bytes(text: str) -> float:
    """'64MiB', '4 GB'; 'large' and '16GiB class' are the largest measured."""
    for unit, factor in UNITS.items():
        number = text.removesuffix(" class").removesuffix(unit).strip()
        if unit in text and number.replace(".", "").isdigit():
            return float(number) * factor
    return 16.0 * 2**30


# --- predicting with trial constants ---


def tiers_with(constants: Constants, cluster: Cluster) -> tuple[Tier, ...]:
    """The tiers of a cluster with trial constants in place of the catalog's."""
    made = []
    for tier in cluster.tiers:
        trial = replace(tier, start_s=constants["start_us"] * 1e-6, ramp_s=constants["ramp_us"] * 1e-6)
        if tier.size > cluster.node.num_devices:
            trial = replace(trial, congestion=constants["congestion"])
        elif tier.name == "nvlink":
            trial = replace(trial, latency_s=constants["nvlink_latency_us"] * 1e-6)
        made.append(trial)
    return tuple(made)


def predict(series: Series, constants: Constants | None) -> NDArray[np.float64]:
    """Seconds of each point, with trial constants or the catalog's own."""
    cluster = load(f"{SYSTEMS[series.system]}:{series.nodes}")
    tiers = cluster.tiers if constants is None else tiers_with(constants, cluster)
    span = Span(ranks=series.ranks, stride=1)
    found = np.asarray(seconds(series.kind, series.num_bytes, span, tiers, algorithms=series.algorithms))
    device = cluster.device
    copy_s = 2 * series.num_bytes / (device.memory_bytes_per_s * device.memory_efficiency)
    return found + copy_s if series.copies else found


def residuals(series: Series, constants: Constants | None) -> NDArray[np.float64]:
    """log(predicted / measured) of each point."""
    return np.asarray(np.log(predict(series, constants) / series.measured_s))


def loss(data: Iterable[Series], constants: Constants | None) -> float:
    return float(np.mean([np.mean(np.hypot(residuals(series, constants), 0.05)) for series in data]))


def search(measure: Callable[[Constants], float], start: Constants, names: list[str]) -> Constants:
    """Pattern search: scale one constant at a time, halving the step when nothing helps."""
    best, best_loss, step = dict(start), measure(start), 0.4
    while step > 0.004:
        improved = False
        for name in names:
            for factor in (math.exp(step), math.exp(-step)):
                trial = {**best, name: best[name] * factor}
                if (trial_loss := measure(trial)) < best_loss - 1e-6:
                    best, best_loss, improved = trial, trial_loss, True
                    break
        step = step if improved else step / 2
    return best


# --- the fit ---

FIRST_GUESS: Constants = {"start_us": 30.0, "ramp_us": 50.0, "nvlink_latency_us": 2.0, "congestion": 0.01}


def fitted(data: list[Series]) -> list[Series]:
    """What the constants are fitted to: NVLink systems, without the profiles that hold more than the collective."""
    return [s for s in data if not s.copies and s.kind is not Collective.ALL_TO_ALL and s.system not in ("L4", "A10G")]


def fit(data: list[Series]) -> Constants:
    """Inside the node first, then between nodes."""
    inside = [s for s in fitted(data) if s.nodes == 1]
    between = [s for s in fitted(data) if s.nodes > 1]
    names = ["start_us", "ramp_us", "nvlink_latency_us"]
    found = search(lambda trial: loss(inside, trial), FIRST_GUESS, names)
    return search(lambda trial: loss(between, trial), found, ["congestion"])


def report(data: list[Series], constants: Constants | None) -> None:
    """Residuals per system and collective, then per size decade."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for series in data:
        errors = np.expm1(residuals(series, constants))
        rows[series.system, series.kind].extend(zip(series.num_bytes, errors, strict=True))
    print(f"\n{'system':<44}{'collective':<16}{'points':>7}{'mean|e|':>9}{'median|e|':>10}{'median e':>9}")
    for (system, kind), found in sorted(rows.items()):
        size, error = np.array(found).T
        print(f"{system:<44}{kind:<16}{len(size):>7}{_share(np.abs(error).mean()):>9}", end="")
        print(f"{_share(np.median(np.abs(error))):>10}{_share(np.median(error)):>9}")
        decade = np.floor(np.log10(size)).astype(int)
        parts = [f"1e{d}: {_share(np.median(error[decade == d]))} ({np.sum(decade == d)})" for d in np.unique(decade)]
        print(f"{'':<6}median error per decade of bytes: {', '.join(parts)}")


def _share(value: float) -> str:
    return f"{100 * value:+.1f}%" if value < 0 else f"{100 * value:.1f}%"


def checks() -> None:
    """Published rates of long messages that were not fitted, and the step of a ring over nodes, with the catalog."""
    print("\nchecks, bus GB/s at 16 GiB with the catalog's constants")
    for name, ranks, stride, published in (
        ("dgx-a100:2", 16, 1, 192),
        ("dgx-a100:16", 128, 1, 192),
        ("dgx-a100:2", 2, 8, 24),
        ("dgx-h100:2", 16, 1, 380),
        ("dgx-h100:16", 128, 1, 380),
        ("dgx-h100:2", 2, 8, 48),
    ):
        time_s = float(seconds(Collective.ALL_REDUCE, 2.0**34, Span(ranks, stride), load(name).tiers))
        bus = 2 * (ranks - 1) / ranks * 2**34 / time_s / 1e9
        print(f"  {name:<12}{ranks:>4} ranks, stride {stride}: {bus:4.0f} (published {published})")
    node, network = load("dgx-h100:2").tiers
    print(
        f"  a ring's step per node of eight: {(7 * node.latency_s + network.latency_s) * 1e6:.1f} us (whole steps: 21)"
    )


def main() -> None:
    data = read_series(Path(sys.argv[1]))
    used = fitted(data)
    print(f"{_points(data):,} points in {len(data)} series, {_points(used):,} in {len(used)} of them fitted")
    print(LEFT_OUT)
    constants = fit(data)
    print(f"\nfitted (measure {loss(used, constants):.4f}; with the catalog as it is {loss(used, None):.4f})")
    for name, value in constants.items():
        print(f"  {name:<20}{value:10.4g}")
    print("\nresiduals with the catalog as it is")
    report(data, None)
    checks()


def _points(data: list[Series]) -> int:
    return sum(len(series.num_bytes) for series in data)


if __name__ == "__main__":
    main()
