"""A cluster, described: devices, tiers, totals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from wavetrain.base.codec import encode
from wavetrain.base.units import format_bytes, format_rate, format_seconds, printable
from wavetrain.cluster import Cluster, Node, catalog_sources
from wavetrain.show.tables import facts, grid

Json = dict[str, Any]
SCHEMA = "wavetrain.description.cluster/1"


def cluster_document(cluster: Cluster) -> Json:
    """Everything understood of a cluster, for machines."""
    cited = catalog_sources()
    return {
        "schema": SCHEMA,
        "kind": "cluster",
        "name": cluster.name,
        "num_nodes": cluster.num_nodes,
        "num_devices": cluster.num_devices,
        "uniform": cluster.is_uniform,
        "memory_bytes": _total(cluster, "memory_bytes"),
        "busy_w": cluster.busy_w,
        "usd_per_hour": cluster.usd_per_hour,
        "tiers": [encode(tier) for tier in cluster.tiers],
        "groups": [encode(group) for group in cluster.groups],
        "sources": [
            {"key": s.key, "source": s.source, "citation": cited.get(s.source, s.source)} for s in cluster.sources
        ],
    }


def _total(cluster: Cluster, field: str) -> int:
    return sum(g.count * g.node.num_devices * getattr(g.node.device, field) for g in cluster.groups)


def cluster_card(cluster: Cluster) -> RenderableType:
    """The same for people."""
    nodes = [facts(printable(group.node.title), _node_facts(group.node)) for group in cluster.groups]
    return Group(facts(printable(cluster.name), _facts(cluster)), "", *nodes, "", _tier_table(cluster))


def _facts(cluster: Cluster) -> Iterator[tuple[str, str]]:
    mixed = "" if cluster.is_uniform else f", {cluster.num_kinds} kinds of nodes"
    yield "devices", f"{cluster.num_devices:,} in {cluster.num_nodes:,} nodes{mixed}"
    yield "memory", f"{format_bytes(_total(cluster, 'memory_bytes'))} in all"
    yield "power", f"{format_rate(cluster.busy_w, 'W')} while training, hosts included"
    yield "price", f"${cluster.usd_per_hour:,.2f} per hour"


def _node_facts(node: Node) -> Iterator[tuple[str, str]]:
    device = node.device
    yield "device", f"{node.num_devices} x {printable(device.title)}"
    rates = [f"{dtype} {rate / 1e12:g}" for dtype, rate in device.peak.known().items()]
    yield "peak TFLOP/s", ", ".join(rates)
    achieved = f"{device.matmul_efficiency:.0%} of peak in the best matrix product"
    yield "achievable", f"{achieved}, {device.memory_efficiency:.0%} of memory bandwidth"
    yield "memory", f"{format_bytes(device.memory_bytes)} at {format_rate(device.memory_bytes_per_s, 'B/s')}"
    yield "power", f"{device.idle_w:g} W idle, {device.busy_w:g} W training, {device.limit_w:g} W limit"
    yield "", f"host {node.host_w:g} W per node"
    yield "price", f"${device.usd_per_hour:g} per device and hour"


def _tier_table(cluster: Cluster) -> Table:
    table = grid("tier", ">devices", ">per device, one way", ">latency", ">shared by")
    for tier in cluster.tiers:
        table.add_row(
            printable(tier.name),
            f"{tier.size:,}",
            format_rate(tier.bytes_per_s, "B/s"),
            format_seconds(tier.latency_s),
            f"{tier.sharers:g}",
        )
    return table
