"""The catalog is data with a source beside each number."""

import pytest

from wavetrain.cluster import catalog_sources, device_names, load_cluster, node_names
from wavetrain.cluster.read import _entry

ASKED_DEVICES = """
v100-sxm2-16gb v100-sxm2-32gb a100-sxm-40gb a100-sxm-80gb h100-sxm-80gb h100-pcie-80gb h200 b200 gb200 mi250x mi300x
titan-rtx rtx-4090 a10g l4 cpu-host
""".split()
ASKED_NODES = """
dgx-a100 dgx-h100 dgx-b200 hgx-a100 hgx-h100 p4d p5 gb200-nvl72 hanayo-pc hanayo-fc hanayo-tacc hanayo-tc osdp-titan
osdp-a100 cpu-host
""".split()
ENTRIES = [("devices", name) for name in device_names()] + [("nodes", name) for name in node_names()]


def test_what_was_asked_for_is_there():
    assert set(ASKED_DEVICES) <= set(device_names())
    assert set(ASKED_NODES) <= set(node_names())


def numbers(value, key=""):
    """Every number of an entry, with its key and the source beside it."""
    if isinstance(value, dict) and "value" in value:
        yield key, value["value"], value.get("source")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, f"{key}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value, None


@pytest.mark.parametrize(("folder", "name"), ENTRIES)
def test_every_number_has_a_source(folder, name):
    entry = _entry(folder, name).plain()
    assert entry["name"] == name
    found = list(numbers(entry))
    assert found
    for key, _, source in found:
        assert source in catalog_sources(), key


def test_every_source_is_used():
    used = {source for folder, name in ENTRIES for _, _, source in numbers(_entry(folder, name).plain())}
    assert used == set(catalog_sources())


@pytest.mark.parametrize("name", node_names())
def test_every_node_is_a_cluster(name):
    cluster = load_cluster(name)
    assert cluster.num_devices == cluster.node.num_devices
    device = cluster.device
    assert 0 < device.matmul_efficiency <= 1
    assert device.memory_bytes > 2**30
    assert cluster.tiers == () or cluster.tiers[-1].size == cluster.num_devices
    assert {source.key.split(".")[0] for source in cluster.sources} == {"node"}


def test_published_specifications():
    """Peak rates and bandwidths as the vendors' data sheets state them (scaling.md, section 5)."""
    a100, h100, b200 = (load_cluster(name).device for name in ("dgx-a100", "dgx-h100", "dgx-b200"))
    assert (a100.peak.bf16, h100.peak.bf16, b200.peak.bf16) == (312e12, 989e12, 2250e12)
    assert (a100.memory_bytes_per_s, h100.memory_bytes_per_s) == (2039e9, 3350e9)
    assert load_cluster("v100-sxm2-32gb").device.peak.bf16 is None
