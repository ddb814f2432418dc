"""Published series of scaling that the predictions meet, and the list of those that they do not."""

import pytest

from wavetrain.study.claims import series

MET = {
    "Throughput per device, 7B FSDP, 2 sequences per device, 128 to 2,048 devices": 5.0,
    "Power per device, 7B FSDP, 2 sequences per device, 128 to 2,048 devices": 3.2,
    "Throughput per device, MosaicML 7B FSDP, 128 to 512 devices": 5.0,
    "Throughput per device, MaxText 70B BF16, 64 to 2,048 devices": 5.0,
    "Throughput per device, Pax 175B FP8, shard group 128, 128 to 2,048 devices": 5.0,
    "Throughput per device, NeMo 70B TP4 PP4 VP5 CP2, 64 to 2,048 devices": 5.0,
    "Throughput per device, nanotron TP8 to TP16, 8 to 16 devices": 5.0,
    "Throughput per device, MegaScale 175B, batch 768 in all, 256 to 1,024 devices": 5.0,
    "Throughput per device, Llama 3 405B, batch 2,048 in all, 8,192 to 16,384 devices": 5.0,
}
KNOWN = {
    "Throughput per device, 7B FSDP, 1 sequence per device, 128 to 2,048 devices",  # so it was not one sequence
    "Throughput per device, MaxText 70B FP8, 64 to 2,048 devices",
    "Throughput per device, nanotron replicas only, 8 to 256 devices",
}


def test_loss_at_scale():
    found = {claim.text: claim for claim in series.series_claims()}
    for text, tolerance in MET.items():
        assert found[text].ours == pytest.approx(found[text].published, abs=tolerance), text
    assert {text for text, claim in found.items() if not claim.holds} <= KNOWN


def test_fsdp_of_7b_loses_a_third_and_little_power_from_128_to_2048():
    assert -45 <= series.loss(series.FERNANDEZ, 128, 2048) <= -30
    assert -9 <= series.power_loss(series.FERNANDEZ, 128, 2048) <= -3


def test_sharding_inside_the_node_wins_back_at_2048_what_sharding_over_all_loses():
    lost = series.recovery()
    assert lost["sharded in the node"] > 0.4 * lost["sharded over all"]  # most of it is won back
