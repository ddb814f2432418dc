"""How long a collective takes: algorithms over the tiers of a network, in seconds; sizes and groups may be arrays.

    seconds = start + l + t - hidden * min(l, t)
    l = steps x latency,   t = x + x * ramp / (x + ramp),   x = bytes on the wire / achieved bytes per second

Every constant is a fact of a tier (`cluster.Tier`), none is here. A short transfer runs at half rate, a long one pays
the filling of the pipeline (`ramp_s`) once. NCCL's steps and transfers add up (`hidden` is 0); where software takes its
steps while other pieces travel, as gloo does between ranks that share cores, the longer hides a share of the shorter.
Ring steps and their split over tiers are those of NCCL's own model (src/graph/tuning.cc); the fit of the constants is
`validation/fit_collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.cluster import Tier

PAIR = 2.0

Floats = NDArray[np.float64]
Array = float | Floats


class Collective(StrEnum):
    """What a group does; `num_bytes` is the full tensor, but one rank's buffer in an all-to-all."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"


@dataclass(frozen=True)
class Span:
    """A group of `ranks` devices, every `stride`-th one, laid on a cluster's tiers."""

    ranks: Array
    stride: Array = 1  # 1 = neighbours (tensor parallel), tp * cp = data parallel
    together: Array = np.inf  # devices of a domain that send beyond it at once, where not all do


@dataclass(frozen=True)
class Reach:
    """A group on one tier: it has `outer` members in a domain of the tier, `inner` in a domain of the tier beneath."""

    tier: Tier
    inner: Floats
    outer: Floats
    whole: Floats  # members of the group
    together: Floats  # as in `Span`

    @property
    def parts(self) -> Floats:
        """Domains of the tier beneath that the group joins over this tier; 1 if it does not cross it."""
        return self.outer / self.inner

    @property
    def crossed(self) -> NDArray[np.bool_]:
        return self.outer > self.inner

    @property
    def port_bytes_per_s(self) -> Floats:
        """What one member achieves over this tier while all groups of the node do the same; inf if not crossed.

        Members joined by direct links use only those among themselves; `congestion` is lost per doubling of the parts,
        `pair_loss` in a group of two (gloo's rings send both ways between the same two hosts).
        """
        tier, doublings = self.tier, np.log2(self.parts)
        rate = tier.bytes_per_s / np.maximum(np.minimum(tier.sharers, self.together), 1.0)
        direct = np.inf if tier.pair_bytes_per_s is None else tier.pair_bytes_per_s * (self.parts - 1)
        lost = (1 + tier.congestion * doublings) * (1 + tier.pair_loss * (self.whole == PAIR))
        achieved = np.minimum(rate, direct) * tier.efficiency / lost
        return np.where(self.crossed, achieved, np.inf)


Algorithm = Callable[[Collective, Floats, tuple[Reach, ...]], Floats]


