"""A cluster's constants scaled so that its prediction for a plan agrees, term by term, with a run of it.

Each term has a law whose constants may be stretched together: what it is made of then takes so many times as long.
Terms hang together (communication hides behind compute), so they are gone through again until all agree. One run says
nothing about what of a law is wrong: ratios between kernels, or between latency and rate, stay as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import format_seconds
from wavetrain.cluster.cluster import Achieved, Cluster, Device, Group, Network, Node, Rates, Tier, achieved
from wavetrain.cluster.laws import Laws
from wavetrain.plan.plan import Plan
from wavetrain.sim.predict import Prediction, simulate
from wavetrain.study.compare import Comparison, merged

SCALED = {  # a term -> the kinds of collectives that make it up
    "sharding": ("all_gather", "reduce_scatter"),
    "tensor": ("all_reduce",),
    "reduction": ("all_reduce",),
    "transfer": ("send",),
}
SENT = tuple(dict.fromkeys(kind for kinds in SCALED.values() for kind in kinds))
FITTED = ("compute", "sharding", "tensor", "reduction", "transfer", "optimizer", "host")
COMPUTE_LAWS = ("gap_s", "launch_s", "tensor_host_s", "recompute_host_s")  # of the host's share in compute
OPTIMIZER_LAWS = ("optimizer_bytes", "tensor_step_s")
ROUNDS, TRIES = 6, 12
AGREED = 1e-3  # of a term
MOST_FACTOR = 1e6
LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.001, 100.0  # that a file may state for a kind of collective
RESTATED = ("peak_tflops", "memory_gb_per_s", "gb_per_s", "collectives", "laws")  # whose sources no longer hold


@dataclass(frozen=True)
class Change:
    """A constant before and after."""

    name: str
    old: float
    new: float


@dataclass(frozen=True)
class Refit:
    """A cluster that agrees with a run, what was changed for it, and what could not be made to agree."""

    cluster: Cluster
    changes: tuple[Change, ...]
    left: tuple[str, ...]
    prediction: Prediction


@dataclass(frozen=True)
class Factors:
    """How many times as long everything takes, by term; links of each kind of collective by their tiers' names."""

    terms: Mapping[str, float] = field(default_factory=dict)
    reached: Mapping[str, frozenset[str]] = field(default_factory=dict)  # kind -> tiers that the plan sends it over
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SCALED)

    def of(self, term: str) -> float:
        return self.terms.get(term, 1.0)

    def of_kind(self, kind: str, tier: str) -> float:
        """Of one collective; two terms never stretch the same one."""
        own = (self.of(term) for term, kinds in self.kinds.items() if kind in kinds)
        return math.prod(own) if tier in self.reached.get(kind, ()) else 1.0


def refit(plan: Plan, comparison: Comparison) -> Refit:
    """Scale the constants of the plan's cluster until its terms are the measured ones."""
    if not plan.cluster.is_uniform:
        rule = "has several kinds of nodes, whose shares in a term one run does not tell"
        raise InputError(Problem(where="--refit", key="cluster", value=plan.cluster.name, rule=rule))
    wanted = {pair.name: pair.measured or 0.0 for pair in comparison.terms}
    known = merged(simulate(plan).breakdown)
    kinds = kinds_of(plan)
    fitted, left = _chosen(wanted, known, kinds)
    factors = Factors({}, _reached(plan, fitted, kinds), kinds)
    for _ in range(ROUNDS):
        for term in fitted:
            factors = _solved(plan, factors, term, wanted[term])
        now = _terms(plan, factors)
        off = [term for term in fitted if abs(now.get(term, 0.0) - wanted[term]) > AGREED * wanted[term]]
        if not off:
            break
    cluster = scaled(plan.cluster, factors)
    found, made = tuple(changes(plan.cluster, cluster)), _stated(cluster)
    ended = {term: format_seconds(now.get(term, 0.0)) for term in off}
    left += tuple(f"{term}: {here} in the end, not {format_seconds(wanted[term])}" for term, here in ended.items())
    return Refit(made, found, left, simulate(replace(plan, cluster=made)))


