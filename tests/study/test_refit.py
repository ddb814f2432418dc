"""Constants that are scaled to a run: the run is predicted afterwards, whatever was off before."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.plans import small_model, small_plan
from tests.soak import sample
from tests.study.runs import run_of

from wavetrain.base.errors import InputError
from wavetrain.cluster import load_cluster
from wavetrain.cluster.cluster import Achieved, Cluster, Group
from wavetrain.cluster.write import write_cluster
from wavetrain.plan import Plan, Request, plan_of
from wavetrain.sim.predict import simulate
from wavetrain.study.compare import compare
from wavetrain.study.refit import AGREED, Factors, refit, scaled

MODEL = small_model(blocks=8, hidden=1024, heads=16, vocab=4096, seq_len=512)


def planned(cluster: str, part: int | None = None, **layout) -> Plan:
    machines = load_cluster(cluster)
    machines = machines if part is None else machines.part(part)
    return plan_of(Request(model=MODEL, cluster=machines, global_batch=16, **layout))


PLANS = {
    "replicas": planned("dgx-h100:1", dp=8),
    "replicas on nodes": planned("dgx-a100:2", dp=16),
    "shards": planned("dgx-h100:1", dp=8, shard="dp"),
    "shards in nodes": planned("dgx-a100:2", dp=16, shard="8"),
    "parts": planned("dgx-h100:1", 4, tp=4, dp=1),
    "parts along the sequence": planned("dgx-h100:1", 4, tp=4, dp=1, sequence_parallel=True),
    "pipeline": planned("dgx-h100:1", 4, pp=4, dp=1),
    "messages beside compute": planned("dgx-h100:1", 4, pp=4, dp=1, overlap=("messages",)),
    "waves": planned("dgx-h100:1", 4, pp=4, dp=1, waves=1),
    "recomputed": planned("dgx-h100:1", 2, pp=2, dp=1, recompute="full"),
    "pipelines of shards": planned("dgx-a100:2", pp=2, dp=8, shard="dp"),
}
EVERY = ("all_reduce", "all_gather", "reduce_scatter", "send")


def elsewhere(cluster: Cluster, off: dict[str, float]) -> Cluster:
    """Other hardware and software: rates of products and streams, of links, and hosts, each off by its own factor."""
    node, laws = cluster.node, cluster.laws
    device = replace(node.device, memory_bytes_per_s=node.device.memory_bytes_per_s / off["memory"])
    device = replace(device, matmul_efficiency=node.device.matmul_efficiency / off["products"])

    def links(one):
        rate = one.efficiency / off["links"]
        kinds = tuple(Achieved(kind, rate, one.latency_s * off["latency"], one.start_s, one.ramp_s) for kind in EVERY)
        return replace(one, kinds=kinds)

    own = replace(node, device=device, tiers=tuple(map(links, node.tiers)))
    own = replace(own, network=None if node.network is None else links(node.network))
    changed = {"optimizer_bytes": laws.optimizer_bytes * off["optimizer"], "step_s": laws.step_s * off["host"]}
    changed |= {"message_s": laws.message_s * off["latency"], "launch_s": laws.launch_s * off["host"]}
    groups = tuple(Group(own, group.count) for group in cluster.groups)
    return replace(cluster, groups=groups, own_laws=replace(laws, **changed))


def measured(plan: Plan, off: dict[str, float]):
    there = replace(plan, cluster=elsewhere(plan.cluster, off))
    return run_of(plan, simulate(there))


FACTOR = st.floats(0.3, 8.0)
OFF = st.fixed_dictionaries(dict.fromkeys(("memory", "products", "links", "latency", "optimizer", "host"), FACTOR))


@pytest.mark.parametrize("name", sample(PLANS, 4))
@given(off=OFF)
@settings(max_examples=8)
def test_a_refitted_cluster_predicts_the_run(name, off):
    plan = PLANS[name]
    run = measured(plan, off)
    found = refit(plan, compare(plan, simulate(plan), run))
    again = compare(replace(plan, cluster=found.cluster), found.prediction, run)
    for pair in again.terms:
        separable = pair.name not in ("bubble", "stragglers") and not any(pair.name in left for left in found.left)
        if separable:
            assert pair.measured == pytest.approx(pair.predicted, rel=0.02), pair
    assert again.step.ratio == pytest.approx(1, abs=0.02)


def test_a_run_far_from_its_prediction_is_reached():
    """A plan for GPUs on CPUs: thousands of times slower, and links too."""
    plan = small_plan(pp=2, schedule="1f1b")
    terms = {"compute": 2.0, "transfer": 5.0, "bubble": 1.0, "optimizer": 0.5, "host": 0.25}
    run = run_of(plan, simulate(plan), terms=(terms,) * 2, step_s=8.75)
    found = refit(plan, compare(plan, simulate(plan), run))
    for name in ("compute", "transfer", "optimizer", "host"):
        assert found.prediction.breakdown[name] == pytest.approx(terms[name], rel=2 * AGREED)


def test_a_refitted_cluster_can_be_written_and_read(tmp_path):
    for name in ("pipeline", "shards in nodes"):
        plan = PLANS[name]
        off = {"memory": 2.0, "products": 3000.0, "links": 5000.0, "latency": 100.0, "optimizer": 9.0, "host": 2.0}
        run = measured(plan, dict(off, products=3.0))
        found = refit(plan, compare(plan, simulate(plan), run))
        write_cluster(found.cluster, tmp_path / "cluster.yaml")
        again = load_cluster(str(tmp_path / "cluster.yaml"))
        assert simulate(replace(plan, cluster=again)).step_s == pytest.approx(run.step_s, rel=0.02)


def test_changes_are_stated_and_nothing_else_changes():
    plan = PLANS["replicas"]
    off = dict.fromkeys(("memory", "products", "links", "latency", "optimizer"), 1.0) | {"host": 3.0}
    run = measured(plan, off)
    stated = {
        change.name: change.new / change.old for change in refit(plan, compare(plan, simulate(plan), run)).changes
    }
    assert stated["laws.step_s"] == pytest.approx(3.0, rel=0.01)
    assert all(name.startswith(("laws.", "device.", "nvlink.")) for name in stated)
    assert not any("send" in name or "all_gather" in name for name in stated)


def test_links_that_a_plan_does_not_use_stay():
    plan = planned("dgx-a100:2", pp=2, dp=8, shard="dp")  # shards inside a node, messages between nodes
    run = measured(plan, {"memory": 1.0, "products": 1.0, "links": 4.0, "latency": 2.0, "optimizer": 1.0, "host": 1.0})
    node = refit(plan, compare(plan, simulate(plan), run)).cluster.node
    assert {one.kind for one in node.tiers[0].kinds} == {"all_gather", "reduce_scatter"}
    assert {one.kind for one in node.network.kinds} == {"send"}


def test_what_cannot_be_fitted_is_said():
    plan = planned("dgx-h100:1", tp=2, dp=4)
    prediction = simulate(plan)
    terms = dict(prediction.breakdown) | {"context": 0.1}
    terms["tensor"] *= 2
    run = run_of(plan, prediction, terms=(terms,), step_s=sum(terms.values()))
    found = refit(plan, compare(plan, prediction, run))
    assert found.prediction.breakdown["tensor"] == pytest.approx(terms["tensor"], rel=0.01)
    assert [left.partition(":")[0] for left in found.left] == ["context", "reduction"]


def test_an_optimizer_that_takes_tensors_one_by_one_is_scaled_as_a_whole():
    plan = PLANS["replicas"]
    laws = replace(plan.cluster.laws, tensor_step_s=2e-5)
    plan = replace(plan, cluster=replace(plan.cluster, own_laws=laws))
    slower = replace(laws, tensor_step_s=3 * laws.tensor_step_s, optimizer_bytes=3 * laws.optimizer_bytes)
    run = run_of(plan, simulate(replace(plan, cluster=replace(plan.cluster, own_laws=slower))))
    found = refit(plan, compare(plan, simulate(plan), run))
    changed = {change.name: change.new / change.old for change in found.changes}
    assert changed == {name: pytest.approx(3.0, rel=0.01) for name in ("laws.optimizer_bytes", "laws.tensor_step_s")}


def test_terms_that_do_not_come_to_agree_are_said():
    plan = PLANS["replicas"]
    prediction = simulate(plan)
    terms = dict(prediction.breakdown)
    terms["optimizer"] *= 1e8  # no factor is as large
    run = run_of(plan, prediction, terms=(terms,), step_s=sum(terms.values()))
    found = refit(plan, compare(plan, prediction, run))
    assert [left.partition(":")[0] for left in found.left] == ["optimizer"]
    assert found.prediction.breakdown["optimizer"] < 0.1 * terms["optimizer"]


def test_sums_of_gradients_are_scattered_where_states_are_cut():
    plan = planned("dgx-h100:1", dp=8, zero1=True)
    prediction = simulate(plan)
    terms = dict(prediction.breakdown)
    terms["reduction"] *= 2
    run = run_of(plan, prediction, terms=(terms,), step_s=sum(terms.values()))
    found = refit(plan, compare(plan, prediction, run))
    assert found.prediction.breakdown["reduction"] == pytest.approx(terms["reduction"], rel=2 * AGREED)
    assert {one.kind for one in found.cluster.node.tiers[0].kinds} == {"reduce_scatter"}


def test_scaling_everything_by_one_changes_nothing():
    plan = PLANS["pipelines of shards"]
    assert simulate(replace(plan, cluster=scaled(plan.cluster, Factors()))).step_s == simulate(plan).step_s


def test_mixed_nodes_are_refused():
    plan = PLANS["replicas"]
    found = compare(plan, simulate(plan), run_of(plan, simulate(plan)))
    node = plan.cluster.node
    groups = (Group(node, 1), Group(replace(node, host_w=1.0), 1))
    with pytest.raises(InputError, match="several kinds"):
        refit(replace(plan, cluster=replace(plan.cluster, groups=groups)), found)
