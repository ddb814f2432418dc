"""What was measured, for people and as a document."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from wavetrain.base.units import format_bytes, format_rate, format_seconds, printable
from wavetrain.cluster import Cluster
from wavetrain.show.tables import facts, grid


def document(
    cluster: Cluster, residuals: dict[str, Any], about: dict[str, Any], file: str, *, computed: bool
) -> dict[str, Any]:
    """The numbers of a measurement; all of them are in the file."""
    device = cluster.device
    network = [
        {
            "tier": tier.name,
            "kind": own.kind,
            "bytes_per_s": tier.bytes_per_s * own.efficiency,
            "latency_s": own.latency_s,
            "start_s": own.start_s,
            "ramp_s": own.ramp_s,
            "hidden": own.hidden,
            "shared_by": tier.sharers,
            "error_alone": residuals["network alone"][f"{tier.name} {own.kind}"],
        }
        for tier in cluster.tiers
        for own in tier.kinds
    ]
    return {
        "schema": "wavetrain.measure/1",
        "file": file,
        "hosts": cluster.num_nodes,
        "devices_per_host": cluster.node.num_devices,
        "device": {
            "title": device.title,
            "computed": computed,
            "flops_per_s": device.peak.known(),
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_s": device.memory_bytes_per_s,
        },
        "network": network,
        "errors_of_compute": residuals["compute"],
        "seconds": about["seconds"],
        "quick": about["quick"],
        "notes": about["notes"],
    }


def card(shown: dict[str, Any]) -> RenderableType:
    """A measurement in about twelve lines."""
    device, hosts, each = shown["device"], shown["hosts"], shown["devices_per_host"]
    rates = ", ".join(f"{dtype} {format_rate(rate, 'FLOP/s')}" for dtype, rate in device["flops_per_s"].items())
    memory = f"{format_bytes(device['memory_bytes'])}, {format_rate(device['memory_bytes_per_s'], 'B/s')}"
    rows = [
        ("devices", f"{each} on {hosts} host{'s' if hosts > 1 else ''}" + (" each" if hosts > 1 else "")),
        ("compute", rates if device["computed"] else f"{rates} (not measured: from the catalog)"),
        ("memory", memory),
    ]
    errors = sorted(shown["errors_of_compute"].values())
    if errors:
        rows.append(("operators", f"fitted to {errors[len(errors) // 2]:.1%} (median), {errors[-1]:.1%} (worst)"))
    rows.append(("took", f"{shown['seconds']:.0f} s" + (", quick" if shown["quick"] else "")))
    parts: list[RenderableType] = [facts(printable(device["title"]), rows)]
    if shown["network"]:
        parts += ["", _network(shown["network"])]
    file = printable(shown["file"], most=400)
    lines = (f"wrote {file}", f"next: wavetrain plan MODEL {file} --global-batch N")
    return Group(*parts, "", *map(Text, lines))


def _network(rows: list[dict[str, Any]]) -> RenderableType:
    table = grid("over", "kind", ">long ones", ">a step", ">start", ">error alone", ">worst")
    for row in rows:
        error = row["error_alone"]
        times = (format_seconds(row[key]) if row[key] else "-" for key in ("latency_s", "start_s"))
        shares = f"{error['median']:.1%}", f"{error['worst']:.1%}"
        table.add_row(row["tier"], row["kind"], format_rate(row["bytes_per_s"], "B/s"), *times, *shares)
    return table
