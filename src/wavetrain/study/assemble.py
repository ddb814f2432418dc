"""A `Cluster` of what was measured: devices, network and laws, and where each number is from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from wavetrain.cluster import Cluster, Device, Group, Node, device_names, load_cluster, node_names
from wavetrain.cluster.cluster import Source
from wavetrain.cluster.laws import Laws
from wavetrain.runtime.samples import Sample
from wavetrain.study.calibrate_network import Joined

DIGITS = 6
OVERLAP = ("gradients", "messages")  # what our runtime does beside compute
CPU, GPU = "cpu-host", "h100-sxm-80gb"  # what devices are like that the catalog does not have
MEASURED = "wavetrain measure"
COLUMNS = "what dtype sizes ranks hosts seconds"
_FROM_CATALOG = ("idle_w", "busy_w", "limit_w", "usd_per_hour")
_RATES = ("memory_gb_per_s",)
T = TypeVar("T")


def like(kind: str, title: str) -> Device:
    """The catalog's device for watts and price: the one with most of its name's words in a CUDA device's."""
    if kind != "cuda":
        return load_cluster(CPU).device
    said = title.lower()
    words = re.split(r"[^a-z0-9]+", said)

    def score(name: str) -> tuple[int, bool]:
        own = name.split("-")
        return (sum(word in said for word in own) if own[0] in words else 0, "sxm" in own)

    best = max((name for name in device_names() if name != CPU), key=score)
    return load_cluster(best if score(best)[0] else GPU).device


def assemble(
    name: str, device: Device, joined: Joined, laws: Laws | None, *, devices: int, hosts: int, base: Device
) -> Cluster:
    """`base` is the catalog's device that some of `device` is from: all of it where no laws were measured."""
    node = Node(
        "host", "a host that was measured", _short(device), devices, _host_w(base), joined.tiers, joined.network
    )
    own = None if laws is None else _short(laws)
    return Cluster(name, (Group(node, hosts),), _sources(device, joined, base, own is not None), own, OVERLAP)


def _host_w(base: Device) -> float:
    """Of the first node type with such devices."""
    nodes = (load_cluster(name).node for name in node_names())
    return next((node.host_w for node in nodes if node.device.name == base.name), 0.0)


def _sources(device: Device, joined: Joined, base: Device, computed: bool) -> tuple[Source, ...]:
    taken = f"catalog, {base.name}"
    found = {"node.host_w": taken} | {f"node.device.{key}": taken for key in _FROM_CATALOG}
    rates = [f"peak_tflops.{dtype}" for dtype in device.peak.known()] + list(_RATES)
    found |= {f"node.device.{key}": MEASURED if computed else taken for key in rates}
    if joined.tiers:
        found["node.tiers[0].gb_per_s"] = MEASURED
    if joined.network is not None:
        found["node.network.nic_gbit_per_s"] = MEASURED
    return tuple(Source(key, source) for key, source in found.items())


def _short(value: T) -> T:
    """With so many digits as a measurement has, which files keep exactly."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(_short(item) for item in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _short(getattr(value, item.name)) for item in fields(value)})
    return value


def raw_of(samples: Sequence[Sample], residuals: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """What is kept beside the cluster, for people: every sample as a line."""
    rows = [
        f"{s.what} {s.dtype} {'x'.join(map(str, s.sizes)) or '-'} {s.ranks} {s.hosts} {s.seconds:.4g}" for s in samples
    ]
    return {"measured": about, "residuals": residuals, "columns": COLUMNS, "samples": rows}
