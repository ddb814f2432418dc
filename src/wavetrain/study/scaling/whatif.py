"""Other hardware: parameters of a cluster, what throughput owes to each, and changes that are planned again for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log
from typing import TypeVar

from wavetrain.cluster.cluster import Cluster, Device, Network, Node, Rates, Tier
from wavetrain.plan.plan import Plan
from wavetrain.sim.predict import outline

Links = TypeVar("Links", Tier, Network)
Scaled = Callable[[Cluster, float], Cluster]
STEP = 1.01  # both ways, to see what a parameter does


# --- parameters ---


def _nodes(cluster: Cluster, change: Callable[[Node], Node]) -> Cluster:
    return replace(cluster, groups=tuple(replace(group, node=change(group.node)) for group in cluster.groups))


def _devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    return _nodes(cluster, lambda node: replace(node, device=change(node.device)))


def _links(cluster: Cluster, change: Callable[[Tier], Tier]) -> Cluster:
    return _nodes(cluster, lambda node: replace(node, tiers=tuple(map(change, node.tiers))))


def _networks(cluster: Cluster, change: Callable[[Network], Network]) -> Cluster:
    return _nodes(cluster, lambda node: replace(node, network=node.network and change(node.network)))


def peak(cluster: Cluster, factor: float) -> Cluster:
    """FLOP/s of devices, in all formats."""

    def change(device: Device) -> Device:
        return replace(device, peak=Rates(**{name: factor * rate for name, rate in device.peak.known().items()}))

    return _devices(cluster, change)


def memory_rate(cluster: Cluster, factor: float) -> Cluster:
    """Bytes per second of devices' memory."""
    return _devices(cluster, lambda device: replace(device, memory_bytes_per_s=factor * device.memory_bytes_per_s))


def memory_size(cluster: Cluster, factor: float) -> Cluster:
    """Bytes of devices' memory."""
    return _devices(cluster, lambda device: replace(device, memory_bytes=round(factor * device.memory_bytes)))


def price(cluster: Cluster, factor: float) -> Cluster:
    """Dollars per hour of devices."""
    return _devices(cluster, lambda device: replace(device, usd_per_hour=factor * device.usd_per_hour))


def link_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """Bytes per second inside the node, or the rack where the same links join it; the share achieved of it stays."""

    def change(tier: Tier) -> Tier:
        pair = tier.pair_bytes_per_s
        return replace(
            tier, bytes_per_s=factor * tier.bytes_per_s, pair_bytes_per_s=None if pair is None else factor * pair
        )

    return _links(cluster, change)


def link_latency(cluster: Cluster, factor: float) -> Cluster:
    """Seconds of a step inside the node, of every kind of collective; what starts one is software's and stays."""

    def change(tier: Tier) -> Tier:
        relay_s = None if tier.relay_s is None else factor * tier.relay_s
        return replace(_later(tier, factor), relay_s=relay_s)

    return _links(cluster, change)


def network_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """Bytes per second between nodes."""
    return _networks(cluster, lambda network: replace(network, nic_bytes_per_s=factor * network.nic_bytes_per_s))


def network_latency(cluster: Cluster, factor: float) -> Cluster:
    """Seconds of a step between nodes, as `link_latency`."""
    return _networks(cluster, lambda network: _later(network, factor))


def _later(links: Links, factor: float) -> Links:
    kinds = tuple(replace(kind, latency_s=factor * kind.latency_s) for kind in links.kinds)
    return replace(links, latency_s=factor * links.latency_s, kinds=kinds)


PARAMETERS: dict[str, Scaled] = {
    "peak": peak,
    "memory_rate": memory_rate,
    "memory_size": memory_size,
    "link_bandwidth": link_bandwidth,
    "link_latency": link_latency,
    "network_bandwidth": network_bandwidth,
    "network_latency": network_latency,
    "price": price,
}
OF_SPEED = tuple(name for name in PARAMETERS if name not in ("memory_size", "price"))


# --- what throughput owes to each ---


def elasticities(plan: Plan) -> dict[str, float]:
    """Percent of throughput per percent of each parameter that speed depends on, the plan staying as it is.

    d ln(tokens/s) / d ln(parameter), from the plan simulated with 1 % more and 1 % less. Of a rate between 0 and 1, of
    a latency between -1 and 0. What their sizes lack of 1 together is constants of software: of host and collectives.
    """
    return {name: _elasticity(plan, PARAMETERS[name]) for name in OF_SPEED}


def _elasticity(plan: Plan, scaled: Scaled) -> float:
    more, less = (scaled(plan.cluster, factor) for factor in (STEP, 1 / STEP))
    if more.tiers == plan.cluster.tiers and more.device == plan.cluster.device:  # nothing that the plan uses
        return 0.0
    return (log(_step_s(plan, less)) - log(_step_s(plan, more))) / (2 * log(STEP))


def _step_s(plan: Plan, cluster: Cluster) -> float:
    return outline(replace(plan, cluster=cluster), cluster.laws).step_s


# --- changes to plan again for ---


def _latency(cluster: Cluster, factor: float) -> Cluster:
    return network_latency(link_latency(cluster, factor), factor)


CHANGES: dict[str, Callable[[Cluster], Cluster]] = {
    "network_bandwidth x2": partial(network_bandwidth, factor=2.0),
    "link_bandwidth x2": partial(link_bandwidth, factor=2.0),
    "latency /2": partial(_latency, factor=0.5),
    "memory x2": partial(memory_size, factor=2.0),
    "peak x2": partial(peak, factor=2.0),
    "price /2": partial(price, factor=0.5),
}
