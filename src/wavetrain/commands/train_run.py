"""A run from its plan to its document: the job, its ranks, what happened beside what was predicted, the files."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavetrain.base.errors import RunError
from wavetrain.commands.shared import write, writing

LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from wavetrain.plan import Plan
    from wavetrain.runtime.job import Job
    from wavetrain.runtime.launch import Outcome
    from wavetrain.runtime.trainer import RankRecord
    from wavetrain.runtime.world import World
    from wavetrain.schedule import Actions
    from wavetrain.sim.engine import StageTimes
    from wavetrain.timeline.timeline import Timeline


def job_of(plan: Plan, *, emulate: bool = False, every_rank: bool = False, **more: Any) -> Job:
    """What the ranks need to know, predictions included; `more` is what `Job` has beside them.

    Emulated is one pipeline, or `every_rank` of the plan.
    """
    from wavetrain.runtime.chunk import Durations
    from wavetrain.runtime.job import Job
    from wavetrain.runtime.recompute import check_recompute, chosen_operators
    from wavetrain.schedule import add_communication, add_recomputation
    from wavetrain.sim.emulation import emulation
    from wavetrain.sim.predict import simulate, step_flops, to_run

    actions, times = to_run(plan)
    if not emulate:
        check_recompute(plan, is_split=actions.is_split)
        if actions.is_split and any(chosen_operators(plan)):  # otherwise blocks do it themselves
            actions = add_recomputation(actions, range(actions.placement.num_stages))
    return Job(
        plan=plan,
        actions=add_communication(actions),
        emulated=tuple(Durations(t.f, t.i, t.w) for t in times) if emulate else None,
        emulation=emulation(plan) if emulate and every_rank else None,
        step_s=simulate(plan).step_s,
        step_flops=step_flops(plan)[0],
        peak_flops=known_peak(plan),
        planned_busy=_planned_busy(actions, times),
        **more,
    )


def _planned_busy(actions: Actions, times: Sequence[StageTimes]) -> tuple[float, ...]:
    """Seconds that each rank of a pipeline computes in a step; what is recomputed is in the times of backwards."""
    from wavetrain.schedule.action import Kind

    taken = {
        (stage, kind): seconds
        for stage, t in enumerate(times)
        for kind, seconds in ((Kind.F, t.f), (Kind.B, t.i + t.w), (Kind.I, t.i), (Kind.W, t.w))
    }
    return tuple(sum(taken.get((a.stage, a.kind), 0.0) for a in row) for row in actions.ranks)


def known_peak(plan: Plan) -> float | None:
    """FLOPs per second of all devices of a plan, if they are those of this machine."""
    from wavetrain.runtime.logs import accelerators

    device = plan.cluster.groups[0].node.device
    words = device.name.lower().replace("-", " ").split()
    if not any(words[0] in name.lower() for name in accelerators()):
        return None
    rate = device.peak.known().get(plan.precision.compute.value)
    return None if rate is None else rate * plan.layout.num_devices


def run(
    job: Job, world: World | None, limits: Any, output: Path | None, *, restarts: int = 0, virtual: bool = False
) -> dict[str, Any] | None:
    """The document of a run that ended well, on the rank or in the process that is to show it.

    `world` is that of a launcher's ranks, of which this is one; without it ranks are started here, on `virtual` hosts.
    """
    from wavetrain.runtime.launch import run_rank
    from wavetrain.runtime.trainer import train as train_rank

    made: dict[str, Any] = {}
    if output is not None:
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)

    def work(world: World) -> None:
        records = train_rank(job, world)
        if world.rank == 0:
            made.update(_document(job, records, output))
            world.give(json.dumps(made).encode())

    ranks = job.num_ranks
    if world is not None:
        code = run_rank(work, world, limits=limits, actions=rows_of(job), report_dir=output)
    else:
        known = {"limits": limits, "actions": rows_of(job), "report_dir": output}
        with _starting(job.plan, virtual=virtual) as start:
            for attempt in range(restarts + 1):
                outcome = start(work, ranks, attempt=attempt, **known)
                code = outcome.exit_code
                if code != RunError.exit_code or attempt == restarts:
                    break
                LOG.warning("restart %d of %d", attempt + 1, restarts)
        made.update(json.loads(outcome.results[0] or b"{}"))
        made.update({"restarts": attempt} if made else {})
    if code:
        raise SystemExit(code)
    return made or None


@contextmanager
def _starting(plan: Plan, *, virtual: bool) -> Iterator[Callable[..., Outcome]]:
    """How ranks are started here: on this machine as it is, or on hosts as the plan's cluster has them."""
    from wavetrain.runtime.launch import run_local
    from wavetrain.runtime.virtual import virtual_cluster

    if not virtual:
        yield run_local
        return
    node = plan.cluster.node
    hosts = max(1, plan.layout.num_devices // node.num_devices)
    rate = None if node.network is None else node.network.nics * node.network.nic_bytes_per_s
    with virtual_cluster(hosts, rate_bytes_per_s=rate) as cluster:
        yield cluster.run


def rows_of(job: Job) -> Actions:
    """What every rank of a run does, replicas and parts included."""
    from wavetrain.schedule import Actions

    places = (job.place_of(rank) for rank in range(job.num_ranks))
    return Actions(tuple(job.actions.ranks[stage_rank] for _, stage_rank, _ in places))


def first_pipeline(job: Job, records: Mapping[int, RankRecord]) -> dict[int, RankRecord]:
    """What the first replica's first parts have recorded, by their rank in the pipeline."""
    places = {rank: job.place_of(rank) for rank in records}
    return {stage_rank: records[rank] for rank, (replica, stage_rank, part) in places.items() if not replica + part}


def _timeline(records: Mapping[int, RankRecord]) -> Timeline:
    from wavetrain.runtime.record import timeline_of

    moments = {rank: record.moments for rank, record in records.items()}
    return timeline_of(moments, static_bytes={rank: record.static_bytes for rank, record in records.items()})


def _document(job: Job, records: Mapping[int, RankRecord], output: Path | None) -> dict[str, Any]:
    """What happened, beside what was predicted; the files of the run where they are wanted."""
    from wavetrain.base.codec import dumps
    from wavetrain.sim.predict import simulate
    from wavetrain.sim.replay import idle_share, replay
    from wavetrain.timeline.chrome import write_chrome

    if not records[0].moments:
        return {
            "schema": "wavetrain.train/1",
            "ranks": len(records),
            "steps": job.steps,
            "already_done": True,
            "losses": [],
            "files": [],
        }
    measured = _timeline(first_pipeline(job, records))
    predicted, ideal = simulate(job.plan), replay(job.actions, measured)
    seconds = step_seconds([record.step_ends_s for record in records.values()]) or measured.duration_s
    tokens = job.plan.layout.global_batch * job.plan.seq_len
    document = {
        "schema": "wavetrain.train/1",
        "ranks": len(records),
        "steps": job.steps,
        "emulated": job.emulated is not None,
        "step_s": seconds,
        "timeline_s": measured.duration_s,
        "tokens_per_s": tokens / seconds,
        "losses": records[0].losses,
        "gradient_norms": records[0].gradient_norms,
        "mfu": job.step_flops / seconds / job.peak_flops if job.peak_flops else None,
        "bubble_fraction": idle_share(measured),
        "peak_bytes": [record.peak_bytes for record in records.values()],
        "busy_s": [record.busy_s for record in records.values()],
        "stragglers": records[0].stragglers,
        **_spent(job, records, seconds),
        "memory": max((record.memory for record in records.values()), key=lambda kinds: sum(kinds.values())),
        "predicted": {
            "step_s": pipeline_seconds(job) or predicted.step_s,
            "bubble_fraction": predicted.bubble_fraction,
        },
        "replayed": {"step_s": ideal.duration_s, "bubble_fraction": idle_share(ideal)},
        "files": [],
    }
    if output is not None:
        expected = predicted.timeline if job.emulated else ideal
        document["files"] = _write_files(output, job, measured, expected)
        if len(records) > job.actions.num_ranks:
            write_chrome(_timeline(records), output / "measured.json")  # all replicas and parts
        write(output / "run.json", dumps(document))
    return document


def _spent(job: Job, records: Mapping[int, RankRecord], step_s: float) -> dict[str, Any]:
    """Where the step of every rank went, by term, and of the one that computes longest."""
    from wavetrain.sim.replay import replay
    from wavetrain.study.measured import measured_terms

    pp = job.actions.num_ranks
    places = {rank: job.place_of(rank) for rank in records}
    terms: dict[int, dict[str, float]] = {}
    for pipeline in sorted({(replica, part) for replica, _, part in places.values()}):
        ranks = {at: rank for rank, (replica, at, part) in places.items() if (replica, part) == pipeline}
        ideal = replay(job.actions, _timeline({at: records[rank] for at, rank in ranks.items()}))
        for at, rank in ranks.items():
            idle_s, record = ideal.duration_s - ideal.busy_s(at, "compute"), records[rank]
            idle = min(1.0, idle_s / record.waited_s) if record.waited_s else 0.0
            terms[rank] = measured_terms(record.spent, step_s=step_s, idle_share=idle if pp > 1 else None)
    longest = max(terms, key=lambda rank: (terms[rank].get("compute", 0.0), -rank))
    return {
        "terms": terms[longest],
        "terms_rank": longest,
        "terms_by_rank": [terms[rank] for rank in sorted(terms)],
        "stage_ranks": [places[rank][1] for rank in sorted(terms)],
    }


def _write_files(output: Path, job: Job, measured: Timeline, expected: Timeline) -> list[str]:
    """The files of a run; `expected` is what was predicted or, of a real run, follows from its own action times."""
    from wavetrain.base.codec import dumps
    from wavetrain.plan.read import write_plan
    from wavetrain.runtime.logs import write_environment
    from wavetrain.schedule import write_text
    from wavetrain.timeline.chrome import write_chrome
    from wavetrain.timeline.picture import svg

    names = ("predicted" if job.emulated else "replayed", "measured")
    write(output / "plan.json", write_plan(job.plan))
    write(output / "inputs.json", dumps(_inputs(job)))
    write(output / "actions.txt", write_text(job.actions))
    for name, timeline in zip(names, (expected, measured), strict=True):
        write_chrome(timeline, output / f"{name}.json")
    title = f"{job.plan.model.name}, {job.plan.layout.schedule}: one step on {job.actions.num_ranks} ranks"
    write(output / "timelines.svg", svg(expected, measured, names=names, title=title))
    write_environment(output)
    written = (
        "plan.json",
        "inputs.json",
        "actions.txt",
        *(f"{name}.json" for name in names),
        "timelines.svg",
        "environment.json",
    )
    logged = () if job.emulated else ("log.jsonl",)
    return [str(output / name) for name in (*written, *logged)]


def _inputs(job: Job) -> dict[str, Any]:
    """What a run was told beside its plan: enough to repeat it."""
    from dataclasses import asdict

    from wavetrain.runtime.job import NEVER

    document: dict[str, Any] = {"schema": "wavetrain.inputs/1", "steps": job.steps, "transport": job.transport}
    if job.emulated:
        return document | {"emulated": True}
    data = None if job.data is None else {"file": str(job.data), "bytes": job.data.stat().st_size}
    modules = "built in" if job.build is None else job.source
    learning = {"rate": asdict(job.rate), "adamw": asdict(job.adamw), "clip": None if job.clip == NEVER else job.clip}
    load = None if job.load is None else str(job.load)
    limit = {"load": load, "memory_limit_bytes": job.memory_limit}
    return document | {"seed": job.seed, "data": data, "modules": modules, "learning": learning} | limit


def pipeline_seconds(job: Job) -> float | None:
    """What the pipeline alone takes with the times that are emulated: no optimizer, no other replicas."""
    from wavetrain.schedule import Costs, evaluate

    if job.emulated is None or not job.is_one_pipeline:
        return None
    f, i, w = (tuple(getattr(durations, kind) for durations in job.emulated) for kind in "fiw")
    return float(evaluate(job.actions, Costs(f, i, w)).makespan)


def step_seconds(ends: list[list[float]]) -> float | None:
    """From one step to the next, by when the last rank ended each: the median; None of a single step."""
    from itertools import pairwise
    from statistics import median

    latest = [max(step) for step in zip(*ends, strict=True)]
    return median(b - a for a, b in pairwise(latest)) if len(latest) > 1 else None