def kinds_of(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """The kinds of collectives that make up each term of a plan: who cuts the states scatters the sums."""
    return SCALED | {"reduction": ("reduce_scatter",)} if plan.layout.shard_optimizer else SCALED


def _chosen(
    wanted: Mapping[str, float], known: Mapping[str, float], kinds: Mapping[str, tuple[str, ...]]
) -> tuple[list[str], tuple[str, ...]]:
    """The terms that are fitted, and why others are not."""
    fitted, left = list[str](), list[str]()
    for term in dict.fromkeys([*FITTED, *wanted, *known]):
        here, there = known.get(term, 0.0), wanted.get(term, 0.0)
        if term == "bubble" or not (here or there):
            continue
        if term not in FITTED:
            left.append(f"{term}: a run does not tell it from other terms")
        elif not here:
            left.append(f"{term}: nothing of it is predicted that could be scaled")
        elif not there:
            left.append(f"{term}: nothing of it was measured")
        else:
            fitted.append(term)
    owners: dict[str, str] = {}  # where two terms have the same kind of collective, the longer one decides
    for term in sorted(fitted, key=lambda term: -wanted[term]):
        taken = [kind for kind in kinds.get(term, ()) if kind in owners]
        if taken:
            fitted.remove(term)
            kind, longer = taken[0].replace("_", "-"), owners[taken[0]]
            left.append(f"{term}: its {kind}s are those of {longer}, which takes longer")
        else:
            owners |= dict.fromkeys(kinds.get(term, ()), term)
    return fitted, tuple(left)


# --- solving ---


def _terms(plan: Plan, factors: Factors) -> dict[str, float]:
    return merged(simulate(replace(plan, cluster=scaled(plan.cluster, factors))).breakdown)


def _solved(plan: Plan, factors: Factors, term: str, wanted: float) -> Factors:
    """The factor at which a term is as long as wanted: secants of logarithms, which are straight where laws are."""

    def at(log_factor: float) -> Factors:
        return replace(factors, terms={**factors.terms, term: math.exp(log_factor)})

    def off(log_factor: float) -> float:
        found = _terms(plan, at(log_factor)).get(term, 0.0)
        return math.log(max(found, 1e-15) / wanted)

    most = math.log(MOST_FACTOR)
    here = math.log(factors.of(term))
    error, slope = off(here), 1.0
    for _ in range(TRIES):
        if abs(error) < AGREED / 10:
            break
        there = min(most, max(-most, here - error / slope))
        if there == here:
            break
        after = off(there)
        slope = min(20.0, max(0.05, (after - error) / (there - here)))
        here, error = there, after
    return at(here)


def _reached(plan: Plan, fitted: list[str], kinds: Mapping[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    """The tiers that each kind of collective goes over in a plan: those that change its step when stretched."""
    node = plan.cluster.node
    names = [tier.name for tier in node.tiers] + ([node.network.name] if node.network else [])
    usual_s, found = simulate(plan).step_s, {}
    pairs = [(kind, term) for term in fitted for kind in kinds.get(term, ())]
    for kind, term in pairs:
        slower = (scaled(plan.cluster, Factors({term: 2.0}, {kind: frozenset((name,))}, kinds)) for name in names)
        wires = (replace(cluster, own_laws=plan.cluster.laws) for cluster in slower)  # not what hosts take
        steps = [simulate(replace(plan, cluster=cluster)).step_s for cluster in wires]
        found[kind] = frozenset(name for name, step_s in zip(names, steps, strict=True) if step_s != usual_s)
    return found


# --- clusters ---


def scaled(cluster: Cluster, factors: Factors) -> Cluster:
    """A uniform cluster on which everything takes so many times as long."""
    node, laws = cluster.node, cluster.laws
    own = replace(
        node,
        device=_slower(node.device, factors.of("compute")),
        tiers=tuple(_tier(tier, factors) for tier in node.tiers),
        network=None if node.network is None else _network(node.network, factors),
    )
    slower = {name: getattr(laws, name) * factors.of("compute") for name in COMPUTE_LAWS}
    slower["message_s"] = laws.message_s * factors.of("transfer")
    slower |= {name: getattr(laws, name) * factors.of("optimizer") for name in OPTIMIZER_LAWS}
    slower["step_s"] = laws.step_s * factors.of("host")
    groups = tuple(Group(own, group.count) for group in cluster.groups)
    return replace(cluster, groups=groups, own_laws=replace(laws, **slower))


def _slower(device: Device, factor: float) -> Device:
    """Products and streams that take so many times as long; efficiencies are shares of the new rates."""
    peak = Rates(**{dtype: rate / factor for dtype, rate in device.peak.known().items()})
    return replace(device, peak=peak, memory_bytes_per_s=device.memory_bytes_per_s / factor)


def _tier(tier: Tier, factors: Factors) -> Tier:
    kinds, rate = _kinds(tier, factors)
    pair = None if tier.pair_bytes_per_s is None else tier.pair_bytes_per_s * rate
    return replace(tier, bytes_per_s=tier.bytes_per_s * rate, pair_bytes_per_s=pair, kinds=kinds)


def _network(network: Network, factors: Factors) -> Network:
    kinds, rate = _kinds(network, factors)
    return replace(network, nic_bytes_per_s=network.nic_bytes_per_s * rate, kinds=kinds)


def _kinds(links: Tier | Network, factors: Factors) -> tuple[tuple[Achieved, ...], float]:
    """What each kind of collective achieves when it takes its own times as long; and a factor of the links' rate.

    A file may not state efficiencies that are far off: such links get another rate, whose shares they are.
    """
    stretched = {kind: factors.of_kind(kind, links.name) for kind in SENT}
    own = {kind: _stretched(achieved(links, kind), by) for kind, by in stretched.items() if by != 1.0}
    found = {one.kind: one for one in links.kinds} | own
    every = [one.efficiency for one in own.values()]
    if not every or (min(every) >= LEAST_EFFICIENCY and max(every) <= MOST_EFFICIENCY):
        return tuple(found.values()), 1.0
    rate = max(every) / links.efficiency
    found = {kind: achieved(links, kind) for kind in SENT} | found
    shares = {kind: min(MOST_EFFICIENCY, max(LEAST_EFFICIENCY, one.efficiency / rate)) for kind, one in found.items()}
    return tuple(replace(one, efficiency=shares[kind]) for kind, one in found.items()), rate


def _stretched(one: Achieved, by: float) -> Achieved:
    """Its law is linear in these and in one over the efficiency, so it takes exactly so many times as long."""
    times = {name: getattr(one, name) * by for name in ("latency_s", "start_s", "ramp_s")}
    return replace(one, efficiency=one.efficiency / by, **times)


def _stated(cluster: Cluster) -> Cluster:
    """Under a name of its own, with the sources that still hold."""
    kept = tuple(source for source in cluster.sources if not any(word in source.key for word in RESTATED))
    return replace(cluster, name=f"{cluster.name}, refitted", sources=kept)


# --- what changed ---


def changes(old: Cluster, new: Cluster) -> Iterator[Change]:
    """Every constant that differs, under its name in a cluster file."""
    yield from _device_changes(old.node.device, new.node.device)
    yield from _link_changes(old.node, new.node)
    for item in fields(Laws):
        before, after = getattr(old.laws, item.name), getattr(new.laws, item.name)
        if before != after:
            yield Change(f"laws.{item.name}", before, after)


def _device_changes(old: Device, new: Device) -> Iterator[Change]:
    for dtype, rate in old.peak.known().items():
        after = new.peak.known()[dtype]
        if rate != after:
            yield Change(f"device.peak_tflops.{dtype}", rate / 1e12, after / 1e12)
    if old.memory_bytes_per_s != new.memory_bytes_per_s:
        yield Change("device.memory_gb_per_s", old.memory_bytes_per_s / 1e9, new.memory_bytes_per_s / 1e9)


def _link_changes(old: Node, new: Node) -> Iterator[Change]:
    pairs: list[tuple[Tier | Network, Tier | Network]] = list(zip(old.tiers, new.tiers, strict=True))
    if old.network and new.network:
        pairs.append((old.network, new.network))
    for before, after in pairs:
        rates = [(tier.bytes_per_s if isinstance(tier, Tier) else tier.nic_bytes_per_s) for tier in (before, after)]
        if rates[0] != rates[1]:
            name = "gb_per_s" if isinstance(before, Tier) else "nic_gbit_per_s"
            unit = 1e9 if isinstance(before, Tier) else 1e9 / 8
            yield Change(f"{before.name}.{name}", rates[0] / unit, rates[1] / unit)
        for kind in SENT:
            was, now = achieved(before, kind), achieved(after, kind)
            for key, unit in (("efficiency", 1.0), ("latency_s", 1e-6), ("start_s", 1e-6), ("ramp_s", 1e-6)):
                a, b = getattr(was, key), getattr(now, key)
                if a != b:
                    shown = key if unit == 1.0 else key.replace("_s", "_us")
                    yield Change(f"{before.name}.collectives.{kind}.{shown}", a / unit, b / unit)