def reaches(span: Span, tiers: Sequence[Tier]) -> tuple[Reach, ...]:
    """The group on each tier, innermost first; the last tier holds all of it."""
    ranks, stride = (np.asarray(value, dtype=np.float64) for value in (span.ranks, span.stride))
    devices = tiers[-1].size if tiers else 1
    if np.any(ranks < 1) or np.any(stride < 1) or np.any((ranks - 1) * stride >= devices):
        raise ValueError(f"a group of {span.ranks} ranks, stride {span.stride}, does not fit on {devices} devices")
    found: list[Reach] = []
    inner = np.ones(np.broadcast_shapes(ranks.shape, stride.shape))
    for tier in tiers:
        whole = ranks + 0 * inner
        outer = whole if tier is tiers[-1] else np.clip(tier.size // stride, inner, whole)
        found.append(Reach(tier, inner, outer, whole, np.asarray(span.together, dtype=np.float64)))
        inner = outer
    return tuple(found)


# --- parts of the law ---

# Times that the tensor goes through the group: an all-reduce is a reduce-scatter and an all-gather.
_ROUNDS = {Collective.ALL_REDUCE: 2.0, Collective.ALL_GATHER: 1.0, Collective.REDUCE_SCATTER: 1.0}


def _total(items: Sequence[Floats]) -> Floats:
    return reduce(np.add, items)


def _worst(group: tuple[Reach, ...], field: str) -> Floats:
    """The largest of a tier's constants among the tiers that the group crosses."""
    return reduce(np.maximum, (np.where(r.crossed, getattr(r.tier, field), 0.0) for r in group))


def _bus_bytes_per_s(group: tuple[Reach, ...]) -> Floats:
    """Rate of a ring through the group: each member beneath a tier adds its port; the slowest tier decides."""
    return reduce(np.minimum, (r.port_bytes_per_s * r.inner for r in group))


def _ramped(transfer_s: Floats, ramp_s: Floats) -> Floats:
    """Seconds of a transfer that takes `transfer_s` at full rate: twice that when short, `ramp_s` more when long."""
    return transfer_s * (1 + ramp_s / np.maximum(transfer_s + ramp_s, np.finfo(np.float64).tiny))


def _pipelined(latency_s: Floats, transfer_s: Floats, group: tuple[Reach, ...]) -> Floats:
    ramped_s = _ramped(transfer_s, _worst(group, "ramp_s"))
    shares = [np.where(r.crossed, r.tier.hidden, 1.0) for r in group]
    hidden_s = reduce(np.minimum, shares) * np.minimum(latency_s, ramped_s)
    return np.asarray(_worst(group, "start_s") + latency_s + ramped_s - hidden_s)


def _only(allowed: bool | NDArray[np.bool_], time_s: Floats) -> Floats:
    return np.where(allowed, time_s, np.inf)


# --- algorithms: seconds, inf where one does not apply ---


def ring(kind: Collective, num_bytes: Floats, group: tuple[Reach, ...]) -> Floats:
    """Every rank passes on to its neighbour: (ranks - 1) / ranks of the tensor, latency linear in ranks.

    NCCL's ring: of the steps of a round, those between domains of a tier pay that tier's latency; inside a ring that
    goes on beyond it, the one of the slower protocol that reaches further (`relay_s`).
    """
    ranks = group[-1].outer
    steps_s = _total([(ranks / r.inner - ranks / r.outer) * _step_s(r) for r in group])
    wire_bytes = num_bytes * (ranks - 1) / ranks
    rounds = _ROUNDS.get(kind, 1.0)
    time_s = _pipelined(rounds * steps_s, rounds * wire_bytes / _bus_bytes_per_s(group), group)
    return _only(kind in _ROUNDS, time_s)


def _step_s(reach: Reach) -> Floats:
    beyond = reach.whole > reach.outer
    relay_s = reach.tier.latency_s if reach.tier.relay_s is None else reach.tier.relay_s
    return np.where(beyond, relay_s, reach.tier.latency_s)


def _levels_s(group: tuple[Reach, ...]) -> Floats:
    """One step of each tier per doubling of the parts that it joins."""
    return _total([np.log2(r.parts) * r.tier.latency_s for r in group])


def tree(kind: Collective, num_bytes: Floats, group: tuple[Reach, ...]) -> Floats:
    """NCCL's double binary tree: the whole tensor goes up and down again, latency logarithmic in ranks.

    A level is three steps each way: two children, one after the other, and the parent.
    """
    time_s = _pipelined(6 * _levels_s(group), 2 * num_bytes / _bus_bytes_per_s(group), group)
    return _only((kind is Collective.ALL_REDUCE) & _has_trees(group), time_s)


def _has_trees(group: tuple[Reach, ...]) -> NDArray[np.bool_]:
    return reduce(np.logical_and, (np.asarray(~r.crossed | r.tier.tree) for r in group))


def _in_switch_s(num_bytes: Floats, reach: Reach) -> Floats:
    """Transfer of an all-reduce in the switch: each port sends the tensor and its share of the result (NCCL: NVLS)."""
    share = reach.tier.multicast
    return num_bytes * (1 + 1 / reach.outer) / (reach.port_bytes_per_s * share) if share else np.inf + 0 * num_bytes


def nvls(kind: Collective, num_bytes: Floats, group: tuple[Reach, ...]) -> Floats:
    """All-reduce by the switches of the innermost tier, as NVLink SHARP: two steps, whatever the ranks."""
    first = group[0]
    time_s = _pipelined(2 * first.tier.latency_s + 0 * num_bytes, _in_switch_s(num_bytes, first), group)
    return _only((kind is Collective.ALL_REDUCE) & (first.outer == group[-1].outer), time_s)


def nvls_tree(kind: Collective, num_bytes: Floats, group: tuple[Reach, ...]) -> Floats:
    """NVLS within the innermost tier and a tree over the others, pipelined: the slower part sets the rate."""
    first, others = group[0], group[1:]
    if not others:
        return np.inf + 0 * num_bytes
    between_s = 2 * num_bytes / _bus_bytes_per_s(others)
    latency_s = 2 * first.tier.latency_s + 6 * _levels_s(others)
    time_s = _pipelined(latency_s, np.maximum(_in_switch_s(num_bytes, first), between_s), group)
    return _only((kind is Collective.ALL_REDUCE) & first.crossed & _has_trees(group), time_s)


def pat(kind: Collective, num_bytes: Floats, group: tuple[Reach, ...]) -> Floats:
    """NCCL's parallel aggregated trees (2.23, 2024): a ring's traffic with logarithmic latency.

    At its release it served one rank per node; that restriction is not modelled.
    """
    ranks = group[-1].outer
    time_s = _pipelined(_levels_s(group), num_bytes * (ranks - 1) / ranks / _bus_bytes_per_s(group), group)
    return _only(kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER), time_s)


