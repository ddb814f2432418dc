"""All ranks of a plan, emulated: they exchange what the simulator counts, and take what compute and network take."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.conftest import Ran
from tests.runtime.namespaces import at_least_once, needs_namespaces
from tests.runtime.plans import small_model
from tests.soak import sample

from wavetrain.base.errors import InputError
from wavetrain.cluster import Cluster, Group, load_cluster
from wavetrain.cluster.cluster import Achieved
from wavetrain.cluster.laws import load_laws
from wavetrain.commands.train_run import job_of
from wavetrain.cost.collective import Collective, Span, seconds
from wavetrain.plan import Choice, OperatorChoice, Plan, Request, plan_of, write_plan
from wavetrain.plan.emulation import Emulation, LayerWork
from wavetrain.runtime import emulator
from wavetrain.runtime.job import Job
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.trainer import train
from wavetrain.runtime.virtual import VirtualCluster, virtual_cluster
from wavetrain.runtime.world import World
from wavetrain.sim.emulation import emulation
from wavetrain.sim.predict import simulate

PAYLOAD = 1448 / 1514  # of a packet
RATE = 12.5e6


def cluster(hosts: int, devices: int, rate: float = RATE) -> Cluster:
    """Hosts whose software shows all of its communication, as gloo does; its reduce-scatter is an all-reduce."""
    node = load_cluster("cpu-host").node
    assert node.network is not None
    halved = Achieved("reduce_scatter", PAYLOAD / 2, 2e-4, 0.0, 0.0)
    own = {"nic_bytes_per_s": rate, "efficiency": PAYLOAD, "latency_s": 2e-4, "congestion": 0.0, "kinds": (halved,)}
    tiers = tuple(replace(tier, size=devices) for tier in node.tiers) if devices > 1 else ()
    node = replace(node, num_devices=devices, tiers=tiers, network=replace(node.network, **own))
    laws = replace(load_laws(), link_exposed=1.0, network_exposed=1.0, doubling=0.0)
    return Cluster(f"virtual:{hosts}", (Group(node, hosts),), own_laws=laws, overlap=())


def plan(
    hosts: int = 4, devices: int = 1, *, microbatches: int = 2, model: dict[str, Any] | None = None, **more: Any
) -> Plan:
    made = small_model(**{"blocks": 4, "hidden": 32, "vocab": 64} | (model or {}))
    ranks = hosts * devices
    batch = microbatches * ranks // more.get("pp", 1)
    asked = Request(model=made, cluster=cluster(hosts, devices), global_batch=batch, precision="fp32", **more)
    return plan_of(asked)


# --- what is exchanged ---

Told = list[tuple[str, int, int]]  # kind, bytes of the whole tensor, ranks of the group


@contextmanager
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Every collective of the emulator, in this process."""
    found: Told = []

    def note(kind: Collective, call: Callable[..., Any], *tensors: Any, group: Any = None, **more: Any) -> Any:
        found.append((kind.value, max(t.nbytes for t in tensors), dist.get_world_size(group)))
        return call(*tensors, group=group, **more)

    names = {"_gather": Collective.ALL_GATHER, "_reduce_scatter": Collective.REDUCE_SCATTER}
    for name, kind in (names | {"_all_reduce": Collective.ALL_REDUCE}).items():
        monkeypatch.setattr(emulator, name, partial(note, kind, getattr(emulator, name)))
    yield found


