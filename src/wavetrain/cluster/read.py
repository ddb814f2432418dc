"""`load_cluster`: a catalog name with a number of nodes (`dgx-h100:32`), or a YAML file that may build on the catalog.

    name: lab
    nodes: 4
    node:
      like: dgx-a100
      device: {like: a100-sxm-80gb, usd_per_hour: 1.2}
      network: {nic_gbit_per_s: 100}

What is not stated comes from the entry it is like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields as dataclass_fields
from functools import cache
from importlib import resources
from pathlib import Path

from wavetrain.base.document import Node as Doc
from wavetrain.base.document import exists, merge, parse_yaml, read_document
from wavetrain.base.errors import InputError, Problem, unknown_name
from wavetrain.base.fields import Fields
from wavetrain.base.units import GIB, shifted
from wavetrain.cluster.cluster import (
    LINK_EFFICIENCY,
    MOST_NODES,
    NETWORK_EFFICIENCY,
    RAMP_S,
    START_S,
    Achieved,
    AttentionRates,
    Cluster,
    Device,
    Group,
    Network,
    Node,
    Rates,
    Source,
    Tier,
)
from wavetrain.cluster.laws import read_laws

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
OVERLAPS = ("gradients", "tensor", "messages")  # what may travel beside compute
MOST_DEVICES = 100_000  # in one node or one tier
MOST_GROUPS = 1000
IDENTIFYING = ("node", "nodes", "groups", "device", "devices", "tiers")  # keys only a cluster has


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Read a cluster by catalog name (`dgx-h100:32` is 32 nodes) or from a YAML file."""
    name = str(name_or_path)
    kind, _, count = name.partition(":")
    if kind in node_names() or kind in device_names():
        return _named(name, kind, count)
    path = Path(name_or_path)
    if not exists(path):
        raise InputError(unknown_name(name, "node type or device", (*node_names(), *device_names())))
    if path.is_dir():
        raise InputError(Problem(where=name, rule="is a directory, not a cluster file"))
    return read_cluster(read_document(path))


def read_cluster(doc: Doc) -> Cluster:
    """Read a cluster from a parsed document: a cluster with nodes or groups, or a single node type."""
    f = Fields(doc)
    name = f.text("name", default=Path(doc.file).stem)
    laws = read_laws(f.section("laws")) if f.has("laws") else None
    overlap = _overlap(f)
    f.has("raw")  # what was measured, for people; see docs/measure.md
    if f.has("groups"):
        for key in ("nodes", "node"):
            if f.has(key):
                f.complain(key, "groups say this for each of them; give one or the other")
        items = enumerate(f.list_of("groups", most=MOST_GROUPS))
        groups = tuple(_group(f.item("groups", i, item)) for i, item in items)
    elif f.has("node"):
        groups = (_group(f, named=False),)
    else:
        count = f.whole("nodes", most=MOST_NODES, default=1)
        own = _based_on(f, "nodes", names=node_names())
        groups = (Group(_node_fields(own), count),)
        own.asked |= f.asked
        own.check_unknown()
        f.strict = False  # checked just now, together with what it builds on
    several = sum(group.count for group in groups) > 1
    lonely = [group.node.name for group in groups if several and group.node.network is None]
    if lonely and not f.problems:
        rule = f"nodes of type {lonely[0]} have no network, so there can be only one"
        remedy = "give network: {name: ethernet, nics: 1, nic_gbit_per_s: 100, latency_us: 14}"
        f.complain("network", rule, remedy=remedy)
    f.finish()
    return Cluster(name, groups, tuple(Source(key, source) for key, source in f.sources.items()), laws, overlap)


def _overlap(f: Fields) -> tuple[str, ...]:
    """What the software there does beside compute."""
    if not f.has("overlap"):
        return Cluster.overlap
    items = f.list_of("overlap", most=len(OVERLAPS))
    found = tuple(str(item.value) for item in items)
    if not set(found) <= set(OVERLAPS):
        f.complain("overlap", "must be words for what travels beside compute", legal=OVERLAPS)
    return found


# --- the catalog ---


@cache
def node_names() -> tuple[str, ...]:
    return tuple(_entries("nodes"))


