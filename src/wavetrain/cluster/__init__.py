"""What there is to train on: devices, nodes, tiers of network; the catalog and its readers."""

from wavetrain.cluster.cluster import Cluster, Device, Group, Network, Node, Rates, Source, Tier
from wavetrain.cluster.read import catalog_sources, device_names, load_cluster, node_names, read_cluster
from wavetrain.cluster.write import write_cluster

__all__ = [
    "Cluster",
    "Device",
    "Group",
    "Network",
    "Node",
    "Rates",
    "Source",
    "Tier",
    "catalog_sources",
    "device_names",
    "load_cluster",
    "node_names",
    "read_cluster",
    "write_cluster",
]
