"""What a measured cluster takes from the catalog."""

import pytest

from wavetrain.study.assemble import like


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "h100-sxm-80gb"),  # which the catalog does not have
    ],
)
def test_a_device_is_like_the_one_of_its_name(title: str, name: str) -> None:
    assert like("cuda", title).name == name


def test_processors_are_like_the_catalogs_core() -> None:
    assert like("cpu", "one core of AMD EPYC").name == "cpu-host"
