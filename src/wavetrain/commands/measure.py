"""`wavetrain measure`: microbenchmarks of the devices that are here and of the network between ranks, as a cluster."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavetrain.base.errors import InputError, Problem
from wavetrain.commands.shared import AsJson, show, writing

if TYPE_CHECKING:
    from wavetrain.cluster import Cluster
    from wavetrain.runtime.samples import Sample
    from wavetrain.runtime.turns import Part
    from wavetrain.runtime.world import Place, World

MOST_LOCAL = 512
USUAL_FILE = Path("cluster.yaml")
TELL_S = 2.0  # between words about progress
PATIENCE_S = 300.0
TURN_S = 3600.0  # of hundreds of ranks on a few cores; what ranks wait for in it has limits of its own
TURNS = 4  # of all parts, on a processor: its neighbours come and go within seconds
EXCHANGES = 2  # in a turn
PASSES, QUICK_PASSES = 4, 3  # over all operators
BUSY_SHARE = 0.25  # of the cores, in use by other programs: worth a word


def measure(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Cluster file to write; cluster.yaml.")] = None,
    local: Annotated[
        int | None, typer.Option(help="Start this many ranks here; one per CUDA device, else per core, at most 8.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="In seconds: fewer sizes and passes.")] = False,
    network_only: Annotated[
        bool, typer.Option("--network-only", help="The network alone; devices are as in the catalog.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the devices and the network that are here, and write them as a cluster file."""
    from wavetrain.show.measure import card

    shown = write_measured(output, local=local, quick=quick, network_only=network_only)
    if shown is not None:
        show(shown, card(shown), as_json)


def write_measured(
    output: Path | None,
    *,
    local: int | None = None,
    quick: bool = False,
    network_only: bool = False,
    device: str | None = None,
) -> dict[str, Any] | None:
    """Measure and write; what is to be shown of it, on the rank that shows it. `device`: cpu or cuda; the best here."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # these two as in `train`
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if local is not None and not 1 <= local <= MOST_LOCAL:
        raise InputError(Problem(where="--local", rule=f"{local}: must be from 1 to {MOST_LOCAL}"))
    place = _place(local)
    path = output or USUAL_FILE
    if place is None or place.rank == 0:
        _refuse_unwritable(path, named=output is not None)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    begun = time.monotonic()
    notes = _notes() if place is None or place.rank == 0 else []
    found = _measured(place, local, device, quick=quick, network_only=network_only)
    if found is None:  # another rank shows it
        return None
    from wavetrain.cluster import write_cluster
    from wavetrain.show.measure import document
    from wavetrain.study.assemble import raw_of

    cluster, residuals = cluster_of(found, network_only=network_only)
    seconds = round(time.monotonic() - begun, 1)
    about = {"seconds": seconds, "quick": quick, "device": found.title, "torch": found.torch, "notes": notes}
    with writing(path):
        write_cluster(cluster, path, raw=raw_of(found.samples, residuals, about))
    return document(cluster, residuals, about, str(path), computed=not network_only)


@dataclass(frozen=True)
class Found:
    """What ranks have measured, and what they are."""

    samples: tuple[Sample, ...]
    hosts: int
    each: int  # ranks on a host
    device: str
    title: str
    memory_bytes: int
    torch: str


def _place(local: int | None) -> Place | None:
    """Which rank of a launcher's this process is; None where it starts ranks itself."""
    from wavetrain.runtime.world import place_from_environment

    return None if local is not None else place_from_environment(os.environ)


def _refuse_unwritable(path: Path, *, named: bool) -> None:
    """Before a minute is spent on it."""
    if path.exists() and not named:
        rule, remedy = "exists already", f"--output {path} to write over it, or another name"
        raise InputError(Problem(where=str(path), rule=rule, remedy=remedy))
    is_new = not path.exists()
    with writing(path), path.open("ab"):
        pass
    if is_new:
        path.unlink()


def _notes() -> list[str]:
    """What makes a measurement doubtful."""
    from wavetrain.runtime.machine import busy_cores

    busy, cores = busy_cores(), os.cpu_count() or 1
    if busy <= BUSY_SHARE * cores:
        return []
    note = f"other programs use {busy:.1f} of {cores} cores: times are longer than alone, and won't repeat"
    print(f"note: {note}", file=sys.stderr)
    return [note]


# --- on the ranks ---


def _measured(
    place: Place | None, local: int | None, device: str | None, *, quick: bool, network_only: bool
) -> Found | None:
    """What all ranks have found, in the process that is to show it."""
    from wavetrain.runtime.launch import run_local, run_rank
    from wavetrain.runtime.machine import device_here, ranks_here
    from wavetrain.runtime.report import Limits
    from wavetrain.runtime.world import meet

    used, made = device or device_here(), dict[str, Any]()
    limits = Limits(floor_s=TURN_S, start_s=PATIENCE_S)

    def work(world: World) -> None:
        found = on_rank(world, used, quick=quick, network_only=network_only)
        if world.rank == 0:
            made.update(found)
            world.give(json.dumps(found).encode())

    if place is not None:
        code = run_rank(work, meet(place), limits=limits)
    else:
        outcome = run_local(work, local or ranks_here(used), limits=limits)
        code = outcome.exit_code
        made.update(json.loads(outcome.results[0] or b"{}"))
    if code:
        raise SystemExit(code)
    return found_of(made) if made else None


