"""The network's constants from samples: with them the law of collectives (`cost.collective`) says what was timed.

Given how long filling a pipeline takes (`ramp_s`), the law is linear, piece by piece, in a start, a step and the time
of a byte. So each fit is a few least squares of logarithms, each on the pieces that the one before has found. Only
constants that pay are kept: one that explains little, or can't be told from another, would change with every
measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from wavetrain.base.units import shifted
from wavetrain.cluster.cluster import Achieved, Network, Tier
from wavetrain.cluster.read import KINDS as WRITTEN
from wavetrain.cost.collective import Collective, Span, seconds
from wavetrain.runtime.samples import Sample

Floats = NDArray[np.float64]
KINDS = (Collective.SEND, Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
ROUNDS = 30
DIGITS = 4
LONGEST_RAMP = 0.2  # of the longest sample: beyond, it can't be told from a lower rate
OUTLIER = 0.15  # a relative error from which on it counts less than its square
PAYS = 0.85  # a further constant must shrink the error to this share
LEAST_EFFICIENCY, MOST_EFFICIENCY, MOST_PAIR_LOSS = 0.001, 100.0, 100.0  # what a cluster file takes
MATTERS = 0.01  # of a sample's time: a constant that adds less to all of them is none
START_COUNTS = 0.5  # of a further constant: where a start and a latency explain as much, it is the latency
PAIR_COUNTS = 2.0  # of further constants: a loss in pairs is the rarest of all
NEARLY_NONE = 1e-3  # of a sample's time
ALIKE = 30.0  # condition number from which on constants can't be told apart
EACH, LATENCY, BYTE, PAIR_BYTE = 4, 1, 2, 3  # constants of a tier that the fit solves for, the start first
HIDDEN = 0.5  # of steps and transfers, over gloo: none of it or all would explain samples worse, and noise would choose
RAMPS_S = (0.0, *(float(ramp) for ramp in np.geomspace(10e-6, 20e-3, 12)))


@dataclass(frozen=True)
class Residual:
    """How far the fitted law is from samples, as shares of these."""

    median: float
    worst: float


@dataclass(frozen=True)
class Joined:
    """How the devices of a host, and hosts, are joined; residuals by tier and kind ("host all_gather")."""

    tiers: tuple[Tier, ...]
    network: Network | None
    residuals: dict[str, Residual]


@dataclass(frozen=True)
class Constants:
    """Of one kind over one tier; `byte_s` are seconds per byte at full rate of one device, `pair_s` more in a pair."""

    start_s: float
    latency_s: float
    byte_s: float
    pair_s: float
    ramp_s: float
    hidden: float = 0.0

    @property
    def pair_loss(self) -> float:
        return self.pair_s / self.byte_s


def calibrate_network(samples: Sequence[Sample], *, devices: int, hosts: int, tree: bool) -> Joined:
    """Fit samples of `hosts` hosts with `devices` ranks each; `tree`: whether all-reduces may run as trees (NCCL)."""
    blank = [Tier("host", devices, 1.0, 0.0, tree=tree)] if devices > 1 else []
    if hosts > 1:
        blank.append(Tier("network", devices * hosts, 1.0, 0.0, sharers=float(devices), tree=tree))
    laws = [_Law.of(kind, [s for s in samples if s.what == kind], tuple(blank), devices) for kind in KINDS]
    laws = [law for law in laws if len(law.measured_s)]
    hidden = 0.0 if tree else HIDDEN  # NCCL's steps are in line
    found = {law.kind: fit(law, 0.0 if law.kind is Collective.SEND else hidden) for law in laws}
    tiers = tuple(
        _with(tier, {kind: constants[i] for kind, constants in found.items()}) for i, tier in enumerate(blank)
    )
    residuals = {f"{tier.name} {law.kind}": one for law in laws for tier, one in law.residuals(tiers)}
    return Joined(tiers[: int(devices > 1)], _network(tiers[-1]) if hosts > 1 else None, residuals)


def _network(tier: Tier) -> Network:
    """The NIC that a host's devices share."""
    return Network(
        name=tier.name,
        nics=1,
        nic_bytes_per_s=tier.bytes_per_s,
        latency_s=tier.latency_s,
        tree=tier.tree,
        efficiency=tier.efficiency,
        start_s=tier.start_s,
        ramp_s=tier.ramp_s,
        kinds=tier.kinds,
    )


def span_of(sample: Sample, devices: int) -> Span:
    """A sample's group on tiers: neighbours, or one rank per host."""
    across = sample.hosts > 1 and sample.ranks == sample.hosts
    return Span(sample.ranks, devices if across else 1)


