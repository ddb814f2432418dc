import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.errors import InputError
from wavetrain.cluster import Cluster, load_cluster, node_names, write_cluster

MINE = """\
name: lab
nodes: 4
node:
  like: dgx-a100
  device: {like: a100-sxm-80gb, usd_per_hour: 1.2}
  network: {nic_gbit_per_s: 100}
"""
OWN = """\
name: own
nodes: 2
devices: 2
device:
  name: gizmo
  peak_tflops: {bf16: 100}
  memory_gib: 16
  memory_gb_per_s: 500
  efficiency: {matmul: 0.7, memory: 0.8}
  idle_w: 10
  busy_w: 90
  limit_w: 100
  usd_per_hour: 0.5
tiers:
  - {name: pcie, size: 2, gb_per_s: 30, latency_us: 5}
network: {name: ethernet, nics: 1, nic_gbit_per_s: 25, latency_us: 30}
"""
MIXED = """\
groups:
  - {nodes: 2, node: dgx-a100}
  - {nodes: 3, node: {like: dgx-h100, host_w: 1000}}
"""


def read(tmp_path, text: str, name: str = "c.yaml") -> Cluster:
    path = tmp_path / name
    path.write_text(text)
    return load_cluster(path)


def test_names_with_a_number_of_nodes():
    cluster = load_cluster("dgx-h100:32")
    assert (cluster.num_nodes, cluster.num_devices, cluster.device.name) == (32, 256, "h100-sxm-80gb")
    assert [(tier.name, tier.size) for tier in cluster.tiers] == [("nvlink", 8), ("infiniband", 256)]
    assert cluster.usd_per_hour == pytest.approx(256 * cluster.device.usd_per_hour)
    assert cluster.busy_w == pytest.approx(256 * 658 + 32 * cluster.node.host_w)


def test_sharing_of_nics():
    assert load_cluster("p4d:2").tiers[-1].sharers == 2  # 8 devices on 4 NICs
    assert load_cluster("dgx-h100:2").tiers[-1].sharers == 1
    p5 = load_cluster("p5:2").tiers[-1]  # 32 NICs of 100 Gbit/s for 8 devices
    assert (p5.bytes_per_s, p5.sharers) == (50e9, 1)


def test_a_link_domain_wider_than_a_node():
    assert [(t.name, t.size) for t in load_cluster("gb200-nvl72:18").tiers] == [("nvlink", 72)]
    wide = load_cluster("gb200-nvl72:36").tiers
    assert [(t.name, t.size) for t in wide] == [("nvlink", 72), ("infiniband", 144)]


def test_own_files_override_anything(tmp_path):
    lab, dgx = read(tmp_path, MINE), load_cluster("dgx-a100:4")
    assert lab.device.usd_per_hour == 1.2
    assert lab.device.memory_bytes == dgx.device.memory_bytes
    assert lab.tiers[-1].bytes_per_s == 12.5e9
    assert lab.tiers[0] == dgx.tiers[0]
    other = read(tmp_path, MINE.replace("a100-sxm-80gb", "h100-sxm-80gb"))
    assert other.device.peak.bf16 == 989e12
    refined = read(tmp_path, "nodes: 2\nnode: {like: dgx-a100, device: {memory_gib: 40}}\n")
    assert (refined.device.memory_bytes, refined.device.name) == (40 * 2**30, "a100-sxm-80gb")


def test_own_hardware(tmp_path):
    own = read(tmp_path, OWN)
    assert (own.num_devices, own.device.peak.bf16, own.tiers[1].sharers) == (4, 100e12, 2)


def test_an_oversubscribed_fabric_is_a_tier_of_its_own(tmp_path):
    text = MINE.replace("100}", "100, pod_nodes: 2, oversubscription: 7}")
    tiers = read(tmp_path, text).tiers
    assert [(t.name, t.size) for t in tiers] == [("nvlink", 8), ("infiniband", 16), ("infiniband-spine", 32)]
    assert tiers[2].bytes_per_s == pytest.approx(tiers[1].bytes_per_s / 7)


