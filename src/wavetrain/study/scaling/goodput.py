"""Goodput: the share of its time that a run of many devices spends on steps it need not do again.

Interruptions come at random, at a constant rate. With a mean time M between them, work that counts only once it is done
without one, and R seconds of restart after each (which may be interrupted too), X seconds of work take

    M e^(R / M) (e^(X / M) - 1)

on average (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22, 2006). Here X is the interval t between checkpoints and the time d that steps wait for
one. A checkpoint that is written beside the next steps counts once it is written, w seconds later: who is interrupted
before that goes back to the one before. So every attempt after an interruption has w seconds of work more before
something new counts, and w stands beside R:

    useful share = t / (M e^((R + w) / M) (e^((t + d) / M) - 1))

This is exact for that model. `docs/goodput.md` says what the model leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, expm1, floor, isfinite, log, sqrt

from wavetrain.study.scaling.spec import Failures

SECONDS_PER_HOUR = 3600.0
HALVINGS = 60  # of (0, 1): to the last bit of a float
SERIES_BELOW = 1e-3  # there three terms are as good as bisection
NOTHING_LEFT = 700.0  # e^-700 is the last power that a float can tell from zero


@dataclass(frozen=True)
class Costs:
    """What interruptions and checkpoints of one run take, in seconds."""

    mtbi_s: float  # mean time between interruptions, of all devices together
    checkpoint_s: float  # that steps wait for a checkpoint
    write_s: float  # from then until it counts, beside the steps; 0 where they wait for that too
    restart_s: float  # from an interruption to the first step: detection, restart, reading


@dataclass(frozen=True)
class Goodput:
    """What failures leave of a run; the four shares sum to 1."""

    mtbi_s: float  # these four as in `Costs`
    checkpoint_s: float
    write_s: float
    restart_s: float
    checkpoint_bytes: float  # of all ranks together
    interval_s: float  # of steps between two checkpoints, the best
    share: float  # of the time: steps that need not be done again
    checkpoint_share: float  # waiting for checkpoints, those done again left out
    restart_share: float  # detecting, restarting, reading
    replay_share: float  # steps and checkpoints that are lost and done again


def goodput(
    *,
    state_bytes: float,
    rank_state_bytes: float,
    devices: int,
    node_devices: int,
    failures: Failures,
    step_s: float = 0.0,
) -> Goodput:
    """What failures leave of a run with the best interval between checkpoints.

    `state_bytes` is a whole checkpoint, each value once; `rank_state_bytes` what one rank holds of it, copies included.
    With `step_s` the interval is a whole number of steps.
    """
    found = costs(
        state_bytes=state_bytes,
        rank_state_bytes=rank_state_bytes,
        devices=devices,
        node_devices=node_devices,
        failures=failures,
    )
    interval_s = best_interval(found, step_s)
    share = useful_share(interval_s, found)
    waiting = share * found.checkpoint_s / interval_s if interval_s else 0.0
    restarting = -expm1(-found.restart_s / found.mtbi_s)
    return Goodput(
        mtbi_s=found.mtbi_s,
        checkpoint_s=found.checkpoint_s,
        write_s=found.write_s,
        restart_s=found.restart_s,
        checkpoint_bytes=state_bytes,
        interval_s=interval_s,
        share=share,
        checkpoint_share=waiting,
        restart_share=restarting,
        replay_share=max(0.0, 1.0 - share - waiting - restarting),
    )


def mtbi_seconds(devices: int, device_hours: float) -> float:
    """Mean time between interruptions of a run: any device interrupts all."""
    return device_hours * SECONDS_PER_HOUR / devices


def costs(*, state_bytes: float, rank_state_bytes: float, devices: int, node_devices: int, failures: Failures) -> Costs:
    """What interruptions and checkpoints take.

    All nodes write at once, each as much of the whole; after an interruption every rank reads its own state, and the
    ranks of a node share its rate. Asynchronous checkpoints are copied to host memory first, which steps wait for.
    """
    _refuse_nonsense(state_bytes, rank_state_bytes, devices, node_devices, failures)
    nodes = max(1.0, devices / node_devices)
    write_s = state_bytes / nodes / failures.write_bytes_per_s
    read_s = rank_state_bytes * min(devices, node_devices) / failures.read_bytes_per_s
    beside = failures.asynchronous
    return Costs(
        mtbi_s=mtbi_seconds(devices, failures.device_hours),
        checkpoint_s=rank_state_bytes / failures.copy_bytes_per_s if beside else write_s,
        write_s=write_s if beside else 0.0,
        restart_s=failures.detection_s + failures.restart_s + read_s,
    )


def _refuse_nonsense(
    state_bytes: float, rank_state_bytes: float, devices: int, node_devices: int, failures: Failures
) -> None:
    rates = (failures.write_bytes_per_s, failures.read_bytes_per_s, failures.copy_bytes_per_s, failures.device_hours)
    positive = (devices, node_devices, *rates)
    other = (state_bytes, rank_state_bytes, failures.detection_s, failures.restart_s)
    if not all(isfinite(value) and value > 0 for value in positive):
        raise ValueError("devices, device hours and rates must be finite and more than 0")
    if not all(isfinite(value) and value >= 0 for value in other):
        raise ValueError("bytes and seconds must be finite and not negative")


def useful_share(interval_s: float, found: Costs) -> float:
    """Share of the time that is steps which need not be done again, with a checkpoint every `interval_s` of steps.

    Zero where it is less than a float can say.
    """
    work, attempt = interval_s / found.mtbi_s, (interval_s + found.checkpoint_s) / found.mtbi_s
    lost = (found.restart_s + found.write_s) / found.mtbi_s
    if attempt + lost > NOTHING_LEFT:
        return 0.0
    done = work * exp(-attempt) / -expm1(-attempt) if attempt else 1.0
    return min(1.0, done * exp(-lost))


def best_interval(found: Costs, step_s: float = 0.0) -> float:
    """Seconds of steps between two checkpoints for which the most of the time is useful.

    A checkpoint must be written before the next one begins. With `step_s` a whole number of steps.
    """
    best_s = max(found.write_s, found.mtbi_s * _best_over_mtbi(found.checkpoint_s / found.mtbi_s))
    if not step_s:
        return best_s
    fewest = max(1, ceil(found.write_s / step_s))
    few = max(fewest, floor(best_s / step_s))  # the share has one peak, so the best is beside it
    return max((few * step_s, (few + 1) * step_s), key=lambda interval_s: useful_share(interval_s, found))


def _best_over_mtbi(wait: float) -> float:
    """The interval x for which (e^(x + wait) - 1) / x is least; both over the mean time between interruptions.

    Its derivative is zero where (1 - x) e^(x + wait) = 1, so x = 1 + W(-e^(-1 - wait)) with Lambert's W: between 0 and
    1, about sqrt(2 wait) where waits are short (Young's rule), 1 where they are long.
    """
    p = sqrt(-2 * expm1(-wait))
    if p < SERIES_BELOW:
        return p * (1 - p / 3 + 11 / 72 * p**2)
    low, high = 0.0, 1.0  # of 1 - x, in which the derivative has one sign below its zero and another above
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle - log(middle) > 1 + wait:
            low = middle
        else:
            high = middle
    return 1 - (low + high) / 2