def _with(blank: Tier, found: dict[Collective, Constants]) -> Tier:
    """The tier with its rate from messages, and for each kind what it achieves of that."""
    best = next(iter(found.values()))
    rate = _rounded(blank.sharers / best.byte_s)
    rows = {kind.value: _achieved(kind, constants, rate / blank.sharers) for kind, constants in found.items()}
    kinds = tuple(rows[kind] for kind in WRITTEN if kind in rows)
    return replace(_timed(blank, *_times(next(iter(rows.values())))), bytes_per_s=rate, kinds=kinds)


def _achieved(kind: Collective, found: Constants, rate: float) -> Achieved:
    latency_s, start_s, ramp_s = (shifted(_rounded(time * 1e6), -6) for time in _times(found))
    efficiency = 1.0 if kind is KINDS[0] else _within(_rounded(1 / found.byte_s / rate))
    pair_loss = min(MOST_PAIR_LOSS, _rounded(found.pair_loss))
    return Achieved(kind.value, efficiency, latency_s, start_s, ramp_s, pair_loss, found.hidden)


def _within(efficiency: float) -> float:
    return min(MOST_EFFICIENCY, max(LEAST_EFFICIENCY, efficiency))


def _times(found: Constants | Achieved) -> tuple[float, float, float]:
    return found.latency_s, found.start_s, found.ramp_s


def _timed(tier: Tier, latency_s: float, start_s: float, ramp_s: float) -> Tier:
    return replace(tier, efficiency=1.0, latency_s=latency_s, start_s=start_s, ramp_s=ramp_s)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True)
class _Law:
    """The law for a kind's samples, as a function of the constants of all tiers."""

    kind: Collective
    num_bytes: Floats
    span: Span
    hosts: Floats
    measured_s: Floats
    tiers: tuple[Tier, ...]

    @staticmethod
    def of(kind: Collective, samples: Sequence[Sample], tiers: tuple[Tier, ...], devices: int) -> _Law:
        spans = [span_of(sample, devices) for sample in samples]
        span = Span(np.array([span.ranks for span in spans]), np.array([span.stride for span in spans]))
        sizes, hosts = (
            np.array(row, dtype=np.float64) for row in ([s.sizes[0] for s in samples], [s.hosts for s in samples])
        )
        return _Law(kind, sizes, span, hosts, np.array([sample.seconds for sample in samples]), tiers)

    def only(self, rows: NDArray[np.bool_], tiers: tuple[Tier, ...]) -> _Law:
        span = Span(np.asarray(self.span.ranks)[rows], np.asarray(self.span.stride)[rows])
        return _Law(self.kind, self.num_bytes[rows], span, self.hosts[rows], self.measured_s[rows], tiers)

    def __call__(self, constants: Sequence[Constants]) -> Floats:
        """Seconds of all samples."""
        pairs = zip(self.tiers, constants, strict=True)
        return self.over(
            [
                replace(
                    _timed(tier, *_times(own)),
                    bytes_per_s=tier.sharers / own.byte_s,
                    pair_loss=own.pair_loss,
                    hidden=own.hidden,
                )
                for tier, own in pairs
            ]
        )

    def over(self, tiers: Sequence[Tier]) -> Floats:
        return np.asarray(seconds(self.kind, self.num_bytes, self.span, tiers))

    def residuals(self, tiers: Sequence[Tier]) -> Iterable[tuple[Tier, Residual]]:
        """By the outermost tier that samples reach."""
        errors = np.abs(self.over(tiers) / self.measured_s - 1)
        for tier in tiers:
            own = errors[(self.hosts > 1) == (tier.name == "network")]
            if len(own):
                yield tier, Residual(_rounded(float(np.median(own))), _rounded(float(own.max())))


# --- the fit ---


@dataclass(frozen=True)
class _Candidate:
    constants: tuple[Constants, ...]
    error: float  # root of the mean square of relative errors, large ones less
    num_free: float


@dataclass(frozen=True)
class _Choice:
    """Which constants there are: a column for each that is free; rows for start, latency, byte, pair of tiers."""

    columns: Floats
    ramps: tuple[float, ...]
    hidden: float = 0.0

    @property
    def num_free(self) -> float:
        has_start = bool(self.columns[::EACH].any())
        has_pair = bool(self.columns[PAIR_BYTE::EACH].any())
        further = START_COUNTS * has_start + PAIR_COUNTS * has_pair
        return int(self.columns.shape[1]) + sum(ramp > 0 for ramp in self.ramps) + further