def exchanged(job: Job, monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What every rank exchanged in a step, without the loss."""

    def work(world: World) -> None:
        with told(monkeypatch) as found:
            train(job, world)
        found.remove(("all_reduce", 16, job.num_ranks))
        world.give(json.dumps(found).encode())

    results = run_local(work, job.num_ranks).check().results
    return [[(kind, size, group) for kind, size, group in json.loads(given)] for given in results]


def priced(found: Told, wanted: Plan, kind: str, *, group: int | None = None) -> float:
    """What the simulator's own law says of those of one kind."""
    total = 0.0
    for name, size, ranks in found:
        if name == kind and group in (None, ranks):
            stride = 1 if ranks == wanted.layout.dp or name != "all_reduce" else wanted.layout.dp // ranks
            total += float(seconds(Collective(name), size, Span(ranks, stride), wanted.cluster.tiers))
    return total


def quick(wanted: Plan, **more: Any) -> Job:
    """Its compute takes no time."""
    made = job_of(wanted, emulate=True, every_rank=True, steps=1, **more)
    assert made.emulation is not None
    stages = tuple(
        tuple(replace(layer, forward_s=0.0, input_s=0.0, weight_s=0.0) for layer in stage)
        for stage in made.emulation.stages
    )
    return replace(made, emulation=Emulation(stages))


def bucketed() -> Plan:
    made = plan()
    return replace(made, stack=replace(made.stack, bucket_bytes=20_000.0))


@pytest.mark.parametrize(
    "wanted",
    [
        plan(shard="dp"),
        plan(shard="dp", keep=True, microbatches=3),
        plan(shard="2"),
        plan(shard="dp", recompute="full"),
        plan(),
        bucketed(),
        plan(zero1=True),
    ],
    ids=["sharded", "kept", "groups", "recomputed", "replicated", "buckets", "states"],
)
def test_replicas_exchange_what_the_simulator_counts(wanted: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Priced by the simulator's law one by one they sum to its terms: in number and bytes they are the same."""
    terms = simulate(wanted).breakdown
    for found in exchanged(quick(wanted), monkeypatch):
        sharding = priced(found, wanted, "all_gather") + priced(found, wanted, "reduce_scatter")
        reduction = priced(found, wanted, "all_reduce")
        if wanted.layout.shard_optimizer:
            assert reduction == 0
            assert sharding == pytest.approx(terms["reduction"] + terms["gather"], rel=1e-3)
        else:
            assert sharding == pytest.approx(terms.get("sharding", 0.0), rel=1e-3)
            assert reduction == pytest.approx(terms.get("reduction", 0.0), rel=1e-3)


def test_an_operator_that_is_cut_travels_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its pieces, over each microbatch; all others are whole, and reduced together."""
    alone = OperatorChoice("decoder", "layers.{}.mlp.up", Choice(shard=4, slices=2))
    whole = (OperatorChoice(layer, "*", Choice()) for layer in ("embedding", "decoder", "head"))
    wanted = replace(plan(), choices=(alone, *whole))
    own = 4 * (32 * 64 + 64)  # bytes of a weight and a bias
    blocks, microbatches, rest = 4, 2, 4 * wanted.model.num_parameters - 4 * own
    for found in exchanged(quick(wanted), monkeypatch):
        assert Counter(found) == {
            ("all_gather", own // 2, 4): 2 * 2 * blocks * microbatches,
            ("reduce_scatter", own // 2, 4): 2 * blocks * microbatches,
            ("all_reduce", rest, 4): 1,
        }


def test_gradients_leave_layer_by_layer_where_they_do_beside_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last backward only, from the head to the embedding; the bytes are those that would leave together."""
    wanted = plan(overlap=("gradients",))
    work = emulation(wanted).stages[0]
    for found in exchanged(quick(wanted), monkeypatch):
        assert found == [("all_reduce", 4 * layer.replicated, 4) for layer in reversed(work)]
        together = exchanged(quick(plan()), monkeypatch)[0]
        assert [sum(size for _, size, _ in found)] == [size for _, size, _ in together]


def test_stages_exchange_their_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage gathers the embedding, once per microbatch; no rank waits for the head's shards."""
    wanted = plan(2, 2, pp=2, shard="dp", microbatches=3)
    stages = emulation(wanted).stages
    embedding, block = stages[0][0].sharded[0].elements * 4, stages[1][0].sharded[0].elements * 4
    rows = exchanged(quick(wanted, transport="gloo"), monkeypatch)
    ends = {0: Counter({("all_gather", embedding, 2): 3, ("reduce_scatter", embedding, 2): 3}), 1: Counter()}
    own = Counter({("all_gather", block, 2): 2 * 2 * 3, ("reduce_scatter", block, 2): 2 * 3})
    for rank, found in enumerate(rows):
        assert Counter(found) == own + ends[rank // 2]


@pytest.mark.parametrize("schedule", sample(["zb-h1", "wave", "interleaved", "chimera"], 2))
def test_any_schedule_runs(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plan(2, 2, pp=2, shard="dp", microbatches=4, schedule=schedule, model={"blocks": 8})
    job = quick(wanted)
    blocks = 8 * (2 if schedule == "chimera" else 1) // 2
    passes = 4 // (2 if schedule == "chimera" else 1)
    sizes = {layer.sharded[0].elements * 4 for stage in emulation(wanted).stages for layer in stage[1:-1]}
    for found in exchanged(job, monkeypatch):
        mine = [kind for kind, size, _ in found if size in sizes]
        assert Counter(mine) == {"all_gather": 2 * blocks * passes, "reduce_scatter": blocks * passes}


# --- what it takes ---


def paced(stages: int, *, layers: int, layer_s: float, travel: Any) -> tuple[tuple[LayerWork, ...], ...]:
    return ((LayerWork(layer_s, layer_s, layer_s, (travel,)),) * layers,) * stages


@needs_namespaces
def test_a_step_takes_its_compute_and_its_bytes() -> None:
    """Two replicas of two stages on two hosts; one microbatch, so that whatever is done is done one after the other."""
    wanted = plan(2, 2, pp=2, shard="dp", microbatches=1, model={"hidden": 96, "seq_len": 128})
    wanted = replace(wanted, layout=replace(wanted.layout, pp_inside=True))  # stages are neighbours, replicas apart
    layers, layer_s = 2, 0.08
    travel = emulation(wanted).stages[1][0].sharded[0]
    made = job_of(wanted, emulate=True, every_rank=True, steps=4, transport="gloo")
    stages = paced(2, layers=layers, layer_s=layer_s, travel=travel)
    job = replace(made, emulation=Emulation(stages, optimizer_s=0.03, host_s=0.01))

    def work(world: World) -> None:
        ends = {rank: record.step_ends_s for rank, record in train(job, world).items()}
        world.give(json.dumps(ends).encode())

    def step_s(hosts: VirtualCluster) -> float:
        ends = json.loads(hosts.run(work, 4).check().results[0])
        latest = [max(step) for step in zip(*ends.values(), strict=True)]
        return float(min(b - a for a, b in pairwise(latest)))

    whole_s = 4 * travel.elements / (RATE * PAYLOAD)
    # Gathered twice, half of it from the other (gloo may take half as long again: the two ways share a connection, and
    # what says that a receive is posted stands behind what is sent); gloo's scatter is an all-reduce.
    exchanged_s = whole_s / 2 + whole_s / 2 + whole_s
    expected_s = 2 * layers * (3 * layer_s + exchanged_s) + 0.04
    assert exchanged_s > 0.15 * 3 * layer_s  # what is left out or done twice shows
    with virtual_cluster(2, rate_bytes_per_s=RATE) as hosts:
        rates = 1 / (1.15 * expected_s), 1 / (0.98 * expected_s)
        at_least_once(lambda: 1 / step_s(hosts), least=rates[0], most=rates[1])


# --- as users see it ---


def test_all_ranks_are_compared_with_the_whole_prediction(run: Callable[..., Ran], tmp_path: Path) -> None:
    wanted = plan(2, 2, pp=2, shard="dp")
    file = tmp_path / "plan.json"
    file.write_text(write_plan(wanted))
    ran = run("train", str(file), "--local", "4", "--steps", "3", "--emulate", "--json", "-o", str(tmp_path / "out"))
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert (document["ranks"], document["emulated"], document["losses"]) == (4, True, [])
    assert document["predicted"]["step_s"] == pytest.approx(simulate(wanted).step_s)
    least = emulation(wanted)
    assert document["step_s"] > least.optimizer_s + least.host_s + sum(
        layer.forward_s + layer.input_s + layer.weight_s for layer in least.stages[0]
    )
    alone = json.loads(run("train", str(file), "--local", "2", "--steps", "2", "--emulate", "--json").out)
    assert alone["ranks"] == 2
    assert alone["predicted"]["step_s"] < simulate(wanted).step_s  # no optimizer
    ran = run("train", str(file), "--local", "3", "--emulate")
    assert ran.code == 2
    assert "the plan runs on 2 or 4 ranks" in ran.err


@needs_namespaces
def test_a_plan_runs_on_virtual_hosts_with_its_own_network(run: Callable[..., Ran], tmp_path: Path) -> None:
    wanted = plan(2, 1, shard="dp", model={"hidden": 96})
    file = tmp_path / "plan.json"
    file.write_text(write_plan(wanted))
    ran = run("train", str(file), "--local", "2", "--steps", "3", "--emulate", "--virtual", "--json")
    assert ran.code == 0, ran.err
    predicted = simulate(wanted)
    assert predicted.breakdown["sharding"] > 0.9 * predicted.step_s
    assert json.loads(ran.out)["step_s"] > 0.95 * predicted.step_s  # through memory it would take a tenth


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--local", "4", "--virtual"], ["--virtual", "means nothing without --emulate"]),
        (["--local", "2", "--virtual", "--emulate"], ["virtual hosts have all ranks of a plan", "try: --local 4"]),
    ],
)
def test_what_virtual_hosts_can_not_do_is_refused(
    run: Callable[..., Ran], tmp_path: Path, options: list[str], words: list[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(write_plan(plan(2, 2, pp=2)))
    ran = run("train", str(file), *options)
    assert ran.code == 2
    assert all(word in ran.err for word in words), ran.err


def test_layers_that_are_cut_are_refused() -> None:
    wanted = plan(1, 4, pp=2, tp=2)
    with pytest.raises(InputError, match="all ranks are emulated without tensor"):
        job_of(wanted, emulate=True, every_rank=True, steps=1)
    assert job_of(wanted, emulate=True, steps=1).num_ranks == 2
