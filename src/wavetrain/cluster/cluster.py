"""`Cluster`: devices and the tiers of network between them, in SI units."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from wavetrain.base.units import DType
from wavetrain.cluster.laws import Laws, load_laws

MOST_NODES = 10_000_000

# What collectives achieve where a file says nothing; the catalog gives each with its source.
LINK_EFFICIENCY = 0.8  # NVLink, 235 / 300 (A100) to 367 / 450 GB/s (H100)
NETWORK_EFFICIENCY = 0.95  # 24 / 25, 48 / 50, 192 / 200 and 380 / 400 GB/s (NVIDIA, GTC 2024, S62129)
START_S = 37e-6  # these two: validation/fit_collectives.py
RAMP_S = 55e-6


@dataclass(frozen=True)
class Rates:
    """Peak dense FLOP/s per number format; None where the device has no such unit."""

    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    int8: float | None = None

    def of(self, dtype: DType) -> float | None:
        rate = getattr(self, dtype.value)
        return None if rate is None else float(rate)

    def known(self) -> dict[str, float]:
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}


@dataclass(frozen=True)
class AttentionRates:
    """Forward rate of fused attention kernels over peak, counting only the scores that a causal kernel computes."""

    flash1: float = 0.3
    flash2: float = 0.5
    triton: float = 0.4
    cudnn: float = 0.5


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    title: str
    peak: Rates
    memory_bytes: int
    memory_bytes_per_s: float
    matmul_efficiency: float  # best matrix product over peak
    memory_efficiency: float  # best streaming over nominal bandwidth
    idle_w: float
    busy_w: float  # mean while training
    limit_w: float
    usd_per_hour: float
    fp8_efficiency: float | None = None  # best FP8 matrix product over its peak; None: as `matmul_efficiency`
    inner_half: float = 60.0  # inner size of a product at which half of its best rate is reached
    vector_inner_half: float = 0.0  # the same in formats without matrix units: fp32 and fp64
    tile: int = 64  # to which its rows and columns are rounded up
    attention: AttentionRates = AttentionRates()


@dataclass(frozen=True)
class Achieved:
    """What one kind of collective achieves over links, where that is not what the others do."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, send
    efficiency: float  # these as in `Tier`
    latency_s: float
    start_s: float
    ramp_s: float
    pair_loss: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class Tier:
    """A level of the network: groups of `size` devices, from the innermost out."""

    name: str
    size: int
    bytes_per_s: float  # one way, what a single device can drive
    latency_s: float
    sharers: float = 1.0  # devices that share this rate when all of a node send at once
    across_nodes: bool = False  # joins devices of several nodes, as NVLink does in a rack
    efficiency: float = LINK_EFFICIENCY  # what a long collective achieves of this rate
    start_s: float = START_S  # of every collective that reaches this tier
    ramp_s: float = RAMP_S  # filling the pipeline of a long transfer; a shorter one runs at half rate
    congestion: float = 0.0  # rate lost per doubling of the domains joined
    tree: bool = True  # all-reduces may run as trees over this tier
    relay_s: float | None = None  # a step inside this tier of a ring that goes on beyond it; None: as latency_s
    multicast: float = 0.0  # share of the achieved rate when the switch reduces (NVLS); 0 = it can't
    pair_bytes_per_s: float | None = None  # direct links: what a pair alone has; None = a switch
    pair_loss: float = 0.0  # further time, over that of a byte, in a group of two
    hidden: float = 0.0  # share of the shorter of steps and transfer that passes beside the longer
    kinds: tuple[Achieved, ...] = ()  # of collectives that differ

    def of(self, kind: str) -> Tier:
        """This tier as a kind of collective finds it."""
        if not self.kinds:
            return self
        own = achieved(self, kind)
        found = replace(self, efficiency=own.efficiency, latency_s=own.latency_s, kinds=())
        return replace(found, start_s=own.start_s, ramp_s=own.ramp_s, pair_loss=own.pair_loss, hidden=own.hidden)


@dataclass(frozen=True)
class Network:
    """What joins nodes: NICs shared by a node's devices; beyond `pod_nodes` an oversubscribed spine."""

    name: str
    nics: int
    nic_bytes_per_s: float
    latency_s: float
    pod_nodes: int | None = None
    oversubscription: float = 1.0
    tree: bool = True  # this and the next four as in `Tier`
    efficiency: float = NETWORK_EFFICIENCY
    start_s: float = START_S
    ramp_s: float = RAMP_S
    congestion: float = 0.0
    kinds: tuple[Achieved, ...] = ()  # as in `Tier`


def achieved(links: Tier | Network, kind: str) -> Achieved:
    """What a kind of collective achieves over links."""
    usual = Achieved(kind, links.efficiency, links.latency_s, links.start_s, links.ramp_s)
    return next((one for one in links.kinds if one.kind == kind), usual)


@dataclass(frozen=True)
class Node:
    """A machine with equal devices."""

    name: str
    title: str
    device: Device
    num_devices: int
    host_w: float  # drawn beyond the devices
    tiers: tuple[Tier, ...]
    network: Network | None = None


@dataclass(frozen=True)
class Group:
    """`count` equal nodes."""

    node: Node
    count: int