def _choices(ramps: tuple[float, ...], pairs: tuple[bool, ...], hidden: float) -> Iterator[_Choice]:
    """Every tier has a rate, some a loss in pairs; it may have a latency, and a start, which may be that of all."""
    num_tiers = len(ramps)
    units = np.eye(EACH * num_tiers)
    own = [units[:, [i]] for i in range(0, EACH * num_tiers, EACH)]
    starts = [np.hstack(some) for size in range(1, num_tiers + 1) for some in combinations(own, size)]
    starts += [np.zeros((EACH * num_tiers, 0))] + [np.sum(own, axis=0)] * (num_tiers > 1)
    for start, latencies in product(starts, product((True, False), repeat=num_tiers)):
        has = [{LATENCY: latency, BYTE: True, PAIR_BYTE: pair} for latency, pair in zip(latencies, pairs, strict=True)]
        rest = [EACH * i + k for i, of_tier in enumerate(has) for k, there in of_tier.items() if there]
        yield _Choice(np.hstack([start, units[:, rest]]), ramps, hidden)


def fit(law: _Law, hidden: float) -> tuple[Constants, ...]:
    """The constants of all tiers that explain samples well with as few as pay, given what steps and transfers hide.

    Several tiers have the ramps that each has alone, and a loss in pairs where each has one alone. A ramp is one that
    samples ask for with nothing hidden: it bends the law at the same place.
    """
    if len(law.tiers) == 1:
        (plain,) = _best(law, [one for ramp in RAMPS_S for one in _choices((ramp,), (False,), 0.0)])
        ramp = (plain.ramp_s,)
        return _best(law, [one for pair in (False, True) for one in _choices(ramp, (pair,), hidden)])
    across = (law.hosts > 1) & (np.asarray(law.span.ranks) == law.hosts)
    alone = (law.only(law.hosts == 1, law.tiers[:1]), law.only(across, law.tiers[1:]))
    found = [fit(one, hidden)[0] for one in alone]
    return _best(law, _choices(tuple(one.ramp_s for one in found), tuple(one.pair_s > 0 for one in found), hidden))


def _best(law: _Law, choices: Iterable[_Choice]) -> tuple[Constants, ...]:
    made = [_solved(law, choice) for choice in choices]
    candidates = [one for one in made if one is not None]
    if not candidates:  # a single sample, or times that don't grow with sizes: a rate alone
        byte_s = float(np.min(law.measured_s / law.num_bytes))
        return tuple(Constants(0.0, 0.0, byte_s, 0.0, 0.0) for _ in law.tiers)
    return min(candidates, key=lambda one: (one.error + 1e-6) * PAYS**-one.num_free).constants


def _solved(law: _Law, choice: _Choice) -> _Candidate | None:
    """Least squares with the free constants only; None where one is negative, matters little or is not determined."""
    if len(law.measured_s) < int(choice.num_free) or max(choice.ramps) > LONGEST_RAMP * law.measured_s.max():
        return None
    least = float(law.measured_s.min())
    byte_s = float(np.min(law.measured_s / law.num_bytes))
    units = [least, least, byte_s, byte_s] * len(law.tiers)
    scale = np.array([units[int(column.argmax())] for column in choice.columns.T])
    at = scale
    for _ in range(ROUNDS):
        before, base, slopes = at, law(_constants(at, choice)), _slopes(law, at, scale, choice)
        short = np.log(law.measured_s / base)  # of what was measured; as a logarithm, both ways alike
        weights = _weights(short) / base
        scaled = slopes * weights[:, None]
        if np.linalg.cond(scaled / np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)) > ALIKE:
            return None
        target = base * short + slopes @ at
        solution = np.linalg.lstsq(scaled, target * weights, rcond=None)[0]
        at = np.maximum(solution, NEARLY_NONE * scale)  # on other pieces it may be positive
        if np.allclose(at, before, rtol=1e-6, atol=0.0):  # seconds of a byte are near 0
            break
    if np.any(solution <= 0) or np.any((slopes * at / law.measured_s[:, None]).max(axis=0) < MATTERS):
        return None
    errors = np.log(law(_constants(at, choice)) / law.measured_s)
    loss = float(np.sqrt(np.mean((_weights(errors) * errors) ** 2)))
    return _Candidate(_constants(at, choice), loss, choice.num_free)


def _constants(at: Floats, choice: _Choice) -> tuple[Constants, ...]:
    rows: list[list[float]] = (choice.columns @ at).reshape(-1, EACH).tolist()
    return tuple(
        Constants(*row, ramp, choice.hidden)  # type: ignore[call-arg]
        for row, ramp in zip(rows, choice.ramps, strict=True)
    )


def _slopes(law: _Law, at: Floats, scale: Floats, choice: _Choice) -> Floats:
    base, columns = law(_constants(at, choice)), []
    for number, one in enumerate(scale):
        step = np.zeros(len(at))
        step[number] = 1e-5 * one
        columns.append((law(_constants(at + step, choice)) - base) / step[number])
    return np.stack(columns, axis=1)


def _weights(errors: Floats) -> Floats:
    """1, less for outliers (Huber's)."""
    return np.sqrt(OUTLIER / np.maximum(np.abs(errors), OUTLIER))