@cache
def device_names() -> tuple[str, ...]:
    return tuple(_entries("devices"))


@cache
def catalog_sources() -> dict[str, str]:
    """The documents that catalog numbers cite, by id."""
    file = resources.files("wavetrain.cluster").joinpath("catalog/sources.yaml")
    items = parse_yaml(file.read_text(encoding="utf-8"), file="sources.yaml").plain()
    assert isinstance(items, dict)
    return {key: str(value) for key, value in items.items()}


def _entries(folder: str) -> Iterator[str]:
    files = resources.files("wavetrain.cluster").joinpath("catalog", folder).iterdir()
    return iter(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


@cache
def _entry(folder: str, name: str) -> Doc:
    file = resources.files("wavetrain.cluster").joinpath("catalog", folder, f"{name}.yaml")
    return parse_yaml(file.read_text(encoding="utf-8"), file=f"catalog/{folder}/{name}.yaml")


def _named(name: str, kind: str, count: str) -> Cluster:
    number = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
    if ":" in name and not 1 <= number <= MOST_NODES:
        rule = f"after the colon comes the number of nodes, 1 to {MOST_NODES:,}"
        raise InputError(Problem(where=name, key="nodes", value=count, rule=rule, remedy=f"{kind}:4"))
    number = number or 1
    if kind in node_names():
        text = f"name: {name}\nnodes: {number}\nnode: {kind}\n"
        return read_cluster(parse_yaml(text, file=name))
    if number > 1:
        rule = f"{kind} is a device; several of them need a node type, which says how they are joined"
        having = [n for n in node_names() if _device_of(n) == kind]
        raise InputError(Problem(where=name, key="node", value=kind, rule=rule, legal=tuple(having)))
    text = f"name: {kind}\ndevice: {kind}\ndevices: 1\nhost_w: 0\n"
    return read_cluster(parse_yaml(text, file=name))


def _device_of(node: str) -> object:
    items = _entry("nodes", node).value
    return items["device"].value if isinstance(items, dict) else None


# --- readers ---


def _group(f: Fields, *, named: bool = True) -> Group:
    count = f.whole("nodes", most=MOST_NODES, default=1)
    node = _node(f, "node")
    if named:
        f.check_unknown()
    return Group(node, count)


def _resolved(f: Fields, key: str, folder: str) -> Fields:
    """The mapping under `key`, with the catalog entry that it names (or is `like`) underneath."""
    names = node_names() if folder == "nodes" else device_names()
    f.has(key)
    doc = f.items.get(key)
    if doc is None:
        f.complain(key, "missing", legal=names)
        return Fields(_entry(folder, names[0]), key=f.full(key))
    if isinstance(doc.value, dict):
        return _based_on(Fields(doc, parent=f, key=f.full(key)), folder, names=names)
    if not isinstance(doc.value, str):
        f.complain(key, f"must be a name or a mapping, not {doc.what}", legal=names)
        return Fields(_entry(folder, names[0]), key=f.full(key))
    return Fields(_entry(folder, f.choice(key, names)), parent=f, key=f.full(key))


def _based_on(own: Fields, folder: str, *, names: tuple[str, ...]) -> Fields:
    """Fields with the entry that they are `like` underneath; an unknown one is reported, and any stands in for it."""
    if not own.has("like"):
        return own
    entry = _entry(folder, own.choice("like", names))
    stated = Doc({k: v for k, v in own.items.items() if k != "like"}, own.node.file, own.node.line)
    merged = Fields(merge(_refinable(entry, stated), stated), key=own.key)
    merged.problems, merged.sources = own.problems, own.sources
    return merged


def _refinable(entry: Doc, stated: Doc) -> Doc:
    """The entry with its device as `{like: name}`, which a stated mapping refines, or replaces if like another."""
    assert isinstance(entry.value, dict)
    assert isinstance(stated.value, dict)
    device, over = entry.value.get("device"), stated.value.get("device")
    if device is None or over is None or not isinstance(over.value, dict) or isinstance(device.value, dict):
        return entry
    base = Doc({} if "like" in over.value else {"like": device}, device.file, device.line)
    return Doc({**entry.value, "device": base}, entry.file, entry.line)


def _node(f: Fields, key: str) -> Node:
    own = _resolved(f, key, "nodes")
    node = _node_fields(own)
    own.check_unknown()
    return node


def _node_fields(f: Fields) -> Node:
    name = f.text("name", default="node")
    title = f.text("title", default=name)
    num_devices = f.whole("devices", most=MOST_DEVICES)
    device = _device(f)
    tiers = tuple(_tier(f.item("tiers", i, item)) for i, item in enumerate(f.list_of("tiers", most=16, default=())))
    network = _network(f.section("network")) if f.has("network") else None
    _check_tiers(f, tiers, num_devices, network)
    return Node(
        name=name,
        title=title,
        device=device,
        num_devices=num_devices,
        host_w=f.number("host_w", most=1e7, default=0.0),
        tiers=tiers,
        network=network,
    )


def _check_tiers(f: Fields, tiers: tuple[Tier, ...], num_devices: int, network: Network | None) -> None:
    sizes = [tier.size for tier in tiers]
    key = _blamed(f, "tiers", "devices")
    if not f.good("devices", "tiers"):
        return
    if sizes != sorted(set(sizes)):
        f.complain("tiers", f"must grow from the innermost out, not {', '.join(map(str, sizes))}")
    elif num_devices > 1 and not sizes:
        f.complain("tiers", f"missing: how the {num_devices} devices of a node are joined")
    elif sizes and not tiers[-1].across_nodes and sizes[-1] != num_devices:
        rule = f"the outermost tier joins {sizes[-1]} devices, but a node has {num_devices}"
        f.complain(key, rule, remedy="a tier of that size, or across_nodes: true for links between nodes")
    elif network and network.pod_nodes and sizes and network.pod_nodes * num_devices < sizes[-1]:
        rule = f"a pod must hold at least the {sizes[-1]} devices of the outermost tier"
        f.complain("network", f"pod_nodes: {rule}")


def _blamed(f: Fields, *keys: str) -> str:
    """Of keys that contradict each other, the one the user wrote rather than the catalog."""
    return next((key for key in keys if key in f.items and f.items[key].file == f.node.file), keys[0])


def _device(f: Fields) -> Device:
    own = _resolved(f, "device", "devices")
    peak = own.section("peak_tflops")
    rates = {item.name: peak.number(item.name, least=1e-6, most=1e9, default=None) for item in dataclass_fields(Rates)}
    if not any(rates.values()) and peak.good(*rates):
        own.complain("peak_tflops", "must give at least one rate", legal=tuple(rates))
    peak.check_unknown()
    efficiency = own.section("efficiency")
    device = Device(
        name=own.text("name", default="device"),
        title=own.text("title", default=own.text("name", default="device")),
        peak=Rates(**{name: None if rate is None else shifted(rate, 12) for name, rate in rates.items()}),
        memory_bytes=round(own.number("memory_gib", least=1e-6, most=1e9) * GIB),
        memory_bytes_per_s=shifted(own.number("memory_gb_per_s", least=1e-6, most=1e9), 9),
        matmul_efficiency=efficiency.number("matmul", least=0.001, most=1.0),
        memory_efficiency=efficiency.number("memory", least=0.001, most=1.0),
        idle_w=own.number("idle_w", most=1e6),
        busy_w=own.number("busy_w", most=1e6),
        limit_w=own.number("limit_w", most=1e6),
        usd_per_hour=own.number("usd_per_hour", most=1e6),
        fp8_efficiency=efficiency.number("fp8", least=0.001, most=1.0, default=None),
        inner_half=efficiency.number("inner_half", most=1e6, default=Device.inner_half),
        vector_inner_half=efficiency.number("vector_inner_half", most=1e6, default=Device.vector_inner_half),
        tile=efficiency.whole("tile", most=1024, default=Device.tile),
        attention=_attention(efficiency),
    )
    efficiency.check_unknown()
    if own.good("idle_w", "busy_w", "limit_w") and not device.idle_w <= device.busy_w <= device.limit_w:
        rule = f"idle_w ({device.idle_w:g}), busy_w ({device.busy_w:g}) and limit_w ({device.limit_w:g}) must not fall"
        own.complain(_blamed(own, "busy_w", "limit_w", "idle_w"), rule)
    own.check_unknown()
    return device


def _attention(f: Fields) -> AttentionRates:
    """Rates of attention kernels; a file may leave them out."""
    usual = AttentionRates()
    names = [item.name for item in dataclass_fields(AttentionRates)]
    return AttentionRates(**{n: f.number(n, least=0.001, most=1.0, default=getattr(usual, n)) for n in names})


def _tier(f: Fields) -> Tier:
    pair = f.number("pair_gb_per_s", least=1e-6, most=1e9, default=None)
    relay = f.number("relay_us", most=1e9, default=None)
    tier = Tier(
        name=f.text("name"),
        size=f.whole("size", least=2, most=MOST_DEVICES),
        bytes_per_s=shifted(f.number("gb_per_s", least=1e-6, most=1e9), 9),
        latency_s=shifted(f.number("latency_us", most=1e9), -6),
        across_nodes=f.flag("across_nodes", default=False),
        multicast=f.number("multicast", most=1.0, default=0.0),
        tree=f.flag("tree", default=True),
        relay_s=None if relay is None else shifted(relay, -6),
        pair_bytes_per_s=None if pair is None else shifted(pair, 9),
        kinds=_kinds(f, LINK_EFFICIENCY),
        **_collective(f, efficiency=LINK_EFFICIENCY),
    )
    f.check_unknown()
    return tier


def _kinds(f: Fields, efficiency: float) -> tuple[Achieved, ...]:
    """Collectives that achieve something else; what they leave out is as in the tier."""
    if not f.has("collectives"):
        return ()
    own, usual, made = f.section("collectives"), _collective(f, efficiency=efficiency), []
    latency_us = f.number("latency_us", most=1e9)
    for kind in KINDS:
        if own.has(kind):
            one = own.section(kind)
            achieved = Achieved(
                kind=kind,
                efficiency=one.number("efficiency", least=0.001, most=100.0, default=usual["efficiency"]),
                latency_s=shifted(one.number("latency_us", most=1e9, default=latency_us), -6),
                start_s=shifted(one.number("start_us", most=1e9, default=shifted(usual["start_s"], 6)), -6),
                ramp_s=shifted(one.number("ramp_us", most=1e9, default=shifted(usual["ramp_s"], 6)), -6),
                pair_loss=one.number("pair_loss", most=100.0, default=0.0),
                hidden=one.number("hidden", most=1.0, default=0.0),
            )
            one.check_unknown()
            made.append(achieved)
    own.check_unknown()
    return tuple(made)


def _collective(f: Fields, *, efficiency: float) -> dict[str, float]:
    """What collectives achieve over links; a file may leave it out."""
    return {
        "efficiency": f.number("efficiency", least=0.001, most=1.0, default=efficiency),
        "start_s": shifted(f.number("start_us", most=1e9, default=shifted(START_S, 6)), -6),
        "ramp_s": shifted(f.number("ramp_us", most=1e9, default=shifted(RAMP_S, 6)), -6),
        "congestion": f.number("congestion", most=1.0, default=0.0),
    }


def _network(f: Fields) -> Network:
    network = Network(
        name=f.text("name"),
        nics=f.whole("nics", most=10_000),
        nic_bytes_per_s=shifted(f.number("nic_gbit_per_s", least=1e-6, most=1e9), 9) / 8,
        latency_s=shifted(f.number("latency_us", most=1e9), -6),
        tree=f.flag("tree", default=True),
        pod_nodes=f.whole("pod_nodes", most=MOST_NODES, default=None),
        oversubscription=f.number("oversubscription", least=1.0, most=1000.0, default=1.0),
        kinds=_kinds(f, NETWORK_EFFICIENCY),
        **_collective(f, efficiency=NETWORK_EFFICIENCY),
    )
    if f.good("pod_nodes", "oversubscription") and network.oversubscription > 1 and network.pod_nodes is None:
        f.complain("pod_nodes", "missing: an oversubscribed network needs the number of nodes in a full-rate pod")
    f.check_unknown()
    return network
