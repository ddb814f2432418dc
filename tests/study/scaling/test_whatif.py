"""Other hardware: what each parameter changes, what scaling theory says of all together, and signs."""

import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "sim"))
from plans import GREEDY, model_of, plan_of, plans

from wavetrain.cluster import load_cluster
from wavetrain.cluster.cluster import Achieved
from wavetrain.cluster.laws import load_laws
from wavetrain.model import load_model
from wavetrain.plan.layout import Choice
from wavetrain.schedule import SCHEDULES
from wavetrain.sim.estimate import SCHEDULE_KINDS
from wavetrain.sim.predict import simulate
from wavetrain.study.scaling.whatif import CHANGES, OF_SPEED, PARAMETERS, elasticities

LATENCIES = ("link_latency", "network_latency")
NETWORK = ("network_bandwidth", "network_latency")
WHOLE = tuple(name for name in SCHEDULE_KINDS if name not in GREEDY and not SCHEDULES[name].split)
NODES = ("dgx-h100:4", "dgx-1-v100:2", "osdp-titan", "gb200-nvl72:8", "hanayo-pc")
KIND = Achieved("all_gather", efficiency=0.5, latency_s=3e-6, start_s=1e-5, ramp_s=2e-5)


def with_kinds(cluster):
    """The cluster with a kind of collective that has a rate and a latency of its own, inside and between nodes."""
    node = cluster.node
    tiers = tuple(replace(tier, kinds=(KIND,)) for tier in node.tiers)
    node = replace(node, tiers=tiers, network=node.network and replace(node.network, kinds=(KIND,)))
    return replace(cluster, groups=(replace(cluster.groups[0], node=node),))


# --- parameters ---


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_a_parameter_is_scaled_and_scaled_back(name, parameter):
    cluster = with_kinds(load_cluster(name))
    assert PARAMETERS[parameter](cluster, 1.0) == cluster
    there_and_back = PARAMETERS[parameter](PARAMETERS[parameter](cluster, 2.0), 0.5)
    assert there_and_back == cluster
    assert there_and_back.overlap == cluster.overlap
    assert there_and_back.own_laws == cluster.own_laws


def changed(one, other, path=""):
    """The numbers in which two values differ, by where they are, with their ratio."""
    if isinstance(one, tuple):
        return {name: ratio for pair in zip(one, other, strict=True) for name, ratio in changed(*pair, path).items()}
    if hasattr(one, "__dataclass_fields__"):
        found = {}
        for item in fields(one):
            found |= changed(getattr(one, item.name), getattr(other, item.name), f"{path}.{item.name}".lstrip("."))
        return found
    return {} if one == other else {path: other / one}


@pytest.mark.parametrize(
    ("parameter", "names"),
    [
        ("peak", {f"device.peak.{name}" for name in load_cluster("dgx-h100").device.peak.known()}),
        ("memory_rate", {"device.memory_bytes_per_s"}),
        ("memory_size", {"device.memory_bytes"}),
        ("price", {"device.usd_per_hour"}),
        ("link_bandwidth", {"tiers.bytes_per_s"}),
        ("link_latency", {"tiers.latency_s", "tiers.relay_s", "tiers.kinds.latency_s"}),
        ("network_bandwidth", {"network.nic_bytes_per_s"}),
        ("network_latency", {"network.latency_s", "network.kinds.latency_s"}),
    ],
)
def test_a_parameter_is_all_that_it_means_and_no_more(parameter, names):
    cluster = with_kinds(load_cluster("dgx-h100:4"))
    found = changed(cluster.node, PARAMETERS[parameter](cluster, 2.0).node)
    assert set(found) == names
    assert set(found.values()) == {2.0}


def test_direct_links_are_faster_in_pairs_too():
    cluster = load_cluster("dgx-1-v100")
    found = changed(cluster.node, PARAMETERS["link_bandwidth"](cluster, 2.0).node)
    assert found == {"tiers.bytes_per_s": 2.0, "tiers.pair_bytes_per_s": 2.0}


def test_a_kind_of_collective_is_as_much_faster_as_the_others():
    """An all-gather that has its own constants: elasticities do not pass it by."""
    cluster = with_kinds(load_cluster("dgx-h100:4"))
    plan = plan_of("llama2-7b", cluster, dp=32, global_batch=32, choice=Choice(32))
    found = elasticities(plan)
    assert found["network_latency"] < -1e-3
    assert found["link_latency"] < -1e-4


# --- elasticities ---


@settings(max_examples=25)
@given(plans(schedules=WHOLE))
def test_better_hardware_is_never_slower_and_all_of_it_at_most_in_proportion(plan):
    found = elasticities(plan)
    assert tuple(found) == OF_SPEED
    for name, value in found.items():
        least, most = (-1.0, 0.0) if name in LATENCIES else (0.0, 1.0)
        assert least - 1e-7 <= value <= most + 1e-7, name
    assert sum(map(abs, found.values())) <= 1 + 1e-3  # the rest is constants of software