def test_mixed_nodes_are_described(tmp_path):
    mixed = read(tmp_path, MIXED)
    assert (mixed.num_nodes, mixed.num_devices, mixed.is_uniform) == (5, 40, False)
    assert mixed.tiers[0].bytes_per_s == 25e9  # the slower of the two networks
    with pytest.raises(ValueError, match="2 kinds"):
        _ = mixed.device
    pods = "{like: %s, network: {pod_nodes: %d, oversubscription: 4}}"
    for pod, slower in ((100, 1), (1, 4)):
        text = f"groups:\n  - node: {pods % ('dgx-a100', pod)}\n  - node: {pods % ('dgx-2', pod)}\n"
        assert read(tmp_path, text).tiers[0].bytes_per_s == pytest.approx(12.5e9 / slower)
    racks = read(tmp_path, "groups:\n  - {nodes: 2, node: gb200-nvl72}\n  - {node: dgx-h100}\n")
    assert [tier.name for tier in racks.tiers] == ["infiniband"]


@pytest.mark.parametrize("text", [MINE, OWN, MIXED])
def test_written_files_read_back_equal(tmp_path, text):
    cluster = read(tmp_path, text)
    path = tmp_path / "written.yaml"
    write_cluster(cluster, path)
    assert load_cluster(path) == cluster


@pytest.mark.parametrize("name", ["1e3", "0o17", "true", "null", "12", "é: #", "- x"])
def test_names_that_look_like_something_else_survive(tmp_path, name):
    quoted = json.dumps(name)
    text = f"name: {quoted}\nnodes: 2\nnode: {{like: dgx-a100, host_w: {{value: 5, source: {quoted}}}}}\n"
    cluster = read(tmp_path, text)
    write_cluster(cluster, tmp_path / "written.yaml")
    assert load_cluster(tmp_path / "written.yaml") == cluster
    assert cluster.name == name


def test_a_stated_number_has_the_source_stated_with_it(tmp_path):
    text = "node: {like: dgx-a100, device: {memory_gib: {value: 40, note: mine}}}\n"
    assert "node.device.memory_gib" not in {source.key for source in read(tmp_path, text).sources}


def test_one_group_keeps_its_sources(tmp_path):
    cluster = read(tmp_path, "groups:\n  - {nodes: 2, node: dgx-a100}\n")
    write_cluster(cluster, tmp_path / "written.yaml")
    assert load_cluster(tmp_path / "written.yaml") == cluster
    assert cluster.sources


def test_a_file_may_be_a_node_like_another(tmp_path):
    cluster = read(tmp_path, "like: dgx-a100\nnodes: 3\nhost_w: 7\n")
    assert (cluster.num_devices, cluster.node.host_w, cluster.device.name) == (24, 7, "a100-sxm-80gb")


