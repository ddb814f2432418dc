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
from wavetrain.base.errors import InputError, Problem, RunError, one_line
from wavetrain.commands.shared import writing

if TYPE_CHECKING:
    from wavetrain.cluster import Cluster
    from wavetrain.plan import Plan
    from wavetrain.runtime.world import Place, World

LOG = logging.getLogger(__name__)
MOST_SEARCH_S = 60.0
SLACK_S = 60.0  # for a rank that waits, beyond the search
RETRY_S, TOLD_S = 0.1, 1.0  # between looks; for all ranks to have looked
FOLDER = "plans"


def gather(
    plan: Plan, local: int | None, *, restarts: int, replan: bool, kept: Path | None, one_pipeline: bool
) -> tuple[Plan, World | None]:
    """The plan for as many ranks as a run has, and their world where a launcher has started them: they meet here.

    `kept` is where plans of this run are; `one_pipeline` may be all that an emulated run has of its plan.
    """
    from wavetrain.runtime.world import meet

    place = _launched(local, needed=plan.layout.num_devices, restarts=restarts)
    size = place.size if place is not None else local or 1
    if not replan:
        least = plan.layout.pp if one_pipeline else plan.layout.num_devices
        _check_ranks(size, (least, plan.layout.num_devices), is_local=place is None)
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
            world.store.set("plan/refused", one_line(error))
            time.sleep(TOLD_S)  # the store ends with this rank, where it runs it
            raise
        world.store.set("plan/text", write_plan(made))
        return made
    return read_plan(parse_json(_told(world, ranks), file="plan of rank 0"))


def _told(world: World, ranks: int) -> str:
    """The plan that rank 0 has found; RunError with its reason where it found none."""
    until = time.monotonic() + MOST_SEARCH_S + SLACK_S
    try:
        while not world.store.check(["plan/text"]):
            if world.store.check(["plan/refused"]):
                raise RunError(world.store.get("plan/refused").decode())
            if time.monotonic() > until:
                raise RunError(f"rank 0 found no plan for {ranks} ranks in {MOST_SEARCH_S + SLACK_S:.0f} s")
            time.sleep(RETRY_S)
        return world.store.get("plan/text").decode()
    except RuntimeError as error:  # torch's DistError is one
        raise RunError(f"rank {world.rank}: rank 0 is gone: {str(error).splitlines()[0]}") from None


def replanned(plan: Plan, ranks: int) -> Plan:
    """The best plan for the same model, batch and formats on so many of the cluster's devices that can be run."""
    from wavetrain.plan import Recompute
    from wavetrain.planner.ask import search

    asked: dict[str, Any] = {"stack": plan.stack, "precision": plan.precision, "seq_len": plan.seq_len}
    asked |= {"devices": ranks, "cp": 1}
    if plan.model.architecture is None:  # a module that was not taken apart has no stages, and no blocks
        asked |= {"pp": 1, "recompute": Recompute.NONE}
    simple = {"shard_optimizer": False, "schedule": "1f1b"}
    cluster, batch = _left_of(plan, ranks), plan.layout.global_batch
    begun = time.monotonic()
    for pins in ({}, {"shard_optimizer": False}, simple):  # the first leaves most to choose
        limit = MOST_SEARCH_S / 3
        answer = search(plan.model, cluster, global_batch=batch, timeout_s=limit, **(asked | pins))
        if answer.best is not None and _can_run(answer.best):
            LOG.info("planned again for %d ranks in %.1f s", ranks, time.monotonic() - begun)
            return answer.best
        if answer.best is None:
            break
    what = f"{plan.model.name}, a batch of {batch}, on {ranks} ranks"
    why = "needs more memory than they have" if answer.least_bad else "no layout has so many: they must divide"
    raise RunError(f"no plan for {what}: {why}")


def _can_run(plan: Plan) -> bool:
    from wavetrain.runtime.recompute import check_recompute
    from wavetrain.sim.predict import to_run

    try:
        check_recompute(plan, is_split=to_run(plan)[0].is_split)
    except InputError:
        return False
    return not plan.layout.shard_optimizer


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
        with beside.open("w", encoding="utf-8") as stream:
            stream.write(write_plan(made))
            stream.flush()
            os.fsync(stream.fileno())
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


def _check_ranks(given: int, needed: tuple[int, ...], *, is_local: bool) -> None:
    """The plan is for as many ranks as there are."""
    if given not in needed:
        legal = tuple(dict.fromkeys(map(str, needed)))
        where, rule = "--local" if is_local else "WORLD_SIZE", f"{given}: the plan runs on {' or '.join(legal)} ranks"
        remedy = "--replan, for a plan for as many as there are"
        raise InputError(Problem(where=where, rule=rule, legal=legal, remedy=remedy))
