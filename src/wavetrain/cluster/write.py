"""A cluster as the YAML that `load_cluster` reads back to an equal value."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from wavetrain.base.document import reads_as_text
from wavetrain.base.units import GIB, shifted
from wavetrain.cluster.cluster import Cluster, Device, Network, Node, Tier
from wavetrain.cluster.laws import write_laws


def write_cluster(cluster: Cluster, path: Path, *, raw: dict[str, Any] | None = None) -> None:
    """Write a complete cluster file; nothing in it refers to the catalog. `raw` is what its numbers were found from."""
    sources = {source.key: source.source for source in cluster.sources}
    groups = [{"nodes": group.count, "node": _node(group.node)} for group in cluster.groups]
    data: dict[str, Any] = {"name": cluster.name}
    as_groups = len(groups) > 1 or any(key.startswith("groups") for key in sources)
    data |= {"groups": groups} if as_groups else groups[0]
    if cluster.own_laws is not None:
        data["laws"] = write_laws(cluster.own_laws)
    if cluster.overlap != Cluster.overlap:
        data["overlap"] = list(cluster.overlap)
    if raw is not None:
        data["raw"] = raw
    text = yaml.dump(_cited(data, "", sources), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    path.write_text(text, encoding="utf-8")


class _Dumper(yaml.SafeDumper):
    """PyYAML quotes by the rules of YAML 1.1; our reader is of 1.2."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if reads_as_text(text) else '"')


_Dumper.add_representer(str, _quoted)


def _cited(value: Any, key: str, sources: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _cited(item, f"{key}.{name}" if key else name, sources) for name, item in value.items()}
    if isinstance(value, list):
        return [_cited(item, f"{key}[{i}]", sources) for i, item in enumerate(value)]
    return {"value": value, "source": sources[key]} if key in sources else value


def _node(node: Node) -> dict[str, Any]:
    data = {
        "name": node.name,
        "title": node.title,
        "device": _device(node.device),
        "devices": node.num_devices,
        "host_w": node.host_w,
    }
    if node.tiers:
        data["tiers"] = [_tier(tier) for tier in node.tiers]
    if node.network:
        data["network"] = _network(node.network)
    return data


def _device(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "title": device.title,
        "peak_tflops": {dtype: shifted(rate, -12) for dtype, rate in device.peak.known().items()},
        "memory_gib": device.memory_bytes / GIB,
        "memory_gb_per_s": shifted(device.memory_bytes_per_s, -9),
        "efficiency": _efficiency(device),
        "idle_w": device.idle_w,
        "busy_w": device.busy_w,
        "limit_w": device.limit_w,
        "usd_per_hour": device.usd_per_hour,
    }


def _efficiency(device: Device) -> dict[str, float]:
    data = {"matmul": device.matmul_efficiency, "memory": device.memory_efficiency, "inner_half": device.inner_half}
    if device.vector_inner_half:
        data["vector_inner_half"] = device.vector_inner_half
    if device.tile != Device.tile:
        data["tile"] = device.tile
    if device.fp8_efficiency is not None:
        data["fp8"] = device.fp8_efficiency
    return data | asdict(device.attention)


def _tier(tier: Tier) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": tier.name,
        "size": tier.size,
        "gb_per_s": shifted(tier.bytes_per_s, -9),
        "latency_us": shifted(tier.latency_s, 6),
        "across_nodes": tier.across_nodes,
        "multicast": tier.multicast,
        "tree": tier.tree,
        **_collective(tier),
        **_kinds(tier),
    }
    if tier.relay_s is not None:
        data["relay_us"] = shifted(tier.relay_s, 6)
    if tier.pair_bytes_per_s is not None:
        data["pair_gb_per_s"] = shifted(tier.pair_bytes_per_s, -9)
    return data


def _collective(links: Tier | Network) -> dict[str, float]:
    return {
        "efficiency": links.efficiency,
        "start_us": shifted(links.start_s, 6),
        "ramp_us": shifted(links.ramp_s, 6),
        "congestion": links.congestion,
    }


def _kinds(links: Tier | Network) -> dict[str, Any]:
    """Collectives that achieve something else."""
    rows = {
        own.kind: {
            "efficiency": own.efficiency,
            "latency_us": shifted(own.latency_s, 6),
            "start_us": shifted(own.start_s, 6),
            "ramp_us": shifted(own.ramp_s, 6),
            **{key: share for key in ("pair_loss", "hidden") if (share := getattr(own, key))},
        }
        for own in links.kinds
    }
    return {"collectives": rows} if rows else {}


def _network(network: Network) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": network.name,
        "nics": network.nics,
        "nic_gbit_per_s": shifted(network.nic_bytes_per_s * 8, -9),
        "latency_us": shifted(network.latency_s, 6),
        "tree": network.tree,
        **_collective(network),
        **_kinds(network),
    }
    if network.pod_nodes:
        data |= {"pod_nodes": network.pod_nodes, "oversubscription": network.oversubscription}
    return data