@dataclass(frozen=True)
class Source:
    """Where a number was found."""

    key: str
    source: str


@dataclass(frozen=True)
class Cluster:
    """Groups of nodes; one group unless it is heterogeneous."""

    name: str
    groups: tuple[Group, ...]
    sources: tuple[Source, ...] = ()
    own_laws: Laws | None = None  # constants of the software there; None: those that ship
    overlap: tuple[str, ...] = ("gradients",)  # what travels beside compute, where a plan does not say

    @property
    def laws(self) -> Laws:
        return self.own_laws or load_laws()

    @property
    def num_nodes(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def num_devices(self) -> int:
        return sum(group.count * group.node.num_devices for group in self.groups)

    @property
    def num_kinds(self) -> int:
        return len({group.node for group in self.groups})

    @property
    def is_uniform(self) -> bool:
        return self.num_kinds == 1

    @property
    def node(self) -> Node:
        """The node type of a uniform cluster."""
        if not self.is_uniform:
            raise ValueError(f"cluster {self.name} has {self.num_kinds} kinds of nodes")
        return self.groups[0].node

    @property
    def device(self) -> Device:
        return self.node.device

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers that the cluster really has, innermost first; the last one spans all devices."""
        if self.is_uniform:
            return _tiers(self.node, self.num_nodes)
        networks = [_network_tiers(group.node, self.num_nodes)[-1] for group in self.groups]
        return (_slowest(networks, self.num_devices),)

    def part(self, num_devices: int) -> Cluster:
        """The first devices of a uniform cluster: whole nodes, or some devices of one."""
        if num_devices == self.num_devices:
            return self
        node, base = self.node, self.name.partition(":")[0]
        count, rest = divmod(num_devices, node.num_devices)
        if not rest:
            return Cluster(base if count == 1 else f"{base}:{count}", (Group(node, count),), *self._beside)
        if count:
            raise ValueError(f"{num_devices} devices are not whole nodes of {node.num_devices}")
        some = replace(node, num_devices=num_devices, tiers=_within(node.tiers, num_devices))
        return Cluster(f"{base} ({num_devices} of {node.num_devices} devices)", (Group(some, 1),), *self._beside)

    @property
    def _beside(self) -> tuple[tuple[Source, ...], Laws | None, tuple[str, ...]]:
        return self.sources, self.own_laws, self.overlap

    @property
    def usd_per_hour(self) -> float:
        return sum(g.count * g.node.num_devices * g.node.device.usd_per_hour for g in self.groups)

    @property
    def busy_w(self) -> float:
        """Draw of all nodes while training, hosts included."""
        return sum(g.count * (g.node.num_devices * g.node.device.busy_w + g.node.host_w) for g in self.groups)


def _within(tiers: tuple[Tier, ...], num_devices: int) -> tuple[Tier, ...]:
    """The tiers between some devices of a node."""
    inner = tuple(tier for tier in tiers if tier.size < num_devices)
    spanning = next((tier for tier in tiers if tier.size >= num_devices), None)
    return (*inner, replace(spanning, size=num_devices)) if spanning and num_devices > 1 else inner


def _tiers(node: Node, num_nodes: int) -> tuple[Tier, ...]:
    """The tiers of equal nodes: those inside, those that reach over nodes, then the network."""
    num_devices = node.num_devices * num_nodes
    inner = [tier for tier in node.tiers if tier.size < num_devices]
    spanning = next((tier for tier in node.tiers if tier.size >= num_devices), None)
    if spanning:
        return (*inner, replace(spanning, size=num_devices))
    return (*inner, *_network_tiers(node, num_nodes)) if node.network else tuple(inner)


def _network_tiers(node: Node, num_nodes: int) -> tuple[Tier, ...]:
    network = node.network
    assert network is not None
    rate = network.nic_bytes_per_s * max(1.0, network.nics / node.num_devices)
    sharers = max(1.0, node.num_devices / network.nics)
    pod = min(num_nodes, network.pod_nodes or num_nodes)
    fabric = Tier(
        name=network.name,
        size=pod * node.num_devices,
        bytes_per_s=rate,
        latency_s=network.latency_s,
        sharers=sharers,
        efficiency=network.efficiency,
        start_s=network.start_s,
        ramp_s=network.ramp_s,
        congestion=network.congestion,
        tree=network.tree,
        kinds=network.kinds,
    )
    if pod == num_nodes:
        return (fabric,)
    slower = rate / network.oversubscription
    spine = replace(fabric, name=f"{network.name}-spine", size=num_nodes * node.num_devices, bytes_per_s=slower)
    return (fabric, spine)


def _slowest(tiers: list[Tier], num_devices: int) -> Tier:
    return Tier(
        name="+".join(dict.fromkeys(tier.name for tier in tiers)),
        size=num_devices,
        bytes_per_s=min(tier.bytes_per_s for tier in tiers),
        latency_s=max(tier.latency_s for tier in tiers),
        sharers=max(tier.sharers for tier in tiers),
        efficiency=min(tier.efficiency for tier in tiers),
        start_s=max(tier.start_s for tier in tiers),
        ramp_s=max(tier.ramp_s for tier in tiers),
        congestion=max(tier.congestion for tier in tiers),
        tree=all(tier.tree for tier in tiers),
    )