@given(st.sampled_from(node_names()), st.floats(0.01, 1e4), st.floats(0.01, 1e4))
def test_measured_numbers_read_back_equal(tmp_path_factory, name, bandwidth, latency):
    directory = tmp_path_factory.mktemp("cluster")
    network = f"{{name: e, nics: 1, nic_gbit_per_s: {bandwidth:.9g}, latency_us: {latency:.9g}}}"
    (directory / "a.yaml").write_text(f"node:\n  like: {name}\n  network: {network}\n")
    cluster = load_cluster(directory / "a.yaml")
    write_cluster(cluster, directory / "b.yaml")
    assert load_cluster(directory / "b.yaml").groups == cluster.groups  # the name is the file's


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        (MINE.replace("dgx-a100", "dgx-a10"), "node.like", "nearest: dgx-a100"),
        (MINE.replace("nodes: 4", "nodes: 0"), "nodes", "from 1 to"),
        (MINE.replace("nodes: 4", "nods: 4"), "nods", "nearest: nodes"),
        (MINE.replace("nic_gbit", "nic_gibt"), "node.network.nic_gibt_per_s", "nearest: nic_gbit_per_s"),
        (MINE.replace("1.2", "-1"), "node.device.usd_per_hour", "from 0 to"),
        (OWN.replace("size: 2", "size: 1"), "tiers[0].size", "from 2 to"),
        (OWN.replace("devices: 2\n", "devices: 4\n"), "tiers", "joins 2 devices, but a node has 4"),
        (OWN.replace("busy_w: 90", "busy_w: 900"), "device.busy_w", "must not fall"),
        ("node: {like: dgx-a100, devices: 4}\n", "node.devices", "joins 8 devices, but a node has 4"),
        ("node: {like: dgx-a100, device: {limit_w: 100}}\n", "node.device.limit_w", "must not fall"),
        ("node: {like: gb200-nvl72, network: {pod_nodes: 16}}\nnodes: 36\n", "node.network", "at least the 72"),
        ("node: {like: dgx-a10, devices: -16}\n", "node.devices", "from 1 to"),
        ("groups: [{node: dgx-a100}]\nnodes: 3\n", "nodes", "one or the other"),
        (OWN.replace("tiers:\n  - {name: pcie, size: 2, gb_per_s: 30, latency_us: 5}\n", ""), "tiers", "missing"),
        (OWN.replace("{bf16: 100}", "{}"), "device.peak_tflops", "at least one rate"),
        (OWN.replace("bf16", "bf61"), "device.peak_tflops.bf61", "nearest: bf16"),
        (OWN.replace("matmul: 0.7", "matmul: 70"), "device.efficiency.matmul", "from 0.001 to 1"),
        (OWN.replace("network: {", "network: {oversubscription: 3, "), "network.pod_nodes", "missing"),
        (OWN[: OWN.index("network")], "network", "there can be only one"),
        ("nodes: 3\nnode: hanayo-pc\n", "network", "there can be only one"),
        ("nodes: 3\n", "device", "missing"),
        ("groups: []\n", "groups", "1 to 1,000 items"),
        ("groups:\n  - {nods: 2, node: dgx-a100}\n", "groups[0].nods", "nearest: nodes"),
        ("node: 3\n", "node", "a name or a mapping"),
        ("schema: 3\nnode: dgx-a100\n", "schema", "unknown key"),
    ],
)
def test_bad_files(tmp_path, text, key, says):
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert key in [problem.key for problem in caught.value.problems]
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dgx-h100:0", "number of nodes"),
        ("dgx-h100:many", "number of nodes"),
        ("dgx-h100:", "number of nodes"),
        ("dgx-h100:99999999999999999999", "number of nodes"),
        ("dgx-h10:4", "nearest: dgx-h100"),
        ("h100-sxm-80gb:8", "dgx-h100"),
        ("nowhere.yaml", "no such file"),
    ],
)
def test_bad_names(name, says):
    with pytest.raises(InputError, match=says):
        load_cluster(name)


def test_a_directory_is_no_cluster(tmp_path):
    with pytest.raises(InputError, match="directory"):
        load_cluster(tmp_path)


def test_what_steps_and_transfers_hide_of_each_other_is_a_share(tmp_path):
    file = tmp_path / "c.yaml"
    kinds = "name: lab\nnodes: 2\nnode:\n  like: dgx-a100\n  network: {{collectives: {{all_gather: {{hidden: {}}}}}}}\n"
    file.write_text(kinds.format(0.5))
    (own,) = load_cluster(file).node.network.kinds
    assert own.hidden == 0.5
    write_cluster(load_cluster(file), tmp_path / "again.yaml")
    assert load_cluster(tmp_path / "again.yaml").node.network.kinds == (own,)
    file.write_text(kinds.format(2))
    with pytest.raises(InputError, match="hidden"):
        load_cluster(file)