def hierarchical(kind: Collective, num_bytes: Floats, group: tuple[Reach, ...]) -> Floats:
    """A ring per tier, one after the other, each outer one on the shards of the inner, as frameworks build by hand."""
    phases = []
    for r in group:
        transfer_s = num_bytes / r.inner * (1 - 1 / r.parts) / r.port_bytes_per_s
        time_s = _pipelined((r.parts - 1) * r.tier.latency_s, transfer_s, (r,))
        phases.append(np.where(r.crossed, time_s, 0.0))
    return _only(kind in _ROUNDS, _ROUNDS.get(kind, 1.0) * _total(phases))


def direct(kind: Collective, num_bytes: Floats, group: tuple[Reach, ...]) -> Floats:
    """Messages straight to their receivers: one to the farthest neighbour, or in an all-to-all one to every rank.

    In an all-to-all the ports of all tiers work at once; posting each message takes a step of the innermost tier.
    """
    ranks = group[-1].outer
    latency_s = _worst(group, "latency_s")
    if kind is Collective.SEND:
        pairs = [
            Reach(r.tier, np.ones_like(r.inner), np.where(r.crossed, 2.0, 1.0), r.whole, r.together) for r in group
        ]
        return _pipelined(latency_s, num_bytes / reduce(np.minimum, (p.port_bytes_per_s for p in pairs)), group)
    transfer_s = [num_bytes * (ranks - r.inner) / ranks / r.port_bytes_per_s for r in group]
    posted_s = (ranks - 2) * group[0].tier.latency_s
    time_s = _pipelined(latency_s + posted_s, reduce(np.maximum, transfer_s), group)
    return _only(kind is Collective.ALL_TO_ALL, time_s)


COLLECTIVES: dict[str, Algorithm] = {
    "ring": ring,
    "tree": tree,
    "nvls": nvls,
    "nvls_tree": nvls_tree,
    "pat": pat,
    "hierarchical": hierarchical,
    "direct": direct,
}

NCCL_CHOICES: dict[Collective, tuple[str, ...]] = {
    Collective.ALL_REDUCE: ("ring", "tree", "nvls", "nvls_tree"),
    Collective.ALL_GATHER: ("ring",),
    Collective.REDUCE_SCATTER: ("ring",),
    Collective.ALL_TO_ALL: ("direct",),
    Collective.SEND: ("direct",),
}


def seconds(
    kind: Collective,
    num_bytes: Array,
    span: Span,
    tiers: Sequence[Tier],
    *,
    algorithms: Sequence[str] | None = None,
) -> Array:
    """Seconds of a collective with the fastest of `algorithms` (names in COLLECTIVES; NCCL's classical ones if None).

    A group of one rank and a tensor of no bytes take 0.0.
    """
    group = reaches(span, [tier.of(kind) for tier in tiers])
    size = np.asarray(num_bytes, dtype=np.float64)
    if not group:
        return np.zeros(size.shape)[()]
    names = NCCL_CHOICES[kind] if algorithms is None else algorithms
    time_s = reduce(np.minimum, (COLLECTIVES[name](kind, size, group) for name in names))
    time_s = np.where((group[-1].outer > 1) & (size > 0), time_s, 0.0)
    if np.any(np.isinf(time_s)):
        raise ValueError(f"{kind} can't be done by {', '.join(names)} over tiers {', '.join(t.name for t in tiers)}")
    return time_s[()]


def fastest(kind: Collective, num_bytes: float, span: Span, tiers: Sequence[Tier]) -> tuple[float, str]:
    """Seconds of one collective and the name of the algorithm that NCCL would choose, the first of equals."""
    group, size = reaches(span, [tier.of(kind) for tier in tiers]), np.asarray(num_bytes, dtype=np.float64)
    names = NCCL_CHOICES[kind]
    if not group or group[-1].outer <= 1 or size <= 0:
        return 0.0, names[0]
    return min(((float(COLLECTIVES[name](kind, size, group)), name) for name in names), key=lambda found: found[0])
