"""A run on another number of ranks than its plan is for: planned again, with the same batch, for what is there.

Samples, initial values and learning rates are functions of the step and not of the layout, and checkpoints are by name;
so a run that lost hosts goes on with the plan that is best for those left, and with the first one when all are back.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavetrain.base.document import parse_json
from wavetrain.base.errors import InputError, Problem, RunError
from wavetrain.commands.shared import writing

if TYPE_CHECKING:
    from wavetrain.cluster import Cluster
    from wavetrain.plan import Plan
    from wavetrain.runtime.world import Place, World

LOG = logging.getLogger(__name__)
MOST_SEARCH_S = 60.0
SLACK_S = 60.0  # for a rank that waits, beyond the search
FOLDER = "plans"


def gather(
    plan: Plan, local: int | None, *, restarts: int, replan: bool, kept: Path | None, one_pipeline: bool
) -> tuple[Plan, World | None]:
    """The plan for as many ranks as a run has, and their world where a launcher has started them: they meet here.

    `kept` is where plans of this run are; `one_pipeline` is all that an emulated run has of its plan.
    """
    from wavetrain.runtime.world import meet

    place = _launched(local, needed=plan.layout.num_devices, restarts=restarts)
    size = place.size if place is not None else local or 1
    if not replan:
        _check_ranks(size, plan.layout.pp if one_pipeline else plan.layout.num_devices, is_local=place is None)
    world = None if place is None else meet(place)
    return plan_for(plan, size, kept=kept, world=world) if replan else plan, world


def plan_for(plan: Plan, ranks: int, *, kept: Path | None, world: World | None) -> Plan:
    """The plan itself where it is for so many ranks; else the best for them, the same on all ranks of a world.

    `kept` is a directory where it is looked for first, and left for the next time.
    """
    if ranks == plan.layout.num_devices:
        return plan
    from wavetrain.plan import read_plan, write_plan

    if world is None:
        return _found(plan, ranks, kept)
    if world.rank == 0:
        try:
            made = _found(plan, ranks, kept)
        except (InputError, RunError) as error:
            world.store.set("plan/refused", str(error))
            raise
        world.store.set("plan/text", write_plan(made))
        return made
    until = time.monotonic() + MOST_SEARCH_S + SLACK_S
    while not world.store.check(["plan/text"]):
        if world.store.check(["plan/refused"]):
            raise RunError(f"no plan for {ranks} ranks: {world.store.get('plan/refused').decode()}")
        if time.monotonic() > until:
            raise RunError(f"rank 0 found no plan for {ranks} ranks in {MOST_SEARCH_S + SLACK_S:.0f} s")
        time.sleep(0.05)
    return read_plan(parse_json(world.store.get("plan/text").decode(), file="plan of rank 0"))


def replanned(plan: Plan, ranks: int) -> Plan:
    """The best plan for the same model, batch and formats on so many of the cluster's devices that can be run."""
    from wavetrain.planner.ask import search

    asked: dict[str, Any] = {"stack": plan.stack, "precision": plan.precision, "seq_len": plan.seq_len}
    asked |= {"devices": ranks, "cp": 1}
    cluster = _left_of(plan, ranks)
    begun = time.monotonic()
    for pins in ({}, {"shard_optimizer": False}):  # the first leaves more to choose
        batch, limit = plan.layout.global_batch, MOST_SEARCH_S / 2
        answer = search(plan.model, cluster, global_batch=batch, timeout_s=limit, **(asked | pins))
        best = answer.best
        if best is not None and not best.layout.shard_optimizer:
            LOG.info("planned again for %d ranks in %.1f s", ranks, time.monotonic() - begun)
            return best
        if best is None:
            break
    raise RunError(f"no plan fits on {ranks} devices: {plan.model.name} needs more memory than they have")


def _left_of(plan: Plan, ranks: int) -> Cluster:
    cluster, own = plan.cluster, plan.cluster.node.num_devices
    if ranks > cluster.num_devices:
        rule = f"the plan's cluster has {cluster.num_devices} devices, and this run {ranks} ranks"
        raise InputError(Problem(where="--replan", rule=rule, remedy="a plan for more devices, by wavetrain plan"))
    if ranks > own and ranks % own:
        rule = f"{ranks} ranks are not whole nodes of {own} devices"
        raise InputError(Problem(where="--replan", rule=rule, remedy="hosts with as many ranks as a node has devices"))
    return cluster.part(ranks)


def _found(plan: Plan, ranks: int, kept: Path | None) -> Plan:
    """A plan that was made for this run before, or a new one."""
    from wavetrain.plan import read_plan, write_plan

    if kept is None:
        return replanned(plan, ranks)
    digest = hashlib.sha256(write_plan(plan).encode()).hexdigest()[:12]
    file = kept / FOLDER / f"{digest}-{ranks}.json"
    if file.is_file():
        return read_plan(file)
    made = replanned(plan, ranks)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(write_plan(made), encoding="utf-8")
        beside.replace(file)  # whole, or not there
    return made


def _launched(local: int | None, *, needed: int, restarts: int) -> Place | None:
    """Which rank of a launcher's this process is; None where it starts `local` ranks itself."""
    from wavetrain.runtime.world import place_from_environment

    if local is not None:
        return None
    place = place_from_environment(os.environ)
    if place is None:
        rule, remedy = "missing, and neither torchrun nor Slurm has started this process", f"--local {needed}"
        raise InputError(Problem(where="--local", rule=rule, remedy=remedy))
    if restarts:
        rule, remedy = "means nothing without --local: the launcher starts ranks again", "torchrun --max-restarts"
        raise InputError(Problem(where="--restarts", rule=rule, remedy=remedy))
    return place


def _check_ranks(given: int, needed: int, *, is_local: bool) -> None:
    """The plan is for as many ranks as there are."""
    if given != needed:
        where, rule = "--local" if is_local else "WORLD_SIZE", f"{given}: the plan runs on {needed} ranks"
        remedy = "--replan, for a plan for as many as there are"
        raise InputError(Problem(where=where, rule=rule, legal=(str(needed),), remedy=remedy))