@settings(max_examples=12)
@given(plans(schedules=WHOLE))
def test_they_are_what_is_simulated(plan):
    name = max(found := elasticities(plan), key=lambda name: abs(found[name]))
    faster = replace(plan, cluster=PARAMETERS[name](plan.cluster, 1.01))
    gained = simulate(faster).tokens_per_s / simulate(plan).tokens_per_s
    assert gained == pytest.approx(1.01 ** found[name], abs=2e-4)


def test_one_device_knows_no_network():
    plan = plan_of(model_of("gpt3-125m", 8), "dgx-h100:4", global_batch=4)
    found = elasticities(plan)
    assert all(found[name] == 0 for name in ("link_bandwidth", "link_latency", *NETWORK))
    assert found["peak"] + found["memory_rate"] > 0


def test_one_node_knows_no_network_between_nodes():
    plan = plan_of("llama2-7b", "dgx-h100", dp=8, global_batch=8, choice=Choice(8))
    found = elasticities(plan)
    assert all(found[name] == 0 for name in NETWORK)
    assert found["link_bandwidth"] > 0


# Seconds of software: with these and starts of collectives, all times there are.
SOFTWARE = ("gap_s", "launch_s", "tensor_host_s", "recompute_host_s", "recompute_gap_s", "message_s", "step_s")


def sooner(laws, factor):
    return replace(laws, **{name: getattr(laws, name) / factor for name in (*SOFTWARE, "tensor_step_s")})


def starting_sooner(cluster, factor):
    def change(links):
        kinds = tuple(replace(kind, start_s=kind.start_s / factor, ramp_s=kind.ramp_s / factor) for kind in links.kinds)
        return replace(links, start_s=links.start_s / factor, ramp_s=links.ramp_s / factor, kinds=kinds)

    node = cluster.node
    node = replace(node, tiers=tuple(map(change, node.tiers)), network=node.network and change(node.network))
    return replace(cluster, groups=(replace(cluster.groups[0], node=node),))


def all_faster(cluster, factor):
    for name in OF_SPEED:
        cluster = PARAMETERS[name](cluster, 1 / factor if name in LATENCIES else factor)
    return cluster


@settings(max_examples=25)
@given(plans(), st.sampled_from((2.0, 4.0)))
def test_all_parameters_and_the_software_twice_as_fast_are_twice_as_fast(plan, factor):
    """Nothing that takes time is forgotten: the parameters are all of the hardware."""
    faster = replace(plan, cluster=starting_sooner(all_faster(plan.cluster, factor), factor))
    found = simulate(faster, sooner(load_laws(), factor))
    assert found.tokens_per_s == pytest.approx(factor * simulate(plan).tokens_per_s, rel=1e-9)


def test_together_they_are_nearly_one_where_software_takes_no_time():
    quiet = sooner(load_laws(), 1e9)
    for name in ("dgx-h100:4", "p4d:4"):
        cluster = replace(starting_sooner(load_cluster(name), 1e9), own_laws=quiet)
        plan = plan_of(
            "llama2-7b", cluster, tp=2, pp=2, dp=8, global_batch=64, choice=Choice(8), schedule="interleaved", chunks=2
        )
        assert sum(map(abs, elasticities(plan).values())) == pytest.approx(1.0, abs=2e-3)


def test_small_models_wait_for_the_host():
    plan = plan_of(model_of("gpt3-125m", 8), "dgx-h100:4", dp=32, global_batch=32, seq_len=128)
    assert sum(map(abs, elasticities(plan).values())) < 0.5


def test_65536_devices_take_less_than_a_second():
    cluster = load_cluster("dgx-h100:8192")
    plan = plan_of(
        load_model("llama3-405b"),
        cluster,
        seq_len=8192,
        tp=8,
        sequence_parallel=True,
        pp=16,
        dp=512,
        global_batch=32768,
        shard_optimizer=True,
    )
    simulate(plan)
    begin = time.process_time()
    found = elasticities(plan)
    assert time.process_time() - begin < 1.0
    assert 0.5 < found["peak"] < 1


# --- changes ---


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_an_improvement(name, change):
    cluster = load_cluster(name)
    found = changed(cluster.node, CHANGES[change](cluster).node)
    better = {0.5} if change.endswith("/2") else {2.0}
    assert set(found.values()) == better or (cluster.node.network is None and change == "network_bandwidth x2")
    assert CHANGES[change](cluster).num_devices == cluster.num_devices


def test_changes_that_are_promised():
    assert set(CHANGES) == {
        "network_bandwidth x2",
        "link_bandwidth x2",
        "latency /2",
        "memory x2",
        "peak x2",
        "price /2",
    }


def test_half_the_latency_is_that_of_links_and_network():
    cluster = load_cluster("dgx-h100:4")
    found = changed(cluster.node, CHANGES["latency /2"](cluster).node)
    assert set(found) == {"tiers.latency_s", "tiers.relay_s", "network.latency_s"}


def test_changes_cross_processes():
    import pickle

    cluster = load_cluster("dgx-h100")
    again = pickle.loads(pickle.dumps(CHANGES["peak x2"]))
    assert again(cluster) == CHANGES["peak x2"](cluster)