def found_of(made: dict[str, Any]) -> Found:
    """What rank 0 gave."""
    from wavetrain.runtime.samples import Sample

    return Found(tuple(map(Sample.of, made.pop("samples"))), **made)


def on_rank(world: World, device: str, *, quick: bool, network_only: bool) -> dict[str, Any]:
    """All ranks measure together; what rank 0 returns is of all of them."""
    from wavetrain.runtime.machine import machine
    from wavetrain.runtime.measure_network import hosts_of
    from wavetrain.runtime.turns import in_turns

    told, hosts = _Teller(world.rank), hosts_of(world)
    turns = 1 if quick or network_only or device == "cuda" else TURNS
    parts = parts_of(world.size, device, turns, quick=quick, network_only=network_only)
    samples = in_turns(world, parts, turns, told, forks=device == "cpu")
    told.finish()
    here = asdict(machine(device, ranks=hosts.each))
    return {"samples": [sample.row for sample in samples], "hosts": hosts.count, "each": hosts.each} | here


def parts_of(ranks: int, device: str, turns: int, *, quick: bool, network_only: bool) -> list[Part]:
    """What is measured, in its order within a turn; steps are the runtime's own, which is for processors.

    What ranks exchange varies most: of several turns each has it twice. A hypervisor may move two cores next to each
    other, where it is quicker for a while: the median counts.
    """
    from wavetrain.runtime.measure_compute import compute_samples
    from wavetrain.runtime.measure_network import FULL, MOST_S, QUICK, network_samples
    from wavetrain.runtime.measure_steps import step_samples
    from wavetrain.runtime.samples import joint_cases, lone_cases
    from wavetrain.runtime.turns import Part

    again = EXCHANGES if turns > 1 else 1
    effort = (QUICK if quick else FULL).part(turns * again)
    network = Part("network", partial(network_samples, device=device, effort=effort), MOST_S, median)
    if network_only:
        return [network]
    passes = -(-(QUICK_PASSES if quick else PASSES) // turns)
    compute = Part("operators", partial(compute_samples, device=device, quick=quick, passes=passes))
    if device != "cpu":
        return [compute, network]
    lone = Part("steps of each rank", partial(step_samples, cases=lone_cases(quick=quick)))
    joint = Part("steps of all ranks", partial(step_samples, cases=joint_cases(ranks)), counts=median)
    exchanged = [network, joint] if ranks > 1 else []
    return [compute, *exchanged, lone, *exchanged * (again - 1)]


class _Teller:
    """Rank 0's words on stderr about what is being measured: plain lines, on a terminal one that changes."""

    def __init__(self, rank: int) -> None:
        self._speaks, self._drawn = rank == 0, sys.stderr.isatty()
        self._begun = self._said = time.monotonic()

    def __call__(self, what: str, share: float) -> None:
        now = time.monotonic()
        if self._speaks and now > self._said + (0.2 if self._drawn else TELL_S):
            self._said = now
            line = f"progress: {what}, {share:.0%}; {now - self._begun:.0f} s"
            print(
                f"\r\x1b[K{line}" if self._drawn else line, end="" if self._drawn else "\n", file=sys.stderr, flush=True
            )

    def finish(self) -> None:
        if self._speaks and self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# --- what it comes to ---


def cluster_of(found: Found, *, network_only: bool) -> tuple[Cluster, dict[str, Any]]:
    """The cluster, and how far its laws are from samples."""
    from wavetrain.study.assemble import assemble, like
    from wavetrain.study.calibrate import calibrate_compute
    from wavetrain.study.calibrate_network import KINDS, calibrate_network
    from wavetrain.study.calibrate_steps import in_whole_steps

    base = like(found.device, found.title)
    device, laws, computed = replace(base, memory_bytes=found.memory_bytes), None, dict[str, float]()
    if not network_only:
        own = [sample for sample in found.samples if sample.what not in KINDS]
        fitted = calibrate_compute(
            own, name=f"measured-{found.device}", title=found.title, memory_bytes=found.memory_bytes, like=base
        )
        device, laws, computed = fitted.device, fitted.laws, fitted.residuals
    between = [sample for sample in found.samples if sample.what in KINDS]
    joined = calibrate_network(between, devices=found.each, hosts=found.hosts, tree=found.device == "cuda")
    name = "measured" if found.hosts == 1 else f"measured:{found.hosts}"
    cluster = assemble(name, device, joined, laws, devices=found.each, hosts=found.hosts, base=base)
    cluster = in_whole_steps(cluster, found.samples)
    residuals = {what: float(f"{error:.3g}") for what, error in computed.items()}
    # Whole steps have changed some of these constants: in company, collectives and messages take what they take there.
    alone = {key: asdict(one) for key, one in joined.residuals.items()}
    return cluster, {"compute": residuals, "network alone": alone}
